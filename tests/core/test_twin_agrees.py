"""The same random histories on the compiled map and on its twin: answers, chains, versions, counters agree.

The twin computes the same bucket hashes from the same seed, so that the structures are the same whatever the
mask.
"""

from __future__ import annotations

import copy
import random

import pytest
from twin.implementations import COMPILED, TWIN, reclaim, view_contents

from statebackend._core.core_probe import objects_held

pytestmark = pytest.mark.checked

VALUES = {
    "long": lambda r: r.randrange(-(2**63), 2**63),
    "bytes": lambda r: r.randbytes(r.choice((0, 1, 30, 400))),
    "object": lambda r: (r.randrange(100),),
}
KEYS = {
    "int": lambda number: (number * 0x9E3779B97F4A7C15) % 2**64 - 2**63,
    "bytes": lambda number: b"k" * (number % 20) + b"%d" % number,
}


class Pair:
    """Two implementations under one history; every step returns what both answered."""

    def __init__(self, seed, *, keys, key="int", value="long", **options):
        self.random = random.Random(seed)
        self.key = [KEYS[key](number) for number in range(keys)]
        self.value = VALUES[value]
        self.sides = [i.make(seed=seed, key=key, value=value, **options) for i in (COMPILED, TWIN)]
        self.marks, self.views = [], []

    def both(self, call):
        """The answer that both give to `call(core, table)`."""
        compiled, twin = (call(side.core, side.table) for side in self.sides)
        assert compiled == twin
        return compiled

    def on_each(self, which, call):
        """As `both`, for marks and views, of which each side has its own."""
        compiled, twin = (
            call(side.core, side.table, own) for side, own in zip(self.sides, which, strict=True)
        )
        assert compiled == twin
        return compiled

    # --- steps ---

    def put(self):
        key, value, at = self.random.choice(self.key), self.value(self.random), self.random.randrange(1000)
        self.both(lambda core, table: table.put(key, value, timestamp=at))

    def look(self):
        key, name = self.random.choice(self.key), self.random.choice(("get", "contains", "timestamp"))
        self.both(lambda core, table: getattr(table, name)(key))

    def remove(self):
        key = self.random.choice(self.key)
        self.both(lambda core, table: table.remove(key))

    def mark(self):
        if len(self.marks) < 4:
            self.marks.append([side.core.mark() for side in self.sides])

    def rollback(self):
        if self.marks:
            left = self.random.randrange(len(self.marks)) + 1
            self.marks, ended = self.marks[:left], self.marks[left:]
            self.on_each(self.marks[-1], lambda core, table, mark: core.rollback(mark))
            for mark in ended:
                assert not self.on_each(mark, lambda core, table, mark: mark.is_open)

    def release_mark(self):
        if self.marks:
            mark = self.marks.pop(self.random.randrange(len(self.marks)))
            self.on_each(mark, lambda core, table, mark: core.release(mark))

    def snapshot(self):
        if len(self.views) < 4:
            self.views.append([side.core.snapshot() for side in self.sides])

    def release_snapshot(self):
        if self.views:
            view = self.views.pop(self.random.randrange(len(self.views)))
            self.on_each(view, lambda core, table, view: table.rows_in(view))
            self.on_each(view, lambda core, table, view: view.release())

    def advance(self):
        budget = self.random.choice((1, 5, 1000))
        self.both(lambda core, table: core.advance(budget))

    STEPS = {
        put: 48,
        look: 15,
        remove: 22,
        mark: 3,
        rollback: 1.5,
        release_mark: 2,
        snapshot: 4,
        release_snapshot: 3.5,
        advance: 1,
    }

    def run(self, steps):
        for number, step in enumerate(
            self.random.choices(list(self.STEPS), list(self.STEPS.values()), k=steps)
        ):
            step(self)
            self.compare(number % 20 == 0)
        self.finish()

    # --- comparisons ---

    def compare(self, deep):
        own = ("extent_bytes", "run_bytes", "blob_bytes", "used_bytes", "spare_bytes", "scratch_bytes")
        self.both(lambda core, table: {k: v for k, v in core.metrics().items() if k not in own})
        self.both(lambda core, table: objects_held(core))
        self.both(lambda core, table: [self.info(table, group) for group in range(table.max_parallelism)])
        key = self.random.choice(self.key)
        self.both(lambda core, table: [(e.key, e.version, e.value) for e in table.chain(key)])
        if deep:
            self.both(lambda core, table: [(e.key, e.version, e.value) for e in table])
            for mark in self.marks:
                self.on_each(mark, lambda core, table, mark: table.dirty(mark))
            for view in self.views:
                self.on_each(view, lambda core, table, view: table.rows_in(view))
            for side in self.sides:
                side.table._check()
                side.core._check()

    @staticmethod
    def info(table, group):
        info = table.map_info(group)
        if info is not None:
            del info["modifications"]  # the twin counts moves as well
        return info

    def finish(self):
        while self.marks:
            self.release_mark()
        while self.views:
            self.release_snapshot()
        for key in self.key:
            self.both(lambda core, table, key=key: table.remove(key))
        for side in self.sides:
            reclaim(side.core)
        self.compare(True)
        self.both(lambda core, table: table.metrics())
        assert self.sides[0].table.metrics()["used_slots"] == 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("hash_mask", [0, 1, 7, 0xFFFFFFFF], ids=hex)
