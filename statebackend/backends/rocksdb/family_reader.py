"""Rows of a column family as columns of a checkpoint, without an object for each.

>>> from statebackend.backends.rocksdb import RocksDbBackend
>>> from statebackend.state import ValueStateDescriptor
>>> keyed = RocksDbBackend().create_keyed_backend(int)
>>> count = keyed.get_value_state(ValueStateDescriptor("count", int))
>>> [each.name for each in keyed.state_readers()]
['count']
>>> keyed.close()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from statebackend._core.rocksdb.handles.value_layouts import split_lists, split_values
from statebackend._core.rocksdb.overlay.composite_keys import split_many
from statebackend._core.rocksdb.overlay.keyed_store import Table
from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed import state_schema
from statebackend.checkpoint.keyed.description import value_role
from statebackend.columns.codec_factory import holds_references
from statebackend.columns.nested_columns import decoded_keys
from statebackend.columns.stored_columns import arrow_column, list_column, stored_column
from statebackend.keys import key_encoder
from statebackend.state import StateDescriptor
from statebackend.types import Type
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed_backend import RocksDbKeyedBackend

Array = np.ndarray[Any, Any]
#: Offsets and bytes.
Runs = tuple[Array, Array]


def groups_of(keys: Runs) -> Array:
    """The key groups of composite keys."""
    offsets, data = keys
    starts = offsets[:-1]
    groups: Array = data[starts].astype(np.int64) << 8 | data[starts + 1]
    return groups


def joined_runs(parts: Sequence[Runs]) -> Runs:
    """Concatenate runs, without the bytes before the first row and after the last row of each."""
    ends, data, size = [np.zeros(1, np.int64)], [], 0
    for offsets, part in parts:
        ends.append(offsets[1:] - offsets[0] + size)
        data.append(part[offsets[0] : offsets[-1]])
        size += int(offsets[-1] - offsets[0])
    return np.concatenate(ends), np.concatenate(data)


class FamilyReader:
    """A state, or the timers of a domain, on its way into a file."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: StateDescriptor, table: Table) -> None:
        self.descriptor = descriptor
        self.name = descriptor.name
        self.table = table
        self._encoder = backend.encoder
        self._has_namespaces = table.has_namespaces
        self._is_map, self.is_list = descriptor.kind == "map", descriptor.kind == "list"
        self._is_stamped = descriptor.ttl_config is not None
        types = descriptor.stored_types()
        self._value_type: Type = types[value_role(descriptor.kind)]
        self._width = serializer_for(self._value_type).fixed_width or 0
        self._map_encoder = key_encoder(types["key"]) if self._is_map else None

    def schema(self, *, ops: bool) -> pa.Schema:
        """The columns in a file of changes, or in a base."""
        key_type = self._encoder.declared_type
        return state_schema(key_type, self.descriptor, namespaces=self._has_namespaces, ops=ops)

    def batch(self, keys: Runs, values: Runs | None, op: Op | None) -> tuple[pa.RecordBatch, Array]:
        """Composite keys, and what is stored there (None: nothing), as a batch; and the key group of each row."""
        inner_encoder = None if op is Op.CLEAR else self._map_encoder
        map_is_int = None if inner_encoder is None else inner_encoder.kind == "int"
        groups, canonical, namespaces, inner = split_many(*keys, self._encoder.kind == "int", map_is_int)
        schema = self.schema(ops=op is not None)
        columns = {"key": decoded_keys(self._encoder, canonical)}
        if self._has_namespaces:
            columns["namespace"] = _binary(namespaces)
        if inner_encoder is not None:
            columns["map_key"] = decoded_keys(inner_encoder, inner)
        elif self._map_encoder is not None:
            columns["map_key"] = pa.nulls(len(groups), schema.field("map_key").type)
        if values is None:
            columns["value"] = pa.nulls(len(groups), schema.field("value").type)
            columns["timestamp"] = pa.nulls(len(groups), pa.int64())
            if self._is_stamped:
                columns["timestamp"] = pa.nulls(len(groups), schema.field("timestamp").type)
        elif self.is_list:
            self._add_lists(columns, values, schema)
        else:
            self._add_values(columns, values)
        if op is not None:
            columns["op"] = pa.array(np.full(len(groups), op, dtype=np.uint8))
        arrays = [columns[name] for name in schema.names]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if self.is_list and values is not None:
            kept = np.flatnonzero(np.diff(values[0]))
            if len(kept) < len(groups):  # no bytes are no list
                return batch.take(pa.array(kept)), groups[kept]
        return batch, groups

    def _add_values(self, columns: dict[str, pa.Array], values: Runs) -> None:
        stamps, nulls, ends, data = split_values(*values, self._is_stamped, self._is_map, self._width)
        columns["value"] = self._arrow((ends, data), None if nulls is None else ~nulls)
        if stamps is not None:
            columns["timestamp"] = pa.array(stamps)

    def _add_lists(self, columns: dict[str, pa.Array], values: Runs, schema: pa.Schema) -> None:
        list_ends, stamps, ends, data = split_lists(*values, self._width, self._is_stamped)
        columns["value"] = self._arrow((ends, data), None)
        if stamps is not None:
            columns["timestamp"] = pa.array(stamps)
        for name in columns.keys() & {"value", "timestamp"}:
            of_lists = schema.field(name).type
            columns[name] = list_column(list_ends, columns[name], of_lists, f"state {self.name!r}")

    def _arrow(self, runs: Runs, valid: Array | None) -> pa.Array:
        """Serialised values as Arrow has them; objects stay bytes."""
        if holds_references(self._value_type):
            column = _binary(runs)
            if valid is not None:
                column = column.take(pa.array(np.arange(len(column)), mask=~valid))
            return column.cast(self._value_type.arrow)
        return arrow_column(stored_column(runs, self._value_type), valid, self._value_type)


def _binary(runs: Runs) -> pa.Array:
    offsets, data = runs
    count = len(offsets) - 1
    if offsets[-1] < 2**31:
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.binary(), count, buffers)
    return pa.Array.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
