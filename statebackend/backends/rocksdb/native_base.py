"""A base of RocksDB's own files: what a snapshot names of them, and uploads.

The backend's thread makes a checkpoint of the database in the scratch folder: it flushes, and links. The writing
thread uploads what the store does not have yet, and removes the folder. What an open batch has changed is in front of
the database; it follows as a delta of rows.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from statebackend._core.rocksdb.library import version
from statebackend.backends.rocksdb.native_families import (
    BY_TIME,
    FAMILIES,
    NativeFamily,
    families_bytes,
    has_stand_ins,
)
from statebackend.backends.rocksdb.native_snapshot import SST
from statebackend.backends.rocksdb.scratch import Scratch
from statebackend.backends.rocksdb.snapshots import RocksDbChanges
from statebackend.checkpoint import DataWriter, StoredFile
from statebackend.checkpoint.format import Section
from statebackend.checkpoint.keyed import RowSource
from statebackend.checkpoint.keyed.native_files import NATIVE
from statebackend.checkpoint.keyed.restored_states import RestoredState
from statebackend.checkpoint.keyed.snapshot_files import TakenRows, TakenStates
from statebackend.checkpoint.store.data_files import storing
from statebackend.keys import KeyGroupRange
from statebackend.state import timer_state

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed import RocksDbKeyedBackend

__all__ = ["can_be_native", "families_of", "native_base"]


class _NoRows(RowSource):
    """Nothing."""

    @property
    def is_empty(self) -> bool:
        return True

    def sections(self) -> Sequence[Section]:
        return ()

    def release(self) -> None:
        """Nothing is held."""


class _Folder:
    """A checkpoint of the database, in a folder beside it that lasts until it is released."""

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


class NativeBase:
    """All files of a database at one moment, on their way into a store."""

    def __init__(
        self,
        backend: RocksDbKeyedBackend,
        may_name: frozenset[str],
        rows: list[TakenRows],
    ) -> None:
        self.key_groups: KeyGroupRange = backend.key_group_range
        self._native = backend.native
        self._may_name = may_name
        #: What is not in the database.
        self._rows = rows
        self._described = families_bytes(families_of(backend), version())
        self.source = _Folder(backend.scratch)

    def write(self, writer: DataWriter) -> tuple[StoredFile, ...]:
        """Upload what is new. The folder is removed, whatever happens."""
        try:
            made = self._write_native(writer)
            for rows in self._rows:
                made += rows.write(writer)
            return made
        finally:
            self.source.release()

    def _write_native(self, writer: DataWriter) -> tuple[StoredFile, ...]:
        folder = self.source.path
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
        return writer.add(self.source.path / name, NATIVE, key_groups=self.key_groups, label=name)


def native_base(
    backend: RocksDbKeyedBackend,
    may_name: frozenset[str],
    beside: tuple[RestoredState, ...],
    wrote: Callable[[RowSource], None],
) -> NativeBase:
    """Take a base of this moment; restored states that are not in the database lie ``beside`` it, as rows."""
    own = backend.key_group_range
    rows = [TakenRows("base", _NoRows(), beside, own, wrote)]
    if backend.batch_segment is not None:
        rows.append(TakenRows("delta", RocksDbChanges(backend, backend.batch_segment), (), own, wrote))
    return NativeBase(backend, may_name, rows)


def can_be_native(backend: RocksDbKeyedBackend, states: TakenStates) -> bool:
    """Return True if the database has states, and whoever restores them can do without their descriptors."""
    return bool(families_of(backend)) and all(has_stand_ins(each) for each in states.descriptions())


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
    for domain, queue in backend.queues().items():
        name = timer_state(domain).name
        has_namespaces = queue.by_key.has_namespaces
        found.append(NativeFamily(name, queue.by_key.family.name, "map_entry", 0, has_namespaces))
        found.append(NativeFamily(name + BY_TIME, queue.by_time.family.name, "map_entry", 0, False))
    return [*found, *backend.native.families()]
