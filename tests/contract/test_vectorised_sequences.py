"""Calls with whole columns do what a loop over their rows does: in any layout, with namespaces, times and marks."""

from __future__ import annotations

import copy
import datetime
import decimal
import random
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed
from contract.samples import Longest, dump, join, last_of

import statebackend as sb
from statebackend import types as t
from statebackend.state import StateDescriptor
from statebackend.state.value_columns import to_arrow
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

Time = sb.StateTtlConfig.TtlTimeCharacteristic
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
    t.PICKLE: [{"a": (1, 2)}, [1, [2]], "text"],
}
KEYS: dict[t.Type, list[Any]] = {
    t.LONG: [0, -1, 5, 2**50],
    t.INT: [1, 2, 3, 4],
    t.STRING: [*(f"key {n}" for n in range(6)), ""],
}
WINDOWS: list[Any] = [sb.TimeWindow(start, start + 60) for start in (0, 60, 120)]
#: Sets of namespaces that rows of one call are in.
SPACES: list[list[Any]] = [
    [sb.VOID, 7, "text", b"bytes", WINDOWS[0], sb.TimeWindow(0, 120), ("session", 7)],
    WINDOWS,
    [sb.VOID, *WINDOWS],
    [7, 8, -9],
    [sb.VOID],
    [WINDOWS[1]],
]


def window_column(windows: list[Any]) -> pa.Array:
    shown = [None if each is sb.VOID else {"start": each.start, "end": each.end} for each in windows]
    return pa.array(shown, pa.struct([("start", pa.int64()), ("end", pa.int64())]))


def space_column(spaces: list[Any], rng: random.Random) -> Any:
    """A column of namespaces in one of the forms that it may have."""
    if all(isinstance(each, sb.TimeWindow) or each is sb.VOID for each in spaces) and rng.random() < 0.7:
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
        sb.VOID if each is None else sb.TimeWindow(**each) if isinstance(each, dict) else each
        for each in namespaces.to_pylist()
    ]


def time_column(times: list[Any], rng: random.Random) -> Any:
    """The same of times."""
    if rng.random() < 0.5:
        column = pa.array(times, pa.int64())
        return (
            column if rng.random() < 0.5 else column.cast(pa.timestamp("ms")).cast(pa.timestamp("us", "UTC"))
        )
    return np.array(times) if times and None not in times else times


def value_column(values: list[Any], declared: t.Type, rng: random.Random) -> Any:
    """The same of keys, map keys or values."""
    form = rng.randrange(5)
    if form == 0 or not values or declared == t.PICKLE:
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


class Rows(NamedTuple):
    rows: list[tuple[Any, ...]]
    types: list[t.Type]
    #: None: all in the current namespace.
    spaces: list[Any] | None
    #: None: all at the time of the batch.
    times: list[Any] | None


