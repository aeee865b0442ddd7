"""The shared part of all handles, and those of lists and maps; those of single values are in `single_state.py`.

Elements of a list are one behind the other in one value: appending merges, and reads nothing. Each entry of a map is a
row of its own, so that none is read or written for the sake of another; entries come in the order of their encoded
keys: numbers as numbers, texts as their bytes.

>>> from statebackend.backends.rocksdb import RocksDbBackend
>>> from statebackend.state import ListStateDescriptor, MapStateDescriptor
>>> keyed = RocksDbBackend().create_keyed_backend(int)
>>> tags = keyed.get_list_state(ListStateDescriptor("tags", str))
>>> seen = keyed.get_map_state(MapStateDescriptor("seen", int, str))
>>> keyed.set_current_key(1)
>>> tags.update(["a", "b"]); tags.add("c")
>>> tags.get()
['a', 'b', 'c']
>>> seen.put_all({7: "seven", -1: "minus one"})
>>> list(seen.items())
[(-1, 'minus one'), (7, 'seven')]
>>> keyed.close()
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from statebackend._core.codecs.value_bytes import ValueBytes
from statebackend._core.rocksdb.binding.callbacks import ExpiryRules
from statebackend._core.rocksdb.handles.list_family_handle import ListFamilyHandle
from statebackend._core.rocksdb.handles.map_family_handle import MapFamilyHandle
from statebackend._core.rocksdb.handles.value_layouts import join_elements, split_elements
from statebackend._core.rocksdb.overlay.keyed_store import KeyedStore, Table
from statebackend.backends.rocksdb.column_methods import RocksDbListColumns, RocksDbMapColumns
from statebackend.columns.codec_factory import key_codec, value_bytes
from statebackend.state import KeyedState, StateTtlConfig, WatchedIterator, expired
from statebackend.types import Type
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed_backend import RocksDbKeyedBackend

#: In front of each value of a state with a time to live.
STAMP = struct.Struct("<q")
#: In front of the value of an entry of a map that is not None, behind its timestamp.
PRESENT = b"\0"
#: Entries of a map that an iteration reads ahead.
_AHEAD = 256


class RocksDbState(KeyedState):
    """The shared part. A timestamp of eight bytes comes first in what is stored, if there is a time to live."""

    #: Of `ExpiryRules`.
    layout = "value"

    # Of the compiled handle, which comes first in the class.
    store: KeyedStore
    table: Table
    codec: ValueBytes
    ttl: int
    has_expired: Callable[[bytes], bool]
    now: Callable[[], int]

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any, value_type: Type) -> None:
        self._backend = backend
        config: StateTtlConfig | None = descriptor.ttl_config
        #: Where `advance` goes on.
        self.cursor = b""
        #: What compactions had dropped of it when it was cleared for all keys.
        self.dropped_at_clearing = 0
        #: True if compactions drop what has expired.
        self.has_drops = config is not None and config.rocksdb_cleanup is not None
        #: What compactions go by; they count there what they drop.
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
        """What a merge of namespaces takes of what one of them stores; None if nothing of it counts."""
        return stored

    def merged(self, a: bytes, b: bytes) -> bytes | None:
        """Merge what two namespaces store, ``a`` first."""
        raise NotImplementedError

    # --- iterations ---

    @property
    def is_watched(self) -> bool:
        """True if somebody iterates over one of its collections."""
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


class RocksDbListState(ListFamilyHandle, RocksDbListColumns, RocksDbState):
    """A list. No bytes are no list: the filter leaves them when it has dropped all elements in a merge."""

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

    def _any_unexpired(self, stored: bytes, now: int) -> bool:
        return any(not expired(stamp, self.ttl, now) for stamp in self._elements(stored)[1])

    def is_there(self, stored: bytes | None) -> bool:
        return bool(stored)

    def is_alive(self, stored: bytes) -> bool:
        return bool(stored) and (not self.ttl or self._any_unexpired(stored, self.now()))

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


class RocksDbMapState(MapFamilyHandle, RocksDbMapColumns, RocksDbState):
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
        """Pairs of composite key and what is stored, read a few at a time: a value is as it is when its turn comes.

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
