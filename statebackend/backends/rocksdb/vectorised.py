"""The vectorised methods: whole columns through `multi_get` and batches of writes, atomic.

Arrow and numpy columns of values, lists and map entries make no Python object per row. Reads of states with a time to
live remove and renew what they find in one call, too. States of objects (PICKLE and a user's own serializer) go row by
row, as `statebackend.state.vectorised` does it, and so do rows that go by their own times, and changes of a collection
that somebody iterates over. Reductions and aggregates are in `additions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, overload

import numpy as np
import pyarrow as pa

from statebackend._core.rocksdb.composite_keys import compose_many
from statebackend._core.rocksdb.value_layouts import (
    are_expired,
    join_lists,
    join_values,
    seen_values,
    set_stamps,
    split_lists,
)
from statebackend.columns.codec_choice import holds_references
from statebackend.columns.nested_columns import encoded_keys
from statebackend.columns.stored_columns import (
    Column,
    arrow_column,
    serialised_column,
    stored_column,
    value_column,
)
from statebackend.errors import SerializationError
from statebackend.keys import NamespaceColumn, canonical_list, count_of, key_encoder, namespace_column
from statebackend.state import KeyedState, check_lengths, times_of_rows, to_arrow
from statebackend.types import Type

Array = np.ndarray[Any, Any]
Runs = tuple[Array, Array]


class _Columns(KeyedState):
    """The shared part: columns of keys and values, and the stored form of both."""

    # Of the handles.
    _backend: Any
    descriptor: Any
    _store: Any
    codec: Any
    table: Any
    ttl: int | None
    _in_event_time: bool
    _shows_expired: bool
    _renews: bool
    expired_on_read: int
    is_watched: bool

    @property
    def _goes_by_rows(self) -> bool:
        return holds_references(self.codec.declared)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except SerializationError as error:
            raise error.at(f"state {self.descriptor.name!r}") from None

    def _by_rows(self, times: Any) -> bool:
        return self._goes_by_rows or self._at_own_times(times)

    def _at_own_times(self, times: Any) -> bool:
        """Whether each row goes by its own time."""
        return times is not None and self.ttl is not None

    def _key_column(self, keys: Any, namespaces: Any, times: Any) -> tuple[Any, NamespaceColumn | None]:
        """The keys in canonical form, and their namespaces; None if all are in the current one."""
        self._backend.check_open()
        canonical = encoded_keys(self._backend.encoder, keys)
        spaces = None if namespaces is None else namespace_column(namespaces)
        own = times_of_rows(self, times)
        columns = [] if spaces is None else [spaces.numbers]
        check_lengths(range(count_of(canonical)), *columns, *([] if own is None else [own]))
        self._backend.begin_call()
        return canonical, spaces

    def _value_column(self, values: Any, declared: Type, nullable: bool) -> Column:
        with self._named():
            return value_column(values, declared, nullable)

    def _places(self, canonical: Any, spaces: NamespaceColumn | None, map_keys: Any = None) -> Runs:
        """Composite keys; raises for a key that is not served here."""
        if spaces is None or len(spaces.distinct) == 1:
            namespaces = self._backend._namespace if spaces is None else spaces.distinct[0]
        else:
            namespaces = spaces.runs()
        return compose_many(self._backend.groups_of(canonical), canonical, namespaces, map_keys)

    def _note_namespace(self, spaces: NamespaceColumn | None) -> None:
        if self._backend._namespace if spaces is None else any(spaces.distinct):
            self.table.note_namespaces()

    def _stamps(self, rows: int) -> Array | None:
        """The timestamps of values that the running call writes."""
        if self.ttl is None:
            return None
        return np.full(rows, self._backend.call_time(self._in_event_time), dtype=np.int64)

    def _arrow(self, runs: Runs, valid: Array | None, declared: Type) -> pa.Array:
        return arrow_column(stored_column(runs, declared), valid, declared)

    def _read(self, places: Runs, is_map_entry: bool) -> tuple[Array, Runs]:
        """Which of many places have a value that may be seen and is not None; and the values, zeros for the rest.

        What is dead is removed, and what is seen gets the time, if reads give it. Within a `column_call`.
        """
        found, offsets, data = self._store.get_many(self.table, *places)
        now = 0 if self.ttl is None else self._backend.call_time(self._in_event_time)
        valid, old, other, ends, values = seen_values(
            found.view(np.uint8),
            offsets,
            data,
            self.ttl or 0,
            now,
            self._shows_expired,
            is_map_entry,
            self.codec.width,
            self._backend.dead_at(self._in_event_time),
        )
        if old.any():
            first = self._remove_expired(places, old)
            valid[old & ~first] = False
        if self._renews:
            renewed = chosen_rows((offsets, data), other)
            set_stamps(*renewed, now)
            self._store.put_many(self.table, *chosen_rows(places, other), *renewed)
        return valid, (ends, values)

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


class SingleColumns(_Columns):
    """States with one value for a key."""

    def clear_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> None:
        canonical, spaces = self._key_column(keys, namespaces, times)
        places = self._places(canonical, spaces)
        with self._backend.column_call():
            self._note_namespace(spaces)
            self._store.delete_many(self.table, *places)

    def exists_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.BooleanArray:
        if self._at_own_times(times):
            return super().exists_many(keys, namespaces=namespaces, times=times)
        places = self._places(*self._key_column(keys, namespaces, times))
        with self._backend.column_call():
            found, offsets, data = self._store.get_many(self.table, *places)
            now = 0 if self.ttl is None else self._backend.call_time(self._in_event_time)
            shows = self._shows_expired
            valid, *_ = seen_values(found.view(np.uint8), offsets, data, self.ttl or 0, now, shows, False)
        return pa.array(valid)


class ValueColumns(SingleColumns):
    """A value."""

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        if self._by_rows(times):
            return super().get_many(keys, namespaces=namespaces, times=times)  # type: ignore[misc]
        declared = self.descriptor.type
        places = self._places(*self._key_column(keys, namespaces, times))
        with self._backend.column_call():
            found, values = self._read(places, False)
        array = self._arrow(values, found, declared)
        default = self.descriptor.default_copy()
        if default is None or found.all():
            return array
        array = pa.concat_arrays([array, to_arrow([default], declared)])
        return array.take(pa.array(np.where(found, np.arange(len(found)), len(found))))

    def update_many(self, keys: Any, values: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._by_rows(times):
            super().update_many(keys, values, namespaces=namespaces, times=times)  # type: ignore[misc]
            return
        canonical, spaces = self._key_column(keys, namespaces, times)
        stored, nulls = self._value_column(values, self.descriptor.type, True)
        runs = serialised_column(stored)
        check_lengths(range(count_of(canonical)), range(count_of(runs)))
        places = self._places(canonical, spaces)
        with self._backend.column_call():
            stamps = self._stamps(count_of(canonical))
            self._note_namespace(spaces)
            entries = runs if stamps is None else join_values(*runs, stamps)
            self._store.put_many(
                self.table, *places, *entries, None if nulls is None else nulls.view(np.uint8)
            )


class ListColumns(_Columns):
    """A list."""

    def add_many(self, keys: Any, values: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self._by_rows(times) or self.is_watched:
            super().add_many(keys, values, namespaces=namespaces, times=times)  # type: ignore[misc]
            return
        canonical, spaces = self._key_column(keys, namespaces, times)
        stored, _ = self._value_column(values, self.descriptor.element_type, False)
        runs = serialised_column(stored)
        rows = count_of(canonical)
        check_lengths(range(rows), range(count_of(runs)))
        places = self._places(canonical, spaces)
        with self._backend.column_call():
            each = np.arange(rows + 1, dtype=np.int64)
            lists = join_lists(each, *runs, self.codec.width, self._stamps(rows))
            self._note_namespace(spaces)
            self._store.merge_many(self.table, *places, *lists)

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.ListArray:
        if self._by_rows(times):
            return super().get_many(keys, namespaces=namespaces, times=times)  # type: ignore[misc]
        places = self._places(*self._key_column(keys, namespaces, times))
        with self._backend.column_call():
            offsets, elements = self._read_lists(places)
        array = self._arrow(elements, None, self.descriptor.element_type)
        if offsets[-1] < 2**31:
            return pa.ListArray.from_arrays(offsets.astype(np.int32), array)
        return pa.LargeListArray.from_arrays(offsets, array)

    def exists_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.BooleanArray:
        if self._at_own_times(times):
            return super().exists_many(keys, namespaces=namespaces, times=times)
        places = self._places(*self._key_column(keys, namespaces, times))
        with self._backend.column_call():
            _, ends, data = self._store.get_many(self.table, *places)
            offsets, stamps, _, _ = split_lists(ends, data, self.codec.width, self.ttl is not None)
            left = np.diff(offsets)
            if self.ttl is not None and stamps is not None and not self._shows_expired:
                left = _count_chosen(~are_expired(stamps, self.ttl, self._call_time()), offsets)
        return pa.array(left > 0)

    def _call_time(self) -> int:
        return self._backend.call_time(self._in_event_time)

    def _read_lists(self, places: Runs) -> tuple[Array, Runs]:
        """The lists of many places, as reads see them: offsets, and elements. Within a `column_call`.

        Lists of which all is dead are removed, and others get the time, if reads give it.
        """
        found, ends, data = self._store.get_many(self.table, *places)
        width = self.codec.width
        offsets, stamps, ends, data = split_lists(ends, data, width, self.ttl is not None)
        runs = ends, data
        if self.ttl is None or stamps is None:
            return offsets, runs
        now, dead_at = self._call_time(), self._backend.dead_at(self._in_event_time)
        is_left = ~are_expired(stamps, self.ttl, now)
        stays = is_left if dead_at is None else is_left | ~are_expired(stamps, self.ttl, dead_at)
        n_left = _count_chosen(is_left, offsets)
        gone = found & (_count_chosen(stays, offsets) == 0)
        is_shown = np.ones(len(is_left), np.bool_) if self._shows_expired else is_left
        if gone.any():
            first = self._remove_expired(places, gone & (np.diff(offsets) > 0))
            is_shown &= ~np.repeat(gone & ~first, np.diff(offsets))
        if self._renews and (rows := n_left > 0).any():
            if self._shows_expired and (n_left < np.diff(offsets)).any():
                # The first read of a list drops what has expired in it, so that later ones do not see it.
                of_rows = canonical_list(places)
                first_of = {key: row for row, key in reversed(list(enumerate(of_rows)))}
                again = np.array([first_of[key] != row for row, key in enumerate(of_rows)], np.bool_)
                is_shown &= is_left | ~np.repeat(again & rows, np.diff(offsets))
            stays = stays & np.repeat(rows, np.diff(offsets))
            ends = np.concatenate(([0], np.cumsum(_count_chosen(stays, offsets)[rows])))
            renewed = np.maximum(stamps, now) if self._in_event_time else np.full(len(stamps), now, np.int64)
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


class MapColumns(_Columns):
    """A map."""

    def _map_key_column(self, map_keys: Any) -> Any:
        try:
            return encoded_keys(key_encoder(self.descriptor.key_type), map_keys)
        except SerializationError as error:
            raise error.at(f"map keys of state {self.descriptor.name!r}") from None

    def _columns(
        self, keys: Any, map_keys: Any, namespaces: Any, times: Any
    ) -> tuple[Any, NamespaceColumn | None, Any]:
        canonical, spaces = self._key_column(keys, namespaces, times)
        inner = self._map_key_column(map_keys)
        check_lengths(range(count_of(canonical)), range(count_of(inner)))
        return canonical, spaces, inner

    def get_many(self, keys: Any, map_keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        if self._by_rows(times):
            return super().get_many(keys, map_keys, namespaces=namespaces, times=times)  # type: ignore[misc]
        places = self._places(*self._columns(keys, map_keys, namespaces, times))
        with self._backend.column_call():
            found, values = self._read(places, True)
        return self._arrow(values, found, self.descriptor.value_type)

    def put_many(
        self, keys: Any, map_keys: Any, values: Any, *, namespaces: Any = None, times: Any = None
    ) -> None:
        if self._by_rows(times) or self.is_watched:
            super().put_many(keys, map_keys, values, namespaces=namespaces, times=times)  # type: ignore[misc]
            return
        canonical, spaces, inner = self._columns(keys, map_keys, namespaces, times)
        stored, nulls = self._value_column(values, self.descriptor.value_type, True)
        runs = serialised_column(stored)
        rows = count_of(canonical)
        check_lengths(range(rows), range(count_of(runs)))
        places = self._places(canonical, spaces, inner)
        with self._backend.column_call():
            flags = None if nulls is None else nulls.view(np.uint8)
            entries = join_values(*runs, self._stamps(rows), flags, True)
            self._note_namespace(spaces)
            self._store.put_many(self.table, *places, *entries)

    def exists_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.BooleanArray:
        if self.ttl is not None and not self._shows_expired:
            return super().exists_many(keys, namespaces=namespaces, times=times)
        places = self._places(*self._key_column(keys, namespaces, times))
        with self._backend.column_call():
            return pa.array(self._store.have_rows(self.table, *places))

    def remove_many(self, keys: Any, map_keys: Any, *, namespaces: Any = None, times: Any = None) -> None:
        if self.is_watched or self._at_own_times(times):
            super().remove_many(keys, map_keys, namespaces=namespaces, times=times)  # type: ignore[misc]
            return
        canonical, spaces, inner = self._columns(keys, map_keys, namespaces, times)
        places = self._places(canonical, spaces, inner)
        with self._backend.column_call():
            self._note_namespace(spaces)
            self._store.delete_many(self.table, *places)
