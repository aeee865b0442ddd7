"""Questions to Spark: the query of a batch, its run and plans, the content of its frames, the reach of executors.

Nothing here imports pyspark: the session comes with the batch. Only Spark's classic API lets a driver ask for the run
of a query.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from statebackend.checkpoint.files import PosixCalls, scheme_of, without_secrets
from statebackend.checkpoint.files.store_files import storing
from statebackend.errors import UsageError, usage
from statebackend.functions import EngineFrame, PlannedTimes
from statebackend.runtime.batch_identity import Identity, plan_identity
from statebackend.runtime.batch_progress import Json
from statebackend.state import clocks
from statebackend.types import of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructType

_log = logging.getLogger("statebackend.spark")

_QUERY_ID = "sql.streaming.queryId"
#: The content of a checkpointLocation.
SPARKS_FOLDERS = ("offsets", "commits", "sources", "state", "metadata")
#: The folders of a checkpointLocation that determine the rows of a batch. Their consequences are not needed: if
#: Spark has lost the commit of a batch, it runs the batch again, and so do we.
_FOLDERS = ("offsets", "sources")


class Query(NamedTuple):
    """The query of a batch: the owner of its state, and Spark's id if Spark tells it."""

    uid: str
    id: str | None

    @classmethod
    def of(cls, frame: DataFrame, uid: str | None) -> Query:
        """The query that calls with this frame; ``uid``, if given, is the owner of its state."""
        found: str | None = None
        if not is_connect(frame):
            found = frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        whose = uid or found
        if whose is None:
            raise UsageError(
                "cannot tell which query this is",
                code="USAGE.NO_UID",
                detail="Spark Connect" if is_connect(frame) else "called outside of a streaming query",
                hint="pass uid= to stateful(...): it names the owner of the state",
            )
        return cls(whose, found)


def is_connect(frame: DataFrame) -> bool:
    """Return True if the frame is one of Spark Connect's."""
    return type(frame).__module__.startswith("pyspark.sql.connect")


class QueryRun:
    """Spark's object of a running query."""

    def __init__(self, java: Any, jvm: Any) -> None:
        self._java = java
        self._jvm = jvm
        self.run_id: str = java.runId().toString()
        #: The name given with ``queryName``; None if there is none. It may change from run to run.
        self.name: str | None = java.name()

    @classmethod
    def of(cls, session: SparkSession, query_id: str | None) -> QueryRun | None:
        """The run of an active query in this session's application; None if it is out of reach."""
        if query_id is None:
            return None
        try:
            jvm = session.sparkContext._jvm
            assert jvm is not None
            active = session._jsparkSession.sharedState().activeStreamingQueries()
            found = active.get(jvm.java.util.UUID.fromString(query_id))
            return None if found is None else cls(found, jvm)
        except Exception:  # noqa: BLE001 - internals of Spark: continue without them
            _log.info("Spark's run of the query cannot be asked", exc_info=True)
            return None

    def is_active(self) -> bool:
        """True if the run has not ended."""
        try:
            return bool(self._java.isActive())
        except Exception:  # noqa: BLE001 - Spark is gone
            return False

    def location(self) -> str | None:
        """The checkpointLocation, as Spark has resolved it; None if it is out of reach."""
        try:
            return str(self._java.resolvedCheckpointRoot())
        except Exception:  # noqa: BLE001 - internals of Spark
            return None

    def plan(self, batch_id: int) -> str | None:
        """The entry of a batch in Spark's offset log; None if there is none."""
        try:
            log = self._java.offsetLog()
            found = log.get(batch_id)
            if not found.isDefined():
                return None
            written = self._jvm.java.io.ByteArrayOutputStream()
            log.serialize(found.get(), written)
            return str(written.toString("UTF-8"))
        except Exception:  # noqa: BLE001 - internals of Spark: then the rows themselves are compared
            _log.info("Spark's offset log cannot be read", exc_info=True)
            return None


def parsed_plan(text: str) -> Identity | None:
    """The identity in an entry of Spark's offset log: its time, and the end of each source.

    Leaves out the settings of the session in it: they do not determine the rows.

    >>> parsed_plan('v1\\n{"batchWatermarkMs":0,"batchTimestampMs":1000,"conf":{}}\\n{"logOffset":3}\\n-')
    {'kind': 'plan', 'time': 1000, 'offsets': [{'logOffset': 3}, None]}
    """
    lines = text.splitlines()
    try:
        time = json.loads(lines[1])["batchTimestampMs"]
    except (IndexError, KeyError, TypeError, ValueError):
        return None  # an entry of a version that we do not know
    return plan_identity(time, [_parsed_offset(line) for line in lines[2:]])


