"""The parts of a data file: rows with their key groups, and the index with its checksums that reveal damage.

The index stands between the end of the batches and Arrow's own footer, where Arrow readers do not look. It consists of
a line of JSON and a table of runs, followed by a trailer of 40 bytes. Arrow's footer comes after that.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from statebackend.checkpoint.store.sealed import JsonObject, Malformed, crc32c, instance, integer, members_of
from statebackend.errors import CorruptCheckpointError, usage
from statebackend.keys import MAX_PARALLELISM

#: The columns that a state may have, in file order.
COLUMNS = ("key", "namespace", "map_key", "value", "timestamp", "op")

#: The end of an Arrow file: the length of its footer, then this.
ARROW_MAGIC = b"ARROW1"
ARROW_TAIL = struct.Struct("<i6s")


class Op(enum.IntEnum):
    """The effect of a row. Rows are applied in file order. A state without the column ``op`` only puts."""

    PUT = 0
    REMOVE = 1
    APPEND = 2
    CLEAR = 3


class GroupedBatch(NamedTuple):
    """Rows of one state in ascending order of key groups: ``counts[i]`` rows of ``key_groups[i]``, and so on."""

    batch: pa.RecordBatch
    key_groups: NDArray[np.integer]
    counts: NDArray[np.integer]

    @classmethod
    def of(cls, batch: pa.RecordBatch, key_group_of_rows: ArrayLike) -> GroupedBatch:
        """Make one from the key group of each row; the key groups must ascend. O(rows)."""
        groups = np.asarray(key_group_of_rows, np.int64)
        if len(groups) and (groups == groups[0]).all():
            return cls(batch, groups[:1], np.array([len(groups)]))
        starts = np.flatnonzero(np.concatenate(([len(groups) > 0], groups[1:] != groups[:-1])))
        return cls(batch, groups[starts], np.diff(np.append(starts, len(groups))))

    def key_group_of_rows(self) -> NDArray[np.integer]:
        """The key group of each row. O(rows)."""
        return np.repeat(self.key_groups, self.counts)


class Section(NamedTuple):
    """A state of a file to be written: its name, its columns, and its rows, in any number of batches."""

    name: str
    schema: pa.Schema
    batches: Iterable[GroupedBatch]


#: The version of data files that this code writes. It reads every version that was ever released.
VERSION = 1

MAGIC = b"SBDATA\r\n"
#: Bytes of index and of its JSON, their checksum; bytes of Arrow's footer, its checksum; version; magic; checksum.
TRAILER = struct.Struct("<QIIIII8sI")

#: A run: consecutive rows of one key group in one batch.
RUN = np.dtype([("key_group", "<u4"), ("batch", "<u4"), ("start", "<u4"), ("rows", "<u4")])

_COMPRESS_FROM = 4096
_MAX_ROWS = 2**31 - 1


class Region(NamedTuple):
    """A range of bytes of a file, and their CRC-32C."""

    offset: int
    length: int
    checksum: int

    @property
    def end(self) -> int:
        """The offset after its last byte, where the next region begins."""
        return self.offset + self.length

    def check(self, data: bytes | memoryview, name: str) -> None:
        """Raise `CorruptCheckpointError`, naming file and offset, unless ``data`` matches the checksum."""
        if len(data) != self.length or crc32c(data) != self.checksum:
            raise CorruptCheckpointError(
                "the file does not match its checksum", detail=f"{name}, bytes {self.offset} to {self.end}"
            )


class StoredBatch(NamedTuple):
    """A batch of a file: its region, and the number of its rows."""

    region: Region
    rows: int


class StateColumns(NamedTuple):
    """A state of a file: its columns and its runs."""

    name: str
    columns: dict[str, int]
    first_run: int
    n_runs: int


class Trailer(NamedTuple):
    """The fixed part, which leads to the rest."""

    index_length: int
    json_length: int
    index_checksum: int
    footer_length: int
    footer_checksum: int

    def encode(self) -> bytes:
        body = TRAILER.pack(*self, VERSION, MAGIC, 0)[:-4]
        return body + struct.pack("<I", crc32c(body))

    @classmethod
    def decode(cls, data: bytes, name: str, offset: int) -> Trailer:
        """Parse a trailer; `CorruptCheckpointError` if the bytes are not one, or of an unknown version."""
        where = f"{name}, bytes {offset} to {offset + TRAILER.size}"
        if len(data) != TRAILER.size or data[-12:-4] != MAGIC:
            raise CorruptCheckpointError("the file lacks an index", detail=where)
        *fields, version, _, checksum = TRAILER.unpack(data)
        if crc32c(data[:-4]) != checksum:
            raise CorruptCheckpointError("the file does not match its checksum", detail=where)
        if version != VERSION:
            raise CorruptCheckpointError(
                "the file is of a version that this library does not read",
                code="CORRUPT_CHECKPOINT.VERSION",
                detail=f"{name}, version {version}, read is {VERSION}",
                hint="open it with the newer version of the library that wrote it",
            )
        return cls(*fields)


class Index(NamedTuple):
    """Everything known of a file before reading its batches. The regions follow each other without a gap."""

    schema: Region
    batches: tuple[StoredBatch, ...]
    end: Region
    states: tuple[StateColumns, ...]
    runs: NDArray[np.void]
    extra: JsonObject
    #: The file's name when it was written; None if its writer did not say.
    file: str | None

    def encode(self, after: int, footer: bytes) -> bytes:
        """Index and trailer as the file holds them, from offset ``after`` on, in front of ``footer``."""
        assert self.end.end == after
        raw = self.runs.astype(RUN).tobytes()
        is_compressed = len(raw) >= _COMPRESS_FROM
        stored = bytes(pa.compress(raw, codec="zstd", asbytes=True)) if is_compressed else raw
        described = {
            "schema": self.schema,
            "batches": [[*batch.region, batch.rows] for batch in self.batches],
            "end": self.end,
            "states": [
                {"name": state.name, "columns": state.columns, "runs": [state.first_run, state.n_runs]}
                for state in self.states
            ],
            "runs": len(self.runs),
            "runs_codec": "zstd" if is_compressed else None,
            "extra": self.extra,
            "file": self.file,
        }
        try:
            text = json.dumps(described, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise usage.json(f"what a data file describes must be JSON-able: {error}") from error
        index = text + stored
        trailer = Trailer(len(index), len(text), crc32c(index), len(footer), crc32c(footer))
        return index + trailer.encode()

    @classmethod
    def decode(cls, data: bytes | memoryview, trailer: Trailer, offset: int, name: str) -> Index:
        """Parse the bytes at ``offset``; `CorruptCheckpointError` if anything in them is impossible."""
        region = Region(offset, trailer.index_length, trailer.index_checksum)
        region.check(data, name)
        try:
            if trailer.json_length > len(data):
                raise Malformed("its first part is longer than it is")
            text = bytes(memoryview(data)[: trailer.json_length])
            index = cls._read(json.loads(text), memoryview(data)[trailer.json_length :])
            if index.end.end != offset:
                raise Malformed("the batches do not end where it begins")
        except (Malformed, ValueError, RecursionError, OSError, pa.ArrowException) as error:
            # These errors of json and Arrow come from damaged data, so the message does not repeat their text.
            reason = str(error) if isinstance(error, Malformed) else type(error).__name__
            raise CorruptCheckpointError(
                f"the index of the file is wrong, although its checksum is right: {reason}",
                detail=f"{name}, bytes {offset} to {region.end}",
            ) from error
        return index

    @classmethod
    def _read(cls, data: object, stored_runs: memoryview) -> Index:
        needed = {"schema", "batches", "end", "states", "runs", "runs_codec", "extra", "file"}
        members = members_of(data, "the index", needed)
        at = 0

        def region(value: object) -> Region:
            nonlocal at
            offset, length, checksum = _integers(value, 3, "a region")
            if offset != at:
                raise Malformed("a region does not begin where the one before it ends")
            at = offset + length
            return Region(offset, length, integer(checksum, "a checksum", 0, 2**32 - 1))

        schema = region(members["schema"])
        batches = []
        for each in instance(members["batches"], list, "batches"):
            *place, rows = _integers(each, 4, "a batch")
            batches.append(StoredBatch(region(place), integer(rows, "rows of a batch", 1, _MAX_ROWS)))
        end = region(members["end"])
        runs = _read_runs(members["runs"], members["runs_codec"], stored_runs)
        states = _read_states(members["states"], len(runs))
        _check_runs(runs, np.array([batch.rows for batch in batches], np.int64), states)
        file = members["file"]
        name = None if file is None else instance(file, str, "the name of the file")
        extra = instance(members["extra"], dict, "extra")
        return cls(schema, tuple(batches), end, states, runs, extra, name)


def _integers(value: object, count: int, what: str) -> list[int]:
    if not isinstance(value, list) or len(value) != count:
        raise Malformed(f"{what} is not made of {count} integers")
    return [integer(each, f"a number of {what}") for each in value]


def _read_runs(count: object, codec: object, stored: memoryview) -> NDArray[np.void]:
    # No more than the compressed bytes can hold: a wrong count must not ask for all memory.
    size = integer(count, "the number of runs", 0, len(stored) * 40_000 // RUN.itemsize + 1) * RUN.itemsize
    if codec not in (None, "zstd"):
        raise Malformed("the runs are compressed in an unknown way")
    raw = pa.decompress(stored, size, codec=codec, asbytes=True) if codec else bytes(stored)
    if len(raw) != size:
        raise Malformed("the runs are not as long as they should be")
    return np.frombuffer(raw, RUN)


def _read_states(data: object, n_runs: int) -> tuple[StateColumns, ...]:
    states: list[StateColumns] = []
    at = 0
    for each in instance(data, list, "states"):
        members = members_of(each, "a state", {"name", "columns", "runs"})
        first, count = _integers(members["runs"], 2, "the runs of a state")
        if first != at:
            raise Malformed("the runs of a state do not begin where those before it end")
        at += count
        columns = instance(members["columns"], dict, "the columns of a state")
        for number in columns.values():
            integer(number, "the number of a column", 0, _MAX_ROWS)
        name = instance(members["name"], str, "the name of a state")
        if any(state.name == name for state in states):
            raise Malformed("two states have one name")
        states.append(StateColumns(name, columns, first, count))
    if at != n_runs:
        raise Malformed("there are runs of no state")
    return tuple(states)


def _check_runs(runs: NDArray[np.void], rows: NDArray[np.int64], states: tuple[StateColumns, ...]) -> None:
    """Check that runs cover every batch, row by row in order, and that key groups ascend within a state."""
    batch, start = runs["batch"].astype(np.int64), runs["start"].astype(np.int64)
    count, group = runs["rows"].astype(np.int64), runs["key_group"].astype(np.int64)
    if len(runs) and (
        int(batch.max()) >= len(rows) or int(group.max()) >= MAX_PARALLELISM or int(count.min()) < 1
    ):
        raise Malformed("a run is of no batch, of no key group, or empty")
    before = np.concatenate(([0], np.cumsum(rows)))
    follows = np.concatenate(([0], np.cumsum(count)))
    if not np.array_equal(before[batch] + start, follows[:-1]) or follows[-1] != before[-1]:
        raise Malformed("the runs do not cover the batches")
    if np.any(start + count > rows[batch]):
        raise Malformed("a run is longer than its batch")
    for state in states:
        of_state = slice(state.first_run, state.first_run + state.n_runs)
        if np.any(np.diff(group[of_state]) < 0):
            raise Malformed("the key groups of a state do not ascend")
        if state.n_runs and start[state.first_run] != 0:
            raise Malformed("a batch holds rows of two states")
