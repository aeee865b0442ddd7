"""Loads rows of a checkpoint into the tables of a heap state, through the batch kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from statebackend._core.kernels import batch_kernels, map_kernels
from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed.compaction import last_of, numbered
from statebackend.checkpoint.keyed.description import value_role
from statebackend.columns.codec_factory import holds_references
from statebackend.columns.nested_columns import encoded_keys
from statebackend.columns.stored_columns import Array, Column, value_column
from statebackend.keys import KeyGroupRange, canonical_list, key_encoder, take_rows
from statebackend.state import from_arrow, has_objects
from statebackend.types import Type

if TYPE_CHECKING:
    from statebackend.backends.heap.keyed_backend import HeapKeyedBackend


def load(backend: HeapKeyedBackend, state: Any, op: Op, rows: pa.RecordBatch) -> None:
    """Apply rows of one operation, in order. O(rows)."""
    if "namespace" not in rows.schema.names:
        _TableLoader(backend, state, 0).apply(op, rows)
        return
    spaces = rows["namespace"].dictionary_encode()
    rows = rows.drop_columns(["namespace"])
    names = backend.core.namespaces
    held = names.hold_many(spaces.dictionary.to_pylist(), True)
    try:
        numbers = held[spaces.indices.to_numpy()]
        in_void = numbers == 0
        if not in_void.all():
            part = rows.filter(pa.array(~in_void)) if in_void.any() else rows
            _TableLoader(backend, state, numbers[~in_void]).apply(op, part)
        if in_void.any():
            _TableLoader(backend, state, 0).apply(op, rows.filter(pa.array(in_void)))
    finally:
        names.let_go_many(held)


def unload(state: Any, groups: KeyGroupRange) -> None:
    """Remove everything in some key groups. O(entries there)."""
    tables = [state.plain, state.spaced]
    remove: list[Any] = [None if table is None else table.remove for table in tables]
    if state.descriptor.kind == "map":
        remove = [None if maps is None else maps.clear for maps in (state.plain_map, state.spaced_map)]
    for table, remove_from in zip(tables, remove, strict=True):
        for group in groups if table is not None else ():
            for key, namespace in zip(*table.keys_of(group), strict=True):
                remove_from(key, namespace)


class _TableLoader:
    """Loads rows of one table: of the one for `VOID`, or of the one for all other namespaces."""

    def __init__(self, backend: HeapKeyedBackend, state: Any, numbers: Array | int) -> None:
        self._backend = backend
        self._state = state
        descriptor = state.descriptor
        self._kind = descriptor.kind
        self._types = descriptor.stored_types()
        self._value_type: Type = self._types[value_role(self._kind)]
        self._expires = descriptor.ttl_config is not None
        is_spaced = isinstance(numbers, np.ndarray)
        self._table = state._table_of(is_spaced, True)
        self._maps: Any = None
        if self._kind == "map":
            self._maps = state.spaced_map if is_spaced else state.plain_map
        #: Those of the namespaces, by row; 0 in `VOID`.
        self._numbers = numbers

    def apply(self, op: Op, rows: pa.RecordBatch) -> None:
        keys = encoded_keys(self._backend._encoder, rows["key"])
        if op is Op.CLEAR or (op is Op.REMOVE and self._kind != "map"):
            self._drop(keys)
        elif op is Op.REMOVE:
            self._remove_entries(keys, self._map_keys(rows))
        elif self._kind == "map":
            self._put_entries(keys, self._map_keys(rows), rows)
        elif self._kind == "list":
            if op is Op.PUT:
                self._put_lists(keys, rows)
            else:
                self._append(keys, rows)
        else:
            self._put(keys, rows)

    # --- columns ---

    def _map_keys(self, rows: pa.RecordBatch) -> Any:
        return encoded_keys(key_encoder(self._types["key"]), rows["map_key"])

    def _values(self, column: pa.Array) -> Column:
        """Values in stored form; a type that holds objects is converted through Python."""
        if has_objects(self._value_type):
            return value_column(from_arrow(column, self._value_type), self._value_type)
        return value_column(column, self._value_type)

    @property
    def _are_objects(self) -> bool:
        return holds_references(self._value_type)

    def _objects(self, column: pa.Array) -> list[Any]:
        return from_arrow(column, self._value_type)

    def _stamps(self, column: pa.Array | None) -> Any:
        return 0 if column is None else np.ascontiguousarray(column.to_numpy(zero_copy_only=False))

    @property
    def _options(self) -> dict[str, Any]:
        return {"namespace": self._numbers, "threads": self._backend.threads}

    # --- what rows do ---

    def _put(self, keys: Any, rows: pa.RecordBatch) -> None:
        stamps = self._stamps(rows["timestamp"] if self._expires else None)
        if self._are_objects:
            _each_row(
                self._table.put, canonical_list(keys), self._objects(rows["value"]), self._numbers, stamps
            )
            return
        values, _ = self._values(rows["value"])
        batch_kernels.update_many(self._table, keys, values, timestamp=stamps, **self._options)

    def _put_lists(self, keys: Any, rows: pa.RecordBatch) -> None:
        if len(self._table):
            self._drop(keys)
        before = len(self._table)
        self._append(keys, rows)
        if len(self._table) - before == rows.num_rows:
            return
        # A key came more than once. Its lists were concatenated, but only the last list counts.
        self._drop(keys)
        places = [rows["key"], pa.array(np.broadcast_to(self._numbers, rows.num_rows))]
        last = np.sort(last_of(numbered(list(map(pa.chunked_array, places))), np.arange(rows.num_rows)))
        if isinstance(self._numbers, np.ndarray):
            self._numbers = self._numbers[last]
        self._append(take_rows(keys, last), rows.take(pa.array(last)))

    def _append(self, keys: Any, rows: pa.RecordBatch) -> None:
        lists = rows["value"]
        offsets = lists.offsets.to_numpy()
        own = slice(int(offsets[0]), int(offsets[-1]))
        elements = lists.values.slice(own.start, own.stop - own.start)
        owners = np.repeat(np.arange(len(lists)), np.diff(offsets))
        numbers = self._numbers[owners] if isinstance(self._numbers, np.ndarray) else 0
        stamps = 0
        if self._expires:
            of_lists = rows["timestamp"]
            ends = of_lists.offsets.to_numpy()
            stamps = self._stamps(of_lists.values.slice(int(ends[0]), int(ends[-1] - ends[0])))
        if self._are_objects:
            each = canonical_list(keys)
            owner_keys = [each[owner] for owner in owners.tolist()]
            _each_row(self._table.append, owner_keys, self._objects(elements), numbers, stamps)
            return
        values, _ = self._values(elements)
        batch_kernels.append_many(
            self._table, take_rows(keys, owners), values,
            timestamp=stamps, namespace=numbers, threads=self._backend.threads,
        )  # fmt: skip

    def _put_entries(self, keys: Any, map_keys: Any, rows: pa.RecordBatch) -> None:
        stamps = self._stamps(rows["timestamp"] if self._expires else None)
        if self._are_objects:
            columns = canonical_list(keys), canonical_list(map_keys), self._objects(rows["value"])
            _each_row(self._maps.put, *columns, self._numbers, stamps)
            return
        stored, nulls = self._values(rows["value"])
        map_kernels.put_many(
            self._maps, keys, map_keys, stored, nulls=nulls, timestamp=stamps, **self._options
        )

    def _remove_entries(self, keys: Any, map_keys: Any) -> None:
        if not self._are_objects:
            map_kernels.remove_many(self._maps, keys, map_keys, **self._options)
            return
        _each_row(self._maps.remove, canonical_list(keys), canonical_list(map_keys), self._numbers)

    def _drop(self, keys: Any) -> None:
        one: Callable[..., Any] | None = None
        if self._maps is not None:
            one = self._maps.clear
        elif self._are_objects:
            one = self._table.remove
        if one is None:
            batch_kernels.remove_many(self._table, keys, **self._options)
            return
        _each_row(one, canonical_list(keys), self._numbers)


def _each_row(write: Callable[..., Any], keys: list[Any], *columns: Any) -> None:
    """Call ``write`` for each row. A column is a list, an array, or one number for all rows."""
    lists = (c if isinstance(c, list) else np.broadcast_to(c, len(keys)).tolist() for c in columns)
    for row in zip(keys, *lists, strict=True):
        write(*row)
