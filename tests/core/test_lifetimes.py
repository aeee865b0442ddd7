"""Who may outlive whom: views, finalisers, namespaces, entries; and calls that end halfway."""

import gc
import threading

import numpy as np
import pytest

from statebackend._core.batches import kernels
from statebackend._core.core_probe import MapTable, StateTable, dirty, fail_allocation
from statebackend._core.memory import arena
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


class Closes:
    """An object whose end closes the backend that held it."""

    def __init__(self, core):
        self.core = core

    def __del__(self):
        self.core.close()


@pytest.mark.skipif(arena.is_checked_build(), reason="the checked build finds the overlapping call")
@pytest.mark.parametrize("how", ["remove", "overwrite", "release and advance"])
def test_a_finaliser_may_close_the_backend(how):
    core = StateCore()
    table = StateTable(core, value="object")
    for key in range(100):
        table.put(key, [key])
    mark = core.mark() if how == "release and advance" else None
    table.put(7, Closes(core)) if mark is None else None
    if how == "remove":
        table.remove(7)
    elif how == "overwrite":
        table.put(7, None)
    else:
        core.release(mark)
        table.put(7, Closes(core))
        mark = core.mark()
        table.remove(7)
        core.release(mark)
        while not core.closed:
            core.advance(1000)
    with pytest.raises(ClosedError, match="closed"):
        table.get(1)
    gc.collect()


def test_state_goes_when_its_last_view_goes_after_close():
    core = StateCore()
    table = StateTable(core, value="bytes")
    for key in range(10_000):
        table.put(key, b"x" * 100)
    view = core.snapshot()
    core.close()
    assert len(table.rows_in(view)) == 10_000
    view.release()
    assert core.arena.usage()["run_bytes"] == 0


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
        lambda: kernels.update_many(table.entries, some, some),
        lambda: kernels.get_many(table.entries, some),
        lambda: kernels.remove_many(table.heads, some),
    ):
        with pytest.raises(UsageError, match=r"MapTable|map states|anchors"):
            call()
    table._check()
    assert list(table.items(1)) == [(2, 3)]


def test_a_rollback_that_ran_out_of_memory_is_finished_by_the_next():
    for n in range(1, 60):
        core = StateCore(seed=1)
        table = StateTable(core, max_parallelism=1)
        keys = np.arange(3000)
        kernels.update_many(table, keys, keys)
        mark = core.mark()
        kernels.update_many(table, keys, keys + 1)
        view = core.snapshot()
        fail_allocation(n)
        try:
            core.rollback(mark)
        except MemoryError:
            fail_allocation(0)
            for key in range(3000):
                table.put(key, -1)
            core.rollback(mark)
        finally:
            done = fail_allocation(0) > 0
        values, found = kernels.get_many(table, keys)
        assert found.all()
        assert (values == keys).all()
        assert table.dirty(mark) == set()
        view.release()
        if done:
            return
    pytest.fail("the rollback never succeeded at once")


def test_a_put_that_failed_leaves_nothing_dirty():
    for n in range(1, 12):
        core = StateCore()
        table = MapTable(core, key="int", map_key="bytes", value="long", max_parallelism=1)
        table.put(5, b"a", 1)
        mark = core.mark()
        fail_allocation(n)
        try:
            table.put(6, b"b", 2)
        except MemoryError:
            assert dirty(table.heads, mark) == dirty(table.entries, mark) == set()
        finally:
            fail_allocation(0)


def test_only_objects_are_copied():
    with pytest.raises(UsageError, match="only objects"):
        StateTable(StateCore(), value="long", copy_value=list)


def test_a_batch_does_without_threads_that_cannot_be_had(monkeypatch):
    class NoThreads:
        def submit(self, *_):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(kernels, "_thread_pool", NoThreads, raising=True)
    table = StateTable(StateCore())
    keys = np.arange(20_000)
    kernels.update_many(table, keys, keys, threads=4)
    values, found = kernels.get_many(table, keys, threads=4)
    assert found.all()
    assert (values == keys).all()
    table._check()
