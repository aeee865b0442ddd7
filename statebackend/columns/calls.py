"""The part of vectorised calls that heap and rocksdb share.

A call goes through five steps. It checks its rows, encodes their columns, begins (which reads the clock), runs, and is
undone by an error. The classes here check and encode. A backend derives from them and supplies the rest: `_begin` and
the methods whose names end with ``_column`` work on stored columns.

Where `_by_rows` returns True, `statebackend.state.vectorised` runs the call row by row. It takes the name of the call:
"get", "exists", "clear", "update", "add", "put" or "remove".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend._core.tables.accumulators import AddPlan
from statebackend.columns.additions import (
    decoded_values,
    is_decoded,
    operands,
    results_of,
)
from statebackend.columns.nested_columns import encoded_keys
from statebackend.columns.stored_columns import Array, Column, arrow_column, value_column
from statebackend.errors import MemoryLimitError, SerializationError
from statebackend.keys import NamespaceColumn, count_of, key_encoder, namespace_column
from statebackend.state import (
    AddingState,
    KeyedListState,
    KeyedState,
    MapState,
    NamedAggregate,
    ValueState,
    check_lengths,
    times_of_rows,
)
from statebackend.types import Type


@dataclass(frozen=True)
class Call:
    """The rows of a vectorised call, checked."""

    #: In canonical form.
    keys: Any
    count: int
    #: None: all rows are in the current namespace.
    namespaces: NamespaceColumn | None
    #: What `_begin` returned: on heap, the time of all rows, or of each.
    times: Any

    def __len__(self) -> int:
        return self.count


class ColumnsState(KeyedState):
    """The shared part of all kinds."""

    __slots__ = ()

    # Of the backend's classes, which come first.
    backend: Any
    descriptor: Any
    _begin: Any
    _find_column: Any
    _clear_column: Any

    def _by_rows(self, call: str, times: Any) -> bool:
        return False

    def _at_own_times(self, times: Any) -> bool:
        """Return True if each row of the call has its own time, so that it runs row by row."""
        return False

    def _call(self, keys: Any, namespaces: Any, times: Any) -> Call:
        """Check the rows of a call, and read the clock."""
        self.backend._check_open()
        canonical = encoded_keys(self.backend._encoder, keys)
        spaces = None if namespaces is None else namespace_column(namespaces)
        own = None if times is None else times_of_rows(self, times)
        count = count_of(canonical)
        columns = [] if spaces is None else [spaces.numbers]
        columns += [] if own is None else [own]
        if columns:
            check_lengths(range(count), *columns)
        return Call(canonical, count, spaces, self._begin(own))

    def _values_of(self, call: Call, column: Any, declared: Type, nullable: bool = True) -> Column:
        """The stored form of the values of a call."""
        with self._naming_state():
            values = value_column(column, declared, nullable)
        check_lengths(range(len(call)), range(count_of(values.values)))
        return values

    @contextmanager
    def _naming_state(self) -> Iterator[None]:
        """Add the state's name to errors of values and of the memory limit."""
        try:
            yield
        except (MemoryLimitError, SerializationError) as error:
            raise error.at(f"state {self.descriptor.name!r}") from None

    def exists_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.BooleanArray:
        if self._by_rows("exists", times):
            return super().exists_many(keys, namespaces=namespaces, times=times)
        return self._find_column(self._call(keys, namespaces, times))

    def clear_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._by_rows("clear", times):
            super().clear_many(keys, namespaces=namespaces, times=times)
        else:
            self._clear_column(self._call(keys, namespaces, times))


class SingleColumns(ColumnsState):
    """States with one value for a key."""

    __slots__ = ()

    #: Reads the values of a call, and returns what `_shown` makes of them.
    _read_column: Any

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        if self._by_rows("get", times):
            return super().get_many(keys, namespaces=namespaces, times=times)  # type: ignore[misc]
        return self._read_column(self._call(keys, namespaces, times))


