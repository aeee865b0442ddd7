"""The pieces of batches that tasks have sent to a host, held until the batch runs or is given up.

A task sends one piece to each host: a stream of messages, each a record batch of *rows* for this host alone or of
*broadcast* rows for all. Task and host sum up what they send and get; a piece counts once both have the same sums.
Tries of batches follow each other: `Attempt` sorts by epoch, batch and attempt. When one runs or is given up, it is
over, and so are all before it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from threading import Lock
from typing import Final

import pyarrow as pa

from statebackend.checkpoint.files.store_files import storing
from statebackend.cluster.shuffle_partitioner import RowPartitioner
from statebackend.cluster.shuffle_pieces import NO_ROOM, Attempt, Kind, Piece, PieceId
from statebackend.errors import ClosedError, StoreError, UsageError
from statebackend.runtime.batch_rows import ChunkedRows
from statebackend.runtime.job import Job
from statebackend.types import Type

#: How the folder of a staging begins; the id of its process follows.
_FOLDER: Final = "statebackend-staging-"


class StagedRows:
    """The pieces of a batch that runs, in the order in which they were named; `PieceStaging.taken` makes it.

    Reading may begin again any number of times. Rows that were in memory share it: release them when they are done
    with.
    """

    def __init__(self, staging: PieceStaging, pieces: Sequence[Piece], schema: pa.Schema | None) -> None:
        #: The columns; None of a batch without pieces.
        self.schema = schema
        self._staging = staging
        self._pieces = tuple(pieces)
        sums = [piece.sum for piece in pieces if piece.sum is not None]
        #: Rows for this host, rows for all, and the bytes of the messages of both.
        self.num_rows = sum(each.rows for each in sums)
        self.num_broadcast = sum(piece.num_broadcast for piece in pieces)
        self.num_bytes = sum(each.bytes for each in sums)
        #: True if nothing has to be read from disk.
        self.is_in_memory = not any(piece.bytes_on_disk for piece in pieces)

    @property
    def parent(self) -> str | None:
        """The folder for files of rows; None is where the system has temporary ones."""
        return self._staging._parent

    def batches(self, kind: Kind = "rows") -> Iterator[pa.RecordBatch]:
        """The rows of a kind, as they came, a message at a time. Messages from disk belong to the reader."""
        for piece in self._pieces:
            yield from piece.batches(kind)

    def rows(self) -> pa.Table | None:
        """The rows for this host; None if the columns are unknown. O(messages), and O(bytes) on disk."""
        return (
            None if self.schema is None else pa.Table.from_batches(list(self.batches()), schema=self.schema)
        )

    def broadcast(self) -> pa.Table | None:
        if not self.num_broadcast:
            return None
        return pa.Table.from_batches(list(self.batches("broadcast")), schema=self.schema)

    def release(self) -> None:
        """Give back memory and disk; then nothing more can be read. Idempotent."""
        for piece in self._pieces:
            piece.drop()
        self._staging._released(self)


class PieceStaging:
    """The pieces of batches that tasks have sent to a host, until a batch runs or is given up.

    All pieces together hold at most ``memory`` bytes of messages in memory, and ``quota`` on disk: in a folder of their
    own in ``folder``, or where the system has temporary files. For any number of threads.
    """

    def __init__(self, *, memory: int = 256 << 20, quota: int = 64 << 30, folder: str | None = None) -> None:
        if any(type(each) is not int or each < 0 for each in (memory, quota)):
            raise UsageError("memory and quota are numbers of bytes, not negative")
        self._memory, self._quota, self._parent = memory, quota, folder
        # Held for a few steps only; no lock of a piece is taken meanwhile.
        self._lock = Lock()
        self._is_closed = False
        #: The pieces that no batch has taken, and the rows that are not released.
        self._pieces: dict[PieceId, Piece] = {}
        self._in_use: set[StagedRows] = set()
        #: The newest try that is over; and the one whose pieces may come, if it is not any that is not over.
        self._over: Attempt | None = None
        self._only: Attempt | None = None
        #: The bytes of messages, also of rows that were taken and are not released.
        self.bytes_in_memory = self.bytes_on_disk = 0
        self._folder: str | None = None
        self._num_files = 0

    def __repr__(self) -> str:
        return (
            f"<Staging: {len(self._pieces)} pieces, {self.bytes_in_memory} bytes in memory, "
            f"{self.bytes_on_disk} bytes on disk>"
        )

    def begin(self, tag: PieceId, schema: pa.Schema) -> Piece:
        """Begin a piece, whose rows have these columns. Refused if its try is over, or if there is one of this name."""
        if any(_has_dictionary(field.type) for field in schema):
            raise UsageError("rows with a dictionary column cannot be staged", detail=str(tag))
        piece = Piece(self, tag, schema)
        with self._lock:
            self._check_open()
            is_over = self._over is not None and tag.of_try <= self._over
            if is_over or self._only not in (None, tag.of_try):
                raise ClosedError("the host takes no pieces of this try", detail=str(tag))
            if tag in self._pieces:
                raise UsageError("there is a piece of this name already", detail=str(tag))
            self._pieces[tag] = piece
        return piece

    def taken(self, tags: Sequence[PieceId], sums: Sequence[Sequence[int]] | None = None) -> StagedRows:
        """Take the pieces of a try, in this order. The try is over then: all other pieces of it and older are dropped.

        ``sums``, if given, are the sums of the pieces as the tasks have them, also in JSON form. If a piece is not
        here, not finished, or another, nothing is taken or dropped.
        """
        tries = {tag.of_try for tag in tags}
        if len(tries) > 1 or len(set(tags)) < len(tags):
            raise UsageError("the pieces are not different ones of one try of a batch")
        if sums is not None and len(sums) != len(tags):
            raise UsageError("there is not one sum for each piece")
        with self._lock:
            self._check_open()
            pieces = [self._finished(tag) for tag in tags]
            for piece, told in zip(pieces, sums or [], strict=sums is not None):
                if piece.sum != tuple(told):
                    raise _not_whole("a piece here is not what its task has sent", piece.tag)
            schema = pieces[0].schema if pieces else None
            for piece in pieces:
                if not piece.schema.equals(schema):
                    raise _not_whole("the pieces of the batch have not the same columns", piece.tag)
            for tag in tags:
                del self._pieces[tag]
            rest = [piece for of_try in tries for piece in self._end(of_try)]
            staged = StagedRows(self, pieces, schema)
            self._in_use.add(staged)
        for piece in rest:
            piece.drop()
        return staged

    def drop(self, epoch: int, batch_id: int, attempt: int) -> None:
        """Give up a try, and all before it: their pieces are dropped, and no more are taken. Idempotent."""
        with self._lock:
            pieces = self._end(Attempt(epoch, batch_id, attempt))
        for piece in pieces:
            piece.drop()

    def drop_others(self, epoch: int, batch_id: int, attempt: int) -> None:
        """Drop all pieces except a try's, and begin only such from now on, even if the try was over. Idempotent.

        So once they are taken, nothing comes until this has been called for another try.
        """
        with self._lock:
            self._only, self._over = Attempt(epoch, batch_id, attempt), None
            pieces = [self._pieces.pop(tag) for tag in list(self._pieces) if tag.of_try != self._only]
        for piece in pieces:
            piece.drop()

    def close(self) -> None:
        """Drop everything, also rows that were taken, and remove all files. Idempotent."""
        with self._lock:
            self._is_closed = True
            pieces, taken = list(self._pieces.values()), list(self._in_use)
        for piece in pieces:
            piece.drop()
        for staged in taken:
            staged.release()
        # Last: a piece that was about to write has made its file and removed it by now, and none is made any more.
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- for pieces ---

    def takes_memory(self, size: int) -> bool:
        with self._lock:
            self._check_open()
            fits = self.bytes_in_memory + size <= self._memory
            self.bytes_in_memory += size if fits else 0
            return fits

    def take_disk(self, size: int, tag: PieceId) -> None:
        with self._lock:
            self._check_open()
            if self.bytes_on_disk + size > self._quota:
                raise StoreError(
                    "the rows of the batch do not fit into memory and the quota on disk",
                    code="CLUSTER.STAGING_FULL",
                    detail=f"{tag}, memory {self._memory} bytes, quota {self._quota} bytes",
                    hint=NO_ROOM,
                )
            self.bytes_on_disk += size

    def new_path(self) -> str:
        with self._lock:
            self._check_open()
            if self._folder is None:
                # Nobody else may look into it: mkdtemp sees to that.
                self._folder = tempfile.mkdtemp(prefix=folder_prefix(), dir=self._parent)
            self._num_files += 1
            return os.path.join(self._folder, f"{self._num_files}.piece")

    def forget(self, piece: Piece) -> None:
        with self._lock:
            self.bytes_in_memory -= piece.bytes_in_memory
            self.bytes_on_disk -= piece.bytes_on_disk
            piece.bytes_in_memory = piece.bytes_on_disk = 0
            if self._pieces.get(piece.tag) is piece:
                del self._pieces[piece.tag]

    def _released(self, staged: StagedRows) -> None:
        with self._lock:
            self._in_use.discard(staged)

    # --- the caller holds the lock ---

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the staging of rows is closed")

    def _finished(self, tag: PieceId) -> Piece:
        piece = self._pieces.get(tag)
        if piece is None or piece.sum is None:
            raise _not_whole("a piece of the batch is not here", tag)
        return piece

    def _end(self, until: Attempt) -> list[Piece]:
        """Note that tries are over; return their pieces, which can no longer be found."""
        self._over = until if self._over is None else max(self._over, until)
        over = [tag for tag in self._pieces if tag.of_try <= until]
        return [self._pieces.pop(tag) for tag in over]


def folder_prefix() -> str:
    """How the names of this process's folders of rows begin, by which `remove_orphans` finds them."""
    return f"{_FOLDER}{os.getpid()}-"


