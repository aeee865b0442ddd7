"""Handles of states with one value for a key: value, reducing, aggregating and folding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend._core.kernels import aggregation_kernels, batch_kernels
from statebackend._core.rocksdb.handles.single_family_handles import AddingHandle, ValueHandle
from statebackend._core.rocksdb.handles.value_layouts import join_values, seen_values, split_values
from statebackend._core.rocksdb.overlay.sorted_rows import order_and_places, picked
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_core import StateCore
from statebackend._core.tables.state_table import StateTable
from statebackend.backends.rocksdb.family_states import RocksDbState, chosen_rows
from statebackend.columns.codec_factory import holds_references, value_bytes, value_codec
from statebackend.columns.nested_columns import decoded_keys
from statebackend.columns.stored_columns import Array, Column, serialised_column, stored_column
from statebackend.columns.vectorised_call import (
    AddingColumns,
    SingleColumns,
    ValueColumns,
    VectorisedCall,
    adding_plan,
    is_decoded,
)
from statebackend.keys import NamespaceColumn, canonical_column, count_of, take_rows
from statebackend.state import AggregatingState, Changed, FoldingState, ReducingState

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed_backend import RocksDbKeyedBackend

#: Fewer rows than these are read one by one.
FEWEST_IN_ORDER = 32
#: A table for so many rows has a part more, so that kernels go over one after the other.
_ROWS_OF_A_PART = 4096


class _DistinctKeys(NamedTuple):
    """The distinct keys and namespaces of a call, in the order of their first rows."""

    keys: Any
    #: None: the call names no namespaces.
    spaces: NamespaceColumn | None
    #: The number of each one's namespace in a table of the call; 0 if all are in the same.
    numbers: int | Array

    def chosen(self, rows: Array) -> _DistinctKeys:
        numbers = self.numbers[rows] if isinstance(self.numbers, np.ndarray) else self.numbers
        spaces = None if self.spaces is None else self.spaces.take(rows)
        return _DistinctKeys(take_rows(self.keys, rows), spaces, numbers)


def _number_in_table(spaces: NamespaceColumn | None) -> int | Array:
    if spaces is None or len(spaces.distinct) == 1:
        return 0
    return (spaces.numbers + 1).astype(np.uint32)


def _touched(canonical: Any, spaces: NamespaceColumn | None) -> _DistinctKeys:
    numbers = _number_in_table(spaces)
    if not isinstance(numbers, np.ndarray):
        keys = _distinct(canonical)
        return _DistinctKeys(keys, None if spaces is None else spaces.take(np.arange(count_of(keys))), 0)
    both = (
        canonical_column(canonical).dictionary_encode().indices.to_numpy().astype(np.int64) * 2**32 + numbers
    )
    _, first = np.unique(both, return_index=True)
    first.sort()
    return _DistinctKeys(take_rows(canonical, first), spaces.take(first), numbers[first])  # type: ignore[union-attr]


def _distinct(canonical: Any) -> Any:
    """The distinct keys of a column, in the order of their first rows."""
    array = canonical_column(canonical).unique()
    if not isinstance(canonical, tuple):
        return array.to_numpy()
    _, ends, kept = array.buffers()
    return (
        np.frombuffer(ends, np.int64, len(array) + 1),
        np.frombuffer(kept, np.uint8) if kept is not None else np.empty(0, np.uint8),
    )


class RocksDbSingleState(RocksDbState, SingleColumns):
    """One value for a key: its timestamp, if there is a time to live, and its bytes."""

    unexpired: Callable[[bytes], Any]
    stored: Callable[..., bytes]

    def _merge_by(self, merge: Callable[[Any, Any], Any], a: bytes, b: bytes) -> bytes | None:
        first, second = self.unexpired(a), self.unexpired(b)
        if first is None and second is None:
            return None
        if first is None or second is None:
            return self.stored(second if first is None else first)
        latest = max(self.stamps_of(a) + self.stamps_of(b)) if self.in_event_time else None
        return self.stored(self._backend._run(merge, first, second), latest)

    def _clear_column(self, call: VectorisedCall) -> None:
        places = self._places_of(call)
        with self._backend.column_call():
            self._note_namespace(call.namespaces)
            self._store.delete_many(self.table, *places)

    def _find_column(self, call: VectorisedCall) -> pa.BooleanArray:
        places = self._places_of(call)
        with self._backend.column_call():
            found, offsets, data = self._store.get_many(self.table, *places)
            now = self._call_time() if self.ttl else 0
            shows = self.shows_expired
            valid, *_ = seen_values(found.view(np.uint8), offsets, data, self.ttl, now, shows, False)
        return pa.array(valid)


class RocksDbValueState(ValueHandle, RocksDbSingleState, ValueColumns):
    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.type)

    def _write_column(self, call: VectorisedCall, column: Column) -> None:
        runs, places = serialised_column(column.values), self._places_of(call)
        with self._backend.column_call():
            stamps = self._stamps(len(call))
            self._note_namespace(call.namespaces)
            entries = runs if stamps is None else join_values(*runs, stamps)
            nulls = None if column.nulls is None else column.nulls.view(np.uint8)
            self._store.put_many(self.table, *places, *entries, nulls)


class RocksDbAddingState(RocksDbSingleState, AddingColumns):
    # Of the handles.
    _add_in_order: Callable[..., None]

    def plan_calls(self) -> None:
        if self.descriptor.kind != "folding" and not holds_references(self.codec.declared):
            self.plan = adding_plan(self.descriptor)

    def _add_column(
        self, call: VectorisedCall, column: Column, plan: AddPlan, return_changed: bool
    ) -> Changed | None:
        touched = _touched(call.keys, call.namespaces)
        with self._backend.column_call():
            self._note_namespace(call.namespaces)
            table = self._added(call, column, plan, touched)
            if not return_changed:
                return None
            touched = touched.chosen(np.argsort(self._backend.groups_of(touched.keys), kind="stable"))
            accumulators, found = batch_kernels.get_many(table, touched.keys, namespace=touched.numbers)
        keys, results = decoded_keys(self._backend._encoder, touched.keys), self._shown(accumulators, found)
        return Changed(keys, results, None if touched.spaces is None else touched.spaces.shown())

    def _add_each(self, rows: Any, values: list[Any]) -> None:
        """Call `add` row by row, within a vectorised call; the keys' values are read before, in order."""
        if len(rows) < FEWEST_IN_ORDER:
            super()._add_each(rows, values)
            return
        places = self._places(rows.keys.encoded, rows.namespaces)
        order, numbers = order_and_places(*places)
        distinct = picked(*places, order)
        stored = self._store.get_many(self.table, *distinct)
        self._add_in_order(
            rows.keys.canonical,
            rows.namespace_of_each(),
            rows.times,
            values,
            is_decoded(self._column_types()[0]),
            numbers,
            distinct,
            stored,
        )

    def _added(
        self, call: VectorisedCall, column: Column, plan: AddPlan, touched: _DistinctKeys
    ) -> StateTable:
        """Add the rows of a call, within a `column_call`; return a table of the values that their keys have then."""
        declared = self.codec.declared
        touched = self._ordered(touched)
        places = self._places(touched.keys, touched.spaces)
        found, offsets, data = self._store.get_many(self.table, *places)
        now = self._call_time() if self.ttl else 0
        lifetime, width = self.ttl, self.codec.width
        there, _, _, ends, values = seen_values(
            found.view(np.uint8), offsets, data, lifetime, now, False, False, width
        )
        known, numbers = touched.chosen(np.flatnonzero(there)), _number_in_table(call.namespaces)

        def added(layout: Any, before: Any, new: Any, plan: AddPlan) -> tuple[StateTable, Any, Array]:
            """The keys' values after the rows were added; and the table that holds them."""
            table = StateTable(
                StateCore(),
                key="bytes" if isinstance(touched.keys, tuple) else "int",
                value=layout,
                plan=self._backend.codec.plan,
                namespaces=isinstance(touched.numbers, np.ndarray),
                max_parallelism=min(128, 1 + len(call) // _ROWS_OF_A_PART),
            )
            if there.any():
                batch_kernels.update_many(table, known.keys, before, namespace=known.numbers)
            aggregation_kernels.add_many(table, call.keys, new, plan, nulls=column.nulls, namespace=numbers)
            return table, *batch_kernels.get_many(table, touched.keys, namespace=touched.numbers)

        before = stored_column(chosen_rows((ends, values), there), declared)
        layout = value_codec(declared, self.descriptor.name).layout
        table, became, is_there = added(layout, before, column.values, plan)
        entries = serialised_column(became)
        stamps = self._stamps(count_of(touched.keys))
        if stamps is not None and self.in_event_time:
            old = split_values(*chosen_rows((offsets, data), there), True, False)[0]
            _, stamps, _ = added("long", old, self._stamps(len(call)), AddPlan("max", "long"))
        if stamps is not None:
            entries = join_values(*entries, stamps)
        self._store.put_many(
            self.table, *places, *entries, None if is_there.all() else (~is_there).view(np.uint8)
        )
        return table

    def _ordered(self, touched: _DistinctKeys) -> _DistinctKeys:
        """In the order of the database, if the keys are numbers in one namespace."""
        keys = touched.keys
        if isinstance(keys, tuple) or isinstance(touched.numbers, np.ndarray):
            return touched
        keys = keys[np.argsort(keys)]
        return touched._replace(keys=keys[np.argsort(self._backend.groups_of(keys), kind="stable")])


class RocksDbReducingState(AddingHandle, RocksDbAddingState, ReducingState):
    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.type)

    def merged(self, a: bytes, b: bytes) -> bytes | None:
        return self._merge_by(self.descriptor.reduce, a, b)


class RocksDbAggregatingState(AddingHandle, RocksDbAddingState, AggregatingState):
    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.accumulator_type)
        where = f"state {descriptor.name!r}"
        self._take_inputs(None if descriptor.type is None else value_bytes(descriptor.type, where))

    def merged(self, a: bytes, b: bytes) -> bytes | None:
        return self._merge_by(self.descriptor.aggregate.merge, a, b)


class RocksDbFoldingState(AddingHandle, RocksDbAddingState, FoldingState):
    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.type)
