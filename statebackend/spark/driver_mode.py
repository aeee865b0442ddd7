"""How the rows of a batch come to this process: at once, or through files that Spark writes, a piece at a time.

A `RunMode` brings the rows to the state; driver mode and executors mode have one each. Spark writes rows as Parquet, in
the order in which the function is to get them. Nothing of it is durable: if anything is lost, the batch fails, and
Spark gives it again.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from statebackend.checkpoint import CheckpointReader
from statebackend.checkpoint.files import local_path
from statebackend.errors import UsageError, usage
from statebackend.runtime import BatchSource, Job
from statebackend.runtime.batch_identity import Identity
from statebackend.runtime.batch_progress import Figures
from statebackend.runtime.batch_rows import ChunkedRows
from statebackend.runtime.execution import Execution, LocalExecution
from statebackend.spark.heartbeats import COLUMN as HEARTBEAT, without_heartbeats
from statebackend.spark.session import arrow_of, runs_here, settings
from statebackend.state import Size, number_of_bytes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class BatchRows(ABC):
    """The rows of one batch on their way."""

    @abstractmethod
    def incoming(self, planned: Identity | None, execute: Callable[[], None]) -> BatchSource:
        """What a runner takes; `BatchSource` says what ``planned`` and ``execute`` are."""

    @abstractmethod
    def figures(self) -> Figures:
        """What there is to say of the way in the progress of the batch, once it has run."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what is left of them on the way. Idempotent."""


class RunMode(ABC):
    """Decides where state is, and how rows get there. Picklable until it is opened."""

    #: How many files the output of a batch may have.
    most_files: int = 1

    def check(self, store: CheckpointReader) -> None:  # noqa: B027 - most ways take any store
        """Raise if rows cannot come this way to a store like this; it is not open yet."""

    @abstractmethod
    def unopened(self) -> RunMode:
        """One for another run of a query."""

    @abstractmethod
    def execution(self, frame: DataFrame, job: Job) -> Callable[..., Execution]:
        """What makes the execution of the job for the query of this frame."""

    @abstractmethod
    def open(self, store: CheckpointReader, frame: DataFrame) -> None:
        """Get ready for a run of a query, which holds the store."""

    @abstractmethod
    def rows_of(self, frame: DataFrame, job: Job) -> BatchRows:
        """The rows of a batch, not yet read."""

    @abstractmethod
    def close(self) -> None:
        """Release what `open` has made. Idempotent."""


_log = logging.getLogger("statebackend.spark")

INPUTS = AUTO, FILES = "auto", "files"
#: The way of a batch that comes at once, in its progress.
_MEMORY = "memory"
#: The folder of a store in which Spark writes the rows of batches, each run of a query into its own folder.
FOLDER = "statebackend-input"
_RUN = re.compile(r"run-[0-9a-f]{16}")
#: A piece, copies of it while it is sorted or joined, and rows out share what rows may take.
_SHARES = 4
_ENCRYPTED = "the store is encrypted, and these files are not"


@dataclass(frozen=True)
class Driver:
    """Driver mode, the default: state is in the process of the driver. Pass it as ``run_on=``.

    Rows of a batch take about ``batch_memory`` in this process. With ``input="auto"``, a batch comes to the driver at
    once, until one is larger than ``batch_memory`` or than Spark brings to the driver. Later batches use files then.
    With ``input="files"``, each batch uses files.

    >>> Driver("1g", input="files")
    Driver(batch_memory='1g', input='files')
    >>> Driver(input="memory")
    Traceback (most recent call last):
    statebackend.errors.UsageError: unknown input 'memory'; expected 'auto' or 'files' [USAGE.OPTION]
    """

    batch_memory: Size = "256m"
    input: str = AUTO

    def __post_init__(self) -> None:
        number_of_bytes("batch_memory", self.batch_memory, least=1)
        if self.input not in INPUTS:
            raise usage.option(f"unknown input {self.input!r}; expected 'auto' or 'files'")


