"""What state costs in memory, from the core's own accounts and tracemalloc; nothing here asks the system."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from twin.implementations import reclaim

from statebackend._core.core_probe import StateTable
from statebackend._core.kernels import batch_kernels
from statebackend._core.memory.arena import extents_kept
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked

EXTENT = 2 << 20


def fill(table: StateTable, first: int, last: int) -> None:
    # Keys in no order: neighbours in the batch are not neighbours in the map.
    keys = np.arange(first, last) * -7046029254386353131
    batch_kernels.update_many(table, keys, keys, threads=2)


# --- P6: at most 40 bytes for an entry LONG -> LONG ---------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 128, 1024])
def test_bytes_per_entry_at_two_million(groups: int, traced: Callable[[], int]) -> None:
    core = StateCore()
    table = StateTable(core, value="long", max_parallelism=groups)
    n = 2_000_000
    for first in range(0, n, 100_000):
        fill(table, first, first + 100_000)
    reclaim(core)
    core.arena.trim()
    assert len(table) == n
    assert table.metrics()["stride"] <= 28
    metrics = table.metrics()
    assert (metrics["buckets"] * 4 + metrics["entry_bytes"]) / n <= 40
    usage = core.arena.usage()
    assert usage["run_bytes"] / n <= 40
    assert usage["extent_bytes"] / n <= 40
    assert usage["used_bytes"] / n <= 40
    if groups <= 128:
        assert traced() / n <= 40


@pytest.mark.parametrize("groups", [1, 128])
def test_bytes_per_entry_at_every_moment_of_a_doubling(groups: int) -> None:
    """From a third before to well after: two bucket tables stand side by side for a while.

    Counted are the runs in use and the extents that they lie in, but for the one that is being filled: of
    the second table only the pages that entries have reached exist, and of the first only those that they
    have not left.
    """
    core = StateCore()
    table = StateTable(core, value="long", max_parallelism=groups)
    worst: tuple[float, int] = (0.0, 0)
    rehashing = 0
    for first in range(0, 2_200_000, 20_000):
        fill(table, first, first + 20_000)
        n = first + 20_000
        if n < 1_100_000:
            continue
        rehashing += table.metrics()["rehashing_maps"] > 0
        held = core.arena.usage()
        worst = max(worst, (held["run_bytes"] / n, n))
        assert (held["extent_bytes"] - EXTENT) / n <= 40, n
    assert rehashing
    assert worst[0] <= 40, worst


# --- states without entries ---------------------------------------------------------------------------------


def test_thirty_two_thousand_key_groups_are_cheap(traced: Callable[[], int]) -> None:
    core = StateCore()
    before = traced()
    table = StateTable(core, value="long", max_parallelism=32_768)
    assert traced() - before < 300_000, "a pointer a group"
    keys = np.arange(10)
    batch_kernels.update_many(table, keys, keys)
    reclaim(core)
    core.arena.trim()
    assert traced() - before - core.arena.usage()["extent_bytes"] < 320_000
    assert core.arena.usage()["run_bytes"] < 10 * 1024
    # What belongs to a batch touches the groups of the batch.
    view = core.snapshot()
    mark = core.mark()
    batch_kernels.update_many(table, keys, -keys)
    assert table.metrics()["copied_entries"] <= 10
    core.rollback(mark)
    core.release(mark)
    assert table.rows_in(view) == {(key, 0): key for key in range(10)}
    view.release()
    reclaim(core)
    assert [table.get(key) for key in range(10)] == list(range(10))


# --- giving back --------------------------------------------------------------------------------------------


def full_table(value: Any) -> tuple[StateCore, StateTable, Any]:
    core = StateCore()
    table = StateTable(core, value=value, max_parallelism=16)
    n = 200_000
    keys = np.arange(n)
    if value == "bytes":
        batch_kernels.update_many(table, keys, (np.arange(n + 1) * 40, np.zeros(40 * n, np.uint8)))
    elif isinstance(value, tuple):
        for _ in range(3):
            batch_kernels.append_many(table, keys, keys)
    else:
        batch_kernels.update_many(table, keys, keys)
    assert core.arena.usage()["extent_bytes"] > 2 * EXTENT
    return core, table, keys


@pytest.mark.parametrize("how", ["batch", "scalar", "rollback", "close", "drop"])
@pytest.mark.parametrize("value", ["long", "bytes", ("list", "long")])
def test_emptied_tables_give_memory_back(value: Any, how: str, traced: Callable[[], int]) -> None:
    core, table, keys = full_table(value)
    assert traced() > 2 * EXTENT
    if how == "batch":
        batch_kernels.remove_many(table, keys, threads=2)
    elif how == "scalar":
        for key in keys.tolist():
            table.remove(key)
    elif how == "rollback":
        batch_kernels.remove_many(table, keys)
        reclaim(core)
        mark = core.mark()
        if isinstance(value, tuple):
            batch_kernels.append_many(table, keys, keys)
        else:
            values = (np.zeros(len(keys) + 1, np.int64), np.zeros(0, np.uint8)) if value == "bytes" else keys
            batch_kernels.update_many(table, keys, values)
        core.rollback(mark)
        core.release(mark)
    elif how == "close":
        core.close()
    if how == "drop":
        core = table = None  # type: ignore[assignment]
        gc.collect()
        assert traced() < 1_000_000 + keys.nbytes
        return
    if how != "close":
        reclaim(core)
        table._check()
    core._check()
    usage = core.arena.usage()
    assert usage["run_bytes"] == usage["blob_bytes"] == 0
    assert usage["extent_bytes"] <= 24 * EXTENT, "more is kept in hand than a batch needs"
    core.arena.trim()
    assert core.arena.usage()["extent_bytes"] == 0
    assert traced() < EXTENT + 1_000_000 + keys.nbytes


def test_a_released_snapshot_gives_its_copies_back() -> None:
    core, table, keys = full_table("long")
    before = core.arena.usage()["run_bytes"]
    view = core.snapshot()
    batch_kernels.update_many(table, keys, -keys)
    assert core.arena.usage()["run_bytes"] > before + 200_000 * 24
    view.release()
    reclaim(core)
    metrics = table.metrics()
    # The slots of the copies stay with their maps for the next snapshot; pages and directories go.
    assert metrics["used_slots"] == 200_000
    assert core.arena.usage()["run_bytes"] == bytes_held(table)
    batch_kernels.remove_many(table, keys)
    reclaim(core)
    assert core.arena.usage()["run_bytes"] == 0


def bytes_held(table: StateTable) -> int:
    metrics = table.metrics()
    return metrics["entry_bytes"] + metrics["buckets"] * 4


def test_an_open_mark_costs_what_was_changed_under_it_and_gives_it_back() -> None:
    core, table, keys = full_table("long")
    before = core.arena.usage()["run_bytes"]
    mark = core.mark()
    assert core.arena.usage()["run_bytes"] == before
    batch_kernels.update_many(table, keys, -keys)
    taken = core.arena.usage()["run_bytes"] - before
    assert 200_000 * 16 <= taken <= 200_000 * 20
    batch_kernels.update_many(table, keys, keys)  # not again
    assert core.arena.usage()["run_bytes"] - before == taken
    core.release(mark)
    reclaim(core)
    assert core.arena.usage()["run_bytes"] == before


def test_scratch_of_large_batches_is_given_back_on_demand(traced: Callable[[], int]) -> None:
    core = StateCore()
    table = StateTable(core, value="long")
    batch_kernels.find_many(table, np.arange(2_000_000))
    core.arena.trim()
    gc.collect()
    assert traced() < 1_000_000


# --- extents seen from Python -------------------------------------------------------------------------------


def test_arrays_of_extents_show_the_memory_and_are_traced(traced: Callable[[], int]) -> None:
    core, table, _ = full_table("long")
    arrays = core.arena.memory()
    assert {array.nbytes for array in arrays} == {EXTENT}
    assert sum(map(len, arrays)) == core.arena.usage()["extent_bytes"] <= traced()
    table.put(7, 0x1234_5678_9ABC)
    words = np.concatenate(arrays).view(np.int64)
    assert np.count_nonzero(words == 0x1234_5678_9ABC) == 1
    assert all(array.__array_interface__["data"][0] % EXTENT == 0 for array in arrays)


def test_arrays_of_extents_outlive_what_they_show(traced: Callable[[], int]) -> None:
    core, table, keys = full_table("long")
    arrays, again = core.arena.memory(), core.arena.memory()
    sums = [int(array.sum()) for array in arrays]
    del again[::2]
    batch_kernels.remove_many(table, keys)
    reclaim(core)
    core.arena.trim()
    assert core.arena.usage()["extent_bytes"] == 0
    assert core.arena.memory() == []
    for array in arrays + again:
        array[:8] = 1  # still mapped
    batch_kernels.update_many(table, keys, keys)
    newer = core.arena.memory()
    assert not {array.ctypes.data for array in newer} & {array.ctypes.data for array in arrays}
    del core, table, arrays[1:], again
    gc.collect()
    assert int(newer[0].sum()) > 0
    arrays[0][8:] = 2
    assert arrays[0][-1] == 2
    assert len(sums) > 4
    del array, arrays, newer
    gc.collect()
    assert traced() < 1_000_000 + keys.nbytes


def has_extent_ahead(core: StateCore) -> bool:
    """Whether the thread makes one, however long it waits for its turn. Then it has no more to do."""
    until = time.monotonic() + 60
    while not core.arena.usage()["spare_bytes"] and time.monotonic() < until:
        time.sleep(0.001)
    return core.arena.usage()["spare_bytes"] > 0


def grow_until_extents_are_made_ahead(core: StateCore, table: StateTable, first: int) -> bool:
    for turn in range(20):
        keys = np.arange(first + turn * 1_000, first + (turn + 1) * 1_000)
        batch_kernels.update_many(table, keys, np.zeros((1_000, 2_000), np.uint8))
    return has_extent_ahead(core)


def test_extents_are_made_ahead() -> None:
    core = StateCore()
    table = StateTable(core, value=2_000)
    assert grow_until_extents_are_made_ahead(core, table, 0)
    core.arena.trim()
    assert core.arena.usage()["spare_bytes"] == 0


def test_memory_of_an_arena_serves_the_next(traced: Callable[[], int]) -> None:
    def addresses(core: StateCore) -> set[int]:
        return {array.ctypes.data for array in core.arena.memory()}

    StateCore().arena.trim()
    assert extents_kept() == 0
    keys = np.arange(1_000_000)
    core = StateCore()
    table = StateTable(core, value="long")
    batch_kernels.update_many(table, keys, keys)
    before, empty = addresses(core), StateCore()
    assert len(before) > 8
    assert has_extent_ahead(core)  # else its thread might take one of those that are kept
    core.close()  # no garbage collection is needed
    assert addresses(core) == set()
    assert extents_kept() == min(len(before), 16)
    assert traced() < 1_000_000 + keys.nbytes, "and belongs to nobody"
    core = StateCore()
    table = StateTable(core, value="long")
    batch_kernels.update_many(table, keys, -keys)
    assert len(addresses(core) & before) >= 8
    assert batch_kernels.get_many(table, keys[:3])[0].tolist() == [0, -1, -2]
    core._check()
    del core, table  # not closed
    gc.collect()
    assert extents_kept()
    empty.arena.trim()
    assert extents_kept() == 0


def test_forked_child_goes_on_and_makes_its_own_extents_ahead() -> None:
    """The thread that makes them is not there in a child. Forks come at several moments of its work."""
    core = StateCore()
    table = StateTable(core, value=2_000)
    for turn in range(4):
        keys = np.arange(turn * 3_000, (turn + 1) * 3_000)
        batch_kernels.update_many(table, keys, np.zeros((3_000, 2_000), np.uint8))
        child = os.fork()
        if child == 0:
            try:
                core.arena.trim()
                assert grow_until_extents_are_made_ahead(core, table, 10_000_000)
                core._check()
                core.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    core._check()
