"""Vectorised calls with a column of namespaces do what a loop over their rows does, on every backend."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed
from contract.samples import VALUES, Longest, dump, join, last_of
from contract.test_vectorised import Rows, Twin, columns

from statebackend import types as t
from statebackend.errors import (
    ClosedError,
    KeyGroupError,
    SerializationError,
    SerializationTypeError,
    UsageError,
)
from statebackend.keys import VOID, KeyGroupRange, TimeWindow, key_encoder
from statebackend.state import (
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    KeyedStateBackend,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from statebackend.state.value_columns import to_arrow

pytestmark = pytest.mark.checked

NAMESPACES: list[Any] = [VOID, 7, "text", b"bytes", TimeWindow(0, 60), TimeWindow(0, 120), ("session", 7)]
WINDOWS: list[Any] = [TimeWindow(start, start + 60) for start in (0, 60, 120)]


def window_column(windows: list[Any]) -> pa.Array:
    shown = [None if each is VOID else {"start": each.start, "end": each.end} for each in windows]
    return pa.array(shown, pa.struct([("start", pa.int64()), ("end", pa.int64())]))


def space_column(spaces: list[Any], rng: random.Random) -> Any:
    """A column of namespaces in one of the forms that it may have."""
    if all(isinstance(each, TimeWindow) or each is VOID for each in spaces) and rng.random() < 0.7:
        column = window_column(spaces)
        return column if rng.random() < 0.5 else pa.chunked_array([column[:1], column[1:]])
    if all(type(each) is int for each in spaces) and spaces and rng.random() < 0.7:
        return rng.choice([np.array(spaces), pa.array(spaces)])
    return spaces


def shown(namespaces: Any) -> list[Any]:
    """The namespaces of a column, one by one."""
    if not isinstance(namespaces, pa.Array):
        return list(namespaces)
    return [
        VOID if each is None else TimeWindow(**each) if isinstance(each, dict) else each
        for each in namespaces.to_pylist()
    ]


class SpacedTwin(Twin):
    """A twin of which the rows of each call are in several namespaces."""

    def loop(self, method: str, spaces: list[Any], rows: Rows) -> list[Any]:
        results = []
        for space, (key, *arguments) in zip(spaces, rows, strict=True):
            self.one.set_current_namespace(space)
            self.one.set_current_key(key)
            results.append(getattr(self.one_state, method)(*arguments))
        return results


DESCRIPTORS: list[tuple[StateDescriptor, t.Type]] = [
    (ValueStateDescriptor("s", t.LONG), t.LONG),
    (ValueStateDescriptor("s", t.STRING, default="none"), t.STRING),
    (ValueStateDescriptor("s", t.ROW(a=t.LONG, b=t.STRING)), t.ROW(a=t.LONG, b=t.STRING)),
    (ValueStateDescriptor("s", t.PICKLE), t.PICKLE),
    (ListStateDescriptor("s", t.LONG), t.LONG),
    (ListStateDescriptor("s", t.STRING), t.STRING),
    (ListStateDescriptor("s", t.PICKLE), t.PICKLE),
    (MapStateDescriptor("s", t.INT, t.LONG), t.LONG),
    (MapStateDescriptor("s", t.STRING, t.STRING), t.STRING),
    (MapStateDescriptor("s", t.INT, t.PICKLE), t.PICKLE),
    (ReducingStateDescriptor("s", "sum", t.LONG), t.LONG),
    (ReducingStateDescriptor("s", "max", t.DOUBLE), t.DOUBLE),
    (ReducingStateDescriptor("s", "min", t.STRING), t.STRING),
    (ReducingStateDescriptor("s", "first", t.BYTE), t.BYTE),
    (ReducingStateDescriptor("s", join, t.STRING), t.STRING),
    (AggregatingStateDescriptor("s", "avg", t.LONG), t.LONG),
    (AggregatingStateDescriptor("s", "count", t.STRING), t.STRING),
    (AggregatingStateDescriptor("s", "stddev", t.DOUBLE), t.DOUBLE),
    (AggregatingStateDescriptor("s", Longest(), t.STRING, t.STRING), t.STRING),
    (FoldingStateDescriptor("s", "", last_of, t.STRING), t.STRING),
]
SAMPLES: dict[t.Type, list[Any]] = {
    t.LONG: [3, -7, 2**40],
    t.STRING: ["", "a", "é" * 40],
    t.DOUBLE: [0.5, -0.0, float("inf")],
    t.BYTE: [3, -7, 100],
    t.ROW(a=t.LONG, b=t.STRING): [(1, None), (None, "x"), (2, "y")],
    t.PICKLE: VALUES[t.PICKLE],
}
METHODS: dict[str, tuple[str, str]] = {
    "value": ("update", "value"),
    "list": ("add", "get"),
    "map": ("put", "get"),
    "reducing": ("add", "get"),
    "aggregating": ("add", "get"),
    "folding": ("add", "get"),
}


def name_of(value: Any) -> str:
    return f"{value[0].kind}-{value[1]!r}" if isinstance(value, tuple) else repr(value)


class Drive:
    """Random calls on a twin; what they give, and what is there afterwards, is the same."""

    def __init__(
        self,
        make_keyed: MakeKeyed,
        key_type: t.Type,
        case: tuple[StateDescriptor, t.Type],
        rng: random.Random,
    ) -> None:
        self.descriptor, self.value_type = case
        self.kind, self.rng = self.descriptor.kind, rng
        self.twin = SpacedTwin(make_keyed, key_type, self.descriptor)
        self.key_type = key_type
        self.keys = [f"key {n}" for n in range(6)] if key_type == t.STRING else [0, -1, 5, 2**50]
        self.map_type = getattr(self.descriptor, "key_type", None)
        self.map_keys = ["a", "b", ""] if self.map_type == t.STRING else [1, 2, 3]

    def rows(self, *, writes: bool) -> tuple[list[Any], Rows]:
        count = self.rng.choice([0, 1, 4, 30])
        among = self.rng.choice([NAMESPACES, WINDOWS, [VOID, *WINDOWS], [7, 8, -9], [VOID], [WINDOWS[1]]])
        spaces = self.rng.choices(among, k=count)
        rows = []
        for _ in range(count):
            row: list[Any] = [self.rng.choice(self.keys)]
            if self.map_type is not None:
                row.append(self.rng.choice(self.map_keys))
            if writes:
                is_null = self.kind != "list" and self.rng.random() < 0.2
                row.append(None if is_null else self.rng.choice(SAMPLES[self.value_type]))
            rows.append(tuple(row))
        return spaces, rows

    def given(self, rows: Rows, *, writes: bool) -> list[Any]:
        types = [self.key_type]
        if self.map_type is not None:
            types.append(self.map_type)
        if writes:
            types.append(self.value_type)
        is_arrow = self.value_type != t.PICKLE
        return columns(rows, types, self.rng.choice(["list", "arrow"] if is_arrow else ["list"]))

    def compare(self, many: str, one: str, *, writes: bool, map_keys: bool = True) -> None:
        spaces, rows = self.rows(writes=writes)
        given = self.given(rows, writes=writes)
        if self.map_type is not None and not map_keys:
            given, rows = given[:1], [row[:1] for row in rows]
        expected = self.twin.loop(one, spaces, rows)
        call = getattr(self.twin.many_state, many)
        got = call(*given, namespaces=space_column(spaces, self.rng))
        if got is not None:
            assert repr(got.to_pylist()) == repr(to_arrow(expected, self.result_type(many)).to_pylist())
        self.twin.check_equal()

    def result_type(self, many: str) -> Any:
        if many == "exists_many":
            return t.BOOL
        descriptor: Any = self.descriptor
        if self.kind == "list":
            return t.LIST(descriptor.element_type)
        if self.kind == "map":
            return descriptor.value_type
        return descriptor.result_type if self.kind == "aggregating" else descriptor.type

    def changed(self) -> None:
        spaces, rows = self.rows(writes=True)
        self.twin.loop("add", spaces, rows)
        keys, namespaces, results = self.twin.many_state.add_many(
            *self.given(rows, writes=True), return_changed=True, namespaces=space_column(spaces, self.rng)
        )
        touched = list(dict.fromkeys((row[0], space) for row, space in zip(rows, spaces, strict=True)))
        assert list(zip(keys.to_pylist(), shown(namespaces), strict=True)) == touched
        expected = self.twin.loop("get", [space for _, space in touched], [(key,) for key, _ in touched])
        assert repr(results.to_pylist()) == repr(to_arrow(expected, self.result_type("add")).to_pylist())
        self.twin.check_equal()

    def step(self) -> None:
        write, read = METHODS[self.kind]
        choice = self.rng.randrange(6)
        if choice == 0:
            self.compare("exists_many", "exists", writes=False, map_keys=False)
        elif choice == 1:
            self.compare("clear_many", "clear", writes=False, map_keys=False)
        elif choice == 2:
            self.compare("get_many", read, writes=False)
        elif choice == 3 and self.kind == "map":
            self.compare("remove_many", "remove", writes=False)
        elif choice == 3 and self.kind in ("reducing", "aggregating", "folding"):
            self.changed()
        else:
            self.compare(f"{write}_many", write, writes=True)


@pytest.mark.parametrize("key_type", [t.LONG, t.STRING], ids=repr)
@pytest.mark.parametrize("case", DESCRIPTORS, ids=name_of)
def test_calls_do_what_a_loop_does(
    make_keyed: MakeKeyed, key_type: t.Type, case: tuple[StateDescriptor, t.Type], rng: random.Random
) -> None:
    drive = Drive(make_keyed, key_type, case, rng)
    both = (drive.twin.one, drive.twin.many)
    current = rng.choice(NAMESPACES)
    for keyed in both:
        keyed.set_current_key(drive.keys[0])
    drive.twin.many.set_current_namespace(current)
    marks: list[list[Any]] = []
    for _ in range(40):
        event = rng.random()
        if event < 0.15:
            marks.append([keyed.mark() for keyed in both])
        elif event < 0.3 and marks:
            for keyed, mark in zip(both, marks.pop(), strict=True):
                keyed.rollback(mark)
                keyed.release(mark)
            drive.twin.check_equal()
        drive.step()
        assert drive.twin.many.current_namespace == current
        assert drive.twin.many.current_key == drive.keys[0]


@pytest.mark.parametrize("has_void", [False, True], ids=["windows", "void-too"])
@pytest.mark.parametrize("key_type", [t.LONG, t.STRING], ids=repr)
def test_large_batches(make_keyed: MakeKeyed, key_type: t.Type, has_void: bool, rng: random.Random) -> None:
    """So many rows that a backend may sort them, and divide them among threads."""
    spaces_of: list[Any] = [*([VOID] if has_void else []), *(TimeWindow(n, n + 5) for n in range(40))]
    keys = [n if key_type == t.LONG else f"{n}" for n in range(300)]
    twin = SpacedTwin(make_keyed, key_type, ReducingStateDescriptor("s", "sum", int))
    values = SpacedTwin(make_keyed, key_type, ValueStateDescriptor("s", str))
    for _ in range(2):
        rows: Rows = [(rng.choice(keys), rng.randrange(100)) for _ in range(9_000)]
        spaces = rng.choices(spaces_of, k=len(rows))
        expected = twin.loop("add", spaces, rows)
        changed, namespaces, sums = twin.many_state.add_many(
            *columns(rows, [key_type, t.LONG], "arrow"),
            return_changed=True,
            namespaces=window_column(spaces),
        )
        touched = list(dict.fromkeys((row[0], space) for row, space in zip(rows, spaces, strict=True)))
        assert list(zip(changed.to_pylist(), shown(namespaces), strict=True)) == touched
        assert sums.to_pylist() == twin.loop("get", [at for _, at in touched], [(key,) for key, _ in touched])
        texts: Rows = [(key, None if number == 0 else f"text {number}") for key, number in rows]
        values.loop("update", spaces, texts)
        values.many_state.update_many(
            *columns(texts, [key_type, t.STRING], "arrow"), namespaces=window_column(spaces)
        )
    twin.check_equal()
    values.check_equal()
    asked: Rows = [(key,) for key, _ in rows]
    expected = values.loop("value", spaces, asked)
    got = values.many_state.get_many([key for key, _ in rows], namespaces=window_column(spaces))
    assert got.to_pylist() == expected
    values.loop("clear", spaces[:5000], asked[:5000])
    values.many_state.clear_many([key for (key,) in asked[:5000]], namespaces=spaces[:5000])
    values.check_equal()


def test_reading_where_nothing_was_written_leaves_nothing(keyed: KeyedStateBackend) -> None:
    states: list[Any] = [
        keyed.get_state(ValueStateDescriptor("v", str, default="d")),
        keyed.get_state(ListStateDescriptor("l", int)),
        keyed.get_state(ReducingStateDescriptor("r", "sum", int)),
    ]
    maps = keyed.get_map_state(MapStateDescriptor("m", int, int))
    for spaces in (WINDOWS, [VOID, *WINDOWS[:2]], ["x", "y", "x"]):
        for state, nothing in zip(states, ("d", [], None), strict=True):
            assert state.get_many([1, 2, 1], namespaces=spaces).to_pylist() == [nothing] * 3
            assert state.exists_many([1, 2, 1], namespaces=spaces).to_pylist() == [False] * 3
            state.clear_many([1, 2, 1], namespaces=spaces)
        assert maps.get_many([1, 2, 1], [1, 1, 1], namespaces=spaces).to_pylist() == [None] * 3
        maps.remove_many([1, 2, 1], [1, 1, 1], namespaces=spaces)
    assert keyed.num_entries() == 0


def test_nulls_are_void(keyed: KeyedStateBackend) -> None:
    total = keyed.get_reducing_state(ReducingStateDescriptor("r", "sum", int))
    total.add_many([1, 1, 1], [1, 2, 4], namespaces=pa.array([5, None, 5]))
    keyed.set_current_namespace(5)
    assert total.get() == 5
    keyed.set_current_namespace(VOID)
    assert total.get() == 2
    assert total.get_many([1, 1, 1], namespaces=[None, 5, VOID]).to_pylist() == [2, 5, 2]


def test_what_changed_has_the_type_of_the_column(keyed: KeyedStateBackend) -> None:
    total = keyed.get_reducing_state(ReducingStateDescriptor("r", "sum", int))
    windows = window_column([WINDOWS[0]])
    for column, sort in (
        (windows, windows.type),
        (pa.array(["a"]), pa.string()),
        (pa.array([1]), pa.int64()),
    ):
        for rows in (0, 1):
            _, namespaces, _ = total.add_many(
                [1] * rows, [1] * rows, return_changed=True, namespaces=column[:rows]
            )
            assert (namespaces.type, len(namespaces)) == (sort, rows)
        _, namespaces, _ = total.add_many([1], [1], return_changed=True, namespaces=pa.nulls(1, sort))
        assert namespaces.type == sort


STATES: dict[str, StateDescriptor] = {
    "value": ValueStateDescriptor("value", str),
    "list": ListStateDescriptor("list", str),
    "map": MapStateDescriptor("map", str, str),
    "sum": ReducingStateDescriptor("sum", "sum", "tinyint"),
    "fold": FoldingStateDescriptor("fold", "", join, str),
}
ONE = TimeWindow(0, 1)
NO_END = pa.array([{"start": 0, "end": None}] * 2, window_column([ONE]).type)
FAILING = [
    ("value", lambda s: s.update_many([1, 2], ["a", "b"], namespaces=[ONE]), UsageError),
    ("value", lambda s: s.update_many([1], ["a"], namespaces=[ONE, ONE]), UsageError),
    ("value", lambda s: s.update_many([1, 2], ["a", "b"], namespaces=[ONE, 1.5]), SerializationTypeError),
    (
        "value",
        lambda s: s.update_many([1, 2], ["a", "b"], namespaces=pa.array([1.5, 2])),
        SerializationTypeError,
    ),
    (
        "value",
        lambda s: s.update_many([1, 2], ["a", "b"], namespaces=np.array([True, False])),
        SerializationError,
    ),
    ("value", lambda s: s.update_many([1, 2], ["a", "b"], namespaces="ab"), SerializationTypeError),
    ("value", lambda s: s.update_many([1, 2], ["a", "b"], namespaces=NO_END), SerializationError),
    ("value", lambda s: s.update_many([1, 2], ["a", "b"], namespaces=[ONE, 2**63]), OverflowError),
    ("value", lambda s: s.update_many([1, 2], ["a", 3], namespaces=[ONE, VOID]), SerializationTypeError),
    ("value", lambda s: s.get_many([1, 2], namespaces=[ONE]), UsageError),
    ("value", lambda s: s.exists_many([1, 2], namespaces=[ONE]), UsageError),
    ("value", lambda s: s.clear_many([1, 2], namespaces=[ONE]), UsageError),
    ("list", lambda s: s.add_many([1, 2], ["a", None], namespaces=[ONE, VOID]), SerializationTypeError),
    (
        "map",
        lambda s: s.put_many([1, 2], ["a", None], ["x", "y"], namespaces=[ONE] * 2),
        SerializationTypeError,
    ),
    ("map", lambda s: s.put_many([1, 2], ["a", "b"], ["x", "y"], namespaces=[ONE]), UsageError),
    ("map", lambda s: s.remove_many([1, 2], ["a", "b"], namespaces=[ONE]), UsageError),
    ("map", lambda s: s.get_many([1, 2], ["a", "b"], namespaces=[ONE]), UsageError),
    ("sum", lambda s: s.add_many([1, 2, 1], [1, 1, 127], namespaces=[ONE] * 3), OverflowError),
    ("sum", lambda s: s.add_many([2, 1, 1], [1, 1, 127], namespaces=[VOID, ONE, ONE]), OverflowError),
    ("sum", lambda s: s.add_many([1, 2, 1], [1, 1, 127], namespaces=[ONE, ONE, VOID]), OverflowError),
    ("fold", lambda s: s.add_many([1, 2], ["a", "b"], namespaces=[ONE]), UsageError),
]


@pytest.mark.parametrize(("name", "call", "error"), FAILING)
def test_a_failed_call_changes_nothing(
    keyed: KeyedStateBackend, name: str, call: Any, error: type[Exception]
) -> None:
    state = keyed.get_state(STATES[name])
    filled: dict[str, Any] = {"map": lambda: state.put("k", "v"), "value": lambda: state.update("v")}
    for namespace in (ONE, VOID):
        keyed.set_current_namespace(namespace)
        (filled.get(name) or (lambda: state.add(1 if name == "sum" else "v")))()
    before = dump(keyed, STATES[name])
    with pytest.raises(error):
        call(state)
    assert dump(keyed, STATES[name]) == before
    assert (keyed.current_key, keyed.current_namespace) == (1, VOID)


def test_errors_name_the_row_of_the_call(keyed: KeyedStateBackend) -> None:
    total = keyed.get_state(STATES["sum"])
    for spaces in ([ONE] * 4, [VOID, ONE, VOID, ONE], [ONE, VOID, ONE, VOID], [VOID, VOID, VOID, 7]):
        with pytest.raises(OverflowError) as raised:
            total.add_many([2, 1, 2, 3], [100, 1, 100, 1], namespaces=spaces)
        if "position" in str(raised.value):
            assert "position 2" in str(raised.value)
        assert keyed.num_entries() == 0


def test_key_groups_are_checked_before_anything_changes(make_keyed: MakeKeyed) -> None:
    groups = {key: key_encoder(int).key_group(key, 8) for key in range(50)}
    own = next(key for key, group in groups.items() if group <= 3)
    foreign = next(key for key, group in groups.items() if group > 3)
    keyed = make_keyed(int, max_parallelism=8, key_group_range=KeyGroupRange(0, 3))
    total = keyed.get_reducing_state(ReducingStateDescriptor("s", "sum", int))
    for spaces in ([ONE, ONE], [ONE, VOID], [VOID, ONE]):
        with pytest.raises(KeyGroupError):
            total.add_many([own, foreign], [1, 2], namespaces=spaces)
        with pytest.raises(KeyGroupError):
            total.get_many([own, foreign], namespaces=spaces)
    assert keyed.num_entries() == 0


def test_a_closed_backend_refuses(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    total = keyed.get_reducing_state(ReducingStateDescriptor("s", "sum", int))
    keyed.close()
    for call in (
        lambda: total.add_many([1], [1], namespaces=[ONE]),
        lambda: total.get_many([1], namespaces=[ONE]),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_function_of_the_user_has_the_key_and_namespace_of_its_row(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    seen: list[Any] = []
    weights = keyed.get_state(ValueStateDescriptor("weight", t.LONG, default=1))
    weights.update_many([1, 2], [10, 100], namespaces=["a", "b"])

    def weighted(total: int, value: int) -> int:
        seen.append((keyed.current_key, keyed.current_namespace))
        return total + value * weights.value()

    totals = keyed.get_state(ReducingStateDescriptor("total", weighted, t.LONG))
    totals.add_many([1, 1, 2, 2], [1, 1, 1, 1], namespaces=["a", "a", "b", "b"])
    assert seen == [(1, "a"), (2, "b")]
    assert totals.get_many([1, 2], namespaces=["a", "b"]).to_pylist() == [11, 101]
