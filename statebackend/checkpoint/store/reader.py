"""Reading a store: its checkpoints, their content, and their integrity.

>>> CheckpointReader("/nowhere").checkpoints()
[]
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa

from statebackend.checkpoint.files import StoreFiles, open_files, without_secrets
from statebackend.checkpoint.files.layout import (
    CHECKPOINTS,
    METADATA,
    manifest_name,
    parse_manifest_name,
    parse_record_name,
    record_name,
)
from statebackend.checkpoint.store.checksums import crc32c
from statebackend.checkpoint.store.data_files import storing
from statebackend.checkpoint.store.manifest import Manifest, StateSnapshot, StoredFile
from statebackend.checkpoint.store.metadata import Metadata
from statebackend.checkpoint.store.pins import Pin
from statebackend.checkpoint.store.records import Record, Records
from statebackend.checkpoint.store.retention import Key
from statebackend.errors import CommitConflictError, CorruptCheckpointError, UsageError

__all__ = ["Checkpoint", "CheckpointReader"]

_CHUNK = 4 << 20


class Checkpoint:
    """A committed checkpoint of a store: its manifest and its files.

    `KeyedStateBackend` restores from it. Once newer checkpoints exist, the writer of the store may drop this one at
    any time; its files are then missing.
    """

    def __init__(
        self,
        files: StoreFiles,
        metadata: Metadata,
        manifest: Manifest,
        *,
        is_committed: bool = True,
        now: int | None = None,
    ) -> None:
        self.metadata = metadata
        self.manifest = manifest
        self._files = files
        self._is_committed = is_committed
        self._now = manifest.now if now is None else now

    def __repr__(self) -> str:
        return f"Checkpoint({self.id}, epoch {self.epoch}, {self._files.uri})"

    @property
    def id(self) -> int:
        """Its id."""
        return self.manifest.checkpoint_id

    @property
    def epoch(self) -> int:
        """The epoch of the writer that committed it."""
        return self.manifest.epoch

    @property
    def now(self) -> int | None:
        """The time of its batch, in milliseconds. `sb.tools.set_time` can replace that of the newest checkpoint."""
        return self._now

    @property
    def snapshots(self) -> tuple[StateSnapshot, ...]:
        """The snapshot that each subtask wrote."""
        return self.manifest.snapshots

    @property
    def files(self) -> dict[str, StoredFile]:
        """All its files, by name."""
        return self.manifest.all_files

    def address(self, file: StoredFile) -> str:
        """The path or uri of a file as other programs, such as Spark, take it."""
        return self._files.address(file.name)

    def open_file(self, file: StoredFile) -> pa.NativeFile:
        """Open a file as a seekable ``pyarrow.NativeFile``; `CorruptCheckpointError` if it is missing or not as long
        as the manifest says. Does not check the content: `verify` does that, or the checksums within the file.
        """
        self._check_size(file)
        try:
            with storing(f"opening {file.name}"):
                return self._files.open_input(file.name)
        except OSError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise self._missing(file) from error
            raise

    def read_file(self, file: StoredFile) -> bytes:
        """Read the whole content of a file and check it against its checksum."""
        content = bytearray()
        self._checked(file, content)
        return bytes(content)

    def verify(self, files: Iterable[StoredFile] | None = None) -> None:
        """Read files, by default all, and check each against its checksum.

        `CorruptCheckpointError` names the first bad one.
        """
        for file in self.files.values() if files is None else files:
            self._checked(file, None)

    def is_kept(self) -> bool:
        """Look again if the store still has it; False once its writer has dropped it."""
        with storing(f"looking for {self.manifest.name}"):
            return not self._is_committed or self._files.size(self.manifest.name) is not None

    def check_kept(self) -> None:
        """Raise `UsageError` if the writer of the store has dropped it."""
        if not self.is_kept():
            raise _dropped(self.id)

    def _check_size(self, file: StoredFile) -> None:
        with storing(f"looking for {file.name}"):
            size = self._files.size(file.name)
        if size is None:
            raise self._missing(file)
        if size != file.size:
            raise CorruptCheckpointError(
                "a file is not as long as it was written",
                detail=f"{file.name}, checkpoint {self.id}: {size} bytes instead of {file.size}",
                hint="latest(intact=True) finds the newest checkpoint that is whole",
            )

    def _missing(self, file: StoredFile) -> Exception:
        if not self.is_kept():
            return _dropped(self.id)
        return CorruptCheckpointError(
            "a file is missing",
            detail=f"{file.name}, checkpoint {self.id}",
            hint="latest(intact=True) finds the newest checkpoint that is whole",
        )

    def _checked(self, file: StoredFile, content: bytearray | None) -> None:
        checksum = size = 0
        with self.open_file(file) as source, storing(f"reading {file.name}"):
            while size < file.size:
                chunk = source.read(min(_CHUNK, file.size - size))
                if not chunk:
                    break
                checksum = crc32c(chunk, checksum)
                size += len(chunk)
                if content is not None:
                    content += chunk
        if (size, checksum) != (file.size, file.checksum):
            raise CorruptCheckpointError(
                "a file does not match its checksum",
                detail=f"{file.name}, bytes 0 to {size}, checkpoint {self.id}",
                hint="latest(intact=True) finds the newest checkpoint that is whole",
            )


def _dropped(checkpoint_id: int) -> UsageError:
    return UsageError(
        f"checkpoint {checkpoint_id} has been dropped by its writer meanwhile",
        code="USAGE.NO_CHECKPOINT",
        hint="open a newer one, or let the writer retain more",
    )


class CheckpointReader:
    """A read-only view of a store. It writes nothing, takes no epoch and disturbs no writer.

    >>> CheckpointReader("/nowhere").latest() is None
    True
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        single_writer: bool = True,
        _files: StoreFiles | None = None,
    ) -> None:
        self._files = open_files(uri, single_writer=single_writer) if _files is None else _files
        self._address = without_secrets(uri)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._files.uri!r})"

    @property
    def uri(self) -> str:
        """The address of the store, without secrets."""
        return self._files.uri

    @property
    def address(self) -> str:
        """The address as it was given, without secrets.

        >>> CheckpointReader("file:///data/state").address
        'file:///data/state'
        """
        return self._address

    def checkpoints(self) -> list[int]:
        """The ids of the committed checkpoints, ascending. Lists one folder.

        Two manifests of one id, or one that an older writer committed after a newer one, raise
        `CommitConflictError`: two writers have written to a place that could not keep the second out.
        """
        return [checkpoint_id for checkpoint_id, _ in self._committed()]

    def latest(self, intact: bool = False) -> int | None:
        """The id of the newest checkpoint; with ``intact``, of the newest whose files are all as they were written.

        None if there is none. With ``intact`` it reads every file.
        """
        for key in reversed(self._committed()):
            if not intact:
                return key[0]
            try:
                metadata = self._metadata_of_checkpoint()
                Checkpoint(self._files, metadata, self._manifest(key, metadata)).verify()
            except CorruptCheckpointError:
                continue
            return key[0]
        return None

    def open(self, checkpoint_id: int) -> Checkpoint:
        """Open the checkpoint of an id, to read it or to restore from it. Reads its manifest and the metadata."""
        if type(checkpoint_id) is not int:
            raise UsageError("a checkpoint is opened by its id, an int")
        committed = dict(self._committed())
        if checkpoint_id not in committed:
            there = ", ".join(map(str, committed)) or "none"
            raise UsageError(
                f"there is no checkpoint {checkpoint_id}",
                code="USAGE.NO_CHECKPOINT",
                detail=self.uri,
                hint=f"there are: {there}",
            )
        return self._open((checkpoint_id, committed[checkpoint_id]))

    def open_latest(self) -> Checkpoint:
        """Open the newest checkpoint.

        >>> CheckpointReader("/nowhere").open_latest()
        Traceback (most recent call last):
        statebackend.errors.UsageError: there is no checkpoint (/nowhere). Hint: give the uri of a store ...
        """
        newest = self.latest()
        if newest is None:
            raise UsageError(
                "there is no checkpoint",
                code="USAGE.NO_CHECKPOINT",
                detail=self.uri,
                hint="give the uri of a store",
            )
        return self.open(newest)

    def pin(
        self, checkpoint_id: int | None = None, *, lease: datetime.timedelta = datetime.timedelta(minutes=10)
    ) -> Pin:
        """Open a checkpoint, by default the newest, and keep its files from being removed while it is read.

        The writer of the store may go on and drop the checkpoint meanwhile: its files stay until the pin is released,
        or until the lease ends, counted from here or from the last `Pin.renew`. Writes one small file to the store.

        >>> CheckpointReader("/nowhere").pin()
        Traceback (most recent call last):
        statebackend.errors.UsageError: there is no checkpoint (/nowhere). Hint: give the uri of a store ...
        """
        checkpoint = self.open_latest() if checkpoint_id is None else self.open(checkpoint_id)
        return Pin(self._files, checkpoint, lease)

    def open_snapshots(self, snapshots: Iterable[StateSnapshot | Mapping[str, object]]) -> Checkpoint:
        """Open snapshots of an uncommitted checkpoint to restore from them; takes what `CheckpointStore.commit` takes.

        A snapshot names its files but not their store, so call this on the store that holds them. Reads the metadata.
        """
        given = tuple(
            each if isinstance(each, StateSnapshot) else StateSnapshot.from_json(each) for each in snapshots
        )
        if not given:
            raise UsageError("there are no snapshots to open")
        metadata = self._metadata_of_checkpoint()
        epoch = max(each.epoch for each in given)
        manifest = Manifest(given[0].checkpoint_id, epoch, metadata.store, given)
        return Checkpoint(self._files, metadata, manifest, is_committed=False)

    def metadata(self) -> Metadata | None:
        """The purpose of the store; None if nothing was ever committed to it and nobody opened it for writing."""
        try:
            with storing(f"reading {METADATA}"):
                data = self._files.read(METADATA)
        except OSError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        return Metadata.parse(data, METADATA)

    def records(self) -> list[Record]:
        """The changes made to the store other than commits, oldest first. Reads them all.

        >>> CheckpointReader("/nowhere").records()
        []
        """
        found = sorted(key for key in map(parse_record_name, self._names()) if key is not None)
        metadata = self._metadata_of_checkpoint() if found else None
        return [self._record(record_name(*key), metadata) for key in found]

    def has_folder(self, name: str) -> bool:
        """Return True if a folder of this name, apart from the store's own, exists and is not empty.

        >>> CheckpointReader("/nowhere").has_folder("offsets")
        False
        """
        with storing(f"listing {name}"):
            return bool(self._files.names(name))

    def address_of_metadata(self) -> str:
        """The path or uri, as other programs take it, of a small file that every store has.

        >>> CheckpointReader("/data/state").address_of_metadata()
        '/data/state/metadata.json'
        """
        return self._files.address(METADATA)

    def _record(self, name: str, metadata: Metadata | None) -> Record:
        try:
            with storing(f"reading {name}"):
                record = Record.parse(self._files.read(name), name)
            if record.name != name:
                raise CorruptCheckpointError(f"the file holds {record.name}", detail=name)
            if metadata is not None and record.store != metadata.store:
                raise CorruptCheckpointError(
                    "the record and the metadata are of two different stores", detail=f"{name}, {METADATA}"
                )
        except CorruptCheckpointError as error:
            error.hint = (
                "bring the file back from a copy of the store. Without one, remove it: a time that it set is forgotten "
                "then, and sinks that go by the incarnation are told that of the record before it"
            )
            raise
        return record

    def _names(self) -> list[str]:
        with storing(f"listing {CHECKPOINTS}"):
            return self._files.names(CHECKPOINTS)

    def _committed(self) -> list[Key]:
        found = self._listed()
        for error in self._conflicts(found):
            raise error
        return found

    def _listed(self) -> list[Key]:
        return sorted(key for key in map(parse_manifest_name, self._names()) if key is not None)

    def _conflicts(self, keys: list[Key]) -> Iterator[CommitConflictError]:
        for older, newer in itertools.pairwise(keys):
            if older[0] == newer[0] or older[1] > newer[1]:
                yield CommitConflictError(
                    "two writers have committed to this store",
                    detail=f"{manifest_name(*older)} and {manifest_name(*newer)}, {self.uri}",
                    hint="decide which one is right and remove the other manifest; "
                    "then let only one query write to this store",
                )

    def _open(self, key: Key) -> Checkpoint:
        metadata = self._metadata_of_checkpoint()
        manifest = self._manifest(key, metadata)
        now = Records(metadata.store, self.records()).time_of(key)
        return Checkpoint(self._files, metadata, manifest, now=now)

    def _metadata_of_checkpoint(self) -> Metadata:
        metadata = self.metadata()
        if metadata is None:
            raise CorruptCheckpointError(
                "a file is missing", detail=METADATA, hint="restore it from a copy of the store"
            )
        return metadata

    def _manifest(self, key: Key, metadata: Metadata | None) -> Manifest:
        name = manifest_name(*key)
        try:
            with storing(f"reading {name}"):
                data = self._files.read(name)
        except OSError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise _dropped(key[0]) from error
            raise
        manifest = Manifest.parse(data, name)
        if manifest.name != name:
            raise CorruptCheckpointError(f"the file holds {manifest.name}", detail=name)
        if metadata is not None and manifest.store != metadata.store:
            raise CorruptCheckpointError(
                "the manifest and the metadata are of two different stores", detail=f"{name}, {METADATA}"
            )
        return manifest