def _parsed_offset(line: str) -> Json:
    if line == "-":
        return None
    try:
        offset: Json = json.loads(line)
    except ValueError:
        return line
    return offset


def parsed_times(text: str | None) -> tuple[int, int]:
    """The time and the watermark in an entry of Spark's offset log; zeros if there is none.

    >>> parsed_times('v1\\n{"batchWatermarkMs":500,"batchTimestampMs":1000,"conf":{}}\\n-')
    (1000, 500)
    """
    try:
        found = json.loads("" if text is None else text.splitlines()[1])
        return int(found["batchTimestampMs"]), int(found["batchWatermarkMs"])
    except (IndexError, KeyError, TypeError, ValueError):
        return 0, 0


class SparkLog:
    """Spark's logs of the content of each batch, if they are in a folder that this process can reach.

    Spark does not sync them on a local path. If a batch were durable and its plan were not, Spark would plan it again
    after a power failure, with other rows. So the plan is made durable before the batch is committed.
    """

    def __init__(self, folder: str, calls: PosixCalls | None = None) -> None:
        self.folder = folder
        self._calls = PosixCalls() if calls is None else calls
        #: The names in each folder at the last call.
        self._synced: dict[str, frozenset[str]] = {}
        self._knows_outer = False

    @classmethod
    def at(cls, location: str | None) -> SparkLog | None:
        """The logs at a checkpointLocation; None if it is not a folder here."""
        folder = local_folder(location)
        return None if folder is None else cls(folder)

    def plan(self, batch_id: int) -> str | None:
        """The entry of a batch in Spark's offset log; None if its file cannot be read."""
        return self._entry(f"offsets/{batch_id}")

    def entries(self, batch_id: int) -> dict[str, Json]:
        """The plan of a batch, where the sources ended before it, and the commit of the batch before it."""
        before = self.plan(batch_id - 1)
        return {
            "plan": self.plan(batch_id),
            "before": None if before is None else [*before.splitlines()[2:]],
            "done": self._entry(f"commits/{batch_id - 1}"),
        }

    def _entry(self, name: str) -> str | None:
        try:
            with open(f"{self.folder}/{name}", encoding="utf-8") as file:
                return file.read()
        except (OSError, ValueError):
            return None

    def sync(self) -> None:
        """Make durable what was written since the last call; O(names there), and an fsync for each new name."""
        with storing(f"making Spark's notes in {self.folder} durable"):
            for name in _FOLDERS:
                self._sync_tree(f"{self.folder}/{name}")
            if not self._knows_outer:
                # The id of the query, and the names of the folders themselves.
                self._sync_file(f"{self.folder}/metadata")
                self._sync_outwards()
                self._knows_outer = True

    def _sync_tree(self, folder: str) -> None:
        try:
            entries = {entry.name: entry for entry in os.scandir(folder)}
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        synced = self._synced.get(folder)
        fresh = entries.keys() - (synced or ())
        for name, entry in entries.items():
            if entry.is_dir(follow_symlinks=False):
                self._sync_tree(entry.path)
            elif name in fresh:  # Spark never writes a file of a log twice
                self._sync_file(entry.path)
        if fresh or synced is None:
            self._calls.sync_folder(folder)
        self._synced[folder] = frozenset(entries)

    def _sync_file(self, path: str) -> None:
        try:
            self._calls.sync_file(path)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                _log.warning("not ours to make durable: %s", path)
            elif error.errno not in (errno.ENOENT, errno.ENOTDIR):  # Spark has deleted it meanwhile
                raise

    def _sync_outwards(self) -> None:
        """Make the names of the folder and of its parents durable, as far as they belong to us."""
        folder = self.folder
        while True:
            try:
                self._calls.sync_folder(folder)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                    raise
                return
            outer = os.path.dirname(folder)
            if outer == folder or os.stat(outer).st_dev != os.stat(folder).st_dev:
                return
            folder = outer


def local_folder(location: str | None) -> str | None:
    """The local folder for an address from Spark; None if the address is not on this machine.

    >>> local_folder("file:/"), local_folder("s3a://bucket/app"), local_folder(None)
    ('/', None, None)
    """
    if location is None or scheme_of(location) not in (None, "file"):
        return None
    path = location if scheme_of(location) is None else "/" + location.partition(":")[2].lstrip("/")
    for each in (path, unquote(path)):
        if os.path.isdir(each):
            return os.path.abspath(each)
    return None


