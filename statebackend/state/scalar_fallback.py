"""The vectorised methods, implemented with the scalar ones: correct for every backend, fast in none.

A backend that knows better overrides the methods of the handles. These define the behaviour: they check all columns
first, then apply rows in order, at one ``now`` or each at its own time; an error undoes the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.errors import SerializationError, usage
from statebackend.keys import (
    KeyEncoder,
    canonical_batch,
    canonical_list,
    key_encoder,
    namespace_column,
    time_column,
)
from statebackend.state.value_columns import check_lengths, check_values, to_arrow, to_values
from statebackend.types import Type

if TYPE_CHECKING:
    from statebackend.state.handles import KeyedState


class CallKeys:
    """A column of keys, encoded and checked as a whole, then visited one by one."""

    def __init__(self, column: Any, encoder: KeyEncoder) -> None:
        self._encoder = encoder
        #: Their canonical forms, as a column, and one by one.
        self.encoded: Any = encoder.encode_many(column)
        self.canonical = canonical_list(self.encoded)

    def __len__(self) -> int:
        return len(self.canonical)

    def __iter__(self) -> Iterator[Any]:
        return self._encoder.decode_each(self.canonical)

    def taken(self, rows: list[int]) -> pa.Array:
        keys = [self.canonical[row] for row in rows]
        return self._encoder.decode_many(canonical_batch(keys, self._encoder.kind))


def times_of_rows(state: KeyedState, times: Any) -> NDArray[np.int64] | None:
    """The time that a state uses for each row, in milliseconds; None if they all use the call's. O(n).

    A null uses the watermark after the batch, as rows do that tell no time.
    """
    if times is None:
        return None
    config, backend = state.descriptor.ttl_config, state.backend
    if config is not None and not config.is_in_event_time:
        raise usage.no_event_time(
            "a TTL in processing time uses the clock, not the times of rows",
            detail=f"state {state.descriptor.name!r}",
            hint="leave times= out, or declare TtlTimeCharacteristic.EventTime",
        )
    own, is_null = time_column(times)
    by: Any = backend._by_watermark()  # type: ignore[attr-defined]
    if config is not None and by is None:
        raise usage.no_event_time(
            "the backend lacks event time",
            detail=f"state {state.descriptor.name!r}",
            hint="call begin(now, watermarks) first",
        )
    return np.where(is_null, 0 if by is None else by, own)


class CallRows:
    """The rows of a call: their keys, and where they tell them, namespaces and times; checked as a whole."""

    def __init__(self, state: KeyedState, keys: Any, namespaces: Any = None, times: Any = None) -> None:
        self.state = state
        self._backend: Any = state.backend
        self.keys = CallKeys(keys, key_encoder(self._backend.key_type))
        #: None: all rows are in the current namespace.
        self.namespaces = None if namespaces is None else namespace_column(namespaces)
        given = times_of_rows(state, times)
        check_lengths(self, *(each for each in (self._numbers(), given) if each is not None))
        #: The time that each row uses; None: all use the call's.
        self.times = None if given is None or state.descriptor.ttl_config is None else given.tolist()

    def __len__(self) -> int:
        return len(self.keys)

    def _numbers(self) -> NDArray[np.int64] | None:
        return None if self.namespaces is None else self.namespaces.numbers

    def namespace_of_each(self) -> list[bytes] | None:
        """The encoded namespace of each row; None if all are in the current one."""
        spaces = self.namespaces
        return None if spaces is None else [spaces.distinct[number] for number in spaces.numbers.tolist()]

    def call_each(
        self, action: Callable[..., Any], *columns: list[Any], rows: list[int] | None = None
    ) -> list[Any]:
        """Call ``action(*values of the row)`` with each row's key, namespace and time current; return the results."""
        each: list[Any] = self._backend._call_each(
            list(self.keys), self.namespace_of_each(), self.times, action, columns, rows
        )
        return each

    def touched(self) -> tuple[list[int], list[int]]:
        """The first row of each distinct key and namespace, and the last one of the same.

        They are in ascending order of key groups, and in a group in the order of the first rows.
        """
        numbers = itertools.repeat(0) if self.namespaces is None else self.namespaces.numbers.tolist()
        first: dict[Any, int] = {}
        last: dict[Any, int] = {}
        for row, each in enumerate(zip(self.keys.canonical, numbers, strict=False)):
            first.setdefault(each, row)
            last[each] = row
        touched = sorted(first, key=lambda each: self._backend._group_of(each[0]))
        return [first[each] for each in touched], [last[each] for each in touched]


