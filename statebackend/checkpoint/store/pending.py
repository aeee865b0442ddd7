"""A snapshot that is being written on another thread, and the threads that write."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import StateSnapshot

T = TypeVar("T")

#: At most this many write at once; further work waits for its turn.
_MOST_THREADS = 64
#: A new thread waits this long, so that the thread that started it goes on first.
_STANDING_BACK = 100e-6


class _Job:
    """Work for a thread. It drops its references before its result is known."""

    def __init__(self, work: Callable[[], object], end: Callable[[], None]) -> None:
        self._work: Callable[[], object] | None = work
        self._end = end

    def __call__(self) -> Any:
        work, self._work = self._work, None
        if work is None:
            return None
        try:
            return work()
        finally:
            del work
            self._end()

    def drop(self) -> None:
        """Cancel the work, if it has not begun."""
        self._work = None


def _done(work: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - `result` raises it
        done.set_exception(error)
    return done


class WritingThreads:
    """The threads on which a backend writes. An idle thread is kept for the next snapshot.

    Starting a thread takes longer than taking a view. The threads end when the backend is closed or gone, after the
    work that they have begun. The interpreter waits for them when it ends. A forked process starts its own.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0
        self._at_work = 0
        self._counting = threading.Lock()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` on a thread; one thread at a time may call this. If no thread can be started, it never runs.

        If the interpreter is about to end, the caller's thread does the work.
        """
        if not threading.main_thread().is_alive():
            return _done(work)
        if self._executor is None or self._process != os.getpid():
            self._executor = ThreadPoolExecutor(
                _MOST_THREADS, "statebackend-writing", time.sleep, (_STANDING_BACK,)
            )
            if self._process != os.getpid():
                self._at_work, self._counting = 0, threading.Lock()
            self._process = os.getpid()
        job = _Job(work, self._ended)
        self._count(1)
        try:
            return self._executor.submit(job)
        except BaseException as error:
            self._executor = None
            if "interpreter shutdown" in str(error):
                return _done(job)  # the main thread only waits for running writes
            # The work may lie in the executor's queue, with no thread to take it.
            job.drop()
            self._ended()
            raise

    def at_work(self) -> int:
        """How many pieces of work are not done."""
        return self._at_work if self._at_work == 0 or self._process == os.getpid() else 0

    def _count(self, change: int) -> None:
        with self._counting:
            self._at_work += change

    def _ended(self) -> None:
        self._count(-1)

    def close(self) -> None:
        """Let the threads end once they have done their work. More work starts new ones."""
        executor, self._executor = self._executor, None
        if executor is not None and self._process == os.getpid():
            executor.shutdown(wait=False)


class SnapshotInFlight:
    """A snapshot that was taken, until its checkpoint is committed or given up.

    Its writer knows the outcome if the store is in this process. If another process commits, `tell` notes the outcome.
    """

    def __init__(self, target: DataWriter) -> None:
        self.target = target
        #: True if its checkpoint is committed, False if it never will be; None while the backend was not told.
        self.told: bool | None = None

    @property
    def is_committed(self) -> bool:
        """True if its checkpoint is known to be committed."""
        return self.told is True or self.target.is_committed

    @property
    def is_aborted(self) -> bool:
        """True if its checkpoint will never be committed."""
        return self.told is False or self.target.is_aborted


def tell(snapshots: Iterable[SnapshotInFlight], checkpoint_id: int, *, is_committed: bool) -> None:
    """Note the outcome of a checkpoint in its snapshots in flight. An aborted snapshot removes its files."""
    for each in snapshots:
        if each.target.checkpoint_id == checkpoint_id:
            each.told = is_committed
            if not is_committed:
                each.target.abort()


class PendingSnapshot:
    """The result of `snapshot`: the view is taken, the files are being written.

    To abort, the asking thread calls ``abort``, which makes ``write`` stop and remove its files. The
    interpreter waits for the writing when it ends.

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
        """Return True if `result` returns, or raises, at once."""
        return self._written.done()

    def result(self, timeout: float | None = None) -> StateSnapshot:
        """Wait until the files are durable, and describe them for `CheckpointStore.commit`.

        An error of the other thread is raised here, each time. `TimeoutError` after ``timeout`` seconds.

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
        """Give up the snapshot and remove its files. Idempotent; does nothing once it is committed.

        `CheckpointStore.abort` does so for all snapshots of an id.
        """
        if self._abort is not None:
            self._abort()
        wait([self._written])
