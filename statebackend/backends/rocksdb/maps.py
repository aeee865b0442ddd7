"""The map handle: each entry is a row of its own, so that none is read or written for the sake of another.

Entries come in the order of their encoded keys: numbers as numbers, texts as their bytes.

>>> from statebackend.backends.rocksdb import RocksDbBackend
>>> from statebackend.state import MapStateDescriptor
>>> keyed = RocksDbBackend().create_keyed_backend(int)
>>> seen = keyed.get_map_state(MapStateDescriptor("seen", int, str))
>>> keyed.set_current_key(1)
>>> seen.put_all({7: "seven", -1: "minus one"})
>>> list(seen.items())
[(-1, 'minus one'), (7, 'seven')]
>>> keyed.close()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from statebackend._core.rocksdb.handles.map_handle import MapHandle
from statebackend.backends.rocksdb.states import RocksDbState
from statebackend.backends.rocksdb.vectorised import RocksDbMapColumns
from statebackend.columns.codec_choice import key_codec
from statebackend.errors import SerializationTypeError

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed import RocksDbKeyedBackend

#: In front of the value of an entry that is not None, behind its timestamp.
PRESENT = b"\0"
#: Entries that an iteration reads ahead.
_AHEAD = 256


class RocksDbMapState(MapHandle, RocksDbMapColumns, RocksDbState):
    """A map."""

    layout = "map_entry"

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.value_type)
        self._take_keys(key_codec(descriptor.key_type))

    def put_all(self, entries: Mapping[Any, Any]) -> None:
        self._store.place_here  # noqa: B018 - raises if no key is set
        if not isinstance(entries, Mapping):
            raise SerializationTypeError(
                f"a {type(entries).__name__} is not a mapping of entries",
                code="SERIALIZATION.NULL" if entries is None else None,
                detail=f"state {self.descriptor.name!r}",
                hint="give a dict",
            )
        rows = self._entries_of(entries)
        with self._backend.together():
            self._put_entries(rows)

    # --- the whole map ---

    def exists(self) -> bool:
        place = self._store.place_here
        if self.ttl is None or self._shows_expired:
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
