"""Values of every type, and ways to treat states of all kinds alike."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from typing import Any, NamedTuple

import statebackend as sb
from statebackend import types as t
from statebackend.state import StateDescriptor

_UTC = datetime.timezone.utc
_NAN = float("nan")

#: Three or more different values of each type that can be a key.
KEYS: dict[t.Type, list[Any]] = {
    t.LONG: [0, -1, 2**63 - 1, -(2**63)],
    t.INT: [0, -1, 2**31 - 1],
    t.SHORT: [0, -1, 2**15 - 1],
    t.BYTE: [0, -1, 127],
    t.DOUBLE: [0.0, -1.5, float("inf"), _NAN],
    t.FLOAT: [0.0, -1.5, float("inf"), _NAN],
    t.BOOL: [False, True],
    t.STRING: ["", "a", "\x00", "日本", "é" * 100],
    t.BYTES: [b"", b"\x00", b"\xff\x80", b"x" * 300],
    t.DATE: [datetime.date(1970, 1, 1), datetime.date(1, 1, 1), datetime.date(9999, 12, 31)],
    t.TIMESTAMP: [datetime.datetime(1970, 1, 1, tzinfo=_UTC), datetime.datetime(2024, 2, 29, 1, tzinfo=_UTC)],
    t.TIMESTAMP_NTZ: [datetime.datetime(1970, 1, 1), datetime.datetime(2024, 2, 29, 1, 2, 3, 4)],
    t.DECIMAL(10, 2): [decimal.Decimal("0.00"), decimal.Decimal("-1.50"), decimal.Decimal("99999999.99")],
    t.DECIMAL(4, 1): [decimal.Decimal("1.0"), decimal.Decimal("-999.9")],
    t.DECIMAL(38, 3): [decimal.Decimal("0.000"), decimal.Decimal(f"-{10**37}E-3")],
    t.TUPLE(t.LONG, t.STRING): [(1, "a"), (1, None), (None, None)],
    t.ROW(a=t.DOUBLE, b=t.TUPLE(t.BYTES, t.BOOL)): [(1.0, (b"a", True)), (None, None), (2.0, (None, None))],
}


class Longest(sb.AggregateFunction):
    """The longest text of all, by its length and itself."""

    result_type = "struct<length:int,text:string>"

    def create_accumulator(self) -> Any:
        return ""

    def add(self, value: Any, accumulator: Any) -> Any:
        return max(accumulator, value, key=len)

    def get_result(self, accumulator: Any) -> Any:
        return (len(accumulator), accumulator)

    def merge(self, a: Any, b: Any) -> Any:
        return max(a, b, key=len)


def last_of(_: Any, new: Any) -> Any:
    return new


def join(old: Any, new: Any) -> Any:
    return f"{old}{new}"


class Kind(NamedTuple):
    """How a state of one kind is made over a type, written once, and read."""

    name: str
    descriptor: Callable[[str, t.Type], StateDescriptor]
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]
    #: What reading gives where nothing is.
    nothing: Any = None


#: What folding starts from.
EMPTY: dict[t.Type, Any] = {t.LONG: 0, t.INT: 0, t.STRING: "", t.LIST(t.STRING): []}

KINDS = (
    Kind("value", sb.ValueStateDescriptor, lambda s, v: s.update(v), lambda s: s.value()),
    Kind("list", sb.ListStateDescriptor, lambda s, v: s.add(v), lambda s: (s.get() or [None])[-1]),
    Kind(
        "map",
        lambda name, declared: sb.MapStateDescriptor(name, t.STRING, declared),
        lambda s, v: s.put("k", v),
        lambda s: s.get("k"),
    ),
    Kind(
        "reducing",
        lambda name, declared: sb.ReducingStateDescriptor(name, last_of, declared),
        lambda s, v: s.add(v),
        lambda s: s.get(),
    ),
    Kind(
        "aggregating",
        lambda name, declared: sb.AggregatingStateDescriptor(name, LastAdded(), declared, declared),
        lambda s, v: s.add(v),
        lambda s: s.get(),
    ),
    Kind(
        "folding",
        lambda name, declared: sb.FoldingStateDescriptor(name, EMPTY[declared], last_of, declared),
        lambda s, v: s.add(v),
        lambda s: s.get(),
    ),
)


class LastAdded(sb.AggregateFunction):
    """The value added last, and none before."""

    def create_accumulator(self) -> Any:
        return None

    def add(self, value: Any, accumulator: Any) -> Any:
        return value

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, a: Any, b: Any) -> Any:
        return b


def dump(
    keyed: sb.KeyedStateBackend, descriptor: StateDescriptor, *, sorts_maps: bool = False
) -> dict[Any, Any]:
    """Everything that a state holds, by key and namespace, in a form that compares."""
    found = {}

    def note(key: Any, state: Any) -> None:
        held = contents(state)
        if sorts_maps and descriptor.kind == "map":
            held.sort(key=repr)
        found[repr(key), repr(keyed.current_namespace)] = repr(held)

    from statebackend.keys import ALL_NAMESPACES

    keyed.apply_to_all_keys(descriptor, note, ALL_NAMESPACES)
    return found


def contents(state: Any) -> Any:
    """What a state holds for the current key and namespace."""
    kind = state.descriptor.kind
    if kind == "value":
        return state.value()
    if kind == "map":
        return list(state.items())
    return state.get()
