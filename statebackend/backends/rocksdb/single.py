"""Handles of states with one value for a key: value, reducing, aggregating and folding.

>>> from statebackend.backends.rocksdb import RocksDbBackend
>>> from statebackend.state import ReducingStateDescriptor
>>> keyed = RocksDbBackend().create_keyed_backend(int)
>>> total = keyed.get_reducing_state(ReducingStateDescriptor("total", "sum", int))
>>> keyed.set_current_key(1)
>>> total.add(2); total.add(3)
>>> total.get()
5
>>> keyed.close()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend._core.batches import adding_kernels, kernels
from statebackend._core.rocksdb.single_handles import (
    AggregatingHandle,
    FoldingHandle,
    ReducingHandle,
    ValueHandle,
)
from statebackend._core.rocksdb.sorted_rows import order_and_places, picked
from statebackend._core.rocksdb.value_layouts import join_values, seen_values, split_values
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_core import StateCore
from statebackend._core.tables.state_table import StateTable
from statebackend.backends.rocksdb.states import RocksDbState
from statebackend.backends.rocksdb.vectorised import Array, SingleColumns, ValueColumns, chosen_rows
from statebackend.columns.additions import (
    aggregate_plan,
    decoded_values,
    is_decoded,
    operands,
    reduction_plan,
    results_of,
)
from statebackend.columns.codec_choice import value_bytes, value_codec
from statebackend.columns.nested_columns import decoded_keys
from statebackend.columns.stored_columns import Column, arrow_column, serialised_column, stored_column
from statebackend.keys import NamespaceColumn, canonical_column, count_of, take_rows
from statebackend.state import (
    AggregatingState,
    FoldingState,
    NamedAggregate,
    ReducingState,
    ValueState,
    check_lengths,
)
from statebackend.types import Type

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed import RocksDbKeyedBackend

#: Fewer rows than these are read one by one.
FEWEST_IN_ORDER = 32
#: A table for so many rows has a part more, so that kernels go over one after the other.
_ROWS_OF_A_PART = 4096


class _Touched(NamedTuple):
    """The distinct keys and namespaces of a call, in the order of their first rows."""

    keys: Any
    #: None: the call names no namespaces.
    spaces: NamespaceColumn | None
    #: The number of each one's namespace in a table of the call; 0 if all are in the same.
    numbers: int | Array

    def chosen(self, rows: Array) -> _Touched:
        """Some of them, for a table."""
        numbers = self.numbers[rows] if isinstance(self.numbers, np.ndarray) else self.numbers
        return self._replace(keys=chosen_rows(self.keys, rows), numbers=numbers)


def _number_in_table(spaces: NamespaceColumn | None) -> int | Array:
    if spaces is None or len(spaces.distinct) == 1:
        return 0
    return (spaces.numbers + 1).astype(np.uint32)


def _touched(canonical: Any, spaces: NamespaceColumn | None) -> _Touched:
    """
    >>> _touched(np.array([7, 3, 7]), None).keys.tolist()
    [7, 3]
    >>> from statebackend.keys import namespace_column
    >>> _touched(np.array([7, 3, 7, 7]), namespace_column(["a", "a", "b", "a"])).numbers.tolist()
    [1, 1, 2]
    """
    numbers = _number_in_table(spaces)
    if not isinstance(numbers, np.ndarray):
        keys = _distinct(canonical)
        return _Touched(keys, None if spaces is None else spaces.take(np.arange(count_of(keys))), 0)
    both = (
        canonical_column(canonical).dictionary_encode().indices.to_numpy().astype(np.int64) * 2**32 + numbers
    )
    _, first = np.unique(both, return_index=True)
    first.sort()
    return _Touched(take_rows(canonical, first), spaces.take(first), numbers[first])  # type: ignore[union-attr]


def _distinct(canonical: Any) -> Any:
    """The distinct keys of a column, in the order of their first rows.

    >>> _distinct(np.array([7, 3, 7])).tolist()
    [7, 3]
    """
    array = canonical_column(canonical).unique()
    if not isinstance(canonical, tuple):
        return array.to_numpy()
    _, ends, kept = array.buffers()
    return (
        np.frombuffer(ends, np.int64, len(array) + 1),
        np.frombuffer(kept, np.uint8) if kept is not None else np.empty(0, np.uint8),
    )


class AddingColumns(SingleColumns):
    """Reducing, aggregating and folding states."""

    # Of the handles.
    _add_in_order: Callable[..., None]

    def _plan(self) -> AddPlan | None:
        """What the compiled core adds by; None if Python has to call a function for each row."""
        if self._goes_by_rows:
            return None
        kind, descriptor = self.descriptor.kind, self.descriptor
        if kind == "reducing":
            return reduction_plan(descriptor.reduce)
        return aggregate_plan(descriptor.aggregate) if kind == "aggregating" else None

    def _results(self, accumulators: Any, found: Array) -> pa.Array:
        """What `get` makes of accumulators in stored form; null where there are none."""
        if self.descriptor.kind == "aggregating":
            return results_of(self.descriptor.aggregate, accumulators, found)
        return arrow_column(accumulators, found, self.codec.declared)

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        descriptor = self.descriptor
        by_rows = descriptor.kind == "aggregating" and not isinstance(descriptor.aggregate, NamedAggregate)
        if self._by_rows(times) or by_rows:
            return super().get_many(keys, namespaces=namespaces, times=times)  # type: ignore[misc]
        places = self._places(*self._key_column(keys, namespaces, times))
        with self._backend.column_call():
            found, runs = self._read(places, False)
        return self._results(stored_column(runs, self.codec.declared), found)

    def add_many(
        self,
        keys: Any,
        values: Any,
        return_changed: bool = False,
        *,
        namespaces: Any = None,
        times: Any = None,
    ) -> Any:
        plan = None if self._at_own_times(times) else self._plan()
        if plan is None:
            # Row by row: while a user's function runs, its key and namespace are current.
            return super().add_many(keys, values, return_changed, namespaces=namespaces, times=times)  # type: ignore[misc]
        backend = self._backend
        canonical, spaces = self._key_column(keys, namespaces, times)
        with self._named():
            count, column = operands(values, self.descriptor.type, plan)
        check_lengths(range(count_of(canonical)), range(count))
        touched = _touched(canonical, spaces)
        with backend.column_call():
            self._note_namespace(spaces)
            table = self._added(canonical, spaces, column, plan, touched)
            if not return_changed:
                return None
            accumulators, found = kernels.get_many(table, touched.keys, namespace=touched.numbers)
        changed = decoded_keys(backend.encoder, touched.keys), self._results(accumulators, found)
        if touched.spaces is None:
            return changed
        return changed[0], touched.spaces.shown(), changed[1]

    def _added_values(self, values: Any, declared: Type | None) -> list[Any]:
        if not is_decoded(declared):
            return super()._added_values(values, declared)  # type: ignore[misc]
        with self._named():
            return decoded_values(values, declared)

    def _add_each(self, rows: Any, values: list[Any]) -> None:
        """Call `add` row by row, within a vectorised call; what the keys have is read before, in order."""
        if len(rows) < FEWEST_IN_ORDER:
            super()._add_each(rows, values)  # type: ignore[misc]
            return
        places = self._places(rows.keys.encoded, rows.namespaces)
        order, numbers = order_and_places(*places)
        distinct = picked(*places, order)
        stored = self._store.get_many(self.table, *distinct)
        declared = None if self.descriptor.kind == "folding" else self.descriptor.type
        self._add_in_order(
            rows.keys.canonical,
            rows.namespace_of_each(),
            rows.times,
            values,
            is_decoded(declared),
            numbers,
            distinct,
            stored,
        )

    def _added(
        self, canonical: Any, spaces: NamespaceColumn | None, column: Column, plan: AddPlan, touched: _Touched
    ) -> StateTable:
        """Add the rows of a call, within a `column_call`; a table of what their keys have then."""
        declared = self.codec.declared
        touched = self._ordered(touched)
        places = self._places(touched.keys, touched.spaces)
        found, offsets, data = self._store.get_many(self.table, *places)
        now = 0 if self.ttl is None else self._backend.call_time(self._in_event_time)
        lifetime, width = self.ttl or 0, self.codec.width
        there, _, _, ends, values = seen_values(
            found.view(np.uint8), offsets, data, lifetime, now, False, False, width
        )
        known, numbers = touched.chosen(there), _number_in_table(spaces)

        def added(layout: Any, before: Any, new: Any, plan: AddPlan) -> tuple[StateTable, Any, Array]:
            """What the keys have when the rows are added to what they had before; and the table that tells it."""
            table = StateTable(
                StateCore(),
                key="bytes" if isinstance(touched.keys, tuple) else "int",
                value=layout,
                plan=self._backend.codec.plan,
                namespaces=isinstance(touched.numbers, np.ndarray),
                max_parallelism=min(128, 1 + count_of(canonical) // _ROWS_OF_A_PART),
            )
            if there.any():
                kernels.update_many(table, known.keys, before, namespace=known.numbers)
            adding_kernels.add_many(table, canonical, new, plan, nulls=column.nulls, namespace=numbers)
            return table, *kernels.get_many(table, touched.keys, namespace=touched.numbers)

        before = stored_column(chosen_rows((ends, values), there), declared)
        with self._named():
            layout = value_codec(declared, self.descriptor.name).layout
            table, became, is_there = added(layout, before, column.values, plan)
        entries = serialised_column(became)
        stamps = self._stamps(count_of(touched.keys))
        if stamps is not None and self._in_event_time:
            old = split_values(*chosen_rows((offsets, data), there), True, False)[0]
            _, stamps, _ = added("long", old, self._stamps(count_of(canonical)), AddPlan("max", "long"))
        if stamps is not None:
            entries = join_values(*entries, stamps)
        self._store.put_many(
            self.table, *places, *entries, None if is_there.all() else (~is_there).view(np.uint8)
        )
        return table

    def _ordered(self, touched: _Touched) -> _Touched:
        """In the order of the database, if the keys are numbers in one namespace."""
        keys = touched.keys
        if isinstance(keys, tuple) or isinstance(touched.numbers, np.ndarray):
            return touched
        keys = keys[np.argsort(keys)]
        return touched._replace(keys=keys[np.argsort(self._backend.groups_of(keys), kind="stable")])


class RocksDbSingleState(SingleColumns, RocksDbState):
    """One value for a key: its timestamp, if there is a time to live, and its bytes."""

    unexpired: Callable[[bytes], Any]
    stored: Callable[..., bytes]

    def _merge_by(self, merge: Callable[[Any, Any], Any], a: bytes, b: bytes) -> bytes | None:
        first, second = self.unexpired(a), self.unexpired(b)
        if first is None and second is None:
            return None
        if first is None or second is None:
            return self.stored(second if first is None else first)
        latest = max(self.stamps_of(a) + self.stamps_of(b)) if self._in_event_time else None
        return self.stored(self._backend._run(merge, first, second), latest)


class RocksDbValueState(ValueHandle, ValueColumns, RocksDbSingleState, ValueState):
    """A value."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.type)


class RocksDbReducingState(ReducingHandle, AddingColumns, RocksDbSingleState, ReducingState):
    """A reduced value."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.type)

    def merged(self, a: bytes, b: bytes) -> bytes | None:
        return self._merge_by(self.descriptor.reduce, a, b)


class RocksDbAggregatingState(AggregatingHandle, AddingColumns, RocksDbSingleState, AggregatingState):
    """An accumulator of an aggregate."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.accumulator_type)
        where = f"state {descriptor.name!r}"
        self._take_inputs(None if descriptor.type is None else value_bytes(descriptor.type, where))

    def merged(self, a: bytes, b: bytes) -> bytes | None:
        return self._merge_by(self.descriptor.aggregate.merge, a, b)


class RocksDbFoldingState(FoldingHandle, AddingColumns, RocksDbSingleState, FoldingState):
    """An accumulator of a fold."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.type)
