"""The database of one keyed backend: a folder that lasts as long as somebody reads it, and no longer.

>>> from pathlib import Path
>>> from statebackend.backends.rocksdb.settings import Settings
>>> scratch = Scratch(Settings())
>>> Path(scratch.folder).is_dir(), scratch.release(), Path(scratch.folder).exists()
(True, None, False)
"""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

from statebackend._core.rocksdb.callbacks import CommittedClock, ExpiryRules
from statebackend._core.rocksdb.database import ColumnFamily, Database, families_in
from statebackend._core.rocksdb.options import MemoryBudget, Options
from statebackend.backends.rocksdb.folders import LockedFolder
from statebackend.backends.rocksdb.options import column_family_settings, database_settings, predefined
from statebackend.backends.rocksdb.settings import Settings
from statebackend.errors import CorruptCheckpointError, StoreError

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.native_snapshot import NativeSnapshot

__all__ = ["Scratch", "shared_budget"]

#: Batches go in by the order of their keys: each is looked for from where the last one went, not from the top.
_IN_ORDER: dict[str, str | int | bool] = {
    "allow_concurrent_memtable_write": False,
    "memtable_insert_with_hint_prefix_extractor": "rocksdb.FixedPrefix.1",
}

#: A lower limit of open files than this, which is usual, makes RocksDB close files and open them again.
FEW_FILES = 1024
#: The errors of files that are not a database.
_DAMAGED = ("STORE.DATABASE_LOST_FILE", "STORE.DATABASE_CORRUPT")

_budgets: weakref.WeakValueDictionary[tuple[int, int], MemoryBudget] = weakref.WeakValueDictionary()
_making = threading.Lock()


def _open_files() -> dict[str, str | int | bool]:
    """The setting for a process that may open few files: RocksDB has all files of a database open otherwise."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"max_open_files": limit // 4} if 0 <= limit < FEW_FILES else {}


def shared_budget(limit: int) -> MemoryBudget:
    """The memory budget of this limit, one for the process; it lasts as long as it is used."""
    with _making:
        found = _budgets.get((os.getpid(), limit))
        if found is None:
            found = _budgets[os.getpid(), limit] = MemoryBudget(limit)
        return found


class Scratch:
    """A database in a new folder. The backend holds it, and so does every snapshot that is being written.

    It has no log, and nothing of it outlives the process: state survives in checkpoints. If the process is killed, the
    next one removes the folder. The database begins with the files of a checkpoint, if these are given.
    """

    def __init__(
        self, settings: Settings, native: NativeSnapshot | None = None, *, is_read_only: bool = False
    ) -> None:
        self._settings = settings
        self._users = 1
        self._lock = threading.Lock()
        self._family_options: dict[str, Options] = {}
        #: Of the column families that the database began with, by their names.
        self.rules: dict[str, ExpiryRules] = {}
        self.budget = shared_budget(settings.memory_limit)
        locked = LockedFolder(settings.local_dir)
        self.folder = locked.path
        try:
            self.database = self._opened(native, is_read_only=is_read_only)
        except BaseException:
            locked.remove()
            raise
        self._finalize = weakref.finalize(self, _end, self.database, locked, os.getpid())

    def _opened(self, native: NativeSnapshot | None, *, is_read_only: bool) -> Database:
        path = os.path.join(self.folder, "db")
        if native is None:
            return Database(path, self._options())
        native.place(path)
        idle = self._options(is_idle=True)  # of families that nobody needs any more
        for family in native.families:
            rules = ExpiryRules(CommittedClock(), family.layout, element_bytes=max(family.element_bytes, 1))
            self.rules[family.family] = rules
            self._family_options[family.family] = self._options(
                rules, is_list=family.is_list, is_idle=is_read_only
            )
        try:
            options = self._options()
            if not self.rules.keys() <= set(families_in(path, options)):
                raise CorruptCheckpointError(
                    "the files of a checkpoint lack a column family that it names", detail=native.where
                )
            database = Database(path, options, self._family_options, others=idle, create=False)
            return _with_these(database, self.rules)
        except StoreError as error:
            if error.code not in _DAMAGED:
                raise
            raise CorruptCheckpointError(
                f"RocksDB cannot open the files of a checkpoint: {error.message}", detail=native.where
            ) from error

    def _options(
        self,
        rules: ExpiryRules | None = None,
        *,
        is_list: bool = False,
        periodic_seconds: int | None = None,
        is_idle: bool = False,
    ) -> Options:
        chosen = predefined(self._settings.predefined)
        settings = {
            **database_settings(chosen),
            **_open_files(),
            "avoid_flush_during_shutdown": True,
            **_IN_ORDER,
            **column_family_settings(
                chosen,
                compression=self._settings.compression,
                periodic_compaction_seconds=periodic_seconds,
            ),
            **({"disable_auto_compactions": True} if is_idle else {}),
        }
        return Options(
            settings,
            budget=self.budget,
            rules=rules,
            is_list=is_list,
            threads=chosen.threads,
            block_size=chosen.block_size,
            bloom_bits=chosen.bloom_bits,
            partitioned=self._settings.partitioned_index_filters,
        )

    def create_family(
        self, name: str, rules: ExpiryRules, *, is_list: bool = False, periodic_seconds: int | None = None
    ) -> ColumnFamily:
        """Make a column family whose values lie, and expire, as the rules say; another name if there is this one."""
        while name in self.database.column_families():
            name += "'"
        options = self._options(rules, is_list=is_list, periodic_seconds=periodic_seconds)
        self._family_options[name] = options
        return self.database.create_column_family(name, options)

    def options_of(self, family: ColumnFamily) -> Options:
        """What a column family was made with."""
        return self._family_options[family.name]

    def hold(self) -> None:
        """Keep the database for one more reader, who calls `release`."""
        with self._lock:
            self._users += 1

    @property
    def has_readers(self) -> bool:
        """True while somebody beside the backend reads the database."""
        return self._users > 1

    def release(self) -> None:
        """Let go; the last one closes the database and removes the folder."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._family_options.clear()
            self._finalize()


def _with_these(database: Database, families: Collection[str]) -> Database:
    """Drop all column families but these."""
    for name in database.column_families():
        if name not in families and name != "default":
            database.drop_column_family(database.column_family(name))
    return database


def _end(database: Database, folder: LockedFolder, process: int) -> None:
    # A forked child has neither the threads of the database nor a right to its files.
    if os.getpid() == process:
        database.close()
        folder.remove()