class Drive:
    """Two backends with the same state: one is called row by row, the other with whole columns."""

    def __init__(
        self,
        make_keyed: MakeKeyed,
        key_type: t.Type,
        descriptor: Any,
        value_type: t.Type,
        rng: random.Random,
        *,
        in_spaces: bool = False,
        at_times: bool = False,
    ) -> None:
        self.descriptor, self.key_type, self.value_type, self.rng = descriptor, key_type, value_type, rng
        self.in_spaces, self.at_times = in_spaces, at_times
        self.one, self.many = self.both = (make_keyed(key_type), make_keyed(key_type))
        self.before: int | None = None
        self.after = 1000
        if at_times:
            self.begin(None, self.after)
        self.one_state: Any = self.one.get_state(descriptor)
        self.many_state: Any = self.many.get_state(descriptor)
        self.namespace: Any = sb.VOID
        self.key = KEYS[key_type][0]
        for keyed in self.both:
            keyed.set_current_key(self.key)

    def begin(self, before: int | None, after: int) -> None:
        self.before, self.after = before, after
        for keyed in self.both:
            keyed.begin(watermarks=(before, after))

    # --- calls ---

    def rows(self, *, map_keys: bool = True, values: bool = False) -> Rows:
        count = self.rng.choice([0, 1, 4, 30])
        types = [self.key_type]
        columns = [self.rng.choices(KEYS[self.key_type], k=count)]
        if self.descriptor.kind == "map" and map_keys:
            types.append(self.descriptor.key_type)
            columns.append(self.rng.choices(KEYS[types[-1]][-4:], k=count))
        if values:
            types.append(self.value_type)
            columns.append(self.rng.choices(LAYOUTS[self.value_type], k=count))
            if self.descriptor.kind != "list":
                columns[-1] = [None if self.rng.random() < 0.2 else each for each in columns[-1]]
        spaces = self.rng.choices(self.rng.choice(SPACES), k=count) if self.in_spaces else None
        times = [self.time() for _ in range(count)] if self.at_times else None
        if times and self.rng.random() < 0.2:
            times = times[:1] * count
        return Rows(list(zip(*columns, strict=True)), types, spaces, times)

    def time(self) -> int | None:
        low = 0 if self.before is None else self.before
        return (
            None if self.rng.random() < 0.1 else self.rng.randint(max(low, self.after - 400), self.after + 50)
        )

    def loop(self, method: str, given: Rows) -> list[Any]:
        results = []
        for number, (key, *arguments) in enumerate(given.rows):
            if given.times is not None:
                time = given.times[number]
                self.one.set_event_time(self.after if time is None else time)
            if given.spaces is not None:
                self.one.set_current_namespace(given.spaces[number])
            self.one.set_current_key(key)
            results.append(getattr(self.one_state, method)(*arguments))
        self.one.set_current_namespace(self.namespace)
        if self.at_times:
            self.one.set_event_time(self.after)
        return results

    def columns(self, method: str, given: Rows, **options: Any) -> Any:
        columns = [
            value_column([row[number] for row in given.rows], declared, self.rng)
            for number, declared in enumerate(given.types)
        ]
        if given.spaces is not None:
            options["namespaces"] = space_column(given.spaces, self.rng)
        if given.times is not None:
            options["times"] = time_column(given.times, self.rng)
        return getattr(self.many_state, f"{method}_many")(*columns, **options)

    def compare(self, many: str, one: str, given: Rows) -> None:
        expected = self.loop(one, given)
        got = self.columns(many, given)
        if got is not None:
            result = to_arrow(expected, t.BOOL if many == "exists" else self.result_type())
            assert repr(got.to_pylist()) == repr(result.to_pylist())
            assert got.type == result.type
        self.check()

    def result_type(self) -> Any:
        if self.descriptor.kind == "list":
            return t.LIST(self.descriptor.element_type)
        if self.descriptor.kind == "map":
            return self.descriptor.value_type
        return self.descriptor.result_type if self.descriptor.kind == "aggregating" else self.descriptor.type

    def changed(self) -> None:
        """The keys that a call has changed: each once, by key group and first row, with its result at the end."""
        given = self.rows(values=True)
        mark = self.one.mark()
        try:
            self.loop("add", given)
        except OverflowError:
            self.one.rollback(mark)
            self.one.set_current_namespace(self.namespace)
            with pytest.raises(OverflowError):
                self.columns("add", given)
            nothing: list[Any] = []
            given = Rows(nothing, given.types, given.spaces and nothing, given.times and nothing)
        self.one.release(mark)
        keys, results, namespaces = self.columns("add", given, return_changed=True)
        spaces = given.spaces or [sb.VOID] * len(given.rows)
        last = {
            (key, space): number
            for number, ((key, *_), space) in enumerate(zip(given.rows, spaces, strict=True))
        }
        encoder = sb.keys.key_encoder(self.key_type)
        touched = sorted(last, key=lambda at: encoder.spark_hash(encoder.encode(at[0])) % 128)
        assert keys.to_pylist() == [key for key, _ in touched]
        if self.in_spaces:
            assert shown(namespaces) == [space for _, space in touched]
        times = given.times and [given.times[last[at]] for at in touched]
        asked = Rows([(key,) for key, _ in touched], [], given.spaces and [at for _, at in touched], times)
        expected = to_arrow(self.loop("get", asked), self.result_type())
        assert repr(results.to_pylist()) == repr(expected.to_pylist())
        self.check()

    def check(self) -> None:
        """What the states hold, seen without a change; a call with columns leaves the current key and namespace."""
        assert (self.many.current_key, self.many.current_namespace) == (self.key, self.namespace)
        seen = []
        for keyed in self.both:
            mark = keyed.mark()
            seen.append(dump(keyed, self.descriptor))
            keyed.rollback(mark)
            keyed.release(mark)
        assert seen[0] == seen[1]

    # --- programmes ---

    def step(self) -> None:
        kind = self.descriptor.kind
        write, read = {"value": ("update", "value"), "map": ("put", "get")}.get(kind, ("add", "get"))
        choice = self.rng.randrange(6)
        if choice == 0:
            self.compare("exists", "exists", self.rows(map_keys=False))
        elif choice == 1:
            self.compare("clear", "clear", self.rows(map_keys=False))
        elif choice == 2:
            self.compare("get", read, self.rows())
        elif choice == 3 and kind == "map":
            self.compare("remove", "remove", self.rows())
        elif kind in ("reducing", "aggregating", "folding"):
            self.changed()
        else:
            self.compare(write, write, self.rows(values=True))

    def run(self, steps: int, clock: ManualClock) -> None:
        marks: list[list[Any]] = []
        for _ in range(steps):
            clock.advance(self.rng.choice([0, 3, 20]))
            event = self.rng.random()
            if event < 0.15:
                marks.append([keyed.mark() for keyed in self.both])
            elif event < 0.3 and marks:
                back = self.rng.random() < 0.7
                for keyed, mark in zip(self.both, marks.pop(), strict=True):
                    keyed.rollback(mark) if back else None
                    keyed.release(mark)
                self.check()
            elif event < 0.5:
                self.namespace = self.rng.choice(SPACES[0])
                for keyed in self.both:
                    keyed.set_current_namespace(self.namespace)
            elif event < 0.8 and self.at_times:
                for keyed in self.both:
                    keyed.begin(watermarks=(self.after, self.after))
                    keyed.advance()
                self.begin(self.after, self.after + self.rng.choice([0, 5, 40, 300]))
            self.step()


