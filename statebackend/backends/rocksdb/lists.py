"""The list handle: elements one behind the other in one value; appending merges, and reads nothing.

>>> from statebackend.backends.rocksdb import RocksDbBackend
>>> from statebackend.state import ListStateDescriptor
>>> keyed = RocksDbBackend().create_keyed_backend(int)
>>> tags = keyed.get_list_state(ListStateDescriptor("tags", str))
>>> keyed.set_current_key(1)
>>> tags.update(["a", "b"]); tags.add("c")
>>> tags.get()
['a', 'b', 'c']
>>> keyed.close()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from statebackend._core.rocksdb.handles.list_handle import ListHandle
from statebackend._core.rocksdb.handles.value_layouts import join_elements, split_elements
from statebackend.backends.rocksdb.states import RocksDbState
from statebackend.backends.rocksdb.vectorised import RocksDbListColumns
from statebackend.state import elements_of, expired
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed import RocksDbKeyedBackend


class RocksDbListState(ListHandle, RocksDbListColumns, RocksDbState):
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
        if self.ttl is None:
            return join_elements(data, self.codec.width)
        return join_elements(data, self.codec.width, self.now() if stamp is None else stamp)

    def _any_unexpired(self, stored: bytes, now: int) -> bool:
        assert self.ttl is not None
        return any(not expired(stamp, self.ttl, now) for stamp in self._elements(stored)[1])

    def is_there(self, stored: bytes | None) -> bool:
        return bool(stored)

    def is_alive(self, stored: bytes) -> bool:
        return bool(stored) and (self.ttl is None or self._any_unexpired(stored, self.now()))

    def stamps_of(self, stored: bytes) -> list[int]:
        return self._elements(stored)[1]

    def without_expired(self, stored: bytes, now: int) -> bytes | None:
        assert self.ttl is not None
        data, stamps = self._elements(stored)
        left = [each for each in zip(data, stamps, strict=True) if not expired(each[1], self.ttl, now)]
        if len(left) == len(data):
            return stored or None
        return b"".join(self.joined([each], stamp) for each, stamp in left) or None

    # --- for the compiled half ---

    def __iter__(self) -> Iterator[Any]:
        return self.watched(self._store.place_here, iter(self.get()))

    def _elements_of(self, values: Any) -> list[Any]:
        """The elements that a call was given, as a new list."""
        return elements_of(values, self.descriptor.element_type, f"state {self.descriptor.name!r}")

    def merged(self, a: bytes, b: bytes) -> bytes:
        return a + b
