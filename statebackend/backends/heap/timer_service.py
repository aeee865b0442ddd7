"""Timers over the compiled index: the Python half. Checkpoints see them as rows of a map state, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from statebackend._core.handles.map_table_handle import MapTableHandle
from statebackend._core.handles.time_index import TIMER_BYTES, TimerHandle, TimerIndex
from statebackend._core.handles.timer_columns import change_timers, take_timers
from statebackend._core.snapshots.changes import changed_entries, entries_before
from statebackend._core.tables.state_table import StateTable
from statebackend.backends.heap.state_handles import make_handle, table_shape
from statebackend.backends.heap.table_reader import ExpiryFilter, RowCopy, TableReader, TableRows
from statebackend.checkpoint.format import GroupedBatch, Op
from statebackend.checkpoint.keyed.row_source import phases
from statebackend.columns.codec_factory import value_codec
from statebackend.columns.nested_columns import decoded_keys, encoded_keys
from statebackend.columns.stored_columns import Array
from statebackend.keys import NamespaceColumn, canonical_list, count_of, namespace_column
from statebackend.state import (
    DOMAINS,
    DueTimers,
    TimerRow,
    Timers,
    check_lengths,
    checked_domain,
    checked_time,
    timer_state,
    timestamp_column,
)

if TYPE_CHECKING:
    from statebackend._core.handles.time_index import TimerHandle
    from statebackend.backends.heap.keyed_backend import HeapKeyedBackend


class TimerReader(TableReader):
    """The timers of one domain: those in the entries of their keys, and entries of the map state next to them."""

    def __init__(self, backend: HeapKeyedBackend, handle: TimerHandle) -> None:
        super().__init__(backend, handle)
        self._of_keys = [table for table in (handle.plain, handle.spaced) if table is not None]
        self.tables = [*self._of_keys, *self.tables]

    @property
    def has_namespaces(self) -> bool:
        return len(self._of_keys) > 1

    def parts_of(self, view: Any, first: int, last: int, left_out: ExpiryFilter | None) -> list[TableRows]:
        parts: list[TableRows] = [
            _TimerRows(self, view.rows(table, first, last), None, left_out) for table in self._of_keys
        ]
        return parts + super().parts_of(view, first, last, left_out)

    def changes_since(self, mark: Any) -> list[RowCopy]:
        """The changes since a mark: first all timers that have gone, as others may have come in their places."""
        removed, put = [], []
        for table in self._of_keys:
            before = entries_before(table, mark)
            removed.append(RowCopy(self, Op.REMOVE, before.keys(), before.groups, _times(before.columns())))
            rows = changed_entries(table, mark)
            columns = rows.take(rows.is_live).columns()
            put.append(RowCopy(self, Op.PUT, columns, rows.groups[rows.is_live], _times(columns)))
        for maps in self.maps:
            rows = changed_entries(maps.entries, mark)
            gone, there = rows.take(~rows.is_live), rows.take(rows.is_live)
            removed.append(RowCopy(self, Op.REMOVE, gone.keys_above(), gone.groups, gone.keys()))
            put.append(RowCopy(self, Op.PUT, there.keys_above(), there.groups, there.columns()))
        return removed + put


def _times(columns: dict[str, Array]) -> dict[str, Array]:
    """The columns that entries of the map state would have: the time for a map key, nothing for a value."""
    times = columns["value"].view("<i8")[:, 0]
    return {"key": np.ascontiguousarray(times), "value": np.zeros(len(times), dtype=bool)}


class _TimerRows(TableRows):
    def take(self, rows: Any) -> TableRows:
        return _TimerRows(self.state, self._entries.take(rows), None, self._left_out)

    def copied(self) -> RowCopy:
        columns = self._entries.columns()
        return RowCopy(self.state, None, columns, self.groups, _times(columns), self._left_out)


class HeapTimers(TimerIndex, Timers):
    """The timers of a heap backend. A domain costs nothing before its first timer."""

    def __init__(self, backend: HeapKeyedBackend) -> None:
        TimerIndex.__init__(self, backend, self._make, checked_time, checked_domain)
        Timers.__init__(self, backend)

    def _make(self, domain: str) -> TimerHandle:
        # Not one of the backend's states: those belong to the user.
        backend, descriptor = self._backend, timer_state(domain)
        codec = value_codec(descriptor.stored_types()["value"], f"state {descriptor.name!r}")

        def make_table(namespaces: bool) -> StateTable:
            backend.shape_changes += 1
            return StateTable(backend.core, namespaces=namespaces, value=TIMER_BYTES, **table_shape(backend))

        def make_more() -> MapTableHandle:
            made: MapTableHandle = make_handle(MapTableHandle, backend, descriptor)
            return made

        return TimerHandle(backend, descriptor, codec, make_table, make_more=make_more)

    def _change_many(self, keys: Any, timestamps: Any, domain: str, namespaces: Any, registers: bool) -> None:
        backend = self._backend
        backend._check_open()
        backend.read_clock_once()
        canonical = encoded_keys(backend._encoder, keys)
        times = timestamp_column(timestamps)
        spaces = None if namespaces is None else namespace_column(namespaces)
        check_lengths(range(count_of(canonical)), times, *(() if spaces is None else (spaces.numbers,)))
        backend.groups_of(canonical)
        handle = self._made(domain, registers)
        if handle is None:
            return
        numbers, names = (None, []) if spaces is None else (spaces.numbers, spaces.distinct)
        with backend._vectorised_call(()):
            self._change(handle, canonical, times, numbers, names, registers)

    def _change(
        self,
        handle: TimerHandle,
        canonical: Any,
        times: Any,
        numbers: Any,
        names: list[bytes],
        registers: bool,
    ) -> None:
        ints, offsets, data = (None, *canonical) if isinstance(canonical, tuple) else (canonical, None, None)
        change_timers(self._backend, handle, ints, offsets, data, times, numbers, names, registers)

    def load_rows(self, domain: str, rows: Iterable[GroupedBatch]) -> None:
        """Apply rows of a checkpoint in order, in a domain without timers. O(n log timers)."""
        backend = self._backend
        saved = backend._save_key()
        try:
            for grouped in rows:
                for op, batch in phases(grouped):
                    if op is Op.CLEAR:
                        self._clear(domain, batch)
                    else:
                        self._apply(domain, batch, registers=op is Op.PUT)
        finally:
            backend._restore_key(saved)

    def _apply(self, domain: str, rows: pa.RecordBatch, *, registers: bool) -> None:
        backend = self._backend
        canonical = encoded_keys(backend._encoder, rows["key"])
        backend.groups_of(canonical)
        handle = self._made(domain, True)
        assert handle is not None
        numbers, names = None, []
        backend._namespace = b""  # of rows without a column of namespaces, in any namespace of earlier calls
        if "namespace" in rows.schema.names:
            spaces = rows["namespace"].dictionary_encode()
            numbers = spaces.indices.to_numpy().astype(np.int64)
            names = spaces.dictionary.to_pylist()
        self._change(handle, canonical, rows["map_key"].to_numpy(), numbers, names, registers)

    def _clear(self, domain: str, rows: pa.RecordBatch) -> None:
        """Delete all timers of some keys in their namespaces."""
        backend = self._backend
        keys = canonical_list(encoded_keys(backend._encoder, rows["key"]))
        has_names = "namespace" in rows.schema.names
        names = rows["namespace"].to_pylist() if has_names else [b""] * len(keys)
        for key, name in zip(keys, names, strict=True):
            backend._key, backend._key_group, backend._namespace = key, backend._group_of(key), name
            for timestamp in self._pending(domain):
                self._delete(timestamp, domain)

    def _take_columns(self, now: int, domain: str, most: int) -> DueTimers:
        backend, handle = self._backend, self._made(domain)
        if handle is None:
            return super()._take_columns(now, domain, most)
        saved = backend._save_key()
        try:
            keys, times, numbers, names = take_timers(backend, handle, now, most)
        finally:
            if not backend._closed:
                backend._restore_key(saved)
        return DueTimers(
            decoded_keys(backend._encoder, keys), pa.array(times), NamespaceColumn(numbers, names).shown()
        )

    def _handles(self) -> dict[str, TimerHandle]:
        """What holds the timers, by domain; only of domains that have had a timer."""
        found = {domain: self._made(domain) for domain in DOMAINS}
        return {domain: handle for domain, handle in found.items() if handle is not None}

    def _all_rows(self, first_group: int, last_group: int) -> Iterable[TimerRow]:
        for domain, handle in self._handles().items():
            for row in handle._rows(first_group, last_group):
                yield TimerRow(domain, *row)

    def _settle(self) -> None:
        """Let the rollback itself pay for the repair of the queues."""
        for handle in self._handles().values():
            handle._settle()

    def _close(self) -> None:
        """Release the core before the backend closes it."""
        for handle in self._handles().values():
            handle._close()

    def _metrics(self) -> dict[str, Any]:
        return {domain: handle._metrics() for domain, handle in self._handles().items()}
