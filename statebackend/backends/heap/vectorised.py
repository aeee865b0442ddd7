"""The vectorised methods of value, list and map states: whole columns through the batch kernels.

Arrow and numpy columns make no Python object per row; see `stored_columns`. Some states go row by row, as
`statebackend.state.vectorised` does it: states of objects (PICKLE and a user's own serializer), lists with a time to
live, and `clear_many` of map states.

Each class stands between a compiled handle and the interface: ``class HeapValueState(ValueHandle, ValueColumns)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend._core.batches import adding_kernels, expiring_kernels, gathering, kernels, map_kernels
from statebackend._core.tables.accumulators import AddPlan
from statebackend.backends.heap.nested_columns import encoded_keys
from statebackend.backends.heap.stored_columns import Array, Column, arrow_column, value_column
from statebackend.errors import MemoryLimitError, SerializationError
from statebackend.keys import key_encoder
from statebackend.state import KeyedListState, KeyedState, MapState, StateTtlConfig, ValueState, check_lengths
from statebackend.types import Type

__all__ = ["ColumnsState", "ListColumns", "MapColumns", "ValueColumns", "count_of", "take_rows"]

_UpdateType = StateTtlConfig.UpdateType
_Visibility = StateTtlConfig.StateVisibility


def count_of(canonical: Any) -> int:
    """The number of rows of a column of keys or values, an array or (offsets, data).

    >>> count_of(np.array([1, 2])), count_of((np.array([0, 1, 1]), b"a"))
    (2, 2)
    """
    return len(canonical[0]) - 1 if isinstance(canonical, tuple) else len(canonical)


def take_rows(values: Any, rows: Array) -> Any:
    """Some rows of an array or of (offsets, data). O(rows and their bytes).

    >>> take_rows((np.array([0, 1, 3]), np.frombuffer(b"abc", np.uint8)), np.array([1]))
    (array([0, 2]), array([98, 99], dtype=uint8))
    """
    if not isinstance(values, tuple):
        return values[rows]
    array = pa.Array.from_buffers(
        pa.large_binary(), count_of(values), [None, pa.py_buffer(values[0]), pa.py_buffer(values[1])]
    ).take(pa.array(rows))
    _, offsets, data = array.buffers()
    empty = np.empty(0, dtype=np.uint8)
    return (
        np.frombuffer(offsets, dtype=np.int64, count=len(rows) + 1),
        empty if data is None else np.frombuffer(data, dtype=np.uint8),
    )


class ColumnsState(KeyedState):
    """The shared part: keys and values as columns, the tables of the current namespace, one time per call."""

    __slots__ = ()

    # Provided by the compiled handle, which comes first in the class.
    backend: Any
    descriptor: Any
    codec: Any
    plain: Any
    spaced: Any
    _number_for_batch: Any
    _clean_some: Any
    _count_expired: Any

    @property
    def _holds_objects(self) -> bool:
        return bool(self.codec.layout == "object")

    def _key_column(self, keys: Any) -> Any:
        self.backend._check_open()
        canonical = encoded_keys(self.backend._encoder, keys)
        self.backend.begin_call(expires=self._ttl() > 0)
        return canonical

    def _value_column(self, column: Any, declared: Type, nullable: bool = True) -> Column:
        with self._naming_state():
            return value_column(column, declared, nullable)

    @contextmanager
    def _naming_state(self) -> Iterator[None]:
        """Add the state's name to errors of values and of the memory limit."""
        try:
            yield
        except (MemoryLimitError, SerializationError) as error:
            raise error.at(f"state {self.descriptor.name!r}") from None

    def _options(self) -> dict[str, Any]:
        """The options that every kernel takes."""
        return {"namespace": self._number_for_batch(False), "threads": self.backend.threads}

    def _table(self, canonical: Any) -> Any:
        """The table of the current namespace for reading; None if it was never written. Checks the keys' groups."""
        table = self.spaced if self._number_for_batch(False) else self.plain
        if table is None:
            kernels.find_many(self.plain, canonical)
        return table

    def _table_to_write(self) -> Any:
        return self.spaced if self._number_for_batch(True) else self.plain

    # --- time ---

    def _ttl(self) -> int:
        config = self.descriptor.ttl_config
        return 0 if config is None else config.ttl

    def _begun(self, rows: int) -> int:
        """Begin a call over ``rows`` rows: clean up for as many accesses, and return the time; 0 if nothing expires."""
        if not self._ttl():
            return 0
        now: int = self.backend.called_at
        self._clean_some(rows, now)
        return now

    def _expiry(self, now: int) -> dict[str, Any]:
        """The options of kernels that read state with a time to live."""
        config = self.descriptor.ttl_config
        return {
            "now": now,
            "ttl": config.ttl,
            "shows_expired": config.state_visibility is _Visibility.ReturnExpiredIfNotCleanedUp,
        }

    def _renews(self) -> bool:
        return self.descriptor.ttl_config.update_type is _UpdateType.OnReadAndWrite

    # --- what several kinds do alike ---

    def _exists_many(self, keys: Any) -> pa.BooleanArray:
        canonical = self._key_column(keys)
        with self._naming_state():
            table = self._table(canonical)
            if table is None:
                return pa.array(np.zeros(count_of(canonical), dtype=bool))
            if self._ttl():
                expiry = self._expiry(self.backend.called_at)
                return pa.array(expiring_kernels.look_many(table, canonical, **expiry, **self._options()))
            return pa.array(kernels.find_many(table, canonical, **self._options()) != 0)

    def _clear_many(self, keys: Any) -> None:
        canonical = self._key_column(keys)
        with self._naming_state():
            table = self._table(canonical)
            if table is not None:
                self._begun(count_of(canonical))
                kernels.remove_many(table, canonical, **self._options())


