"""The vectorised methods, implemented with the scalar ones: correct for every backend, fast in none.

A backend that knows better overrides the methods of the handles. These define the behaviour: they check all columns
first, then apply rows in order, at one ``now``; an error undoes the call.

>>> from statebackend.backends import create_backend
>>> from statebackend.state import ReducingStateDescriptor
>>> keyed = create_backend("reference").create_keyed_backend(int)
>>> total = keyed.get_reducing_state(ReducingStateDescriptor("total", "sum", int))
>>> keys, totals = add_many(total, [1, 2, 1], [10, 20, 30], None, True, None)
>>> keys.to_pylist(), totals.to_pylist()
([1, 2], [40, 20])
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError
from statebackend.keys import KeyEncoder, key_encoder
from statebackend.state.value_columns import check_lengths, check_values, to_arrow, to_values
from statebackend.types import ListType, Type

if TYPE_CHECKING:
    from statebackend.state.handles import KeyedListState, KeyedState, MapState

__all__ = ["Keys", "add_many", "each_key", "list_many", "map_each", "map_get_many", "read_many"]


class Keys:
    """A column of keys, encoded and checked as a whole, then visited one by one.

    >>> keys = Keys([3, 1, 3], key_encoder(int))
    >>> len(keys), list(keys), keys.first_touched().to_pylist()
    (3, [3, 1, 3], [3, 1])
    """

    def __init__(self, column: Any, encoder: KeyEncoder) -> None:
        self._encoder = encoder
        #: Their canonical forms, in order.
        self.canonical: list[Any]
        encoded = encoder.encode_many(column)
        if encoder.kind == "int":
            self.canonical = encoded.tolist()
        else:
            offsets, data = encoded
            raw, ends = data.tobytes(), offsets.tolist()
            self.canonical = [raw[a:b] for a, b in itertools.pairwise(ends)]

    def __len__(self) -> int:
        return len(self.canonical)

    def __iter__(self) -> Iterator[Any]:
        return map(self._encoder.decode, self.canonical)

    def first_touched(self) -> pa.Array:
        """The distinct keys in the order of their first rows."""
        distinct = list(dict.fromkeys(self.canonical))
        if self._encoder.kind == "int":
            return self._encoder.decode_many(np.array(distinct, dtype=np.int64))
        offsets = np.zeros(len(distinct) + 1, dtype=np.int64)
        np.cumsum([len(run) for run in distinct], out=offsets[1:])
        return self._encoder.decode_many((offsets, np.frombuffer(b"".join(distinct), dtype=np.uint8)))


def _values_of(column: Any, declared: Type | None, nullable: bool, state: KeyedState) -> list[Any]:
    try:
        values = to_values(column, declared)
        check_values(values, declared, nullable)
    except SerializationError as error:
        raise error.at(f"state {state.descriptor.name!r}") from None
    return values


def each_key(
    state: KeyedState, keys: Any, action: Callable[..., Any], *columns: tuple[Any, Type | None, bool]
) -> list[Any]:
    """Run ``action(*values of the row)`` with each row's key current, in order; return the actions' results.

    Each column is (values, type or None, True if nulls are allowed). Atomic, at one ``now``.
    """
    backend = state.backend
    encoded = Keys(keys, key_encoder(backend.key_type))
    rows = [_values_of(column, declared, nullable, state) for column, declared, nullable in columns]
    check_lengths(encoded, *rows)
    results = []
    with backend._vectorised_call(encoded.canonical):
        for key, *values in zip(encoded, *rows, strict=True):
            backend.set_current_key(key)
            results.append(action(*values))
    return results


def read_many(state: KeyedState, keys: Any, read: Callable[[], Any], declared: Type | None) -> pa.Array:
    """The Arrow array of the result of ``read`` for each key."""
    return to_arrow(each_key(state, keys, read), declared)


def add_many(
    state: Any,
    keys: Any,
    values: Any,
    value_type: Type | None,
    return_changed: bool,
    result_type: Type | None,
) -> tuple[pa.Array, pa.Array] | None:
    """Call ``state.add`` for each row; with ``return_changed``, return the distinct keys and their results."""
    backend = state.backend
    encoded = Keys(keys, key_encoder(backend.key_type))
    rows = _values_of(values, value_type, True, state)
    check_lengths(encoded, rows)
    with backend._vectorised_call(encoded.canonical):
        for key, value in zip(encoded, rows, strict=True):
            backend.set_current_key(key)
            state.add(value)
        if not return_changed:
            return None
        touched = encoded.first_touched()
        results = []
        for key in Keys(touched, key_encoder(backend.key_type)):
            backend.set_current_key(key)
            results.append(state.get())
        return touched, to_arrow(results, result_type)


def map_each(
    state: MapState, keys: Any, map_keys: Any, action: Callable[..., Any], *columns: tuple[Any, Type, bool]
) -> list[Any]:
    """`each_key` of a map state: ``action(map key, *values of the row)``."""
    key_type = state.descriptor.key_type
    encoder = key_encoder(key_type)
    try:
        decoded = list(Keys(map_keys, encoder))
    except SerializationError as error:
        raise error.at(f"map keys of state {state.descriptor.name!r}") from None
    return each_key(state, keys, action, (decoded, None, False), *columns)


def list_many(state: KeyedListState, keys: Any) -> pa.Array:
    """The Arrow list array of each key's elements."""
    return to_arrow(each_key(state, keys, state.get), ListType(state.descriptor.element_type))


def map_get_many(state: MapState, keys: Any, map_keys: Any) -> pa.Array:
    """The Arrow array of the values of each row's map key."""
    return to_arrow(map_each(state, keys, map_keys, state.get), state.descriptor.value_type)
