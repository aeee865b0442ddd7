"""The handles of all kinds of states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from statebackend.backends.reference.base_state import EntryKey, ReferenceState, StampedValue
from statebackend.errors import SerializationError
from statebackend.keys import key_encoder
from statebackend.state import (
    AggregatingState,
    FoldingState,
    KeyedListState,
    MapState,
    ReducingState,
    ValueState,
    elements_of,
    entries_of,
)
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.reference.reference_backend import ReferenceKeyedBackend


class ReferenceListState(ReferenceState["tuple[StampedValue, ...]"], KeyedListState):
    def __init__(self, backend: ReferenceKeyedBackend, descriptor: Any) -> None:
        super().__init__(backend, descriptor)
        self._serializer = serializer_for(descriptor.element_type)

    def _any(self, stored: tuple[StampedValue, ...], wanted: Callable[[StampedValue], bool]) -> bool:
        return any(map(wanted, stored))

    def without_dead(
        self, stored: tuple[StampedValue, ...], budget: int = 2**63
    ) -> tuple[tuple[StampedValue, ...] | None, int]:
        left = tuple(element for element in stored if not self._dead(element))
        return left or None, int(left != stored)

    def _timestamps(self, stored: tuple[StampedValue, ...]) -> Iterable[int]:
        return (element.timestamp for element in stored)

    def get(self) -> list[Any]:
        self.accessed()
        at = self._here()
        stored = self.table.get(at) or ()
        values = [self._deserialize(self._serializer, each.data) for each in stored if self._visible(each)]
        left = tuple(each for each in stored if not (self._expired(each) and self._dead(each)))
        if stored and not left:
            self.expired_on_read += 1
            self.table.remove(at)
        elif self._refreshes and not all(map(self._expired, left)):
            self.table.put(at, tuple(map(self._renewed, left)))
        return values

    def _renewed(self, element: StampedValue) -> StampedValue:
        return element if self._expired(element) else self._stamp(element.data, element.timestamp)

    def __iter__(self) -> Iterator[Any]:
        return self.watched(self._here(), iter(self.get()))

    def add(self, value: Any) -> None:
        self.accessed()
        self._append(self._here(), [self._serialize(self._serializer, value)])

    def add_all(self, values: Iterable[Any]) -> None:
        self.accessed()
        self._here()  # raises without a key, before the user's iterable is read: that may make another key current
        given = elements_of(values, self.descriptor.element_type, self._where())
        self._append(self._here(), self._serialize_all(given))

    def _append(self, at: EntryKey, data: list[bytes]) -> None:
        if data:
            self.table.put(at, (self.table.get(at) or ()) + tuple(map(self._stamp, data)))
            self.changed(at)

    def update(self, values: Iterable[Any]) -> None:
        self.accessed()
        self._here()
        given = elements_of(values, self.descriptor.element_type, self._where())
        at = self._here()
        data = self._serialize_all(given)
        if data:
            self.table.put(at, tuple(map(self._stamp, data)))
            self.changed(at)
        else:
            self.drop(at)

    def _serialize_all(self, values: list[Any]) -> list[bytes]:
        return [self._serialize(self._serializer, value) for value in values]

    def merged(self, a: tuple[StampedValue, ...], b: tuple[StampedValue, ...]) -> tuple[StampedValue, ...]:
        return a + b


class ReferenceMapState(ReferenceState["dict[Any, StampedValue]"], MapState):
    def __init__(self, backend: ReferenceKeyedBackend, descriptor: Any) -> None:
        super().__init__(backend, descriptor)
        self._encoder = key_encoder(descriptor.key_type)
        self._serializer = serializer_for(descriptor.value_type)

    def _any(self, stored: dict[Any, StampedValue], wanted: Callable[[StampedValue], bool]) -> bool:
        return any(map(wanted, stored.values()))

    def without_dead(
        self, stored: dict[Any, StampedValue], budget: int = 2**63
    ) -> tuple[dict[Any, StampedValue] | None, int]:
        gone = [key for key, entry in stored.items() if self._dead(entry)][:budget]
        return {key: entry for key, entry in stored.items() if key not in gone} or None, len(gone)

    def rows_of(self, stored: dict[Any, StampedValue] | None) -> dict[Any, Any]:
        return stored or {}

    def _timestamps(self, stored: dict[Any, StampedValue]) -> Iterable[int]:
        return (entry.timestamp for entry in stored.values())

    def _encode(self, key: Any) -> Any:
        try:
            return self._encoder.encode(key)
        except SerializationError as error:
            raise error.at(f"map key of {self._where()}") from None

    def _value(self, entry: StampedValue) -> Any:
        return None if entry.data is None else self._deserialize(self._serializer, entry.data)

    def _data(self, value: Any) -> bytes | None:
        return None if value is None else self._serialize(self._serializer, value)

    def _read(self, at: EntryKey, key: Any) -> StampedValue | None:
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

    def _drop_entry(self, at: EntryKey, stored: dict[Any, StampedValue], key: Any) -> None:
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
        given = entries_of(entries, self._where())
        self._put(self._here(), {self._encode(key): self._data(value) for key, value in given})

    def _put(self, at: EntryKey, data: dict[Any, bytes | None]) -> None:
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

    def _remove(self, at: EntryKey, key: Any) -> bool:
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

    def _each(self, show: Callable[[Any, StampedValue], Any]) -> Iterator[Any]:
        self.accessed()
        at = self._here()

        def steps() -> Iterator[Any]:
            for key in list(self.table.get(at) or {}):
                entry = self._read(at, key)
                if entry is not None:
                    yield show(key, entry)

        return self.watched(at, steps())


class _SingleState(ReferenceState[StampedValue]):
    """One serialised value per key."""

    def __init__(self, backend: ReferenceKeyedBackend, descriptor: Any) -> None:
        super().__init__(backend, descriptor)
        (declared,) = descriptor.stored_types().values()
        self._serializer = serializer_for(declared)

    def _any(self, stored: StampedValue, wanted: Callable[[StampedValue], bool]) -> bool:
        return wanted(stored)

    def without_dead(self, stored: StampedValue, budget: int = 2**63) -> tuple[StampedValue | None, int]:
        return (None, 1) if self._dead(stored) else (stored, 0)

    def _timestamps(self, stored: StampedValue) -> Iterable[int]:
        return (stored.timestamp,)

    def _store(self, at: EntryKey, value: Any, on: int | None = None) -> None:
        self.table.put(at, self._stamp(self._serialize(self._serializer, value), on))

    def _read(self) -> Any:
        """The value, or None. A dead value is removed; it is returned this once if the visibility allows that."""
        self.accessed()
        at = self._here()
        stored = self.table.get(at)
        if stored is None:
            return None
        value = self._deserialize(self._serializer, stored.data)
        if self._expired(stored):
            if self._dead(stored):
                self.expired_on_read += 1
                self.table.remove(at)
            return value if self._shows_expired else None
        renewed = self._stamp(stored.data, stored.timestamp)
        if self._refreshes and renewed != stored:
            self.table.put(at, renewed)
        return value

    def _unexpired(self, at: EntryKey) -> tuple[Any, int | None]:
        """The value that a write builds on, and its timestamp. An expired value is never merged with new input."""
        stored = self.table.get(at)
        if stored is None or self._expired(stored):
            return None, None
        return self._deserialize(self._serializer, stored.data), stored.timestamp

    def moved(self, stored: StampedValue) -> StampedValue | None:
        if not self._in_event_time:
            return stored
        return None if self._expired(stored) else self._stamp(stored.data, stored.timestamp)

    def _merged_by(
        self, merge: Callable[[Any, Any], Any], a: StampedValue, b: StampedValue
    ) -> StampedValue | None:
        if self._expired(a) or self._expired(b):
            left = a if self._expired(b) else b
            return None if self._expired(left) else self._stamp(left.data)
        first, second = (self._deserialize(self._serializer, each.data) for each in (a, b))
        merged = self._serialize(self._serializer, self._backend._run(merge, first, second))
        return self._stamp(merged, max(a.timestamp, b.timestamp))


class ReferenceValueState(_SingleState, ValueState):
    def value(self) -> Any:
        value = self._read()
        return self._descriptor.default_copy() if value is None else value

    def update(self, value: Any) -> None:
        self.accessed()
        at = self._here()
        if value is None:
            self.drop(at)
        else:
            self._store(at, value)


class _AddingState(_SingleState):
    """A value or an accumulator, which each added value replaces."""

    def get(self) -> Any:
        return self._read()

    def add(self, value: Any) -> None:
        self.accessed()
        at = self._here()
        if value is None:
            self.drop(at)
            return
        declared = self._column_types()[0]  # type: ignore[attr-defined]
        if declared is not None:
            serializer = serializer_for(declared)
            value = self._deserialize(serializer, self._serialize(serializer, value))
        old, timestamp = self._unexpired(at)
        self._store(at, self._added(old, value), timestamp)

    def _added(self, old: Any, value: Any) -> Any:
        """The value to store when ``value`` is added to ``old``, which may be None."""
        raise NotImplementedError


class ReferenceReducingState(_AddingState, ReducingState):
    def _added(self, old: Any, value: Any) -> Any:
        return value if old is None else self._backend._run(self._descriptor.reduce, old, value)

    def merged(self, a: StampedValue, b: StampedValue) -> StampedValue | None:
        return self._merged_by(self._descriptor.reduce, a, b)


class ReferenceAggregatingState(_AddingState, AggregatingState):
    def get(self) -> Any:
        accumulator = self._read()
        if accumulator is None:
            return None
        return self._backend._run(self._descriptor.aggregate.get_result, accumulator)

    def _added(self, old: Any, value: Any) -> Any:
        aggregate, run = self._descriptor.aggregate, self._backend._run
        return run(aggregate.add, value, run(aggregate.create_accumulator) if old is None else old)

    def merged(self, a: StampedValue, b: StampedValue) -> StampedValue | None:
        return self._merged_by(self._descriptor.aggregate.merge, a, b)


class ReferenceFoldingState(_AddingState, FoldingState):
    def _added(self, old: Any, value: Any) -> Any:
        run = self._backend._run
        return run(self._descriptor.fold, run(self._descriptor.initial_copy) if old is None else old, value)