class SingleColumns(ColumnsState):
    """States with one value for a key."""

    __slots__ = ()

    def exists_many(self, keys: Any) -> pa.BooleanArray:
        return self._exists_many(keys)

    def clear_many(self, keys: Any) -> None:
        if self._holds_objects:
            super().clear_many(keys)
        else:
            self._clear_many(keys)

    def _read(self, canonical: Any) -> tuple[Any, Array]:
        """Values in stored form, and a mask of the keys that were found."""
        with self._naming_state():
            table = self._table(canonical)
            if table is None:
                nothing = np.zeros(count_of(canonical), dtype=np.uint32)
                return gathering.values_at(self.plain, nothing), nothing != 0
            if self._ttl():
                expiry = self._expiry(self._begun(count_of(canonical)))
                before = len(table)
                found = expiring_kernels.read_many(
                    table, canonical, renews=self._renews(), **expiry, **self._options()
                )
                self._count_expired(before - len(table))
                return found
            return kernels.get_many(table, canonical, **self._options())


class ValueColumns(SingleColumns, ValueState):
    """A value."""

    __slots__ = ()

    def get_many(self, keys: Any) -> pa.Array:
        if self._holds_objects:
            return super().get_many(keys)
        declared = self.descriptor.type
        values, found = self._read(self._key_column(keys))
        default = self.descriptor.default_copy()
        if default is None or found.all():
            return arrow_column(values, found, declared)
        # The default is appended to the values; every row without a value points at it.
        default_array = arrow_column(value_column([default], declared).values, None, declared)
        array = pa.concat_arrays([arrow_column(values, found, declared), default_array])
        return array.take(pa.array(np.where(found, np.arange(len(found)), len(found))))

    def update_many(self, keys: Any, values: Any) -> None:
        if self._holds_objects:
            super().update_many(keys, values)
            return
        canonical = self._key_column(keys)
        stored, nulls = self._value_column(values, self.descriptor.type)
        check_lengths(range(count_of(canonical)), range(count_of(stored)))
        with self._naming_state():
            table, stamp = self._table_to_write(), self._begun(count_of(canonical))
            if nulls is None:
                kernels.update_many(table, canonical, stored, timestamp=stamp, **self._options())
                return
            plan = AddPlan("last", "bytes" if self.codec.layout == "bytes" else self.codec.width)
            adding_kernels.add_many(
                table, canonical, stored, plan, nulls=nulls, timestamp=stamp, **self._options()
            )


