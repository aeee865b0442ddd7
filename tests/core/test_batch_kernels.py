"""Batches of additions, map entries and lists: what they do is what one call after the other does.

`contract.test_vectorised_sequences` and `contract.test_ttl_model` compare what expires with calls for one row.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from map_model import packed
from twin.cow_map import hash_int

from statebackend._core.core_probe import MapTable, StateTable
from statebackend._core.kernels import (
    aggregation_kernels,
    batch_kernels,
    gather_kernels,
    map_kernels,
    ttl_kernels,
)
from statebackend._core.key_groups import HashPlan
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import KeyGroupError, MemoryLimitError, UsageError
from statebackend.state import named_aggregate, named_reduction
from statebackend.state.ttl import expired
from statebackend.types.serializers import serializer_for

pytestmark = pytest.mark.checked

THREADS = [1, 3]


def as_keys(keys: list[Any]) -> Any:
    return np.array(keys, dtype=np.int64) if not keys or isinstance(keys[0], int) else packed(keys)


def parts_of(values: Any, found: Any = None) -> list[Any]:
    """By row: bytes, or Python numbers; None where nothing was found."""
    if isinstance(values, tuple):
        offsets, data = values
        parts: list[Any] = [data[a:b].tobytes() for a, b in itertools.pairwise(offsets)]
    elif values.ndim == 2:
        parts = [row.tobytes() for row in values]
    else:
        parts = values.tolist()
    return (
        parts
        if found is None
        else [part if there else None for part, there in zip(parts, found, strict=True)]
    )


@contextmanager
def surroundings(core: StateCore, rng: random.Random) -> Iterator[Callable[[], None]]:
    """Marks and snapshots that come and go; gives the function that makes the next one of them happen."""
    marks: list[Any] = []
    snapshots: list[Any] = []

    def something() -> None:
        what = rng.randrange(5)
        if what == 0:
            marks.append(core.mark())
        elif what == 1 and marks:
            core.release(marks.pop(rng.randrange(len(marks))))
        elif what == 2:
            snapshots.append(core.snapshot())
        elif what == 3 and snapshots:
            snapshots.pop(rng.randrange(len(snapshots))).release()

    yield something
    for mark in marks:
        core.release(mark)
    for snapshot in snapshots:
        snapshot.release()


# --- adding ---

NUMBERS = {
    "long": ("bigint", np.int64), "int": ("int", np.int32), "short": ("smallint", np.int16),
    "byte": ("tinyint", np.int8), "double": ("double", np.float64), "float": ("float", np.float32),
    "bool": ("boolean", np.bool_),
}  # fmt: skip
PLANS: list[tuple[str, Any]] = [
    *((op, number) for op in ("sum", "product", "min", "max", "first", "last") for number in NUMBERS),
    ("any", "bool"), ("all", "bool"), ("count", "long"), ("average", None), ("moments", None),
    *((op, "bytes") for op in ("min", "max", "first", "last")),
    *((op, digits) for op in ("sum", "min", "max", "first", "last") for digits in ("decimal 9", "decimal 30")),
    ("first", 3), ("last", 3),
]  # fmt: skip
PLANS = [plan for plan in PLANS if plan not in (("sum", "bool"), ("product", "bool"))]


class Kind:
    """A plan, its table, its values, and what one value does in Python, over stored bytes."""

    def __init__(self, operation: str, number: Any) -> None:
        self.digits = 0
        if isinstance(number, str) and number.startswith("decimal"):
            self.digits = int(number.split()[1])
            number = "decimal"
        self.plan = AddPlan(operation, number, self.digits)
        self.operation, self.number = operation, number
        self.layout: Any = number
        if operation in ("average", "moments"):
            self.layout = 17 if operation == "average" else 25
            aggregate = named_aggregate("avg" if operation == "average" else "variance", "double")
            serializer = serializer_for(aggregate.accumulator_type)

            def step(old: bytes | None, value: bytes) -> bytes:
                accumulator = aggregate.create_accumulator() if old is None else serializer.deserialize(old)
                return serializer.serialize(aggregate.add(np.frombuffer(value)[0].item(), accumulator))

            self.step: Callable[[bytes | None, bytes], bytes] = step
            return
        if operation == "count":
            self.step = lambda old, value: (int.from_bytes(old or b"", "little") + 1).to_bytes(8, "little")
            return
        declared = "binary"
        if number in NUMBERS:
            declared = NUMBERS[number][0]
        elif number == "decimal":
            declared = f"decimal({self.digits},2)"
            self.layout = 8 if self.digits <= 18 else 16
        reduction, serializer = named_reduction(operation, declared), serializer_for(declared)

        def reduce(old: bytes | None, value: bytes) -> bytes:
            if old is None:
                return value
            return serializer.serialize(reduction(serializer.deserialize(old), serializer.deserialize(value)))

        self.step = reduce

    def value(self, rng: random.Random) -> bytes:
        if self.number in ("bytes", 3):
            return bytes(rng.choices(b"ab\xff", k=3 if self.number == 3 else rng.randrange(4)))
        if self.number == "decimal":
            number = rng.choice([rng.randrange(-9, 9), 10**self.digits // 3])
            return number.to_bytes(8 if self.digits <= 18 else 16, "little", signed=True)
        dtype = np.float64 if self.number is None else NUMBERS[self.number][1]
        if dtype in (np.float64, np.float32):
            choice: float = rng.choice([0.0, -0.0, 1.5, -2.25, 1e30, math.inf, math.nan, rng.random()])
            return dtype(choice).tobytes()
        if dtype is np.bool_:
            return bytes([rng.randrange(2)])
        return dtype(rng.choice([rng.randrange(-2, 3), rng.randrange(-20, 20)])).tobytes()

    def column(self, values: list[bytes]) -> Any:
        if self.number == "bytes":
            return packed(values)
        flat = np.frombuffer(b"".join(values), dtype=np.uint8)
        if self.number in NUMBERS:
            return flat.view(NUMBERS[self.number][1])
        if self.number is None:
            return flat.view(np.float64)
        return flat.reshape(len(values), -1)


def stored(table: StateTable, key: Any, namespace: int) -> bytes | None:
    values, found = batch_kernels.get_many(table, as_keys([key]), namespace=namespace)
    if not found[0]:
        return None
    part = parts_of(values)[0]
    return part if isinstance(part, bytes) else values[:1].tobytes()


def same_bytes(a: bytes | None, b: bytes | None, kind: Kind) -> bool:
    """Equal, but for which NaN it is: 0 * inf has no sign that a language promises."""
    if a == b or a is None or b is None:
        return a == b
    if kind.number in ("double", "float"):
        dtype = NUMBERS[kind.number][1]
        return bool(np.array_equal(np.frombuffer(a, dtype), np.frombuffer(b, dtype), equal_nan=True))
    if kind.number is None:
        skip = 1
        x, y = np.frombuffer(a[skip:], np.float64), np.frombuffer(b[skip:], np.float64)
        return bool(np.array_equal(x, y, equal_nan=True))
    return False


@pytest.mark.parametrize("key_layout", ["int", "bytes"])
@pytest.mark.parametrize(("operation", "number"), PLANS, ids=lambda each: str(each))
def test_adding_is_the_python_definition_row_by_row(
    operation: str, number: Any, key_layout: str, rng: random.Random
) -> None:
    kind = Kind(operation, number)
    core = StateCore()
    table = StateTable(
        core, key=key_layout, value=kind.layout, max_parallelism=4, namespaces=True, timestamps=True
    )
    model: dict[tuple[Any, int], tuple[bytes, int]] = {}
    keys = list(range(30)) if key_layout == "int" else [b"key %d" % n for n in range(30)]
    with surroundings(core, rng) as something:
        for now in range(0, 160, 10):
            something()
            rows = [rng.choice(keys) for _ in range(rng.choice([1, 5, 40]))]
            values = [kind.value(rng) for _ in rows]
            nulls = [rng.random() < 0.2 for _ in rows] if rng.random() < 0.7 else None
            ttl, namespace = rng.choice([0, 25]), rng.choice([0, core.namespaces.number(b"n")])
            after, failed = dict(model), False
            for n, (key, value) in enumerate(zip(rows, values, strict=True)):
                at = (key, namespace)
                if nulls and nulls[n]:
                    after.pop(at, None)
                    continue
                old = after.get(at)
                if old is not None and ttl and expired(old[1], ttl, now):
                    old = None
                try:
                    after[at] = (kind.step(None if old is None else old[0], value), now)
                except OverflowError:
                    failed = True
                    break
            call = {
                "namespace": namespace,
                "timestamp": now,
                "ttl": ttl,
                "nulls": None if nulls is None else np.array(nulls),
            }
            if failed:
                with pytest.raises(OverflowError, match="position"):
                    aggregation_kernels.add_many(table, as_keys(rows), kind.column(values), kind.plan, **call)
            else:
                model = after
                touched = aggregation_kernels.add_many(
                    table, as_keys(rows), kind.column(values), kind.plan, return_touched=nulls is None, **call
                )
                if nulls is None:
                    first, own_keys, column = touched
                    assert sorted(first) == sorted(map(rows.index, set(rows)))
                    assert own_keys is None or own_keys.tolist() == [rows[n] for n in first]
                    parts = (
                        [column[n : n + 1].tobytes() for n in range(len(first))]
                        if isinstance(column, np.ndarray)
                        else parts_of(column)
                    )
                    for n, part in zip(first, parts, strict=True):
                        assert same_bytes(part, model[rows[n], namespace][0], kind)
            for name in {0, namespace}:
                for key in keys:
                    expected = model.get((key, name))
                    assert same_bytes(stored(table, key, name), expected and expected[0], kind)
                    assert table.timestamp(key, name) == (expected and expected[1])
            table._check()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("under", ["nothing", "mark", "snapshot"])
@pytest.mark.parametrize(
    ("operation", "number"),
    [
        ("sum", "long"),
        ("average", None),
        ("max", "bytes"),
        ("min", "double"),
        ("first", 3),
        ("last", 3),
        ("last", "bytes"),
        ("count", "long"),
    ],
)
def test_large_batches_on_threads(
    operation: str, number: Any, under: str, threads: int, rng: random.Random
) -> None:
    kind = Kind(operation, number)
    core = StateCore()
    table = StateTable(core, value=kind.layout, max_parallelism=16)
    keys = [rng.randrange(3_000) for _ in range(20_000)]
    pool = [kind.value(rng) for _ in range(50)]
    values = [rng.choice(pool) for _ in keys]
    some = np.array([rng.random() < 0.1 for _ in keys])
    model: dict[int, bytes] = {}

    def bytes_at(column: Any, row: int) -> bytes:
        if isinstance(column, np.ndarray):
            return column[row : row + 1].tobytes()
        offsets, data = column
        return bytes(data[offsets[row] : offsets[row + 1]])

    for nulls in (some, None, None):
        held = {"nothing": lambda: None, "mark": core.mark, "snapshot": core.snapshot}[under]()
        for key, value, null in zip(
            keys, values, np.zeros(len(keys)) if nulls is None else nulls, strict=True
        ):
            if null:
                model.pop(key, None)
            else:
                model[key] = kind.step(model.get(key), value)
        touched = aggregation_kernels.add_many(
            table, as_keys(keys), kind.column(values), kind.plan,
            nulls=nulls, threads=threads, return_touched=nulls is None,
        )  # fmt: skip
        if touched is not None:
            rows, own_keys, column = touched
            groups = HashPlan("int64").key_groups(own_keys, 16)
            assert own_keys.tolist() == [keys[row] for row in rows]
            assert len(rows) == len(set(keys))
            assert (np.lexsort((rows, groups)) == np.arange(len(rows))).all()
            assert all(
                same_bytes(bytes_at(column, n), model[key], kind) for n, key in enumerate(own_keys.tolist())
            )
        column, found = batch_kernels.get_many(table, np.arange(3_000))
        for key in range(3_000):
            assert same_bytes(bytes_at(column, key) if found[key] else None, model.get(key), kind)
        table._check()
        if under == "snapshot" and held is not None:
            held.release()
    core.advance(1 << 20)
    table._check()


def test_plans_that_do_not_fit() -> None:
    for arguments in [
        ("sum", "bool"), ("any", "long"), ("count", "int"), ("product", "decimal", 5), ("sum", "decimal", 39),
        ("sum", "bytes"), ("min", 7), ("first", 0), ("first", True), ("median", "long"), ("sum", None),
    ]:  # fmt: skip
        with pytest.raises(UsageError):
            AddPlan(*arguments)
    table = StateTable(StateCore(), value="long")
    one = np.ones(1, dtype=np.int64)
    for plan, values in [
        (AddPlan("sum", "double"), one.astype(float)),
        (AddPlan("average"), one.astype(float)),
        (AddPlan("min", "bytes"), packed([b"a"])),
        (AddPlan("sum", "long"), one.astype(np.int32)),
        (AddPlan("last", 8), one.astype(np.int32)),
        (AddPlan("sum", "long"), np.ones(2, dtype=np.int64)),
    ]:
        with pytest.raises(UsageError):
            aggregation_kernels.add_many(table, one, values, plan)
    for options in ({"ttl": 5}, {"nulls": np.zeros(2, dtype=bool)}):
        with pytest.raises(UsageError):
            aggregation_kernels.add_many(table, one, one, AddPlan("sum", "long"), **options)
    for read in (ttl_kernels.read_many, ttl_kernels.look_many):
        with pytest.raises(UsageError):  # which needs timestamps
            read(table, np.arange(2), now=5, ttl=5)
    assert len(table) == 0


# --- maps ---


def map_contents(maps: MapTable, keys: list[Any], namespace: int) -> dict[Any, list[Any]]:
    return {key: found for key in keys if (found := list(maps.items(key, namespace)))}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("under", ["nothing", "mark", "snapshot"])
@pytest.mark.parametrize("value", ["long", "bytes"])
def test_large_map_batches_on_threads(threads: int, under: str, value: str, rng: random.Random) -> None:
    core = StateCore()
    maps = MapTable(core, value=value, max_parallelism=16, nullable=True)
    keys = np.array([rng.randrange(400) for _ in range(20_000)])
    map_keys = np.array([rng.randrange(12) for _ in range(20_000)])
    model: dict[int, dict[int, Any]] = {}
    for turn in range(3):
        held = core.mark() if under == "mark" else core.snapshot() if under == "snapshot" else None
        numbers = [rng.randrange(1000) for _ in range(20_000)]
        nulls = np.array([rng.random() < 0.1 for _ in numbers])
        for key, map_key, number, null in zip(keys.tolist(), map_keys.tolist(), numbers, nulls, strict=True):
            new = None if null else number if value == "long" else b"%d" % number
            model.setdefault(key, {})[map_key] = new
        column = np.array(numbers) if value == "long" else packed([b"%d" % number for number in numbers])
        map_kernels.put_many(maps, keys, map_keys, column, nulls=nulls, threads=threads)
        got = parts_of(*map_kernels.get_many(maps, keys, map_keys, threads=threads))
        assert got == [model[key][m] for key, m in zip(keys.tolist(), map_keys.tolist(), strict=True)]
        some = np.array([rng.randrange(20_000) for _ in range(9_000)])
        there = [
            model[key].pop(m, map_kernels) is not map_kernels
            for key, m in zip(keys[some].tolist(), map_keys[some].tolist(), strict=True)
        ]
        assert map_kernels.remove_many(maps, keys[some], map_keys[some], threads=threads).tolist() == there
        model = {key: found for key, found in model.items() if found}
        assert map_contents(maps, list(range(400)), 0) == {key: list(f.items()) for key, f in model.items()}
        maps._check()
        if turn == 1 and under == "snapshot" and held is not None:
            held.release()
    core.advance(1 << 20)
    maps._check()


@pytest.mark.parametrize("value", ["long", 3])
def test_none_keeps_nothing_of_the_old_or_given_value(value: Any) -> None:
    core = StateCore()
    maps = MapTable(core, value=value, max_parallelism=1, nullable=True)
    given = np.array([5, 6]) if value == "long" else np.full((2, 3), 7, dtype=np.uint8)
    maps.put(1, 1, 9 if value == "long" else b"abc")
    map_kernels.put_many(maps, np.array([1, 1]), np.array([1, 2]), given, nulls=np.array([True, True]))
    assert list(maps.items(1)) == [(1, None), (2, None)]
    view = core.snapshot()
    rows = view.rows(maps.entries, 0, 0).columns()
    assert (rows["is_null"].all(), rows["value"].any()) == (True, False)
    view.release()


@pytest.mark.parametrize("threads", THREADS)
def test_after_a_call_without_memory_there_is_as_much_as_before(threads: int) -> None:
    """Neither do threads pass the limit together, nor does what undoing took make smaller calls fail."""
    for _ in range(5):
        core = StateCore(max_bytes=6 << 20)
        table = StateTable(core, value="bytes", max_parallelism=4)
        table.put(1, b"before")
        core.mark()
        with pytest.raises(MemoryLimitError):
            batch_kernels.update_many(
                table, np.arange(20_000), packed([b"x" * 600] * 20_000), threads=threads
            )
        assert core.metrics()["used_bytes"] <= 6 << 20
        batch_kernels.update_many(table, np.arange(9), packed([b"y"] * 9))
        assert len(table) == 9
        table._check()


def test_map_batches_that_are_refused() -> None:
    maps = MapTable(StateCore(), value="long", max_parallelism=8, key_group_range=(0, 3))
    own = next(key for key in range(99) if group(key) < 4)
    foreign = next(key for key in range(99) if group(key) >= 4)
    one = np.ones(2, dtype=np.int64)
    with pytest.raises(KeyGroupError, match="position 1"):
        map_kernels.put_many(maps, np.array([own, foreign]), one, one)
    for call in (
        lambda: map_kernels.put_many(maps, one[:1], one, one),
        lambda: map_kernels.put_many(maps, one, one, one[:1]),
        lambda: map_kernels.put_many(maps, one, packed([b"a", b"b"]), one),
        lambda: map_kernels.put_many(maps, one, one, one.astype(float)),
        lambda: map_kernels.put_many(maps, one, one, one, nulls=np.zeros(2, dtype=bool)),
        lambda: map_kernels.put_many(maps, one, one, one, ttl=5),
        lambda: map_kernels.get_many(maps, one, one, ttl=5),
        lambda: map_kernels.get_many(maps, one, one, namespace=1),
        lambda: map_kernels.get_many(MapTable(StateCore(), value="object"), one, one),
    ):
        with pytest.raises(UsageError):
            call()
    assert len(maps) == 0


def group(key: int) -> int:
    return StateTable(StateCore(), max_parallelism=8).group_of(key)


# --- lists ---


def test_lists_of_a_mark_that_was_rolled_back() -> None:
    core = StateCore()
    table = StateTable(core, value=("list", "long"))
    for n in range(100):
        table.append(1, n)
    mark = core.mark()
    for n in range(100):
        table.append(1, -n)
    core.rollback(mark)
    table.append(1, 7)
    offsets, elements = gather_kernels.lists_at(table, batch_kernels.find_many(table, np.array([1, 2])))
    assert offsets.tolist() == [0, 101, 101]
    assert elements.tolist() == [*range(100), 7]
    with pytest.raises(UsageError):
        gather_kernels.no_values(table, 1)
    with pytest.raises(UsageError):
        gather_kernels.lists_at(StateTable(core), np.zeros(1, dtype=np.uint32))


def test_a_read_that_renews_finds_keys_that_a_row_before_it_has_moved() -> None:
    # Two pages of buckets, 64 of them in use. The snapshot needs one page; the entries of the other are newer.
    table = StateTable(
        StateCore(seed=1), timestamps=True, max_parallelism=2, hash_mask=0x103F, initial_capacity=4096
    )
    by_page: list[list[int]] = [[], []]
    elsewhere = next(key for key in itertools.count() if table.group_of(key) == 1)
    for key in range(20_000):
        if table.group_of(key) == 0:
            by_page[hash_int(key, 0, 1) >> 12 & 1].append(key)
    for key in by_page[1][:3_300]:
        table.put(key, key, timestamp=1)
    view = table.owner.snapshot()
    info = table.map_info(0)
    assert info is not None
    assert (info["primary_capacity"], info["secondary_capacity"]) == (8192, 0)
    recent: list[int] = []
    while (info := table.map_info(0)) is not None and not info["secondary_capacity"]:
        recent.append(by_page[0][len(recent)])
        table.put(recent[-1], recent[-1], timestamp=1)
    # The block's share of the rehash moves the first buckets. Its first row copies a page, and moves a bucket more.
    keys = by_page[1][:1] + [key for key in recent if hash_int(key, 0, 1) & 0x3F in (1, 2, 3, 4)][:31]
    rows = np.array([elsewhere] * 4_064 + keys)
    values, found = ttl_kernels.read_many(table, rows, now=2, ttl=100, renews=True)
    assert parts_of(values[4_064:], found[4_064:]) == keys
    assert [table.timestamp(key) for key in keys] == [2] * 32
    view.release()
    table.owner._check()
