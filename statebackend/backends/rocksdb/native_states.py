"""States that lie in a restored database already: adopted when they are declared, and carried along until then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from statebackend._core.rocksdb.callbacks import ExpiryRules
from statebackend._core.rocksdb.composite_keys import group_prefix
from statebackend.backends.rocksdb.load_rows import load
from statebackend.backends.rocksdb.native_families import (
    BY_TIME,
    HeldTable,
    NativeFamily,
    StoredState,
    stored_state,
)
from statebackend.backends.rocksdb.native_rows import rows_of_family
from statebackend.backends.rocksdb.native_snapshot import NativeSnapshot
from statebackend.checkpoint import StateSnapshot, StoredFile
from statebackend.checkpoint.keyed import StateDescription
from statebackend.checkpoint.keyed.native_files import NativeRows
from statebackend.checkpoint.keyed.restored_states import RestoredStates
from statebackend.checkpoint.keyed.rows import phases

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed import RocksDbKeyedBackend

__all__ = ["NativeStates"]

_BEHIND_ALL = b"\xff\xff\xff"


class _Held(NamedTuple):
    """A column family that nobody has declared."""

    described: NativeFamily
    #: None for timers in the order of firing.
    description: StateDescription | None
    table: HeldTable


class _Loading(NamedTuple):
    """What `load` asks of a state."""

    descriptor: StoredState
    table: HeldTable


class NativeStates:
    """What a backend has in its database that nobody has declared, and which of its files the store has."""

    def __init__(self, backend: RocksDbKeyedBackend, adopted: NativeSnapshot | None) -> None:
        self._backend = backend
        self._adopted = adopted
        #: By RocksDB's name: the files with data as the store has them. Names are unique within one database, so this
        #: begins with what the database began with, and is never taken over from another one.
        self.stored: dict[str, StoredFile] = {} if adopted is None else adopted.tables
        self._held: dict[str, _Held] = {}
        self._adopting: set[str] = set()
        if adopted is not None:
            self._begin(adopted)

    def _begin(self, adopted: NativeSnapshot) -> None:
        database = self._backend.scratch.database
        for family in adopted.families:
            table = HeldTable(database.column_family(family.family), family.has_namespaces)
            self._held[family.table] = _Held(family, adopted.description_of(family), table)
            if not (family.is_reserved or self.has_all_key_groups):
                self._cut(table)
        for family in adopted.families:
            if adopted.is_dropped(family):
                self.forget(family.table)

    def _cut(self, table: HeldTable) -> None:
        """Remove the key groups of other instances: whole files at once, and what is left behind one marker."""
        database, own = self._backend.scratch.database, self._backend.key_group_range
        for start, end in ((b"", group_prefix(own.start)), (group_prefix(own.end + 1), _BEHIND_ALL)):
            database.delete_files_in_range(table.family, start, end)
            database.delete_range(table.family, start, end, wal=False)

    # --- what checkpoints hold ---

    def families(self) -> list[NativeFamily]:
        """Those that nobody has declared."""
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
        """Apply the deltas above the files to the database, which nobody has read yet. Timers have their own way."""
        for name, held in self._held.items():
            state = restored.get(name)
            if state is None or held.description is None or held.described.is_reserved:
                continue
            loading = _Loading(stored_state(held.description, held.described), held.table)
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

    def table_of(self, table: str) -> HeldTable | None:
        """A column family that is being adopted."""
        return self._held[table].table if table in self._adopting else None

    def forget(self, name: str) -> None:
        """Drop what there still is of a state that was loaded into another column family."""
        for table in (name, name + BY_TIME):
            held = self._held.get(table)
            if held is not None and (table == name or held.described.is_by_time):
                del self._held[table]
                self._backend.scratch.database.drop_column_family(held.table.family)
