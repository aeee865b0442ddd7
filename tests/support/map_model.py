"""A random driver of one state table against plain dicts: the oracle of the core.

`MapModel` performs one random action a step on a table and on dicts, and compares what they answer. Marks are
kept as copies of the dict, snapshots too. Every action changes the table first and the dicts only when that
succeeded, so an action that raises must have left the table as the dicts describe it. Everything follows
from the seed, so a failure repeats itself.
"""

import itertools
import math
import random
from typing import NamedTuple

import numpy as np

from statebackend._core.core_probe import StateTable, fail_allocation, set_state_version
from statebackend._core.kernels import batch_kernels
from statebackend._core.kernels.aggregation_kernels import add_many
from statebackend._core.tables.accumulators import OPERATIONS, AddPlan
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import KeyGroupError
from statebackend.keys import spark_hash

NAMESPACES = (0, 1, 2)
LAST_VERSION = 0xFFFFFF00

INTEGER_BITS = {"long": 64, "int": 32, "short": 16, "byte": 8}
DTYPES = {
    "long": np.int64,
    "int": np.int32,
    "short": np.int16,
    "byte": np.int8,
    "double": np.float64,
    "float": np.float32,
    "bool": np.bool_,
}


class Thing:
    """A value of object tables; equal to itself only."""


#: Objects that the tables of a test share, so that their reference counts can be taken before and after.
THINGS = tuple(Thing() for _ in range(20))


def make_integer(r, bits):
    # Small ones as well, so that sums do not always overflow.
    bits = r.choice((2, 4, bits))
    return r.randrange(-(1 << bits - 1), 1 << bits - 1)


def value_maker(kind):
    if kind in INTEGER_BITS:
        return lambda r: make_integer(r, INTEGER_BITS[kind])
    if isinstance(kind, int):
        return lambda r: r.randbytes(kind)
    return {
        "double": lambda r: r.choice((r.random(), -0.0, math.inf, 1e308)),
        "float": lambda r: float(r.randrange(1000)),
        "bool": lambda r: r.random() < 0.5,
        "bytes": lambda r: r.randbytes(r.choice((0, 1, 7, 40, 300, 300, 5000))),
        "object": lambda r: r.choice(THINGS),
        "copied": lambda r: [r.randrange(100)],
    }[kind]


def packed(strings):
    """Byte strings as the kernels take them: (offsets, data)."""
    offsets = np.zeros(len(strings) + 1, dtype=np.int64)
    np.cumsum([len(s) for s in strings], out=offsets[1:])
    return offsets, np.frombuffer(b"".join(strings), dtype=np.uint8)


def unpacked(offsets, data):
    return [data[a:b].tobytes() for a, b in itertools.pairwise(offsets)]


def array_of(values, kind):
    """Values of a kind as the kernels take them."""
    if kind == "bytes":
        return packed(values)
    if isinstance(kind, int):
        return np.frombuffer(b"".join(values), dtype=np.uint8).reshape(len(values), kind)
    return np.array(values, dtype=DTYPES[kind])


def list_of(values, kind):
    """The reverse of `array_of`."""
    if kind == "bytes":
        return unpacked(*values)
    if isinstance(kind, int):
        return [row.tobytes() for row in values]
    return values.tolist()


def reduce_many(table, keys, values, reduction, **options):
    """Reduce numbers into a table, as a state with a named reduction does."""
    kind = next(kind for kind, dtype in DTYPES.items() if values.dtype == dtype)
    return add_many(table, keys, values, AddPlan(reduction, kind), **options)


def is_defined(kind, reduction):
    """Whether a state has such a reduction over such numbers."""
    if reduction in ("any", "all"):
        return kind == "bool"
    return kind == "long" if reduction == "count" else kind != "bool" or reduction not in ("sum", "product")


def reduced(reduction, kind, old, value):
    """One step of a reduction as the kernels define it: `old` None means that there was nothing."""
    if reduction == "count":
        result = (old or 0) + 1
    elif old is None:
        result = value
    elif reduction in ("sum", "product"):
        result = old + value if reduction == "sum" else old * value
        if kind == "float":
            with np.errstate(over="ignore"):
                result = float(np.float32(result))
    elif reduction == "min":
        result = value if math.isnan(old) or value < old else old
    elif reduction == "max":
        result = old if math.isnan(old) else value if math.isnan(value) or value > old else old
    elif reduction in ("any", "all"):
        result = old or value if reduction == "any" else old and value
    else:
        result = old if reduction == "first" else value
    bits = INTEGER_BITS.get(kind)
    if bits and not -(1 << bits - 1) <= result < 1 << bits - 1:
        raise OverflowError
    return result


