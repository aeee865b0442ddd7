"""List states of an operator, and broadcast state: a map that is the same in every instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import pyarrow as pa

from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.keys import as_columnar
from statebackend.operator_state.element_columns import (
    CanonicalKeys,
    ElementBytes,
    canonical_keys,
    stored_keys,
)
from statebackend.operator_state.operator_snapshots import StateView
from statebackend.state import ListState, ListStateDescriptor, MapStateDescriptor, elements_of, entries_of
from statebackend.types import K, Subscriptable, T, V

if TYPE_CHECKING:
    from statebackend.operator_state.operator_backend import OperatorStateBackend


class _Elements(list[bytes]):
    """Serialised elements. A mark remembers how many there were, so a list only grows until it is rolled back."""

    __slots__ = ("copied_from", "is_viewed")

    def __init__(self, elements: Iterable[bytes], *, is_viewed: bool = False) -> None:
        super().__init__(elements)
        #: True if something else reads the list too, so it must be copied before the next change.
        self.is_viewed = is_viewed
        #: The viewed list that it begins with, until it is viewed itself.
        self.copied_from: _Elements | None = None


class OperatorListState(ListState[T]):
    """A list that an operator owns, split or united when the number of instances changes.

    Rules as for `ListState`: no None, an empty list is the same as none, `get` returns copies. The ``mode`` is split
    or union.

    >>> from statebackend.operator_state import OperatorStateBackend
    >>> state = OperatorStateBackend().get_union_list_state(ListStateDescriptor("all", int))
    >>> state.add(1)
    >>> state.mode, state.get()
    ('union', [1])
    """

    def __init__(
        self,
        backend: OperatorStateBackend,
        descriptor: ListStateDescriptor[T],
        mode: str,
        elements: list[bytes],
    ) -> None:
        self._backend = backend
        self.descriptor = descriptor
        self.mode = mode
        self._bytes = ElementBytes(descriptor.element_type)
        self._elements = _Elements(elements, is_viewed=True)
        self._restored = self.keep()
        #: Counts the changes.
        self._changes = 0

    # --- for the backend ---

    def contents(self) -> dict[str, Any]:
        """Mode, types and serialised elements, as plain data."""
        config = self.descriptor.config()
        return {"mode": self.mode, "config": config, "elements": list(self._elements)}

    def view(self) -> StateView:
        """The list as it is now, which no longer changes. O(1)."""
        viewed = self._elements.copied_from
        if viewed is not None and len(viewed) == len(self._elements):
            self._elements = viewed  # all changes were undone: it is the same list for a snapshot too
        self._elements.is_viewed, self._elements.copied_from = True, None
        return StateView(self.mode, self.descriptor.config()["types"], self._elements)

    def keep(self) -> tuple[_Elements, int]:
        """The argument with which `put_back` returns to the list as it is now. O(1); later appends cost no copy."""
        return self._elements, len(self._elements)

    def put_back(self, kept: tuple[_Elements, int] | None) -> None:
        """Return to the list at the time of `keep`; for None, to that at the beginning. O(appended since)."""
        elements, length = kept or self._restored
        if self._elements.copied_from is elements:
            elements = self._elements  # so that the next change need not copy again
        if len(elements) > length:
            if elements.is_viewed:
                elements = _Elements(elements[:length])
            else:
                del elements[length:]
                if elements.copied_from is not None and length < len(elements.copied_from):
                    elements.copied_from = None
        self._elements = elements
        self._changes += 1

    # --- for users ---

    def _changing(self) -> list[bytes]:
        if self._elements.is_viewed:
            viewed, self._elements = self._elements, _Elements(self._elements)
            self._elements.copied_from = viewed
        self._changes += 1
        return self._elements

    def _serialize(self, value: Any) -> bytes:
        where = f"operator state {self.descriptor.name!r}"
        if value is None:
            raise SerializationTypeError("an element is None", code="SERIALIZATION.NULL", detail=where)
        try:
            return self._bytes.of(value)
        except SerializationError as error:
            raise error.at(where) from None

    def _serialize_all(self, values: Any) -> list[bytes]:
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            stored = self._bytes.of_column(as_columnar(values, "elements"))
            if stored is not None:
                return stored
        where = f"operator state {self.descriptor.name!r}"
        return [self._serialize(value) for value in elements_of(values, self.descriptor.element_type, where)]

    def get(self) -> list[T]:
        self._backend.check_open()
        return list(map(self._bytes.value, self._elements))

    def __iter__(self) -> Iterator[T]:
        self._backend.check_open()
        return _steps(self._backend, self, self._changes, map(self._bytes.value, self._elements))

    def add(self, value: T) -> None:
        self._backend.check_open()
        data = self._serialize(value)
        self._changing().append(data)

    def add_all(self, values: Iterable[T]) -> None:
        self._backend.check_open()
        data = self._serialize_all(values)
        if data:
            self._changing().extend(data)

    def update(self, values: Iterable[T]) -> None:
        self._backend.check_open()
        data = self._serialize_all(values)
        self._elements = _Elements(data)
        self._changes += 1

    def clear(self) -> None:
        self._backend.check_open()
        if self._elements:
            self._elements = _Elements(())
            self._changes += 1

    def exists(self) -> bool:
        self._backend.check_open()
        return bool(self._elements)

    def __repr__(self) -> str:
        return f"<OperatorListState {self.descriptor.name!r}, {self.mode}>"


D = TypeVar("D")


class _Entries:
    """The map itself, shared by a broadcast state and its read-only sides."""

    def __init__(self, backend: OperatorStateBackend, descriptor: MapStateDescriptor) -> None:
        self.backend = backend
        self.descriptor = descriptor
        self.keys = CanonicalKeys(descriptor.key_type)
        self.values = ElementBytes(descriptor.value_type)
        self.by_key: dict[Any, bytes | None] = {}
        #: True if something else keeps the dict too, so it must be copied before the next change.
        self.is_kept = True
        #: Counts the keys added or removed.
        self._changes = 0

    def where(self) -> str:
        return f"broadcast state {self.descriptor.name!r}"

    def encode(self, key: Any) -> Any:
        self.backend.check_open()
        try:
            return self.keys.of(key)
        except SerializationError as error:
            raise error.at(f"map key of {self.where()}") from None

    def data_of(self, value: Any) -> bytes | None:
        try:
            return None if value is None else self.values.of(value)
        except SerializationError as error:
            raise error.at(self.where()) from None

    def value_of(self, data: bytes | None) -> Any:
        return None if data is None else self.values.value(data)

    def stored(self, by_key: Mapping[Any, bytes | None]) -> list[tuple[bytes, bytes | None]]:
        """Pairs of serialised key and value."""
        return list(zip(stored_keys(list(by_key), self.keys.encoder), by_key.values(), strict=True))

    def changing(self) -> dict[Any, bytes | None]:
        if self.is_kept:
            self.by_key = dict(self.by_key)
            self.is_kept = False
        return self.by_key

    def put(self, data: Mapping[Any, bytes | None]) -> None:
        if not data:
            return
        by_key = self.changing()
        before = len(by_key)
        by_key.update(data)
        self._changes += len(by_key) != before

    def remove(self, key: Any) -> bool:
        if key not in self.by_key:
            return False
        del self.changing()[key]
        self._changes += 1
        return True

    def each(self, show: Callable[[Any, bytes | None], Any]) -> Iterator[Any]:
        self.backend.check_open()
        shown = (show(key, self.by_key[key]) for key in list(self.by_key))
        return _steps(self.backend, self, self._changes, shown)


def _steps(
    backend: OperatorStateBackend, held: OperatorListState | _Entries, changes: int, steps: Iterator[Any]
) -> Iterator[Any]:
    """Yield ``steps``, but raise once what they are made of has changed."""
    while True:
        backend.check_open()
        if held._changes != changes:
            raise RuntimeError("the state was changed while it was iterated")
        for step in steps:
            yield step
            break
        else:
            return


class ReadOnlyBroadcastState(Subscriptable, Generic[K, V]):
    """The side of a broadcast state that the other stream sees: it reads and cannot write.

    >>> from statebackend.operator_state import OperatorStateBackend
    >>> state = OperatorStateBackend().get_broadcast_state(MapStateDescriptor("rules", str, int))
    >>> state.put_all({"a": 1, "b": None})
    >>> view = state.read_only()
    >>> view.contains("b"), view["a"], list(view)
    (True, 1, ['a', 'b'])
    """

    def __init__(self, entries: _Entries) -> None:
        self._entries = entries

    @property
    def descriptor(self) -> MapStateDescriptor[K, V]:
        """The descriptor that declared the state."""
        return self._entries.descriptor

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, ``default`` if it is absent. O(1) and the copy."""
        entries = self._entries
        canonical = entries.encode(key)
        return entries.value_of(entries.by_key[canonical]) if canonical in entries.by_key else default

    def contains(self, key: K) -> bool:
        """Return True if the key is present, even with None for a value. O(1)."""
        return self._entries.encode(key) in self._entries.by_key

    def keys(self) -> Iterator[K]:
        """The keys, in insertion order."""
        entries = self._entries
        return entries.each(lambda key, data: entries.keys.key(key))

    def values(self) -> Iterator[V]:
        """The values, in insertion order of their keys."""
        entries = self._entries
        return entries.each(lambda key, data: entries.value_of(data))

    def items(self) -> Iterator[tuple[K, V]]:
        """Pairs of key and value, in insertion order."""
        entries = self._entries
        return entries.each(lambda key, data: (entries.keys.key(key), entries.value_of(data)))

    def is_empty(self) -> bool:
        """Return True without entries."""
        self._entries.backend.check_open()
        return not self._entries.by_key

    def __getitem__(self, key: K) -> V:
        if not self.contains(key):
            raise KeyError(f"the key is not in {self._entries.where()}")
        value: Any = self.get(key)
        return value  # type: ignore[no-any-return]

    def __contains__(self, key: K) -> bool:
        return self.contains(key)

    def __iter__(self) -> Iterator[K]:
        return self.keys()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.descriptor.name!r}>"


