"""The threads that write snapshots: kept while a backend is open, gone with it, none lost in a fork."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from keyed_stores import COUNT, create, open_store

import statebackend as sb
from statebackend.checkpoint import DataWriter, Snapshot, StateSnapshot
from statebackend.checkpoint.files import open_files
from statebackend.checkpoint.store.pending import WritingThreads


def begun(number: int, write: Callable[[], StateSnapshot], threads: WritingThreads) -> Snapshot:
    snapshot = Snapshot(DataWriter(open_files("/nowhere"), 1, number))
    snapshot.begin(write, threads)
    return snapshot


def writing_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("statebackend-writing")]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def no_thread_before() -> None:
    gc.collect()
    wait_until(lambda: not writing_threads())


def test_one_thread_writes_one_snapshot_after_the_other_and_ends_with_the_backend(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        keyed = create("heap")
        count = keyed.get_state(COUNT)
        seen = set()
        for checkpoint_id in range(5):
            count.update_many([checkpoint_id], [1])
            store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            seen |= set(writing_threads())
            wait_until(lambda: keyed._threads._executor._idle_semaphore._value == 1)
        assert len(seen) == 1
        keyed.close()
        wait_until(lambda: not writing_threads())


def test_threads_end_with_a_backend_that_is_not_closed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        keyed = create("heap")
        store.commit(0, [keyed.snapshot(0, store).result()])
        assert writing_threads()
        del keyed
        gc.collect()
        wait_until(lambda: not writing_threads())


def test_several_snapshots_are_written_at_once() -> None:
    threads = WritingThreads()
    together = threading.Barrier(5)
    pending = []
    for number in range(5):

        def write(number: int = number) -> StateSnapshot:
            together.wait(20)  # passes only if all five are being written
            return StateSnapshot(number, epoch=1)

        pending.append(begun(number, write, threads))
    assert [each.result(20).checkpoint_id for each in pending] == list(range(5))
    threads.close()


def test_snapshot_in_flight_is_written_after_the_backend_was_closed() -> None:
    threads, go = WritingThreads(), threading.Event()

    def write() -> StateSnapshot:
        assert go.wait(20)
        return StateSnapshot(7, epoch=1)

    pending = begun(7, write, threads)
    threads.close()
    with pytest.raises(TimeoutError, match="checkpoint 7 is still being written"):
        pending.result(0.001)
    assert not pending.done()
    go.set()
    assert pending.result(20).checkpoint_id == 7


def test_written_rows_are_released_before_the_result_is_known() -> None:
    class View:
        ended = threading.Event()

        def __del__(self) -> None:
            self.ended.set()

    def writing() -> Callable[[], StateSnapshot]:
        view = View()
        return lambda: StateSnapshot(0, 1, extra={"held": isinstance(view, View), "told": go.wait(20)})

    go, ended = threading.Event(), []
    pending = begun(0, writing(), WritingThreads())
    pending._written.add_done_callback(lambda _: ended.append(View.ended.is_set()))
    go.set()
    assert pending.result(20).extra == {"held": True, "told": True}
    wait_until(lambda: bool(ended))
    assert ended == [True]


def test_work_whose_thread_could_not_be_started_is_never_done(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, go, done = WritingThreads(), threading.Event(), []
    busy = threads.run(lambda: go.wait(20))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.run(lambda: done.append("refused"))
    go.set()
    assert busy.result(20)
    threads.run(lambda: done.append("next")).result(20)
    gc.collect()
    wait_until(lambda: len(writing_threads()) == 1)  # that of the first work has looked for more, and ended
    assert done == ["next"]
    threads.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_forked_process_writes_on_its_own_threads(tmp_path: Path) -> None:
    with create("heap") as keyed, open_store(tmp_path / "parent") as store:
        keyed.get_state(COUNT).update_many([1], [5])
        store.commit(0, [keyed.snapshot(0, store).result()])
        child = os.fork()
        if child == 0:
            try:
                with open_store(tmp_path / "child") as own:
                    own.commit(0, [keyed.snapshot(0, own).result(20)])
                keyed.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        store.commit(1, [keyed.snapshot(1, store).result(20)])
    for name in ("parent", "child"):
        assert sb.tools.state(tmp_path / name, "count").to_table()["value"].to_pylist() == [5]
