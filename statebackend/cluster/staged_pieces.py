"""Rows that wait at a host and are more than its memory may hold, as the pieces of a batch.

Where the function needs all rows of a key together, or in an order, they are dealt out by key group to files first.
Each file is a piece then, and has all rows of its keys. Rows that must come in the order of their times over all keys,
as with ``timers="in_order"``, cannot be dealt out so: they are read as a whole.

>>> KeyGroupFiles.in_whole_keys
True
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType

import pyarrow as pa

from statebackend.checkpoint.store.data_files import storing
from statebackend.cluster.cutting import Cutter
from statebackend.cluster.staging import StagedRows, folder_prefix
from statebackend.runtime.job import Job
from statebackend.runtime.pieces import RowsInPieces
from statebackend.types import Type

__all__ = ["KeyGroupFiles", "StagedPieces", "pieces_of"]

#: So many files at most, each open while rows are dealt out.
_FILES = 256


def pieces_of(
    staged: StagedRows, job: Job, key_type: Type, parallelism: int, schema: pa.Schema, memory: int
) -> StagedPieces | None:
    """The rows of a batch in pieces; None if they are to be taken as a whole. ``memory`` is for a piece, in bytes."""
    if staged.is_in_memory or (job.event_time is not None and job.event_time.is_in_order):
        return None
    if job.takes_whole_keys or job.sorted_by:
        return KeyGroupFiles(staged, job, key_type, parallelism, schema)
    return StagedPieces(staged, schema, memory)


class StagedPieces(RowsInPieces):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        cutter = Cutter(self._job, self._key_type, self._ranges)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._paths = []
        self._exit.close()
