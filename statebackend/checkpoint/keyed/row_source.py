"""Rows of keyed states on their way to a file, and from it."""

from __future__ import annotations

import importlib
import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.checkpoint.format import GroupedBatch, Op, Section, write_data_file
from statebackend.checkpoint.store.checkpoint_reader import Checkpoint
from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import StateSnapshot, StoredFile
from statebackend.errors import BackendUnavailableError
from statebackend.keys import KeyGroupRange
from statebackend.state import StateTtlConfig
from statebackend.types import Type

if TYPE_CHECKING:
    from statebackend.checkpoint.keyed.state_restore import RestoredState


class ExpiredAt(NamedTuple):
    """The times of the last commit, by which full snapshots leave out expired values; None: no value has expired."""

    now: int | None = None
    #: The time of states in event time.
    watermark: int | None = None

    def of(self, config: StateTtlConfig | None) -> int | None:
        """The time for a state with this time to live; None if all of it is written."""
        if config is None or not config.cleanup_full_snapshot:
            return None
        return self.watermark if config.is_in_event_time else self.now


class Source(ABC):
    """State at one moment, to be written. The backend's thread makes it; any thread reads, writes and releases it."""

    #: The threads that may work at once while it is written; with two or more, rows are encoded while others are made.
    threads = 1

    def __init__(self, kind: str, key_groups: KeyGroupRange) -> None:
        #: "base" for all rows, "delta" for changes.
        self.kind = kind
        self.key_groups = key_groups
        #: Restored states that are not declared, which a base holds in addition to `sections`.
        self.undeclared: tuple[RestoredState, ...] = ()
        #: Counts, by state, the values, list elements and map entries left out so far because they had expired.
        self.expired: dict[str, int] = defaultdict(int)
        #: Called when the files are complete.
        self.wrote: Callable[[Source], None] | None = None

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """True without rows."""

    @abstractmethod
    def sections(self) -> Sequence[Section]:
        """The states, each with its rows by ascending key groups; rows are made as they are asked for.

        In each key group of a state, rows that clear and remove come first, then rows that put, then rows that
        append.
        """

    @abstractmethod
    def release(self) -> None:
        """Release what keeps the moment alive. Idempotent."""

    def all_sections(self) -> list[Section]:
        """All states that have rows, or might have, declared or not."""
        return [*self.sections(), *(each.section() for each in self.undeclared if each.rows)]

    def rows_of(self, name: str) -> Iterable[GroupedBatch]:
        """The rows of a declared state."""
        return next((each.batches for each in self.sections() if each.name == name), ())

    def schema_of(self, name: str) -> pa.Schema | None:
        """The columns of a declared state; None if it is known to have no rows."""
        return next((each.schema for each in self.sections() if each.name == name), None)

    def find(
        self, name: str, keys: pa.Array, namespace: bytes
    ) -> tuple[pa.RecordBatch | None, NDArray[np.int64]]:
        """The rows of some keys in a namespace, and which key each has; None if only a scan can find them."""
        return None, np.empty(0, np.int64)

    def write(self, writer: DataWriter) -> tuple[StoredFile, ...]:
        """Write the files of this moment. The source is released in any case."""
        try:
            files = self._write(writer)
            if self.wrote is not None:
                self.wrote(self)
            return files
        finally:
            self.release()

    def _write(self, writer: DataWriter) -> tuple[StoredFile, ...]:
        """Write one data file with all rows, or none without rows."""
        if self.is_empty and not any(each.rows for each in self.undeclared):
            return ()
        with writer.create(self.kind, key_groups=self.key_groups) as file:
            # A state that is known to be empty costs nothing in the file.
            sections = [each for each in self.all_sections() if each.batches != ()]
            write_data_file(
                file, sections, name=file.name, compression=writer.compression, threads=self.threads
            )
            return (file.finish(),)


def grouped(parts: Sequence[tuple[pa.RecordBatch, np.ndarray]]) -> GroupedBatch:
    """Join batches with the key group of each row: sorted by key group, and within one in the order of the parts."""
    if len(parts) == 1:
        return GroupedBatch.of(*parts[0])
    groups = np.concatenate([groups for _, groups in parts])
    table = pa.Table.from_batches([batch for batch, _ in parts])
    order = np.argsort(groups, kind="stable")
    taken = table.take(pa.array(order)).combine_chunks()
    batches = taken.to_batches()
    batch = batches[0] if batches else parts[0][0].slice(0, 0)
    return GroupedBatch.of(batch, groups[order])


