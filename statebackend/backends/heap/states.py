"""The handles of the heap backend: compiled scalar methods under the interfaces of the state API.

>>> from statebackend.backends.heap import HeapBackend
>>> from statebackend.state import MapStateDescriptor
>>> keyed = HeapBackend().create_keyed_backend(int)
>>> seen = keyed.get_map_state(MapStateDescriptor("seen", str, int))
>>> isinstance(seen, HeapMapState), isinstance(seen, MapColumns)
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend._core.batches import adding_kernels
from statebackend._core.handles.adding_handles import PlannedAggregatingHandle, PlannedReducingHandle
from statebackend._core.handles.function_handles import FoldingHandle
from statebackend._core.handles.handle import Handle
from statebackend._core.handles.list_handle import ListHandle
from statebackend._core.handles.map_handle import MapHandle
from statebackend._core.handles.single_handle import ValueHandle
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.map_table import MapTable
from statebackend._core.tables.state_table import StateTable
from statebackend.backends.heap.vectorised import (
    Call,
    ListColumns,
    MapColumns,
    Part,
    SingleColumns,
    ValueColumns,
)
from statebackend.columns.additions import (
    aggregate_plan,
    decoded_values,
    is_decoded,
    operands,
    reduction_plan,
    results_of,
)
from statebackend.columns.codec_choice import key_codec, value_codec
from statebackend.columns.nested_columns import decoded_keys
from statebackend.columns.stored_columns import Array, Column, arrow_column
from statebackend.keys import canonical_column, take_rows
from statebackend.state import (
    AggregatingState,
    AggregatingStateDescriptor,
    FoldingState,
    NamedAggregate,
    ReducingState,
    StateDescriptor,
    check_lengths,
)
from statebackend.types import Type

if TYPE_CHECKING:
    from statebackend.backends.heap.keyed import HeapKeyedBackend


class Changed(NamedTuple):
    """What a call has touched."""

    #: The first row of each distinct key and namespace, in order.
    rows: Array
    #: Their values after the call, in stored form.
    values: Any
    #: The ones that have a value; None: all.
    found: Array | None


def _add_in_turn(state: Any, rows: Any, values: list[Any], are_copies: bool) -> None:
    """`add` each value of a vectorised call, with its key, namespace and time current."""
    state._add_in_turn(list(rows.keys), rows.namespace_of_each(), rows.times, values, are_copies)


class FoldingColumns(FoldingState):
    """An accumulator of a user's function."""

    __slots__ = ()

    def _add_each(self, rows: Any, values: list[Any]) -> None:
        _add_in_turn(self, rows, values, False)


class AddingColumns(SingleColumns):
    """The shared part of reducing and aggregating states."""

    __slots__ = ()

    def _added_values(self, values: Any, declared: Type | None) -> list[Any]:
        if not is_decoded(declared):
            return super()._added_values(values, declared)  # type: ignore[misc]
        with self._naming_state():
            return decoded_values(values, declared)

    def _add_each(self, rows: Any, values: list[Any]) -> None:
        _add_in_turn(self, rows, values, is_decoded(self.descriptor.type))

    def _add(
        self,
        call: Call,
        column: Column,
        plan: AddPlan,
        show: Callable[[Any, Array | None], pa.Array] | None,
    ) -> tuple[Any, ...] | None:
        """Add a column; if ``show`` makes results of what is stored, return what has changed."""
        self._clean(call)
        with self._naming_state(), self._parts(call, True) as parts:
            changed = [self._add_part(part, column, plan, show is not None) for part in parts]
        if show is None:
            return None
        results = [show(each.values, each.found) for each in changed if each is not None]
        rows = [each.rows for each in changed if each is not None]
        if len(rows) == 1:
            return self._of_changed(call, rows[0], results[0])
        first = np.concatenate(rows)
        order = np.argsort(first)
        return self._of_changed(call, first[order], pa.concat_arrays(results).take(pa.array(order)))

    def _add_part(self, part: Part, column: Column, plan: AddPlan, wants_changed: bool) -> Changed | None:
        nulls, config = part.of(column.nulls), self.descriptor.ttl_config
        touched = adding_kernels.add_many(
            self._table_to_write(part), part.keys, part.of(column.values), plan, nulls=nulls,
            timestamp=part.times, ttl=self._ttl(), rows=part.rows,
            in_event_time=config is not None and config.is_in_event_time,
            return_touched=wants_changed and nulls is None, **self._options(part),
        )  # fmt: skip
        if not wants_changed:
            return None
        found: Array | None = None
        if nulls is None:
            first, values = touched
        else:
            first, last = _touched(part)
            values, found = self._read(part.chosen(first, last))
        return Changed(first if part.rows is None else part.rows[first], values, found)

    def _of_changed(self, call: Call, rows: Array, results: pa.Array) -> tuple[Any, ...]:
        keys = decoded_keys(self.backend._encoder, take_rows(call.keys, rows))
        if call.namespaces is None:
            return keys, results
        return keys, call.namespaces.take(rows).shown(), results


