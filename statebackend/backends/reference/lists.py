"""The list handle.

>>> from statebackend.backends.reference import ReferenceBackend
>>> from statebackend.state import ListStateDescriptor
>>> keyed = ReferenceBackend().create_keyed_backend(int)
>>> tags = keyed.get_list_state(ListStateDescriptor("tags", str))
>>> keyed.set_current_key(1)
>>> tags.update(["a", "b"])
>>> list(tags)
['a', 'b']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from statebackend.backends.reference.base import ReferenceState, Stamped
from statebackend.backends.reference.table import Place
from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.state import KeyedListState, to_values
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.reference.backend import ReferenceKeyedBackend

__all__ = ["ReferenceListState"]


class ReferenceListState(ReferenceState["tuple[Stamped, ...]"], KeyedListState):
    """A list."""

    def __init__(self, backend: ReferenceKeyedBackend, descriptor: Any) -> None:
        super().__init__(backend, descriptor)
        self._serializer = serializer_for(descriptor.element_type)

    def _any(self, stored: tuple[Stamped, ...], wanted: Callable[[Stamped], bool]) -> bool:
        return any(map(wanted, stored))

    def without_dead(
        self, stored: tuple[Stamped, ...], budget: int = 2**63
    ) -> tuple[tuple[Stamped, ...] | None, int]:
        left = tuple(element for element in stored if not self._dead(element))
        return left or None, int(left != stored)

    def _timestamps(self, stored: tuple[Stamped, ...]) -> Iterable[int]:
        return (element.timestamp for element in stored)

    def get(self) -> list[Any]:
        self.accessed()
        at = self._here()
        stored = self.table.get(at) or ()
        values = [self._serializer.deserialize(each.data) for each in stored if self._visible(each)]
        left = tuple(each for each in stored if not (self._expired(each) and self._dead(each)))
        if stored and not left:
            self.expired_on_read += 1
            self.table.remove(at)
        elif self._refreshes and not all(map(self._expired, left)):
            self.table.put(at, tuple(map(self._renewed, left)))
        return values

    def _renewed(self, element: Stamped) -> Stamped:
        return element if self._expired(element) else self._stamp(element.data, element.timestamp)

    def __iter__(self) -> Iterator[Any]:
        return self.watched(self._here(), iter(self.get()))

    def add(self, value: Any) -> None:
        self.accessed()
        self._append(self._here(), [self._serialize(self._serializer, value)])

    def add_all(self, values: Iterable[Any]) -> None:
        self.accessed()
        self._append(self._here(), self._serialize_all(values))

    def _append(self, at: Place, data: list[bytes]) -> None:
        if data:
            self.table.put(at, (self.table.get(at) or ()) + tuple(map(self._stamp, data)))
            self.changed(at)

    def update(self, values: Iterable[Any]) -> None:
        self.accessed()
        at = self._here()
        data = self._serialize_all(values)
        if data:
            self.table.put(at, tuple(map(self._stamp, data)))
            self.changed(at)
        else:
            self.drop(at)

    def _serialize_all(self, values: Any) -> list[bytes]:
        if values is None or isinstance(values, (str, bytes, bytearray)):
            raise SerializationTypeError(
                f"a {type(values).__name__} is not a collection of elements",
                code="SERIALIZATION.NULL" if values is None else None,
                detail=self._where(),
                hint="give a list; clear() removes all elements" if values is None else "give a list",
            )
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            try:
                values = to_values(values, self.descriptor.element_type)
            except SerializationError as error:
                raise error.at(self._where()) from None
        return [self._serialize(self._serializer, value) for value in values]

    def merged(self, a: tuple[Stamped, ...], b: tuple[Stamped, ...]) -> tuple[Stamped, ...]:
        return a + b