def shown_location(location: str | None) -> str | None:
    """A checkpointLocation in the form that manifests may hold.

    >>> shown_location("s3a://KEY:SECRET@bucket/app")
    's3a://bucket/app'
    """
    return None if location is None else without_secrets(location)


def column_types(frame: DataFrame) -> dict[str, object]:
    """The types of the columns; for names that occur twice, the last."""
    return {field.name: field.dataType for field in frame.schema.fields}


#: The key under which Spark's frames have the delay of a watermark, in the metadata of its column.
_WATERMARK = "spark.watermarkDelayMs"
_NO_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"


def engine_frame(frame: DataFrame, settings: Iterable[str]) -> EngineFrame:
    """What a function may know of a frame: its watermark, and these settings of the session."""
    found = [
        (field.name, field.metadata[_WATERMARK])
        for field in frame.schema.fields
        if _WATERMARK in (field.metadata or {})
    ]
    read: dict[str, str] = {}
    for name in settings:
        with suppress(Exception):  # a version of Spark that does not have it
            read[name] = str(frame.sparkSession.conf.get(name))
    return EngineFrame(found[0] if found else None, read)


def planned_times(
    frame: DataFrame, batch_id: int, plan: Callable[[int], str | None], now: int | None
) -> PlannedTimes | None:
    """The times that Spark has planned for a batch; ``plan`` reads its offset log, ``now`` replaces its clock."""
    text = plan(batch_id)
    if text is None:
        return None
    at, watermark = parsed_times(text)
    runs_without_rows = str(frame.sparkSession.conf.get(_NO_DATA)).lower() == "true"
    late = watermark if runs_without_rows else parsed_times(plan(batch_id - 1) if batch_id else None)[1]
    return PlannedTimes(at if now is None else now, watermark, late, runs_without_rows)


def times_without_stream(now: int | None) -> PlannedTimes:
    """The times of a call outside of a streaming query: like Spark's times over a batch frame, without a watermark."""
    return PlannedTimes(clocks.read(clocks.SystemClock()) if now is None else now, -1, -1)


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """The columns in Arrow; a column of a type that state cannot have is null."""
    fields = []
    for name, kind in column_types(frame).items():
        try:
            fields.append(pa.field(name, of(kind).arrow))
        except UsageError:
            fields.append(pa.field(name, pa.null()))
    return pa.schema(fields)


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
        what = "the checkpoint is a local path, and the executors may be on other machines"
        raise _unreachable(what, checkpoint, frame)


def check_readable_by_executors(frame: DataFrame, checkpoint: str, address: str) -> None:
    """Raise unless an executor can read ``address``, a file of the store. Runs one small job.

    Asks nothing if all of Spark is on this machine, or if the paths are not folders.
    """
    if scheme_of(checkpoint) not in (None, "file") or runs_here(frame):
        return
    error = reading_error(frame, address)
    if error is not None:
        raise _unreachable("the executors cannot read the checkpoint", checkpoint, frame) from error


def reading_error(frame: DataFrame, address: str) -> Exception | None:
    """The error of an executor that reads ``address``, a file with text; None if it can. Runs one small job."""
    try:
        found = _reader(frame).text(_spark_path(address)).count()
    except Exception as error:  # noqa: BLE001 - Spark's, of many classes
        return error
    return None if found else FileNotFoundError("no text")


def _unreachable(what: str, checkpoint: str, frame: DataFrame) -> UsageError:
    return UsageError(
        what,
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
        raise usage.column(
            "two columns or fields of the schema have the same name except for upper and lower case",
            detail=f"columns {', '.join(twice)}",
            hint="rename one, or set spark.sql.caseSensitive to true",
        )


def _twice(fields: Sequence[pa.Field], above: str = "") -> list[str]:
    """The names of columns, and of fields in them, that differ from their neighbours in their case at most.

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

    Missing or damaged files are errors here, under any settings of the session.
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
    """The address of a file as Spark takes it, under any default file system."""
    if address.startswith("s3://"):
        return "s3a://" + address.removeprefix("s3://")
    return f"file://{address}" if scheme_of(address) is None else address


def is_set(get: Callable[[str, str | None], Any], name: str) -> bool:
    """Return True if a setting of Spark is true, which Spark takes in any case."""
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
