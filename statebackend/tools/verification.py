"""Reads everything in a store and reports all that is damaged, and repairs its log."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, CheckpointReader, CheckpointStore, Metadata, StoredFile
from statebackend.checkpoint.files.layout import (
    CHECKPOINTS,
    DATA,
    METADATA,
    data_epoch,
    is_data_file,
    parse_entry_name,
)
from statebackend.checkpoint.files.store_files import storing
from statebackend.checkpoint.format import read_data_file
from statebackend.checkpoint.store.encryption import Encryption
from statebackend.checkpoint.store.log import (
    CheckpointKey,
    StoreLog,
    check_same_store,
    read_entry,
    read_log,
    required_metadata,
)
from statebackend.errors import CorruptCheckpointError, StateBackendError, StoreError, UsageError
from statebackend.tools.progress_line import Progress
from statebackend.tools.results import Problem, Repaired, Report
from statebackend.tools.tables import OWN_FORMAT


class Inventory(CheckpointReader):
    """A reader that lists files without judging them, and opens one at a time."""

    @classmethod
    def of(cls, store: CheckpointReader | str | os.PathLike[str]) -> Inventory:
        if isinstance(store, CheckpointReader):
            return cls(store.uri, encryption=store.encryption, _files=store._files)
        return cls(store)

    @classmethod
    def existing(cls, store: CheckpointReader | str | os.PathLike[str]) -> Inventory:
        """The same; `UsageError` if no store is there."""
        inventory = cls.of(store)
        if not inventory.exists:
            inventory.open_latest()  # raises the error for a store that is not there
        return inventory

    @property
    def exists(self) -> bool:
        """True if there is anything that a writer of the store has made to begin with."""
        with storing(f"looking for {METADATA}"):
            if self._files.size(METADATA) is not None:
                return True
            found = self._files.names(CHECKPOINTS)
        return any(parse_entry_name(name) is not None for name in found)

    def log(self) -> StoreLog:
        """The log, even if the metadata are damaged. If its newest entries are damaged, it ends before them."""
        return read_log(self._files, over_damage=True)

    def _log(self, metadata: Metadata | None = None) -> StoreLog:
        return read_log(self._files, metadata, over_damage=True)

    def data_files(self) -> set[str]:
        """The names of all data files, named by a manifest or not. Lists every folder of data files."""
        found: set[str] = set()
        with storing(f"listing {DATA}"):
            for epoch in self._files.names(DATA):
                folder = f"{DATA}/{epoch}"
                if data_epoch(folder):
                    found.update(f"{folder}/{name}" for name in self._files.names(folder))
        return {name for name in found if is_data_file(name)}

    def size_of(self, name: str) -> int:
        with storing(f"looking for {name}"):
            return self._files.size(name) or 0

    def read_metadata(self) -> Metadata:
        """Read the metadata; `CorruptCheckpointError` if they are missing or damaged."""
        return required_metadata(self._files)

    def check_other(self, name: str, metadata: Metadata | None) -> None:
        """Read an entry, and compare its store with the metadata's, if these are known."""
        try:
            entry = read_entry(self._files, name)
        except FileNotFoundError:
            return  # a checkpoint that was dropped
        check_same_store(entry.store, metadata, name)

    def damaged_entries(self) -> list[str]:
        """The names of the damaged entries that commit nothing that is kept."""
        damaged = []
        for name in self.log().names_of_others():
            try:
                self.check_other(name, None)
            except CorruptCheckpointError:
                damaged.append(name)
        return damaged

    def open_key(self, key: CheckpointKey, log: StoreLog, metadata: Metadata | None) -> Checkpoint:
        """Open a checkpoint for its files. Without metadata, nothing is compared with them."""
        manifest = self._manifest(key, metadata)
        if metadata is not None:
            encryption = self._agreed(metadata)
        else:
            metadata = Metadata(manifest.store)
            encryption = None if self.encryption is None else Encryption.probed(self.encryption)
        has_outputs = log.state.has_outputs(key)
        return Checkpoint(self._files, metadata, manifest, has_outputs=has_outputs, encryption=encryption)


_BATCH_ROWS = 65_536


