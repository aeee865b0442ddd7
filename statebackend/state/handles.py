"""The interfaces of state handles, with vectorised methods ready to inherit.

A backend derives its handles from these classes and writes the abstract methods. The vectorised methods are
implemented with the scalar ones; a backend may override them. No class has instance attributes (``__slots__`` is
empty), so a handle can derive from an extension type too: ``class HeapValueState(ValueHandle, ValueState)``.

Some rules hold for all of them. The current key must be set (`UsageError` otherwise). A value of the wrong type raises
`SerializationError` or `OverflowError` and changes nothing. After the backend's `close` every call raises
`ClosedError`. Do not change a returned object; to store a change, call `update`.

>>> from statebackend.backends import create_backend
>>> from statebackend.state import MapStateDescriptor
>>> keyed = create_backend("reference").create_keyed_backend(str)
>>> keyed.set_current_key("ann")
>>> visits = keyed.get_map_state(MapStateDescriptor("visits", str, int))
>>> visits["/home"] = 1
>>> visits["/home"], "/cart" in visits, list(visits.items())
(1, False, [('/home', 1)])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from statebackend.state import scalar_fallback
from statebackend.state.descriptors import (
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from statebackend.state.value_columns import to_arrow
from statebackend.types import ACC, BOOL, IN, OUT, A, K, ListType, Subscriptable, T, Type, V

if TYPE_CHECKING:
    import pyarrow as pa

    from statebackend.state.backend_interface import KeyedStateBackend


D = TypeVar("D")


class State(Subscriptable, ABC):
    """The shared base of all states."""

    __slots__ = ()

    @abstractmethod
    def clear(self) -> None:
        """Remove the stored value; do nothing if there is none. O(1) amortised."""

    @abstractmethod
    def exists(self) -> bool:
        """Return True if a read would return something stored; never changes anything. O(1), no copy.

        With TTL, expired state does not exist under ``NeverReturnExpired``.
        """


class KeyedState(State):
    """State of the backend's current key and namespace."""

    __slots__ = ()

    @property
    @abstractmethod
    def descriptor(self) -> StateDescriptor:
        """The descriptor that declared the state."""

    @property
    @abstractmethod
    def backend(self) -> KeyedStateBackend:
        """The backend that the state belongs to."""

    def clear_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> None:
        """`clear` for each key. Atomic. O(n)."""
        scalar_fallback.each_key(scalar_fallback.CallRows(self, keys, namespaces, times), self.clear)

    def exists_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.BooleanArray:
        """`exists` for each key. O(n)."""
        return scalar_fallback.read_many(
            scalar_fallback.CallRows(self, keys, namespaces, times), self.exists, BOOL
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.descriptor.name!r}, {self.descriptor.describe()}>"


class ValueState(KeyedState, Generic[T, A]):
    """One value.

    >>> from statebackend.backends import create_backend
    >>> keyed = create_backend("reference").create_keyed_backend(int)
    >>> last = keyed.get_value_state(ValueStateDescriptor("last", str, default="none"))
    >>> keyed.set_current_key(1)
    >>> last.value()
    'none'
    >>> last.update("x")
    >>> last.get_many([1, 2]).to_pylist()
    ['x', 'none']
    """

    __slots__ = ()

    @property
    @abstractmethod
    def descriptor(self) -> ValueStateDescriptor[T, A]: ...

    @abstractmethod
    def value(self) -> T | A:
        """The value; if there is none, a copy of the default, which may be None. O(1) and the copy."""

    @abstractmethod
    def update(self, value: T | None) -> None:
        """Set the value; ``update(None)`` clears. O(1), ``value`` is copied."""

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        """`value` for each key; null if there is neither a value nor a default. O(n)."""
        rows = scalar_fallback.CallRows(self, keys, namespaces, times)
        return scalar_fallback.read_many(rows, self.value, self.descriptor.type)

    def update_many(self, keys: Any, values: Any, *, namespaces: Any = None, times: Any = None) -> None:
        """`update` for each row, in order; a null clears. Atomic. O(n)."""
        rows = scalar_fallback.CallRows(self, keys, namespaces, times)
        scalar_fallback.each_key(rows, self.update, (values, self.descriptor.type, True))


class ListState(State, Generic[T]):
    """A list of elements. It never holds None, and an empty list is the same as none.

    >>> from statebackend.backends import create_backend
    >>> keyed = create_backend("reference").create_keyed_backend(int)
    >>> clicks = keyed.get_list_state(ListStateDescriptor("clicks", str))
    >>> keyed.set_current_key(1)
    >>> clicks.add("a"); clicks.add_all(["b", "c"])
    >>> clicks.get(), clicks.exists()
    (['a', 'b', 'c'], True)
    """

    __slots__ = ()

    @abstractmethod
    def get(self) -> list[T]:
        """The elements, in order, as a new list; empty if there are none. O(length)."""

    @abstractmethod
    def __iter__(self) -> Iterator[T]:
        """The elements, in order. If the list is changed meanwhile, the next step raises `RuntimeError`."""

    @abstractmethod
    def add(self, value: T) -> None:
        """Append an element; None raises. O(1) amortised, ``value`` is copied."""

    @abstractmethod
    def add_all(self, values: Iterable[T]) -> None:
        """Append elements; a None among them, or ``add_all(None)``, raises and appends nothing. O(added)."""

    @abstractmethod
    def update(self, values: Iterable[T]) -> None:
        """Replace the list; an empty one clears; None, or a None among them, raises. O(elements)."""


