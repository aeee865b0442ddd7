"""Every batch kernel does what the one-by-one calls do in the same order, or nothing at all."""

from __future__ import annotations

import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from map_model import (
    INTEGER_BITS,
    Layout,
    array_of,
    list_of,
    packed,
    reduce_many,
    value_maker,
)
from processes import run

from statebackend._core.core_probe import StateTable
from statebackend._core.kernels import batch_kernels
from statebackend._core.key_groups import HashPlan
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import KeyGroupError, UsageError

pytestmark = pytest.mark.checked

SHORT, LONG = 300, 6_000  # below and above the size from which batches are sorted by key group
CHUNK = 1 << 21
THREADS = (1, 2, 3, 8)
NUMBERS = ["long", "int", "short", "byte", "double", "float", "bool"]
LAYOUTS = [
    *(Layout(value) for value in [*NUMBERS, "bytes", 1, 5, 8, 200]),
    *(Layout(value, "bytes") for value in ["long", "byte", "bytes", 24]),
    *(Layout(value, "int", True, True) for value in ["long", "double", "bytes", 3]),
    *(Layout(value, "bytes", True, True) for value in ["int", "bytes"]),
]
LISTS = [
    *(Layout(("list", element)) for element in [*NUMBERS, "bytes", 1, 24]),
    Layout(("list", "long"), "bytes", True, True),
    Layout(("list", "bytes"), "bytes", True, True),
]
CONDITIONS = ["plain", "mark", "snapshot", "snapshot in mark", "mark in snapshot", "two marks"]


def key_of(layout: Layout, number: int) -> Any:
    if layout.key == "int":
        return number * 7919 - 50_000
    return b"%d" % number if number % 5 else b"a-long-key-%0*d" % (number % 40, number)


def key_array(layout: Layout, numbers: Any) -> Any:
    keys = [key_of(layout, int(n)) for n in numbers]
    return packed(keys) if layout.key == "bytes" else np.array(keys, dtype=np.int64)


def contents(table: StateTable) -> dict[Any, Any]:
    return {(e.key, e.namespace): (e.value, table.timestamp(e.key, e.namespace)) for e in list(table)}


class Pair:
    """A table for the kernel and one for the scalar calls, filled alike and mid-rehash, under a condition."""

    def __init__(
        self,
        layout: Layout,
        rng: random.Random,
        condition: str = "plain",
        n: int = 800,
        own: list[int] | None = None,
        **options: Any,
    ) -> None:
        self.layout, self.rng = layout, rng
        self.is_list = isinstance(layout.value, tuple)
        self.kind = layout.value[1] if self.is_list else layout.value
        self.make = value_maker(self.kind)
        self.n, self.own = n, own
        options = {"initial_capacity": 4, "max_parallelism": 3, **options}
        self.cores = [StateCore(seed=7), StateCore(seed=7)]
        self.kernel, self.scalar = (layout.table(core, **options) for core in self.cores)
        self.fill(range(n))
        self.marks: list[Any] = []
        self.views: list[Any] = []
        for step in {
            "plain": (),
            "mark": "m",
            "snapshot": "s",
            "snapshot in mark": "mws",
            "mark in snapshot": "swm",
            "two marks": "mwmw",
        }[condition]:
            if step == "m":
                self.marks.append(([core.mark() for core in self.cores], contents(self.kernel)))
            elif step == "s":
                self.views.append(([core.snapshot() for core in self.cores], contents(self.kernel)))
            else:
                self.fill(range(0, n, 7))

    def value(self) -> Any:
        return self.make(self.rng)

    def fill(self, numbers: range) -> None:
        for number in [self.own[n] for n in numbers] if self.own else numbers:
            value = self.value()
            for table in (self.kernel, self.scalar):
                if self.is_list:
                    table.append(key_of(self.layout, number), value)
                else:
                    table.put(key_of(self.layout, number), value, 0, number if self.layout.timestamps else 0)

    def numbers(self, rows: int) -> list[int]:
        """Keys that are there, keys that are not, and many of them twice."""
        return [self.rng.randrange(2 * self.n) for _ in range(rows)]

    def compare(self) -> None:
        """Equal now, equally dirty, equal in the snapshots and after every rollback."""
        assert contents(self.kernel) == contents(self.scalar)
        assert len(self.kernel) == len(self.scalar)
        self.check()
        for views, then in self.views:
            assert self.kernel.rows_in(views[0]) == {where: value for where, (value, _) in then.items()}
        for marks, then in reversed(self.marks):
            assert self.kernel.dirty(marks[0]) == self.scalar.dirty(marks[1])
            for core, mark in zip(self.cores, marks, strict=True):
                core.rollback(mark)
            assert contents(self.kernel) == then
            self.check()

    def check(self) -> None:
        self.kernel._check()
        self.cores[0]._check()


