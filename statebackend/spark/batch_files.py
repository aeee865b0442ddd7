"""A batch as files that Spark writes, for one that is not to be in this process as a whole.

Spark writes its rows as Parquet, in the order in which the function is to get them, and this process reads them a piece
at a time. Nothing of it is durable: if anything is lost, the batch fails, and Spark gives it again.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from statebackend.errors import UsageError
from statebackend.runtime.batches import RowsInPieces
from statebackend.runtime.job import Job
from statebackend.spark.session import settings
from statebackend.spark.ticks import COLUMN as HEARTBEAT
from statebackend.spark.ticks import without_heartbeats

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["BatchFiles", "write_batch"]

#: Bytes of a row group: Spark's tasks hold one in the heap of the JVM each.
_ROW_GROUP = 16 << 20
#: Rows that are read at once, before they are put together to a piece.
_ROWS = 16_384
#: Columns that are there while Spark sorts.
_POSITION, _IS_BROADCAST, _BY = "position", "is_broadcast", "by"
#: What Spark writes is exactly what it has, whatever the session says for files of its own.
_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.writeLegacyFormat": "false",
    "spark.sql.variant.writeShredding.enabled": "false",  # fields of variants would lie in columns of their own
}
_PART = re.compile(r"part-([0-9]+)-.*-c([0-9]+)(?:\.[a-z0-9]+)?\.parquet")


class BatchFiles(RowsInPieces):
    """The files of a batch in a folder. A piece has about ``piece_bytes``, but a row at least.

    The columns of the files are called by their places: names of a batch may be such that Spark takes two for one.

    >>> BatchFiles("/nowhere", [], pa.schema([("n", pa.int64())]), 1 << 20)
    <0 files of a batch in /nowhere>
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
    # No job of Spark's: it knows that this has no rows.
    schema = frame.limit(0).toArrow().schema
    try:
        with settings(frame.sparkSession, _SETTINGS):
            writer = (
                _sorted(frame, job).write.option("compression", "snappy").option("maxRecordsPerFile", "0")
            )
            writer.option("parquet.block.size", str(_ROW_GROUP)).parquet(f"file://{folder}")
        names = [name for name in os.listdir(folder) if _PART.fullmatch(name)]
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if type(error).__name__ == "AnalysisException":
            raise UsageError(
                "Spark cannot write this batch as files, or not in this order",
                code="USAGE.NOT_AVAILABLE",
                detail=f"columns {', '.join(frame.columns)}; order_by {', '.join(job.sorted_by) or 'none'}",
                hint="leave input='files' out, or give the column another type",
            ) from error
        raise
    return BatchFiles(folder, sorted(names, key=_part), schema, piece_bytes)


def _sorted(frame: DataFrame, job: Job) -> DataFrame:
    """The frame in the order of `RowsInPieces`, its columns called by their places."""
    names = frame.columns
    own = [_column(at) for at in range(len(names))]
    renamed = frame.toDF(*own)
    by = [*(job.columns if job.takes_whole_keys else ()), *job.sorted_by]
    if not by:
        return renamed
    # Broadcast rows first, in the order in which they are, whatever the columns say.
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
    """A column to sort by: text with a collation goes by its bytes, as where rows come at once."""
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