class DriverMode(RunMode):
    """Decides the way of each batch. After the first batch that overflows, batches use files."""

    def __init__(self, options: Driver) -> None:
        self._options = options
        self._memory = number_of_bytes("batch_memory", options.batch_memory)
        self._through_files = options.input == FILES
        #: Where files lie; None if they may lie nowhere, for a reason.
        self._folder: str | None = None
        self._why_not = ""
        self._is_temporary = False

    def __repr__(self) -> str:
        if not self._through_files:
            return "<rows at once>"
        return f"<rows through files, in pieces of {self._piece_bytes / (1 << 20):,.0f} MiB>"

    @property
    def _piece_bytes(self) -> int:
        return max(1, self._memory // _SHARES)

    def unopened(self) -> DriverMode:
        return DriverMode(self._options)

    def check(self, store: CheckpointReader) -> None:
        if self._options.input == FILES and store.encryption is not None:
            raise _no_files(store, _ENCRYPTED)

    def execution(self, frame: DataFrame, job: Job) -> Callable[..., Execution]:
        return LocalExecution

    def open(self, store: CheckpointReader, frame: DataFrame) -> None:
        """Get ready for a run of a query, which holds the store: remove what earlier runs have left."""
        path = local_path(store.address)
        if store.encryption is not None:
            self._why_not = _ENCRYPTED
        elif path is not None:
            above = os.path.join(os.path.abspath(path), FOLDER)
            with suppress(FileNotFoundError):
                for left in filter(_RUN.fullmatch, os.listdir(above)):
                    shutil.rmtree(os.path.join(above, left), ignore_errors=True)
            self._folder = os.path.join(above, f"run-{secrets.token_hex(8)}")
        elif runs_here(frame):
            self._folder, self._is_temporary = tempfile.mkdtemp(prefix="statebackend-input-"), True
        else:
            self._why_not = "the store is not a folder, and executors may be on other machines"
        if self._through_files and self._folder is None:
            raise _no_files(store, self._why_not)

    def rows_of(self, frame: DataFrame, job: Job) -> DriverRows:
        return DriverRows(self, frame, job)

    def read(self, frame: DataFrame, job: Job) -> pa.Table | BatchFiles:
        """Bring the rows of a batch here, or make Spark write them."""
        if not self._through_files:
            try:
                table = arrow_of(frame)
            except UsageError as error:
                if error.code != "USAGE.BATCH_TOO_LARGE" or self._folder is None:
                    raise
                self._overflowed("what Spark brings to the driver (spark.driver.maxResultSize)")
            else:
                if table.nbytes > self._memory:
                    self._overflowed(f"batch_memory ({table.nbytes:,} bytes)")
                return table
        assert self._folder is not None
        folder = os.path.join(self._folder, secrets.token_hex(8))
        return write_batch(frame, job, folder, self._piece_bytes)

    def _overflowed(self, than: str) -> None:
        if self._folder is None:
            _log.warning("a batch is larger than %s, and cannot use files: %s", than, self._why_not)
            return
        self._through_files = True
        _log.warning("a batch is larger than %s: from now on, batches use files", than)

    def close(self) -> None:
        """Remove the folder of this run, if there is one. Idempotent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            if not self._is_temporary:
                with suppress(OSError):  # another run may have begun
                    os.rmdir(os.path.dirname(self._folder))
            self._folder = None


def _no_files(store: CheckpointReader, why: str) -> UsageError:
    return UsageError(
        "batches cannot go through files here",
        code="USAGE.NOT_AVAILABLE",
        detail=f"{store.address}: {why}",
        hint="leave run_on=Driver(input='files') out, or give another state=, and keep batches small: "
        "maxFilesPerTrigger, maxOffsetsPerTrigger",
    )


class DriverRows(BatchRows):
    """The rows of one batch, without the ticks among them, which are counted when they are read."""

    def __init__(self, reading: DriverMode, frame: DataFrame, job: Job) -> None:
        self._reading, self._frame, self._job = reading, frame, job
        self._files: BatchFiles | None = None
        self._heartbeats = 0

    def incoming(self, planned: Identity | None, execute: Callable[[], None]) -> BatchSource:
        return BatchSource(self.read, planned, execute)

    def figures(self) -> Figures:
        """The number of ticks, and how the rows came: in memory, or through files."""
        if self._files is None:
            return {"numHeartbeats": self._heartbeats, "input": _MEMORY}
        return {"numHeartbeats": self._files.heartbeats, "input": FILES}

    def read(self) -> pa.Table | BatchFiles:
        """Read them, or make Spark write them."""
        read = self._reading.read(self._frame, self._job)
        if isinstance(read, BatchFiles):
            self._files = read
            return read
        if HEARTBEAT in read.column_names:
            read, self._heartbeats = without_heartbeats(read)
        return read

    def discard(self) -> None:
        if self._files is not None:
            self._files.remove()


#: Bytes of a row group: Spark's tasks hold one in the heap of the JVM each.
_ROW_GROUP = 16 << 20
#: Rows that are read at once, before they are put together to a piece.
_ROWS = 16_384
#: Columns that are there while Spark sorts.
_POSITION, _IS_BROADCAST, _BY = "position", "is_broadcast", "by"
#: Spark writes exact values under any settings of the session for its files.
_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.writeLegacyFormat": "false",
    "spark.sql.variant.writeShredding.enabled": "false",  # fields of variants would be in separate columns
}
_PART = re.compile(r"part-([0-9]+)-.*-c([0-9]+)(?:\.[a-z0-9]+)?\.parquet")


class BatchFiles(ChunkedRows):
    """The files of a batch in a folder. A piece has about ``piece_bytes``, but a row at least.

    The columns of the files are called by their places: names of a batch may be such that Spark takes two for one.
    """

    def __init__(self, folder: str, names: Sequence[str], schema: pa.Schema, piece_bytes: int) -> None:
        self._folder = folder
        #: In the order of the rows.
        self._names = list(names)
        self._columns = schema
        self._piece_bytes = piece_bytes
        #: The ticks among the rows, once all have been read.
        self.heartbeats = 0

    def __repr__(self) -> str:
        return f"<{len(self._names)} files of a batch in {self._folder}>"

    @property
    def schema(self) -> pa.Schema:
        if HEARTBEAT not in self._columns.names:
            return self._columns
        return self._columns.remove(self._columns.names.index(HEARTBEAT))

    def pieces(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        wanted = self._columns.names if columns is None else list(columns)
        if columns is not None and HEARTBEAT in self._columns.names:
            wanted.append(HEARTBEAT)
        heartbeats = 0
        for table in self._tables(wanted):
            rows, ticks = without_heartbeats(table)
            heartbeats += ticks
            yield rows
        self.heartbeats = heartbeats

    def _tables(self, columns: list[str]) -> Iterator[pa.Table]:
        held: list[pa.RecordBatch] = []
        size = 0
        for batch in self._batches(columns):
            for part in _cut(batch, self._piece_bytes):
                if held and size + part.nbytes > self._piece_bytes:
                    yield self._table(held, columns)
                    held, size = [], 0
                held.append(part)
                size += part.nbytes
        if held:
            yield self._table(held, columns)

    def _table(self, batches: list[pa.RecordBatch], columns: list[str]) -> pa.Table:
        """A piece with the names and types that the batch would have as a whole."""
        schema = pa.schema([self._columns.field(name) for name in columns])
        table = pa.Table.from_batches(batches).select(self._places(columns))
        return table.rename_columns(columns).cast(schema)

    def _places(self, columns: list[str]) -> list[str]:
        return [_column(self._columns.names.index(name)) for name in columns]

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        for name in self._names:
            with self._opened(name) as file:
                yield from file.iter_batches(_ROWS, columns=self._places(columns))

    def _opened(self, name: str) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(f"{self._folder}/{name}", pre_buffer=False)
        except FileNotFoundError:
            raise UsageError(
                "rows that Spark has written for this batch are gone",
                code="USAGE.STORE_IN_USE",
                detail=f"{self._folder}/{name}",
                hint="leave the folder alone while the query runs; the batch is run again when the query is started",
            ) from None

    def remove(self) -> None:
        """Remove the files. Idempotent."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._folder)


def write_batch(frame: DataFrame, job: Job, folder: str, piece_bytes: int) -> BatchFiles:
    """Make Spark write a batch into a folder that is not there yet; if that fails, nothing stays.

    Rows have the order of ``frame.toArrow()``; sorted if the job wants that, where equal ones keep that order.
    """
    try:
        return write_files(frame, _sorted(frame, job), folder, piece_bytes)
    except Exception as error:
        if type(error).__name__ == "AnalysisException":
            raise UsageError(
                "Spark cannot write this batch as files, or not in this order",
                code="USAGE.NOT_AVAILABLE",
                detail=f"columns {', '.join(frame.columns)}; order_by {', '.join(job.sorted_by) or 'none'}",
                hint="leave Driver(input='files') out, or give the column another type",
            ) from error
        raise


def write_files(frame: DataFrame, renamed: DataFrame, folder: str, piece_bytes: int) -> BatchFiles:
    """Make Spark write a frame; ``renamed`` has its rows, with columns called by their places (`by_place`)."""
    # No job of Spark's: it knows that this is empty.
    schema = frame.limit(0).toArrow().schema
    try:
        with settings(frame.sparkSession, _SETTINGS):
            writer = renamed.write.option("compression", "snappy").option("maxRecordsPerFile", "0")
            writer.option("parquet.block.size", str(_ROW_GROUP)).parquet(f"file://{folder}")
        names = [name for name in os.listdir(folder) if _PART.fullmatch(name)]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return BatchFiles(folder, sorted(names, key=_part), schema, piece_bytes)


def by_place(frame: DataFrame) -> DataFrame:
    """The frame with its columns called by their places."""
    return frame.toDF(*map(_column, range(len(frame.columns))))


def _sorted(frame: DataFrame, job: Job) -> DataFrame:
    """The frame in the order of `ChunkedRows`, its columns called by their places."""
    names = frame.columns
    own = [_column(at) for at in range(len(names))]
    renamed = by_place(frame)
    by = [*(job.columns if job.takes_whole_keys else ()), *job.sorted_by]
    if not by:
        return renamed
    # Broadcast rows first, in their order, which ignores the columns.
    flag = "false" if job.broadcast is None else f"coalesce({_column(names.index(job.broadcast))}, false)"
    wider = renamed.selectExpr(
        "*",
        f"{flag} AS {_IS_BROADCAST}",
        *(f"if({flag}, null, {_in_bytes(frame, name)}) AS {_BY}{at}" for at, name in enumerate(by)),
        f"monotonically_increasing_id() AS {_POSITION}",
    )
    keys = [_IS_BROADCAST, *(f"{_BY}{at}" for at in range(len(by))), _POSITION]
    return wider.sort(*keys, ascending=[False, *(True for _ in keys[1:])]).select(*own)


def _in_bytes(frame: DataFrame, name: str) -> str:
    """A column to sort by: text with a collation sorts by its bytes, as where rows come at once."""
    at = frame.columns.index(name)
    is_collated = frame.schema.fields[at].dataType.simpleString().startswith("string collate ")
    return f"cast({_column(at)} AS string collate UTF8_BINARY)" if is_collated else _column(at)


def _column(place: int) -> str:
    return f"column{place}"


def _part(name: str) -> tuple[int, int]:
    """Sorts the names of Spark's files by the number of the task, of which each may write several.

    >>> sorted(["part-00007-a-c1000.snappy.parquet", "part-00007-a-c101.snappy.parquet"], key=_part)
    ['part-00007-a-c101.snappy.parquet', 'part-00007-a-c1000.snappy.parquet']
    >>> sorted(["part-100000-a-c000.parquet", "part-00007-a-c001.parquet"], key=_part)
    ['part-00007-a-c001.parquet', 'part-100000-a-c000.parquet']
    """
    found = _PART.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2])


def _cut(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """A record batch in parts of about so many bytes, but a row at least.

    >>> [part.num_rows for part in _cut(pa.record_batch({"n": [1, 2, 3]}), 16)]
    [2, 1]
    """
    rows = batch.num_rows
    each = rows if batch.nbytes <= size else max(1, rows * size // batch.nbytes)
    for start in range(0, rows, max(1, each)):
        yield batch.slice(start, each)