class KeyedListState(ListState[T], KeyedState):
    """A `ListState` of the current key, with the vectorised form.

    >>> from statebackend.backends import create_backend
    >>> keyed = create_backend("reference").create_keyed_backend(int)
    >>> clicks = keyed.get_list_state(ListStateDescriptor("clicks", str))
    >>> clicks.add_many([1, 2, 1], ["a", "b", "c"])
    >>> clicks.get_many([1, 2, 3]).to_pylist()
    [['a', 'c'], ['b'], []]
    """

    __slots__ = ()

    @property
    @abstractmethod
    def descriptor(self) -> ListStateDescriptor[T]: ...

    def add_many(self, keys: Any, values: Any, *, namespaces: Any = None, times: Any = None) -> None:
        """`add` for each row, in order; a null raises. Atomic. O(n)."""
        rows = scalar_fallback.CallRows(self, keys, namespaces, times)
        scalar_fallback.each_key(rows, self.add, (values, self.descriptor.element_type, False))

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.ListArray:
        """`get` for each key; an empty list without elements. O(n and all elements)."""
        rows = scalar_fallback.CallRows(self, keys, namespaces, times)
        return scalar_fallback.read_many(rows, self.get, ListType(self.descriptor.element_type))


class MapState(KeyedState, Generic[K, V]):
    """A map in insertion order. Values may be None, keys may not, and an empty map is the same as none.

    Replacing the value of an existing key keeps its place, and is allowed while iterating. If a key is added or
    removed meanwhile, the next step raises `RuntimeError`.

    >>> from statebackend.backends import create_backend
    >>> keyed = create_backend("reference").create_keyed_backend(int)
    >>> seen = keyed.get_map_state(MapStateDescriptor("seen", str, int))
    >>> keyed.set_current_key(1)
    >>> seen.put("a", None)
    >>> seen.get("a", 7), seen.get("b", 7), seen.contains("a")
    (None, 7, True)
    >>> seen.remove("a")
    >>> seen.exists()
    False
    """

    __slots__ = ()

    @property
    @abstractmethod
    def descriptor(self) -> MapStateDescriptor[K, V]: ...

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    @abstractmethod
    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, ``default`` if the key is absent. O(1) and the copy."""

    @abstractmethod
    def put(self, key: K, value: V | None) -> None:
        """Set the value of a key; the value may be None. O(1), both are copied."""

    @abstractmethod
    def put_all(self, entries: Mapping[K, V]) -> None:
        """Put all entries; if one of them is refused, put none. None raises. O(entries)."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Remove a key; do nothing if it is absent. Removing the last one removes the map. O(1)."""

    @abstractmethod
    def contains(self, key: K) -> bool:
        """Return True if the key is present, even with None for a value. O(1)."""

    @abstractmethod
    def keys(self) -> Iterator[K]:
        """The keys, in insertion order."""

    @abstractmethod
    def values(self) -> Iterator[V]:
        """The values, in insertion order of their keys."""

    @abstractmethod
    def items(self) -> Iterator[tuple[K, V]]:
        """Pairs of key and value, in insertion order."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Return True if no read would return an entry; never changes anything."""

    @abstractmethod
    def __getitem__(self, key: K) -> V:
        """The value of a key; `KeyError` if it is absent."""

    @abstractmethod
    def __delitem__(self, key: K) -> None:
        """Remove a key; `KeyError` if it is absent."""

    def __setitem__(self, key: K, value: V | None) -> None:
        self.put(key, value)

    def __contains__(self, key: K) -> bool:
        return self.contains(key)

    def __iter__(self) -> Iterator[K]:
        return self.keys()

    def exists(self) -> bool:
        return not self.is_empty()

    def get_many(self, keys: Any, map_keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        """`get` of each row's map key; null if it is absent. O(n)."""
        rows = scalar_fallback.CallRows(self, keys, namespaces, times)
        return to_arrow(scalar_fallback.map_each(rows, map_keys, self.get), self.descriptor.value_type)

    def put_many(
        self, keys: Any, map_keys: Any, values: Any, *, namespaces: Any = None, times: Any = None
    ) -> None:
        """`put` for each row, in order; a null value is stored as None. Atomic. O(n)."""
        rows = scalar_fallback.CallRows(self, keys, namespaces, times)
        scalar_fallback.map_each(rows, map_keys, self.put, (values, self.descriptor.value_type, True))

    def remove_many(self, keys: Any, map_keys: Any, *, namespaces: Any = None, times: Any = None) -> None:
        """`remove` for each row, in order. Atomic. O(n)."""
        scalar_fallback.map_each(
            scalar_fallback.CallRows(self, keys, namespaces, times), map_keys, self.remove
        )


class AddingState(KeyedState, Generic[IN, OUT]):
    """The shared part of reducing, aggregating and folding states."""

    __slots__ = ()

    @abstractmethod
    def get(self) -> OUT | None:
        """The result of the added values; None if none was added. O(1), and the copy or the function."""

    @abstractmethod
    def add(self, value: IN | None) -> None:
        """Add a value; ``add(None)`` clears. If the function raises, nothing changes. O(1)."""

    def get_many(self, keys: Any, *, namespaces: Any = None, times: Any = None) -> pa.Array:
        """`get` for each key; null if nothing was added. O(n)."""
        rows = scalar_fallback.CallRows(self, keys, namespaces, times)
        return scalar_fallback.read_many(rows, self.get, self._column_types()[1])

    @overload
    def add_many(
        self,
        keys: Any,
        values: Any,
        *,
        return_changed: Literal[True],
        namespaces: Any = None,
        times: Any = None,
    ) -> scalar_fallback.Changed: ...

    @overload
    def add_many(
        self,
        keys: Any,
        values: Any,
        *,
        return_changed: bool = False,
        namespaces: Any = None,
        times: Any = None,
    ) -> scalar_fallback.Changed | None: ...

    def add_many(
        self,
        keys: Any,
        values: Any,
        *,
        return_changed: bool = False,
        namespaces: Any = None,
        times: Any = None,
    ) -> scalar_fallback.Changed | None:
        """`add` for each row, in order; a null clears. Atomic. O(n).

        With ``return_changed``, return the distinct keys, by ascending key group and in a group as they first came,
        with the results and namespaces that they have now.
        """
        value_type, result_type = self._column_types()
        rows = scalar_fallback.CallRows(self, keys, namespaces, times)
        return scalar_fallback.add_many(rows, values, value_type, return_changed, result_type)

    def _column_types(self) -> tuple[Type | None, Type | None]:
        """The types of columns of values and of results; None: any."""
        of: Any = self.descriptor
        if of.kind == "aggregating":
            return of.type, of.result_type
        return (None if of.kind == "folding" else of.type), of.type

    def _added_values(self, values: Any, declared: Type | None) -> list[Any]:
        """The values of a vectorised call, checked as a whole; None for a null."""
        return scalar_fallback.values_of(values, declared, True, self)

    def _add_each(self, rows: scalar_fallback.CallRows, values: list[Any]) -> None:
        """`add` for each row of a vectorised call, with its key current."""
        rows.call_each(self.add, values)


class ReducingState(AddingState[T, T], Generic[T]):
    """One value; each added value is reduced into it.

    >>> from statebackend.backends import create_backend
    >>> keyed = create_backend("reference").create_keyed_backend(str)
    >>> most = keyed.get_reducing_state(ReducingStateDescriptor("most", "max", int))
    >>> most.add_many(["a", "b", "a"], [3, 1, 2])
    >>> most.get_many(["a", "b", "c"]).to_pylist()
    [3, 1, None]
    """

    __slots__ = ()

    @property
    @abstractmethod
    def descriptor(self) -> ReducingStateDescriptor[T]: ...


class AggregatingState(AddingState[IN, OUT]):
    """One accumulator; each added value goes into it, and `get` makes the result.

    >>> from statebackend.backends import create_backend
    >>> keyed = create_backend("reference").create_keyed_backend(str)
    >>> mean = keyed.get_aggregating_state(AggregatingStateDescriptor("mean", "avg", int))
    >>> keys, means, _ = mean.add_many(["a", "b", "a"], [3, 1, 4], return_changed=True)
    >>> dict(zip(keys.to_pylist(), means.to_pylist()))
    {'b': 1.0, 'a': 3.5}
    """

    __slots__ = ()

    @property
    @abstractmethod
    def descriptor(self) -> AggregatingStateDescriptor[IN, OUT]: ...


class FoldingState(AddingState[IN, ACC]):
    """One accumulator; each added value advances it.

    >>> from statebackend.backends import create_backend
    >>> keyed = create_backend("reference").create_keyed_backend(str)
    >>> path = keyed.get_folding_state(FoldingStateDescriptor("path", "", lambda a, v: f"{a}/{v}", str))
    >>> keyed.set_current_key("a")
    >>> path.add(1); path.add(2)
    >>> path.get()
    '/1/2'
    """

    __slots__ = ()

    @property
    @abstractmethod
    def descriptor(self) -> FoldingStateDescriptor[IN, ACC]: ...
