"""Handles of states with one value for a key: value, reducing, aggregating and folding.

>>> from statebackend.backends.rocksdb import RocksDbBackend
>>> from statebackend.state import ReducingStateDescriptor
>>> keyed = RocksDbBackend().create_keyed_backend(int)
>>> total = keyed.get_reducing_state(ReducingStateDescriptor("total", "sum", int))
>>> keyed.set_current_key(1)
>>> total.add(2); total.add(3)
>>> total.get()
5
>>> keyed.close()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from statebackend._core.rocksdb.single_handles import (
    AggregatingHandle,
    FoldingHandle,
    ReducingHandle,
    ValueHandle,
)
from statebackend.backends.rocksdb.additions import AddingColumns
from statebackend.backends.rocksdb.states import RocksDbState
from statebackend.backends.rocksdb.vectorised import SingleColumns, ValueColumns
from statebackend.columns.codec_choice import value_bytes
from statebackend.state import AggregatingState, FoldingState, ReducingState, ValueState

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed import RocksDbKeyedBackend

__all__ = [
    "RocksDbAggregatingState",
    "RocksDbFoldingState",
    "RocksDbReducingState",
    "RocksDbSingleState",
    "RocksDbValueState",
]


class RocksDbSingleState(SingleColumns, RocksDbState):
    """One value for a key: its timestamp, if there is a time to live, and its bytes."""

    unexpired: Callable[[bytes], Any]
    stored: Callable[..., bytes]

    def _merge_by(self, merge: Callable[[Any, Any], Any], a: bytes, b: bytes) -> bytes | None:
        first, second = self.unexpired(a), self.unexpired(b)
        if first is None and second is None:
            return None
        if first is None or second is None:
            return self.stored(second if first is None else first)
        latest = max(self.stamps_of(a) + self.stamps_of(b)) if self._in_event_time else None
        return self.stored(merge(first, second), latest)


class RocksDbValueState(ValueHandle, ValueColumns, RocksDbSingleState, ValueState):
    """A value."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.type)


class RocksDbReducingState(ReducingHandle, AddingColumns, RocksDbSingleState, ReducingState):
    """A reduced value."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.type)

    def merged(self, a: bytes, b: bytes) -> bytes | None:
        return self._merge_by(self.descriptor.reduce, a, b)


class RocksDbAggregatingState(AggregatingHandle, AddingColumns, RocksDbSingleState, AggregatingState):
    """An accumulator of an aggregate."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.accumulator_type)
        where = f"state {descriptor.name!r}"
        self._take_inputs(None if descriptor.type is None else value_bytes(descriptor.type, where))

    def merged(self, a: bytes, b: bytes) -> bytes | None:
        return self._merge_by(self.descriptor.aggregate.merge, a, b)


class RocksDbFoldingState(FoldingHandle, AddingColumns, RocksDbSingleState, FoldingState):
    """An accumulator of a fold."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any) -> None:
        RocksDbState.__init__(self, backend, descriptor, descriptor.type)