class ListColumns(ColumnsState, KeyedListState):
    """A list."""

    __slots__ = ()

    def exists_many(self, keys: Any) -> pa.BooleanArray:
        return super().exists_many(keys) if self._ttl() else self._exists_many(keys)

    def clear_many(self, keys: Any) -> None:
        if self._holds_objects:
            super().clear_many(keys)
        else:
            self._clear_many(keys)

    def add_many(self, keys: Any, values: Any) -> None:
        if self._holds_objects:
            super().add_many(keys, values)
            return
        canonical = self._key_column(keys)
        stored, _ = self._value_column(values, self.descriptor.element_type, nullable=False)
        check_lengths(range(count_of(canonical)), range(count_of(stored)))
        with self._naming_state():
            table, stamp = self._table_to_write(), self._begun(count_of(canonical))
            kernels.append_many(table, canonical, stored, timestamp=stamp, **self._options())

    def get_many(self, keys: Any) -> pa.ListArray:
        if self._holds_objects or self._ttl():
            return super().get_many(keys)
        canonical = self._key_column(keys)
        table = self._table(canonical)
        if table is None:
            nothing = np.zeros(count_of(canonical), dtype=np.uint32)
            offsets, values = gathering.lists_at(self.plain, nothing)
        else:
            offsets, values = kernels.lists_of(table, canonical, **self._options())
        elements = arrow_column(values, None, self.descriptor.element_type)
        if offsets[-1] < 2**31:
            return pa.ListArray.from_arrays(offsets.astype(np.int32), elements)
        return pa.LargeListArray.from_arrays(offsets, elements)


class MapColumns(ColumnsState, MapState):
    """A map."""

    __slots__ = ()

    # Provided by the compiled handle.
    plain_map: Any
    spaced_map: Any

    def _map_key_column(self, map_keys: Any) -> Any:
        try:
            return encoded_keys(key_encoder(self.descriptor.key_type), map_keys)
        except SerializationError as error:
            raise error.at(f"map keys of state {self.descriptor.name!r}") from None

    def _map(self) -> Any:
        return self.spaced_map if self._number_for_batch(False) else self.plain_map

    def exists_many(self, keys: Any) -> pa.BooleanArray:
        return super().exists_many(keys) if self._ttl() else self._exists_many(keys)

    def get_many(self, keys: Any, map_keys: Any) -> pa.Array:
        if self._holds_objects:
            return super().get_many(keys, map_keys)
        inner = self._map_key_column(map_keys)
        canonical = self._key_column(keys)
        check_lengths(range(count_of(canonical)), range(count_of(inner)))
        with self._naming_state():
            if self._table(canonical) is None:
                nothing = np.zeros(count_of(canonical), dtype=np.uint32)
                values, found = gathering.values_at(self.plain_map.entries, nothing), nothing != 0
            else:
                now = self._begun(count_of(canonical))
                expiry = {"renews": self._renews(), **self._expiry(now)} if self._ttl() else {}
                before = len(self._map())
                values, found = map_kernels.get_many(
                    self._map(), canonical, inner, **expiry, **self._options()
                )
                self._count_expired(before - len(self._map()))
        return arrow_column(values, found, self.descriptor.value_type)

    def put_many(self, keys: Any, map_keys: Any, values: Any) -> None:
        if self._holds_objects:
            super().put_many(keys, map_keys, values)
            return
        inner = self._map_key_column(map_keys)
        canonical = self._key_column(keys)
        stored, nulls = self._value_column(values, self.descriptor.value_type)
        check_lengths(range(count_of(canonical)), range(count_of(inner)), range(count_of(stored)))
        with self._naming_state():
            self._table_to_write()
            stamp = self._begun(count_of(canonical))
            map_kernels.put_many(
                self._map(), canonical, inner, stored, nulls=nulls, timestamp=stamp, ttl=self._ttl(),
                **self._options(),
            )  # fmt: skip

    def remove_many(self, keys: Any, map_keys: Any) -> None:
        if self._holds_objects:
            super().remove_many(keys, map_keys)
            return
        inner = self._map_key_column(map_keys)
        canonical = self._key_column(keys)
        check_lengths(range(count_of(canonical)), range(count_of(inner)))
        with self._naming_state():
            if self._table(canonical) is not None:
                self._begun(count_of(canonical))
                map_kernels.remove_many(self._map(), canonical, inner, **self._options())