class Layout(NamedTuple):
    """What a table holds. `value` as StateTable has it, or "copied": objects in a table with `copy_value`."""

    value: object
    key: str = "int"
    namespaces: bool = False
    timestamps: bool = False

    def __str__(self):
        value = f"list-{self.value[1]}" if isinstance(self.value, tuple) else self.value
        flags = ("-ns" if self.namespaces else "") + ("-ts" if self.timestamps else "")
        return f"{self.key}-{value}{flags}"

    def table(self, core, **options):
        value = self.value
        if value == "copied":
            value, options["copy_value"] = "object", list
        return StateTable(
            core, key=self.key, value=value, namespaces=self.namespaces, timestamps=self.timestamps, **options
        )


class MapModel:
    """A table and its oracle. `keys` is how many distinct keys there are; few make collisions, rewrites.

    With `starve`, now and then an allocation fails in the middle of an action.
    """

    def __init__(self, layout, *, seed, keys, hash_mask=0xFFFFFFFF, starve=False, **options):
        self.layout, self.seed, self.n_keys, self.starving = layout, seed, keys, starve
        self.random = random.Random(seed)
        self.is_list = isinstance(layout.value, tuple)
        self.kind = layout.value[1] if self.is_list else layout.value
        self.make = value_maker(self.kind)
        self.namespaces = NAMESPACES if layout.namespaces else (0,)
        self.keys, self.foreign = self.draw_keys(options)
        self.core = StateCore(seed=self.random.getrandbits(64))
        self.table = layout.table(self.core, hash_mask=hash_mask, **options)
        self.options = {"hash_mask": hash_mask, **options}
        self.state = {}  # (key, namespace) -> (value, timestamp)
        self.marks = []  # (mark, state then, touched since)
        self.snapshots = []  # (view, state then)
        self.steps = self.operations = self.failures = 0
        self.actions = self.weighted_actions()

    def __str__(self):
        return (
            f"MapModel({self.layout!r}, seed={self.seed}, keys={self.n_keys}, starve={self.starving}, "
            f"**{self.options}), failed at step {self.steps}"
        )

    def draw_keys(self, options):
        """The keys in the table's key-group range, and some outside it."""
        count = range(self.n_keys)
        kind = "int64" if self.layout.key == "int" else "bytes"
        if self.layout.key == "int":
            keys = [(n - self.n_keys // 2) * 0x9E3779B97F4A7C15 % 2**64 - 2**63 for n in count]
        else:
            keys = [(b"%d" % n if n % 3 else b"key-%032d" % n) if n else b"" for n in count]
        self.group_of = lambda key: spark_hash(key, kind) % options.get("max_parallelism", 128)
        if "key_group_range" not in options:
            return keys, []
        first, last = options["key_group_range"]
        inside = [first <= self.group_of(key) <= last for key in keys]
        return (
            [key for key, own in zip(keys, inside, strict=True) if own],
            [key for key, own in zip(keys, inside, strict=True) if not own],
        )

    def weighted_actions(self):
        # What copies or walks everything comes less often the larger the state is.
        rare = min(1.0, 2000 / self.n_keys)
        actions = {
            self.put: 50,
            **({self.change_in_place: 8} if self.kind == "copied" else {}),
            self.get: 20,
            self.remove: 20,
            self.snapshot: rare,
            self.release_snapshot: rare,
            self.mark: rare,
            self.rollback: 0.5 * rare,
            self.release_mark: 0.6 * rare,
            self.advance: 0.5,
            self.iterate: 0.05 * rare,
            self.renumber: 0.05 * rare,
        }
        if self.kind not in ("object", "copied"):
            actions[self.remove_many] = 0.1
            actions[self.put_many] = 0.3
            if not self.is_list:
                actions[self.get_many] = 0.1
                if self.kind in DTYPES:
                    actions[self.reduce_many] = 0.3
        return actions

    # --- one key at a time ---

    def where(self):
        return self.random.choice(self.keys), self.random.choice(self.namespaces)

    def timestamp(self):
        return self.random.randrange(-(2**63), 2**63) if self.layout.timestamps else 0

    def touch(self, where):
        for _, _, touched in self.marks:
            touched.add(where)

    def set(self, where, value, timestamp):
        if self.is_list:
            value, timestamp = (*self.state.get(where, ((), 0))[0], value), 0
        self.state[where] = (tuple(value) if self.kind == "copied" else value), timestamp
        self.touch(where)

    def put(self):
        where, value, timestamp = self.where(), self.make(self.random), self.timestamp()
        if self.is_list:
            self.table.append(where[0], value, where[1], timestamp)
        else:
            self.table.put(where[0], value, where[1], timestamp)
        self.set(where, value, timestamp)
        self.operations += 1

    def get(self):
        where = self.where()
        expected = self.state.get(where)
        assert self.same(self.table.get(*where), expected)
        assert self.table.contains(*where) == (expected is not None)
        if self.layout.timestamps and not self.is_list:
            assert self.table.timestamp(*where) == (None if expected is None else expected[1])
        self.operations += 1

    def remove(self):
        where = self.where()
        assert self.table.remove(*where) == (where in self.state)
        self.forget(where)
        self.operations += 1

    def forget(self, where):
        if self.state.pop(where, None) is not None:
            self.touch(where)

    def change_in_place(self):
        """A reader changes its object and puts it back; marks and snapshots must not see it."""
        where, timestamp = self.where(), self.timestamp()
        mine = self.table.get(*where)
        if mine is None:
            return
        mine.append(self.make(self.random)[0])
        try:
            self.table.put(where[0], mine, where[1], timestamp)
        except MemoryError:
            self.table.remove(*where)  # the reader could not write it back
            self.forget(where)
            raise
        self.set(where, mine, timestamp)
        self.operations += 1

    def same(self, found, expected):
        if found is None or expected is None:
            return found is None and expected is None
        return (
            list(found) == list(expected[0])
            if self.is_list or self.kind == "copied"
            else found == expected[0]
        )

    # --- batches ---

    def batch(self):
        """Keys of a batch, its namespace and threads; long batches are sorted and use their threads."""
        n = self.random.choice((0, 1, 5, 40, 40, 200))
        if self.random.random() < 0.05:
            n = 5000
        keys = self.random.choices(self.keys, k=n)
        foreign = bool(self.foreign) and n > 0 and self.random.random() < 0.1
        if foreign:
            keys[self.random.randrange(n)] = self.random.choice(self.foreign)
        options = {"namespace": self.random.choice(self.namespaces), "threads": self.random.choice((1, 2))}
        array = packed(keys) if self.layout.key == "bytes" else np.array(keys, dtype=np.int64)
        return keys, array, foreign, options

    def call(self, foreign, kernel, *arguments, **options):
        """Call a kernel; None when it had to refuse the batch."""
        try:
            answer = kernel(self.table, *arguments, **options)
        except KeyGroupError:
            assert foreign
            self.failures += 1
            return None
        assert not foreign, "a key outside the range was taken"
        return () if answer is None else answer

    def put_many(self):
        keys, array, foreign, options = self.batch()
        values, timestamp = [self.make(self.random) for _ in keys], self.timestamp()
        kernel = batch_kernels.append_many if self.is_list else batch_kernels.update_many
        if (
            self.call(foreign, kernel, array, array_of(values, self.kind), timestamp=timestamp, **options)
            is None
        ):
            return
        for key, value in zip(keys, values, strict=True):
            self.set((key, options["namespace"]), value, timestamp)
        self.operations += len(keys)

    def get_many(self):
        keys, array, foreign, options = self.batch()
        answer = self.call(foreign, batch_kernels.get_many, array, **options)
        if answer is None:
            return
        values, found = list_of(answer[0], self.kind), answer[1]
        for i, key in enumerate(keys):
            expected = self.state.get((key, options["namespace"]))
            assert found[i] == (expected is not None)
            assert expected is None or values[i] == expected[0]
        self.operations += len(keys)

    def remove_many(self):
        keys, array, foreign, options = self.batch()
        found = self.call(foreign, batch_kernels.remove_many, array, **options)
        if found is None:
            return
        for key, was_there in zip(keys, found, strict=True):
            assert was_there == ((key, options["namespace"]) in self.state)
            self.forget((key, options["namespace"]))
        self.operations += len(keys)

    def reduce_many(self):
        keys, array, foreign, options = self.batch()
        values, timestamp = [self.make(self.random) for _ in keys], self.timestamp()
        reduction = self.random.choice([r for r in OPERATIONS if is_defined(self.kind, r)])
        results, overflows = {}, False
        for key, value in zip(keys, values, strict=True):
            where = key, options["namespace"]
            old = results.get(where, self.state.get(where, (None,))[0])
            try:
                results[where] = reduced(reduction, self.kind, old, value)
            except OverflowError:
                overflows = True
                break
        try:
            answer = self.call(
                foreign,
                reduce_many,
                array,
                array_of(values, self.kind),
                reduction,
                timestamp=timestamp,
                return_touched=True,
                **options,
            )
        except OverflowError:
            assert overflows
            self.failures += 1
            return
        if answer is None:
            return
        assert not overflows, f"{reduction} had to overflow"
        rows, own_keys, touched = answer
        in_order = sorted(results, key=lambda where: self.group_of(where[0]))
        assert [(keys[i], options["namespace"]) for i in rows] == in_order
        assert own_keys is None or own_keys.tolist() == [key for key, _ in in_order]
        for found, expected in zip(touched.tolist(), map(results.get, in_order), strict=True):
            assert found == expected or (math.isnan(found) and math.isnan(expected))
        for where, value in results.items():
            if value != value:  # a NaN would never compare equal: do not keep it
                self.table.put(where[0], 0.0, where[1], timestamp)
            self.set(where, 0.0 if value != value else value, timestamp)
        self.operations += len(keys)

    # --- snapshots and marks ---

    def snapshot(self):
        if len(self.snapshots) < 4:
            self.snapshots.append((self.core.snapshot(), dict(self.state)))

    def release_snapshot(self):
        if self.snapshots:
            at = self.random.randrange(len(self.snapshots))
            view, state = self.snapshots[at]
            self.compare_snapshot(view, state)
            del self.snapshots[at]
            view.release()

    def compare_snapshot(self, view, state):
        found = self.table.rows_in(view)
        assert len(found) == len(state), f"{len(found)} rows in the snapshot, expected {len(state)}"
        for where, value in state.items():
            assert self.same(found[where], value), where

    def mark(self):
        if len(self.marks) < 4:
            self.marks.append((self.core.mark(), dict(self.state), set()))

    def rollback(self):
        if not self.marks:
            return
        at = self.random.randrange(len(self.marks))
        mark, state, touched = self.marks[at]
        self.check_dirty(mark, touched)
        try:
            self.core.rollback(mark)
        except MemoryError:
            self.core.rollback(mark)  # what was undone stays undone; the call goes on where it ended
        del self.marks[at + 1 :]
        self.state = dict(state)
        touched.clear()
        for i in range(at):
            # What older marks know as touched shrinks too; they are checked when they are rolled back to.
            self.marks[i] = (*self.marks[i][:2], self.table.dirty(self.marks[i][0]))

    def check_dirty(self, mark, touched):
        found = self.table.dirty(mark)
        assert found == touched, (
            f"dirty but not touched: {len(found - touched)}, touched but not dirty: {len(touched - found)}"
        )

    def release_mark(self):
        if self.marks:
            at = self.random.randrange(len(self.marks))
            mark, _, touched = self.marks[at]
            self.check_dirty(mark, touched)
            self.core.release(mark)
            self.core.release(mark)
            del self.marks[at]

    def renumber(self):
        """Let the version counter stand close to its end."""
        version = LAST_VERSION - self.random.randrange(3)
        if version >= self.core.metrics()["state_version"]:
            set_state_version(self.core, version)

    # --- everything ---

    def iterate(self):
        found = {(e.key, e.namespace): e.value for e in self.table}
        assert len(found) == len(self.state)
        for where, value in found.items():
            assert self.same(value, self.state[where])

    def advance(self):
        self.core.advance(self.random.choice((1, 10, 1000)))

    # --- running ---

    def starved(self, action):
        """An action in which an allocation fails, if it makes as many."""
        fail_allocation(self.random.choice((1, 1, 2, 3, 5, 8, 20)))
        try:
            action()
        except MemoryError:
            self.failures += 1
        finally:
            fail_allocation(0)

    def run(self, steps, check_every=0):
        """Random actions, in phases of growing and of shrinking: maps double, empty and start anew."""
        for action in self.random.choices(list(self.actions), list(self.actions.values()), k=steps):
            if action == self.put and self.random.random() < self.shrink():
                action = self.remove
            if self.starving and self.random.random() < 0.05:
                self.starved(action)
            else:
                action()
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
        """Compare what is left, remove everything, and see all memory go back."""
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
        usage = self.core.arena.usage()
        # An insert into an empty map that failed after its bucket page was made leaves that page to the next.
        pages = 256 * self.table.metrics()["maps"] if self.starving else 0
        assert usage["run_bytes"] <= pages, usage
        assert usage["blob_bytes"] == 0, usage
        self.core.arena.trim()
        usage = self.core.arena.usage()
        assert usage["extent_bytes"] <= 1 << 21, usage
