"""The handles of the heap backend: compiled scalar methods, and whole columns through the batch kernels.

Arrow and numpy columns make no Python object per row; see `stored_columns`. Rows may be in many namespaces, and have
their own times. Rows in `VOID` are in a separate table, so a call that has both kinds goes to each table with its
rows. Some states go row by row, as `statebackend.state.scalar_fallback` does it: states of objects (PICKLE and a user's
own serializer), lists with a time to live, and `clear_many` of map states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from statebackend._core.handles.adding_handle import AddingHandle
from statebackend._core.handles.handle import Handle
from statebackend._core.handles.list_table_handle import ListTableHandle
from statebackend._core.handles.map_table_handle import MapTableHandle
from statebackend._core.handles.single_handle import ValueHandle
from statebackend._core.kernels import (
    aggregation_kernels,
    batch_kernels,
    gather_kernels,
    map_kernels,
    ttl_kernels,
)
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.map_table import MapTable
from statebackend._core.tables.state_table import StateTable
from statebackend.checkpoint.keyed.description import value_role
from statebackend.columns.codec_factory import key_codec, value_codec
from statebackend.columns.nested_columns import decoded_keys
from statebackend.columns.stored_columns import Array, Column
from statebackend.columns.vectorised_call import (
    AddingColumns,
    ColumnsState,
    ListColumns,
    MapColumns,
    SingleColumns,
    ValueColumns,
    VectorisedCall,
    adding_plan,
    is_decoded,
)
from statebackend.keys import canonical_column, count_of, numbers_of, take_rows
from statebackend.state import (
    AggregatingState,
    AggregatingStateDescriptor,
    Changed,
    FoldingState,
    ReducingState,
    StateDescriptor,
)

if TYPE_CHECKING:
    from statebackend.backends.heap.keyed_backend import HeapKeyedBackend


@dataclass(frozen=True)
class TableCall:
    """The rows of a call that are in one table: those in `VOID`, or those in other namespaces."""

    keys: Any
    #: The number of the namespace of all rows, or of each.
    namespace: int | Array
    #: As in the call.
    times: int | Array
    is_spaced: bool
    #: Their numbers among the rows of the call; None: they are all of it.
    rows: Array | None

    def __len__(self) -> int:
        return count_of(self.keys)

    def of(self, values: Any) -> Any:
        """Their values, of a column of the call; None if there is none."""
        return values if self.rows is None or values is None else take_rows(values, self.rows)

    def chosen(self, rows: Array, times_of: Array) -> TableCall:
        """Some of the rows, each at the time of another one."""
        space, times = self.namespace, self.times
        return replace(
            self,
            keys=take_rows(self.keys, rows),
            namespace=space[rows] if isinstance(space, np.ndarray) else space,
            times=times[times_of] if isinstance(times, np.ndarray) else times,
        )


class HeapColumns(ColumnsState):
    """The shared part: the tables of rows, their times, and the steps of all kinds."""

    __slots__ = ()

    # Provided by the compiled handle, which comes first in the class.
    codec: Any
    ttl: int
    plain: Any
    _current_number: Any
    _table_of: Any
    _clean_some: Any
    _count_expired: Any
    _note_times: Any

    def _by_rows(self, call: str, times: Any) -> bool:
        return (self.codec.layout == "object" and call != "exists") or super()._by_rows(call, times)

    def _begin(self, own: Array | None) -> int | Array:
        """Read the clock, and return the time that the state uses: of all rows, or of each."""
        if not self.ttl or own is None or not len(own):
            now: int = self.backend.begin_call(self)
            return now
        self.backend.read_clock_once()
        self._note_times(int(own.max()), int(own.min()))
        return own

    # --- rows and tables ---

    @contextmanager
    def _parts(self, call: VectorisedCall, assigns: bool) -> Iterator[list[TableCall]]:
        """The parts of a call. Numbers of namespaces are held meanwhile; ``assigns`` gives numbers to new ones.

        An error undoes all parts.
        """
        spaces, count = call.namespaces, call.count
        if spaces is None or not count:
            number = self._current_number() if spaces is None else 0
            yield [TableCall(call.keys, number, call.times, number != 0, None)]
            return
        names = self.backend.core.namespaces
        held = names.hold_many(spaces.distinct, assigns)
        try:
            if len(held) == 1:
                yield [TableCall(call.keys, int(held[0]), call.times, held[0] != 0, None)]
                return
            numbers = held[spaces.numbers]
            in_void = numbers == 0
            if not in_void.any():
                yield [TableCall(call.keys, numbers, call.times, True, None)]
                return
            self.backend.groups_of(call.keys)
            whole = TableCall(call.keys, numbers, call.times, True, None)
            parts = []
            for rows, is_spaced in ((np.flatnonzero(in_void), False), (np.flatnonzero(~in_void), True)):
                part = replace(whole.chosen(rows, rows), rows=rows, is_spaced=is_spaced)
                parts.append(part if is_spaced else replace(part, namespace=0))
            with self.backend._undone_on_error():
                yield parts
        finally:
            names.let_go_many(held)

    def _collect(self, call: VectorisedCall, read: Callable[[TableCall], pa.Array]) -> pa.Array:
        """The results of a read of all rows, in their order."""
        with self._naming_state(), self._parts(call, False) as parts:
            found = [read(part) for part in parts]
        if len(found) == 1:
            return found[0]
        rows = np.concatenate([part.rows for part in parts])
        return pa.concat_arrays(found).take(pa.array(np.argsort(rows)))

    def _options(self, part: TableCall) -> dict[str, Any]:
        """The options that every kernel takes."""
        has_bytes = self.codec.layout == "bytes"  # numbers take so little time that all threads are not worse
        threads = self.backend.free_threads() if has_bytes else self.backend.threads
        return {"namespace": part.namespace, "threads": threads}

    def _table(self, part: TableCall) -> Any:
        """The table of a part for reading; None if it was never written. Checks the keys' groups."""
        table = self._table_of(part.is_spaced, False)
        if table is None:
            batch_kernels.find_many(self.plain, part.keys)
        return table

    def _write(
        self, call: VectorisedCall, write: Callable[[TableCall], None], *, assigns: bool = True
    ) -> None:
        """Clean up for the rows of a call, and write each part."""
        self._clean(call)
        with self._naming_state(), self._parts(call, assigns) as parts:
            for part in parts:
                write(part)

    # --- time ---

    def _clean(self, call: VectorisedCall) -> None:
        """Clean up for as many accesses as a call has rows."""
        if self.ttl:
            self._clean_some(len(call), self.backend.called_at)

    def _expiry(self, part: TableCall) -> dict[str, Any]:
        """The options of kernels that read state with a time to live."""
        config = self.descriptor.ttl_config
        return {"now": part.times, "ttl": config.ttl, "shows_expired": config.shows_expired}

    def _removal(self, part: TableCall) -> dict[str, Any]:
        """The options of kernels that remove what is dead, and renew what they read."""
        config, backend = self.descriptor.ttl_config, self.backend
        dead_at = None
        if config.is_in_event_time:
            dead_at = part.times if backend._event_now is None else backend._event_cleaned
        return {"renews": config.renews_on_read, "dead_at": dead_at}

    # --- what several kinds do alike ---

    def _find_column(self, call: VectorisedCall) -> pa.BooleanArray:
        def look(part: TableCall) -> pa.BooleanArray:
            table = self._table(part)
            if table is None:
                return pa.array(np.zeros(len(part), dtype=bool))
            if self.ttl:
                return pa.array(
                    ttl_kernels.look_many(table, part.keys, **self._expiry(part), **self._options(part))
                )
            return pa.array(batch_kernels.find_many(table, part.keys, **self._options(part)) != 0)

        return self._collect(call, look)

    def _clear_column(self, call: VectorisedCall) -> None:
        def clear(part: TableCall) -> None:
            table = self._table(part)
            if table is not None:
                batch_kernels.remove_many(table, part.keys, **self._options(part))

        self._write(call, clear, assigns=False)