class BroadcastState(ReadOnlyBroadcastState[K, V]):
    """The writable side of a broadcast state; every instance must write the same.

    >>> from statebackend.operator_state import OperatorStateBackend
    >>> state = OperatorStateBackend().get_broadcast_state(MapStateDescriptor("rules", str, int))
    >>> state["a"] = 1
    >>> state.remove("a")
    >>> state.is_empty()
    True
    """

    mode = "broadcast"

    def __init__(
        self,
        backend: OperatorStateBackend,
        descriptor: MapStateDescriptor[K, V],
        entries: list[tuple[bytes, bytes | None]],
    ) -> None:
        super().__init__(_Entries(backend, descriptor))
        keys = canonical_keys([key for key, _ in entries], self._entries.keys.encoder)
        self._restored = dict(zip(keys, (data for _, data in entries), strict=True))
        self._entries.by_key = self._restored

    def read_only(self) -> ReadOnlyBroadcastState[K, V]:
        """A view of the state that cannot write; it sees later changes. O(1)."""
        return ReadOnlyBroadcastState(self._entries)

    def put(self, key: K, value: V | None) -> None:
        """Set the value of a key; the value may be None, the key may not. O(1)."""
        self._entries.put({self._entries.encode(key): self._entries.data_of(value)})

    def put_all(self, entries: Mapping[K, V]) -> None:
        """Put all entries; if one of them is refused, put none. None raises. O(entries)."""
        own = self._entries
        own.backend.check_open()
        given = entries_of(entries, own.where())
        own.put({own.encode(key): own.data_of(value) for key, value in given})

    def remove(self, key: K) -> None:
        """Remove a key; do nothing if it is absent. O(1)."""
        self._entries.remove(self._entries.encode(key))

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.backend.check_open()
        if self._entries.by_key:
            self._entries.by_key, self._entries.is_kept = {}, False
            self._entries._changes += 1

    def __setitem__(self, key: K, value: V | None) -> None:
        self.put(key, value)

    def __delitem__(self, key: K) -> None:
        if not self._entries.remove(self._entries.encode(key)):
            raise KeyError(f"the key is not in {self._entries.where()}")

    # --- for the backend ---

    def contents(self) -> dict[str, Any]:
        """Types and serialised entries, as plain data."""
        own = self._entries
        return {"mode": self.mode, "config": self.descriptor.config(), "entries": own.stored(own.by_key)}

    def view(self) -> StateView:
        """The entries as they are now. O(1)."""
        types = self.descriptor.config()["types"]
        return StateView(self.mode, types, self.keep(), self._entries.stored)

    def keep(self) -> dict[Any, bytes | None]:
        """The entries as they are now; the returned dict no longer changes. O(1)."""
        self._entries.is_kept = True
        return self._entries.by_key

    def put_back(self, by_key: dict[Any, bytes | None] | None) -> None:
        """Return to the entries that `keep` returned; for None, to those at the beginning."""
        self._entries.by_key = self._restored if by_key is None else by_key
        self._entries.is_kept = True
        self._entries._changes += 1
