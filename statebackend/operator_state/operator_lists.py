"""List states of an operator.

>>> from statebackend.state import ListStateDescriptor
>>> from statebackend.operator_state import OperatorStateBackend
>>> buffered = OperatorStateBackend().get_list_state(ListStateDescriptor("buffered", str))
>>> buffered.update(["a", "b"])
>>> list(buffered)
['a', 'b']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.keys import as_columnar
from statebackend.operator_state.element_bytes import ElementBytes
from statebackend.operator_state.operator_snapshots import StateView
from statebackend.state import ListState, ListStateDescriptor, to_values
from statebackend.types import T

if TYPE_CHECKING:
    from statebackend.operator_state.operator_backend import OperatorStateBackend

__all__ = ["OperatorListState"]


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
            self._elements = viewed  # all changes were taken back: it is the same list for a snapshot, too
        self._elements.is_viewed, self._elements.copied_from = True, None
        return StateView(self.mode, self.descriptor.config()["types"], self._elements)

    def keep(self) -> tuple[_Elements, int]:
        """What `put_back` needs to return to the list as it is now. O(1); what is appended later costs no copy."""
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
        if values is None or isinstance(values, (str, bytes, bytearray)):
            raise SerializationTypeError(
                f"a {type(values).__name__} is not a collection of elements",
                code="SERIALIZATION.NULL" if values is None else None,
                detail=f"operator state {self.descriptor.name!r}",
                hint="give a list",
            )
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            column = as_columnar(values, "elements")
            stored = self._bytes.of_column(column)
            if stored is not None:
                return stored
            try:
                values = to_values(column, self.descriptor.element_type)
            except SerializationError as error:
                raise error.at(f"operator state {self.descriptor.name!r}") from None
        return [self._serialize(value) for value in values]

    def get(self) -> list[T]:
        self._backend.check_open()
        return list(map(self._bytes.value, self._elements))

    def __iter__(self) -> Iterator[T]:
        self._backend.check_open()
        return self._steps(self._changes)

    def _steps(self, changes: int) -> Iterator[Any]:
        at = 0
        while True:
            self._backend.check_open()
            if self._changes != changes:
                raise RuntimeError("the state was changed while it was iterated")
            if at == len(self._elements):
                return
            yield self._bytes.value(self._elements[at])
            at += 1

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
