"""Settings of a session change neither the types, the values nor the places of rows, in or out."""

from __future__ import annotations

import datetime
import decimal
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ciphers import AesGcm
from local_spark import settings

import statebackend as sb

pytestmark = pytest.mark.spark

UTC = datetime.timezone.utc
#: Columns of every type, nested ones too, with names that Spark reserves or cannot read without quotes.
KIND = sb.types.ROW(
    **{
        "user": sb.types.STRING,
        "at": sb.types.TIMESTAMP,
        "local": sb.types.TIMESTAMP_NTZ,
        "timestamp": sb.types.DATE,
        "select": sb.types.DECIMAL(38, 18),
        "a.b `c`": sb.types.BYTES,
        "from": sb.types.ROW(user=sb.types.TIMESTAMP, where=sb.types.TIMESTAMP_NTZ, n=sb.types.SHORT),
        "all": sb.types.LIST(sb.types.TIMESTAMP),
        "map": sb.types.MAP(sb.types.TIMESTAMP, sb.types.ROW(user=sb.types.TIMESTAMP_NTZ, day=sb.types.DATE)),
        "pair": sb.types.TUPLE(sb.types.TIMESTAMP, sb.types.FLOAT),
        "day": sb.types.INT,
    }
)
#: The same for Spark.
SPARKS = (
    "`user` string, at timestamp, local timestamp_ntz, `timestamp` date, `select` decimal(38,18), `a.b ``c``` binary, "
    "`from` struct<`user`:timestamp,`where`:timestamp_ntz,n:smallint>, `all` array<timestamp>, "
    "`map` map<timestamp,struct<`user`:timestamp_ntz,day:date>>, pair struct<_1:timestamp,_2:float>, day int"
)
#: The old calendar ends in 1582; clocks of Berlin skipped and repeated hours in 2024, and had odd minutes in 1890.
TIMES = [
    datetime.datetime(1, 1, 1, 12),
    datetime.datetime(1582, 10, 9, 12),
    datetime.datetime(1890, 3, 1, 12, 34, 56, 789012),
    datetime.datetime(2024, 3, 31, 2, 30),
    datetime.datetime(2024, 10, 27, 0, 30),
    datetime.datetime(2024, 10, 27, 1, 30),
    datetime.datetime(9999, 12, 30, 12),
]


def rows() -> pa.Table:
    made: list[dict[str, Any]] = []
    for at, local in enumerate(TIMES):
        instant, day = local.replace(tzinfo=UTC), local.date()
        other = instant + datetime.timedelta(days=-1 if at else 1)
        row = {
            "user": f"user {at}",
            "at": instant,
            "local": local,
            "timestamp": day,
            "select": decimal.Decimal("-12345678901234567890.123456789012345678"),
            "a.b `c`": b"\x00\xff",
            "from": {"user": instant, "where": local, "n": -1},
            "all": [instant, None],
            "map": [(instant, {"user": local, "day": day}), (other, None)],
            "pair": {"_1": instant, "_2": 0.5},
            "day": at,
        }
        made.append(row)
    return pa.Table.from_pylist([*made, {"user": "nothing"}], pa.schema(list(KIND.arrow)))


ROWS = rows()