def values_of(column: Any, declared: Type | None, nullable: bool, state: KeyedState) -> list[Any]:
    """The values of a column, checked as a whole; errors name the state. O(n)."""
    try:
        values = to_values(column, declared)
        check_values(values, declared, nullable)
    except SerializationError as error:
        raise error.at(f"state {state.descriptor.name!r}") from None
    return values


def each_key(
    rows: CallRows, action: Callable[..., Any], *columns: tuple[Any, Type | None, bool]
) -> list[Any]:
    """Run ``action(*values of the row)`` with each row's key current, in order; return the actions' results.

    Each column is (values, type or None, True if nulls are allowed). Atomic.
    """
    given = [values_of(column, declared, nullable, rows.state) for column, declared, nullable in columns]
    check_lengths(rows, *given)
    with rows.state.backend._vectorised_call(rows.keys.canonical):
        return rows.call_each(action, *given)


def read_many(rows: CallRows, read: Callable[[], Any], declared: Type | None) -> pa.Array:
    """The Arrow array of the result of ``read`` for each row."""
    return to_arrow(each_key(rows, read), declared)


class Changed(NamedTuple):
    """The distinct keys of an ``add_many``, by ascending key group, in a group as they first came.

    >>> from statebackend.backends import create_backend
    >>> from statebackend.state import ReducingStateDescriptor
    >>> keyed = create_backend("reference").create_keyed_backend(str)
    >>> total = keyed.get_reducing_state(ReducingStateDescriptor("total", "sum", int))
    >>> changed = total.add_many(["ann", "ann"], [1, 2], return_changed=True)
    >>> changed.keys.to_pylist(), changed.values.to_pylist(), changed.namespaces
    (['ann'], [3], None)
    """

    keys: pa.Array
    #: The final value of each key.
    values: pa.Array
    #: The namespace of each, as vectorised calls take them; None if the call gave none.
    namespaces: pa.Array | list[Any] | None


def add_many(
    rows: CallRows, values: Any, value_type: Type | None, return_changed: bool, result_type: Type | None
) -> Changed | None:
    """Call ``add`` for each row; with ``return_changed``, return the keys, with the value that the last row of each
    sees."""
    state: Any = rows.state
    given = state._added_values(values, value_type)
    check_lengths(rows, given)
    with state.backend._vectorised_call(rows.keys.canonical):
        state._add_each(rows, given)
        if not return_changed:
            return None
        first, last = rows.touched()
        results = to_arrow(rows.call_each(state.get, rows=last), result_type)
    spaces = rows.namespaces
    namespaces = None if spaces is None else spaces.take(np.array(first, dtype=np.int64)).shown()
    return Changed(rows.keys.taken(first), results, namespaces)


def map_each(
    rows: CallRows, map_keys: Any, action: Callable[..., Any], *columns: tuple[Any, Type, bool]
) -> list[Any]:
    """`each_key` of a map state: ``action(map key, *values of the row)``."""
    descriptor: Any = rows.state.descriptor
    try:
        decoded = list(CallKeys(map_keys, key_encoder(descriptor.key_type)))
    except SerializationError as error:
        raise error.at(f"map keys of state {descriptor.name!r}") from None
    return each_key(rows, action, (decoded, None, False), *columns)