class HeapSingleColumns(HeapColumns, SingleColumns):
    __slots__ = ()

    _shown: Any

    def _read_column(self, call: VectorisedCall) -> pa.Array:
        self._clean(call)
        return self._collect(call, lambda part: self._shown(*self._read(part)))

    def _read(self, part: TableCall) -> tuple[Any, Array]:
        """Values in stored form, and a mask of the keys that were found."""
        table = self._table(part)
        if table is None:
            return gather_kernels.no_values(self.plain, len(part)), np.zeros(len(part), dtype=bool)
        if self.ttl:
            before = len(table)
            found = ttl_kernels.read_many(
                table, part.keys, **self._removal(part), **self._expiry(part), **self._options(part)
            )
            self._count_expired(before - len(table))
            return found
        return batch_kernels.get_many(table, part.keys, **self._options(part))


class HeapValueState(ValueHandle, HeapSingleColumns, ValueColumns):
    __slots__ = ()

    def _write_column(self, call: VectorisedCall, column: Column) -> None:
        def update(part: TableCall) -> None:
            table = self._table_of(part.is_spaced, True)
            values, nulls = part.of(column.values), part.of(column.nulls)
            options = {"timestamp": part.times, **self._options(part)}
            if nulls is None:
                batch_kernels.update_many(table, part.keys, values, **options)
                return
            plan = AddPlan("last", "bytes" if self.codec.layout == "bytes" else self.codec.width)
            aggregation_kernels.add_many(table, part.keys, values, plan, nulls=nulls, **options)

        self._write(call, update)


