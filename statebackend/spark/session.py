"""What is asked of a Spark session: which query this is, where it runs, whether it still does.

Nothing here imports pyspark: the session comes with the batch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from statebackend.errors import UsageError

__all__ = [
    "Query",
    "active_execution",
    "arrow_of",
    "check_output_names",
    "check_reachable",
    "column_types",
    "output_frame",
]

_QUERY_ID = "sql.streaming.queryId"
#: Spark runs the jobs of a query in a job group that is named after the run.
_RUN_ID = "spark.jobGroup.id"


class Query(NamedTuple):
    """Which query a batch is of, and which run of it."""

    name: str
    id: str | None
    run: str | None

    @classmethod
    def of(cls, frame: Any, name: str | None) -> Query:
        """The query that calls with this frame; ``name``, if given, is who its state belongs to."""
        found: str | None = None
        run: str | None = None
        if not _is_connect(frame):
            context = frame.sparkSession.sparkContext
            found, run = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_RUN_ID)
        whose = name or found
        if whose is None:
            raise UsageError(
                "it cannot be told which query this is",
                detail="Spark Connect" if _is_connect(frame) else "called outside of a streaming query",
                hint="pass name=, which says whose state this is",
            )
        return cls(whose, found, run)


def _is_connect(frame: Any) -> bool:
    return type(frame).__module__.startswith("pyspark.sql.connect")


def column_types(frame: Any) -> dict[str, Any]:
    """The types of the columns; of names that come twice, the last."""
    return {field.name: field.dataType for field in frame.schema.fields}


def arrow_of(frame: Any) -> pa.Table:
    """The rows of a batch, brought to this process."""
    try:
        return frame.toArrow()
    except Exception as error:
        if "maxResultSize" not in str(error):
            raise
        raise UsageError(
            "the batch is larger than what Spark brings to the driver",
            code="USAGE.BATCH_TOO_LARGE",
            detail="spark.driver.maxResultSize",
            hint="raise spark.driver.maxResultSize, or make batches smaller: maxFilesPerTrigger, "
            "maxOffsetsPerTrigger",
        ) from error


def check_reachable(frame: Any, checkpoint: str) -> None:
    """Raise if the checkpoint is a plain path and Spark's executors are on other machines."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", checkpoint) or _is_connect(frame):
        return
    master = frame.sparkSession.sparkContext.master
    if not master.startswith("local"):
        raise UsageError(
            "the checkpoint is a local path, and the executors may be on other machines",
            code="USAGE.LOCAL_CHECKPOINT",
            detail=f"{checkpoint}, master {master}",
            hint="use s3://, or file:///path for a folder that every machine mounts under this path",
        )


def check_output_names(frame: Any, names: Sequence[str]) -> None:
    """Raise if Spark would not read an output with these columns: it may take two of the names for one."""
    if frame.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true":
        return
    counts = Counter(name.lower() for name in names)
    twice = [name for name in names if counts[name.lower()] > 1]
    if twice:
        raise UsageError(
            "two columns of the schema have the same name but for upper and lower case",
            detail=f"columns {', '.join(twice)}",
            hint="rename one, or set spark.sql.caseSensitive to true",
        )


def active_execution(frame: Any, query: Query) -> Any:
    """Spark's object of the running query, with ``isActive()``; None where it cannot be had."""
    if query.id is None:
        return None
    session = frame.sparkSession
    try:
        uuid = session.sparkContext._jvm.java.util.UUID.fromString(query.id)
        return session._jsparkSession.sharedState().activeStreamingQueries().get(uuid)
    except Exception:  # noqa: BLE001 - internals of Spark: whatever it is, do without
        return None


def output_frame(frame: Any, ddl: str, paths: list[str]) -> Any:
    """A frame over the committed output, which reads its files whenever it is used."""
    session = frame.sparkSession
    if not paths:
        return session.createDataFrame([], ddl)
    reader = session.read.schema(ddl).option("datetimeRebaseMode", "CORRECTED")
    return reader.parquet(*(re.sub(r"^s3://", "s3a://", path) for path in paths))
