"""The exceptions of the library: the failure, its place, and the remedy.

Every error carries a stable ``code`` (``docs/`` lists them all), a ``detail`` that tells where it happened (state
name, key group, checkpoint id, file, position) and a ``hint`` that tells what to do. No message ever holds a user's
value.

>>> error = UsageError("no current key is set", detail="state 'sum'", hint="call set_current_key(key) first")
>>> print(error)
no current key is set (state 'sum'). Hint: call set_current_key(key) first [USAGE]
>>> errors = (StateBackendError, UsageError, ClosedError, KeyGroupError, StateMigrationError, CorruptCheckpointError)
>>> [error.default_code for error in errors]
['STATE_BACKEND', 'USAGE', 'CLOSED', 'KEY_GROUP', 'STATE_MIGRATION', 'CORRUPT_CHECKPOINT']
>>> errors = (CommitConflictError, BatchGapError, HostError, MutationError, BackendUnavailableError, MemoryLimitError)
>>> [error("what went wrong").code for error in errors]
['COMMIT_CONFLICT', 'BATCH_GAP', 'HOST', 'MUTATION', 'BACKEND_UNAVAILABLE', 'MEMORY_LIMIT']
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

__all__ = [
    "BackendUnavailableError",
    "BatchGapError",
    "ClosedError",
    "CommitConflictError",
    "CorruptCheckpointError",
    "HostError",
    "KeyGroupError",
    "MemoryLimitError",
    "MutationError",
    "SerializationError",
    "SerializationRangeError",
    "SerializationTypeError",
    "StateBackendError",
    "StateMigrationError",
    "StoreError",
    "UsageError",
]


class StateBackendError(Exception):
    """Base class of every error that the library raises on purpose."""

    default_code: ClassVar[str] = "STATE_BACKEND"
    default_hint: ClassVar[str | None] = None

    def __init__(
        self,
        message: str = "",
        *,
        code: str | None = None,
        detail: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else code
        self.detail = detail
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        text = self.message
        if self.detail:
            text += f" ({self.detail})"
        if self.hint:
            text += f". Hint: {self.hint}"
        return f"{text} [{self.code}]"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception.__reduce__ would call the class with the message alone, so the rest travels as state.
        return _rebuild, (type(self), self.message), dict(self.__dict__)

    def at(self, where: str) -> StateBackendError:
        """Put ``where`` in front of the detail and return the error, for re-raising from an outer layer.

        >>> print(SerializationError("null key", detail="position 3").at("state 'sum'"))
        null key (state 'sum', position 3) [SERIALIZATION]
        """
        self.detail = f"{where}, {self.detail}" if self.detail else where
        return self


def _rebuild(cls: type[StateBackendError], message: str) -> StateBackendError:
    # Subclasses may require other arguments, so __init__ is not called; the state restores the attributes.
    error = cls.__new__(cls, message)
    error.args = (message,)
    return error


class UsageError(StateBackendError):
    """The call is not allowed here: no current key, a released mark, an argument that makes no sense."""

    default_code = "USAGE"


class usage:
    """Errors of wrong use by kind: ``usage.option("...")`` is a `UsageError` with the code ``USAGE.OPTION``."""

    address = partial(UsageError, code="USAGE.ADDRESS")
    aggregate = partial(UsageError, code="USAGE.AGGREGATE")
    argument = partial(UsageError, code="USAGE.ARGUMENT")
    checkpoint_id = partial(UsageError, code="USAGE.CHECKPOINT_ID")
    clock = partial(UsageError, code="USAGE.CLOCK")
    column = partial(UsageError, code="USAGE.COLUMN")
    descriptor = partial(UsageError, code="USAGE.DESCRIPTOR")
    function = partial(UsageError, code="USAGE.FUNCTION")
    heartbeat = partial(UsageError, code="USAGE.HEARTBEAT")
    json = partial(UsageError, code="USAGE.JSON")
    key_groups = partial(UsageError, code="USAGE.KEY_GROUPS")
    name = partial(UsageError, code="USAGE.NAME")
    native_files = partial(UsageError, code="USAGE.NATIVE_FILES")
    not_a_store = partial(UsageError, code="USAGE.NOT_A_STORE")
    no_batch = partial(UsageError, code="USAGE.NO_BATCH")
    no_event_time = partial(UsageError, code="USAGE.NO_EVENT_TIME")
    no_key = partial(UsageError, code="USAGE.NO_KEY")
    no_key_type = partial(UsageError, code="USAGE.NO_KEY_TYPE")
    option = partial(UsageError, code="USAGE.OPTION")
    package = partial(UsageError, code="USAGE.PACKAGE")
    restore = partial(UsageError, code="USAGE.RESTORE")
    rows = partial(UsageError, code="USAGE.ROWS")
    schema = partial(UsageError, code="USAGE.SCHEMA")
    sink = partial(UsageError, code="USAGE.SINK")
    snapshot = partial(UsageError, code="USAGE.SNAPSHOT")
    state_kind = partial(UsageError, code="USAGE.STATE_KIND")
    target_exists = partial(UsageError, code="USAGE.TARGET_EXISTS")
    time = partial(UsageError, code="USAGE.TIME")
    ttl = partial(UsageError, code="USAGE.TTL")
    type = partial(UsageError, code="USAGE.TYPE")


def overlapping_call() -> UsageError:
    """The error of a call that begins while another one is inside the backend."""
    return UsageError(
        "cannot begin a call while another one is inside this backend",
        code="USAGE.OVERLAPPING_CALL",
        hint="use a backend from one thread at a time, and not from the functions that it calls",
    )


class ClosedError(StateBackendError):
    """The backend, store, handle or iterator has been closed."""

    default_code = "CLOSED"


class KeyGroupError(StateBackendError):
    """A key or a file belongs to a key group outside the range of this backend."""

    default_code = "KEY_GROUP"


class StateMigrationError(StateBackendError):
    """Stored state does not fit what is declared: another kind, an incompatible type, another key type."""

    default_code = "STATE_MIGRATION"


class CorruptCheckpointError(StateBackendError):
    """A file of a checkpoint is damaged, cut short, missing or of an unknown version."""

    default_code = "CORRUPT_CHECKPOINT"
    default_hint = (
        "sb.tools.verify(store) lists the damage; go back to an intact checkpoint with sb.tools.rewind, or bring the "
        "files back from a copy of the store"
    )


class CommitConflictError(StateBackendError):
    """Another writer has committed this checkpoint."""

    default_code = "COMMIT_CONFLICT"


class StoreError(StateBackendError, OSError):
    """The system refused to read or write a file of a store: disk full, read-only, I/O error; also an ``OSError``.

    ``errno`` is the underlying error's, if it had one.

    >>> import errno
    >>> error = StoreError.of(OSError(errno.ENOSPC, "No space left on device"), "writing data/3/a.arrow")
    >>> print(error)
    the store cannot go on: No space left on device (writing data/3/a.arrow) [STORE]
    >>> error.errno == errno.ENOSPC
    True
    """

    default_code = "STORE"

    @classmethod
    def of(
        cls, error: OSError, doing: str, *, code: str | None = None, hint: str | None = None
    ) -> StoreError:
        """Make the error that names the action during which the system raised ``error``; raise it from that one.

        >>> StoreError.of(OSError("bucket is gone"), "listing checkpoints").detail
        'listing checkpoints'
        """
        reason = error.strerror or str(error) or type(error).__name__
        made = cls(f"the store cannot go on: {reason}", code=code, detail=doing, hint=hint)
        made.errno = error.errno
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        # The number is not among the attributes that pickle transfers by itself.
        return _rebuild, (type(self), self.message), {**self.__dict__, "errno": self.errno}


class BatchGapError(StateBackendError):
    """The stream and the stored state disagree about which batch comes next."""

    default_code = "BATCH_GAP"


class HostError(StateBackendError):
    """A host, a process on an executor that has a part of the state, was lost, or its function raised."""

    default_code = "HOST"


class MutationError(StateBackendError):
    """An object that a handle returned was changed in place without an ``update``."""

    default_code = "MUTATION"


class BackendUnavailableError(StateBackendError):
    """The backend cannot be used here: unknown name, missing library, extension not built."""

    default_code = "BACKEND_UNAVAILABLE"


class SerializationError(StateBackendError, ValueError):
    """A value or key does not fit its declared type, or bytes cannot be read back; also a ``ValueError``.

    >>> isinstance(SerializationError("lone surrogate"), ValueError)
    True
    """

    default_code = "SERIALIZATION"


class SerializationTypeError(SerializationError, TypeError):
    """The Python type of a value or key is not one that its declared type takes; also a ``TypeError``.

    >>> isinstance(SerializationTypeError("LONG does not take a bool"), TypeError)
    True
    """

    default_code = "SERIALIZATION.TYPE"


class SerializationRangeError(SerializationError, OverflowError):
    """An integer is out of range for its declared type; also an ``OverflowError``.

    >>> isinstance(SerializationRangeError("integer out of range for BYTE"), OverflowError)
    True
    """

    default_code = "SERIALIZATION.RANGE"


class MemoryLimitError(StateBackendError):
    """A batch would pass the backend's ``max_bytes``."""

    default_code = "MEMORY_LIMIT"