def test_random_histories_agree(hash_mask, value, seed):
    keys = random.Random(seed).choice((3, 12, 60))
    Pair(seed, keys=keys, value=value, hash_mask=hash_mask, initial_capacity=4).run(600)


OTHERS = [
    {"keys": 30, "key": "bytes", "value": "bytes", "hash_mask": 0},
    {"keys": 30, "key": "bytes", "value": "bytes"},
    {"keys": 80, "timestamps": True, "max_parallelism": 5},
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", OTHERS, ids=["one bucket of bytes", "bytes", "key groups and timestamps"])
def test_other_tables_agree(options, seed):
    Pair(seed, initial_capacity=4, **options).run(600)


@pytest.mark.parametrize("seed", range(2))
def test_tables_of_several_pages_agree(seed):
    pair = Pair(seed, keys=9000, initial_capacity=2048)
    for number, key in enumerate(pair.key[:6147]):
        pair.both(lambda core, table, key=key, number=number: table.put(key, number))
    for _ in range(12):
        for step in (pair.put, pair.remove, pair.snapshot, pair.put, pair.mark, pair.release_snapshot):
            for _ in range(1 if step in (pair.snapshot, pair.mark) else 25):
                step()
            pair.compare(False)
        pair.rollback()
        pair.compare(True)
    info = pair.sides[0].table.map_info(0)
    assert 16384 in (info["primary_capacity"], info["secondary_capacity"])


@pytest.mark.stress
@pytest.mark.parametrize("hash_mask", [0, 3, 0xFFFFFFFF], ids=hex)
def test_long_random_histories_agree(hash_mask, rng):
    for _ in range(20):
        keys, value = rng.choice((3, 12, 60, 300)), rng.choice(list(VALUES))
        seed = rng.getrandbits(32)
        Pair(seed, keys=keys, value=value, hash_mask=hash_mask, initial_capacity=4).run(5000)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("which", [COMPILED, TWIN], ids=lambda which: which.name)
def test_objects_changed_in_place_stay_as_they_were_in_snapshots_and_before_marks(which, seed):
    r = random.Random(seed)
    made = which.make(value="object", copy_value=copy.copy, hash_mask=3, initial_capacity=4)
    core, table, state, views, marks = made.core, made.table, {}, [], []
    for number in range(800):
        key, action = r.randrange(12), r.choice("ppppggggrrsSmMb")
        if action == "p":
            table.put(key, [number])
            state[key] = [number]
        elif action == "g" and table.contains(key):
            table.get(key).append(number)
            table.put(key, table.get(key))
            state[key] = [*state[key], number]
        elif action == "r":
            assert table.remove(key) == (state.pop(key, None) is not None)
        elif action == "s" and len(views) < 3:
            views.append((core.snapshot(), {key: list(value) for key, value in state.items()}))
        elif action == "S" and views:
            views.pop(r.randrange(len(views)))[0].release()
        elif action == "m" and len(marks) < 3:
            marks.append((core.mark(), {key: list(value) for key, value in state.items()}))
        elif action == "M" and marks:
            core.release(marks.pop(r.randrange(len(marks)))[0])
        elif action == "b" and marks:
            del marks[r.randrange(len(marks)) + 1 :]
            core.rollback(marks[-1][0])
            state = {key: list(value) for key, value in marks[-1][1].items()}
        assert {entry.key: entry.value for entry in table} == state, f"step {number}: {action}"
        for view, expected in views:
            assert view_contents(view, table) == expected, f"step {number}: {action}"
    table._check()