def joined_batches(parts: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Join batches of a schema into one."""
    table = pa.Table.from_batches(parts, schema).combine_chunks()
    if table.num_rows:
        return table.to_batches()[0]
    return pa.record_batch([pa.array([], each.type) for each in schema], schema=schema)


#: A column that carries the key groups of rows through changes of a table.
GROUP = "key_group"


def with_key_groups(rows: GroupedBatch) -> pa.Table:
    """Rows as a table with a column of their key groups."""
    groups = pa.array(rows.key_group_of_rows(), pa.int64())
    return pa.Table.from_batches([rows.batch]).append_column(GROUP, groups)


def grouped_batches(table: pa.Table) -> Iterator[GroupedBatch]:
    """The batches of a table whose rows come by ascending key groups, as the column of these says."""
    groups = table[GROUP].to_numpy()
    start = 0
    for batch in table.drop_columns([GROUP]).to_batches():
        yield GroupedBatch.of(batch, groups[start : start + batch.num_rows])
        start += batch.num_rows


def with_namespaces(rows: pa.Table) -> pa.Table:
    """Rows with `VOID` in place of the nulls of files that were written without namespaces."""
    if "namespace" not in rows.schema.names:
        return rows
    filled = rows["namespace"].fill_null(b"")
    return rows.set_column(rows.schema.get_field_index("namespace"), "namespace", filled)


#: The order of rows within a key group, by `Op`: those that clear and remove first, those that append last.
RANK = np.array([1, 0, 2, 0], dtype=np.int8)


def phases(rows: GroupedBatch) -> Iterator[tuple[Op, pa.RecordBatch]]:
    """Split rows by operation, in batches that respect the order of the rows.

    If the rows of each key group are in the order that `Source` promises, there is one batch per operation.
    """
    batch = rows.batch
    if "op" not in batch.schema.names:
        if batch.num_rows:
            yield Op.PUT, batch
        return
    ops = batch["op"].to_numpy(zero_copy_only=False)
    batch = batch.drop_columns(["op"])
    rank, group = RANK[ops], rows.key_group_of_rows()
    breaks = np.flatnonzero((np.diff(rank) < 0) & (np.diff(group) == 0)) + 1
    ends = [0, *breaks.tolist(), len(ops)]
    for start, end in itertools.pairwise(ends):
        part, own = batch.slice(start, end - start), ops[start:end]
        for op in (Op.CLEAR, Op.REMOVE, Op.PUT, Op.APPEND):
            chosen = own == op
            if chosen.all():
                if len(own):
                    yield op, part
                break
            if chosen.any():
                yield op, part.filter(pa.array(chosen))


def without_expired(batch: pa.RecordBatch, expired_before: int) -> tuple[pa.RecordBatch, np.ndarray]:
    """The rows whose values have later timestamps, and their positions; lists keep only such elements.

    >>> batch = pa.record_batch({"key": [1, 2], "value": [[5, 6], [7]], "timestamp": [[10, 30], [20]]})
    >>> without_expired(batch, 20)[0].to_pydict()
    {'key': [1], 'value': [[6]], 'timestamp': [[30]]}
    """
    stamps = batch["timestamp"]
    if not pa.types.is_list(stamps.type):
        kept = np.flatnonzero(stamps.to_numpy(zero_copy_only=False) > expired_before)
        return batch.take(pa.array(kept)), kept
    offsets = stamps.offsets.to_numpy()
    elements = slice(int(offsets[0]), int(offsets[-1]))
    is_kept = stamps.values.to_numpy(zero_copy_only=False)[elements] > expired_before
    before = np.concatenate(([0], np.cumsum(is_kept)))[offsets - offsets[0]].astype(np.int32)
    kept = np.flatnonzero(np.diff(before))
    chosen = pa.array(np.flatnonzero(is_kept) + elements.start)
    for name in ("value", "timestamp"):
        column = batch[name]
        filtered = pa.ListArray.from_arrays(pa.array(before), column.values.take(chosen), type=column.type)
        batch = batch.set_column(batch.schema.get_field_index(name), name, filtered)
    return batch.take(pa.array(kept)), kept


def stamp_count(batch: pa.RecordBatch) -> int:
    """Count the timestamps in rows: one for each value and map entry, and one for each element of a list."""
    stamps = batch["timestamp"]
    return len(stamps.flatten()) if pa.types.is_list(stamps.type) else len(stamps)


# --- rows in files that a database has made itself: only a database of the same kind can read them. Every other backend
# reads rows out of them, by a module that lies above this one and is loaded when the first of these files is found ---

NATIVE = "sst"
_READER = "statebackend.backends.rocksdb.native_base"


class NativeRows(NamedTuple):
    """The rows of a state in such files, as often as they are asked for."""

    read: Callable[[], Iterator[GroupedBatch]]
    #: True if they are in the backend's own database.
    is_held: bool = False


#: Gives the rows of each state in a snapshot's files that are a database's, for a type of key and some key groups.
OpenNative: TypeAlias = Callable[[Checkpoint, StateSnapshot, Type, KeyGroupRange], Mapping[str, NativeRows]]


def has_native(snapshot: StateSnapshot) -> bool:
    """Return True if some files of a snapshot are a database's own."""
    return any(file.kind == NATIVE for file in snapshot.files)


def open_native_rows(
    checkpoint: Checkpoint, snapshot: StateSnapshot, key_type: Type, key_groups: KeyGroupRange
) -> Mapping[str, NativeRows]:
    """Read such files as rows, in a separate database that lasts until its last reader is gone."""
    if not has_native(snapshot):
        return {}
    try:
        reader: Any = importlib.import_module(_READER)
    except ImportError as error:
        raise BackendUnavailableError(
            f"the checkpoint has files of RocksDB, and their reader is not built ({error})",
            code="BACKEND_UNAVAILABLE.IMPORT",
            hint="build it with 'python setup.py build_ext --inplace'",
        ) from error
    found: Mapping[str, NativeRows] = reader.open_native_rows(checkpoint, snapshot, key_type, key_groups)
    return found
