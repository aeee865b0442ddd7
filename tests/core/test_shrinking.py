"""Maps that become smaller: what they give back, and what snapshots, marks and iterators see of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from map_model import reduce_many
from twin.implementations import reclaim

import statebackend as sb
from statebackend._core.core_probe import StateTable, fail_allocation
from statebackend._core.kernels import batch_kernels
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked


def filled(keys: int, **options: Any) -> tuple[StateCore, StateTable]:
    core = StateCore(seed=1)
    table = StateTable(core, **{"max_parallelism": 1, **options})
    numbers = np.arange(keys)
    batch_kernels.update_many(table, numbers, numbers)
    return core, table


def bytes_of(table: StateTable) -> int:
    infos = [table.map_info(group) for group in range(table.max_parallelism)]
    return sum(info["run_bytes"] + 4 * info["primary_capacity"] for info in infos if info is not None)


@pytest.mark.parametrize("max_parallelism", [1, 128])
@pytest.mark.parametrize("vectorised", [False, True])
def test_remaining_entries_take_at_most_twice_their_need(max_parallelism: int, vectorised: bool) -> None:
    core, table = filled(200_000, max_parallelism=max_parallelism)
    gone = np.arange(2_000, 200_000)
    if vectorised:
        batch_kernels.remove_many(table, gone)
    else:
        for key in gone.tolist():
            table.remove(key)
    reclaim(core)
    table._check()
    used = core.metrics()["run_bytes"]
    fresh_core = StateCore(seed=1)
    fresh = StateTable(fresh_core, max_parallelism=max_parallelism)
    for key in range(2_000):
        fresh.put(key, key)
    assert used <= 2 * fresh_core.metrics()["run_bytes"]
    assert sorted(entry.key for entry in table) == list(range(2_000))


def test_snapshots_of_before_and_during_show_their_own_moment() -> None:
    core, table = filled(20_000)
    views = []
    for first in range(0, 19_500, 1_500):
        views.append((core.snapshot(), {entry.key: entry.value for entry in table}))
        for key in range(first, first + 1_500):
            table.remove(key)
        table._check()
    for view, contents in random.Random(1).sample(views, len(views)):
        assert {key: value for (key, _), value in table.rows_in(view).items()} == contents
        view.release()
        reclaim(core)
        table._check()
    assert table.map_info(0)["run_bytes"] < 100_000


def test_a_rollback_brings_back_what_left_while_the_map_was_shrinking() -> None:
    core, table = filled(20_000)
    for key in range(11_000):
        table.remove(key)
    before = {entry.key: entry.value for entry in table}
    mark = core.mark()
    for key in range(11_000, 19_990):
        if key % 3:
            table.remove(key)
        else:
            table.put(key, -key)
    reclaim(core)
    core.rollback(mark)
    table._check()
    assert {entry.key: entry.value for entry in table} == before


def test_a_map_goes_on_shrinking_after_a_rollback_of_a_removal() -> None:
    core, table = filled(100_000)
    for key in range(51_000):
        table.remove(key)
    mark = core.mark()
    table.remove(99_999)
    reclaim(core)
    core.rollback(mark)
    core.release(mark)
    for key in range(99_990):
        table.remove(key)
    reclaim(core)
    table._check()
    assert bytes_of(table) < 4_000


def test_a_rollback_that_memory_ended_keeps_what_a_later_snapshot_sees() -> None:
    for nth in range(1, 40):
        core = StateCore(seed=1)
        table = StateTable(core, max_parallelism=1, value="bytes")
        for key in range(300):
            table.put(key, b"a%d" % key)
        mark = core.mark()
        for key in range(300):
            table.put(key, b"b%d" % key)
        first = core.snapshot()
        for key in range(100):
            table.put(key, b"c%d" % key)
        fail_allocation(nth)
        try:
            core.rollback(mark)
        except MemoryError:
            fail_allocation(0)
            second = core.snapshot()
            contents = table.rows_in(second)
            core.rollback(mark)
            core.release(mark)
            reclaim(core)
            for key in range(1_000, 1_900):
                table.put(key, b"zzzz%d" % key)
            assert table.rows_in(second) == contents
            second.release()
        finally:
            fail_allocation(0)
        first.release()
        core.close()


@pytest.mark.parametrize("capacity", [4, 8, 64])
def test_batches_on_maps_that_grow_and_shrink_put_each_key_once(capacity: int, rng: random.Random) -> None:
    for seed in range(4):
        core = StateCore(seed=seed)
        table = StateTable(core, max_parallelism=rng.choice((1, 8, 128)), initial_capacity=capacity)
        sums: dict[int, int] = {}
        for _ in range(10):
            rows, keys, base = rng.choice((4_096, 5_000, 9_000)), rng.choice((100, 400, 1_000, 5_000)), 1_000
            batch = [base * rng.randrange(3) + rng.randrange(keys) for _ in range(rows)]
            reduce_many(table, np.array(batch), np.ones(rows, np.int64), "sum", threads=rng.choice((1, 2)))
            for key in batch:
                sums[key] = sums.get(key, 0) + 1
            table._check()
            for key in rng.sample(list(sums), rng.choice((0, len(sums) // 2, len(sums)))):
                assert table.get(key) == sums[key]
                table.remove(key)
                del sums[key]
        assert {entry.key: entry.value for entry in table} == sums
        core.close()


@pytest.mark.parametrize("keys", [300, 50_000])
def test_a_first_batch_makes_room_for_keys_whatever_the_sample_says(keys: int) -> None:
    for seed in range(2):
        core = StateCore(seed=seed)
        table = StateTable(core, max_parallelism=1)
        rows = np.random.default_rng(seed).integers(0, keys, 1_000_000)
        reduce_many(table, rows, np.ones(len(rows), np.int64), "sum")
        assert table.map_info(0)["primary_capacity"] <= max(1_024, 6 * keys)
        core.close()


def test_a_restored_state_is_declared_while_another_one_shrinks_under_a_mark(tmp_path: Path) -> None:
    a, b = sb.ValueStateDescriptor("a", int), sb.ValueStateDescriptor("b", int)
    keys = list(range(20_000))
    factory = sb.create_backend("heap", threads=1)
    with factory.create_keyed_backend(int, max_parallelism=1) as keyed:
        for descriptor in (a, b):
            keyed.get_value_state(descriptor).update_many(keys, keys)
        savepoint = keyed.savepoint(tmp_path / "savepoint")
    with factory.create_keyed_backend(int, max_parallelism=1, restore=savepoint) as keyed:
        state: Any = keyed.get_value_state(a)
        for key in keys[:10_100]:
            keyed.set_current_key(key)
            state.clear()
        mark = keyed.mark()
        for key in keys[-50:]:
            keyed.set_current_key(key)
            state.update(-key)
        keyed.get_value_state(b)
        keyed.rollback(mark)
        state.plain._check()
        assert state.get_many(keys).to_pylist() == [None] * 10_100 + keys[10_100:]


def test_memory_goes_back_to_the_system_after_a_peak() -> None:
    core, table = filled(1_000_000, max_parallelism=128)
    peak = core.metrics()["used_bytes"]
    batch_kernels.remove_many(table, np.arange(2_000, 1_000_000))
    for _ in range(12_000):
        core.advance(1_000)
    core._check()
    assert peak > 24_000_000
    assert core.metrics()["used_bytes"] < 5_000_000