def verify(store: str | os.PathLike[str] | CheckpointReader) -> Report:
    """Check every file of a store against its checksums, and report all that is damaged.

    O(bytes of the store): it reads each file once, data files of the library's own format and Parquet files twice,
    however many checkpoints name them. Memory: one batch of rows. It writes nothing and disturbs no writer, so the
    query may run; a checkpoint that its writer drops meanwhile is left out.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from statebackend.checkpoint import CheckpointStore
    >>> folder = tempfile.TemporaryDirectory()
    >>> with CheckpointStore(folder.name).open_for_writing() as store:
    ...     for batch_id in (6, 7):
    ...         _ = store.commit(batch_id)
    >>> _ = Path(folder.name, "checkpoints", "3.json").write_bytes(b"damaged")
    >>> report = verify(folder.name)
    >>> report.ok, report.newest_intact
    (False, 6)
    >>> for problem in report.problems:
    ...     print(problem.checkpoints, problem.code, problem.message)
    [] CORRUPT_CHECKPOINT the file is cut short or damaged at its end (checkpoints/3.json, bytes 0 to 7)
    >>> folder.cleanup()
    """
    return _Verification(Inventory.existing(store)).report()


def repair(store: str | os.PathLike[str] | CheckpointStore, *, dry_run: bool = False) -> Repaired:
    """Make a store usable whose log is damaged: go back to its newest checkpoint that is whole.

    Use it after `CORRUPT_CHECKPOINT.LOG`, when no copy of the store has the damaged file. The query must not run
    meanwhile. The batches after that checkpoint are gone from the store, but sinks keep their rows. If Spark delivers
    these batches again, they run again; if not, the query refuses to go on (`BATCH_GAP`). Reads all files of the newest
    checkpoint. It changes nothing in a store whose log is whole, or that lacks a whole checkpoint, nor with
    ``dry_run``, which returns the same result and only reads.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from statebackend.checkpoint import CheckpointStore
    >>> folder = tempfile.TemporaryDirectory()
    >>> with CheckpointStore(folder.name).open_for_writing() as store:
    ...     for batch_id in (6, 7):
    ...         _ = store.commit(batch_id)
    >>> _ = Path(folder.name, "checkpoints", "3.json").write_bytes(b"damaged")
    >>> repair(folder.name)
    Repaired
      to       6
      removed  checkpoints/3.json
    >>> CheckpointStore(folder.name).latest()
    6
    >>> folder.cleanup()
    """
    made = store.unopened() if isinstance(store, CheckpointStore) else CheckpointStore(store)
    inventory = Inventory.existing(made)
    damaged = inventory.damaged_entries()
    if not damaged:
        return Repaired(inventory.latest(), [])
    newest = inventory.latest(intact=True)
    if newest is None:
        raise CorruptCheckpointError(
            "the store has no whole checkpoint to go back to",
            detail=made.uri,
            hint="restore the folder of the store from a copy",
        )
    if not dry_run:
        made.repair(newest, damaged)
    return Repaired(newest, damaged)


