"""The implementations of backends, and their names.

A backend gets a name in one of three ways: it is built in, it was given to `register_backend`, or an installed package
has an entry point in the group ``statebackend.backends``::

    [project.entry-points."statebackend.backends"]
    mine = "my_package.backend:MyBackend"

A backend is imported when it is first asked for.

>>> create_backend("reference")
ReferenceBackend()
>>> available_backends()["reference"]
BackendAvailability(name='reference', is_available=True, reason=None, library=None)
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from typing import Any, NamedTuple

from statebackend.errors import BackendUnavailableError, StateBackendError, usage
from statebackend.state import StateBackend

__all__ = ["BackendAvailability", "available_backends", "create_backend", "register_backend"]

ENTRY_POINTS = "statebackend.backends"

_BUILT_IN = {
    "heap": "statebackend.backends.heap:HeapBackend",
    "reference": "statebackend.backends.reference:ReferenceBackend",
    "rocksdb": "statebackend.backends.rocksdb:RocksDbBackend",
}
_registered: dict[str, str] = {}


class BackendAvailability(NamedTuple):
    """Tells if a backend can be used here and, if not, why; and which library it would use.

    >>> BackendAvailability("mine", False, "it needs a library").is_available
    False
    """

    name: str
    is_available: bool
    reason: str | None
    #: What `StateBackend.native_library` tells: name, version, path, origin; None if it needs none, or cannot be used.
    library: dict[str, str | None] | None = None


def register_backend(name: str, target: str) -> None:
    """Make a backend known under a name, for this process; ``target`` is ``"module:Class"``. Imports nothing.

    A name that another class has taken raises `UsageError`.

    >>> register_backend("plain", "statebackend.backends.reference:ReferenceBackend")
    >>> create_backend("plain")
    ReferenceBackend()
    """
    if not name or type(name) is not str:
        raise usage.name("the name of a backend is a non-empty str")
    if type(target) is not str or not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise usage.argument(
            "a backend is registered with where its class is",
            detail=f"backend {name!r}",
            hint='write register_backend("mine", "my_package.backend:MyBackend")',
        )
    taken = _targets().get(name, target)
    if taken != target:
        raise usage.name(
            f"the name {name!r} is taken", detail=f"by {taken}", hint="register it under another name"
        )
    _registered[name] = target


def create_backend(name: str, **options: Any) -> StateBackend:
    """The factory of a backend, by name, with the backend's own options.

    >>> create_backend("reference", speed=11)
    Traceback (most recent call last):
    statebackend.errors.UsageError: backend 'reference' lacks the option 'speed'. Hint: its options: none [USAGE.OPTION]
    """
    cls = _load(name)
    reason = cls.unavailable_reason()
    if reason is not None:
        raise _unavailable(name, cls, reason)
    parameters = inspect.signature(cls).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        for option in options:
            if option not in parameters:
                known = ", ".join(parameters) or "none"
                raise usage.option(
                    f"backend {name!r} lacks the option {option!r}", hint=f"its options: {known}"
                )
    return cls(**options)


def _unavailable(name: str, cls: type[StateBackend], reason: str) -> BackendUnavailableError:
    """The error, with the code and the hint that belong to a library that cannot be used."""
    message = f"backend {name!r} cannot be used here: "
    try:
        cls.native_library()
    except StateBackendError as error:
        return BackendUnavailableError(
            message + error.message, code=error.code, detail=error.detail, hint=error.hint
        )
    return BackendUnavailableError(message + reason)


def available_backends() -> dict[str, BackendAvailability]:
    """All known backends by name, sorted, each with its availability. Imports them, and loads no library that they use.

    >>> sorted(available_backends())[:2]
    ['heap', 'reference']
    """
    found = {}
    for name in sorted(_targets()):
        library = None
        try:
            backend = _load(name)
            reason = backend.unavailable_reason()
            if reason is None:
                library = backend.native_library()
        except BackendUnavailableError as error:
            reason = f"{error.message}{f' ({error.detail})' if error.detail else ''}"
        found[name] = BackendAvailability(name, reason is None, reason, library)
    return found


def _targets() -> dict[str, str]:
    """The class of each known backend, as ``"module:Class"``. Built-in and registered names win over entry points."""
    found = {each.name: each.value for each in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    return {**found, **_registered, **_BUILT_IN}


def _load(name: str) -> type[StateBackend]:
    # Entry points come last: finding them reads the metadata of every installed package.
    target = _BUILT_IN.get(name) or _registered.get(name) or _targets().get(name)
    if target is None:
        raise BackendUnavailableError(
            f"unknown backend {name!r}",
            code="BACKEND_UNAVAILABLE.UNKNOWN",
            hint=f"known are {', '.join(map(repr, sorted(_targets())))}; register_backend adds one",
        )
    module, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(
            f"backend {name!r} cannot be imported: {error}",
            code="BACKEND_UNAVAILABLE.IMPORT",
            detail=target,
            hint="build the extension with 'make test', or install what is missing",
        ) from error
    if not isinstance(found, type) or not issubclass(found, StateBackend):
        raise BackendUnavailableError(
            f"backend {name!r} is not a StateBackend",
            detail=target,
            hint="derive its class from statebackend.state.StateBackend",
        )
    return found
