"""Reading a store: its checkpoints, their content, and their integrity.

>>> CheckpointReader("/nowhere").checkpoints()
[]
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import pyarrow as pa

from statebackend.checkpoint.files import StoreFiles, TargetFolder, open_files, without_secrets
from statebackend.checkpoint.files.layout import METADATA
from statebackend.checkpoint.files.store_files import storing
from statebackend.checkpoint.store.encryption import BlockCipher, Encryption, agreed, check_cipher
from statebackend.checkpoint.store.log import (
    CheckpointKey,
    Record,
    StoreLog,
    TimeOverride,
    check_same_store,
    read_entry,
    read_log,
    read_manifest,
    read_metadata,
    required_metadata,
)
from statebackend.checkpoint.store.manifest import (
    Manifest,
    ManifestParts,
    StateSnapshot,
    StoredFile,
    snapshots_of,
)
from statebackend.checkpoint.store.metadata import Metadata
from statebackend.checkpoint.store.pins import Pin
from statebackend.checkpoint.store.sealed import crc32c
from statebackend.errors import CorruptCheckpointError, UsageError, usage
from statebackend.state import Duration

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
        times: TimeOverride = TimeOverride(),  # noqa: B008 - immutable
        has_outputs: bool = True,
        encryption: Encryption | None = None,
        dropped_states: frozenset[str] = frozenset(),
    ) -> None:
        self._encryption = encryption
        self.metadata = metadata
        self.manifest = manifest
        #: False once its outputs have been dropped, which go earlier than states.
        self.has_outputs = has_outputs
        self._files = files
        self._is_committed = is_committed
        self._times = times
        #: The states that `sb.tools.drop_state` has dropped from it. Its files still have their rows.
        self.dropped_states = dropped_states
        self._snapshots = manifest.snapshots
        if dropped_states:
            self._snapshots = tuple(_without(each, dropped_states) for each in manifest.snapshots)

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
    def encryption(self) -> BlockCipher | None:
        """The cipher of its store; None if there is none."""
        return None if self._encryption is None else self._encryption.cipher

    @property
    def now(self) -> int | None:
        """The time of its batch, in milliseconds. `sb.tools.set_time` can replace the newest checkpoint's."""
        return self.manifest.now if self._times.now is None else self._times.now

    @property
    def watermark(self) -> int | None:
        """The greatest event time up to and including its batch, less the delay, in milliseconds; None if unset."""
        return self.manifest.watermark if self._times.watermark is None else self._times.watermark

    @property
    def snapshots(self) -> tuple[StateSnapshot, ...]:
        """The snapshot that each subtask wrote, without the states that were dropped since."""
        return self._snapshots

    def without(self, states: frozenset[str]) -> Checkpoint:
        """The same checkpoint without some of its states; nothing is written."""
        left = copy.copy(self)
        left.dropped_states = self.dropped_states | states
        left._snapshots = tuple(_without(each, states) for each in self._snapshots)
        return left

    @property
    def files(self) -> dict[str, StoredFile]:
        """All its files that are kept, by name."""
        gone = set() if self.has_outputs else self.manifest.output_names
        return {name: file for name, file in self.manifest.all_files.items() if name not in gone}

    @property
    def outputs(self) -> dict[str, tuple[StoredFile, ...]]:
        """The files of the outputs that are kept, by the name of the output."""
        return self.manifest.outputs if self.has_outputs else {}

    def address(self, file: StoredFile) -> str:
        """The path or uri of a file as other programs, such as Spark, take it."""
        return self._files.address(file.name)

    def open_file(self, file: StoredFile) -> pa.NativeFile:
        """Open a file as a seekable ``pyarrow.NativeFile``; `CorruptCheckpointError` if it is missing or not as long
        as the manifest says. Does not check the content: `verify` does that, or the checksums within the file. In an
        encrypted store it gives the plain text, of which it decrypts what is read.
        """
        source = self._open_stored(file)
        return source if self._encryption is None else self._encryption.open(file.name, source)

    def _open_stored(self, file: StoredFile) -> pa.NativeFile:
        self._check_size(file)
        with storing(f"opening {file.name}", missing=partial(self._missing, file)):
            return self._files.open_input(file.name, file.size)

    def publish(self, file: StoredFile, place: TargetFolder, name: str) -> str:
        """Make a file appear in a place where other programs read, whole and durable, under this name; at most once.

        Returns how: ``"linked"`` on one file system, ``"copied by the service"`` in one bucket, else ``"copied"``; or
        ``"there"`` if it was there already. `UsageError` if something else has the name. In an encrypted store the
        plain text appears. O(1) for a link, else O(bytes).
        """
        if place.size(name) is None:
            self._check_size(file)
        source = None if self._encryption is not None else self._files
        return published(place, name, partial(self.open_file, file), source, file.name)

    def read_file(self, file: StoredFile) -> bytes:
        """Read the whole content of a file and check it against its checksum."""
        content = bytearray()
        self._checked(file, content)
        return bytes(content) if self._encryption is None else self._encryption.plain(file.name, content)

    def verify(self, files: Iterable[StoredFile] | None = None) -> None:
        """Read files, by default all, and check each against its checksum, which is one of stored bytes.

        `CorruptCheckpointError` names the first bad one.
        """
        for file in self.files.values() if files is None else files:
            self._checked(file, None)

    def pin(self, *, lease: Duration = "10 minutes") -> Pin:
        """Keep its files from being removed while they are read; see `CheckpointReader.pin`."""
        return Pin(self._files, self, lease)

    def is_kept(self) -> bool:
        """Look again if the store still has it; False once its writer has dropped it. Reads the newest entry."""
        if not self._is_committed:
            return True
        return read_log(self._files).state.keeps(CheckpointKey(self.id, self.manifest.name))

    def _keeps_outputs(self) -> bool:
        return read_log(self._files).state.has_outputs(CheckpointKey(self.id, self.manifest.name))

    def check_kept(self) -> None:
        """Raise `UsageError` if the writer of the store has dropped it. Looks too, if its outputs are still kept."""
        if not self.is_kept():
            raise _dropped(self.id)
        if self.has_outputs and self._is_committed:
            self.has_outputs = self._keeps_outputs()

    def _check_size(self, file: StoredFile) -> None:
        with storing(f"looking for {file.name}"):
            size = self._files.size(file.name)
        if size is None:
            raise self._missing(file)
        if size != file.size:
            raise _damaged(
                "a file is not as long as it was written",
                f"{file.name}, checkpoint {self.id}: {size} bytes instead of {file.size}",
            )

    def _missing(self, file: StoredFile) -> Exception:
        if not self.is_kept():
            return _dropped(self.id)
        if file.name in self.manifest.output_names and not self._keeps_outputs():
            return UsageError(
                f"the outputs of checkpoint {self.id} have been dropped meanwhile",
                code="USAGE.NO_CHECKPOINT",
                hint="outputs go earlier than states: only the newest two checkpoints keep outputs",
            )
        return _damaged("a file is missing", f"{file.name}, checkpoint {self.id}")

    def _checked(self, file: StoredFile, content: bytearray | None) -> None:
        checksum = size = 0
        missing = partial(self._missing, file)
        # A missing file may show only with the first read.
        with self._open_stored(file) as source, storing(f"reading {file.name}", missing=missing):
            while size < file.size:
                chunk = source.read(min(_CHUNK, file.size - size))
                if not chunk:
                    break
                checksum = crc32c(chunk, checksum)
                size += len(chunk)
                if content is not None:
                    content += chunk
        if (size, checksum) != (file.size, file.checksum):
            raise _damaged(
                "a file does not match its checksum", f"{file.name}, bytes 0 to {size}, checkpoint {self.id}"
            )