def _touched(part: Part) -> tuple[Array, Array]:
    """The first row of each distinct key and namespace, in order, and the last one of the same."""
    numbers = _numbers_of(canonical_column(part.keys))
    if isinstance(part.namespace, np.ndarray):
        numbers = _numbers_of(pa.array(numbers * 2**32 + part.namespace))
    first = np.empty(int(numbers.max(initial=-1)) + 1, dtype=np.int64)
    last = np.empty_like(first)
    rows = np.arange(len(part))
    first[numbers[::-1]] = rows[::-1]
    last[numbers] = rows
    return first, last


def _numbers_of(column: pa.Array) -> Array:
    """The number of each row's value among the distinct ones, in the order of their first rows."""
    numbers: Array = column.dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers


class ReducingColumns(AddingColumns, ReducingState):
    """A reduced value."""

    __slots__ = ()

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        if self._holds_objects:
            return super().get_many(keys, namespaces=namespaces, times=times)
        call, declared = self._call(keys, namespaces, times), self.descriptor.type
        self._clean(call)
        return self._collect(call, lambda part: arrow_column(*self._read(part), declared))

    def add_many(
        self,
        keys: Any,
        values: Any,
        return_changed: bool = False,
        *,
        namespaces: Any = None,
        times: Any = None,
    ) -> tuple[Any, ...] | None:
        plan = None if self._holds_objects else reduction_plan(self.descriptor.reduce)
        if plan is None:
            return super().add_many(keys, values, return_changed, namespaces=namespaces, times=times)
        declared = self.descriptor.type
        call = self._call(keys, namespaces, times)
        with self._naming_state():
            count, column = operands(values, declared, plan)
        check_lengths(range(len(call)), range(count))

        def show(values: Any, found: Array | None) -> pa.Array:
            return arrow_column(values, found, declared)

        return self._add(call, column, plan, show if return_changed else None)


class AggregatingColumns(AddingColumns, AggregatingState):
    """An accumulator."""

    __slots__ = ()

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        aggregate = self.descriptor.aggregate
        if self._holds_objects or not isinstance(aggregate, NamedAggregate):
            return super().get_many(keys, namespaces=namespaces, times=times)
        call = self._call(keys, namespaces, times)
        self._clean(call)
        return self._collect(call, lambda part: results_of(aggregate, *self._read(part)))

    def add_many(
        self,
        keys: Any,
        values: Any,
        return_changed: bool = False,
        *,
        namespaces: Any = None,
        times: Any = None,
    ) -> tuple[Any, ...] | None:
        aggregate = self.descriptor.aggregate
        plan = None if self._holds_objects else aggregate_plan(aggregate)
        if plan is None:
            return super().add_many(keys, values, return_changed, namespaces=namespaces, times=times)
        call = self._call(keys, namespaces, times)
        with self._naming_state():
            count, column = operands(values, self.descriptor.type, plan)
        check_lengths(range(len(call)), range(count))

        def show(accumulators: Any, found: Array | None) -> pa.Array:
            return results_of(aggregate, accumulators, found)

        return self._add(call, column, plan, show if return_changed else None)