@contextmanager
def nothing_changes(pair: Pair) -> Iterator[None]:
    """What a call that fails must leave alone; and that the table goes on working."""
    table = pair.kernel
    before = contents(table)
    dirty = [table.dirty(marks[0]) for marks, _ in pair.marks]
    used = table.metrics()["used_slots"]
    yield
    assert contents(table) == before
    assert len(table) == len(before)
    assert [table.dirty(marks[0]) for marks, _ in pair.marks] == dirty
    pair.check()
    if not pair.views and not pair.marks:
        while pair.cores[0].advance(1 << 20):
            pass
        assert table.metrics()["used_slots"] == used
    # Written again, one by one: under a mark these writes are as new to the journal as the first ones.
    pair.fill(range(0, pair.n, 3))
    pair.compare()


# --- equal to one by one -------------------------------------------------------------------------------


def options_for(layout: Layout, rng: random.Random) -> dict[str, int]:
    return {"namespace": rng.choice((0, 2)) if layout.namespaces else 0, "threads": rng.choice(THREADS)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_update_get_and_remove(layout: Layout, day_rng: random.Random) -> None:
    rng = day_rng
    for rows, condition in zip((0, 1, SHORT, LONG), rng.sample(CONDITIONS, 4), strict=True):
        pair = Pair(layout, rng, condition)
        options = options_for(layout, rng)
        ns, timestamp = options["namespace"], 99 if layout.timestamps else 0

        numbers, values = pair.numbers(rows), [pair.value() for _ in range(rows)]
        is_empty_block = rows == 0 and isinstance(pair.kind, int)
        batch_kernels.update_many(
            pair.kernel,
            key_array(layout, numbers),
            np.empty((0, pair.kind), np.uint8) if is_empty_block else array_of(values, pair.kind),
            timestamp=timestamp,
            **options,
        )
        for number, value in zip(numbers, values, strict=True):
            pair.scalar.put(key_of(layout, number), value, ns, timestamp)

        numbers = pair.numbers(rows)
        found_values, found = batch_kernels.get_many(pair.kernel, key_array(layout, numbers), **options)
        slots = batch_kernels.find_many(pair.kernel, key_array(layout, numbers), **options)
        expected = [pair.scalar.get(key_of(layout, number), ns) for number in numbers]
        got = list_of(found_values, pair.kind)
        assert found.tolist() == (slots != 0).tolist() == [value is not None for value in expected]
        assert [a for a, there in zip(got, found, strict=True) if there] == [
            b for b in expected if b is not None
        ]
        remove_and_compare(pair, rows, options)


def remove_and_compare(pair: Pair, rows: int, options: dict[str, int]) -> None:
    numbers = pair.numbers(rows)
    removed = batch_kernels.remove_many(pair.kernel, key_array(pair.layout, numbers), **options)
    assert removed.tolist() == [
        pair.scalar.remove(key_of(pair.layout, number), options["namespace"]) for number in numbers
    ]
    pair.compare()


@pytest.mark.parametrize("layout", LISTS, ids=str)
def test_append(layout: Layout, day_rng: random.Random) -> None:
    for rows, condition in zip((1, SHORT, LONG), day_rng.sample(CONDITIONS, 3), strict=True):
        pair = Pair(layout, day_rng, condition, n=200)
        options = options_for(layout, day_rng)
        numbers, values = pair.numbers(rows), [pair.value() for _ in range(rows)]
        batch_kernels.append_many(
            pair.kernel, key_array(layout, numbers), array_of(values, pair.kind), timestamp=5, **options
        )
        for number, value in zip(numbers, values, strict=True):
            pair.scalar.append(key_of(layout, number), value, options["namespace"], 5)
        remove_and_compare(pair, rows // 2, options)


def test_more_rows_than_a_chunk(np_rng: np.random.Generator) -> None:
    core = StateCore()
    table = StateTable(core, value="long", max_parallelism=16)
    n = CHUNK + 10_000
    keys = np_rng.integers(0, 300_000, n)
    values = np_rng.integers(-1000, 1000, n)
    sums = np.zeros(300_000, dtype=np.int64)
    np.add.at(sums, keys, values)
    distinct, first = np.unique(keys, return_index=True)

    rows, touched_keys, touched = reduce_many(table, keys, values, "sum", threads=2, return_touched=True)
    groups = HashPlan("int64").key_groups(keys[first], 16)
    assert (rows == first[np.lexsort((first, groups))]).all()
    assert (touched_keys == keys[rows]).all()
    assert (touched == sums[touched_keys]).all()
    found_values, found = batch_kernels.get_many(table, keys, threads=2)
    assert found.all()
    assert (found_values == sums[keys]).all()

    # An overflow in the second chunk takes the first one back.
    mark = core.mark()
    values[-1] = 2**63 - 1
    sums_before = batch_kernels.get_many(table, distinct)[0]
    table.put(int(keys[-1]), 2**62)
    with pytest.raises(OverflowError, match=f"position {n - 1}"):
        reduce_many(table, keys, np.where(np.arange(n) == n - 1, 2**62, 0), "sum", threads=2)
    assert table.dirty(mark) == {(int(keys[-1]), 0)}
    core.rollback(mark)
    assert (batch_kernels.get_many(table, distinct)[0] == sums_before).all()
    table._check()

    # Rows of one key in both chunks are applied in order.
    batch_kernels.update_many(table, keys, np.arange(n), threads=2)
    last = np.zeros(300_000, dtype=np.int64)
    last[keys] = np.arange(n)
    assert (batch_kernels.get_many(table, distinct)[0] == last[distinct]).all()
    core.release(mark)
    removed = batch_kernels.remove_many(table, keys, threads=2)
    assert removed.sum() == len(distinct)
    assert len(table) == 0


# --- nothing or all --------------------------------------------------------------------------------------


@pytest.mark.sampled(16)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize(
    ("kind", "reduction"), [("long", "count"), *((k, r) for k in INTEGER_BITS for r in ("sum", "product"))]
)
def test_an_overflow_undoes_the_whole_call(
    reduction: str, kind: str, condition: str, rng: random.Random
) -> None:
    top = 2 ** (INTEGER_BITS[kind] - 1) - 1
    for layout in (Layout(kind), Layout(kind, "bytes", timestamps=True)):
        for rows in (SHORT, LONG):
            at = rng.choice((0, rows // 2, rows - 1))
            pair = Pair(layout, rng, condition, n=400)
            full = pair.n - 1
            numbers = [rng.choice((rng.randrange(full), pair.n + rng.randrange(full))) for _ in range(rows)]
            numbers[at] = full
            for number in range(pair.n):
                for table in (pair.kernel, pair.scalar):
                    table.put(key_of(layout, number), top if number == full else 0)
            values = np.ones(rows, dtype=f"i{INTEGER_BITS[kind] // 8}")
            values[at] = 2
            if reduction == "product":
                numbers = [number if number < pair.n else number % full for number in numbers]
            with nothing_changes(pair), pytest.raises(OverflowError, match=f"position {at}$"):
                reduce_many(
                    pair.kernel,
                    key_array(layout, numbers),
                    values,
                    reduction,
                    timestamp=7,
                    threads=rng.choice(THREADS),
                )


def test_a_foreign_key_in_the_second_chunk_takes_the_first_back(np_rng: np.random.Generator) -> None:
    groups = HashPlan("int64").key_groups(np.arange(1000), 4)
    own, foreign = np.flatnonzero(groups < 2), int(np.flatnonzero(groups >= 2)[0])
    table = StateTable(StateCore(), value="long", max_parallelism=4, key_group_range=(0, 1))
    table.put(int(own[0]), 5)
    keys = np.append(np_rng.choice(own, CHUNK + 5), foreign)
    with pytest.raises(KeyGroupError, match=f"position {CHUNK + 5}"):
        batch_kernels.update_many(table, keys, keys, threads=2)
    assert contents(table) == {(int(own[0]), 0): (5, None)}
    table._check()


# --- floating point ---------------------------------------------------------------------------------------


def test_nan_and_negative_zero_are_stored_bit_for_bit() -> None:
    table = StateTable(StateCore(), value="double")
    bits = np.array([0x7FF8000000000001, 0xFFF8000000000000, 0x8000000000000000, 1], dtype=np.uint64)
    batch_kernels.update_many(table, np.arange(4), bits.view(np.float64))
    assert batch_kernels.get_many(table, np.arange(4))[0].view(np.uint64).tolist() == bits.tolist()


# --- several threads, and what has brought the interpreter down ------------------------------------------


def run_code(code: str) -> None:
    run(textwrap.dedent(code))


def test_a_threaded_read_that_moves_entries_leaves_the_journal_whole() -> None:
    """Under a mark and a snapshot the rehash clones entries; the lanes of a read record those moves too."""
    run_code("""
        import numpy as np
        from statebackend._core.kernels import batch_kernels
        from statebackend._core.tables.state_core import StateCore
        from statebackend._core.core_probe import StateTable

        core = StateCore(seed=1)
        table = StateTable(core, max_parallelism=8, initial_capacity=1024)
        n = 0
        while table.metrics()["rehashing_maps"] < 6:
            table.put(n, n)
            n += 1
        mark = core.mark()
        for key in range(0, n, 40):
            table.put(key, -key)
        view = core.snapshot()
        moved = core.metrics()["rehashed_entries"]
        batch_kernels.get_many(table, np.arange(n), threads=4)
        assert core.metrics()["rehashed_entries"] > moved
        core.rollback(mark)
        table._check()
        assert [table.get(key) for key in range(n)] == list(range(n))
        assert table.rows_in(view) == {(k, 0): -k if k % 40 == 0 else k for k in range(n)}
        view.release()
        core.release(mark)
        while core.advance(1 << 20):
            pass
        assert table.metrics()["used_slots"] == n
    """)


def test_two_threads_that_need_an_extent_at_the_same_time_get_two() -> None:
    run_code("""
        import numpy as np
        from statebackend._core.kernels import batch_kernels
        from statebackend._core.tables.state_core import StateCore
        from statebackend._core.core_probe import StateTable

        keys = np.arange(100_000)
        values = np.zeros((len(keys), 200), np.uint8)
        values[:, :8] = keys.view(np.uint8).reshape(-1, 8)
        for _ in range(4):
            core = StateCore()
            table = StateTable(core, value=200)
            batch_kernels.update_many(table, keys, values, threads=4)
            core._check()
            assert sum(map(len, core.arena.memory())) == core.arena.usage()["extent_bytes"]
            out, found = batch_kernels.get_many(table, keys, threads=4)
            assert found.all() and (out == values).all()
    """)


def test_a_thread_that_comes_too_late_holds_nothing_and_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Callable[[], None]] = []

    class BusyPool:
        submit = staticmethod(late.append)

    monkeypatch.setattr(batch_kernels, "_thread_pool", BusyPool)
    core = StateCore()
    table = StateTable(core)
    references = sys.getrefcount(table), sys.getrefcount(core)
    keys = np.arange(20_000)
    batch_kernels.update_many(table, keys, keys, threads=3)
    assert (sys.getrefcount(table), sys.getrefcount(core)) == references
    assert len(late) == 2  # other lanes
    assert [table.get(key) for key in (0, 19_999)] == [0, 19_999]
    del table, core
    for work in late:
        work()


def test_results_do_not_depend_on_threads(np_rng: np.random.Generator) -> None:
    keys, values = np_rng.integers(0, 20_000, 50_000), np_rng.random(50_000)
    results = []
    for threads in (1, 2, 3, 8, 16, 99, 0, -1):
        table = StateTable(StateCore(), value="double")
        rows, _, sums = reduce_many(table, keys, values, "sum", threads=threads, return_touched=True)
        results.append(
            (
                rows.tobytes(),
                sums.tobytes(),
                batch_kernels.get_many(table, keys, threads=threads)[0].tobytes(),
            )
        )
    assert set(results) == {results[0]}


# --- what is no batch ---------------------------------------------------------------------------------------


def test_batches_that_a_table_does_not_take() -> None:
    core = StateCore()
    longs, strings = StateTable(core, value="long"), StateTable(core, key="bytes", value="bytes")
    objects, lists = StateTable(core, value="object"), StateTable(core, value=("list", "long"))
    raw, flags, floats = (
        StateTable(core, value=5),
        StateTable(core, value="bool"),
        StateTable(core, value="double"),
    )
    of_objects = StateTable(core, value=("list", "object"))
    k, kb = np.arange(3), packed([b"a", b"b", b"c"])
    wrong: list[Callable[[], Any]] = [
        lambda: batch_kernels.update_many(longs, k, np.arange(2)),
        lambda: batch_kernels.update_many(longs, k, np.arange(3, dtype=np.int32)),
        lambda: batch_kernels.update_many(longs, k, np.arange(3.0)),
        lambda: batch_kernels.update_many(longs, k.astype(np.int32), k),
        lambda: batch_kernels.update_many(longs, k.astype(np.uint64), k),
        lambda: batch_kernels.update_many(longs, kb, k),
        lambda: batch_kernels.update_many(longs, k, kb),
        lambda: batch_kernels.update_many(longs, k, k, namespace=1),
        lambda: batch_kernels.update_many(strings, k, kb),
        lambda: batch_kernels.update_many(strings, kb, k),
        lambda: batch_kernels.update_many(strings, kb, packed([b"a", b"b"])),
        lambda: batch_kernels.update_many(strings, (np.array([0, 2, 1, 3]), kb[1]), kb),
        lambda: batch_kernels.update_many(strings, (np.array([0, 1, 2, 4]), kb[1]), kb),
        lambda: batch_kernels.update_many(strings, (np.array([-1, 1, 2, 3]), kb[1]), kb),
        lambda: batch_kernels.update_many(strings, (np.array([0, 1, 2, 3], np.int32), kb[1]), kb),
        lambda: batch_kernels.update_many(strings, kb, (np.array([0, 1, 2, 2**62]), kb[1])),
        lambda: batch_kernels.update_many(strings, (np.array([], np.int64), kb[1]), kb),
        lambda: batch_kernels.update_many(raw, k, np.zeros((3, 4), np.uint8)),
        lambda: batch_kernels.update_many(raw, k, np.zeros(15, np.uint8)),
        lambda: batch_kernels.update_many(objects, k, k),
        lambda: batch_kernels.update_many(lists, k, k),
        lambda: batch_kernels.get_many(objects, k),
        lambda: batch_kernels.get_many(lists, k),
        lambda: batch_kernels.remove_many(objects, k),
        lambda: batch_kernels.append_many(longs, k, k),
        lambda: batch_kernels.append_many(of_objects, k, k),
        lambda: batch_kernels.append_many(lists, k, np.arange(3.0)),
        lambda: reduce_many(longs, k, k, "median"),
        lambda: reduce_many(longs, k, np.arange(2), "sum"),
        lambda: reduce_many(flags, k, np.ones(3, bool), "sum"),
        lambda: reduce_many(floats, k, np.arange(3.0), "count"),
    ]
    for keys in ([1, 2], None, 5, "ab", np.arange(6).reshape(3, 2), np.array(1)):
        wrong.append(lambda keys=keys: batch_kernels.get_many(longs, keys))
        wrong.append(lambda keys=keys: batch_kernels.update_many(longs, keys, k))
    for values in ([1, 2, 3], None, np.arange(6).reshape(3, 2)):
        wrong.append(lambda values=values: batch_kernels.update_many(longs, k, values))
    for i, call in enumerate(wrong):
        try:
            call()
        except (UsageError, TypeError):
            continue
        pytest.fail(f"wrong[{i}] was taken")
    for table in (longs, strings, objects, lists, raw, flags, floats, of_objects):
        assert len(table) == 0
        table._check()


def test_strided_arrays_are_taken_as_they_read() -> None:
    table = StateTable(StateCore(), value="long")
    batch_kernels.update_many(table, np.arange(20)[::2], np.arange(10)[::-1])
    assert [table.get(2 * i) for i in range(10)] == list(range(9, -1, -1))
    raw = StateTable(StateCore(), value=3)
    batch_kernels.update_many(
        raw, np.arange(2), np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    )
    assert raw.get(1) == bytes([3, 4, 5])
