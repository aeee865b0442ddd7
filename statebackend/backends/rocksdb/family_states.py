"""The shared part of all handles, and lists and maps; single values are in `single_state.py`.

Elements of a list are one behind the other in one value: appending merges, and reads nothing. Each entry of a map is
its own row, so that none is read or written for the sake of another; entries come in the order of their encoded
keys: numbers as numbers, texts as their bytes.

Vectorised methods go through `multi_get` and batches of writes, atomic. Arrow and numpy columns of values, lists and
map entries make no Python object per row. Reads of states with a time to live remove and renew what they find in one
call too. Some calls go row by row, as `statebackend.state.scalar_fallback` does it: states of objects (PICKLE and a
user's own serializer), rows that use their own times, and changes of a collection that is iterated over.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa

from statebackend._core.codecs.value_bytes import ValueBytes
from statebackend._core.rocksdb.binding.callbacks import ExpiryRules
from statebackend._core.rocksdb.handles.list_family_handle import ListFamilyHandle
from statebackend._core.rocksdb.handles.map_family_handle import MapFamilyHandle
from statebackend._core.rocksdb.handles.value_layouts import (
    are_expired,
    join_elements,
    join_lists,
    join_values,
    seen_values,
    set_stamps,
    split_elements,
    split_lists,
)
from statebackend._core.rocksdb.overlay.composite_keys import compose_many
from statebackend._core.rocksdb.overlay.keyed_store import KeyedStore, Table
from statebackend.columns.codec_factory import holds_references, key_codec, value_bytes
from statebackend.columns.stored_columns import Array, Column, serialised_column, stored_column
from statebackend.columns.vectorised_call import ColumnsState, ListColumns, MapColumns, VectorisedCall
from statebackend.keys import NamespaceColumn, canonical_list
from statebackend.state import StateTtlConfig, WatchedIterator, expired
from statebackend.types import Type
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed_backend import RocksDbKeyedBackend

#: Offsets and bytes.
Runs = tuple[Array, Array]

#: In front of each value of a state with a time to live.
STAMP = struct.Struct("<q")
#: In front of the value of an entry of a map that is not None, behind its timestamp.
PRESENT = b"\0"
#: Entries of a map that an iteration reads ahead.
_AHEAD = 256


class RocksDbState(ColumnsState):
    """The shared part. A timestamp of eight bytes comes first in a stored value with a TTL."""

    #: Of `ExpiryRules`.
    layout = "value"

    # Of the compiled handle, which comes first in the class.
    store: KeyedStore
    table: Table
    codec: ValueBytes
    ttl: int
    in_event_time: bool
    shows_expired: bool
    refreshes: bool
    expired_on_read: int
    has_expired: Callable[[bytes], bool]
    now: Callable[[], int]
    # Of each kind.
    _shown: Any

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any, value_type: Type) -> None:
        self._backend = backend
        config: StateTtlConfig | None = descriptor.ttl_config
        #: Where `advance` goes on.
        self.cursor = b""
        #: The count of its drops by compactions when it was cleared for all keys.
        self.dropped_at_clearing = 0
        #: True if compactions drop expired state.
        self.has_drops = config is not None and config.rocksdb_cleanup is not None
        #: The rules of compactions, where they count their drops.
        self.rules = self._make_rules(descriptor)
        self._set_up(  # type: ignore[attr-defined]
            backend,
            descriptor,
            value_bytes(value_type, f"state {descriptor.name!r}"),
            backend.create_table(descriptor.name, self.rules, self.layout, config),
        )
        self.plan_calls()
        self._store = self.store
        self._watches: weakref.WeakSet[WatchedIterator] = weakref.WeakSet()

    def _make_rules(self, descriptor: Any) -> ExpiryRules:
        config: StateTtlConfig | None = descriptor.ttl_config
        cleanup = None if config is None else config.rocksdb_cleanup
        options: dict[str, int] = {}
        if config is not None and cleanup is not None:
            options = {"ttl": config.ttl, "query_every": max(1, cleanup.query_time_after_num_entries)}
        in_event_time = config is not None and config.is_in_event_time
        return self._backend.make_rules(
            descriptor.name, in_event_time, self.layout, self.element_bytes(descriptor), options
        )

    def plan_calls(self) -> None:
        """Plan vectorised calls, when the state is declared and whenever its descriptor takes effect again."""

    def element_bytes(self, descriptor: Any) -> int:
        """The bytes of an element of a list with its timestamp, if all have as many; else 0."""
        return 0

    def may_have(self, namespace: bytes) -> bool:
        """Return True if anything was ever written in this namespace, as far as is known without looking."""
        return not namespace or self.table.has_namespaces

    @property
    def is_stamped(self) -> bool:
        """True if timestamps are stored."""
        return self.ttl != 0

    # --- what each kind says about what it stores ---

    def is_there(self, stored: bytes | None) -> bool:
        """Return True if something is stored, expired or not."""
        return stored is not None

    def is_alive(self, stored: bytes) -> bool:
        """Return True if any part of it has not expired."""
        return not self.has_expired(stored)

    def stamps_of(self, stored: bytes) -> list[int]:
        """All timestamps in it."""
        return [STAMP.unpack_from(stored)[0]]

    def without_expired(self, stored: bytes, now: int) -> bytes | None:
        """What is left of it at a time; None if nothing is."""
        return None if expired(STAMP.unpack_from(stored)[0], self.ttl, now) else stored

    def moved(self, stored: bytes) -> bytes | None:
        """The part of a stored value that a merge of namespaces takes; None if nothing of it counts."""
        return stored

    def merged(self, a: bytes, b: bytes) -> bytes | None:
        """Merge what two namespaces store, ``a`` first."""
        raise NotImplementedError

    # --- iterations ---

    @property
    def is_watched(self) -> bool:
        """True while one of its collections is iterated over."""
        return len(self._watches) > 0

    def changed(self, place: bytes | None) -> None:
        """Note that the collection there (None: every one) has other elements or keys now."""
        for watch in self._watches:
            if place is None or watch.place.startswith(place):
                watch.is_stale = True

    def watched(self, place: bytes, steps: Iterator[Any]) -> Iterator[Any]:
        """Yield ``steps``, but raise if the collection at a place changes in between."""
        watch = WatchedIterator(self._backend, place, steps)
        self._watches.add(watch)
        self._is_watched_from_now_on()  # type: ignore[attr-defined]
        return watch

    # --- whole columns ---

    def _by_rows(self, call: str, times: Any) -> bool:
        if call == "clear":
            return super()._by_rows(call, times)
        holds_objects = call != "exists" and holds_references(self.codec.declared)
        return holds_objects or self._at_own_times(times) or super()._by_rows(call, times)

    def _at_own_times(self, times: Any) -> bool:
        return times is not None and self.ttl != 0

    def _begin(self, own: Array | None) -> None:
        self._backend.begin_call()

    def _places(self, canonical: Any, spaces: NamespaceColumn | None, map_keys: Any = None) -> Runs:
        """Composite keys; raises for a key that is not served here."""
        if spaces is None or len(spaces.distinct) == 1:
            namespaces: Any = self._backend._namespace if spaces is None else spaces.distinct[0]
        else:
            namespaces = spaces.runs()
        return compose_many(self._backend.groups_of(canonical), canonical, namespaces, map_keys)

    def _places_of(self, call: VectorisedCall, map_keys: Any = None) -> Runs:
        return self._places(call.keys, call.namespaces, map_keys)

    def _note_namespace(self, spaces: NamespaceColumn | None) -> None:
        if self._backend._namespace if spaces is None else any(spaces.distinct):
            self.table.note_namespaces()

    def _call_time(self) -> int:
        return self._backend.call_time(self.in_event_time)

    def _stamps(self, rows: int) -> Array | None:
        """The timestamps of values that the running call writes."""
        if not self.ttl:
            return None
        return np.full(rows, self._call_time(), dtype=np.int64)

    def _read(self, places: Runs, is_map_entry: bool) -> tuple[Array, Runs]:
        """Which of many places have a value that may be seen and is not None; and the values, zeros for the rest.

        Dead values are removed, and visible ones get the time, if reads renew. Within a `column_call`.
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


