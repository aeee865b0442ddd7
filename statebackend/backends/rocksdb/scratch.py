"""The database of one keyed backend: a folder that lasts as long as it is read, and no longer.

A folder is locked while its process lives, and removed by the next one if that was killed. The lock is one of the
system's on a file in the folder (`flock`): it ends with the process, however that ends, and knows no process ids,
which come again. So a folder whose lock can be had is abandoned. A new process removes such folders first,
next to its own, if they are this user's.

RocksDB tells some of its statistics as text only, made for people. They are read by their names, not by places, and
a figure that this version of RocksDB lacks is None.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import resource
import shutil
import stat
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statebackend._core.rocksdb.binding import library
from statebackend._core.rocksdb.binding.callbacks import CommittedClock, ExpiryRules
from statebackend._core.rocksdb.binding.database import ColumnFamily, Database, families_in
from statebackend._core.rocksdb.binding.database_options import MemoryBudget, Options
from statebackend.backends.rocksdb.settings import Settings, column_family_settings, predefined
from statebackend.errors import CorruptCheckpointError, StoreError

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.native_snapshot import NativeSnapshot


_log = logging.getLogger(__name__)

_PREFIX = "statebackend-rocksdb-"
_LOCK = "lock"
#: The errors of `flock` on a file system without locks.
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
#: An empty folder without a lock is one that is being made, or, after so long, one whose maker was killed.
_STALE_SECONDS = 3600
_ATTEMPTS = 10

_cleaned: set[tuple[int, str]] = set()
_cleaning = threading.Lock()


class LockedFolder:
    """A new folder in ``parent``, by default that for temporary files, which this process has locked."""

    def __init__(self, parent: str | None) -> None:
        parent = tempfile.gettempdir() if parent is None else parent
        with _cleaning:
            if (os.getpid(), parent) not in _cleaned:
                _cleaned.add((os.getpid(), parent))
                remove_left_folders(parent)
        try:
            self.path, self._lock = _made(parent)
        except OSError as error:
            raise StoreError.of(
                error,
                f"making a folder for the database in {parent}",
                code="STORE.DATABASE",
                hint="give local_dir= a folder that exists and can be written",
            ) from error

    def remove(self) -> None:
        """Remove the folder with all that is in it, and let go of the lock. Errors are passed over."""
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _made(parent: str) -> tuple[str, int | None]:
    """A new folder, and the open file that is locked; None where the file system lacks locks."""
    for _ in range(_ATTEMPTS):
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        try:
            lock = _locked(path, os.O_CREAT)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(path, _LOCK))
                return path, None
            if error.errno in (errno.EWOULDBLOCK, errno.ENOENT):
                continue  # another process took it for an abandoned one
            shutil.rmtree(path, ignore_errors=True)
            raise
        return path, lock
    raise OSError(errno.EAGAIN, "every new folder was removed by other processes", parent)


def _locked(folder: str, flags: int = 0) -> int:
    """Open the lock of a folder, and lock it; raises `OSError` if another process has, or if the folder has gone."""
    path = os.path.join(folder, _LOCK)
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, "the lock was removed", path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def remove_left_folders(parent: str | os.PathLike[str]) -> list[str]:
    """Remove the folders of this user's processes that were killed; returns their paths. O(what is in ``parent``)."""
    removed: list[str] = []
    try:
        found = sorted(Path(parent).glob(f"{_PREFIX}*"))
    except OSError:  # making a folder there will tell why
        return removed
    for folder in found:
        with contextlib.suppress(
            OSError
        ):  # it is in use, another process is at it too, or it cannot be removed
            about = os.lstat(folder)
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            try:
                lock = _locked(str(folder))
            except FileNotFoundError:
                if time.time() - about.st_mtime > _STALE_SECONDS:
                    os.rmdir(folder)  # only if it is empty: it may be an older version's, which lacks locks
                    removed.append(str(folder))
                continue
            try:
                _remove(str(folder))
            finally:
                os.close(lock)
            removed.append(str(folder))
            _log.info("removed %s, which a process that was killed has left", folder)
    return removed


