"""Writing data files: a stream that computes its own checksum, and the files of one snapshot in the making."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from statebackend.checkpoint.files import FileSink, StoreFiles
from statebackend.checkpoint.files.layout import data_folder
from statebackend.checkpoint.files.store_files import BytesLike, storing
from statebackend.checkpoint.store.encryption import EncryptedBlocks, Encryption
from statebackend.checkpoint.store.manifest import FILE_KINDS, StoredFile
from statebackend.checkpoint.store.sealed import crc32c
from statebackend.errors import CommitConflictError, CorruptCheckpointError, StoreError, usage
from statebackend.keys import KeyGroupRange

_log = logging.getLogger(__name__)


#: Small writes, of which Arrow makes many, are joined up to this size.
_BUFFER = 256 * 1024
_SUFFIX_LENGTH = 24
#: A paced file is made durable in steps of so many bytes, with a rest after each that is as long as the step took. So
#: at most half of the disk's bandwidth goes into it, and no sync of a batch waits long behind it.
_STEP = 8 << 20


class DataFile(io.RawIOBase):
    """A data file being written: a binary stream for Arrow. The file counts only after `finish`.

    One thread writes. Another may abort the writer meanwhile; then every call raises `UsageError`. Closing the stream
    in any way other than `finish` removes the file.
    """

    def __init__(
        self,
        writer: DataWriter,
        sink: FileSink,
        name: str,
        described: StoredFile,
        *,
        is_paced: bool = False,
        encryption: Encryption | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self._writer = writer
        self._sink: FileSink | None = sink
        self._described = described
        self._lock = threading.Lock()
        self._pending = bytearray()
        #: Bytes that were given, apart from those that are pending.
        self._flushed = 0
        #: Bytes as stored, which are more if the file is encrypted.
        self._size = 0
        self._checksum = 0
        self._blocks = None if encryption is None else EncryptedBlocks(encryption, name)
        #: The size at which the next step ends; None: it is not paced.
        self._next_step = _STEP if is_paced else None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        """Bytes written so far, of plain text if the file is encrypted: Arrow writes offsets by it."""
        return self._flushed + len(self._pending)

    def write(self, data: BytesLike) -> int:
        """Append all of ``data``. Memory: buffers at most 256 KB."""
        view = memoryview(data).cast("B")
        with self._lock:
            if self._sink is not None and len(self._pending) + len(view) <= _BUFFER:
                self._pending += view
                return len(view)
            with self._failing():
                self._drain()
                if len(view) <= _BUFFER // 2:
                    self._pending += view
                else:
                    self._append(view)
        if self._next_step is not None and self._size >= self._next_step:
            self._end_step()
        return len(view)

    def _end_step(self) -> None:
        began = time.monotonic()
        with self._lock, self._failing():
            self._open_sink().sync_written()
        self._next_step = self._size + _STEP
        time.sleep(time.monotonic() - began)

    def flush(self) -> None:
        """Do nothing: `finish` writes everything out."""

    def finish(self) -> StoredFile:
        """Write everything out, make it durable, and describe the file as manifests name it.

        If the system reports an error, the file is removed and never read again: the written part is not known after
        a failed sync.
        """
        with self._lock, self._failing():
            self._drain()
            if self._blocks is not None:
                for block in self._blocks.rest():
                    self._store(block)
            self._open_sink().finish()
            self._sink = None
        super().close()
        stored = dataclasses.replace(self._described, size=self._size, checksum=self._checksum)
        self._writer._finished(self)
        return stored

    def close(self) -> None:
        """Discard the file, unless it is finished."""
        # The garbage collector also calls this, on a stream whose creation may have failed.
        if not self.closed and getattr(self, "_lock", None) is not None:
            with self._lock:
                self._abandon()
        super().close()

    def _open_sink(self) -> FileSink:
        if self._sink is None:
            raise usage.snapshot("the file has been given up, or is finished", detail=self.name)
        return self._sink

    def _append(self, data: memoryview | bytearray) -> None:
        self._flushed += len(data)
        if self._blocks is None:
            self._store(data)
        else:
            for block in self._blocks.of(data):
                self._store(block)

    def _store(self, data: memoryview | bytearray | bytes) -> None:
        self._open_sink().write(data)
        self._checksum = crc32c(data, self._checksum)
        self._size += len(data)

    def _drain(self) -> None:
        self._open_sink()  # even if nothing is left to write
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._append(pending)

    def _abandon(self) -> None:
        self._pending = bytearray()
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abandon()
            self._writer._given_up(self)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Discard the file on any error; the caller holds the lock."""
        try:
            self._open_sink()
            with storing(f"writing {self.name}"):
                yield
        except BaseException:
            self._abandon()
            raise