def descriptors_of(declared: t.Type) -> list[StateDescriptor]:
    found: list[StateDescriptor] = [
        sb.ValueStateDescriptor("s", declared),
        sb.ListStateDescriptor("s", declared),
        sb.MapStateDescriptor("s", t.INT, declared),
    ]
    if declared == t.PICKLE:
        return found
    found += [
        sb.ValueStateDescriptor("s", declared, default=LAYOUTS[declared][0]),
        sb.ReducingStateDescriptor("s", "first", declared),
        sb.ReducingStateDescriptor("s", "last", declared),
        sb.ReducingStateDescriptor("s", last_of, declared),
        sb.AggregatingStateDescriptor("s", "count", declared),
    ]
    if declared.name != "LIST":
        found += [sb.ReducingStateDescriptor("s", name, declared) for name in ("min", "max")]
        found.append(sb.AggregatingStateDescriptor("s", "max", declared))
    if declared in (t.LONG, t.BYTE, t.DOUBLE, t.FLOAT) or declared.name == "DECIMAL":
        found.append(sb.ReducingStateDescriptor("s", "sum", declared))
        found += [
            sb.AggregatingStateDescriptor("s", name, declared)
            for name in ("sum", "avg", "variance", "stddev")
        ]
    if declared == t.BOOL:
        found += [sb.ReducingStateDescriptor("s", name, declared) for name in ("any", "all")]
    if declared == t.LONG:
        found.append(sb.ReducingStateDescriptor("s", lambda old, new: old - new, declared))
    if declared == t.STRING:
        found += [
            sb.MapStateDescriptor("s", t.STRING, declared),
            sb.ReducingStateDescriptor("s", join, declared),
            sb.AggregatingStateDescriptor("s", Longest(), declared, declared),
            sb.FoldingStateDescriptor("s", "", join, declared),
        ]
    return found


CASES = [(declared, descriptor) for declared in LAYOUTS for descriptor in descriptors_of(declared)]


def name_of(case: Any) -> str:
    if isinstance(case, StateDescriptor):
        function = getattr(case, "_function_name", lambda: "")()
        return f"{case.kind}-{function}" if function else case.kind
    return repr(case)