class HeapValueState(ValueHandle, ValueColumns):
    """A value."""

    __slots__ = ()


class HeapListState(ListHandle, ListColumns):
    """A list; elements are stored in chunks that only grow."""

    __slots__ = ()


class HeapMapState(MapHandle, MapColumns):
    """A map; each entry is an entry of the table."""

    __slots__ = ()


class HeapReducingState(PlannedReducingHandle, ReducingColumns):
    """A reduced value."""

    __slots__ = ()


class HeapAggregatingState(PlannedAggregatingHandle, AggregatingColumns):
    """An accumulator of an aggregate."""

    __slots__ = ()


class HeapFoldingState(FoldingHandle, FoldingColumns):
    """An accumulator of a fold."""

    __slots__ = ()


_CLASSES: dict[str, type[Handle]] = {
    "value": HeapValueState,
    "list": HeapListState,
    "map": HeapMapState,
    "reducing": HeapReducingState,
    "aggregating": HeapAggregatingState,
    "folding": HeapFoldingState,
}
#: The role in a descriptor's `stored_types` of the value that is stored for a key.
_ROLES = {"value": "value", "list": "element", "map": "value", "reducing": "value"}


def make_state(backend: HeapKeyedBackend, descriptor: StateDescriptor) -> Any:
    """Make a handle and the first table for a new state.

    >>> from statebackend.backends.heap import HeapBackend
    >>> from statebackend.state import ListStateDescriptor
    >>> keyed = HeapBackend().create_keyed_backend(int)
    >>> make_state(keyed, ListStateDescriptor("tags", str)).plain.element_code == 8
    True
    """
    return make_handle(_CLASSES[descriptor.kind], backend, descriptor)


def table_shape(backend: HeapKeyedBackend) -> dict[str, Any]:
    """What the tables of all states of a backend have in common.

    >>> from statebackend.backends.heap import HeapBackend
    >>> table_shape(HeapBackend().create_keyed_backend(int))["key_group_range"]
    (0, 127)
    """
    return {
        "key": "int" if backend.codec.is_int else "bytes",
        "plan": backend.codec.plan,
        "max_parallelism": backend.max_parallelism,
        "key_group_range": (backend.key_group_range.start, backend.key_group_range.end),
    }


def make_handle(handle: type[Handle], backend: HeapKeyedBackend, descriptor: StateDescriptor) -> Any:
    """Make a handle of this class, and the first table, for a new state."""
    where = f"state {descriptor.name!r}"
    types = descriptor.stored_types()
    codec = value_codec(types[_ROLES.get(descriptor.kind, "accumulator")], where)
    config = descriptor.ttl_config
    options: dict[str, Any] = {}
    if config is not None:
        options["ttl"] = config.ttl
        options["refreshes"] = config.renews_on_read
        options["in_event_time"] = config.is_in_event_time
        options["shows_expired"] = config.shows_expired
        if config.incremental_cleanup is not None:
            options["cleanup_size"] = config.incremental_cleanup.cleanup_size
    if codec.layout == "object":
        options["watcher"] = backend.mutation_watcher
    shape = {**table_shape(backend), "timestamps": config is not None}
    if descriptor.kind == "map":
        keys = key_codec(types["key"])
        options["keys_codec"] = keys
        shape["map_key"] = "int" if keys.is_int else "bytes"
        shape["nullable"] = True
    if descriptor.kind != "list":
        shape["copy_value"] = codec.copy_value
    if isinstance(descriptor, AggregatingStateDescriptor):
        options["plan_of"] = aggregate_plan
        if descriptor.type is not None:
            options["inputs"] = value_codec(descriptor.type, where)
    if descriptor.kind == "reducing":
        options["plan_of"] = reduction_plan
    shape["value"] = ("list", codec.layout) if descriptor.kind == "list" else codec.layout
    table: Any = MapTable if descriptor.kind == "map" else StateTable

    def make_table(namespaces: bool) -> Any:
        backend.shape_changes += 1
        return table(backend.core, namespaces=namespaces, **shape)

    return handle(backend, descriptor, codec, make_table, **options)
