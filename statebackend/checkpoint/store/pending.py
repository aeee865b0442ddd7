"""A snapshot that is being written on another thread, and the threads that do so.

>>> from statebackend.checkpoint.store.manifest import StateSnapshot
>>> pending = PendingSnapshot(7, lambda: StateSnapshot(7, epoch=1))
>>> pending.result().checkpoint_id, pending.done()
(7, True)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from statebackend.checkpoint.store.manifest import StateSnapshot

__all__ = ["PendingSnapshot", "WritingThreads"]

#: So many write at once; what comes beyond that waits for its turn.
_MOST_THREADS = 64
#: A new thread stands back so long, that whoever started it goes on first.
_STANDING_BACK = 100e-6


class _Job:
    """What a thread is to do. What it holds is let go before its result is known."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work

    def __call__(self) -> Any:
        work, self._work = self._work, None
        if work is None:
            return None
        try:
            return work()
        finally:
            del work

    def drop(self) -> None:
        """Do nothing, if it has not begun."""
        self._work = None


def _done(work: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
        done.set_exception(error)
    return done


class WritingThreads:
    """The threads on which a backend writes; one that has nothing to do is kept for the next snapshot.

    Starting a thread takes longer than taking a view. They end when the backend is closed or gone, after what they
    have begun, and are waited for when the interpreter ends. A forked process starts its own.

    >>> WritingThreads().run(lambda: 7).result()
    7
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Let ``work`` be done; called by one thread at a time. If no thread can be started it never is.

        When the interpreter is about to end, the caller's thread does it.
        """
        if not threading.main_thread().is_alive():
            return _done(work)
        if self._executor is None or self._process != os.getpid():
            self._executor = ThreadPoolExecutor(
                _MOST_THREADS, "statebackend-writing", time.sleep, (_STANDING_BACK,)
            )
            self._process = os.getpid()
        job = _Job(work)
        try:
            return self._executor.submit(job)
        except BaseException as error:
            self._executor = None
            if "interpreter shutdown" in str(error):
                return _done(job)  # the main thread waits for what others are writing, and takes nothing more
            # It may lie in the executor's queue, without a thread that is meant to take it.
            job.drop()
            raise

    def close(self) -> None:
        """Let the threads end when they have done what they were given. More work starts new ones.

        >>> WritingThreads().close()
        """
        executor, self._executor = self._executor, None
        if executor is not None and self._process == os.getpid():
            executor.shutdown(wait=False)


class PendingSnapshot:
    """What `snapshot` gives: the view is taken, the files are being written.

    ``abort`` is called, on the thread that asks for it, to make ``write`` stop and remove what it has made.
    The writing is waited for when the interpreter ends.

    >>> from statebackend.checkpoint.store.manifest import StateSnapshot
    >>> PendingSnapshot(7, lambda: StateSnapshot(7, epoch=1))
    <PendingSnapshot of checkpoint 7>
    """

    def __init__(
        self,
        checkpoint_id: int,
        write: Callable[[], StateSnapshot],
        abort: Callable[[], None] | None = None,
        threads: WritingThreads | None = None,
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self._abort = abort
        self._written: Future[StateSnapshot] = (threads or WritingThreads()).run(write)

    def __repr__(self) -> str:
        return f"<PendingSnapshot of checkpoint {self.checkpoint_id}>"

    def done(self) -> bool:
        """Whether `result` returns, or raises, at once.

        >>> from statebackend.checkpoint.store.manifest import StateSnapshot
        >>> pending = PendingSnapshot(7, lambda: StateSnapshot(7, epoch=1))
        >>> pending.result().epoch, pending.done()
        (1, True)
        """
        return self._written.done()

    def result(self, timeout: float | None = None) -> StateSnapshot:
        """Wait until the files are durable, and describe them for `CheckpointStore.commit`.

        What went wrong on the other thread is raised here, each time. `TimeoutError` after ``timeout`` seconds.

        >>> def fail():
        ...     raise OSError("disk full")
        >>> PendingSnapshot(7, fail).result()
        Traceback (most recent call last):
        OSError: disk full
        """
        wait([self._written], timeout)
        if not self._written.done():
            raise TimeoutError(f"checkpoint {self.checkpoint_id} is still being written")
        return self._written.result()

    def abort(self) -> None:
        """Give the snapshot up: what it has written is removed. Idempotent; nothing happens once it is committed.

        `CheckpointStore.abort` does so for all snapshots of an id.

        >>> from statebackend.checkpoint.store.manifest import StateSnapshot
        >>> PendingSnapshot(7, lambda: StateSnapshot(7, epoch=1)).abort()
        """
        if self._abort is not None:
            self._abort()
        wait([self._written])