def remove_orphans(folder: str) -> None:
    """Remove what processes that were killed have left of staged rows in a folder, which only this machine uses."""
    for name in os.listdir(folder):
        if name.startswith(_FOLDER) and not is_alive(name.removeprefix(_FOLDER).partition("-")[0]):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def is_alive(pid: str) -> bool:
    """Return True if a process of this id runs on this machine."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        pass
    return True


def _not_whole(message: str, tag: PieceId) -> StoreError:
    return StoreError(message, code="CLUSTER.STAGING", detail=str(tag), hint="the batch has to be sent again")


def _has_dictionary(kind: pa.DataType) -> bool:
    """Whether a type has a dictionary in it, which does not travel with the rows."""
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(at).type) for at in range(kind.num_fields))


#: So many files at most, each open while rows are dealt out.
_FILES = 256


def pieces_of(
    staged: StagedRows, job: Job, key_type: Type, parallelism: int, schema: pa.Schema, memory: int
) -> StagedPieces | None:
    """The rows of a batch in pieces; None if they are to be taken as a whole. ``memory`` is for a piece, in bytes."""
    if staged.is_in_memory or job.is_in_order:
        return None
    if job.takes_whole_keys or job.sorted_by:
        return KeyGroupFiles(staged, job, key_type, parallelism, schema)
    return StagedPieces(staged, schema, memory)


class StagedPieces(ChunkedRows):
    """Rows as they came, broadcast ones first. A piece has about ``memory`` bytes."""

    def __init__(self, staged: StagedRows, schema: pa.Schema, memory: int) -> None:
        self._staged, self._schema, self._memory = staged, schema, memory

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def pieces(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        wanted = self._schema.names if columns is None else list(columns)
        for kind in ("broadcast", "rows"):
            held: list[pa.RecordBatch] = []
            size = 0
            for rows in self._staged.batches(kind):
                held.append(rows.select(wanted))
                size += rows.nbytes
                if size >= self._memory:
                    yield pa.Table.from_batches(held)
                    held, size = [], 0
            if held:
                yield pa.Table.from_batches(held)

    def __enter__(self) -> StagedPieces:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


class KeyGroupFiles(StagedPieces):
    """Rows by key group: each piece has all rows of some key groups. Broadcast rows come first, as they came.

    A context manager: the files are made when it is entered, and removed when it is left.
    """

    in_whole_keys = True

    def __init__(
        self, staged: StagedRows, job: Job, key_type: Type, parallelism: int, schema: pa.Schema
    ) -> None:
        super().__init__(staged, schema, 1)
        self._job, self._key_type = job, key_type
        # The files are for ranges of all key groups, of which this host has one part of ``parallelism``.
        self._ranges = min(job.max_parallelism, _FILES * parallelism)
        self._exit = ExitStack()
        self._paths: list[str] = []

    def __enter__(self) -> KeyGroupFiles:
        with ExitStack() as undo:
            folder = undo.enter_context(
                tempfile.TemporaryDirectory(prefix=folder_prefix(), dir=self._staged.parent)
            )
            with storing("dealing out the rows of a batch by key group"):
                self._paths = self._dealt_out(folder)
            self._exit = undo.pop_all()
        return self

    def _dealt_out(self, folder: str) -> list[str]:
        cutter = RowPartitioner(self._job, self._key_type, self._ranges)
        writers: dict[int, pa.RecordBatchFileWriter] = {}
        paths: dict[int, str] = {}
        with ExitStack() as open_files:
            for rows in self._staged.batches("rows"):
                for number, cut in enumerate(cutter.cut(rows).by_host):
                    if cut is None:
                        continue
                    if number not in writers:
                        paths[number] = os.path.join(folder, f"{number}.arrow")
                        writers[number] = open_files.enter_context(
                            pa.ipc.new_file(paths[number], self._schema)
                        )
                    writers[number].write_batch(cut)
        return [paths[number] for number in sorted(paths)]

    def pieces(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        wanted = self._schema.names if columns is None else list(columns)
        for rows in self._staged.batches("broadcast"):
            yield pa.Table.from_batches([rows]).select(wanted)
        for path in self._paths:
            with storing("reading rows that were dealt out by key group"), pa.ipc.open_file(path) as file:
                yield file.read_all().select(wanted)

    def __exit__(self, *raised: object) -> None:
        self._paths = []
        self._exit.close()