class _Verification:
    """The findings so far: an error is put down, and the check goes on."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        # In this order: a file that is committed from now on is not taken for one that is left over.
        self._lying = inventory.data_files()
        self._log = inventory.log()
        self._keys = self._log.state.kept
        self._others = self._log.names_of_others()
        #: A file, the manifests that need it, and the error.
        self._found: list[tuple[str, list[CheckpointKey], StateBackendError]] = []
        self._opened: dict[CheckpointKey, Checkpoint] = {}

    @contextmanager
    def _noting(self, file: str, keys: Iterable[CheckpointKey] = ()) -> Iterator[None]:
        try:
            yield
        except (CorruptCheckpointError, StoreError) as error:
            self._found.append((file, list(keys), error))

    def report(self) -> Report:
        metadata = self._read_metadata()
        for name in self._others:
            with self._noting(name):
                self._inventory.check_other(name, metadata)
        for key in reversed(self._keys):
            self._open(key, metadata)
        self._check_files()
        return self._report(can_be_opened=metadata is not None)

    def _read_metadata(self) -> Metadata | None:
        try:
            return self._inventory.read_metadata()
        except (CorruptCheckpointError, StoreError) as error:
            self._found.append((METADATA, [], error))
            return None

    def _open(self, key: CheckpointKey, metadata: Metadata | None) -> None:
        with self._noting(key.name, [key]):
            try:
                self._opened[key] = self._inventory.open_key(key, self._log, metadata)
            except UsageError as error:
                _check_dropped(error)

    def _check_files(self) -> None:
        needed: dict[StoredFile, list[CheckpointKey]] = {}
        for key, checkpoint in self._opened.items():
            for file in checkpoint.files.values():
                needed.setdefault(_same(file), []).append(key)
        with Progress("verifying", sum(file.size for file in needed)) as progress:
            for file, keys in needed.items():
                with self._noting(file.name, keys):
                    self._check(file, keys)
                progress.advance(file.size)

    def _check(self, file: StoredFile, keys: list[CheckpointKey]) -> None:
        for key in keys:
            try:
                _check_file(self._opened[key], file)
                return
            except UsageError as error:
                _check_dropped(error)  # and another checkpoint may still need the file

    def _report(self, *, can_be_opened: bool) -> Report:
        # Checkpoints are dropped before their files: a checkpoint that is still kept now has had all its files.
        log = self._inventory.log()
        now = log.state.kept
        kept = [key for key in self._keys if key in now]
        unreadable = {key for name, keys, _ in self._found for key in keys if name == key.name}
        named = {name for checkpoint in self._opened.values() for name in checkpoint.files}
        for key in now:
            if key not in self._keys:
                try:
                    named.update(self._inventory.open_key(key, log, None).files)
                except (CorruptCheckpointError, StoreError, UsageError):
                    unreadable.add(key)
        left_over = (self._lying & self._inventory.data_files()) - named
        problems = []
        damaged: set[CheckpointKey] = set()
        for file, keys, error in self._found:
            of_kept = [key for key in keys if key in kept]
            if of_kept or not keys:
                damaged.update(of_kept)
                message = f"{error.message} ({error.detail})" if error.detail else error.message
                ids = sorted({key.checkpoint_id for key in of_kept})
                problems.append(Problem(file, ids, error.code, message))
        intact = [key for key in kept if key in self._opened and key not in damaged] if can_be_opened else []
        files = {
            name: file.size
            for key in kept
            if key in self._opened
            for name, file in self._opened[key].files.items()
        }
        for name in (METADATA, *self._others, *(key.name for key in kept)):
            files[name] = self._inventory.size_of(name)
        return Report(
            checkpoints=sorted({key.checkpoint_id for key in kept}),
            newest_intact=max(intact).checkpoint_id if intact else None,
            files=len(files),
            bytes=sum(files.values()),
            problems=sorted(problems),
            left_over=[] if unreadable & set(now) or log.damaged else sorted(left_over),
        )


def _check_dropped(error: UsageError) -> None:
    """Raise the error, unless it tells that a checkpoint has been dropped meanwhile."""
    if error.code != "USAGE.NO_CHECKPOINT":
        raise error


def _same(file: StoredFile) -> StoredFile:
    """The file without what checkpoints may say of it differently: it is checked once."""
    return StoredFile(file.name, file.kind, file.size, file.checksum)


def _check_file(checkpoint: Checkpoint, file: StoredFile) -> None:
    checkpoint.verify([file])
    if file.kind in OWN_FORMAT:
        with checkpoint.open_file(file) as source:
            read_data_file(source, file.name).verify()
    elif file.kind == "output" and file.name.endswith(".parquet"):
        with checkpoint.open_file(file) as source:
            _check_parquet(source, file.name)


def _check_parquet(source: pa.NativeFile, name: str) -> None:
    """Read every row with the schema that the file was written with."""
    import pyarrow.parquet as pq  # the import loads Arrow's file systems

    from statebackend.runtime.output import read_batches

    try:
        opened = pq.ParquetFile(source, page_checksum_verification=True)
        rows = 0
        for batch in read_batches(opened, _BATCH_ROWS):
            batch.validate(full=True)
            rows += batch.num_rows
        if rows != opened.metadata.num_rows:
            raise CorruptCheckpointError("the output has other rows than it says", detail=name)
    except pa.ArrowNotImplementedError as error:
        raise StoreError("this version of pyarrow cannot read the output", detail=name) from error
    except (pa.ArrowException, OSError) as error:
        raise CorruptCheckpointError(
            "the output cannot be read, although its checksum is right", detail=name
        ) from error
