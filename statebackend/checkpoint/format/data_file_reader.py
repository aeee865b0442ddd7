"""Reading a data file by its index: only what is asked for, and everything checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.checkpoint.files.store_files import storing
from statebackend.checkpoint.format.index import (
    ARROW_MAGIC,
    ARROW_TAIL,
    COLUMNS,
    TRAILER,
    GroupedBatch,
    Index,
    Region,
    StateColumns,
    Trailer,
)
from statebackend.checkpoint.store.sealed import JsonObject
from statebackend.errors import CorruptCheckpointError, UsageError
from statebackend.keys import MAX_PARALLELISM, KeyGroupRange

#: Bytes to read from the end of a file at first; indexes are seldom larger.
_TAIL = 64 << 10


def read_data_file(source: pa.NativeFile, name: str) -> DataFileReader:
    """Open a file for reading; reads and checks its index. ``source`` is a ``pyarrow.NativeFile``.

    Errors call the file ``name``. Any change since the writing raises `CorruptCheckpointError`.
    """
    return DataFileReader(source, name)


class DataFileReader:
    """A file that is open for reading, by one thread at a time. It does not close its source.

    Reading a state costs as much as its key groups are large; a batch that also holds other groups is read whole.
    """

    def __init__(self, source: pa.NativeFile, name: str) -> None:
        self._source = source
        self.name = name
        with storing(f"reading {name}"):
            self._size = source.size()
        tail_offset = max(self._size - _TAIL, 0)
        tail = self._read(tail_offset, self._size - tail_offset)
        trailer, offset = self._read_trailer(tail, tail_offset)
        start = offset - trailer.index_length
        if start < 0:
            raise self._corrupt("the index is longer than the file", offset, offset + TRAILER.size)
        index = tail[start - tail_offset : offset - tail_offset] if start >= tail_offset else None
        self._index = Index.decode(
            self._read(start, offset - start) if index is None else index, trailer, start, name
        )
        if self._index.file not in (None, name):
            raise CorruptCheckpointError(
                "the file has the content of another one",
                detail=f"{name}, written as {self._index.file}",
            )
        self._schema_message = self._region(self._index.schema)[8:]
        self._schema = self._read_schema()
        self._states = {state.name: state for state in self._index.states}

    def _read_trailer(self, tail: memoryview, tail_offset: int) -> tuple[Trailer, int]:
        size = self._size
        if size < TRAILER.size + ARROW_TAIL.size:
            raise CorruptCheckpointError(
                "the file is too short to be one", detail=f"{self.name}, {size} bytes"
            )
        length, magic = ARROW_TAIL.unpack(tail[-ARROW_TAIL.size :])
        footer_offset = size - ARROW_TAIL.size - length
        offset = footer_offset - TRAILER.size
        if magic != ARROW_MAGIC or length < 0 or offset < 0:
            raise self._corrupt("the file is cut short or damaged at its end", size - ARROW_TAIL.size, size)
        if offset < tail_offset:
            tail_offset, tail = offset, self._read(offset, size - offset)
        at = offset - tail_offset
        trailer = Trailer.decode(bytes(tail[at : at + TRAILER.size]), self.name, offset)
        footer = Region(footer_offset, trailer.footer_length, trailer.footer_checksum)
        if footer.end != size:
            raise self._corrupt("the file is cut short or damaged at its end", footer_offset, size)
        footer.check(tail[at + TRAILER.size :], self.name)
        return trailer, offset

    def _read_schema(self) -> pa.Schema:
        region = self._index.schema
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(self._schema_message))
        except (pa.ArrowException, OSError) as error:
            raise self._corrupt("the schema of the file cannot be read", *region[:2]) from error
        for state in self._index.states:
            for role, number in state.columns.items():
                if role not in COLUMNS or number >= len(schema):
                    raise self._corrupt("a state has a column that the file does not have", *region[:2])
        return schema

    def _corrupt(self, message: str, start: int, end: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, detail=f"{self.name}, bytes {start} to {end}")

    def _read(self, offset: int, length: int) -> memoryview:
        if offset + length > self._size:
            raise self._corrupt("the file is cut short", self._size, offset + length)
        with storing(f"reading {self.name}"):
            self._source.seek(offset)
            data = self._source.read_buffer(length)
        if len(data) != length:
            raise self._corrupt("the file is cut short", offset + len(data), offset + length)
        return memoryview(data).cast("B")

    def _region(self, region: Region) -> memoryview:
        data = self._read(region.offset, region.length)
        region.check(data, self.name)
        return data

    # --- what is in it ---

    @property
    def states(self) -> list[str]:
        return list(self._states)

    @property
    def extra(self) -> JsonObject:
        return self._index.extra

    def schema(self, state: str) -> pa.Schema:
        """The columns of a state, as its section had them, in the order of `COLUMNS`."""
        columns = self._columns(state)
        return pa.schema([(role, self._schema.field(number).type) for role, number in columns])

    def rows_of(self, state: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The key groups of a state that have rows, ascending, and the number of rows in each."""
        runs = self._runs(state)
        groups, inverse = np.unique(runs["key_group"], return_inverse=True)
        return groups.astype(np.int64), np.bincount(inverse, runs["rows"], len(groups)).astype(np.int64)

    def bytes_of(self, state: str) -> NDArray[np.float64]:
        """About how many bytes of the file each of these key groups takes, as `rows_of` lists them."""
        runs = self._runs(state)
        sizes = np.array([stored.region.length / max(stored.rows, 1) for stored in self._index.batches])
        groups, inverse = np.unique(runs["key_group"], return_inverse=True)
        return np.bincount(inverse, runs["rows"] * sizes[runs["batch"]], len(groups)).astype(np.float64)

    def read(
        self,
        state: str,
        key_groups: KeyGroupRange | NDArray[np.int64] | None = None,
        columns: Collection[str] | None = None,
    ) -> Iterator[GroupedBatch]:
        """The rows of a state in file order, of all or some key groups, which ascend, and all or some columns.

        Holds one batch at a time in memory.
        """
        runs = self._runs(state)
        if isinstance(key_groups, KeyGroupRange):
            first = np.searchsorted(runs["key_group"], key_groups.start, "left")
            runs = runs[first : np.searchsorted(runs["key_group"], key_groups.end, "right")]
        elif key_groups is not None:
            runs = runs[np.isin(runs["key_group"], key_groups)]
        return self._batches(runs, self._columns(state, columns))

    def _batches(self, runs: NDArray[np.void], columns: list[tuple[str, int]]) -> Iterator[GroupedBatch]:
        starts = np.flatnonzero(np.diff(runs["batch"], prepend=-1))
        for of_batch in np.split(runs, starts[1:]) if len(runs) else ():
            batch = self._batch(int(of_batch["batch"][0]), columns)
            ends = of_batch["start"].astype(np.int64) + of_batch["rows"]
            for own in np.split(of_batch, np.flatnonzero(of_batch["start"][1:] != ends[:-1]) + 1):
                start, counts = int(own["start"][0]), own["rows"].astype(np.int64)
                rows = batch.slice(start, int(counts.sum()))
                yield GroupedBatch(rows, own["key_group"].astype(np.int64), counts)

    def compare(self, key_groups: KeyGroupRange) -> None:
        """Compare the bytes of every batch that has rows of some key groups with their checksums; decodes nothing."""
        runs = self._index.runs
        own = (runs["key_group"] >= key_groups.start) & (runs["key_group"] <= key_groups.end)
        for number in np.unique(runs["batch"][own]):
            self._region(self._index.batches[int(number)].region)

    def verify(self) -> None:
        """Read and check every byte of the file, and decode every batch."""
        self._region(self._index.end)
        for state in self._states:
            for _ in self.read(state):
                pass

    def _state(self, state: str) -> StateColumns:
        if state not in self._states:
            raise UsageError(f"the file lacks the state {state!r}", detail=self.name)
        return self._states[state]

    def _runs(self, state: str) -> NDArray[np.void]:
        found = self._state(state)
        return self._index.runs[found.first_run : found.first_run + found.n_runs]

    def _columns(self, state: str, chosen: Collection[str] | None = None) -> list[tuple[str, int]]:
        columns = self._state(state).columns
        return [
            (role, columns[role])
            for role in COLUMNS
            if role in columns and (chosen is None or role in chosen)
        ]

    def _batch(self, number: int, columns: list[tuple[str, int]]) -> pa.RecordBatch:
        stored = self._index.batches[number]
        message = self._region(stored.region)
        wanted = [column for _, column in columns]
        try:
            if len(wanted) == len(self._schema):
                batch = pa.ipc.read_record_batch(pa.py_buffer(message), self._schema)
            else:
                # Only the wanted columns are decompressed. That option belongs to streams: a schema, then batches.
                options = pa.ipc.IpcReadOptions(included_fields=wanted)
                stream = pa.py_buffer(b"".join((self._schema_message, message)))
                batch = pa.ipc.open_stream(stream, options=options).read_next_batch()
            batch.validate()
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise self._corrupt("a batch cannot be read", stored.region.offset, stored.region.end) from error
        if batch.num_rows != stored.rows or batch.num_columns != len(wanted):
            raise self._corrupt("a batch is not as the index says", stored.region.offset, stored.region.end)
        return pa.RecordBatch.from_arrays(batch.columns, [role for role, _ in columns])


def key_group_slices(
    readers: Sequence[DataFileReader],
    state: str,
    most_rows: int,
    *,
    most_bytes: int | None = None,
    within: KeyGroupRange | None = None,
) -> Iterator[KeyGroupRange]:
    """Ranges of key groups that together cover all rows of a state, in files that have it.

    Each has at most about so many rows, and so many bytes of the files; or it is one key group.
    """
    share = np.zeros(MAX_PARALLELISM)
    for reader in readers:
        groups, rows = reader.rows_of(state)
        shares = rows / most_rows
        share[groups] += (
            shares if most_bytes is None else np.maximum(shares, reader.bytes_of(state) / most_bytes)
        )
    if within is not None:
        share[: within.start] = share[within.end + 1 :] = 0
    groups = np.flatnonzero(share)
    slices = np.cumsum(share[groups]).astype(np.int64)
    for own in np.split(groups, np.flatnonzero(np.diff(slices)) + 1) if len(groups) else ():
        yield KeyGroupRange(int(own[0]), int(own[-1]))
