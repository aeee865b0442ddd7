"""Map states in the core: insertion order, threads under copy on write, marks and snapshots, against dicts."""

import random

import pytest

from statebackend._core.core_probe import MapTable, dirty, rows_in
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked

MAKE_KEY = {"int": lambda n: n * 7919, "bytes": lambda n: b"key-%d" % n}
MAKE_VALUE = {
    "long": lambda r: r.choice((None, r.randrange(1 << 40))),
    "bytes": lambda r: r.choice((None, r.randbytes(r.choice((0, 5, 300))))),
    "object": lambda r: r.choice((None, [r.randrange(9)])),
}


def copy_list(value):
    return None if value is None else list(value)


class MapStateModel:
    """A MapTable and the dict of dicts it must equal, driven at random."""

    def __init__(self, seed, key, map_key, value, hash_mask, keys, map_keys, namespaces):
        self.random = random.Random(seed)
        self.core = StateCore(seed=seed)
        self.table = MapTable(
            self.core,
            key=key,
            map_key=map_key,
            value=value,
            max_parallelism=2,
            hash_mask=hash_mask,
            initial_capacity=4,
            namespaces=namespaces,
            nullable=True,
            copy_value=copy_list if value == "object" else None,
        )
        self.key_kinds, self.value_kind = (key, map_key), value
        self.sizes = keys, map_keys
        self.namespaces = (0, 1) if namespaces else (0,)
        self.state, self.marks, self.snapshots = {}, [], []

    def where(self):
        key, map_key = (
            MAKE_KEY[kind](self.random.randrange(size))
            for kind, size in zip(self.key_kinds, self.sizes, strict=True)
        )
        return key, map_key, self.random.choice(self.namespaces)

    def copy(self):
        return {key: dict(entries) for key, entries in self.state.items()}

    def put(self):
        key, map_key, ns = self.where()
        value = MAKE_VALUE[self.value_kind](self.random)
        self.table.put(key, map_key, value, ns)
        self.state.setdefault((key, ns), {})[map_key] = value

    def get(self):
        key, map_key, ns = self.where()
        entries = self.state.get((key, ns), {})
        assert self.table.get(key, map_key, ns) == entries.get(map_key)
        assert self.table.contains(key, map_key, ns) == (map_key in entries)

    def remove(self):
        key, map_key, ns = self.where()
        entries = self.state.get((key, ns), {})
        assert self.table.remove(key, map_key, ns) == (map_key in entries)
        entries.pop(map_key, None)
        if not entries:
            self.state.pop((key, ns), None)

    def clear(self):
        key, _, ns = self.where()
        assert self.table.clear(key, ns) == ((key, ns) in self.state)
        self.state.pop((key, ns), None)

    def items(self):
        key, _, ns = self.where()
        assert list(self.table.items(key, ns)) == list(self.state.get((key, ns), {}).items())

    def snapshot(self):
        if len(self.snapshots) < 3:
            self.snapshots.append((self.core.snapshot(), self.copy()))

    def release_snapshot(self):
        if self.snapshots:
            view, state = self.snapshots.pop(self.random.randrange(len(self.snapshots)))
            self.compare(view, state)
            view.release()

    def compare(self, view, state):
        rows = rows_in(view, self.table.entries)
        found = {}
        for (map_key, anchor), value in rows.items():
            found.setdefault(anchor, {})[map_key] = value
        heads = rows_in(view, self.table.heads)
        assert {where: found[anchor] for where, anchor in heads.items()} == state

    def mark(self):
        if len(self.marks) < 3:
            self.marks.append((self.core.mark(), self.copy()))

    def rollback(self):
        if self.marks:
            at = self.random.randrange(len(self.marks))
            del self.marks[at + 1 :]
            self.core.rollback(self.marks[at][0])
            self.state = {key: dict(entries) for key, entries in self.marks[at][1].items()}

    def release_mark(self):
        if self.marks:
            self.core.release(self.marks.pop(self.random.randrange(len(self.marks)))[0])

    def advance(self):
        self.core.advance(50)

    def check(self):
        self.table._check()
        self.core._check()
        for (key, ns), entries in self.state.items():
            assert list(self.table.items(key, ns)) == list(entries.items())

    def run(self, steps, check_every=250):
        names = [
            "put",
            "get",
            "remove",
            "clear",
            "items",
            "snapshot",
            "release_snapshot",
            "mark",
            "rollback",
            "release_mark",
            "advance",
        ]
        weights = (40, 15, 25, 1, 5, 0.6, 0.6, 0.6, 0.5, 0.4, 0.5)
        for step, name in enumerate(self.random.choices(names, weights, k=steps)):
            getattr(self, name)()
            if step % check_every == 0:
                self.check()
        for view, state in self.snapshots:
            self.compare(view, state)
            view.release()
        for mark, _ in self.marks:
            self.core.release(mark)
        self.check()
        for key, ns in list(self.state):
            self.table.clear(key, ns)
        while self.core.advance(1 << 20):
            pass
        usage = self.core.arena.usage()
        assert usage["run_bytes"] == 0
        assert usage["blob_bytes"] == 0


LAYOUTS = [
    ("int", "int", "long", 0xFFFFFFFF, 5, 30, False),
    ("bytes", "bytes", "bytes", 3, 10, 10, True),
    ("int", "bytes", "object", 0, 3, 20, False),
    ("int", "int", "long", 0xFFFFFFFF, 300, 300, False),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
@pytest.mark.parametrize(
    ("seed", "steps"),
    [(0, 6_000), *(pytest.param(s, 60_000, marks=pytest.mark.stress) for s in range(1, 21))],
)
def test_random_histories_equal_a_dict_of_dicts(layout, seed, steps):
    MapStateModel(seed, *layout).run(steps, check_every=steps // 24)


def test_clearing_a_map_under_a_mark_journals_nothing_else_again():
    core = StateCore(seed=1)
    table = MapTable(core)
    mark = core.mark()
    table.put(1, 0, 0)
    before = core.metrics()["journal_version"], core.metrics()["state_version"]
    for n in range(100):
        table.put(2, n, n)
        table.put(2, -n, n)
        assert table.clear(2)
    assert (core.metrics()["journal_version"], core.metrics()["state_version"]) == before
    assert 0 in {map_key for map_key, _ in dirty(table.entries, mark)}
    core.rollback(mark)
    assert len(table) == 0
    table._check()
