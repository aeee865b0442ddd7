"""Batches overwrite bytes where they lie, if new ones are of about the same size; who needs the old ones has them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from map_model import Layout, array_of, packed

from statebackend._core.core_probe import StateTable, fail_allocation
from statebackend._core.kernels import aggregation_kernels, batch_kernels, ttl_kernels
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked

ROWS = 5_000  # enough for a batch to be sorted by key group, which is when bytes are overwritten in place
KEYS = 2_000
LAYOUTS = [
    Layout("bytes"),
    Layout("bytes", "bytes"),
    Layout("bytes", "int", True, True),
    Layout(24),
    Layout(24, "bytes", timestamps=True),
    Layout(3),
]


class Story:
    """A table and a dict that go through the same random calls; marks and snapshots remember the dict of their time."""

    def __init__(self, layout: Layout, rng: random.Random) -> None:
        self.layout, self.rng = layout, rng
        self.core = StateCore(seed=3)
        self.table: StateTable = layout.table(self.core, max_parallelism=3, initial_capacity=4)
        self.now: dict[Any, Any] = {}
        self.marks: list[tuple[Any, dict[Any, Any]]] = []
        self.views: list[tuple[Any, dict[Any, Any]]] = []

    def key(self, number: int) -> Any:
        return number if self.layout.key == "int" else b"key %d" % number

    def keys(self, numbers: list[int]) -> Any:
        keys = [self.key(number) for number in numbers]
        return packed(keys) if self.layout.key == "bytes" else np.array(keys, dtype=np.int64)

    def value(self) -> bytes:
        width = self.layout.value
        if width == "bytes":  # within a size class, beyond it, empty, and too long to be logged
            width = self.rng.choice((0, 1, 7, 8, 17, 18, 19, 20, 21, 200, 205, 600))
        return self.rng.randbytes(width)

    def stamp(self) -> int | None:
        return self.rng.randrange(100) if self.layout.timestamps else None

    def update(self, distinct: bool = False) -> None:
        if distinct:
            numbers = self.rng.sample(range(ROWS), ROWS)
        else:
            numbers = [self.rng.randrange(KEYS) for _ in range(ROWS)]
        values = [self.value() for _ in numbers]
        stamp = self.stamp()
        columns = self.keys(numbers), array_of(values, self.layout.value)
        batch_kernels.update_many(self.table, *columns, timestamp=stamp or 0, threads=self.rng.choice((1, 3)))
        for number, value in zip(numbers, values, strict=True):
            self.now[self.key(number)] = value, stamp

    def update_or_clear(self) -> None:
        numbers = [self.rng.randrange(KEYS) for _ in range(ROWS)]
        values = [self.value() for _ in numbers]
        nulls = np.array([self.rng.random() < 0.1 for _ in numbers])
        stamp = self.stamp()
        plan = AddPlan("last", self.layout.value)
        columns = self.keys(numbers), array_of(values, self.layout.value)
        aggregation_kernels.add_many(self.table, *columns, plan, nulls=nulls, timestamp=stamp or 0)
        for number, value, is_null in zip(numbers, values, nulls, strict=True):
            if is_null:
                self.now.pop(self.key(number), None)
            else:
                self.now[self.key(number)] = value, stamp

    def remove(self) -> None:
        numbers = self.rng.sample(range(KEYS), KEYS // 5)
        batch_kernels.remove_many(self.table, self.keys(numbers))
        for number in numbers:
            self.now.pop(self.key(number), None)

    def step(self) -> None:
        what = self.rng.randrange(11)
        if what <= 4:
            self.update(distinct=what == 0)
        elif what == 5:
            self.update_or_clear()
        elif what == 6:
            self.remove()
        elif what == 7:
            self.marks.append((self.core.mark(), dict(self.now)))
        elif what == 8:
            self.views.append((self.core.snapshot(), dict(self.now)))
        elif what == 9 and self.marks:
            at = self.rng.randrange(len(self.marks))
            self.core.rollback(self.marks[at][0])
            self.now = dict(self.marks[at][1])
            del self.marks[at + 1 :]
        elif what == 10 and self.marks:
            self.core.release(self.marks.pop(self.rng.randrange(len(self.marks)))[0])
        if len(self.views) > 2:
            self.views.pop(0)[0].release()

    def check(self) -> None:
        found = {each.key: (each.value, self.table.timestamp(each.key)) for each in list(self.table)}
        assert found == self.now
        values, there = batch_kernels.get_many(self.table, self.keys(list(range(KEYS))))
        got = values_of(values)
        for number in range(KEYS):
            value = self.now.get(self.key(number))
            assert there[number] == (value is not None)
            assert value is None or got[number] == value[0]
        for view, then in self.views:
            assert self.table.rows_in(view) == {(key, 0): value for key, (value, _) in then.items()}
        self.table._check()
        self.core._check()

    def end(self) -> None:
        for view, _ in self.views:
            view.release()
        for mark, then in reversed(self.marks):
            self.core.rollback(mark)
            self.now = then
        self.views.clear()
        self.check()


def values_of(column: Any) -> list[bytes]:
    if isinstance(column, tuple):
        offsets, data = column
        return [data[a:b].tobytes() for a, b in itertools.pairwise(offsets)]
    return [row.tobytes() for row in column]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_random_calls(layout: Layout, rng: random.Random) -> None:
    story = Story(layout, rng)
    for _ in range(18):
        story.step()
        story.check()
    story.end()


def filled(values: list[bytes]) -> tuple[StateCore, StateTable, Any]:
    core = StateCore()
    table = StateTable(core, value="bytes", max_parallelism=3)
    keys = np.arange(len(values))
    batch_kernels.update_many(table, keys, packed(values))
    return core, table, keys


def contents(table: StateTable) -> list[bytes]:
    return values_of(batch_kernels.get_many(table, np.arange(len(table)))[0])


def test_bytes_of_the_same_size_take_no_memory() -> None:
    core, table, keys = filled([b"old value %6d" % number for number in range(ROWS)])
    mark = core.mark()
    batch_kernels.update_many(table, keys, packed([b"new value %6d" % number for number in range(ROWS)]))
    in_place = core.arena.usage()["run_bytes"]
    core.rollback(mark)
    batch_kernels.update_many(
        table, keys, packed([b"a much longer new value %6d" % number for number in range(ROWS)])
    )
    in_place_of_others = core.arena.usage()["run_bytes"]
    assert in_place_of_others > in_place + 20 * ROWS
    core.rollback(mark)
    assert contents(table) == [b"old value %6d" % number for number in range(ROWS)]


def test_an_undo_that_finds_bytes_of_another_size_can_be_repeated() -> None:
    """The blob that the record was about went with the second call. A rollback makes another, if there is memory."""
    old = [b"old value %6d" % number for number in range(ROWS)]
    core, table, keys = filled(old)
    mark = core.mark()
    batch_kernels.update_many(table, keys, packed([b"new value %6d" % number for number in range(ROWS)]))
    batch_kernels.update_many(
        table, keys, packed([b"longer than before %6d" % number for number in range(ROWS)])
    )
    fail_allocation(100, 1 << 40)
    try:
        with pytest.raises(MemoryError):
            core.rollback(mark)
    finally:
        fail_allocation(0)
    core.rollback(mark)
    assert contents(table) == old
    core._check()


def test_a_failed_batch_gives_bytes_back(rng: random.Random) -> None:
    """Any row of a batch may be the one that finds no memory."""
    old = [b"old value %6d" % number for number in range(ROWS)]
    core, table, _ = filled(old)
    failed = 0
    for wait in (1, 10, 100, 300, 700, 1_500):
        numbers = [rng.randrange(ROWS) for _ in range(3 * ROWS)]
        # The same size, then another one: both ways of writing, in one call.
        values = [rng.randbytes(16 if rng.random() < 0.9 else 40) for _ in numbers]
        fail_allocation(wait, 1 << 40)
        try:
            batch_kernels.update_many(table, np.array(numbers), packed(values))
        except MemoryError:
            failed += 1
            fail_allocation(0)
            assert contents(table) == old
        finally:
            fail_allocation(0)
        core._check()
        old = contents(table)
    assert failed


@pytest.mark.parametrize("kind", ["changing size", "cleared again", "renewed"])
def test_bytes_without_a_snapshot_go_while_a_snapshot_lives(kind: str) -> None:
    """The log of a call is kept for a snapshot if most of it is the snapshot's, and else not."""
    core = StateCore()
    table = StateTable(core, value="bytes", timestamps=kind == "renewed", max_parallelism=4)
    keys = np.arange(2 * ROWS)
    batch_kernels.update_many(table, keys, packed([b"v" * 20 for _ in keys]), timestamp=1)
    view = core.snapshot()
    used = []
    for number in range(20):
        if kind == "renewed":
            ttl_kernels.read_many(table, keys, now=number, ttl=1_000, renews=True)
        elif kind == "cleared again":
            new = keys + len(keys)
            batch_kernels.update_many(table, new, packed([b"v" for _ in new]))
            nothing = packed([b"" for _ in new])
            aggregation_kernels.add_many(
                table, new, nothing, AddPlan("last", "bytes"), nulls=np.ones(len(new), bool)
            )
        else:  # and one row of the snapshot's
            some = np.append(keys[:ROWS], ROWS + number)
            batch_kernels.update_many(table, some, packed([b"v" * (10 + 30 * (number % 2)) for _ in some]))
        used.append(core.arena.usage()["run_bytes"])
    assert max(used[5:]) <= 1.1 * max(used[:5])
    view.release()
    core._check()


def test_none_is_not_overwritten_in_place() -> None:
    table = StateTable(StateCore(), value="bytes", nullable=True, max_parallelism=1)
    for number in range(ROWS):
        table.put(number, None)
    batch_kernels.update_many(table, np.arange(ROWS), packed([b"new" for _ in range(ROWS)]))
    assert table.get(7) == b"new"