class Kept(sb.KeyedProcessFunction):
    """Gives each row as it is, by way of state."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.row = ctx.get_value_state(sb.ValueStateDescriptor("row", KIND))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.row.update(row)
        yield self.row.value()
        ctx.output("times", (row.user, row.all))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("in") / "rows.parquet"
    pq.write_table(ROWS, path)
    return path


#: Settings that change the meaning of a schema, a value or a path for Spark; several at a time, none against another.
SETTINGS = {
    "times without a zone": {
        "spark.sql.timestampType": "TIMESTAMP_NTZ",
        "spark.sql.parquet.inferTimestampNTZ.enabled": "false",
    },
    "reserved words": {
        "spark.sql.ansi.enabled": "true",
        "spark.sql.ansi.enforceReservedKeywords": "true",
        "spark.sql.ansi.doubleQuotedIdentifiers": "true",
    },
    "old calendars": {
        "spark.sql.session.timeZone": "Europe/Berlin",
        "spark.sql.legacy.timeParserPolicy": "LEGACY",
        "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
        "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
        "spark.sql.parquet.int96AsTimestamp": "false",
        "spark.sql.parquet.int96RebaseModeInRead": "LEGACY",
        "spark.sql.parquet.int96RebaseModeInWrite": "LEGACY",
        "spark.sql.parquet.int96TimestampConversion": "true",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS",
        "spark.sql.parquet.writeLegacyFormat": "true",
    },
    "Arrow": {
        "spark.sql.execution.arrow.compression.codec": "zstd",
        "spark.sql.execution.arrow.localRelationThreshold": "0",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "0",
        "spark.sql.execution.arrow.pyspark.enabled": "false",
        "spark.sql.execution.arrow.pyspark.selfDestruct.enabled": "true",
        "spark.sql.execution.arrow.useLargeVarTypes": "true",
        "spark.sql.execution.pyspark.binaryAsBytes": "false",
    },
    "files": {
        "spark.sql.files.ignoreCorruptFiles": "true",
        "spark.sql.files.ignoreMissingFiles": "true",
        "spark.sql.files.ignoredPathSegmentRegex": "part|output",  # since Spark 4.3
        "spark.sql.files.maxPartitionBytes": "100",
        "spark.sql.files.maxRecordsPerFile": "1",
        "spark.sql.legacy.pathOptionBehavior.enabled": "true",
        "spark.sql.parquet.binaryAsString": "true",
        "spark.sql.parquet.compression.codec": "gzip",
        "spark.sql.parquet.enableVectorizedReader": "false",
        "spark.sql.parquet.fieldId.read.enabled": "true",
        "spark.sql.parquet.fieldId.read.ignoreMissing": "true",
        "spark.sql.parquet.mergeSchema": "true",
        "spark.sql.parquet.recordLevelFilter.enabled": "true",
        "spark.sql.sources.default": "csv",
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
        "spark.sql.sources.useV1SourceList": "",
    },
    "types": {
        "spark.sql.ansi.enabled": "false",
        "spark.sql.caseSensitive": "true",
        "spark.sql.legacy.allowNegativeScaleOfDecimal": "true",
        "spark.sql.legacy.charVarcharAsString": "true",
        "spark.sql.preserveCharVarcharTypeInfo": "true",
    },
}
WAYS = ["memory", "files", "encrypted"]


def delivered(function: Any, schema: dict[str, Any], frame: Any, folder: Path, way: str) -> dict[str, Any]:
    """The schema and the rows that the sink of each output gets for a frame."""
    given: dict[str, Any] = {}

    def sink_of(output: str) -> Any:
        def sink(frame: Any, batch_id: int) -> None:
            given[output] = (frame.schema, frame.toArrow())

        return sink

    path = folder / "day=7" / "state"  # no column of the output
    store: Any = sb.CheckpointStore(path, encryption=AesGcm()) if way == "encrypted" else path
    driver = sb.spark.Driver(input="files" if way == "files" else "auto")
    batches = sb.spark.stateful(
        function,
        key="user",
        schema=schema,
        state=store,
        sink={each: sink_of(each) for each in schema},
        uid="a query",
        run_on=sb.spark.Executors(1) if way == "executors" else driver,
    )
    try:
        batches(frame, 0)
    finally:
        batches.close()
    return given


@pytest.mark.parametrize("name", SETTINGS)
def test_output_keeps_types_and_values_under_any_setting(
    spark: Any, source: Path, tmp_path: Path, name: str, day_rng: random.Random, is_stress: bool
) -> None:
    for way in WAYS if is_stress else [day_rng.choice(WAYS)]:
        check_kept(spark, source, tmp_path / way, name, way)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_output_keeps_types_and_values_in_executors_mode(
    spark: Any, source: Path, tmp_path: Path, name: str, shipped: None
) -> None:
    check_kept(spark, source, tmp_path, name, "executors")


@pytest.fixture
def shipped() -> Iterator[None]:
    """Functions of this module go to hosts whole: they do not find it."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def check_kept(spark: Any, source: Path, folder: Path, name: str, way: str) -> None:
    schema = spark.createDataFrame([], SPARKS).schema
    outputs = {"main": KIND, "times": "user string, times array<timestamp>"}
    with settings(spark, SETTINGS[name]):
        frame = spark.read.schema(schema).option("datetimeRebaseMode", "CORRECTED")
        frame = frame.option("ignoredPathSegmentRegex", "").parquet(f"file://{source}")
        given = delivered(Kept(), outputs, frame, folder, way)
    found, table = given["main"]
    assert found == schema
    assert table.cast(ROWS.schema).combine_chunks() == ROWS
    found, table = given["times"]
    assert [each.dataType for each in found.fields] == [schema["user"].dataType, schema["all"].dataType]
    assert table.column(1).cast(ROWS["all"].type).combine_chunks() == ROWS["all"].combine_chunks()


class Same(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        yield row


@pytest.mark.parametrize("way", WAYS)
def test_output_has_names_that_differ_in_case_if_the_session_tells_them_apart(
    spark: Any, tmp_path: Path, way: str
) -> None:
    kind = sb.types.ROW(user=str, n=int, N=int, s=sb.types.LIST(sb.types.ROW(x=int, X=str)))
    rows = [("a", 1, 2, [(3, "four")]), ("b", 5, 6, [])]
    schema = "user string, n bigint, N bigint, s array<struct<x:bigint,X:string>>"
    with settings(spark, {"spark.sql.caseSensitive": "TRUE"}):
        frame = spark.createDataFrame(rows, schema)
        _, table = delivered(Same(), {"main": kind}, frame, tmp_path, way)["main"]
    assert table.column_names == ["user", "n", "N", "s"]
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ("a", 1, 2, [{"x": 3, "X": "four"}]),
        ("b", 5, 6, []),
    ]