def _without(snapshot: StateSnapshot, names: frozenset[str]) -> StateSnapshot:
    states = tuple(state for state in snapshot.states if state["name"] not in names)
    return snapshot if len(states) == len(snapshot.states) else replace(snapshot, states=states)


def _damaged(message: str, detail: str) -> CorruptCheckpointError:
    hint = "latest(intact=True) finds the newest checkpoint that is whole"
    return CorruptCheckpointError(message, detail=detail, hint=hint)


def _dropped(checkpoint_id: int) -> UsageError:
    return UsageError(
        f"checkpoint {checkpoint_id} has been dropped by its writer meanwhile",
        code="USAGE.NO_CHECKPOINT",
        hint="open a newer one, or let the writer retain more",
    )


def _lost(name: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "a file is missing",
        detail=name,
        hint="bring it back from a copy of the store, or go back to a checkpoint before it with sb.tools.rewind",
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
        options: Mapping[str, str] | None = None,
        encryption: BlockCipher | None = None,
        _files: StoreFiles | None = None,
    ) -> None:
        check_cipher(encryption)
        self._cipher = encryption
        self._files = (
            open_files(uri, single_writer=single_writer, options=options) if _files is None else _files
        )
        self._address = without_secrets(uri)
        self._parts = ManifestParts(self._files)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._files.uri!r})"

    @property
    def uri(self) -> str:
        """The address of the store, without secrets."""
        return self._files.uri

    @property
    def address(self) -> str:
        """The address as it was given, without secrets."""
        return self._address

    @property
    def encryption(self) -> BlockCipher | None:
        """The cipher of its data files, as it was given; None if there is none."""
        return self._cipher

    def checkpoints(self) -> list[int]:
        """The ids of the committed checkpoints, ascending. Lists one folder, and reads one small file."""
        return [key.checkpoint_id for key in self._committed()]

    def latest(self, intact: bool = False) -> int | None:
        """The id of the newest checkpoint; with ``intact``, of the newest whose files are all as they were written.

        None if there is none. With ``intact`` it reads every file.
        """
        for key in reversed(self._committed()):
            if not intact:
                return key.checkpoint_id
            try:
                self._open(key).verify()
            except CorruptCheckpointError:
                continue
            return key.checkpoint_id
        return None

    def open(self, checkpoint_id: int) -> Checkpoint:
        """Open the checkpoint of an id, to read it or to restore from it. Reads its manifest and the metadata."""
        if type(checkpoint_id) is not int:
            raise usage.checkpoint_id("a checkpoint is opened by its id, an int")
        metadata = read_metadata(self._files)
        log = self._log(metadata)
        committed = {key.checkpoint_id: key for key in log.state.kept}
        if checkpoint_id not in committed:
            there = ", ".join(map(str, committed)) or "none"
            raise UsageError(
                f"there is no checkpoint {checkpoint_id}",
                code="USAGE.NO_CHECKPOINT",
                detail=self.uri,
                hint=f"there are: {there}",
            )
        return self._open(committed[checkpoint_id], metadata, log)

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

    def pin(self, checkpoint_id: int | None = None, *, lease: Duration = "10 minutes") -> Pin:
        """Open a checkpoint, by default the newest, and keep its files from being removed while it is read.

        The writer of the store may go on and drop the checkpoint meanwhile: its files stay until the pin is released,
        or until the lease ends, counted from here or from the last `Pin.renew`. Writes one small file to the store.
        """
        return (self.open_latest() if checkpoint_id is None else self.open(checkpoint_id)).pin(lease=lease)

    def open_snapshots(self, snapshots: Iterable[StateSnapshot | Mapping[str, object]]) -> Checkpoint:
        """Open snapshots of an uncommitted checkpoint to restore from them; takes what `CheckpointStore.commit` takes.

        A snapshot names its files but not their store, so call this on the store that holds them. Reads the metadata.
        """
        given = snapshots_of(snapshots)
        if not given:
            raise usage.snapshot("expected snapshots to open, got none")
        metadata = required_metadata(self._files)
        epoch = max(each.epoch for each in given)
        manifest = Manifest(given[0].checkpoint_id, epoch, metadata.store, given)
        encryption = self._agreed(metadata)
        return Checkpoint(self._files, metadata, manifest, is_committed=False, encryption=encryption)

    def metadata(self) -> Metadata | None:
        """The purpose of the store; None if it was never opened for writing."""
        return read_metadata(self._files)

    def records(self) -> list[Record]:
        """The changes made to the store other than commits, oldest first. Reads them all."""
        log = self._log()
        if not log.names:
            return []
        metadata = required_metadata(self._files)
        found = []
        for name in log.names_of_others():
            try:
                entry = read_entry(self._files, name)
            except FileNotFoundError:
                continue  # a checkpoint that was dropped
            check_same_store(entry.store, metadata, name)
            if entry.record is not None:
                found.append(entry.record)
        return found

    def has_folder(self, name: str) -> bool:
        """Return True if a folder of this name, apart from the store's own, exists and is not empty."""
        with storing(f"listing {name}"):
            return bool(self._files.names(name))

    def address_of_metadata(self) -> str:
        """The path or uri, as other programs take it, of a small file that every store has."""
        return self._files.address(METADATA)

    def _agreed(self, metadata: Metadata) -> Encryption | None:
        return agreed(metadata.encryption, self._cipher, self.uri)

    def _log(self, metadata: Metadata | None = None) -> StoreLog:
        log = read_log(self._files, metadata)
        if not log.sequence and metadata is None:
            read_metadata(self._files)  # raises for a store of another format, whose log is not read
        return log

    def _committed(self) -> tuple[CheckpointKey, ...]:
        return self._log().state.kept

    def _open(
        self, key: CheckpointKey, metadata: Metadata | None = None, log: StoreLog | None = None
    ) -> Checkpoint:
        metadata = metadata or required_metadata(self._files)
        manifest = self._manifest(key, metadata)
        state = (log or self._log(metadata)).state
        return Checkpoint(
            self._files,
            metadata,
            manifest,
            times=state.times_of(key.checkpoint_id),
            has_outputs=state.has_outputs(key),
            encryption=self._agreed(metadata),
            dropped_states=state.dropped_states_of(key.checkpoint_id),
        )

    def _manifest(self, key: CheckpointKey, metadata: Metadata | None) -> Manifest:
        try:
            return read_manifest(self._files, key, metadata, self._parts)
        except (FileNotFoundError, CorruptCheckpointError) as error:
            # Its writer may have dropped it since, and removed the file that commits it, or parts of the manifest.
            is_there = self._log().state.keeps(key)
            if isinstance(error, FileNotFoundError):
                raise _lost(key.name) if is_there else _dropped(key.checkpoint_id) from error
            if not is_there:
                raise _dropped(key.checkpoint_id) from error
            raise


