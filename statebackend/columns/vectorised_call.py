"""The part of vectorised calls that heap and rocksdb share.

A call goes through five steps. It checks its rows, encodes their columns, begins (which reads the clock), runs, and is
undone by an error. The classes here check and encode. A backend derives from them and supplies the rest: `_begin` and
the methods whose names end with ``_column`` work on stored columns.

Where `_by_rows` returns True, `statebackend.state.scalar_fallback` runs the call row by row. It takes the name of the
call: "get", "exists", "clear", "update", "add", "put" or "remove".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from statebackend._core.tables.accumulators import AddPlan
from statebackend.columns.codec_factory import holds_references, value_bytes
from statebackend.columns.nested_columns import encoded_keys
from statebackend.columns.stored_columns import (
    Array,
    Column,
    arrow_column,
    double_column,
    in_entry,
    null_column,
    serialised_column,
    value_column,
)
from statebackend.errors import MemoryLimitError, SerializationError
from statebackend.keys import NamespaceColumn, count_of, key_encoder, namespace_column
from statebackend.state import (
    AddingState,
    KeyedListState,
    KeyedState,
    MapState,
    NamedAggregate,
    Reduction,
    ValueState,
    check_lengths,
    elements_of,
    entries_of,
    times_of_rows,
)
from statebackend.types import DOUBLE, DecimalType, Type


@dataclass(frozen=True)
class VectorisedCall:
    """The rows of a vectorised call, checked."""

    #: In canonical form.
    keys: Any
    count: int
    #: None: all rows are in the current namespace.
    namespaces: NamespaceColumn | None
    #: The result of `_begin`: on heap, the time of all rows, or of each.
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

    def _call(self, keys: Any, namespaces: Any, times: Any) -> VectorisedCall:
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
        return VectorisedCall(canonical, count, spaces, self._begin(own))

    def _values_of(self, call: VectorisedCall, column: Any, declared: Type, nullable: bool = True) -> Column:
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
        *,
        return_changed: bool = False,
        namespaces: Any = None,
        times: Any = None,
    ) -> Any:
        plan = self.plan
        if plan is None or self._at_own_times(times):
            # Row by row: while a user's function runs, its key and namespace are current.
            return super().add_many(
                keys, values, return_changed=return_changed, namespaces=namespaces, times=times
            )
        call = self._call(keys, namespaces, times)
        try:
            count, column = operands(values, self.descriptor.type, plan)
            if count != call.count:
                check_lengths(call, range(count))
            return self._add_column(call, column, plan, return_changed)
        except (MemoryLimitError, SerializationError) as error:
            raise error.at(f"state {self.descriptor.name!r}") from None

    def _added_values(self, values: Any, declared: Type | None) -> list[Any]:
        if not is_decoded(declared):
            return super()._added_values(values, declared)
        with self._naming_state():
            stored, nulls = value_column(values, declared)
            codec = value_bytes(declared, "values")
            return codec.decode_many(
                *serialised_column(stored), None if nulls is None else nulls.view(np.uint8)
            )


class ListColumns(ColumnsState, KeyedListState):
    __slots__ = ()

    _append_column: Any
    _lists_column: Any

    def _elements_of(self, values: Any) -> list[Any]:
        """The elements that a scalar call was given; the compiled handle asks for them."""
        return elements_of(values, self.descriptor.element_type, f"state {self.descriptor.name!r}")

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
    __slots__ = ()

    _read_column: Any
    _put_column: Any
    _remove_column: Any

    def _pairs_of(self, entries: Any) -> list[tuple[Any, Any]]:
        """The entries that a scalar call was given; the compiled handle asks for them."""
        return entries_of(entries, f"state {self.descriptor.name!r}")

    def _map_call(self, keys: Any, map_keys: Any, namespaces: Any, times: Any) -> tuple[VectorisedCall, Any]:
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


# --- additions: named operations as plans of the compiled core, and values for a user's function ---

_OVER_DOUBLES = {"avg": "average", "variance": "moments", "stddev": "moments"}


def adding_plan(of: Any) -> AddPlan | None:
    """The plan of the operation of a descriptor; None if Python must run it, or for a user's function."""
    if of.kind == "reducing":
        return _reduction_plan(of.reduce) if isinstance(of.reduce, Reduction) else None
    return _aggregate_plan(of.aggregate) if isinstance(of.aggregate, NamedAggregate) else None


def _reduction_plan(reduce: Reduction) -> AddPlan | None:
    declared = reduce.type
    if isinstance(declared, DecimalType):
        return AddPlan(reduce.name, "decimal", declared.precision)
    number = _number_of(declared)
    if number is not None:
        return AddPlan(reduce.name, number)
    if reduce.name in ("first", "last"):
        return AddPlan(reduce.name, declared.fixed_width if in_entry(declared) else "bytes")
    return None


def _number_of(declared: Type) -> str | None:
    """What a plan calls the stored values of a type; None if it can only keep or replace them."""
    layout = declared.layout
    if layout.family == "time":
        return "int" if layout.width == 4 else "long"
    return declared.name.lower() if layout.is_number else "bytes" if layout.family == "bytes" else None


def _aggregate_plan(aggregate: NamedAggregate) -> AddPlan | None:
    if aggregate.name == "count":
        return AddPlan("count", "long")
    if aggregate.name in _OVER_DOUBLES:
        return AddPlan(_OVER_DOUBLES[aggregate.name])
    return _reduction_plan(Reduction(aggregate.name, aggregate.type))


def operands(values: Any, declared: Type, plan: AddPlan) -> tuple[int, Column]:
    """Return the number of values, and the addends of the plan for each."""
    if plan.operation == "count":
        count, nulls = null_column(values, declared)
        return count, Column(None, nulls)
    if plan.number is None:
        column = double_column(values, declared)
    else:
        column = value_column(values, declared)
        if declared.layout.family == "time":
            column = Column(column.values.view(declared.layout.dtype).reshape(-1), column.nulls)
    return count_of(column.values), column


def results_of(aggregate: NamedAggregate, accumulators: Any, found: Array | None) -> pa.Array:
    """The results of accumulators in stored form, null where none was found."""
    if aggregate.name not in _OVER_DOUBLES:
        return arrow_column(accumulators, found, aggregate.result_type)
    present = np.ones(len(accumulators), dtype=bool) if found is None else found
    with np.errstate(all="ignore"):
        if aggregate.name == "avg":
            fields = accumulators.view([("nulls", "u1"), ("sum", "<f8"), ("count", "<i8")]).reshape(-1)
            return arrow_column(fields["sum"] / fields["count"], present, DOUBLE)
        fields = accumulators.view([("nulls", "u1"), ("n", "<f8"), ("avg", "<f8"), ("m2", "<f8")]).reshape(-1)
        variance = fields["m2"] / (fields["n"] - 1.0)
        present = present & (fields["n"] >= 2.0)
        return arrow_column(np.sqrt(variance) if aggregate.name == "stddev" else variance, present, DOUBLE)


def is_decoded(declared: Type | None) -> TypeGuard[Type]:
    """Return True if functions get new objects, decoded from columns; other types come as the caller gave them."""
    return declared is not None and not holds_references(declared)
