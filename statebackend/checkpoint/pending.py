"""A snapshot that is being written on a thread of its own.

>>> from statebackend.checkpoint.manifest import StateSnapshot
>>> pending = PendingSnapshot(7, lambda: StateSnapshot(7, epoch=1))
>>> pending.result().checkpoint_id, pending.done()
(7, True)
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from statebackend.checkpoint.manifest import StateSnapshot
from statebackend.errors import UsageError

__all__ = ["PendingSnapshot"]


class PendingSnapshot:
    """What `snapshot` gives: the view is taken, the files are being written.

    ``abort`` is called, on the thread that asks for it, to make ``write`` stop and remove what it has made.
    The thread is waited for when the interpreter ends.

    >>> from statebackend.checkpoint.manifest import StateSnapshot
    >>> PendingSnapshot(7, lambda: StateSnapshot(7, epoch=1))
    <PendingSnapshot of checkpoint 7>
    """

    def __init__(
        self,
        checkpoint_id: int,
        write: Callable[[], StateSnapshot],
        abort: Callable[[], None] | None = None,
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self._write = write
        self._abort = abort
        self._snapshot: StateSnapshot | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"statebackend-snapshot-{checkpoint_id}")
        self._thread.start()

    def __repr__(self) -> str:
        return f"<PendingSnapshot of checkpoint {self.checkpoint_id}>"

    def _run(self) -> None:
        try:
            self._snapshot = self._write()
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._error = error
        finally:
            del self._write  # and the view with it

    def done(self) -> bool:
        """Whether `result` returns, or raises, at once.

        >>> from statebackend.checkpoint.manifest import StateSnapshot
        >>> pending = PendingSnapshot(7, lambda: StateSnapshot(7, epoch=1))
        >>> pending.result().epoch, pending.done()
        (1, True)
        """
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> StateSnapshot:
        """Wait until the files are durable, and describe them for `CheckpointStore.commit`.

        What went wrong on the other thread is raised here, each time. `TimeoutError` after ``timeout`` seconds.

        >>> def fail():
        ...     raise OSError("disk full")
        >>> PendingSnapshot(7, fail).result()
        Traceback (most recent call last):
        OSError: disk full
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"checkpoint {self.checkpoint_id} is still being written")
        if self._error is not None:
            raise self._error
        if self._snapshot is None:
            raise UsageError("the snapshot has been aborted", detail=f"checkpoint {self.checkpoint_id}")
        return self._snapshot

    def abort(self) -> None:
        """Give the snapshot up: what it has written is removed. Idempotent; nothing happens once it is committed.

        `CheckpointStore.abort` does so for all snapshots of an id.

        >>> from statebackend.checkpoint.manifest import StateSnapshot
        >>> PendingSnapshot(7, lambda: StateSnapshot(7, epoch=1)).abort()
        """
        if self._abort is not None:
            self._abort()
        self._thread.join()
