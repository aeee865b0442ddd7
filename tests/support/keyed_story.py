"""Random histories of a keyed backend, and what it holds at a moment."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import statebackend as sb
from statebackend import types

DESCRIPTORS: dict[str, Callable[[], Any]] = {
    "count": lambda: sb.ValueStateDescriptor("count", int),
    "pair": lambda: sb.ValueStateDescriptor("pair", "struct<a:int,b:double>"),
    "name": lambda: sb.ValueStateDescriptor("name", str),
    "thing": lambda: sb.ValueStateDescriptor("thing", types.PICKLE),
    "tags": lambda: sb.ListStateDescriptor("tags", str),
    "numbers": lambda: sb.ListStateDescriptor("numbers", "int"),
    "things": lambda: sb.ListStateDescriptor("things", types.PICKLE),
    "seen": lambda: sb.MapStateDescriptor("seen", str, float),
    "deep": lambda: sb.MapStateDescriptor("deep", "int", "array<string>"),
    "objects": lambda: sb.MapStateDescriptor("objects", int, types.PICKLE),
    "total": lambda: sb.ReducingStateDescriptor("total", "sum", int),
    "mean": lambda: sb.AggregatingStateDescriptor("mean", "avg", float),
    "joined": lambda: sb.FoldingStateDescriptor("joined", "", lambda text, n: text + str(n), str),
}
NAMESPACES = [sb.VOID, sb.VOID, sb.VOID, sb.TimeWindow(0, 10), "a namespace", 7]


def key_of(key_type: Any, number: int) -> Any:
    """The key with a number."""
    if key_type is str:
        return f"key {number}"
    if key_type is int:
        return number * 1_000_003 - 50
    return (number % 7, f"k{number}")  # composite


class Story:
    """Changes a backend at random: all kinds of state, or some of them."""

    def __init__(
        self,
        keyed: Any,
        rng: random.Random,
        key_type: Any,
        *,
        names: Any = None,
        keys: int = 40,
        descriptors: dict[str, Callable[[], Any]] = DESCRIPTORS,
    ) -> None:
        self.keyed = keyed
        self.rng = rng
        self.keys = [key_of(key_type, number) for number in range(keys)]
        self.states = {name: keyed.get_state(descriptors[name]()) for name in names or descriptors}

    def change(self, steps: int) -> None:
        """So many changes."""
        for _ in range(steps):
            self.keyed.set_current_key(self.rng.choice(self.keys))
            self.keyed.set_current_namespace(self.rng.choice(NAMESPACES))
            if self.rng.random() < 0.1:
                self._change_timers()
                continue
            name = self.rng.choice(list(self.states))
            self._change_one(name, self.states[name])

    def _change_timers(self) -> None:
        timers, domain = self.keyed.timers, self.rng.choice(["event", "processing"])
        at = self.rng.randrange(10_000)
        getattr(timers, f"register_{domain}_time_timer")(at)
        if self.rng.random() < 0.3:
            pending = getattr(timers, f"pending_{domain}_time_timers")()
            getattr(timers, f"delete_{domain}_time_timer")(self.rng.choice(pending))
        elif self.rng.random() < 0.05:
            list(timers.due(at, domain))

    def _change_one(self, name: str, state: Any) -> None:
        rng, kind = self.rng, state.descriptor.kind
        if rng.random() < 0.12:
            state.clear()
        elif kind == "value":
            state.update(self._value(name))
        elif kind == "list":
            rng.choice([state.update, state.add_all])([self._value(name) for _ in range(rng.randrange(4))])
        elif kind == "map":
            map_key = f"m{rng.randrange(6)}" if name == "seen" else rng.randrange(6)
            if rng.random() < 0.3:
                state.remove(map_key)
            else:
                state.put(map_key, None if rng.random() < 0.1 else self._value(name))
        else:
            state.add(rng.randrange(100) if name != "mean" else rng.random())

    def _value(self, name: str) -> Any:
        number = self.rng.randrange(1000)
        if name == "pair":
            return (number, None if number % 5 == 0 else number / 3)
        if name in ("thing", "things", "objects"):
            return {"n": number, "more": [number] * (number % 3)}
        if name == "deep":
            return [str(number)] * (number % 3)
        if name == "seen":
            return number / 7
        return number if name in ("count", "numbers") else "é" * (number % 20)


class Entries(list[Any]):
    """The entries of a map. Two with an order compare in it; one without compares with any in the same order."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, entries: Any, has_order: bool) -> None:
        super().__init__(entries)
        self.has_order = has_order

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list):
            return NotImplemented
        if self.has_order and getattr(other, "has_order", True):
            return list(self) == list(other)
        return sorted(self, key=repr) == sorted(other, key=repr)

    def __ne__(self, other: object) -> bool:
        return not self == other


def contents(
    keyed: Any, names: Any = None, descriptors: dict[str, Callable[[], Any]] = DESCRIPTORS
) -> list[Any]:
    """Everything that some states hold, as a list that compares; asks for the states if nobody has."""
    found = []
    for name in names or descriptors:
        state = keyed.get_state(descriptors[name]())
        for key, namespace in sorted(keyed.keys_and_namespaces(name), key=repr):
            keyed.set_current_key(key)
            keyed.set_current_namespace(namespace)
            kind = state.descriptor.kind
            if kind == "map":
                held: Any = Entries(state.items(), type(keyed).__name__ != "RocksDbKeyedBackend")
            else:
                held = state.value() if kind == "value" else state.get()
            found.append((name, key, repr(namespace), held))
    found += sorted(
        (*row[:1], row.key_group, row.key, row.namespace, row.timestamp) for row in keyed.timers.rows()
    )
    return found
