"""Questions to a Spark session: the query of a batch, the content of its frames, the reach of its executors.

Nothing here imports pyspark: the session comes with the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from statebackend.checkpoint.files import scheme_of
from statebackend.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructType

_QUERY_ID = "sql.streaming.queryId"


class Query(NamedTuple):
    """The query of a batch: the owner of its state, and Spark's id if Spark tells it."""

    name: str
    id: str | None

    @classmethod
    def of(cls, frame: DataFrame, name: str | None) -> Query:
        """The query that calls with this frame; ``name``, if given, is the owner of its state."""
        found: str | None = None
        if not is_connect(frame):
            found = frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        whose = name or found
        if whose is None:
            raise UsageError(
                "it cannot be told which query this is",
                detail="Spark Connect" if is_connect(frame) else "called outside of a streaming query",
                hint="pass name=, which says whose state this is",
            )
        return cls(whose, found)


def is_connect(frame: DataFrame) -> bool:
    """Return True if the frame is one of Spark Connect's."""
    return type(frame).__module__.startswith("pyspark.sql.connect")


def column_types(frame: DataFrame) -> dict[str, object]:
    """The types of the columns; for names that occur twice, the last."""
    return {field.name: field.dataType for field in frame.schema.fields}


def arrow_of(frame: DataFrame) -> pa.Table:
    """Bring the rows of a batch to this process."""
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
            "maxOffsetsPerTrigger; at a store that is a folder, such batches go through files",
        ) from error


def execute(frame: DataFrame) -> None:
    """Make Spark compute a batch and throw the rows away."""
    frame.write.format("noop").mode("overwrite").save()


def runs_here(frame: DataFrame) -> bool:
    """Return True if all of Spark runs on this machine."""
    master = frame.sparkSession.conf.get("spark.master", "local")
    return master is not None and bool(master.startswith("local"))


def check_reachable(frame: DataFrame, checkpoint: str) -> None:
    """Raise if the checkpoint is a plain path and Spark's executors are on other machines."""
    if scheme_of(checkpoint) is None and not runs_here(frame):
        raise UsageError(
            "the checkpoint is a local path, and the executors may be on other machines",
            code="USAGE.LOCAL_CHECKPOINT",
            detail=f"{checkpoint}, master {frame.sparkSession.conf.get('spark.master')}",
            hint="use s3://, or file:///path for a folder that every machine mounts under this path",
        )


def check_readable_by_executors(frame: DataFrame, checkpoint: str, address: str) -> None:
    """Raise unless an executor can read ``address``, a file of the store. Runs one small job.

    Asks nothing if all of Spark is on this machine, or if the paths are no folders.
    """
    if scheme_of(checkpoint) not in (None, "file") or runs_here(frame):
        return
    error = reading_error(frame, address)
    if error is not None:
        raise _unreachable(checkpoint, frame) from error


def reading_error(frame: DataFrame, address: str) -> Exception | None:
    """The error of an executor that reads ``address``, a file with text; None if it can. Runs one small job."""
    try:
        found = _reader(frame).text(_spark_path(address)).count()
    except Exception as error:  # noqa: BLE001 - Spark's, of many classes
        return error
    return None if found else FileNotFoundError("no text")


def _unreachable(checkpoint: str, frame: DataFrame) -> UsageError:
    return UsageError(
        "the executors cannot read the checkpoint",
        code="USAGE.LOCAL_CHECKPOINT",
        detail=f"{checkpoint}, master {frame.sparkSession.conf.get('spark.master')}",
        hint="use s3://, or file:///path for a folder that every machine mounts under this path",
    )


def check_output_names(frame: DataFrame, schema: pa.Schema) -> None:
    """Raise if Spark could not read an output of this schema: it may take two of the names for one."""
    if is_set(frame.sparkSession.conf.get, "spark.sql.caseSensitive"):
        return
    twice = _twice(list(schema))
    if twice:
        raise UsageError(
            "two columns or fields of the schema have the same name but for upper and lower case",
            detail=f"columns {', '.join(twice)}",
            hint="rename one, or set spark.sql.caseSensitive to true",
        )


def _twice(fields: Sequence[pa.Field], above: str = "") -> list[str]:
    """The names of columns, and of fields in them, that differ from others beside them in their case at most.

    >>> _twice(list(pa.schema({"a": pa.list_(pa.struct({"x": pa.int64(), "X": pa.int64()})), "b": pa.int64()})))
    ['a.x', 'a.X']
    """
    counts = Counter(field.name.lower() for field in fields)
    found = [above + field.name for field in fields if counts[field.name.lower()] > 1]
    for field in fields:
        found += _twice(_fields_in(field.type), f"{above}{field.name}.")
    return found


def _fields_in(kind: pa.DataType) -> list[pa.Field]:
    """The fields of the structs in a type that no other struct is around; a map has the fields key and value.

    >>> [field.name for field in _fields_in(pa.list_(pa.map_(pa.string(), pa.int64())))]
    ['key', 'value']
    """
    if pa.types.is_struct(kind):
        return list(kind)
    return [field for at in range(kind.num_fields) for field in _fields_in(kind.field(at).type)]


def output_frame(frame: DataFrame, schema: StructType, paths: list[str]) -> DataFrame:
    """A frame over the committed output; it reads the files whenever it is used.

    Missing or damaged files are errors here, whatever the session's settings.
    """
    session = frame.sparkSession
    if not paths:
        return session.createDataFrame([], schema)
    reader = _reader(frame).schema(schema).option("datetimeRebaseMode", "CORRECTED")
    # Spark ignores the checksums of pages unless an option says otherwise.
    reader = reader.option("parquet.page.verify-checksum.enabled", "true")
    return reader.parquet(*map(_spark_path, paths))


def _reader(frame: DataFrame) -> DataFrameReader:
    reader = frame.sparkSession.read
    for name in ("ignoreMissingFiles", "ignoreCorruptFiles"):
        reader = reader.option(name, "false")
    # Since Spark 4.3, a setting says which names of files to pass over, without an error.
    return reader.option("ignoredPathSegmentRegex", "").option("__globPaths__", "false")


def _spark_path(address: str) -> str:
    """The address of a file as Spark takes it, whatever its default file system."""
    if address.startswith("s3://"):
        return "s3a://" + address.removeprefix("s3://")
    return f"file://{address}" if scheme_of(address) is None else address


def is_set(get: Callable[[str, str | None], Any], name: str) -> bool:
    """Return True if a setting of Spark is true, which Spark takes in any case.

    >>> is_set({"spark.speculation": " True"}.get, "spark.speculation")
    True
    """
    return str(get(name, None)).strip().lower() == "true"


@contextmanager
def settings(session: SparkSession, given: Mapping[str, str]) -> Iterator[None]:
    """Give a session these settings for a while."""
    before = {name: session.conf.get(name, None) for name in given}
    try:
        for name, value in given.items():
            session.conf.set(name, value)
        yield
    finally:
        for name, was in before.items():
            if was is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, was)
