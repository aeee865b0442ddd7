"""A base of RocksDB's own files: the files that a snapshot names and uploads.

The backend's thread makes a checkpoint of the database in the scratch folder: it flushes, and links. The writing
thread uploads what the store does not have yet, and removes the folder. Changes of an open batch are in front of the
database; it follows as a delta of rows.

For other uses, such files become a database in its own folder, which lasts as long as rows may be read.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from statebackend._core.rocksdb.binding.callbacks import ExpiryRules
from statebackend._core.rocksdb.binding.library import version
from statebackend._core.rocksdb.overlay.composite_keys import group_prefix
from statebackend._core.rocksdb.overlay.merging_iterator import MergingIterator
from statebackend.backends.rocksdb.library_location import load_library
from statebackend.backends.rocksdb.native_snapshot import (
    BY_TIME,
    FAMILIES,
    SST,
    NativeFamily,
    NativeSnapshot,
    StandInDescriptor,
    UndeclaredTable,
    families_bytes,
    has_stand_ins,
    stand_in_descriptor,
)
from statebackend.backends.rocksdb.row_loader import load
from statebackend.backends.rocksdb.scratch import Scratch
from statebackend.backends.rocksdb.settings import Settings
from statebackend.backends.rocksdb.snapshot_source import FamilyReader, RocksDbChanges, groups_of
from statebackend.checkpoint import Checkpoint, DataWriter, StateSnapshot, StoredFile
from statebackend.checkpoint.files.store_files import storing
from statebackend.checkpoint.format import GroupedBatch, Section
from statebackend.checkpoint.keyed import Source, StateDescription, compiled_backend as compiled
from statebackend.checkpoint.keyed.description import StateDescriptions
from statebackend.checkpoint.keyed.row_source import NATIVE, NativeRows, phases
from statebackend.checkpoint.keyed.state_restore import RestoredStates
from statebackend.errors import BackendUnavailableError
from statebackend.keys import KeyEncoder, KeyGroupRange, key_encoder
from statebackend.state import timer_state
from statebackend.types import Type

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed_backend import RocksDbKeyedBackend


class _Encoding(NamedTuple):
    """The interface that `FamilyReader` asks of a backend."""

    encoder: KeyEncoder


def open_native_rows(
    checkpoint: Checkpoint,
    snapshot: StateSnapshot,
    key_type: Type,
    key_groups: KeyGroupRange,
    settings: Settings | None = None,
) -> Mapping[str, NativeRows]:
    """Open the files of a snapshot as a database; the rows of each state in it. Every byte has been checked then."""
    try:
        load_library()
    except BackendUnavailableError as error:
        raise BackendUnavailableError(
            f"the checkpoint has files of RocksDB, whose library is not available: {error.message}",
            code=error.code,
            detail=error.detail,
            hint=error.hint or "install pyspark, or set STATEBACKEND_ROCKSDB_LIB",
        ) from error
    native = NativeSnapshot(checkpoint, snapshot)
    scratch = Scratch(settings or Settings(), native, is_read_only=True)
    encoder = key_encoder(key_type)
    found = {}
    for family in native.families:
        description = native.description_of(family)
        if description is not None:
            read = partial(_rows, scratch, encoder, description, family, key_groups)
            found[family.table] = NativeRows(read)
    return found


def _rows(
    scratch: Scratch,
    encoder: KeyEncoder,
    description: StateDescription,
    family: NativeFamily,
    key_groups: KeyGroupRange,
) -> Iterator[GroupedBatch]:
    """As `rows_of_family`; a possible caller keeps the database."""
    table = UndeclaredTable(scratch.database.column_family(family.family), family.has_namespaces)
    yield from rows_of_family(encoder, description, family, table, key_groups)


def rows_of_family(
    encoder: KeyEncoder,
    description: StateDescription,
    family: NativeFamily,
    table: UndeclaredTable,
    key_groups: KeyGroupRange,
) -> Iterator[GroupedBatch]:
    """The rows of some key groups, in order. O(rows of these), and a batch of memory."""
    stored: Any = stand_in_descriptor(description, family)
    backend: Any = _Encoding(encoder)
    held: Any = table
    state = FamilyReader(backend, stored, held)
    with MergingIterator(table.family, None, b"", group_prefix(key_groups.start), fill_cache=False) as walk:
        is_more = True
        while is_more:
            ends, keys, value_ends, values = walk.read_many(compiled.BATCH_ROWS, compiled.BATCH_BYTES)
            groups = groups_of((ends, keys))
            own = int(np.searchsorted(groups, key_groups.end, side="right"))
            is_more = 0 < own == len(groups)
            if not own:
                return
            batch, groups = state.batch((ends[: own + 1], keys), (value_ends[: own + 1], values), None)
            if batch.num_rows:
                yield GroupedBatch.of(batch, groups)


_BEHIND_ALL = b"\xff\xff\xff"


class _UndeclaredFamily(NamedTuple):
    """An undeclared column family."""

    described: NativeFamily
    #: None for timers in the order of firing.
    description: StateDescription | None
    table: UndeclaredTable


class _LoadTarget(NamedTuple):
    """The interface that `load` asks of a state."""

    descriptor: StandInDescriptor
    table: UndeclaredTable


class NativeStates:
    """The undeclared states in a backend's database, and which of its files the store has."""

    def __init__(self, backend: RocksDbKeyedBackend, adopted: NativeSnapshot | None) -> None:
        self._backend = backend
        self._adopted = adopted
        #: By RocksDB's name: the files with data as the store has them. Names are unique within one database, so this
        #: begins with the labels at the database's start, and is never taken over from another one.
        self.stored: dict[str, StoredFile] = {} if adopted is None else adopted.tables
        self._held: dict[str, _UndeclaredFamily] = {}
        self._adopting: set[str] = set()
        if adopted is not None:
            self._begin(adopted)

    def _begin(self, adopted: NativeSnapshot) -> None:
        database = self._backend.scratch.database
        for family in adopted.families:
            table = UndeclaredTable(database.column_family(family.family), family.has_namespaces)
            self._held[family.table] = _UndeclaredFamily(family, adopted.description_of(family), table)
            if not (family.is_reserved or self.has_all_key_groups):
                self._cut(table)
        for family in adopted.families:
            if adopted.is_dropped(family):
                self.forget(family.table)

    def _cut(self, table: UndeclaredTable) -> None:
        """Remove the key groups of other instances: whole files at once, and the rest behind one marker."""
        database, own = self._backend.scratch.database, self._backend.key_group_range
        for start, end in ((b"", group_prefix(own.start)), (group_prefix(own.end + 1), _BEHIND_ALL)):
            database.delete_files_in_range(table.family, start, end)
            database.delete_range(table.family, start, end, wal=False)

    # --- what checkpoints hold ---

    def families(self) -> list[NativeFamily]:
        """The undeclared ones."""
        return [
            each.described._replace(has_namespaces=each.table.has_namespaces) for each in self._held.values()
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._held

    # --- restoring ---

    def rows(self, snapshot: StateSnapshot) -> Mapping[str, NativeRows] | None:
        """The rows of each state; None if the snapshot is not the one that the database began with."""
        if self._adopted is None or snapshot is not self._adopted.snapshot:
            return None
        return {
            name: NativeRows(partial(self._rows, name), is_held=True)
            for name, held in self._held.items()
            if held.description is not None
        }

    def _rows(self, name: str) -> Iterator[Any]:
        held, backend = self._held[name], self._backend
        assert held.description is not None
        yield from rows_of_family(
            backend.encoder, held.description, held.described, held.table, backend.key_group_range
        )

    def take_in_changes(self, restored: RestoredStates) -> None:
        """Apply the deltas above the files to the database, which is still unread. Timers have their own way."""
        for name, held in self._held.items():
            state = restored.get(name)
            if state is None or held.description is None or held.described.is_reserved:
                continue
            loading = _LoadTarget(stand_in_descriptor(held.description, held.described), held.table)
            changes = state.rows.take_changes()
            load(self._backend, loading, (part for rows in changes for part in phases(rows)))

    @property
    def has_all_key_groups(self) -> bool:
        """True if the database began with the key groups of the backend, and no others."""
        return (
            self._adopted is not None and self._adopted.snapshot.key_groups == self._backend.key_group_range
        )

    # --- adopting ---

    @contextmanager
    def adopting(self, *names: str) -> Iterator[bool]:
        """Within, tables of these names are those that are there; says if they are. If it fails, they stay held."""
        if any(name not in self._held for name in names):
            yield False
            return
        self._adopting.update(names)
        try:
            yield True
        finally:
            self._adopting.difference_update(names)
        for name in names:
            del self._held[name]

    def rules_of(self, table: str) -> ExpiryRules | None:
        """The rules of a column family that is being adopted."""
        if table not in self._adopting:
            return None
        return self._backend.scratch.rules[self._held[table].described.family]

    def table_of(self, table: str) -> UndeclaredTable | None:
        """A column family that is being adopted."""
        return self._held[table].table if table in self._adopting else None

    def forget(self, name: str) -> None:
        """Drop what there still is of a state that was loaded into another column family."""
        for table in (name, name + BY_TIME):
            held = self._held.get(table)
            if held is not None and (table == name or held.described.is_by_time):
                del self._held[table]
                self._backend.scratch.database.drop_column_family(held.table.family)


class _Folder:
    """A checkpoint of the database, in a folder next to it that lasts until it is released."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch: Scratch | None = scratch
        self.path = Path(scratch.folder, f"base-{secrets.token_hex(8)}")
        scratch.hold()
        try:
            scratch.database.checkpoint(self.path)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Remove the folder, and let go of the database. Idempotent."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            for path in (self.path, f"{self.path}.tmp"):  # RocksDB makes it under that name first
                shutil.rmtree(path, ignore_errors=True)
            scratch.release()


class NativeBase(Source):
    """All files of a database at one moment, and the rows that are not in it."""

    def __init__(self, backend: RocksDbKeyedBackend, may_name: frozenset[str]) -> None:
        super().__init__("base", backend.key_group_range)
        self._native = backend.native
        self._may_name = may_name
        self._described = families_bytes(families_of(backend), version())
        segment = backend.batch_segment
        #: The changes of the open batch, which is in front of the database.
        self._changes = None if segment is None else RocksDbChanges(backend, segment)
        self._folder = _Folder(backend.scratch)

    @property
    def is_empty(self) -> bool:
        return True  # of rows

    def sections(self) -> Sequence[Section]:
        return ()

    def release(self) -> None:
        self._folder.release()

    def _write(self, writer: DataWriter) -> tuple[StoredFile, ...]:
        """Upload the new files of the database; write undeclared states, and then the open batch, as rows."""
        files = self._write_native(writer) + super()._write(writer)
        return files if self._changes is None else files + self._changes.write(writer)

    def _write_native(self, writer: DataWriter) -> tuple[StoredFile, ...]:
        folder = self._folder.path
        with storing(f"making {FAMILIES}"):
            (folder / FAMILIES).write_bytes(self._described)
            names = sorted(os.listdir(folder))
        known, tables, others = self._native.stored, {}, []
        for name in names:
            if name.endswith(SST):
                tables[name] = self._named(name, known) or self._add(writer, name)
            elif name in (FAMILIES, "CURRENT") or name.startswith("MANIFEST-"):
                others.append(self._add(writer, name))
        self._native.stored = tables
        return (*tables.values(), *others)

    def _named(self, name: str, known: dict[str, StoredFile]) -> StoredFile | None:
        """The file as the store has it, if it will be there when the snapshot is committed."""
        file = known.get(name)
        return file if file is not None and file.name in self._may_name else None

    def _add(self, writer: DataWriter, name: str) -> StoredFile:
        return writer.add(self._folder.path / name, NATIVE, key_groups=self.key_groups, label=name)


def can_be_native(backend: RocksDbKeyedBackend, states: StateDescriptions) -> bool:
    """Return True if the database has states, and a restore does not need their descriptors."""
    return bool(families_of(backend)) and all(has_stand_ins(each) for each in states.by_name)


def families_of(backend: RocksDbKeyedBackend) -> list[NativeFamily]:
    """The column families of all states that the database has, declared or not, and of timers."""
    found = [
        NativeFamily(
            name,
            state.table.family.name,
            state.layout,
            state.element_bytes(state.descriptor),
            state.table.has_namespaces,
        )
        for name, state in backend._states.items()
    ]
    for domain, queue in backend._timers.queues.items():
        name = timer_state(domain).name
        has_namespaces = queue.by_key.has_namespaces
        found.append(NativeFamily(name, queue.by_key.family.name, "map_entry", 0, has_namespaces))
        found.append(NativeFamily(name + BY_TIME, queue.by_time.family.name, "map_entry", 0, False))
    return [*found, *backend.native.families()]
