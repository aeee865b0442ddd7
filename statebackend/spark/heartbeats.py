"""Ticks in a stream that pauses: Spark calls no ``foreachBatch`` without rows, and then no time goes on."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from statebackend.errors import usage
from statebackend.state import Duration, milliseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The column that marks a tick; null in all other rows.
COLUMN = "statebackend_heartbeat"


def heartbeat(frame: DataFrame, every: Duration = "10 seconds") -> DataFrame:
    """Add ticks to a stream, so that a batch comes at least about this often, with rows or without.

    Apply it last, before ``writeStream``. `stateful` counts the ticks apart, as ``numHeartbeats``, and gives them to
    no function; time goes on, timers fire, and due state expires. The first tick comes with the query's first batch,
    and later ones when a multiple of ``every`` has passed by the driver's clock. Where a trigger has to end, as
    ``availableNow``, it does, after one tick at most. It is a Python data source of Spark.

    >>> heartbeat(None, every="soon")
    Traceback (most recent call last):
    statebackend.errors.UsageError: 'soon' is not a duration (every). Hint: ...
    """
    every_ms = milliseconds("every", every)
    if not frame.isStreaming:
        raise usage.heartbeat(
            "a heartbeat is for a stream",
            hint="leave it out for a frame that is read as a whole",
        )
    if COLUMN in frame.columns:
        raise usage.heartbeat("the stream has a heartbeat already", detail=f"column {COLUMN!r}")
    session = frame.sparkSession
    source = _source()
    session.dataSource.register(source)
    ticks = session.readStream.format(source.name()).option("every", str(every_ms)).load()
    return frame.unionByName(ticks, allowMissingColumns=True)


def without_heartbeats(table: pa.Table) -> tuple[pa.Table, int]:
    """The rows of a batch without ticks and their column, and the number of ticks."""
    if COLUMN not in table.column_names:
        return table, 0
    at = table.column_names.index(COLUMN)
    marks, rows = table.column(at), table.remove_column(at)
    ticks = len(marks) - marks.null_count
    return (rows.filter(pc.is_null(marks)) if ticks else rows), ticks


def _source() -> Any:
    """The class of the data source. Made here, it travels to Spark's workers by value: they need no library of ours."""
    import time

    from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
    from pyspark.sql.types import StructField, StructType, TimestampType

    # Without PySpark, as where the code is only checked, the bases are of any type.
    class Ticks(SimpleDataSourceStreamReader):  # type: ignore[misc, unused-ignore]
        """An offset is the time of the newest tick, a multiple of the interval; zero before the first."""

        def __init__(self, every: int) -> None:
            self.every = every

        def initialOffset(self) -> dict[str, int]:
            return {"tick": 0}

        def read(self, start: dict[str, int]) -> Any:
            newest = int(time.time() * 1000) // self.every * self.every
            if newest <= start["tick"]:
                return iter([]), start
            return self.readBetweenOffsets(start, {"tick": newest}), {"tick": newest}

        def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Any:
            # One for all that were due meanwhile.
            return iter([(datetime.datetime.fromtimestamp(end["tick"] / 1000, datetime.timezone.utc),)])

        def commit(self, end: dict[str, int]) -> None:
            pass

    class Heartbeat(DataSource):  # type: ignore[misc, unused-ignore]
        @classmethod
        def name(cls) -> str:
            return "statebackend_heartbeat"

        def schema(self) -> Any:
            # No text: what "timestamp" means in one is a setting of the session.
            return StructType([StructField(column, TimestampType())])

        def simpleStreamReader(self, schema: Any) -> Any:
            return Ticks(int(self.options["every"]))

    column = COLUMN
    return Heartbeat
