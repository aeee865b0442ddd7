"""Sequences of vectorised calls give what one-by-one calls give: with time, namespaces, marks, in any layout."""

from __future__ import annotations

import datetime
import decimal
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed
from contract.samples import dump
from contract.test_vectorised import Rows, Twin

from statebackend import types as t
from statebackend.errors import SerializationError, StateBackendError
from statebackend.keys import VOID, TimeWindow
from statebackend.state import (
    AggregatingStateDescriptor,
    KeyedStateBackend,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from statebackend.state.ttl import StateTtlConfig
from statebackend.state.value_columns import to_arrow
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

Update = StateTtlConfig.UpdateType
Visibility = StateTtlConfig.StateVisibility

UTC = datetime.timezone.utc
#: A few different values of types that are stored in each of the ways there are.
LAYOUTS: dict[t.Type, list[Any]] = {
    t.LONG: [3, -7, 2**40],
    t.BYTE: [3, -7, 100],
    t.DOUBLE: [0.5, -0.0, float("inf"), float("nan")],
    t.FLOAT: [0.5, -2.0],
    t.BOOL: [True, False],
    t.STRING: ["", "a", "é" * 40],
    t.TIMESTAMP: [datetime.datetime(2024, 1, n, tzinfo=UTC) for n in (1, 5, 9)],
    t.DECIMAL(12, 2): [decimal.Decimal("1.25"), decimal.Decimal("-9.50")],
    t.DECIMAL(30, 2): [decimal.Decimal("1.25"), decimal.Decimal("-123456789012345678901.50")],
    t.ROW(a=t.LONG, b=t.DATE): [(1, None), (None, datetime.date(2024, 2, 29)), (None, None)],
    t.ROW(a=t.STRING): [("x",), (None,)],
    t.LIST(t.INT): [[1, None], []],
}


def random_form(values: list[Any], declared: t.Type, rng: random.Random) -> Any:
    """A column of values as one of the things that a column may come as."""
    form = rng.randrange(5)
    if form == 0 or not values:
        return values
    array = to_arrow(values, declared)
    if form == 1:
        return array
    if form == 2:
        return pa.concat_arrays([array[-1:], array])[1:]
    if form == 3:
        return pa.chunked_array([array[:1], array[1:1], array[1:]])
    nested = pa.types.is_nested(array.type) or pa.types.is_decimal(array.type)
    return array if nested else array.dictionary_encode()


class Sequences:
    """A twin that is driven at random."""

    def __init__(
        self, make_keyed: MakeKeyed, descriptor: StateDescriptor, value_type: t.Type, rng: random.Random
    ) -> None:
        self.twin = Twin(make_keyed, t.STRING, descriptor)
        self.value_type, self.rng = value_type, rng
        self.keys = [f"key {n}" for n in range(7)]
        self.map_keys = [1, 2, 3, 4]

    def rows(self, *parts: Any) -> Rows:
        count = self.rng.choice([0, 1, 4, 25])
        return [tuple(make() for make in (self.key, *parts)) for _ in range(count)]

    def key(self) -> str:
        return self.rng.choice(self.keys)

    def map_key(self) -> int:
        return self.rng.choice(self.map_keys)

    def value(self) -> Any:
        return self.rng.choice(LAYOUTS[self.value_type])

    def nullable(self) -> Any:
        return None if self.rng.random() < 0.25 else self.value()

    def call(self, many: str, one: str, rows: Rows, *types: t.Type) -> None:
        """The same with whole columns and row by row; results, and what is there afterwards, are the same."""
        columns = [
            random_form([row[n] for row in rows], declared, self.rng)
            for n, declared in enumerate((t.STRING, *types))
        ]
        expected = self.twin.each(one, rows)
        got = getattr(self.twin.many_state, many)(*columns)
        if got is not None:
            result = to_arrow(expected, t.BOOL if many == "exists_many" else self.result_type())
            assert repr(got.to_pylist()) == repr(result.to_pylist())
            assert got.type == result.type
        self.twin.check_equal()

    def result_type(self) -> t.Type:
        descriptor: Any = self.twin.descriptor
        if descriptor.kind == "list":
            return t.LIST(descriptor.element_type)
        if descriptor.kind == "map":
            return descriptor.value_type  # type: ignore[no-any-return]
        return descriptor.result_type if descriptor.kind == "aggregating" else descriptor.type

    def step(self) -> None:
        kind, rng = self.twin.descriptor.kind, self.rng
        choice = rng.randrange(6)
        if choice == 0:
            self.call("exists_many", "exists", self.rows())
        elif choice == 1:
            self.call("clear_many", "clear", self.rows()[:3])
        elif kind == "value":
            if choice == 2:
                self.call("get_many", "value", self.rows())
            else:
                self.call("update_many", "update", self.rows(self.nullable), self.value_type)
        elif kind == "list":
            if choice == 2:
                self.call("get_many", "get", self.rows())
            else:
                self.call("add_many", "add", self.rows(self.value), self.value_type)
        elif kind == "map":
            if choice == 2:
                self.call("get_many", "get", self.rows(self.map_key), t.INT)
            elif choice == 3:
                self.call("remove_many", "remove", self.rows(self.map_key), t.INT)
            else:
                self.call("put_many", "put", self.rows(self.map_key, self.nullable), t.INT, self.value_type)
        elif choice == 2:
            self.call("get_many", "get", self.rows())
        else:
            self.add()

    def add(self) -> None:
        rows = self.rows(self.nullable)
        try:
            marks = [keyed.mark() for keyed in (self.twin.one, self.twin.many)]
            self.twin.each("add", rows)
        except OverflowError:
            self.twin.one.rollback(marks[0])
            with pytest.raises(OverflowError):
                self.twin.many_state.add_many([row[0] for row in rows], [row[1] for row in rows])
            rows = []
        columns = [
            random_form([row[n] for row in rows], declared, self.rng)
            for n, declared in enumerate((t.STRING, self.value_type))
        ]
        keys, results = self.twin.many_state.add_many(*columns, return_changed=True)
        distinct = list(dict.fromkeys(row[0] for row in rows))
        assert keys.to_pylist() == distinct
        expected = to_arrow(self.twin.each("get", [(key,) for key in distinct]), self.result_type())
        assert repr(results.to_pylist()) == repr(expected.to_pylist())
        for keyed, mark in zip((self.twin.one, self.twin.many), marks, strict=True):
            keyed.release(mark)
        self.twin.check_equal()

    def run(self, steps: int, clock: ManualClock | None = None) -> None:
        both = (self.twin.one, self.twin.many)
        marks: list[list[Any]] = []
        for _ in range(steps):
            if clock is not None:
                clock.advance(self.rng.choice([0, 3, 20]))
            event = self.rng.random()
            if event < 0.15:
                marks.append([keyed.mark() for keyed in both])
            elif event < 0.3 and marks:
                pair = marks.pop()
                for keyed, mark in zip(both, pair, strict=True):
                    keyed.rollback(mark)
                    keyed.release(mark)
                self.twin.check_equal()
            elif event < 0.5:
                namespace = self.rng.choice([VOID, 1, "n", TimeWindow(0, 5)])
                for keyed in both:
                    keyed.set_current_namespace(namespace)
            self.step()


def descriptors_of(declared: t.Type) -> list[StateDescriptor]:
    found: list[StateDescriptor] = [
        ValueStateDescriptor("s", declared),
        ValueStateDescriptor("s", declared, default=LAYOUTS[declared][0]),
        ListStateDescriptor("s", declared),
        MapStateDescriptor("s", t.INT, declared),
        ReducingStateDescriptor("s", "first", declared),
        ReducingStateDescriptor("s", "last", declared),
        ReducingStateDescriptor("s", lambda old, new: new, declared),
        AggregatingStateDescriptor("s", "count", declared),
    ]
    numbers = declared in (t.LONG, t.BYTE, t.DOUBLE, t.FLOAT) or declared.name == "DECIMAL"
    if declared.name != "LIST":
        found += [ReducingStateDescriptor("s", name, declared) for name in ("min", "max")]
        found.append(AggregatingStateDescriptor("s", "max", declared))
    if numbers:
        found.append(ReducingStateDescriptor("s", "sum", declared))
        found += [
            AggregatingStateDescriptor("s", name, declared) for name in ("sum", "avg", "variance", "stddev")
        ]
    if declared == t.BOOL:
        found += [ReducingStateDescriptor("s", name, declared) for name in ("any", "all")]
    return found


CASES = [(declared, descriptor) for declared in LAYOUTS for descriptor in descriptors_of(declared)]


def name_of(case: Any) -> str:
    if isinstance(case, StateDescriptor):
        function = getattr(case, "_function_name", lambda: "")()
        return f"{case.kind}-{function}" if function else case.kind
    return repr(case)


@pytest.mark.sampled(240)
@pytest.mark.parametrize(("declared", "descriptor"), CASES, ids=name_of)
def test_calls_one_after_the_other(
    make_keyed: MakeKeyed, declared: t.Type, descriptor: StateDescriptor, rng: random.Random
) -> None:
    Sequences(make_keyed, descriptor, declared, rng).run(25)


TIMED = [
    ValueStateDescriptor("s", t.LONG, default=5),
    ValueStateDescriptor("s", t.STRING),
    ListStateDescriptor("s", t.LONG),
    MapStateDescriptor("s", t.INT, t.STRING),
    MapStateDescriptor("s", t.INT, t.LONG),
    ReducingStateDescriptor("s", "sum", t.LONG),
    ReducingStateDescriptor("s", "min", t.STRING),
    ReducingStateDescriptor("s", lambda old, new: old - new, t.LONG),
    AggregatingStateDescriptor("s", "avg", t.LONG),
    AggregatingStateDescriptor("s", "count", t.STRING),
]


@pytest.mark.parametrize("visibility", Visibility, ids=lambda each: each.name)
@pytest.mark.parametrize(
    "update", [Update.OnCreateAndWrite, Update.OnReadAndWrite], ids=lambda each: each.name
)
@pytest.mark.parametrize("descriptor", TIMED, ids=name_of)
def test_calls_with_a_time_to_live(
    make_keyed: MakeKeyed,
    clock: ManualClock,
    descriptor: Any,
    update: Update,
    visibility: Visibility,
    rng: random.Random,
) -> None:
    # What is shown until it is cleaned up must not depend on when that is.
    shows = visibility is StateTtlConfig.StateVisibility.ReturnExpiredIfNotCleanedUp
    config = StateTtlConfig(
        40, update_type=update, state_visibility=visibility, cleanup_in_background=not shows
    )
    declared = next(
        getattr(descriptor, name)
        for name in ("element_type", "value_type", "type")
        if hasattr(descriptor, name)
    )
    timed = type(descriptor)(*_arguments(descriptor)).enable_time_to_live(config)
    Sequences(make_keyed, timed, declared, rng).run(40, clock)


def _arguments(descriptor: Any) -> tuple[Any, ...]:
    if descriptor.kind == "list":
        return descriptor.name, descriptor.element_type
    if descriptor.kind == "map":
        return descriptor.name, descriptor.key_type, descriptor.value_type
    if descriptor.kind == "value":
        return descriptor.name, descriptor.type, descriptor.default_copy()
    function = descriptor.reduce if descriptor.kind == "reducing" else descriptor.aggregate
    return descriptor.name, getattr(function, "name", function), descriptor.type


def test_large_batches(make_keyed: MakeKeyed, rng: random.Random) -> None:
    """So many rows that a backend may sort them, and divide them among threads."""
    twin = Twin(make_keyed, t.LONG, ReducingStateDescriptor("s", "sum", int))
    rows: Rows = [(rng.randrange(-900, 900), rng.randrange(100)) for _ in range(9_000)]
    twin.each("add", rows)
    keys, sums = twin.many_state.add_many(*np.array(rows).T, return_changed=True)
    assert keys.to_pylist() == list(dict.fromkeys(row[0] for row in rows))
    assert sums.to_pylist() == twin.each("get", [(key,) for key in keys.to_pylist()])
    twin.check_equal()
    mapped = Twin(make_keyed, t.STRING, MapStateDescriptor("s", str, int))
    rows = [(f"{key % 50}", f"{value % 9}", value) for key, value in rows]
    mapped.each("put", rows)
    mapped.many_state.put_many(*[pa.array(column) for column in zip(*rows, strict=True)])
    mapped.check_equal()


@pytest.mark.parametrize("form", ["arrow", "list"])
def test_errors_name_the_state_and_the_position(keyed: KeyedStateBackend, form: str) -> None:
    columns: Any = pa.array if form == "arrow" else list
    value = keyed.get_value_state(ValueStateDescriptor("v", str))
    maps = keyed.get_map_state(MapStateDescriptor("m", str, int))
    for call in (
        lambda: value.update_many([1, 2], columns([1, 2])),
        lambda: maps.put_many([1, 2], ["a", "b"], columns(["x", "y"])),
        lambda: maps.get_many([1, 2], columns([1, 2])),
    ):
        with pytest.raises(SerializationError, match=r"state '[vm]'.*position 0"):
            call()
    with pytest.raises(OverflowError, match="position 1"):
        keyed.get_value_state(ValueStateDescriptor("b", "tinyint")).update_many([1, 2], columns([1, 300]))
    assert keyed.num_entries() == 0


def test_a_closed_backend_refuses(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    states: list[Any] = [
        keyed.get_value_state(ValueStateDescriptor("v", str)),
        keyed.get_reducing_state(ReducingStateDescriptor("r", "sum", int)),
        keyed.get_list_state(ListStateDescriptor("l", int)),
    ]
    keyed.close()
    for state in states:
        with pytest.raises(StateBackendError, match="closed"):
            state.get_many([1])
        with pytest.raises(StateBackendError, match="closed"):
            state.clear_many([1])


def test_dumps_see_other_namespaces(make_keyed: MakeKeyed) -> None:
    """What the comparisons of this module rest on."""
    keyed = make_keyed()
    descriptor = ValueStateDescriptor("s", int)
    state = keyed.get_value_state(descriptor)
    keyed.set_current_namespace("n")
    state.update_many([1], [2])
    assert len(dump(keyed, descriptor)) == 1
    assert state.get_many([1]).to_pylist() == [2]
    keyed.set_current_namespace(VOID)
    assert state.get_many([1]).to_pylist() == [None]