@pytest.mark.sampled(100)
@pytest.mark.parametrize(("declared", "descriptor"), CASES, ids=name_of)
def test_calls_with_columns_do_what_a_loop_does(
    make_keyed: MakeKeyed, clock: ManualClock, declared: t.Type, descriptor: Any, rng: random.Random
) -> None:
    def drive(expiring: sb.StateTtlConfig | None, **options: bool) -> None:
        made = descriptor if expiring is None else copy.copy(descriptor).enable_time_to_live(expiring)
        Drive(make_keyed, rng.choice([t.LONG, t.STRING]), made, declared, rng, **options).run(15, clock)

    def config(ttl: int, time: Time) -> sb.StateTtlConfig:
        # What is shown until it is cleaned up must not depend on when that is.
        visibility = rng.choice(list(sb.StateTtlConfig.StateVisibility))
        cleans_up = visibility is sb.StateTtlConfig.StateVisibility.NeverReturnExpired
        update = rng.choice(list(sb.StateTtlConfig.UpdateType)[1:])
        return sb.StateTtlConfig(
            ttl,
            update_type=update,
            state_visibility=visibility,
            ttl_time_characteristic=time,
            cleanup_in_background=cleans_up,
        )

    drive(None)
    drive(None, in_spaces=True)
    drive(config(40, Time.ProcessingTime))
    drive(config(100, Time.EventTime), at_times=True, in_spaces=rng.random() < 0.7)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("spaces", ["one", "windows", "void too"])
@pytest.mark.parametrize("at_times", [False, True], ids=["", "times"])
@pytest.mark.parametrize("key_type", [t.LONG, t.STRING], ids=repr)
def test_large_batches(
    make_keyed: MakeKeyed,
    backend: sb.StateBackend,
    key_type: t.Type,
    at_times: bool,
    spaces: str,
    rng: random.Random,
) -> None:
    """So many rows that a backend may sort them, and divide them among threads; the reference does neither."""
    n = 900 if backend.name == "reference" else 9_000
    windows: list[Any] = [
        *([sb.VOID] if spaces == "void too" else []),
        *(sb.TimeWindow(n, n + 5) for n in range(40)),
    ]
    keys = [n if key_type == t.LONG else f"{n}" for n in range(-300, 300)]
    update = sb.StateTtlConfig.UpdateType.OnReadAndWrite
    ttl = sb.StateTtlConfig(100, update_type=update, ttl_time_characteristic=Time.EventTime)
    drives = []
    for declared, descriptor in (
        (t.LONG, sb.ReducingStateDescriptor("s", "sum", int)),
        (t.STRING, sb.ValueStateDescriptor("s", str)),
        (t.LONG, sb.MapStateDescriptor("s", t.STRING, t.LONG)),
    ):
        made = descriptor.enable_time_to_live(ttl) if at_times else descriptor
        options = {"in_spaces": spaces != "one", "at_times": at_times}
        drives.append(Drive(make_keyed, key_type, made, declared, rng, **options))
    sums, texts, maps = drives
    for _ in range(2):
        given = Rows(
            [(rng.choice(keys), rng.randrange(100)) for _ in range(n)],
            [key_type, t.LONG],
            rng.choices(windows, k=n) if spaces != "one" else None,
            [rng.randrange(600, 1100) for _ in range(n)] if at_times else None,
        )
        sums.rows = lambda given=given, **_: given  # type: ignore[method-assign]
        sums.changed()
        written = [(key, None if number == 0 else f"text {number}") for key, number in given.rows]
        texts.compare("update", "update", given._replace(rows=written, types=[key_type, t.STRING]))
        put = [(key, f"{number % 9}", number) for key, number in given.rows]
        maps.compare("put", "put", given._replace(rows=put, types=[key_type, t.STRING, t.LONG]))
    asked = given._replace(
        rows=[row[:1] for row in given.rows], types=[key_type], times=given.times and given.times[::-1]
    )
    sums.compare("get", "get", asked)
    texts.compare("get", "value", asked)
    cleared = Rows(
        asked.rows[: n // 2],
        asked.types,
        given.spaces and given.spaces[: n // 2],
        given.times and given.times[: n // 2],
    )
    texts.compare("clear", "clear", cleared)
