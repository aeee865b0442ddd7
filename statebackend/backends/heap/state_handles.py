"""The handles of the heap backend: compiled scalar methods under the interfaces of the state API.

>>> from statebackend.backends.heap import HeapBackend
>>> from statebackend.state import MapState, MapStateDescriptor
>>> keyed = HeapBackend().create_keyed_backend(int)
>>> seen = keyed.get_map_state(MapStateDescriptor("seen", str, int))
>>> isinstance(seen, HeapMapState), isinstance(seen, MapState)
(True, True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statebackend._core.handles.adding_handle import AddingHandle
from statebackend._core.handles.handle import Handle
from statebackend._core.handles.list_table_handle import ListTableHandle
from statebackend._core.handles.map_table_handle import MapTableHandle
from statebackend._core.handles.single_handle import ValueHandle
from statebackend._core.tables.map_table import MapTable
from statebackend._core.tables.state_table import StateTable
from statebackend.backends.heap.column_methods import (
    HeapAddingColumns,
    HeapListColumns,
    HeapMapColumns,
    HeapValueColumns,
)
from statebackend.checkpoint.keyed.description import value_role
from statebackend.columns.codec_factory import key_codec, value_codec
from statebackend.columns.vectorised_call import adding_plan
from statebackend.state import (
    AggregatingState,
    AggregatingStateDescriptor,
    FoldingState,
    ReducingState,
    StateDescriptor,
)

if TYPE_CHECKING:
    from statebackend.backends.heap.keyed_backend import HeapKeyedBackend


class HeapValueState(ValueHandle, HeapValueColumns):
    """A value."""

    __slots__ = ()


class HeapListState(ListTableHandle, HeapListColumns):
    """A list; elements are stored in chunks that only grow."""

    __slots__ = ()


class HeapMapState(MapTableHandle, HeapMapColumns):
    """A map; each entry is an entry of the table."""

    __slots__ = ()


class HeapReducingState(AddingHandle, HeapAddingColumns, ReducingState):
    """A reduced value."""

    __slots__ = ()


class HeapAggregatingState(AddingHandle, HeapAddingColumns, AggregatingState):
    """An accumulator of an aggregate."""

    __slots__ = ()


class HeapFoldingState(AddingHandle, HeapAddingColumns, FoldingState):
    """An accumulator of a fold."""

    __slots__ = ()


_CLASSES: dict[str, type[Handle]] = {
    "value": HeapValueState,
    "list": HeapListState,
    "map": HeapMapState,
    "reducing": HeapReducingState,
    "aggregating": HeapAggregatingState,
    "folding": HeapFoldingState,
}


def make_state(backend: HeapKeyedBackend, descriptor: StateDescriptor) -> Any:
    """Make a handle and the first table for a new state."""
    return make_handle(_CLASSES[descriptor.kind], backend, descriptor)


def table_shape(backend: HeapKeyedBackend) -> dict[str, Any]:
    """What the tables of all states of a backend have in common."""
    return {
        "key": "int" if backend.codec.is_int else "bytes",
        "plan": backend.codec.plan,
        "max_parallelism": backend.max_parallelism,
        "key_group_range": (backend.key_group_range.start, backend.key_group_range.end),
    }


def make_handle(handle: type[Handle], backend: HeapKeyedBackend, descriptor: StateDescriptor) -> Any:
    """Make a handle of this class, and the first table, for a new state."""
    where = f"state {descriptor.name!r}"
    types = descriptor.stored_types()
    codec = value_codec(types[value_role(descriptor.kind)], where)
    options: dict[str, Any] = {}
    if codec.layout == "object":
        options["watcher"] = backend.mutation_watcher
    shape = {**table_shape(backend), "timestamps": descriptor.ttl_config is not None}
    if descriptor.kind == "map":
        keys = key_codec(types["key"])
        options["keys_codec"] = keys
        shape["map_key"] = "int" if keys.is_int else "bytes"
        shape["nullable"] = True
    if descriptor.kind != "list":
        shape["copy_value"] = codec.copy_value
    if isinstance(descriptor, AggregatingStateDescriptor) and descriptor.type is not None:
        options["inputs"] = value_codec(descriptor.type, where)
    if descriptor.kind in ("reducing", "aggregating"):
        options["plan_of"] = adding_plan
    shape["value"] = ("list", codec.layout) if descriptor.kind == "list" else codec.layout
    table: Any = MapTable if descriptor.kind == "map" else StateTable

    def make_table(namespaces: bool) -> Any:
        backend.shape_changes += 1
        return table(backend.core, namespaces=namespaces, **shape)

    return handle(backend, descriptor, codec, make_table, **options)