class HeapAddingColumns(HeapSingleColumns, AddingColumns):
    """A reduced value, or an accumulator."""

    __slots__ = ()

    # Provided by the compiled handle.
    _add_in_turn: Any

    def _add_each(self, rows: Any, values: list[Any]) -> None:
        are_copies = is_decoded(self._column_types()[0])
        self._add_in_turn(list(rows.keys), rows.namespace_of_each(), rows.times, values, are_copies)

    def _add_column(
        self, call: VectorisedCall, column: Column, plan: AddPlan, return_changed: bool
    ) -> Changed | None:
        self._clean(call)
        with self._parts(call, True) as parts:
            changed = [self._add_part(part, column, plan, return_changed) for part in parts]
        if not return_changed:
            return None
        rows, own_keys, results = changed[0]
        if len(changed) > 1 or column.nulls is not None:
            rows = np.concatenate([first for first, _, _ in changed])
            order = np.lexsort((rows, self.backend.groups_of(take_rows(call.keys, rows))))
            rows = rows[order]
            own_keys, results = None, pa.concat_arrays([each for _, _, each in changed]).take(pa.array(order))
        keys = decoded_keys(
            self.backend._encoder, take_rows(call.keys, rows) if own_keys is None else own_keys
        )
        namespaces = None if call.namespaces is None else call.namespaces.take(rows).shown()
        return Changed(keys, results, namespaces)

    def _add_part(self, part: TableCall, column: Column, plan: AddPlan, return_changed: bool) -> Any:
        """Add the rows of a part; if asked, return the first rows of keys and namespaces, keys or None, and results."""
        nulls, config = part.of(column.nulls), self.descriptor.ttl_config if self.ttl else None
        touched = aggregation_kernels.add_many(
            self._table_of(part.is_spaced, True), part.keys, part.of(column.values), plan, nulls=nulls,
            timestamp=part.times, ttl=self.ttl, rows=part.rows,
            in_event_time=config is not None and config.is_in_event_time,
            return_touched=return_changed and nulls is None, **self._options(part),
        )  # fmt: skip
        if not return_changed:
            return None
        found: Array | None = None
        if nulls is None:
            first, keys, values = touched
        else:
            keys, (first, last) = None, _touched(part)
            values, found = self._read(part.chosen(first, last))
        return first if part.rows is None else part.rows[first], keys, self._shown(values, found)


def _touched(part: TableCall) -> tuple[Array, Array]:
    """The first row of each distinct key and namespace, in order, and the last one of the same."""
    numbers, first = numbers_of(canonical_column(part.keys))
    if isinstance(part.namespace, np.ndarray):
        numbers, first = numbers_of(pa.array(numbers * 2**32 + part.namespace))
    last = np.empty_like(first)
    last[numbers] = np.arange(len(part))
    return first, last


class HeapListState(ListTableHandle, HeapColumns, ListColumns):
    """A list; elements are stored in chunks that only grow."""

    __slots__ = ()

    def _by_rows(self, call: str, times: Any) -> bool:
        return (self.ttl != 0 and call in ("exists", "get")) or super()._by_rows(call, times)

    def _append_column(self, call: VectorisedCall, elements: Any) -> None:
        def append(part: TableCall) -> None:
            batch_kernels.append_many(
                self._table_of(part.is_spaced, True), part.keys, part.of(elements),
                timestamp=part.times, **self._options(part),
            )  # fmt: skip

        self._write(call, append)

    def _lists_column(self, call: VectorisedCall) -> pa.ListArray:
        def read(part: TableCall) -> pa.ListArray:
            table = self._table(part)
            if table is None:
                return self._shown(*gather_kernels.lists_at(self.plain, np.zeros(len(part), dtype=np.uint32)))
            return self._shown(*batch_kernels.lists_of(table, part.keys, **self._options(part)))

        return self._collect(call, read)


