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
from statebackend.operator_state.operator_snapshots import StateView
from statebackend.state import ListState, ListStateDescriptor
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.operator_state.operator_backend import OperatorStateBackend

__all__ = ["OperatorListState"]


class OperatorListState(ListState):
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
        self, backend: OperatorStateBackend, descriptor: ListStateDescriptor, mode: str, elements: list[bytes]
    ) -> None:
        self._backend = backend
        self.descriptor = descriptor
        self.mode = mode
        self._serializer = serializer_for(descriptor.element_type)
        self._elements = self._restored = elements
        #: True if something else keeps the list too, so it must be copied before the next change.
        self._is_kept = True
        self._changes = 0

    # --- for the backend ---

    def contents(self) -> dict[str, Any]:
        """Mode, types and serialised elements, as plain data."""
        config = self.descriptor.config()
        return {"mode": self.mode, "config": config, "elements": list(self._elements)}

    def view(self) -> StateView:
        """The list as it is now. O(1)."""
        return StateView(self.mode, self.descriptor.config()["types"], self.keep())

    def keep(self) -> list[bytes]:
        """The list as it is now; the returned list no longer changes. O(1)."""
        self._is_kept = True
        return self._elements

    def put_back(self, elements: list[bytes] | None) -> None:
        """Return to the list that `keep` returned; for None, to that at the beginning."""
        self._elements = self._restored if elements is None else elements
        self._is_kept = True
        self._changes += 1

    # --- for users ---

    def _changing(self) -> list[bytes]:
        if self._is_kept:
            self._elements = list(self._elements)
            self._is_kept = False
        self._changes += 1
        return self._elements

    def _serialize(self, value: Any) -> bytes:
        where = f"operator state {self.descriptor.name!r}"
        if value is None:
            raise SerializationTypeError("an element is None", code="SERIALIZATION.NULL", detail=where)
        try:
            return self._serializer.serialize(value)
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
            values = values.to_pylist()
        return [self._serialize(value) for value in values]

    def get(self) -> list[Any]:
        self._backend.check_open()
        return [self._serializer.deserialize(element) for element in self._elements]

    def __iter__(self) -> Iterator[Any]:
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
            yield self._serializer.deserialize(self._elements[at])
            at += 1

    def add(self, value: Any) -> None:
        self._backend.check_open()
        data = self._serialize(value)
        self._changing().append(data)

    def add_all(self, values: Iterable[Any]) -> None:
        self._backend.check_open()
        data = self._serialize_all(values)
        if data:
            self._changing().extend(data)

    def update(self, values: Iterable[Any]) -> None:
        self._backend.check_open()
        data = self._serialize_all(values)
        self._elements, self._is_kept = data, False
        self._changes += 1

    def clear(self) -> None:
        self._backend.check_open()
        if self._elements:
            self._elements, self._is_kept = [], False
            self._changes += 1

    def exists(self) -> bool:
        self._backend.check_open()
        return bool(self._elements)

    def __repr__(self) -> str:
        return f"<OperatorListState {self.descriptor.name!r}, {self.mode}>"