class DataWriter:
    """Makes data files in the folder of one epoch, and removes them again if they are not needed.

    Picklable: other processes on the same files may write for the writer of the epoch, which commits. They call
    `sync` before they hand over their files. A snapshot needs to know nothing else of its store: here are
    the epoch, the names that it may build on, and a place for files.
    """

    def __init__(
        self,
        files: StoreFiles,
        epoch: int,
        checkpoint_id: int | None = None,
        ended: Callable[[DataWriter], None] | None = None,
        builds_on: frozenset[str] = frozenset(),
        compression: str | None = "zstd",
        encryption: Encryption | None = None,
    ) -> None:
        self.epoch = epoch
        self.checkpoint_id = checkpoint_id
        #: The files that its snapshot may name again: the newest checkpoint's files when it began.
        self.builds_on = builds_on
        self.compression = compression
        self._encryption = encryption
        self._files = files
        self._ended = ended
        self._process = os.getpid()
        self._lock = threading.Lock()
        self.is_aborted = False
        #: True if the store that made it has committed a checkpoint of its id that names all its files.
        self.is_committed = False
        #: Called when it is committed or aborted.
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._open: set[DataFile] = set()
        #: The files that no manifest names; the value tells if each is finished.
        self._made: dict[str, bool] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return DataWriter, self._arguments(self._files, self.checkpoint_id, self.builds_on)

    def _arguments(self, files: StoreFiles, checkpoint_id: int | None, builds_on: frozenset[str]) -> Any:
        return (files, self.epoch, checkpoint_id, None, builds_on, self.compression, self._encryption)

    def beside(self) -> DataWriter:
        """Another writer of this epoch, for files of the next manifest, whichever that is. They are paced."""
        return self._like(self._files)

    def over(self, wrap: Callable[[StoreFiles], StoreFiles]) -> DataWriter:
        """Another writer of this epoch, over what ``wrap`` makes of the files of the store."""
        return self._like(wrap(self._files))

    def for_checkpoint(self, checkpoint_id: int, builds_on: frozenset[str]) -> DataWriter:
        """Another writer of this epoch, for the files of one snapshot, which may name these files again."""
        return self._like(self._files, checkpoint_id, builds_on)

    def _like(
        self, files: StoreFiles, checkpoint_id: int | None = None, builds_on: frozenset[str] = frozenset()
    ) -> DataWriter:
        return DataWriter(*self._arguments(files, checkpoint_id, builds_on))

    def create(
        self,
        kind: str,
        *,
        subtask: int = 0,
        key_groups: KeyGroupRange | None = None,
        label: str | None = None,
        suffix: str = ".arrow",
    ) -> DataFile:
        """Create a data file under a name that no other file has ever had.

        ``kind``, ``key_groups`` and ``label`` are as in `StoredFile`; the rest only goes into the name.
        """
        if kind not in FILE_KINDS:
            raise usage.snapshot(f"a data file is one of {', '.join(FILE_KINDS)}")
        whose = "x" if self.checkpoint_id is None else self.checkpoint_id
        base_name = f"{whose}-{subtask}-{kind}-{secrets.token_hex(8)}{suffix[:_SUFFIX_LENGTH]}"
        name = f"{data_folder(self.epoch)}/{base_name}"
        described = StoredFile(name, kind, 0, 0, key_groups, label)  # says now what does not fit
        with self._lock:
            self._check_not_aborted()
            with storing(f"creating {name}", missing=self._fenced):
                sink = self._files.create(name)
            is_paced = self.checkpoint_id is None
            file = DataFile(self, sink, name, described, is_paced=is_paced, encryption=self._encryption)
            self._open.add(file)
            self._made[name] = False
        return file

    def _fenced(self) -> CommitConflictError:
        return CommitConflictError(
            "the store has been opened by another writer",
            detail=f"epoch {self.epoch} is over, {self._files.uri}",
            hint="one query writes to a store; open it again to take it over",
        )

    def add(
        self,
        path: str | os.PathLike[str],
        kind: str,
        *,
        key_groups: KeyGroupRange | None = None,
        label: str | None = None,
    ) -> StoredFile:
        """Copy a local file into the store, with the suffix of ``path``. O(size)."""
        path = os.fspath(path)
        file = self.create(kind, key_groups=key_groups, label=label, suffix=os.path.splitext(path)[1])
        with file, storing(f"copying {os.path.basename(path)} to {file.name}"), open(path, "rb") as source:
            while chunk := source.read(1 << 20):
                file.write(chunk)
            return file.finish()

    def room(self) -> int | None:
        """The bytes that the place of the store can still take; None if that is not known."""
        return self._files.room()

    def read_back(self, file: StoredFile) -> pa.NativeFile:
        """Open a finished file of this writer, or one it may build on, as a seekable ``pyarrow.NativeFile``."""
        with storing(f"opening {file.name}"):
            source = self._files.open_input(file.name)
            return source if self._encryption is None else self._encryption.open(file.name, source)

    def verify(self, file: StoredFile) -> None:
        """Read a finished file again, and compare the stored bytes with its checksum. O(bytes)."""
        checksum = size = 0
        with storing(f"reading {file.name}"), self._files.open_input(file.name) as source:
            while chunk := source.read(1 << 20):
                checksum = crc32c(chunk, checksum)
                size += len(chunk)
        if (size, checksum) != (file.size, file.checksum):
            raise CorruptCheckpointError("a file does not match its checksum", detail=file.name)

    def discard(self, file: StoredFile) -> None:
        """Remove a file of this epoch, whichever process has made it, that no manifest names or can name."""
        if file.epoch != self.epoch:
            raise usage.snapshot("the file is of another epoch", detail=file.name)
        with storing(f"removing {file.name}"):
            self._files.remove(file.name)
        with self._lock:
            self._made.pop(file.name, None)

    def sync(self) -> None:
        """Make the names of the new files durable; a commit does so for files of this process."""
        folder = data_folder(self.epoch)
        try:
            with storing(f"syncing {folder}", hint="open the store again: names in this folder may be lost"):
                self._files.sync_folder(folder)
        except StoreError:
            # A second sync of these files would prove nothing.
            self.abort()
            raise

    def abort(self) -> None:
        """Remove every file that this writer has made and that is not settled. Idempotent.

        A file that cannot be removed stays until the store is next opened. In a process that was forked since, nothing
        is removed: the files belong to the other one.
        """
        if self.is_of_another_process:
            self.is_aborted = True
            return
        with self._lock:
            self.is_aborted = True
            still_open, self._open = self._open, set()
            made, self._made = self._made, {}
        for file in still_open:
            file.close()
        for name, is_finished in made.items():
            if is_finished:
                self._remove(name)
        if self._ended is not None:
            self._ended(self)
        self._notify()

    @property
    def is_of_another_process(self) -> bool:
        """True in a process that was forked since: the files are the other one's, and its writing goes on there."""
        return self._process != os.getpid()

    def shares_store_with(self, other: DataWriter) -> bool:
        """Return True if a manifest that names files of ``other`` may name files of this one."""
        return self._files.uri == other._files.uri and self.epoch == other.epoch

    @property
    def unsettled(self) -> list[str]:
        """The names of its files, open ones included, that no committed checkpoint names."""
        with self._lock:
            return sorted(self._made)

    def settle(self, names: set[str]) -> tuple[bool, bool]:
        """Give up files that a committed manifest names, so that `abort` keeps them.

        Return whether there were any, and whether no other files are left.
        """
        with self._lock:
            settled = names & self._made.keys()
            for name in settled:
                del self._made[name]
            return bool(settled), not self._made

    def committed(self) -> None:
        """Note that a checkpoint of its id is committed, and notify who listens."""
        self.is_committed = True
        self._notify()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have a method called at the commit or abort, on any thread, which raises nothing. Keeps no object alive."""
        self._listeners.append(weakref.WeakMethod(listener))

    def _notify(self) -> None:
        for each in self._listeners:
            listener = each()
            if listener is not None:
                listener()

    def _check_not_aborted(self) -> None:
        if self.is_aborted:
            raise usage.snapshot("the snapshot has been aborted", detail=f"checkpoint {self.checkpoint_id}")

    def _given_up(self, file: DataFile) -> None:
        with self._lock:
            self._open.discard(file)
            self._made.pop(file.name, None)

    def _finished(self, file: DataFile) -> None:
        with self._lock:
            self._open.discard(file)
            if not self.is_aborted:
                self._made[file.name] = True
                return
        # The writer was aborted between the last byte and this line.
        self._remove(file.name)
        self._check_not_aborted()

    def _remove(self, name: str) -> None:
        try:
            self._files.remove(name)
        except OSError as error:
            _log.warning("a file of an aborted snapshot stays until the store is next opened: %s", error)
