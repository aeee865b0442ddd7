"""The two limits of a backend's memory: `max_bytes`, and what refs can name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from statebackend._core.core_probe import StateTable, fail_allocation, limit_extents
from statebackend._core.kernels import batch_kernels
from statebackend._core.tables.state_core import StateCore
from statebackend.backends.heap import HeapBackend
from statebackend.errors import MemoryLimitError
from statebackend.state import ValueStateDescriptor

pytestmark = pytest.mark.checked

EXTENT = 2 << 20


@pytest.fixture
def four_extents() -> Iterator[None]:
    """No arena has more than four extents."""
    before = limit_extents(4)
    try:
        yield
    finally:
        limit_extents(before)


def consume(calls: Iterator[None]) -> None:
    for _ in calls:
        pass


def put_many(table: StateTable, first: int) -> None:
    keys = np.arange(first, first + 10_000)
    batch_kernels.update_many(table, keys, keys, threads=2)


def put_each(table: StateTable, first: int) -> None:
    for key in range(first, first + 10_000):
        table.put(key, key)


@pytest.mark.usefixtures("four_extents")
@pytest.mark.parametrize("put", [put_many, put_each])
@pytest.mark.parametrize("max_bytes", [0, 1 << 30])
def test_error_of_a_full_arena_has_contents_and_remedy(
    put: Callable[[StateTable, int], None], max_bytes: int
) -> None:
    core = StateCore(max_bytes=max_bytes)
    table = StateTable(core, value="long", max_parallelism=4)
    with pytest.raises(MemoryLimitError, match="at most 32 GB") as caught:
        consume(put(table, first) for first in range(0, 10_000_000, 10_000))
    assert "more backends" in caught.value.hint
    assert core.arena.usage()["extent_bytes"] == 4 * EXTENT
    n = len(table)
    assert n > 100_000
    core._check()
    assert [table.get(key) for key in (0, n - 1, n)] == [0, n - 1, None]
    assert all(table.remove(key) for key in range(1000))
    table.put(0, 1)  # there is room again
    limit_extents(0)
    put(table, n - n % 10_000)
    core._check()


@pytest.mark.usefixtures("four_extents")
def test_the_reason_of_an_old_refusal_is_forgotten() -> None:
    core = StateCore()
    table = StateTable(core, value="bytes", max_parallelism=1)
    with pytest.raises(MemoryLimitError, match="32 GB"):
        consume(table.put(key, b"x" * 2000) for key in range(10_000_000))
    fail_allocation(1)
    try:
        with pytest.raises(MemoryError, match="no memory for state"):
            table.put(0, b"y" * 10_000)
    finally:
        fail_allocation(0)


@pytest.mark.usefixtures("four_extents")
def test_the_error_names_the_state() -> None:
    with HeapBackend().create_keyed_backend(int) as keyed:
        state = keyed.get_value_state(ValueStateDescriptor("counts", int))

        def fill() -> None:
            for key in range(10_000_000):
                keyed.set_current_key(key)
                state.update(key)

        with pytest.raises(MemoryLimitError, match="state 'counts', its arena holds at most 32 GB"):
            fill()
        assert state.value() is None


def with_idle_extents(max_bytes: int) -> tuple[StateCore, StateTable]:
    """A core of which most extents are idle, and a table of bytes in it."""
    core = StateCore(max_bytes=max_bytes)
    numbers = StateTable(core, value="long", max_parallelism=1)
    keys = np.arange(300_000)
    batch_kernels.update_many(numbers, keys, keys)
    batch_kernels.remove_many(numbers, keys)
    while core.advance(1 << 20):
        pass
    return core, StateTable(core, value="bytes", max_parallelism=1)


def test_idle_extents_make_room_for_large_values() -> None:
    core, table = with_idle_extents(0)
    idle = core.arena.usage()["extent_bytes"]
    assert idle > 4 * EXTENT
    limit = core.arena.usage()["used_bytes"] + EXTENT // 2
    core.arena.set_limit(limit)
    table.put(1, b"a" * EXTENT)
    assert core.arena.usage()["used_bytes"] <= limit
    # No more than what is needed went back.
    assert core.arena.usage()["extent_bytes"] == idle - EXTENT
    core._check()
    table.put(1, b"b" * (3 * EXTENT))
    assert table.get(1) == b"b" * (3 * EXTENT)
    assert core.arena.usage()["used_bytes"] <= limit
    core._check()


def test_idle_extents_stay_if_they_do_not_make_enough_room() -> None:
    core, table = with_idle_extents(0)
    before = core.arena.usage()
    core.arena.set_limit(before["used_bytes"])
    with pytest.raises(MemoryLimitError, match="max_bytes="):
        table.put(1, b"a" * before["used_bytes"])
    after = core.arena.usage()
    assert (len(table), after["extent_bytes"]) == (0, before["extent_bytes"])
    core._check()
