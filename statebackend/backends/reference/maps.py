"""The map handle.

>>> from statebackend.backends.reference import ReferenceBackend
>>> from statebackend.state import MapStateDescriptor
>>> keyed = ReferenceBackend().create_keyed_backend(int)
>>> seen = keyed.get_map_state(MapStateDescriptor("seen", float, str))
>>> keyed.set_current_key(1)
>>> seen[-0.0] = "zero"
>>> seen[0.0], list(seen)
('zero', [0.0])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from statebackend.backends.reference.base import ReferenceState, Stamped
from statebackend.backends.reference.table import Place
from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.keys import key_encoder
from statebackend.state import MapState
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.reference.backend import ReferenceKeyedBackend


class ReferenceMapState(ReferenceState["dict[Any, Stamped]"], MapState):
    """A map."""

    def __init__(self, backend: ReferenceKeyedBackend, descriptor: Any) -> None:
        super().__init__(backend, descriptor)
        self._encoder = key_encoder(descriptor.key_type)
        self._serializer = serializer_for(descriptor.value_type)

    def _any(self, stored: dict[Any, Stamped], wanted: Callable[[Stamped], bool]) -> bool:
        return any(map(wanted, stored.values()))

    def without_dead(
        self, stored: dict[Any, Stamped], budget: int = 2**63
    ) -> tuple[dict[Any, Stamped] | None, int]:
        gone = [key for key, entry in stored.items() if self._dead(entry)][:budget]
        return {key: entry for key, entry in stored.items() if key not in gone} or None, len(gone)

    def rows_of(self, stored: dict[Any, Stamped] | None) -> dict[Any, Any]:
        return stored or {}

    def _timestamps(self, stored: dict[Any, Stamped]) -> Iterable[int]:
        return (entry.timestamp for entry in stored.values())

    def _encode(self, key: Any) -> Any:
        try:
            return self._encoder.encode(key)
        except SerializationError as error:
            raise error.at(f"map key of {self._where()}") from None

    def _value(self, entry: Stamped) -> Any:
        return None if entry.data is None else self._deserialize(self._serializer, entry.data)

    def _data(self, value: Any) -> bytes | None:
        return None if value is None else self._serialize(self._serializer, value)

    def _read(self, at: Place, key: Any) -> Stamped | None:
        """The entry if it may be seen. Removes it if it is dead, renews it if reads do so."""
        stored = self.table.get(at) or {}
        entry = stored.get(key)
        if entry is None:
            return None
        if self._expired(entry):
            if self._dead(entry):
                self.expired_on_read += 1
                self._drop_entry(at, stored, key)
            return entry if self._shows_expired else None
        renewed = self._stamp(entry.data, entry.timestamp)
        if self._refreshes and renewed != entry:
            self.table.put(at, {**stored, key: renewed})
        return entry

    def _drop_entry(self, at: Place, stored: dict[Any, Stamped], key: Any) -> None:
        left = {other: entry for other, entry in stored.items() if other != key}
        if left:
            self.table.put(at, left)
        else:
            self.table.remove(at)

    def get(self, key: Any, default: Any = None) -> Any:
        self.accessed()
        entry = self._read(self._here(), self._encode(key))
        return default if entry is None else self._value(entry)

    def __getitem__(self, key: Any) -> Any:
        self.accessed()
        entry = self._read(self._here(), self._encode(key))
        if entry is None:
            raise KeyError(f"the key is not in {self._where()}")
        return self._value(entry)

    def contains(self, key: Any) -> bool:
        self.accessed()
        return self._read(self._here(), self._encode(key)) is not None

    def put(self, key: Any, value: Any) -> None:
        self.accessed()
        self._put(self._here(), {self._encode(key): self._data(value)})

    def put_all(self, entries: Mapping[Any, Any]) -> None:
        self.accessed()
        self._here()  # raises without a key, before the user's mapping is read: that may make another key current
        if not isinstance(entries, Mapping):
            raise SerializationTypeError(
                f"put_all does not take a {type(entries).__name__}",
                code="SERIALIZATION.NULL" if entries is None else None,
                detail=self._where(),
                hint="give a dict",
            )
        given = list(entries.items())
        self._put(self._here(), {self._encode(key): self._data(value) for key, value in given})

    def _put(self, at: Place, data: dict[Any, bytes | None]) -> None:
        if not data:
            return
        stored = dict(self.table.get(at) or {})
        grows = False
        for key, value in data.items():
            old = stored.get(key)
            if old is None or self._expired(old):
                grows = True
                stored.pop(key, None)  # an expired entry does not keep its place
            stored[key] = self._stamp(value)
        self.table.put(at, stored)
        if grows:
            self.changed(at)

    def remove(self, key: Any) -> None:
        self.accessed()
        self._remove(self._here(), self._encode(key))

    def __delitem__(self, key: Any) -> None:
        self.accessed()
        if not self._remove(self._here(), self._encode(key)):
            raise KeyError(f"the key is not in {self._where()}")

    def _remove(self, at: Place, key: Any) -> bool:
        """Remove the key; return True if it was visible before."""
        stored = self.table.get(at) or {}
        entry = stored.get(key)
        if entry is None:
            return False
        self._drop_entry(at, stored, key)
        if self._visible(entry):
            self.changed(at)
            return True
        return False

    def is_empty(self) -> bool:
        return not self.exists()

    def keys(self) -> Iterator[Any]:
        return self._each(lambda key, entry: self._encoder.decode(key))

    def values(self) -> Iterator[Any]:
        return self._each(lambda key, entry: self._value(entry))

    def items(self) -> Iterator[tuple[Any, Any]]:
        return self._each(lambda key, entry: (self._encoder.decode(key), self._value(entry)))

    def _each(self, show: Callable[[Any, Stamped], Any]) -> Iterator[Any]:
        self.accessed()
        at = self._here()

        def steps() -> Iterator[Any]:
            for key in list(self.table.get(at) or {}):
                entry = self._read(at, key)
                if entry is not None:
                    yield show(key, entry)

        return self.watched(at, steps())
