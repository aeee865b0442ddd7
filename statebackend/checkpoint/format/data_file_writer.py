"""Writing a data file: one schema for all states, full batches, and the index in front of Arrow's footer."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.checkpoint.files.store_files import BytesLike
from statebackend.checkpoint.format.index import (
    ARROW_MAGIC,
    ARROW_TAIL,
    COLUMNS,
    RUN,
    GroupedBatch,
    Index,
    Region,
    Section,
    StateColumns,
    StoredBatch,
)
from statebackend.checkpoint.store.pending import WritingThreads
from statebackend.checkpoint.store.sealed import JsonObject, crc32c
from statebackend.errors import UsageError, usage
from statebackend.keys import MAX_PARALLELISM

BATCH_ROWS = 65_536
#: A batch also ends when it reaches this size, since single rows may be large.
BATCH_BYTES = 64 << 20
#: A smaller file is not compressed, nor one whose batches are smaller on average: of many states with a few rows each.
COMPRESS_FROM, COMPRESS_BATCHES_FROM = 4096, 256
#: A batch of at most so many bytes needs no exact size.
TINY_BATCH = 64
#: Batches that are held back at most until that is known.
MOST_EARLY = 16_384
#: A smaller batch is encoded sooner than another thread takes it.
BEHIND_FROM = 128 << 10


class ByteSink(Protocol):
    """The stream that takes the bytes of a data file."""

    def write(self, data: bytes, /) -> object:
        """Take all of ``data``."""


def write_data_file(
    sink: ByteSink,
    sections: Sequence[Section],
    *,
    compression: str | None = "zstd",
    extra: Mapping[str, object] | None = None,
    name: str | None = None,
    threads: int = 1,
) -> None:
    """Write a file to ``sink``, which needs only ``write``; does not flush or close it.

    The writer takes the batches of the sections one after another, so they may be generated on the way. It joins small
    batches and divides large ones. Memory: one batch of 65,536 rows, or of 64 MB. ``compression`` is ``"zstd"``,
    ``"lz4"`` or None; less than 4 KB are not compressed. ``extra`` is free, JSON-able, and returned by the reader.
    ``name`` is the file's future name: under another name it cannot be read. With two ``threads`` or more, one encodes
    a large batch while the caller writes the batch before and makes the next. It is idle when this returns or raises.
    """
    if compression not in ("zstd", "lz4", None):
        raise usage.option(f'unknown compression={compression!r}; expected "zstd", "lz4" or None')
    schema, columns = _shared_schema(sections)
    states, first_run = [], 0
    with _Writer(sink, schema, compression, threads) as writer:
        for section, numbers in zip(sections, columns, strict=True):
            for rows, size in _full_batches(section):
                writer.add(_widened(rows.batch, schema, numbers), size, rows.key_groups, rows.counts)
            states.append(StateColumns(section.name, numbers, first_run, writer.n_runs - first_run))
            first_run = writer.n_runs
        writer.finish(tuple(states), dict(extra or {}), name)


def _shared_schema(sections: Sequence[Section]) -> tuple[pa.Schema, list[dict[str, int]]]:
    """One schema for all sections, with one column for each role and type; for each section the columns it uses."""
    of_sections: list[dict[str, pa.DataType]] = []
    for name, schema, _ in sections:
        own = dict(zip(schema.names, schema.types, strict=True))
        if len(own) != len(schema) or not own.keys() <= set(COLUMNS) or not own.keys() & {"key", "value"}:
            raise UsageError(
                f"the columns of a section are some of {', '.join(COLUMNS)}, once each, and always key or value",
                detail=f"state {name!r}",
            )
        if own.get("op", pa.uint8()) != pa.uint8():
            raise UsageError("the column op is of type uint8", detail=f"state {name!r}")
        of_sections.append(own)
    names = Counter(section.name for section in sections)
    if len(names) < len(sections):
        raise UsageError(f"state {names.most_common(1)[0][0]!r} has two sections")
    fields: list[pa.Field] = []
    columns: list[dict[str, int]] = [{} for _ in sections]
    for role in COLUMNS:
        types: list[pa.DataType] = []
        for own, numbers in zip(of_sections, columns, strict=True):
            if role in own:
                if own[role] not in types:
                    types.append(own[role])
                numbers[role] = len(fields) + types.index(own[role])
        # Types may look the same as text and still differ in the nullability of their fields.
        titles = [
            role if len(types) == 1 else f"{role} {number}: {each}" for number, each in enumerate(types, 1)
        ]
        fields += [pa.field(name, each) for name, each in zip(titles, types, strict=True)]
    return pa.schema(fields), columns


def _widened(batch: pa.RecordBatch, schema: pa.Schema, numbers: Mapping[str, int]) -> pa.RecordBatch:
    own = {number: batch.column(role) for role, number in numbers.items()}
    arrays = [
        own[number] if number in own else pa.nulls(batch.num_rows, schema.field(number).type)
        for number in range(len(schema))
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _full_batches(section: Section) -> Iterator[tuple[GroupedBatch, int]]:
    """The rows of a section in batches of the largest allowed size or fewer rows, each with its bytes.

    Small batches are joined as long as they fit into one. Others are divided, and not copied.
    """
    waiting: list[GroupedBatch] = []
    n_rows = n_bytes = last_group = 0
    for rows in section.batches:
        last_group = _check_rows(section, rows, last_group)
        more = rows.batch.num_rows
        # `nbytes` takes 4 us, because it looks for slices and shared buffers, which change little in a tiny batch.
        size = rows.batch.get_total_buffer_size()
        if size > TINY_BATCH:
            size = rows.batch.nbytes
        if more == 0:
            continue
        if waiting and (n_rows + more > BATCH_ROWS or n_bytes + size > BATCH_BYTES):
            yield from _divided(_joined(waiting), n_bytes)
            waiting, n_rows, n_bytes = [], 0, 0
        waiting.append(rows)
        n_rows, n_bytes = n_rows + more, n_bytes + size
    if waiting:
        yield from _divided(_joined(waiting), n_bytes)


def _check_rows(section: Section, rows: GroupedBatch, last_group: int) -> int:
    where = f"state {section.name!r}"
    own, named = rows.batch.schema, section.schema
    if not own.equals(named) and (own.names != named.names or own.types != named.types):
        raise UsageError("a batch has other columns than its section", detail=where)
    if len(rows.key_groups) != len(rows.counts) or int(rows.counts.sum()) != rows.batch.num_rows:
        raise UsageError("the key groups of a batch do not count its rows", detail=where)
    if not len(rows.key_groups):
        return last_group
    groups = rows.key_groups.astype(np.int64, copy=False)
    is_sorted = len(groups) == 1 or not (groups[1:] <= groups[:-1]).any()
    if int(rows.counts.min()) < 1 or not is_sorted or groups[0] < last_group:
        raise UsageError("rows are sorted by key group", detail=where)
    if groups[-1] >= MAX_PARALLELISM:
        raise UsageError("the key group does not exist", detail=f"{where}, key group {int(groups[-1])}")
    return int(groups[-1])


def _joined(waiting: list[GroupedBatch]) -> GroupedBatch:
    if len(waiting) == 1:
        return waiting[0]
    (batch,) = pa.Table.from_batches([rows.batch for rows in waiting]).combine_chunks().to_batches()
    groups = np.concatenate([rows.key_groups for rows in waiting]).astype(np.int64)
    counts = np.concatenate([rows.counts for rows in waiting]).astype(np.int64)
    # The last group of one batch may continue in the next.
    starts = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
    return GroupedBatch(batch, groups[starts], np.add.reduceat(counts, starts))


def _divided(rows: GroupedBatch, n_bytes: int) -> Iterator[tuple[GroupedBatch, int]]:
    """Divide a batch of so many bytes into as few parts of equal rows as are allowed. Each with its size."""
    n_rows = rows.batch.num_rows
    parts = max(-(-n_rows // BATCH_ROWS), -(-n_bytes // BATCH_BYTES))
    if parts <= 1:
        yield rows, n_bytes
        return
    step = -(-n_rows // parts)
    ends = np.cumsum(rows.counts)
    for start in range(0, n_rows, step):
        part = _slice(rows, ends, start, min(start + step, n_rows))
        yield part, part.batch.nbytes


def _slice(rows: GroupedBatch, ends: NDArray[np.integer], start: int, end: int) -> GroupedBatch:
    first, last = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, end, "left")) + 1
    begins = ends[first:last] - rows.counts[first:last]
    counts = np.minimum(ends[first:last], end) - np.maximum(begins, start)
    return GroupedBatch(rows.batch.slice(start, end - start), rows.key_groups[first:last], counts)


class _Writer:
    """Lets Arrow write its file, notes the place of each part, and puts the index in front of the footer."""

    def __init__(self, sink: ByteSink, schema: pa.Schema, compression: str | None, threads: int) -> None:
        self._threads = WritingThreads() if threads > 1 else None
        #: The bytes and rows of batches that another thread encodes, to be written next.
        self._behind: Future[list[tuple[bytes, int]]] | None = None
        self._sink = sink
        self._schema = schema
        self._compression = compression
        self._arrow: pa.ipc.RecordBatchFileWriter | None = None
        self._pieces: list[bytes] = []
        #: Batches that are held back until it is known if compression pays.
        self._early: list[pa.RecordBatch] = []
        self._early_bytes = 0
        self._at = 0
        self._start: Region | None = None
        self._batches: list[StoredBatch] = []
        #: Of each batch, its key groups and how many rows each of them has.
        self._groups: list[NDArray[np.integer]] = []
        self._counts: list[NDArray[np.integer]] = []
        self.n_runs = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.close()
        if self._behind is not None:
            wait([self._behind])

    def add(
        self, batch: pa.RecordBatch, size: int, key_groups: NDArray[np.integer], counts: NDArray[np.integer]
    ) -> None:
        self._groups.append(key_groups)
        self._counts.append(counts)
        self.n_runs += len(counts)
        self._early.append(batch)
        self._early_bytes += size
        count = len(self._early)
        pays = self._early_bytes >= max(COMPRESS_FROM, COMPRESS_BATCHES_FROM * count)
        if self._arrow is not None or pays or count >= MOST_EARLY:
            self._write_early(self._compression, self._threads if size >= BEHIND_FROM else None)

    def _write_early(self, compression: str | None, threads: WritingThreads | None = None) -> None:
        encoded = [] if self._behind is None else self._behind.result()
        self._behind = None
        encode = partial(self._encoded, self._early, compression)
        self._early = []
        try:
            self._behind = None if threads is None else threads.run(encode)
        except RuntimeError:  # no thread could be started
            self._behind = None
        if self._behind is None:
            encoded += encode()
        for data, rows in encoded:
            if self._start is None:
                data = self._write_start(data)
            self._batches.append(StoredBatch(self._put(data), rows))

    def _encoded(self, batches: list[pa.RecordBatch], compression: str | None) -> list[tuple[bytes, int]]:
        if self._arrow is None:
            # On two cores, more threads than the caller's and this one are in each other's way.
            use_threads = self._threads is None or pa.cpu_count() > 2
            options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=use_threads)
            self._arrow = pa.ipc.new_file(_ArrowSink(self._pieces), self._schema, options=options)
        assert self._arrow is not None
        encoded = []
        for batch in batches:
            self._arrow.write_batch(batch)
            encoded.append((b"".join(self._pieces), batch.num_rows))
            self._pieces.clear()
        return encoded

    def _write_start(self, data: bytes) -> bytes:
        """Write magic and schema, which come with the first batch or at the end; return the bytes after them."""
        # Eight bytes of magic; four that announce a message; its length in four bytes; the message.
        length = 16 + int.from_bytes(data[12:16], "little")
        self._start = self._put(data[:length])
        return data[length:]

    def _put(self, data: bytes) -> Region:
        self._sink.write(data)
        region = Region(self._at, len(data), crc32c(data))
        self._at = region.end
        return region

    def finish(self, states: tuple[StateColumns, ...], extra: JsonObject, name: str | None) -> None:
        self._write_early(None if self._arrow is None else self._compression)
        assert self._arrow is not None
        self._arrow.close()
        data = b"".join(self._pieces)
        if self._start is None:
            data = self._write_start(data)
        assert self._start is not None
        length, magic = ARROW_TAIL.unpack(data[-ARROW_TAIL.size :])
        assert magic == ARROW_MAGIC
        footer = data[len(data) - length - ARROW_TAIL.size :]
        end = self._put(data[: len(data) - len(footer)])
        index = Index(self._start, tuple(self._batches), end, states, self._runs(), extra, name)
        self._sink.write(index.encode(self._at, footer))
        self._sink.write(footer)

    def _runs(self) -> NDArray[np.void]:
        runs = np.zeros(self.n_runs, RUN)
        if self.n_runs:
            sizes = [len(counts) for counts in self._counts]
            runs["key_group"], runs["rows"] = np.concatenate(self._groups), np.concatenate(self._counts)
            runs["batch"] = np.repeat(np.arange(len(sizes)), sizes)
            starts = np.cumsum(runs["rows"], dtype=np.int64) - runs["rows"]
            runs["start"] = starts - np.repeat(starts[np.cumsum(sizes) - sizes], sizes)
        return runs


class _ArrowSink(io.RawIOBase):
    """A sink for Arrow, which writes in many small pieces, some of them in buffers that it reuses."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__()
        self._pieces = pieces
        self._size = 0

    def write(self, data: BytesLike) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._size += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._size

    def writable(self) -> bool:
        return True
