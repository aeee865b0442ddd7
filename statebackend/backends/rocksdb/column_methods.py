"""The vectorised methods: whole columns through `multi_get` and batches of writes, atomic.

Arrow and numpy columns of values, lists and map entries make no Python object per row. Reads of states with a time to
live remove and renew what they find in one call, too. States of objects (PICKLE and a user's own serializer) go row by
row, as `statebackend.state.scalar_fallback` does it, and so do rows that go by their own times, and changes of a
collection that somebody iterates over. Reductions and aggregates are in `single_state.py`.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import pyarrow as pa

from statebackend._core.rocksdb.handles.value_layouts import (
    are_expired,
    join_lists,
    join_values,
    seen_values,
    set_stamps,
    split_lists,
)
from statebackend._core.rocksdb.overlay.composite_keys import compose_many
from statebackend.columns.codec_factory import holds_references
from statebackend.columns.stored_columns import Array, Column, serialised_column, stored_column
from statebackend.columns.vectorised_call import (
    ColumnsState,
    ListColumns,
    MapColumns,
    SingleColumns,
    ValueColumns,
    VectorisedCall,
)
from statebackend.keys import NamespaceColumn, canonical_list

Runs = tuple[Array, Array]


class RocksDbColumns(ColumnsState):
    """The shared part: the stored form of keys and values."""

    # Of the handles.
    _backend: Any
    _store: Any
    codec: Any
    table: Any
    ttl: int
    in_event_time: bool
    shows_expired: bool
    refreshes: bool
    expired_on_read: int
    is_watched: bool
    _shown: Any

    def _by_rows(self, call: str, times: Any) -> bool:
        if call == "clear":
            return super()._by_rows(call, times)
        holds_objects = call != "exists" and holds_references(self.codec.declared)
        return holds_objects or self._at_own_times(times) or super()._by_rows(call, times)

    def _at_own_times(self, times: Any) -> bool:
        """Return True if each row uses its own time."""
        return times is not None and self.ttl != 0

    def _begin(self, own: Array | None) -> None:
        self._backend.begin_call()

    def _places(self, canonical: Any, spaces: NamespaceColumn | None, map_keys: Any = None) -> Runs:
        """Composite keys; raises for a key that is not served here."""
        if spaces is None or len(spaces.distinct) == 1:
            namespaces = self._backend._namespace if spaces is None else spaces.distinct[0]
        else:
            namespaces = spaces.runs()
        return compose_many(self._backend.groups_of(canonical), canonical, namespaces, map_keys)

    def _places_of(self, call: VectorisedCall, map_keys: Any = None) -> Runs:
        return self._places(call.keys, call.namespaces, map_keys)

    def _note_namespace(self, spaces: NamespaceColumn | None) -> None:
        if self._backend._namespace if spaces is None else any(spaces.distinct):
            self.table.note_namespaces()

    def _call_time(self) -> int:
        now: int = self._backend.call_time(self.in_event_time)
        return now

    def _stamps(self, rows: int) -> Array | None:
        """The timestamps of values that the running call writes."""
        if not self.ttl:
            return None
        return np.full(rows, self._call_time(), dtype=np.int64)

    def _read(self, places: Runs, is_map_entry: bool) -> tuple[Array, Runs]:
        """Which of many places have a value that may be seen and is not None; and the values, zeros for the rest.

        What is dead is removed, and what is seen gets the time, if reads give it. Within a `column_call`.
        """
        found, offsets, data = self._store.get_many(self.table, *places)
        now = self._call_time() if self.ttl else 0
        valid, old, other, ends, values = seen_values(
            found.view(np.uint8),
            offsets,
            data,
            self.ttl,
            now,
            self.shows_expired,
            is_map_entry,
            self.codec.width,
            self._backend.dead_at(self.in_event_time),
        )
        if old.any():
            first = self._remove_expired(places, old)
            valid[old & ~first] = False
        if self.refreshes:
            renewed = chosen_rows((offsets, data), other)
            set_stamps(*renewed, now)
            self._store.put_many(self.table, *chosen_rows(places, other), *renewed)
        return valid, (ends, values)

    def _read_column(self, call: VectorisedCall, map_keys: Any = None) -> pa.Array:
        places = self._places_of(call, map_keys)
        with self._backend.column_call():
            found, runs = self._read(places, map_keys is not None)
        return self._shown(stored_column(runs, self.codec.declared), found)

    def _remove_expired(self, places: Runs, old: Array) -> Array:
        """Remove what is dead; return in which rows it is met for the first time, and so for the last."""
        gone = chosen_rows(places, old)
        rows: dict[bytes, int] = {}
        for key, row in zip(canonical_list(gone), np.flatnonzero(old).tolist(), strict=True):
            rows.setdefault(key, row)
        self._store.delete_many(self.table, *gone)
        self.expired_on_read += len(rows)
        first = np.zeros(len(old), np.bool_)
        first[list(rows.values())] = True
        return first


@overload
def chosen_rows(rows: Runs, chosen: Array) -> Runs: ...
@overload
def chosen_rows(rows: Array, chosen: Array) -> Array: ...
def chosen_rows(rows: Any, chosen: Array) -> Any:
    """Some of many rows, an array or (offsets, data)."""
    if not isinstance(rows, tuple):
        return rows[chosen]
    offsets, data = rows
    sizes = np.diff(offsets)
    ends = np.zeros(int(chosen.sum()) + 1, np.int64)
    np.cumsum(sizes[chosen], out=ends[1:])
    return ends, data[int(offsets[0]) : int(offsets[-1])][np.repeat(chosen, sizes)]


class RocksDbSingleColumns(RocksDbColumns, SingleColumns):
    """States with one value for a key."""

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


class RocksDbValueColumns(RocksDbSingleColumns, ValueColumns):
    """A value."""

    def _write_column(self, call: VectorisedCall, column: Column) -> None:
        runs, places = serialised_column(column.values), self._places_of(call)
        with self._backend.column_call():
            stamps = self._stamps(len(call))
            self._note_namespace(call.namespaces)
            entries = runs if stamps is None else join_values(*runs, stamps)
            nulls = None if column.nulls is None else column.nulls.view(np.uint8)
            self._store.put_many(self.table, *places, *entries, nulls)


class RocksDbListColumns(RocksDbColumns, ListColumns):
    """A list."""

    def _by_rows(self, call: str, times: Any) -> bool:
        return call == "clear" or (call == "add" and self.is_watched) or super()._by_rows(call, times)

    def _append_column(self, call: VectorisedCall, elements: Any) -> None:
        runs, places = serialised_column(elements), self._places_of(call)
        with self._backend.column_call():
            each = np.arange(len(call) + 1, dtype=np.int64)
            lists = join_lists(each, *runs, self.codec.width, self._stamps(len(call)))
            self._note_namespace(call.namespaces)
            self._store.merge_many(self.table, *places, *lists)

    def _lists_column(self, call: VectorisedCall) -> pa.ListArray:
        places = self._places_of(call)
        with self._backend.column_call():
            offsets, elements = self._read_lists(places)
        return self._shown(offsets, stored_column(elements, self.codec.declared))

    def _find_column(self, call: VectorisedCall) -> pa.BooleanArray:
        places = self._places_of(call)
        with self._backend.column_call():
            _, ends, data = self._store.get_many(self.table, *places)
            offsets, stamps, _, _ = split_lists(ends, data, self.codec.width, self.ttl != 0)
            left = np.diff(offsets)
            if self.ttl and stamps is not None and not self.shows_expired:
                left = _count_chosen(~are_expired(stamps, self.ttl, self._call_time()), offsets)
        return pa.array(left > 0)

    def _read_lists(self, places: Runs) -> tuple[Array, Runs]:
        """The lists of many places, as reads see them: offsets, and elements. Within a `column_call`.

        Lists of which all is dead are removed, and others get the time, if reads give it.
        """
        found, ends, data = self._store.get_many(self.table, *places)
        width = self.codec.width
        offsets, stamps, ends, data = split_lists(ends, data, width, self.ttl != 0)
        runs = ends, data
        if not self.ttl or stamps is None:
            return offsets, runs
        now, dead_at = self._call_time(), self._backend.dead_at(self.in_event_time)
        is_left = ~are_expired(stamps, self.ttl, now)
        stays = is_left if dead_at is None else is_left | ~are_expired(stamps, self.ttl, dead_at)
        n_left = _count_chosen(is_left, offsets)
        gone = found & (_count_chosen(stays, offsets) == 0)
        is_shown = np.ones(len(is_left), np.bool_) if self.shows_expired else is_left
        if gone.any():
            first = self._remove_expired(places, gone & (np.diff(offsets) > 0))
            is_shown &= ~np.repeat(gone & ~first, np.diff(offsets))
        if self.refreshes and (rows := n_left > 0).any():
            if self.shows_expired and (n_left < np.diff(offsets)).any():
                # The first read of a list drops what has expired in it, so that later ones do not see it.
                of_rows = canonical_list(places)
                first_of = {key: row for row, key in reversed(list(enumerate(of_rows)))}
                again = np.array([first_of[key] != row for row, key in enumerate(of_rows)], np.bool_)
                is_shown &= is_left | ~np.repeat(again & rows, np.diff(offsets))
            stays = stays & np.repeat(rows, np.diff(offsets))
            ends = np.concatenate(([0], np.cumsum(_count_chosen(stays, offsets)[rows])))
            renewed = np.maximum(stamps, now) if self.in_event_time else np.full(len(stamps), now, np.int64)
            times = np.where(is_left, renewed, stamps)[stays]
            lists = join_lists(ends, *chosen_rows(runs, stays), width, times)
            self._store.put_many(self.table, *chosen_rows(places, rows), *lists)
        ends = np.concatenate(([0], np.cumsum(_count_chosen(is_shown, offsets))))
        return ends, chosen_rows(runs, is_shown)


def _count_chosen(chosen: Array, offsets: Array) -> Array:
    """How many elements of each list are chosen."""
    before: Array = np.concatenate(([0], np.cumsum(chosen)))
    counts: Array = before[offsets[1:]] - before[offsets[:-1]]
    return counts


class RocksDbMapColumns(RocksDbColumns, MapColumns):
    """A map."""

    def _by_rows(self, call: str, times: Any) -> bool:
        if call == "exists":
            return self.ttl != 0 and not self.shows_expired
        if call == "remove":
            return self.is_watched or self._at_own_times(times)
        return call == "clear" or (call == "put" and self.is_watched) or super()._by_rows(call, times)

    def _find_column(self, call: VectorisedCall) -> pa.BooleanArray:
        places = self._places_of(call)
        with self._backend.column_call():
            return pa.array(self._store.have_rows(self.table, *places))

    def _put_column(self, call: VectorisedCall, inner: Any, column: Column) -> None:
        runs, places = serialised_column(column.values), self._places_of(call, inner)
        with self._backend.column_call():
            flags = None if column.nulls is None else column.nulls.view(np.uint8)
            entries = join_values(*runs, self._stamps(len(call)), flags, True)
            self._note_namespace(call.namespaces)
            self._store.put_many(self.table, *places, *entries)

    def _remove_column(self, call: VectorisedCall, inner: Any) -> None:
        places = self._places_of(call, inner)
        with self._backend.column_call():
            self._note_namespace(call.namespaces)
            self._store.delete_many(self.table, *places)