class HeapMapState(MapTableHandle, HeapColumns, MapColumns):
    """A map; each entry is an entry of the table."""

    __slots__ = ()

    # Provided by the compiled handle.
    plain_map: Any
    spaced_map: Any

    def _by_rows(self, call: str, times: Any) -> bool:
        return call == "clear" or (self.ttl != 0 and call == "exists") or super()._by_rows(call, times)

    def _map(self, part: TableCall) -> Any:
        return self.spaced_map if part.is_spaced else self.plain_map

    def _read_column(self, call: VectorisedCall, inner: Any) -> pa.Array:
        self._clean(call)
        return self._collect(call, lambda part: self._shown(*self._read(part, part.of(inner))))

    def _read(self, part: TableCall, inner: Any) -> tuple[Any, Array]:
        if self._table(part) is None:
            return gather_kernels.no_values(self.plain_map.entries, len(part)), np.zeros(
                len(part), dtype=bool
            )
        expiry = {**self._removal(part), **self._expiry(part)} if self.ttl else {}
        maps = self._map(part)
        before = len(maps)
        found = map_kernels.get_many(maps, part.keys, inner, **expiry, **self._options(part))
        self._count_expired(before - len(maps))
        return found

    def _put_column(self, call: VectorisedCall, inner: Any, column: Column) -> None:
        def put(part: TableCall) -> None:
            self._table_of(part.is_spaced, True)  # makes it
            map_kernels.put_many(
                self._map(part), part.keys, part.of(inner), part.of(column.values), nulls=part.of(column.nulls),
                timestamp=part.times, ttl=self.ttl, **self._options(part),
            )  # fmt: skip

        self._write(call, put)

    def _remove_column(self, call: VectorisedCall, inner: Any) -> None:
        def remove(part: TableCall) -> None:
            if self._table(part) is not None:
                map_kernels.remove_many(self._map(part), part.keys, part.of(inner), **self._options(part))

        self._write(call, remove, assigns=False)


class HeapReducingState(AddingHandle, HeapAddingColumns, ReducingState):
    __slots__ = ()


class HeapAggregatingState(AddingHandle, HeapAddingColumns, AggregatingState):
    __slots__ = ()


class HeapFoldingState(AddingHandle, HeapAddingColumns, FoldingState):
    __slots__ = ()


_CLASSES: dict[str, type[Handle]] = {
    "value": HeapValueState,
    "list": HeapListState,
    "map": HeapMapState,
    "reducing": HeapReducingState,
    "aggregating": HeapAggregatingState,
    "folding": HeapFoldingState,
}


def make_state(backend: HeapKeyedBackend, descriptor: StateDescriptor) -> Any:
    return make_handle(_CLASSES[descriptor.kind], backend, descriptor)


def table_shape(backend: HeapKeyedBackend) -> dict[str, Any]:
    """What the tables of all states of a backend have in common."""
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
    codec = value_codec(types[value_role(descriptor.kind)], where)
    options: dict[str, Any] = {}
    if codec.layout == "object":
        options["watcher"] = backend.mutation_watcher
    shape = {**table_shape(backend), "timestamps": descriptor.ttl_config is not None}
    if descriptor.kind == "map":
        keys = key_codec(types["key"])
        options["keys_codec"] = keys
        shape["map_key"] = "int" if keys.is_int else "bytes"
        shape["nullable"] = True
    if descriptor.kind != "list":
        shape["copy_value"] = codec.copy_value
    if isinstance(descriptor, AggregatingStateDescriptor) and descriptor.type is not None:
        options["inputs"] = value_codec(descriptor.type, where)
    if descriptor.kind in ("reducing", "aggregating"):
        options["plan_of"] = adding_plan
    shape["value"] = ("list", codec.layout) if descriptor.kind == "list" else codec.layout
    table: Any = MapTable if descriptor.kind == "map" else StateTable

    def make_table(namespaces: bool) -> Any:
        backend.shape_changes += 1
        return table(backend.core, namespaces=namespaces, **shape)

    return handle(backend, descriptor, codec, make_table, **options)
