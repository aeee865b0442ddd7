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
            # The work may be in the executor's queue, with no thread to take it.
            job.drop()
            self._ended()
            raise

    def at_work(self) -> int:
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


class Snapshot:
    """The result of `snapshot`: the state of one moment on its way into files, for a checkpoint to name.

    To abort, the asking thread calls ``abort``, which makes the writing stop and remove its files. The interpreter
    waits for the writing when it ends.
    """

    def __init__(self, writer: DataWriter) -> None:
        #: It writes the files, and knows whether the checkpoint is committed or given up.
        self.writer = writer
        self.checkpoint_id = writer.checkpoint_id
        self._written: Future[Any]

    def __repr__(self) -> str:
        return f"<Snapshot of checkpoint {self.checkpoint_id}>"

    def begin(self, write: Callable[[], object], threads: WritingThreads) -> None:
        """Begin to write, on another thread. ``write`` gives the result; if it fails, it removes the files."""
        self._written = threads.run(write)

    def done(self) -> bool:
        """Return True if `result` returns, or raises, at once."""
        return self._written.done()

    def wait(self) -> None:
        """Wait until it is written, or has failed."""
        wait([self._written])

    def result(self, timeout: float | None = None) -> StateSnapshot:
        """Wait until the files are durable, and describe them for `CheckpointStore.commit`.

        An error of the other thread is raised here, each time. `TimeoutError` after ``timeout`` seconds.
        """
        wait([self._written], timeout)
        if not self._written.done():
            raise TimeoutError(f"checkpoint {self.checkpoint_id} is still being written")
        written: StateSnapshot = self._written.result()
        return written

    def abort(self) -> None:
        """Give up the snapshot and remove its files. Idempotent; does nothing once it is committed.

        `CheckpointStore.abort` does so for all snapshots of an id.
        """
        self.writer.abort()
        self.wait()


def tell(snapshots: Iterable[Snapshot], checkpoint_id: int, *, is_committed: bool) -> None:
    """Note what another process has made of a checkpoint. An aborted snapshot removes its files."""
    for each in snapshots:
        if each.checkpoint_id == checkpoint_id:
            if is_committed:
                each.writer.committed()
            else:
                each.writer.abort()