def _remove(folder: str) -> None:
    """Remove a folder, the lock last: if this is broken off, the next one goes on."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name != _LOCK:
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, _LOCK))
        os.rmdir(folder)


#: Batches go in by the order of their keys: each is looked for from where the last one went, not from the top.
_IN_ORDER: dict[str, str | int | bool] = {
    "allow_concurrent_memtable_write": False,
    "memtable_insert_with_hint_prefix_extractor": "rocksdb.FixedPrefix.1",
}

#: A lower limit of open files than this, which is usual, makes RocksDB close files and open them again.
FEW_FILES = 1024
_DAMAGED = ("STORE.DATABASE_LOST_FILE", "STORE.DATABASE_CORRUPT")

_budgets: weakref.WeakValueDictionary[tuple[int, int], MemoryBudget] = weakref.WeakValueDictionary()
_making = threading.Lock()


def shared_budget(limit: int) -> MemoryBudget:
    """The memory budget of this limit, one for the process; it lasts as long as it is used."""
    with _making:
        found = _budgets.get((os.getpid(), limit))
        if found is None:
            found = _budgets[os.getpid(), limit] = MemoryBudget(limit)
        return found


class Scratch:
    """A database in a new folder. The backend holds it, and so does every snapshot that is being written.

    It lacks a log, and nothing of it outlives the process: state survives in checkpoints. If the process is killed, the
    next one removes the folder. The database begins with the files of a checkpoint, if these are given.
    """

    def __init__(
        self, settings: Settings, native: NativeSnapshot | None = None, *, is_read_only: bool = False
    ) -> None:
        self._settings = settings
        self._users = 1
        self._lock = threading.Lock()
        self.family_options: dict[str, Options] = {}
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
        idle = self._options(is_idle=True)  # of unused families
        for family in native.families:
            rules = ExpiryRules(CommittedClock(), family.layout, element_bytes=max(family.element_bytes, 1))
            self.rules[family.family] = rules
            self.family_options[family.family] = self._options(
                rules, is_list=family.is_list, is_idle=is_read_only
            )
        try:
            options = self._options()
            if not self.rules.keys() <= set(families_in(path, options)):
                raise CorruptCheckpointError(
                    "the files of a checkpoint lack a column family that it names", detail=native.where
                )
            database = Database(path, options, self.family_options, others=idle, create=False)
            for name in database.column_families():
                if name not in self.rules and name != "default":
                    database.drop_column_family(database.column_family(name))
            return database
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
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        settings = {
            **chosen.database,
            # RocksDB has all files of a database open otherwise.
            **({"max_open_files": most_files // 4} if 0 <= most_files < FEW_FILES else {}),
            "avoid_flush_during_shutdown": True,
            **_IN_ORDER,
            **column_family_settings(
                chosen, compression=self._settings.compression, periodic_compaction_seconds=periodic_seconds
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
        self.family_options[name] = options
        return self.database.create_column_family(name, options)

    def hold(self) -> None:
        """Keep the database for one more reader, who calls `release`."""
        with self._lock:
            self._users += 1

    @property
    def has_readers(self) -> bool:
        """True while another reader than the backend uses the database."""
        return self._users > 1

    def release(self) -> None:
        """Let go; the last one closes the database and removes the folder."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self.family_options.clear()
            self._finalize()


def _end(database: Database, folder: LockedFolder, process: int) -> None:
    # A forked child has neither the threads of the database nor a right to its files.
    if os.getpid() == process:
        database.close()
        folder.remove()


#: The pool that flushes; compactions run in the others, or in the thread that asks for one.
_FLUSHING = "High"


def figures_of_state(database: Database, family: ColumnFamily) -> dict[str, Any]:
    """Entries (an estimate), bytes, files by level, compactions and stalls of a column family. O(files)."""
    found = database.statistics(family)
    figures = {name: found[name] for name in (*_SIZES, *_WORK)}
    figures.update(background_work(database.property("rocksdb.cfstats-no-file-histogram", family)))
    figures["stalls"] = stalls(database.property("rocksdb.cf-write-stall-stats", family))
    return figures


_SIZES = (
    "estimated_keys",
    "live_data_bytes",
    "sst_bytes",
    "memtable_bytes",
    "table_reader_bytes",
    "files_by_level",
)
_WORK = ("pending_compaction_bytes", "running_compactions", "running_flushes")


def figures_of_database(database: Database, budget: MemoryBudget) -> dict[str, Any]:
    """Memory by part, stalls of all states together, errors in the background, and the library."""
    default = database.column_family("default")
    found = database.statistics(default)
    text = database.property("rocksdb.db-write-stall-stats", default)
    return {
        "memory": {**budget.usage(), **database.memory()},
        "write_stalls": {
            "by_memory": _named(text, "write-buffer-manager-limit-stops"),
            "is_stopped": bool(found["is_write_stopped"]),
            "delayed_bytes_per_second": found["delayed_write_rate"],
        },
        "background_errors": found["background_errors"],
        "library": {"path": library.loaded_path(), "version": library.version()},
    }


def stalls(text: str | None) -> dict[str, int | None]:
    """How often writes to a state were delayed, and how often they had to wait."""
    return {"delays": _named(text, "total-delays"), "stops": _named(text, "total-stops")}


def _named(text: str | None, name: str) -> int | None:
    found = re.search(rf"\b{name}: (\d+)", text or "")
    return None if found is None else int(found[1])


def background_work(text: str | None) -> dict[str, int | None]:
    """How many flushes and compactions of a state have ended, from RocksDB's table of them by priority.

    >>> table = '''
    ... Priority    Files   Size     Score Comp(cnt) Avg(sec)
    ... ---------------------------------------------------------
    ...  Low      0/0    0.00 KB   0.0         3    0.139
    ... High      0/0    0.00 KB   0.0        12    0.028
    ... '''
    >>> background_work(table), background_work("")
    ({'flushes': 12, 'compactions': 3}, {'flushes': None, 'compactions': None})
    """
    lines = (text or "").splitlines()
    heads = [at for at, line in enumerate(lines) if line.startswith("Priority ")]
    if not heads or "Comp(cnt)" not in lines[heads[0]]:
        return {"flushes": None, "compactions": None}
    names = lines[heads[0]].split()
    from_the_end = names.index("Comp(cnt)") - len(names)  # a size is a number and a unit: two words
    work = {"flushes": 0, "compactions": 0}
    for line in lines[heads[0] + 2 :]:
        words = line.split()
        if len(words) < len(names):
            break
        work["flushes" if words[0] == _FLUSHING else "compactions"] += int(words[from_the_end])
    return dict(work)