def published(
    place: TargetFolder,
    name: str,
    opened: Callable[[], pa.NativeFile],
    source: StoreFiles | None = None,
    source_name: str = "",
) -> str:
    """Make what ``opened`` gives appear under this name, and say how; ``source`` has just this content as a file.

    Linked from there if it is on the same file system; else O(bytes).
    """
    with storing(f"publishing {place.address(name)}"):
        if place.size(name) is None:
            try:
                how = None if source is None else place.adopt(name, source, source_name)
                if how is not None:
                    return how
                with opened() as content:
                    place.write(name, iter(lambda: content.read(_CHUNK), b""))
                return "copied"
            except FileExistsError:
                pass  # another process has made it meanwhile
        with opened() as content:
            _check_same(content, place, name)
        place.tidy(name)
        place.settle(name)
        return "there"


def _check_same(content: pa.NativeFile, place: TargetFolder, name: str) -> None:
    """Raise unless this name has the content. O(bytes)."""
    with place.open_input(name) as other:
        is_same = content.size() == other.size()
        while is_same and (chunk := content.read(_CHUNK)):
            is_same = other.read(_CHUNK) == chunk
    if not is_same:
        raise UsageError(
            "a file of this name is there, with other content",
            code="USAGE.PUBLISHED",
            detail=place.address(name),
            hint="the name belongs to one batch of one store. If the store was brought back from an older copy, bring "
            "the folder back to the same moment: its files of later batches are also read. If something else has "
            "changed the file, move it away. Then run the query again",
        )