class RocksDbListState(ListFamilyHandle, RocksDbState, ListColumns):
    """A list. Empty bytes are not a list: the filter leaves them when it has dropped all elements in a merge."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        width = serializer_for(descriptor.element_type).fixed_width
        self.layout = "fixed_list" if width else "variable_list"
        self._element_bytes = (width or 0) + (8 if descriptor.ttl_config is not None else 0)
        RocksDbState.__init__(self, backend, descriptor, descriptor.element_type)

    def element_bytes(self, descriptor: Any) -> int:
        return self._element_bytes if self.layout == "fixed_list" else 0

    # --- what is stored ---

    def _elements(self, stored: bytes) -> tuple[list[bytes], list[int]]:
        return split_elements(stored, self.codec.width, self.is_stamped)

    def joined(self, data: list[bytes], stamp: int | None = None) -> bytes:
        """Elements as they are stored, all with one timestamp: the time, if none is given."""
        if not self.ttl:
            return join_elements(data, self.codec.width)
        return join_elements(data, self.codec.width, self.now() if stamp is None else stamp)

    def is_there(self, stored: bytes | None) -> bool:
        return bool(stored)

    def is_alive(self, stored: bytes) -> bool:
        if not stored or not self.ttl:
            return bool(stored)
        now = self.now()
        return any(not expired(stamp, self.ttl, now) for stamp in self.stamps_of(stored))

    def stamps_of(self, stored: bytes) -> list[int]:
        return self._elements(stored)[1]

    def without_expired(self, stored: bytes, now: int) -> bytes | None:
        data, stamps = self._elements(stored)
        left = [each for each in zip(data, stamps, strict=True) if not expired(each[1], self.ttl, now)]
        if len(left) == len(data):
            return stored or None
        return b"".join(self.joined([each], stamp) for each, stamp in left) or None

    # --- for the compiled half ---

    def __iter__(self) -> Iterator[Any]:
        return self.watched(self._store.place_here, iter(self.get()))

    def merged(self, a: bytes, b: bytes) -> bytes:
        return a + b

    # --- whole columns ---

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


class RocksDbMapState(MapFamilyHandle, RocksDbState, MapColumns):
    """A map."""

    layout = "map_entry"

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.value_type)
        self._take_keys(key_codec(descriptor.key_type))

    def put_all(self, entries: Mapping[Any, Any]) -> None:
        self._store.place_here  # noqa: B018 - raises if no key is set
        rows = self._entries_of(self._pairs_of(entries))
        with self._backend.together():
            self._put_entries(rows)

    # --- the whole map ---

    def exists(self) -> bool:
        place = self._store.place_here
        if not self.ttl or self.shows_expired:
            return bool(self._store.rows(self.table, place, None, 1))
        return any(not self.has_expired(stored) for _, stored in self._entries(place))

    def is_empty(self) -> bool:
        return not self.exists()

    def clear(self) -> None:
        place = self._store.place_here
        with self._backend.together():
            if self.has_drops and self.may_have(self._backend._namespace):
                self._store.note_cleared(self.table, place)
            if self._store.delete_all(self.table, place):
                self.changed(place)

    def _entries(self, place: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Pairs of composite key and stored value, read a few at a time: a value is as it is when its turn comes.

        Keys must stay as they are meanwhile.
        """
        start = None
        while True:
            rows = self._store.rows(self.table, place, start, _AHEAD)
            version = self.table.version
            for key, stored in rows:
                if self.table.version == version:
                    yield key, stored
                    continue
                now: bytes | None = self._store.get_at(self.table, key)
                if now is not None:
                    yield key, now
            if len(rows) < _AHEAD:
                return
            start = rows[-1][0] + b"\0"

    def keys(self) -> Iterator[Any]:
        return self._each(lambda key, stored: key)

    def values(self) -> Iterator[Any]:
        return self._each(lambda key, stored: self._value(stored))

    def items(self) -> Iterator[tuple[Any, Any]]:
        return self._each(lambda key, stored: (key, self._value(stored)))

    def _each(self, show: Callable[[Any, bytes], Any]) -> Iterator[Any]:
        place = self._store.place_here
        size = len(place)

        def steps() -> Iterator[Any]:
            for key, found in self._entries(place):
                stored = self._seen(key, found)
                if stored is not None:
                    yield show(self._map_key(key, size), stored)

        return self.watched(place, steps())

    # --- whole columns ---

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
