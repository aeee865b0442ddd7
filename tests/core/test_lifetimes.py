"""Who may outlive whom: views, finalisers, namespaces, entries; and calls that end halfway."""

import gc
import threading

import numpy as np
import pytest

from statebackend._core.core_probe import MapTable, StateTable
from statebackend._core.kernels import batch_kernels
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import ClosedError, UsageError

pytestmark = pytest.mark.checked


def test_a_view_released_while_another_thread_reads_it_stays_whole_until_that_is_done():
    core = StateCore()
    table = StateTable(core, key="bytes", value="bytes", max_parallelism=1)
    keys = [b"key%d" % i for i in range(50_000)]
    for _ in range(5):
        for key in keys:
            table.put(key, b"v" * 40)
        view, seen, begun = core.snapshot(), [], threading.Event()

        def read(view=view, seen=seen, begun=begun):
            begun.set()
            try:
                seen.append(view.rows(table, 0, 0).columns()["value"])
            except ClosedError:
                seen.append(np.full(1, ord("v"), dtype=np.uint8))

        reader = threading.Thread(target=read)
        reader.start()
        begun.wait()
        view.release()
        for key in keys:
            table.remove(key)
        while core.advance(1 << 20):
            pass
        reader.join()
        assert (seen[0] == ord("v")).all()


def test_state_goes_when_its_last_view_goes_after_close():
    core = StateCore()
    table = StateTable(core, value="bytes")
    for key in range(10_000):
        table.put(key, b"x" * 100)
    view = core.snapshot()
    table.put(7, b"later")
    core.close()
    assert table.rows_in(view) == {(key, 0): b"x" * 100 for key in range(10_000)}
    view.release()
    assert core.arena.usage()["run_bytes"] == 0
    with pytest.raises(ClosedError):
        table.rows_in(view)


def test_namespaces_outlive_their_core_as_an_error():
    namespaces = StateCore().namespaces
    gc.collect()
    with pytest.raises(ClosedError, match="gone"):
        namespaces.number(b"w")


def test_the_halves_of_a_map_state_are_not_written_directly():
    table = MapTable(StateCore(), value="long")
    table.put(1, 2, 3)
    some = np.array([1], dtype=np.int64)
    for call in (
        lambda: table.entries.put(2, 9),
        lambda: table.entries.remove(2),
        lambda: table.heads.put(1, 9),
        lambda: table.heads.remove(1),
        lambda: batch_kernels.update_many(table.entries, some, some),
        lambda: batch_kernels.get_many(table.entries, some),
        lambda: batch_kernels.remove_many(table.heads, some),
    ):
        with pytest.raises(UsageError, match=r"MapTable|map states|anchors"):
            call()
    table._check()
    assert list(table.items(1)) == [(2, 3)]


def test_only_objects_are_copied():
    with pytest.raises(UsageError, match="only objects"):
        StateTable(StateCore(), value="long", copy_value=list)


def test_a_batch_does_without_threads_that_cannot_be_had(monkeypatch):
    class NoThreads:
        def submit(self, *_):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(batch_kernels, "_thread_pool", NoThreads, raising=True)
    table = StateTable(StateCore())
    keys = np.arange(20_000)
    batch_kernels.update_many(table, keys, keys, threads=4)
    values, found = batch_kernels.get_many(table, keys, threads=4)
    assert found.all()
    assert (values == keys).all()
    table._check()


def test_a_table_begins_with_one_page_at_most():
    """What was larger ended the process."""
    with pytest.raises(UsageError):
        StateTable(StateCore(), initial_capacity=8192)
    table = StateTable(StateCore(), max_parallelism=1, initial_capacity=4096)
    for key in range(5000):
        table.put(key, key)
    table._check()
    for key in range(5000):
        table.remove(key)
    table._check()
    assert len(table) == 0


def test_a_log_of_which_some_chunks_were_forgotten_ends_with_its_last_chunk():
    """What a batch overwrote twice waits for a snapshot, and owns nothing. A mark's records come to it; they do."""
    keys = np.arange(5_000)
    for budget in range(0, 200, 8):
        core = StateCore()
        table = StateTable(core, max_parallelism=1)
        batch_kernels.update_many(table, keys, keys)
        mark, view = core.mark(), core.snapshot()
        twice = np.repeat(keys, 2)
        batch_kernels.update_many(table, twice, twice)
        view.release()
        core.advance(budget)
        core.release(mark)
        while core.advance(1_000):
            pass
        table._check()
        assert table.metrics()["used_slots"] == len(keys)
