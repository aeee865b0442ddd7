"""What is measured, said once for all contenders: the input of each round and what has to come out.

The operations and their rounds are those of ``bench.flink``: the same keys in the same orders with the same
values, so that all contenders end with the same state. `contents` is the checksum that each of them computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from bench.flink.keys import Int64Array, checksum

#: Map keys 0 to 3 under every key.
MAP_ENTRIES = 4
LIST_ELEMENTS = 2


#: Keys filled or read at a time outside the clock: Python objects of all keys at once would take gigabytes.
PART = 100_000


def contents(parts: Iterable[Int64Array]) -> int:
    """The checksum of a state: a row of numbers for each key, in the order in which keys were inserted.

    >>> contents([np.array([[5], [6]])]) == contents([np.array([[5]]), np.array([[6]])]) == 5 * 1 + 6 * 3
    True
    """
    rows = []
    for held in parts:
        weights = np.arange(held.shape[1], dtype=np.int64) * 2 + 1
        rows.append((held * weights).sum(axis=1, dtype=np.int64))
    return checksum(np.concatenate(rows))


def parts_of(keys: Int64Array) -> Iterator[Int64Array]:
    """The keys, `PART` at a time."""
    for at in range(0, len(keys), PART):
        yield keys[at : at + PART]


class Operation(ABC):
    """One operation on one kind of state. A round carries it out once for each key.

    ``kind`` says which state, ``starts_empty`` that each round begins with an empty backend (and `fill`),
    ``per_key`` how many operations a key counts for.
    """

    kind: ClassVar[str] = "value"
    starts_empty: ClassVar[bool] = False
    per_key: ClassVar[int] = 1

    def fill(self, keys: Int64Array) -> tuple[list[Any], ...]:
        """Columns of what is there before the first round, one row for each value put."""
        return keys.tolist(), keys.tolist()

    def columns(self, order: Int64Array, number: int) -> tuple[list[Any], ...]:
        """The input of a round: the keys in its order, and what else the loop takes. All fresh objects."""
        return (order.tolist(),)

    def returned(self, keys: Int64Array, number: int) -> int | None:
        """What the loop of a round has to return: the sum of what it read, if it reads."""
        return None

    @abstractmethod
    def held(self, keys: Int64Array, rounds: int, passes: int = 1) -> Int64Array:
        """What the state has to hold after so many rounds of so many passes: numbers for each key."""


def _column(values: Int64Array) -> Int64Array:
    return values.reshape(-1, 1)


class ValueUpdate(Operation):
    """Overwrite the value of every key."""

    def columns(self, order: Int64Array, number: int) -> tuple[list[Any], ...]:
        return order.tolist(), (order + (number + 1)).tolist()

    def held(self, keys: Int64Array, rounds: int, passes: int = 1) -> Int64Array:
        return _column(keys + rounds)


class ValueAdd(ValueUpdate):
    """Give every key its first value: the same call on an empty backend."""

    starts_empty = True

    def fill(self, keys: Int64Array) -> tuple[list[Any], ...]:
        return [], []


class ValueGet(Operation):
    """Read the value of every key."""

    def returned(self, keys: Int64Array, number: int) -> int | None:
        return int(keys.sum())

    def held(self, keys: Int64Array, rounds: int, passes: int = 1) -> Int64Array:
        return _column(keys)


class ValueReadModifyWrite(Operation):
    """Read the value of every key, add one, write it."""

    def held(self, keys: Int64Array, rounds: int, passes: int = 1) -> Int64Array:
        return _column(keys + rounds * passes)


class ReducingAdd(ValueReadModifyWrite):
    """Add one to the sum of every key."""

    kind = "reducing"


class _OnMaps(Operation):
    kind = "map"

    def fill(self, keys: Int64Array) -> tuple[list[Any], ...]:
        map_keys = np.tile(np.arange(MAP_ENTRIES), len(keys))
        repeated = np.repeat(keys, MAP_ENTRIES)
        return repeated.tolist(), map_keys.tolist(), (repeated + map_keys).tolist()

    def held(self, keys: Int64Array, rounds: int, passes: int = 1) -> Int64Array:
        map_keys = np.arange(MAP_ENTRIES, dtype=np.int64)
        held = np.empty((len(keys), 2 * MAP_ENTRIES), dtype=np.int64)
        held[:, 0::2] = map_keys
        held[:, 1::2] = _column(keys) + map_keys + self._added(rounds)
        return held

    def _added(self, rounds: int) -> Int64Array:
        """What so many rounds have added to the value of each map key."""
        return np.zeros(MAP_ENTRIES, dtype=np.int64)


class MapGet(_OnMaps):
    """Read one entry of the map of every key."""

    def columns(self, order: Int64Array, number: int) -> tuple[list[Any], ...]:
        return order.tolist(), [number % MAP_ENTRIES] * len(order)

    def returned(self, keys: Int64Array, number: int) -> int | None:
        return int(keys.sum()) + len(keys) * (number % MAP_ENTRIES)


class MapUpdate(_OnMaps):
    """Overwrite one entry of the map of every key."""

    def columns(self, order: Int64Array, number: int) -> tuple[list[Any], ...]:
        map_key = number % MAP_ENTRIES
        added = int(self._added(number + 1)[map_key])
        return order.tolist(), [map_key] * len(order), (order + (map_key + added)).tolist()

    def _added(self, rounds: int) -> Int64Array:
        return np.array([len(range(key, rounds, MAP_ENTRIES)) for key in range(MAP_ENTRIES)])


class MapIterate(_OnMaps):
    """Iterate the entries of the map of every key. An operation is one entry."""

    per_key = MAP_ENTRIES

    def returned(self, keys: Int64Array, number: int) -> int | None:
        # Each map key counts twice: once as itself and once within its value.
        return MAP_ENTRIES * int(keys.sum()) + 2 * len(keys) * sum(range(MAP_ENTRIES))


class _OnLists(Operation):
    kind = "list"

    def held(self, keys: Int64Array, rounds: int, passes: int = 1) -> Int64Array:
        return _column(keys) + np.arange(LIST_ELEMENTS, dtype=np.int64)


class ListAppend(_OnLists):
    """Append to a list that exists. Every round starts from lists with their first element."""

    starts_empty = True

    def columns(self, order: Int64Array, number: int) -> tuple[list[Any], ...]:
        return order.tolist(), (order + 1).tolist()


class ListGet(_OnLists):
    """Get the list of every key and iterate its elements. An operation is one list."""

    def fill(self, keys: Int64Array) -> tuple[list[Any], ...]:
        elements = np.tile(np.arange(LIST_ELEMENTS), len(keys))
        repeated = np.repeat(keys, LIST_ELEMENTS)
        return repeated.tolist(), (repeated + elements).tolist()

    def returned(self, keys: Int64Array, number: int) -> int | None:
        return LIST_ELEMENTS * int(keys.sum()) + len(keys) * sum(range(LIST_ELEMENTS))


#: By the names that ``bench.flink`` gives them.
OPERATIONS: dict[str, type[Operation]] = {
    "value_update": ValueUpdate,
    "value_get": ValueGet,
    "value_rmw": ValueReadModifyWrite,
    "value_add": ValueAdd,
    "reducing_add": ReducingAdd,
    "map_get": MapGet,
    "map_update": MapUpdate,
    "map_iterate": MapIterate,
    "list_append": ListAppend,
    "list_get": ListGet,
}