class ValueColumns(SingleColumns, ValueState):
    """A value."""

    __slots__ = ()

    _write_column: Any

    def _shown(self, values: Any, found: Array) -> pa.Array:
        """Stored values as Arrow, with the default in the rows that have none."""
        declared = self.descriptor.type
        array = arrow_column(values, found, declared)
        default = self.descriptor.default_copy()
        if default is None or found.all():
            return array
        # The default is appended to the values; every row without a value points at it.
        array = pa.concat_arrays(
            [array, arrow_column(value_column([default], declared).values, None, declared)]
        )
        return array.take(pa.array(np.where(found, np.arange(len(found)), len(found))))

    def update_many(self, keys: Any, values: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._by_rows("update", times):
            super().update_many(keys, values, namespaces=namespaces, times=times)
            return
        call = self._call(keys, namespaces, times)
        self._write_column(call, self._values_of(call, values, self.descriptor.type))


class AddingColumns(SingleColumns, AddingState[Any, Any]):
    """A reduced value, or an accumulator."""

    __slots__ = ()

    #: The plan of the compiled core, made when the state is declared; None if Python calls a function for each row.
    plan: AddPlan | None = None
    #: Adds a column by the plan; returns what has changed, if asked.
    _add_column: Any

    def _by_rows(self, call: str, times: Any) -> bool:
        of = self.descriptor
        if call == "get" and of.kind == "aggregating" and not isinstance(of.aggregate, NamedAggregate):
            return True
        return super()._by_rows(call, times)

    def _shown(self, accumulators: Any, found: Array | None) -> pa.Array:
        """Accumulators in stored form as `get` shows them; null where there are none."""
        of = self.descriptor
        if of.kind == "aggregating":
            return results_of(of.aggregate, accumulators, found)
        return arrow_column(accumulators, found, of.type)

    def add_many(
        self,
        keys: Any,
        values: Any,
        return_changed: bool = False,
        *,
        namespaces: Any = None,
        times: Any = None,
    ) -> tuple[Any, ...] | None:
        plan = self.plan
        if plan is None or self._at_own_times(times):
            # Row by row: while a user's function runs, its key and namespace are current.
            return super().add_many(keys, values, return_changed, namespaces=namespaces, times=times)
        call = self._call(keys, namespaces, times)
        try:
            count, column = operands(values, self.descriptor.type, plan)
            if count != call.count:
                check_lengths(call, range(count))
            changed: tuple[Any, ...] | None = self._add_column(call, column, plan, return_changed)
            return changed
        except (MemoryLimitError, SerializationError) as error:
            raise error.at(f"state {self.descriptor.name!r}") from None

    def _added_values(self, values: Any, declared: Type | None) -> list[Any]:
        if not is_decoded(declared):
            return super()._added_values(values, declared)
        with self._naming_state():
            return decoded_values(values, declared)


class ListColumns(ColumnsState, KeyedListState):
    """A list."""

    __slots__ = ()

    _append_column: Any
    _lists_column: Any

    def add_many(self, keys: Any, values: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._by_rows("add", times):
            super().add_many(keys, values, namespaces=namespaces, times=times)
            return
        call = self._call(keys, namespaces, times)
        column = self._values_of(call, values, self.descriptor.element_type, nullable=False)
        self._append_column(call, column.values)

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.ListArray:
        if self._by_rows("get", times):
            return super().get_many(keys, namespaces=namespaces, times=times)
        return self._lists_column(self._call(keys, namespaces, times))

    def _shown(self, offsets: Array, elements: Any) -> pa.Array:
        """Lists of stored elements as Arrow."""
        array = arrow_column(elements, None, self.descriptor.element_type)
        if offsets[-1] < 2**31:
            return pa.ListArray.from_arrays(offsets.astype(np.int32), array)
        return pa.LargeListArray.from_arrays(offsets, array)


class MapColumns(ColumnsState, MapState):
    """A map."""

    __slots__ = ()

    _read_column: Any
    _put_column: Any
    _remove_column: Any

    def _map_call(self, keys: Any, map_keys: Any, namespaces: Any, times: Any) -> tuple[Call, Any]:
        """Check the rows of a call; with their map keys in canonical form."""
        call = self._call(keys, namespaces, times)
        try:
            inner = encoded_keys(key_encoder(self.descriptor.key_type), map_keys)
        except SerializationError as error:
            raise error.at(f"map keys of state {self.descriptor.name!r}") from None
        check_lengths(range(len(call)), range(count_of(inner)))
        return call, inner

    def _shown(self, values: Any, found: Array) -> pa.Array:
        return arrow_column(values, found, self.descriptor.value_type)

    def get_many(self, keys: Any, map_keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        if self._by_rows("get", times):
            return super().get_many(keys, map_keys, namespaces=namespaces, times=times)
        return self._read_column(*self._map_call(keys, map_keys, namespaces, times))

    def put_many(
        self, keys: Any, map_keys: Any, values: Any, *, namespaces: Any = None, times: Any = None
    ) -> None:
        if self._by_rows("put", times):
            super().put_many(keys, map_keys, values, namespaces=namespaces, times=times)
            return
        call, inner = self._map_call(keys, map_keys, namespaces, times)
        self._put_column(call, inner, self._values_of(call, values, self.descriptor.value_type))

    def remove_many(self, keys: Any, map_keys: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._by_rows("remove", times):
            super().remove_many(keys, map_keys, namespaces=namespaces, times=times)
            return
        self._remove_column(*self._map_call(keys, map_keys, namespaces, times))
