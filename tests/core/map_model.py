"""A random driver of one state table against plain dicts: the oracle of the core.

`MapModel` performs one random action a step on a table and on dicts, and compares what they answer. Marks are
kept as copies of the dict, snapshots too. Everything follows from the seed, so a failure repeats itself.
"""

import random

NAMESPACES = (0, 1, 2)

VALUE_MAKERS = {
    "long": lambda r: r.randrange(-(2**63), 2**63),
    "int": lambda r: r.randrange(-(2**31), 2**31),
    "short": lambda r: r.randrange(-(2**15), 2**15),
    "byte": lambda r: r.randrange(-128, 128),
    "double": lambda r: r.random(),
    "float": lambda r: float(r.randrange(1000)),
    "bool": lambda r: r.random() < 0.5,
    "bytes": lambda r: r.randbytes(r.choice((0, 1, 7, 40, 300, 300, 5000))),
    "object": lambda r: [r.randrange(100)],
    3: lambda r: r.randbytes(3),
    24: lambda r: r.randbytes(24),
    200: lambda r: r.randbytes(200),
}


class MapModel:
    """A table and its oracle. `keys` is how many distinct keys there are; few make collisions and rewrites."""

    def __init__(self, core, table, *, seed, keys, value, key="int", namespaces=False):
        self.core, self.table, self.random = core, table, random.Random(seed)
        self.value, self.key_kind, self.n_keys = value, key, keys
        self.is_list = isinstance(value, tuple)
        self.make = VALUE_MAKERS[value[1] if self.is_list else value]
        self.namespaces = NAMESPACES if namespaces else (0,)
        self.state = {}
        self.marks = []      # (mark, state then, touched since, by mark)
        self.snapshots = []  # (view, state then)
        self.steps = 0

    def key(self):
        number = self.random.randrange(self.n_keys)
        if self.key_kind == "int":
            return (number - self.n_keys // 2) * 0x9E3779B97F4A7C15 % 2**64 - 2**63
        return b"%d" % number if number % 3 else b"key-%032d" % number

    def touch(self, where):
        for _, _, touched in self.marks:
            touched.add(where)

    def put(self):
        key, ns, value = self.key(), self.random.choice(self.namespaces), self.make(self.random)
        if self.is_list:
            self.table.append(key, value, ns)
            self.state[key, ns] = (*self.state.get((key, ns), ()), value)
        elif self.random.random() < 0.3:
            old = self.table.put_and_get_old(key, value, ns)
            assert self.same(old, self.state.get((key, ns)))
            self.state[key, ns] = value
        else:
            self.table.put(key, value, ns)
            self.state[key, ns] = value
        self.touch((key, ns))

    def get(self):
        key, ns = self.key(), self.random.choice(self.namespaces)
        expected = self.state.get((key, ns))
        assert self.same(self.table.get(key, ns), expected)
        assert self.table.contains(key, ns) == (expected is not None)

    def remove(self):
        key, ns = self.key(), self.random.choice(self.namespaces)
        expected = self.state.pop((key, ns), None)
        if expected is not None:
            self.touch((key, ns))
        if self.random.random() < 0.5:
            assert self.table.remove(key, ns) == (expected is not None)
        else:
            assert self.same(self.table.remove_and_get_old(key, ns), expected)

    def transform(self):
        if self.is_list:
            return
        key, ns, value = self.key(), self.random.choice(self.namespaces), self.make(self.random)
        old = self.state.get((key, ns))
        assert self.same(self.table.transform(key, value, lambda a, b: b if a is None else a, ns),
                         value if old is None else old)
        self.state[key, ns] = value if old is None else old
        self.touch((key, ns))

    def same(self, found, expected):
        if self.is_list:
            expected = None if expected is None else list(expected)
        return found == expected

    def snapshot(self):
        if len(self.snapshots) < 4:
            self.snapshots.append((self.core.snapshot(), dict(self.state)))

    def release_snapshot(self):
        if self.snapshots:
            view, state = self.snapshots.pop(self.random.randrange(len(self.snapshots)))
            self.compare_snapshot(view, state)
            view.release()

    def compare_snapshot(self, view, state):
        found = view.items(self.table)
        assert len(found) == len(state), f"{len(found)} rows in the snapshot, expected {len(state)}"
        for where, value in state.items():
            assert self.same(found[where], value), where

    def mark(self):
        if len(self.marks) < 4:
            self.marks.append((self.core.mark(), dict(self.state), set()))

    def rollback(self):
        if self.marks:
            at = self.random.randrange(len(self.marks))
            del self.marks[at + 1:]
            mark, state, touched = self.marks[at]
            self.check_dirty(mark, touched)
            self.core.rollback(mark)
            self.state = dict(state)
            touched.clear()
            # What was undone stays touched for older marks only if they saw it: their sets are supersets.
            for i in range(at):
                self.marks[i] = (*self.marks[i][:2], self.dirty_of(self.marks[i][0]))

    def dirty_of(self, mark):
        return set(self.table.dirty(mark))

    def check_dirty(self, mark, touched):
        assert self.table.dirty(mark) == touched

    def release_mark(self):
        if self.marks:
            at = self.random.randrange(len(self.marks))
            mark, _, touched = self.marks.pop(at)
            self.check_dirty(mark, touched)
            self.core.release(mark)
            self.core.release(mark)

    def iterate(self):
        found = {(e.key, e.namespace): e.value for e in self.table}
        assert set(found) == set(self.state)
        for where, value in found.items():
            assert self.same(value, self.state[where])

    def visit(self):
        found = {}
        for entries in self.table.visitor(self.random.choice((1, 7, 1000))):
            for e in entries:
                found[e.key, e.namespace] = e.value
        assert set(found) == set(self.state)

    def advance(self):
        self.core.advance(self.random.choice((1, 10, 1000)))

    ACTIONS = (
        (put, 50), (get, 20), (remove, 20), (transform, 8), (snapshot, 1), (release_snapshot, 1), (mark, 1),
        (rollback, 0.5), (release_mark, 0.6), (advance, 0.5), (iterate, 0.05), (visit, 0.05))

    def run(self, steps, check_every=0):
        actions = [a for a, _ in self.ACTIONS]
        weights = [w for _, w in self.ACTIONS]
        # Phases of growing and of shrinking, so that maps double, empty and start anew.
        for action in self.random.choices(actions, weights, k=steps):
            if action is MapModel.put and self.random.random() < self.shrink():
                action = MapModel.remove
            action(self)
            self.steps += 1
            if check_every and self.steps % check_every == 0:
                self.check()

    def shrink(self):
        return 0.6 if (self.steps // (3 * self.n_keys + 50)) % 2 else 0.0

    def check(self):
        self.table._check()
        self.core._check()
        assert len(self.table) == len(self.state)

    def finish(self):
        for mark, _, touched in self.marks:
            self.check_dirty(mark, touched)
        for mark, _, _ in self.marks:
            self.core.release(mark)
        for view, state in self.snapshots:
            self.compare_snapshot(view, state)
            view.release()
        self.marks, self.snapshots = [], []
        self.check()
        self.iterate()
        for key, ns in list(self.state):
            self.table.remove(key, ns)
        self.state.clear()
        while self.core.advance(1 << 20):
            pass
        self.check()
