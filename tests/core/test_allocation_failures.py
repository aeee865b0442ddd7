"""Out of memory at every point of every operation: the error, nothing changed, and everything works
afterwards.

A scenario is built anew for every n; then the n-th allocation of its operation fails. The sweep ends with
the first n that the operation does not reach. That nothing leaks is seen by the checked build's counters, in
conftest.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from map_model import Layout, array_of, packed, reduce_many, value_maker

from statebackend._core.core_probe import MapTable, StateTable, dirty, fail_allocation
from statebackend._core.kernels import batch_kernels
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import ClosedError, MemoryLimitError

pytestmark = pytest.mark.checked

CONDITIONS = ["plain", "mark", "snapshot", "snapshot in mark", "mark in snapshot"]
#: Entries: none, few, just before doubling (the next insert opens the second table), amid a rehash.
SIZES = [0, 3, 4, 6, 13, 28]
NEW, THERE = 1_000, 2


def points() -> Iterator[int]:
    """1, 2, 3 ... and coarser later: a long batch allocates once a row."""
    n = 1
    while n < 20_000:
        yield n
        n = n + 1 if n < 30 else n * 3 // 2


class World:
    """A core with a table and what holds on to its past."""

    def __init__(self, layout: Layout, condition: str, size: int, **options: Any) -> None:
        self.layout, self.size = layout, size
        self.random = random.Random(5)
        self.is_list = isinstance(layout.value, tuple)
        self.kind = layout.value[1] if self.is_list else layout.value
        self.make = value_maker(self.kind)
        self.core = StateCore(seed=11)
        self.table = layout.table(self.core, **{"max_parallelism": 1, "initial_capacity": 4, **options})
        self.hold(condition)

    def hold(self, condition: str) -> None:
        """Fill the table, under a condition."""
        self.marks: list[Any] = []
        self.views: list[Any] = []
        self.then: Any = None  # at the mark
        self.fill(range(self.size))
        for word in condition.split(" in ")[::-1]:
            if word == "mark":
                self.then = self.contents()
                self.marks.append(self.core.mark())
            elif word == "snapshot":
                self.views.append(self.core.snapshot())
            if word != condition:
                self.fill(range(0, self.size, 3))

    def go_back(self) -> None:
        for mark in reversed(self.marks):
            self.core.rollback(mark)
            self.check()
            self.core.release(mark)
        assert not self.marks or self.then in (None, self.contents())

    def key(self, number: int) -> Any:
        return number if self.layout.key == "int" else b"key-%d" % number

    def keys(self, numbers: Any) -> Any:
        keys = [self.key(int(n)) for n in numbers]
        return packed(keys) if self.layout.key == "bytes" else np.array(keys, dtype=np.int64)

    def value(self) -> Any:
        return self.make(self.random)

    def put(self, number: int) -> None:
        if self.is_list:
            self.table.append(self.key(number), self.value())
        else:
            self.table.put(self.key(number), self.value())

    def fill(self, numbers: Any) -> None:
        for number in numbers:
            self.put(number)

    def contents(self) -> Any:
        return {(e.key, e.namespace): e.value for e in list(self.table)}

    def seen(self) -> Any:
        """All that a caller can see."""
        return (
            self.contents(),
            len(self.table),
            [self.table.dirty(mark) for mark in self.marks],
            [self.table.rows_in(view) for view in self.views],
        )

    def check(self) -> None:
        self.table._check()
        self.core._check()

    def end(self) -> None:
        """Later operations work, and all memory comes back."""
        self.fill([NEW + 1, NEW + 2, *range(0, self.size, 2)])
        self.table.remove(self.key(NEW + 2))
        self.check()
        self.go_back()
        for view in self.views:
            self.table.rows_in(view)
            view.release()
        for entry in list(self.table):
            self.table.remove(entry.key)
        while self.core.advance(1 << 20):
            pass
        self.check()
        metrics = self.table.metrics()
        assert metrics["used_slots"] == metrics["entry_bytes"] == 0, metrics
        assert self.core.arena.usage()["blob_bytes"] == 0


def sweep(build: Callable[[], Any], operation: Callable[[Any], Any], *, keeps: bool = True) -> int:
    """Let every allocation of an operation fail; how many did. `keeps` False: a failure may leave a part."""
    world = build()
    before = world.seen()
    operation(world)
    after = world.seen()
    world.end()
    failures = 0
    for n in points():
        world = build()
        state = world.random.getstate()
        fail_allocation(n)
        try:
            operation(world)
            failed = False
        except MemoryError:
            failed = True
        finally:
            left = fail_allocation(0)
        world.check()
        failures += failed
        if failed:
            assert not keeps or world.seen() == before, f"allocation {n} failed and left something"
            world.random.setstate(state)
            operation(world)
        assert world.seen() == after, f"after a failure of allocation {n}"
        world.end()
        if left > 0:
            assert not failed
            return failures
    return failures


OPERATIONS: dict[str, Callable[[World], Any]] = {
    "put a new key": lambda w: w.put(NEW),
    "overwrite": lambda w: w.put(THERE),
    "remove": lambda w: w.table.remove(w.key(THERE)),
    "get": lambda w: w.table.get(w.key(THERE)),
    "contains": lambda w: w.table.contains(w.key(NEW)),
    "mark": lambda w: w.marks.append(w.core.mark()),
    "snapshot": lambda w: w.views.append(w.core.snapshot()),
    "advance": lambda w: w.core.advance(100),
    "read snapshots": lambda w: [(v.rows(w.table, 0, 0).columns(), w.table.rows_in(v)) for v in w.views],
    "dirty": lambda w: [w.table.dirty(mark) for mark in w.marks],
}
LAYOUTS = [
    Layout("long"),
    Layout("byte", "bytes"),
    Layout("bytes"),
    Layout("bytes", "bytes", timestamps=True),
    Layout("object"),
    Layout("copied", "bytes"),
    Layout(("list", "long")),
    Layout(("list", "bytes"), "bytes"),
    Layout(("list", 200)),
    Layout(("list", "object")),
    Layout(200, namespaces=True),
]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_single_operations(layout: Layout, operation: str) -> None:
    failures = 0
    for condition in CONDITIONS:
        for size in SIZES:
            failures += sweep(lambda c=condition, s=size: World(layout, c, s), OPERATIONS[operation])
    assert failures or operation in ("mark", "dirty", "advance")


@pytest.mark.parametrize(
    "layout", [Layout("long"), Layout("bytes", "bytes"), Layout(("list", "int"))], ids=str
)
def test_chains_that_are_cloned(layout: Layout) -> None:
    """All in one bucket, under a snapshot: writing to one entry clones those before it."""
    failures = 0
    for condition in ("snapshot", "snapshot in mark", "mark in snapshot"):
        for operation in ("overwrite", "remove", "put a new key"):
            failures += sweep(lambda c=condition: World(layout, c, 5, hash_mask=0), OPERATIONS[operation])
    assert failures


@pytest.mark.parametrize(
    "layout", [Layout("long"), Layout("bytes", "bytes"), Layout("object"), Layout(("list", "bytes"))], ids=str
)
@pytest.mark.parametrize("condition", ["mark", "snapshot in mark", "mark in snapshot"])
def test_a_rollback_that_runs_out_of_memory_can_be_repeated(condition: str, layout: Layout) -> None:
    class Changed(World):
        def __init__(self) -> None:
            super().__init__(layout, condition, 13)
            self.fill(range(0, 26, 2))
            for number in range(0, 26, 3):
                self.table.remove(self.key(number))
            self.fill(range(5))

        def seen(self) -> Any:
            return self.contents(), [self.table.rows_in(view) for view in self.views]

    def roll_back(world: Changed) -> None:
        try:
            world.core.rollback(world.marks[0])
        except MemoryError:
            world.fill(range(40))  # which the next rollback undoes as well
            raise

    failures = sweep(Changed, roll_back, keeps=False)
    assert failures or condition == "mark"

    def release(world: Changed) -> None:
        world.core.release(world.marks[0])
        world.marks.clear()

    sweep(Changed, release)


def test_doubling_a_table_of_many_pages() -> None:
    """Beyond 4096 buckets the page directory is an allocation of its own; without it the map waits."""
    build = lambda: World(Layout("long"), "snapshot", 3_073, initial_capacity=4096)  # noqa: E731
    assert sweep(build, lambda w: w.fill(range(3_073, 3_075)), keeps=False)
    world = build()
    fail_allocation(0)
    world.fill(range(3_073, 6_500))
    assert world.table.metrics()["buckets"] > 4096
    world.end()


# --- batches ---------------------------------------------------------------------------------------------


def batch_of(world: World, rows: int) -> tuple[Any, Any]:
    numbers = [world.random.randrange(2 * max(world.size, 5)) for _ in range(rows)]
    values = [world.value() for _ in range(rows)]
    if world.kind in ("long", "byte"):
        values = [value % 2 for value in values]
    return world.keys(numbers), array_of(values, world.kind)


def update(world: World, rows: int, threads: int) -> None:
    keys, values = batch_of(world, rows)
    (batch_kernels.append_many if world.is_list else batch_kernels.update_many)(
        world.table, keys, values, threads=threads
    )


def remove(world: World, rows: int, threads: int) -> None:
    batch_kernels.remove_many(world.table, batch_of(world, rows)[0], threads=threads)


def read(world: World, rows: int, threads: int) -> None:
    batch_kernels.find_many(world.table, batch_of(world, rows)[0], threads=threads)


def reduce(world: World, rows: int, threads: int) -> None:
    keys, values = batch_of(world, rows)
    reduce_many(world.table, keys, values, "max", threads=threads)


BATCHES: dict[str, Callable[[World, int, int], None]] = {
    "update": update,
    "remove": remove,
    "find": read,
    "reduce": reduce,
}
BATCH_LAYOUTS = [
    Layout("long"),
    Layout("byte", "bytes"),
    Layout("bytes", "bytes"),
    Layout(("list", "long")),
    Layout(("list", "bytes")),
]
LONG_BATCH_LAYOUTS = [Layout("long"), Layout("bytes", "bytes"), Layout(("list", "long"))]


def with_batches(layouts: list[Layout]) -> list[Any]:
    return [
        pytest.param(layout, batch, id=f"{layout}-{batch}")
        for layout in layouts
        for batch in BATCHES
        if batch != "reduce" or layout.value in ("long", "byte")
    ]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize(("layout", "batch"), with_batches(BATCH_LAYOUTS))
def test_short_batches(layout: Layout, batch: str, condition: str) -> None:
    for size in (0, 4, 13):
        sweep(lambda s=size: World(layout, condition, s), lambda w: BATCHES[batch](w, 40, 1))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize(("layout", "batch"), with_batches(LONG_BATCH_LAYOUTS))
def test_long_batches_over_threads(layout: Layout, batch: str, condition: str) -> None:
    build = lambda: World(layout, condition, 100, max_parallelism=8)  # noqa: E731
    operation = lambda w: BATCHES[batch](w, 4_200, 2)  # noqa: E731
    # Some allocations can wait: a map that gets no larger table keeps its own. Which one is the n-th depends on the
    # threads, so one sweep may by chance meet only those.
    sweeps = 1 if batch == "find" else 20
    assert any(sweep(build, operation) for _ in range(sweeps)) or batch == "find"


def test_a_batch_that_could_not_begin_leaves_no_undo_behind() -> None:
    """What is written one by one after it must not be undone by the next batch that fails."""
    core = StateCore()
    table = StateTable(core, value="byte")
    table.put(1, 10)
    mark = core.mark()
    fail_allocation(1)
    try:
        with pytest.raises(MemoryError):
            batch_kernels.update_many(table, np.array([1]), np.array([1], np.int8))
    finally:
        fail_allocation(0)
    core.release(mark)
    table.put(1, 20)
    table.put(1, 21)
    with pytest.raises(OverflowError):
        reduce_many(table, np.array([1]), np.array([127], np.int8), "sum")
    assert table.get(1) == 21


# --- map states -------------------------------------------------------------------------------------------


class MapWorld(World):
    def __init__(self, condition: str, size: int, map_key: str, value: str) -> None:
        self.size, self.random = size, random.Random(5)
        self.layout, self.make = Layout(value), value_maker(value)
        self.map_key_kind = map_key
        self.core = StateCore(seed=3)
        self.map = MapTable(
            self.core, key="int", map_key=map_key, value=value, max_parallelism=1, initial_capacity=4
        )
        self.hold(condition)

    def map_key(self, number: int) -> Any:
        return number if self.map_key_kind == "int" else b"map-key-%d" % number

    def put(self, number: int) -> None:
        self.map.put(number % 3, self.map_key(number), self.value())

    def contents(self) -> Any:
        return [list(self.map.items(key)) for key in (*range(3), NEW)], len(self.map)

    def seen(self) -> Any:
        tables = (self.map.heads, self.map.entries)
        return self.contents(), [dirty(table, mark) for mark in self.marks for table in tables]

    def check(self) -> None:
        self.map._check()
        self.core._check()

    def end(self) -> None:
        self.fill([NEW + 1, *range(0, self.size, 2)])
        self.check()
        self.go_back()
        for view in self.views:
            view.release()
        for key in (*range(3), NEW):
            self.map.clear(key)
        while self.core.advance(1 << 20):
            pass
        self.check()
        assert self.core.arena.usage()["blob_bytes"] == 0


MAP_OPERATIONS: dict[str, Callable[[MapWorld], Any]] = {
    "put into a new map": lambda w: w.map.put(NEW, w.map_key(NEW), w.value()),
    "put a new map key": lambda w: w.put(NEW),
    "overwrite": lambda w: w.put(1),
    "get": lambda w: w.map.get(1, w.map_key(1)),
    "remove": lambda w: w.map.remove(1, w.map_key(1)),
    "clear": lambda w: w.map.clear(0),
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("operation", MAP_OPERATIONS)
@pytest.mark.parametrize(("map_key", "value"), [("int", "long"), ("bytes", "bytes"), ("int", "object")])
def test_map_states(map_key: str, value: str, operation: str, condition: str) -> None:
    for size in (0, 2, 4, 13):
        sweep(lambda s=size: MapWorld(condition, s, map_key, value), MAP_OPERATIONS[operation])


def test_making_a_table() -> None:
    for n in range(1, 6):
        core = StateCore()
        fail_allocation(n)
        try:
            StateTable(core)
        except MemoryError:
            pass
        finally:
            left = fail_allocation(0)
        table = StateTable(core)
        table.put(1, 2)
        assert table.get(1) == 2
        core._check()
    assert left > 0


# --- max_bytes ---------------------------------------------------------------------------------------------


def consume(calls: Iterator[None]) -> None:
    for _ in calls:
        pass


def test_max_bytes_stops_growth_and_changes_nothing() -> None:
    core = StateCore(max_bytes=1 << 20)  # less than an extent
    table = StateTable(core, value="long")
    with pytest.raises(MemoryLimitError):
        table.put(1, 1)
    assert (len(table), table.get(1)) == (0, None)
    core.arena.set_limit(10 << 20)
    numbers = itertools.count()
    with pytest.raises(MemoryLimitError, match="max_bytes="):
        consume(table.put(number, number) for number in numbers)
    n = next(numbers) - 1
    assert n > 100_000
    assert core.metrics()["used_bytes"] <= 10 << 20
    assert len(table) == n
    table._check()
    core._check()
    with pytest.raises(MemoryLimitError):
        table.put(n, n)
    assert table.get(n) is None
    for key in range(0, n, 7):
        table.put(key, -key)  # overwriting takes nothing
    for key in range(1, n, 7):
        assert table.remove(key)
    for key in range(1, n, 7):
        table.put(key, key)
    assert len(table) == n
    core.arena.set_limit(0)
    table.put(n, n)
    assert table.get(n) == n


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("headroom", [0, 1, 2, 3])
def test_a_batch_that_passes_max_bytes_changes_nothing(headroom: int, threads: int, condition: str) -> None:
    """Undoing needs memory too, while there is none: a clone that replaced an entry is recorded."""
    world = World(Layout("long"), condition, 0, max_parallelism=8, initial_capacity=64)
    keys = np.arange(60_000)
    batch_kernels.update_many(world.table, keys[:40_000], keys[:40_000])
    if condition != "plain":
        world.views.append(world.core.snapshot())
    before = world.seen()
    core = world.core
    core.arena.set_limit(core.metrics()["used_bytes"] + (headroom << 21) // 2)
    for size in (1_000, 5_000, 20_000, 60_000, 400_000):
        rows = np.arange(size)[::-1].copy()
        try:
            batch_kernels.update_many(world.table, rows, rows + 1, threads=threads)
        except MemoryLimitError:
            break
    else:
        pytest.fail("the limit was never reached")
    core.arena.set_limit(0)
    world.check()
    after = world.seen()
    done = {(key, 0): key + 1 for s in (1_000, 5_000, 20_000, 60_000) if s < size for key in range(s)}
    assert after[0] == {**before[0], **done}
    assert after[3] == before[3]
    for mark in world.marks:
        core.rollback(mark)
        world.check()
        assert len(world.table) == 0


def test_a_rollback_works_at_the_limit() -> None:
    """The way out of a batch that passed max_bytes; under a snapshot it clones what it restores."""
    world = World(Layout("long"), "plain", 0, max_parallelism=8, initial_capacity=64)
    keys = np.arange(40_000)
    batch_kernels.update_many(world.table, keys, keys)
    mark = world.core.mark()
    batch_kernels.update_many(world.table, keys, -keys)
    world.views.append(world.core.snapshot())
    world.core.arena.set_limit(world.core.metrics()["used_bytes"])
    with pytest.raises(MemoryLimitError):
        world.fill(range(50_000, 500_000))
    world.core.rollback(mark)
    world.check()
    assert world.contents() == {(key, 0): key for key in range(40_000)}
    assert world.table.rows_in(world.views[0]) == {(key, 0): -key for key in range(40_000)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_stops_at_max_bytes(layout: Layout) -> None:
    world = World(layout, "snapshot in mark", 20)
    world.core.arena.set_limit(world.core.metrics()["used_bytes"] + (2 << 20))
    with pytest.raises(MemoryLimitError):
        world.fill(range(20, 2_000_000))
    world.check()
    length = len(world.table)
    before = world.contents()
    assert len(before) == length
    with pytest.raises(MemoryLimitError):
        world.fill(range(2_000_000, 2_100_000))
    world.check()
    assert before.items() <= world.contents().items() or world.is_list
    world.core.arena.set_limit(0)
    world.end()


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_call_that_fails_is_undone_or_is_the_end(condition: str, times: int) -> None:
    """Undoing may need memory itself. If that is refused again and again, nobody is to see half a call."""
    size, ended = 300, 0
    keys, values = np.arange(size + 100), np.ones(size + 100, np.int16)
    values[-1] = 32_767
    for n in points():
        core = StateCore(seed=11)
        table = StateTable(core, value="short", max_parallelism=1, initial_capacity=4)
        batch_kernels.update_many(table, keys[:size], values[:size])
        table.put(size + 99, 1)
        before = {(entry.key, 0): entry.value for entry in table}
        held: dict[str, Any] = {}
        for word in condition.split(" in ")[::-1]:
            if word != "plain":
                held[word] = core.mark() if word == "mark" else core.snapshot()
        fail_allocation(n, times)
        try:
            with pytest.raises((OverflowError, MemoryError)):
                reduce_many(table, keys, values, "sum")
        finally:
            left = fail_allocation(0)
        if "snapshot" in held:
            assert table.rows_in(held["snapshot"]) == before
        if core.closed:
            ended += 1
            with pytest.raises(ClosedError, match="the backend is closed"):
                table.get(1)
        else:
            table._check()
            assert {(entry.key, 0): entry.value for entry in table} == before
            if "mark" in held:
                assert table.dirty(held["mark"]) == set()
        if "snapshot" in held:
            held["snapshot"].release()
        core.close()
        if left > 0:
            break
    # A clone for a snapshot is what undoing takes memory for.
    assert (ended > 0) == (times > 1 and "snapshot" in condition)
