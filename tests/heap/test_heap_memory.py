"""What state costs in the heap backend: nothing once it is gone, nothing to the collector, one element a change."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from contract.samples import LastAdded

from statebackend import types as t
from statebackend.backends.heap import HeapBackend
from statebackend.keys import VOID, TimeWindow
from statebackend.state import (
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from statebackend.state.ttl import StateTtlConfig

#: A run by default, and the full size.
SIZES = [2_000, pytest.param(1_000_000, marks=pytest.mark.stress)]
LARGE = [20_000, pytest.param(1_000_000, marks=pytest.mark.stress)]


def keep_last(_: Any, new: Any) -> Any:
    return new


def write(state: Any, value: Any) -> None:
    kind = state.descriptor.kind
    if kind == "value":
        state.update(value)
    elif kind == "list":
        state.add(value)
        state.add(value)
    elif kind == "map":
        state.put(1, value)
        state.put(2, value)
    else:
        state.add(value)


def of_every_kind(declared: t.Type, initial: Any) -> list[StateDescriptor]:
    return [
        ValueStateDescriptor("value", declared),
        ListStateDescriptor("list", declared),
        MapStateDescriptor("map", t.LONG, declared),
        ReducingStateDescriptor("reducing", keep_last, declared),
        AggregatingStateDescriptor("aggregating", LastAdded(), declared, declared),
        FoldingStateDescriptor("folding", initial, keep_last, declared),
    ]


SAMPLES: list[tuple[t.Type, Any]] = [
    (t.LONG, 10**15),
    (t.STRING, "a text that is not short"),
    (t.LIST(t.STRING), ["a", "b"]),
    (t.TUPLE(t.LONG, t.DOUBLE), (1, 2.0)),
    (t.PICKLE, ("an", "object")),
]
by_type = pytest.mark.parametrize(("declared", "sample"), SAMPLES, ids=repr)


def give_back(keyed: Any) -> None:
    while keyed.core.advance(1 << 20):
        pass
    keyed.core.arena.trim()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("how", ["clear", "clear_key", "rollback"])
@by_type
def test_removal_gives_all_memory_back(
    declared: t.Type, sample: Any, how: str, n: int, traced: Callable[[], int]
) -> None:
    keyed = HeapBackend().create_keyed_backend(str)
    states = [keyed.get_state(descriptor) for descriptor in of_every_kind(declared, sample)]

    def go_to(number: int) -> None:
        keyed.set_current_key(f"key-{number}")
        keyed.set_current_namespace(VOID if number % 8 else TimeWindow(number, number + 1))

    keyed.set_current_key("a")
    for state in states:
        write(state, sample)
        state.clear()
    give_back(keyed)
    gc.collect()
    references, before = sys.getrefcount(sample), traced()
    mark = keyed.mark() if how == "rollback" else None
    for number in range(n):
        go_to(number)
        for state in states:
            write(state, sample)
    assert keyed.num_entries() == n * len(states)
    if mark is not None:
        keyed.rollback(mark)
        keyed.release(mark)
    for number in range(n if mark is None else 0):
        go_to(number)
        if how == "clear_key":
            keyed.clear_key()
        else:
            for state in states:
                state.clear()
    keyed.set_current_namespace(VOID)
    keyed.set_current_key("a")
    assert keyed.num_entries() == 0
    give_back(keyed)
    gc.collect()
    usage = keyed.core.arena.usage()
    assert (usage["run_bytes"], usage["blob_bytes"], usage["extent_bytes"]) == (0, 0, 0)
    assert sys.getrefcount(sample) == references
    # Left are the maps' heads of two or four tables, and the numbers of namespaces until the next sweep.
    assert traced() - before < 400_000 * len(states) + 150 * (n // 8)


@pytest.mark.parametrize("n", SIZES)
@by_type
def test_declared_types_are_nothing_to_the_garbage_collector(declared: t.Type, sample: Any, n: int) -> None:
    keyed = HeapBackend().create_keyed_backend(int)
    states = [keyed.get_state(descriptor) for descriptor in of_every_kind(declared, sample)]
    gc.collect()
    before = len(gc.get_objects())
    for number in range(n):
        keyed.set_current_key(number)
        for state in states:
            write(state, sample)
    gc.collect()
    # Extents are a few objects each; entries are none, and even PICKLE's are the user's object only.
    assert len(gc.get_objects()) - before < 200
    assert keyed.num_entries() == n * len(states)


# --- one element costs one element -----------------------------------------------------------------------------------


class Costs:
    """What happened in the core since it was made."""

    def __init__(self, keyed: Any) -> None:
        self._keyed, self._before = keyed, keyed.metrics()

    def __call__(self, figure: str) -> int:
        return int(self._keyed.metrics()[figure] - self._before[figure])


@pytest.mark.parametrize("n", LARGE)
@pytest.mark.parametrize("ttl", [False, True])
@pytest.mark.parametrize("declared", [t.LONG, t.STRING, t.PICKLE], ids=repr)
@pytest.mark.parametrize("kind", ["list", "map"])
def test_one_more_in_a_large_collection_costs_what_it_costs_in_a_small_one(
    kind: str, declared: t.Type, ttl: bool, n: int
) -> None:
    value = 7 if declared == t.LONG else "text"
    descriptor: Any = (
        ListStateDescriptor("s", declared) if kind == "list" else MapStateDescriptor("s", int, declared)
    )
    if ttl:
        descriptor.enable_time_to_live(StateTtlConfig(10**12))
    keyed = HeapBackend().create_keyed_backend(int, max_parallelism=1)
    state = keyed.get_state(descriptor)
    for key, size in ((1, 10), (2, n)):
        keyed.set_current_key(key)
        state.add_all([value] * size) if kind == "list" else state.put_all(dict.fromkeys(range(size), value))
    give_back(keyed)
    costs = {}
    for key in (1, 2):
        view, mark = keyed.core.snapshot(), keyed.mark()
        keyed.set_current_key(key)
        cost = Costs(keyed)
        if kind == "list":
            state.add(value)
        else:
            state.put(5, value)
            state.put(n + 1, value)
            state.remove(6)
        costs[key] = (cost("copied_entries"), cost("copied_pages"), cost("used_bytes"), cost("blob_bytes"))
        # Chains and pages are shared by all keys: a few of either, whatever the size. How many is up to the
        # hash seed of the process: what stands before an entry in its chain is cloned with it.
        assert costs[key][0] <= 12
        assert costs[key][1] <= 8
        assert costs[key][2] <= 256 * 1024
        keyed.release(mark)
        view.release()
        give_back(keyed)
    if kind == "list":
        assert abs(costs[1][0] - costs[2][0]) <= 10
        assert abs(costs[1][1] - costs[2][1]) <= 4
        assert abs(costs[1][3] - costs[2][3]) <= 8192  # a chunk of the largest size


@pytest.mark.parametrize("n", LARGE)
def test_iterating_copies_nothing(n: int, traced: Callable[[], int]) -> None:
    keyed = HeapBackend().create_keyed_backend(int)
    keyed.set_current_key(1)
    numbers = keyed.get_list_state(ListStateDescriptor("l", int))
    counts = keyed.get_map_state(MapStateDescriptor("m", int, int))
    numbers.update(range(n))
    counts.put_all(dict.fromkeys(range(n), 1))
    for state in (numbers, counts):
        steps = iter(state)
        tracemalloc.reset_peak()
        begin = tracemalloc.get_traced_memory()[0]
        assert [next(steps) for _ in range(3)] == [0, 1, 2]
        assert tracemalloc.get_traced_memory()[1] - begin < 20_000
        assert sum(1 for _ in steps) == n - 3
    tracemalloc.reset_peak()
    begin = tracemalloc.get_traced_memory()[0]
    assert sum(numbers) == n * (n - 1) // 2
    # Noted down are the places of the chunks, 12 bytes for each 4 KB.
    assert tracemalloc.get_traced_memory()[1] - begin < 20_000 + n // 20


def test_a_state_without_entries_is_small(traced: Callable[[], int]) -> None:
    keyed = HeapBackend().create_keyed_backend(int)
    keyed.set_current_key(1)
    before = traced()
    for number in range(10):
        for descriptor in of_every_kind(t.LONG, 0):
            descriptor.name = f"{descriptor.kind}-{number}"
            keyed.get_state(descriptor).exists()
    assert (traced() - before) / 60 < 20_000
    assert keyed.metrics()["extent_bytes"] == 0


def test_records_with_text_take_little_more_than_their_columns() -> None:
    """At most half more than the Arrow columns of the values, and 40 bytes for each entry."""
    n = 300_000
    numbers = pa.array(np.random.default_rng(1).integers(0, 10**10, n))
    texts = pc.binary_join_element_wise("user-", numbers.cast(pa.string()), "")
    column = pa.StructArray.from_arrays([numbers, texts], ["a", "b"])
    keyed = HeapBackend(threads=1).create_keyed_backend(int)
    state = keyed.get_state(ValueStateDescriptor("value", t.ROW(a=t.LONG, b=t.STRING)))
    for first in range(0, n, n // 10):
        state.update_many(np.arange(first, first + n // 10), column[first : first + n // 10])
    assert keyed.core.metrics()["used_bytes"] <= 1.5 * column.nbytes + 40 * n
