"""Loads rows of a checkpoint into a column family, by whole columns.

They go into the database, also while a batch is in front of it: no rollback undoes them, and they are not a change.
Many rows that are put are sorted and written into files, which the database takes in whole; the rest goes through its
memtables.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from statebackend._core.rocksdb.binding.database import ColumnFamily
from statebackend._core.rocksdb.binding.iterators import successor
from statebackend._core.rocksdb.binding.table_files import TableFile, ingest
from statebackend._core.rocksdb.binding.write_batch import WriteBatch
from statebackend._core.rocksdb.handles.value_layouts import join_lists, join_values
from statebackend._core.rocksdb.overlay.composite_keys import compose_many
from statebackend._core.rocksdb.overlay.keyed_store import Table
from statebackend._core.rocksdb.overlay.sorted_rows import picked, sorted_order
from statebackend.backends.rocksdb.family_states import Runs
from statebackend.backends.rocksdb.snapshot_source import groups_of, joined_runs
from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed.description import value_role
from statebackend.columns.codec_factory import holds_references
from statebackend.columns.nested_columns import encoded_keys
from statebackend.columns.stored_columns import Array, serialised_column, value_column
from statebackend.keys import canonical_list, key_encoder
from statebackend.state import from_arrow, has_objects
from statebackend.types import Type
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed_backend import RocksDbKeyedBackend


#: Rows that are put are sorted when there are about so many bytes of them, with Python's overhead for each.
GATHERED_BYTES = 16 << 20
#: A file is finished when it has so many bytes: as many as RocksDB's own files on the last level have.
FILE_BYTES = 64 << 20
#: Fewer rows than these are not worth a file.
FEWEST_IN_FILE = 20_000
_BYTES_PER_ROW = 24


def load(backend: RocksDbKeyedBackend, state: Any, rows: Iterable[tuple[Op, pa.RecordBatch]]) -> None:
    """Apply rows in order, each batch of one operation. O(rows), and a sort of those that do not ascend."""
    with SortBuffer(backend, state.table) as gathered:
        for op, batch in rows:
            keys = composed_keys(backend, state, op, batch)
            if op is Op.PUT:
                gathered.add(keys, _stored(state, batch))
            else:
                gathered.write()
                apply(backend, state, op, keys, batch)
        gathered.write()


class SortBuffer:
    """Rows that are put, until there are enough of them to be sorted and written, on their own thread.

    The rows of a state come by ascending key groups. So the last key group waits for its later rows, and
    the rest goes into the open file, behind what is there. Memory holds a few times `GATHERED_BYTES`.
    """

    def __init__(self, backend: RocksDbKeyedBackend, table: Table) -> None:
        self._family = table.family
        if not backend.store.has_marks:
            backend.store.flush()  # earlier writes are older than the loaded rows
        self._files = _Files(backend, self._family)
        self._database = backend.scratch.database
        self._parts: list[tuple[Runs, Runs]] = []
        self._bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def __enter__(self) -> SortBuffer:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._files.give_up()

    def add(self, keys: Runs, values: Runs) -> None:
        self._parts.append((keys, values))
        self._bytes += len(keys[1]) + len(values[1]) + _BYTES_PER_ROW * (len(keys[0]) - 1)
        if self._bytes >= GATHERED_BYTES:
            self._write_parts(is_end=False)

    def write(self) -> None:
        rows = sum(len(keys[0]) - 1 for keys, _ in self._parts)
        if self._writing is None and rows < FEWEST_IN_FILE:
            parts, self._parts, self._bytes = self._parts, [], 0
            for keys, values in parts:
                batch = WriteBatch(self._database)
                batch.put_many(self._family, *keys, *values)
                batch.write(wal=False)
            return
        self._write_parts(is_end=True)
        self._wait()

    def _write_parts(self, *, is_end: bool) -> None:
        parts, self._parts, self._bytes = self._parts, [], 0
        self._wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "statebackend-load")
        self._writing = self._thread.submit(self._files.write, parts, is_end=is_end)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


class _Files:
    """Files of a column family, one after the other. One thread at a time uses it."""

    def __init__(self, backend: RocksDbKeyedBackend, family: ColumnFamily) -> None:
        self._folder = backend.scratch.folder
        self._options = backend.scratch.family_options[family.name]
        self._family = family
        self._waiting: list[tuple[Runs, Runs]] = []
        self._file: TableFile | None = None
        #: Of the file, also if it could not be begun.
        self._path: str | None = None

    def write(self, parts: list[tuple[Runs, Runs]], *, is_end: bool) -> None:
        """Sort rows and write them; all but the last key group, unless it is the end."""
        parts[:0], self._waiting = self._waiting, []
        if parts:
            self._write_sorted(parts, is_end=is_end)
        if is_end:
            self._finish()

    def _write_sorted(self, parts: list[tuple[Runs, Runs]], *, is_end: bool) -> None:
        keys, values = (joined_runs(runs) for runs in zip(*parts, strict=True))
        parts.clear()
        order = sorted_order(*keys)
        if not is_end:
            groups = groups_of(keys)
            last = np.flatnonzero(groups == groups[order[-1]])
            if len(last) < len(groups):
                self._waiting = [(picked(*keys, last), picked(*values, last))]
                order = order[groups[order] != groups[order[-1]]]
        self._add(keys, values, order)

    def _add(self, keys: Runs, values: Runs, order: Array) -> None:
        if self._file is not None:
            (ends, data), first = keys, order[0]
            assert self._file.last is not None
            is_behind = data[ends[first] : ends[first + 1]].tobytes() > self._file.last
            if not is_behind or self._file.size >= FILE_BYTES:
                self._finish()
        if self._file is None:
            self._path = os.path.join(self._folder, f"{secrets.token_hex(8)}.sst")
            self._file = TableFile(self._path, self._options)
        self._file.add(*keys, *values, order)

    def _finish(self) -> None:
        """Let the database take the file in: of a key, the last ingested row counts."""
        if self._file is not None and self._path is not None:
            self._file.finish()
            ingest(self._family, self._path)
            self._file = self._path = None

    def give_up(self) -> None:
        """Remove a file that the database has not taken in."""
        self._file, self._waiting = None, []
        if self._path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._path)


def composed_keys(backend: RocksDbKeyedBackend, state: Any, op: Op, rows: pa.RecordBatch) -> Runs:
    keys = encoded_keys(backend.encoder, rows["key"])
    namespaces: Any = b""
    if "namespace" in rows.schema.names:
        namespaces = _runs(rows["namespace"])
        if namespaces[0][-1] > namespaces[0][0]:
            state.table.note_namespaces()
    map_keys = None
    if state.descriptor.kind == "map" and op is not Op.CLEAR:
        types = state.descriptor.stored_types()
        map_keys = encoded_keys(key_encoder(types["key"]), rows["map_key"])
    composed: Runs = compose_many(backend.groups_of(keys), keys, namespaces, map_keys)
    return composed


def _stored(state: Any, rows: pa.RecordBatch) -> Runs:
    descriptor = state.descriptor
    value_type = descriptor.stored_types()[value_role(descriptor.kind)]
    stamps = rows["timestamp"] if descriptor.ttl_config is not None else None
    if descriptor.kind == "list":
        return _lists(rows["value"], value_type, stamps)
    return _values(rows["value"], value_type, stamps, descriptor.kind == "map")


def apply(backend: RocksDbKeyedBackend, state: Any, op: Op, keys: Runs, rows: pa.RecordBatch) -> None:
    """Remove, clear or append."""
    family, batch = state.table.family, WriteBatch(backend.scratch.database)
    if op is Op.APPEND:
        batch.merge_many(family, *keys, *_stored(state, rows))
    elif op is Op.CLEAR and state.descriptor.kind == "map":
        for place in canonical_list(keys):
            batch.delete_range(family, place, successor(place) or b"\xff\xff\xff")
    else:
        batch.delete_many(family, *keys)
    batch.write(wal=False)


def _values(column: pa.Array, declared: Type, stamps: pa.Array | None, is_map: bool) -> Runs:
    runs, nulls = _serialised(column, declared)
    numbers = None if stamps is None else np.ascontiguousarray(stamps.to_numpy(zero_copy_only=False))
    flags = None if nulls is None else nulls.view(np.uint8)
    return join_values(*runs, numbers, flags if is_map else None, is_map)


def _lists(column: pa.Array, declared: Type, stamps: pa.Array | None) -> Runs:
    offsets = column.offsets.to_numpy().astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    runs, _ = _serialised(column.values.slice(first, last - first), declared)
    numbers = None
    if stamps is not None:
        ends = stamps.offsets.to_numpy()
        own = stamps.values.slice(int(ends[0]), int(ends[-1] - ends[0]))
        numbers = np.ascontiguousarray(own.to_numpy(zero_copy_only=False))
    return join_lists(offsets - first, *runs, serializer_for(declared).fixed_width or 0, numbers)


def _serialised(column: pa.Array, declared: Type) -> tuple[Runs, Array | None]:
    """Values as their serialiser writes them, and which are null."""
    if holds_references(declared):
        from_arrow(column, declared)  # raises for an object that does not come back
        nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
        return _runs(column.fill_null(b"") if column.null_count else column), nulls
    if has_objects(declared):
        values, nulls = value_column(from_arrow(column, declared), declared)
    else:
        values, nulls = value_column(column, declared)
    return serialised_column(values), nulls


def _runs(column: pa.Array) -> Runs:
    if not pa.types.is_large_binary(column.type):
        column = column.cast(pa.large_binary())
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64, count=len(column) + 1, offset=8 * column.offset)
    return ends, np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
