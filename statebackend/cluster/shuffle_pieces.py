"""What a task sends to a host: a *piece* of a try of a batch, message by message, summed up at both ends.

A piece is open until it is finished; then a batch takes it, or it is dropped. An open piece is given up where anything
goes wrong with it. The memory and disk of a piece go back the moment it is gone, wherever it was.

>>> PieceId(1, 7, 0, 42)
PieceId(epoch=1, batch_id=7, attempt=0, task=42)
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import pyarrow as pa

from statebackend.checkpoint.files.store_files import BytesLike
from statebackend.checkpoint.store.sealed import crc32c
from statebackend.errors import ClosedError, StoreError, UsageError

if TYPE_CHECKING:
    from statebackend.cluster.shuffle_staging import PieceStaging

#: Rows for one host, and rows for all hosts.
Kind: TypeAlias = Literal["rows", "broadcast"]
_KINDS = ("rows", "broadcast")
#: The sums of a message next to its bytes: kind, length, rows, and the checksum of the bytes.
_SUMMED = struct.Struct("<BQQI")

#: The hint where rows that wait do not fit.
NO_ROOM = "make batches smaller, as maxFilesPerTrigger does, or give hosts more disk or a larger quota for staged rows"


class Attempt(NamedTuple):
    """An attempt to run a batch. Later ones are greater."""

    epoch: int
    batch_id: int
    attempt: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch_id}, try {self.attempt}"


class PieceId(NamedTuple):
    """The name of a piece: a try of a batch, and the attempt of a task that sends it."""

    epoch: int
    batch_id: int
    attempt: int
    #: The engine's id of this attempt of the task; no two have the same.
    task: int

    @property
    def of_try(self) -> Attempt:
        """The try that the piece belongs to."""
        return Attempt(*self[:3])

    def __str__(self) -> str:
        return f"{self.of_try}, task {self.task}"


class PieceSum(NamedTuple):
    """What a piece comes to. Equal sums: the same messages in the same order."""

    #: Rows for this host alone.
    rows: int
    bytes: int
    checksum: int

    def to_json(self) -> list[int]:
        return list(self)


class PieceSums:
    """Sums up the messages of a piece, at both of its ends."""

    def __init__(self) -> None:
        self._rows = self._bytes = self._checksum = 0

    def add(self, kind: Kind, data: BytesLike, rows: int) -> int:
        """Add a message that holds so many rows; return the checksum of its bytes. O(bytes), no copy."""
        checksum, size = crc32c(data), memoryview(data).nbytes
        self._checksum = crc32c(_SUMMED.pack(_KINDS.index(kind), size, rows, checksum), self._checksum)
        self._bytes += size
        self._rows += rows if kind == "rows" else 0
        return checksum

    @property
    def total(self) -> PieceSum:
        """The sums so far."""
        return PieceSum(self._rows, self._bytes, self._checksum)


class _Message(NamedTuple):
    """A message of a piece: in memory as its rows, which share its bytes, or by its place in the file of the piece."""

    kind: Kind
    rows: int
    held: pa.RecordBatch | None
    at: int = 0
    size: int = 0
    checksum: int = 0


class Piece:
    """A piece that comes in, made by `PieceStaging.begin`. One thread adds its messages; any may drop it."""

    def __init__(self, room: PieceStaging, tag: PieceId, schema: pa.Schema) -> None:
        self.tag = tag
        self.schema = schema
        #: The sums of the piece; None until it is finished.
        self.sum: PieceSum | None = None
        self._room = room
        self._sums = PieceSums()
        # Held while a message is stored, so who drops the piece waits for that. Taken before the lock of the staging.
        self._lock = Lock()
        self._is_gone = False
        self._messages: list[_Message] = []
        #: Rows for all hosts, and the bytes that the piece has of the staging's memory and disk.
        self.num_broadcast = self.bytes_in_memory = self.bytes_on_disk = 0
        #: The file of the messages that did not fit into memory; open for writing until the piece is finished.
        self._path: str | None = None
        self._file: int | None = None

    def add(self, kind: Kind, data: BytesLike) -> None:
        """Add a message, which is what ``RecordBatch.serialize()`` gives. O(bytes).

        While there is memory, the bytes are kept as they are, and must not be written to. If anything is wrong, the
        piece is given up.
        """
        with self._lock:
            self._check_open()
            try:
                if kind not in _KINDS:
                    raise UsageError("a message of a piece has rows, or broadcast rows", detail=str(self.tag))
                rows = self._rows_of(data)
                checksum = self._sums.add(kind, data, rows.num_rows)
                self._store(kind, rows, memoryview(data).cast("B"), checksum)
            except BaseException:
                self._give_up()
                raise

    def finish(self) -> PieceSum:
        """Say that all messages have come; return their sums."""
        with self._lock:
            self._check_open()
            try:
                self._close_file()
            except OSError as error:
                self._give_up()
                raise self._refused(error, "writing") from error
            self.sum = self._sums.total
            return self.sum

    def abandon(self) -> None:
        """Give up a piece that is not finished. Does nothing to others; idempotent."""
        with self._lock:
            if self.sum is None:
                self._give_up()

    def drop(self) -> None:
        """Give back all that the piece has, finished or not. Idempotent."""
        with self._lock:
            self._give_up()

    def batches(self, kind: Kind) -> Iterator[pa.RecordBatch]:
        """The rows of a kind, a message at a time. Those on disk are read back, and their checksums checked."""
        with self._lock:
            if self._is_gone:
                raise ClosedError("the staged rows have been released", detail=str(self.tag))
            messages, path = [each for each in self._messages if each.kind == kind], self._path
        yield from (each.held for each in messages if each.held is not None)
        # A piece that has a message on disk has all later ones there.
        spilled = [each for each in messages if each.held is None]
        if spilled:
            assert path is not None
            yield from self._read_back(path, spilled)

    # --- all below: the caller holds the lock, except for reading ---

    def _check_open(self) -> None:
        if self._is_gone or self.sum is not None:
            raise ClosedError("the piece is not open any more", detail=str(self.tag))

    def _rows_of(self, data: BytesLike) -> pa.RecordBatch:
        try:
            rows = pa.ipc.read_record_batch(pa.py_buffer(data), self.schema)
            rows.validate()
        except (pa.ArrowException, OSError, EOFError) as error:
            raise StoreError(
                "a message of a piece cannot be read as rows", code="CLUSTER.STAGING", detail=str(self.tag)
            ) from error
        return rows

    def _store(self, kind: Kind, rows: pa.RecordBatch, data: memoryview, checksum: int) -> None:
        size = data.nbytes
        if self._path is None and self._room.takes_memory(size):
            self.bytes_in_memory += size
            message = _Message(kind, rows.num_rows, rows)
        else:
            self._room.take_disk(size, self.tag)
            message = _Message(kind, rows.num_rows, None, self.bytes_on_disk, size, checksum)
            self.bytes_on_disk += size
            try:
                self._write(data)
            except OSError as error:
                raise self._refused(error, "writing") from error
        self._messages.append(message)
        self.num_broadcast += rows.num_rows if kind == "broadcast" else 0

    def _write(self, data: memoryview) -> None:
        if self._file is None:
            self._path = self._room.new_path()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
        while data:
            data = data[os.write(self._file, data) :]

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _give_up(self) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        self._messages = []
        # The rows are lost on purpose: a disk that refuses even this is not a reason to fail.
        with suppress(OSError):
            self._close_file()
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)
        self._room.forget(self)

    def _read_back(self, path: str, messages: list[_Message]) -> Iterator[pa.RecordBatch]:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused(error, "reading") from error
        try:
            for message in messages:
                data = self._bytes_at(file, message)
                if len(data) != message.size or crc32c(data) != message.checksum:
                    raise StoreError(
                        "staged rows on disk are damaged",
                        code="CLUSTER.STAGING",
                        detail=f"{self.tag}, {path} at {message.at}",
                        hint="nothing else may write to the folder of staged rows",
                    )
                yield self._rows_of(data)
        finally:
            os.close(file)

    def _bytes_at(self, file: int, message: _Message) -> bytes:
        parts, have = [], 0
        try:
            while have < message.size:
                part = os.pread(file, message.size - have, message.at + have)
                if not part:
                    break
                parts.append(part)
                have += len(part)
        except OSError as error:
            raise self._refused(error, "reading") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _refused(self, error: OSError, doing: str) -> StoreError:
        if isinstance(error, StoreError):
            return error
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return StoreError.of(
            error,
            f"{doing} staged rows, {self.tag}",
            code="CLUSTER.STAGING_FULL" if is_full else "CLUSTER.STAGING",
            hint=NO_ROOM if is_full else None,
        )
