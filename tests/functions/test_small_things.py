"""What users of Spark, pandas and numpy expect to work, and what tells them where it does not."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import gc
import io
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.functions import FunctionContext, Metrics
from statebackend.keys import TimeWindow
from statebackend.runtime.arrow_rows import OutputSchema
from statebackend.testing import Harness
from statebackend.types import row_class

UTC = datetime.timezone.utc
AT = datetime.datetime(2024, 2, 29, 12, 0, 0, 5, tzinfo=UTC)


def out(ddl: str, value: Any) -> Any:
    return OutputSchema(f"c {ddl}").table_of_rows([(value,)]).to_pylist()[0]["c"]


@pytest.mark.parametrize(
    ("ddl", "value", "expected"),
    [
        ("bigint", np.int8(3), 3),
        ("double", np.float32(0.5), 0.5),
        ("boolean", np.bool_(True), True),
        ("string", np.str_("é"), "é"),
        ("timestamp", np.datetime64("2024-02-29T12:00:00.000005"), AT),
        ("timestamp", np.datetime64("2024-02-29T12:00:00.000005000"), AT),
        ("timestamp_ntz", np.datetime64("2024-02-29"), datetime.datetime(2024, 2, 29)),
        ("timestamp_ntz", np.datetime64("0001-01-01"), datetime.datetime(1, 1, 1)),
        ("date", np.datetime64("2024-02-29"), datetime.date(2024, 2, 29)),
        ("date", np.datetime64("2024-02-29T00:00:00"), datetime.date(2024, 2, 29)),
        ("timestamp", np.datetime64("NaT"), None),
        ("timestamp_ntz", np.datetime64("NaT", "us"), None),
        ("date", np.datetime64("NaT", "D"), None),
    ],
    ids=str,
)
def test_numpy_scalars_are_taken_where_their_value_fits(ddl: str, value: Any, expected: Any) -> None:
    assert out(ddl, value) == expected


def test_numpy_times_are_taken_by_state_and_by_keys() -> None:
    for backend in ("heap", "reference", "rocksdb"):
        with sb.create_backend(backend).create_keyed_backend("timestamp") as keyed:
            at = keyed.get_value_state(sb.ValueStateDescriptor("at", "timestamp"))
            day = keyed.get_value_state(sb.ValueStateDescriptor("day", "date"))
            keyed.set_current_key(np.datetime64("2024-02-29T12:00:00.000005"))
            assert keyed.current_key == AT
            at.update(np.datetime64("2024-02-29T12:00:00.000005"))
            day.update(np.datetime64("2024-02-29"))
            assert (at.value(), day.value()) == (AT, AT.date())
            for wrong in (np.datetime64("NaT"), np.datetime64("2024-01-01T00:00:00.000000001")):
                with pytest.raises(SerializationError, match="TIMESTAMP"):
                    at.update(wrong)
            assert at.value() == AT


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        ("timestamp", np.datetime64("2024-01-01T00:00:00.000000001")),
        ("timestamp", np.datetime64("10000-01-01")),
        ("timestamp_ntz", np.datetime64("0000-12-31")),
        ("timestamp", np.datetime64(2**62, "s")),
        ("date", np.datetime64("2024-01-01T00:00:01")),
        ("bigint", np.float64(3.0)),
        ("bigint", np.datetime64("2024-01-01")),
    ],
    ids=str,
)
def test_numpy_scalars_that_do_not_fit_are_refused(ddl: str, value: Any) -> None:
    with pytest.raises(SerializationError, match=r"output column 'c', position 0|position 0"):
        out(ddl, value)


@pytest.mark.spark
def test_pandas_times_are_taken_and_its_missing_ones_are_null() -> None:
    import pandas  # here: a run without Spark has to read this file, too

    assert out("timestamp", pandas.Timestamp(AT)) == AT
    for ddl in ("timestamp", "timestamp_ntz", "date"):
        assert out(ddl, pandas.NaT) is None
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        keyed.set_current_key(1)
        for kind in ("timestamp", "timestamp_ntz", "date"):
            state = keyed.get_value_state(sb.ValueStateDescriptor(kind, kind))
            with pytest.raises(SerializationTypeError, match="not a time"):
                state.update(pandas.NaT)


class Echo(sb.KeyedProcessFunction):
    def __init__(self, make: Any) -> None:
        self.make = make

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        yield self.make(row)


def test_columns_may_have_any_name() -> None:
    names = ("a b", "x.y", "class", "_1", "é")
    schema = "`a b` bigint, `x.y` bigint, `class` bigint, `_1` bigint, `é` bigint"
    row = dict(zip(names, range(5), strict=True))
    for make in (
        lambda row: row,
        lambda row: dict(zip(reversed(names), reversed(row), strict=True)),
        lambda row: tuple(row),
    ):
        with Harness(Echo(make), key=["a b", "x.y"][0], schema=schema, order_by="x.y") as harness:
            assert [tuple(each) for each in harness.process_batch([row])] == [(0, 1, 2, 3, 4)]


@pytest.mark.spark
def test_rows_of_spark_go_in_and_come_out() -> None:
    from pyspark.sql import Row as SparkRow

    make = Echo(lambda row: SparkRow(total=row.n, user=row.user))
    with Harness(make, key="user", schema="user string, total bigint") as harness:
        assert [tuple(each) for each in harness.process_batch([SparkRow(n=1, user="ann")])] == [("ann", 1)]
        with pytest.raises(sb.UsageError, match="lacks names"):
            harness.process_batch([SparkRow("ann", 1)])


@pytest.mark.parametrize("given", [None, 7, (1,), (1, 2, 3), [1, 2]], ids=str)
@pytest.mark.parametrize("make", [sb.map_with_state, sb.flat_map_with_state])
def test_output_of_a_function_with_state_is_checked(make: Any, given: Any) -> None:
    def wrong(row: Any, state: Any) -> Any:
        return given

    with Harness(make(wrong, int), key="user") as harness:
        with pytest.raises(SerializationTypeError, match="what goes out and the new state") as caught:
            harness.process_batch([{"user": "ann"}])
        assert caught.value.code == "SERIALIZATION.OUTPUT"
        assert "wrong" in str(caught.value.detail)


@pytest.mark.parametrize("rows", ["ann", {"user": "ann"}, 7])
def test_the_rows_of_a_flat_map_are_several(rows: Any) -> None:
    def single(row: Any, state: Any) -> Any:
        return rows, 1

    with Harness(sb.flat_map_with_state(single, int), key="user") as harness:
        with pytest.raises(SerializationTypeError, match="for the rows that go out"):
            harness.process_batch([{"user": "ann"}])
        assert harness.keyed.num_entries() == 0


@pytest.mark.parametrize(
    ("timestamp", "size", "offset", "start"),
    [
        (0, 10, 0, 0),
        (9, 10, 0, 0),
        (10, 10, 0, 10),
        (-1, 10, 0, -10),
        (-10, 10, 0, -10),
        (2, 10, 3, -7),
        (3, 10, 3, 3),
        (13, 10, -7, 13),
        (np.int64(65_000), datetime.timedelta(minutes=1), datetime.timedelta(seconds=2), 62_000),
        (2**62, 7, 0, 2**62 - 2**62 % 7),
    ],
)
def test_time_is_in_its_window(timestamp: Any, size: Any, offset: Any, start: int) -> None:
    window = TimeWindow.of(timestamp, size, offset)
    width = size if isinstance(size, int) else 60_000
    assert window == TimeWindow(start, start + width)
    assert window.start <= timestamp <= window.max_timestamp()


def test_windows_of_no_size_are_refused() -> None:
    for size in (0, -5, datetime.timedelta(0), datetime.timedelta(microseconds=1)):
        with pytest.raises(sb.UsageError):
            TimeWindow.of(5, size)
    for wrong in (1.5, None, "5"):
        with pytest.raises(SerializationError):
            TimeWindow.of(wrong, 10)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        TimeWindow.of(2**63 - 1, 10)


def test_tables_with_times_of_numpy_make_rows() -> None:
    table = pa.table(
        {"user": ["ann"], "at": np.array(["2024-02-29T12:00:00.000005"], dtype="datetime64[us]")}
    )
    with Harness(Echo(tuple), key="user", schema="user string, at timestamp_ntz") as harness:
        assert [tuple(row) for row in harness.process_batch(table)] == [("ann", AT.replace(tzinfo=None))]


@dataclasses.dataclass
class Click:
    user: str
    n: int


def test_a_harness_takes_rows_with_names_in_any_form() -> None:
    named = collections.namedtuple("named", ["n", "user"])
    for rows in (
        [{"user": "ann", "n": 1}],
        [named(1, "ann")],
        [Click("ann", 1)],
        [row_class(("user", "n"))("ann", 1)],
    ):
        with Harness(Echo(lambda row: (row.user, row.n)), key="user") as harness:
            assert harness.process_batch(rows) == [("ann", 1)]
    with Harness(Echo(tuple), key="user") as harness:
        with pytest.raises(sb.UsageError, match="row 1 of the batch is a tuple, which lacks names"):
            harness.process_batch([{"user": "ann"}, ("ann",)])
        with Harness(Echo(tuple), key="a b") as spaced:
            assert spaced.process_batch([row_class(("a b", "class"))("ann", 1)]) == [("ann", 1)]


def test_a_harness_knows_all_names_of_its_rows() -> None:
    with Harness(Echo(lambda row: (row.user, row.n, row.name)), key="user") as harness:
        rows = harness.process_batch([{"user": "ann", "n": 1}, {"name": "Bob", "user": "bob"}])
        assert rows == [("ann", 1, None), ("bob", None, "Bob")]
        with pytest.raises(sb.UsageError, match="of several types.*column 'n'"):
            harness.process_batch([{"user": "ann", "n": 1}, {"user": "ann", "n": "two"}])


def test_a_harness_takes_times_of_numpy_and_pandas_by_row_and_by_batch() -> None:
    import pandas

    class Times(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            yield (ctx.timestamp,)

    for at, wanted in (
        (pandas.NaT, None),
        (np.datetime64("NaT"), None),
        (pandas.Timestamp(1500, unit="ms"), 1500),
        (np.datetime64(1500, "ms"), 1500),
        (np.int64(1500), 1500),
    ):
        for is_batch in (False, True):
            with Harness(Times(), key="user", event_time="at") as harness:
                row = {"user": "ann", "at": at}
                found = harness.process_batch([row]) if is_batch else harness.process_element(row)
                assert (found, harness.watermark) == ([(wanted,)], wanted)


@pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])
def test_public_objects_show_their_contents(backend: str) -> None:
    with sb.create_backend(backend).create_keyed_backend(str) as keyed:
        seen = keyed.get_map_state(sb.MapStateDescriptor("seen", str, int))
        assert repr(seen).endswith("MapState 'seen', MAP(STRING, LONG)>")
        assert repr(keyed.timers).endswith("of STRING, KeyGroupRange(0, 127), 1 states>>")
    with Harness(Echo(tuple), key="user", key_type=str, backend=backend) as harness:
        assert repr(harness).startswith("<Harness of Echo, key 'user', batch -1, ")
        ctx = FunctionContext(harness.keyed, sb.OperatorStateBackend(), Metrics())
    ctx.metrics.counter("late").inc(1000)
    assert repr(ctx) == "<FunctionContext of batch 0, states: none>"
    assert repr(ctx.metrics) == "<Metrics {'late': 1000}>"
    assert repr(ctx.metrics.counter("late")) == "<Counter 1,000>"


def test_a_bar_shows_where_the_time_of_a_batch_went() -> None:
    shown = io.StringIO()
    on_batch = sb.spark.progress_bar(shown)
    progress = {"numInputRows": 10, "numRowsTotal": None, "processedRowsPerSecond": 2000.0}
    on_batch({"batchId": 9, **progress, "durationMs": {"read": 9.0, "function": 1.0, "batch": 10.0}})
    on_batch({"batchId": 10, **progress, "numInputRows": 1, "durationMs": {"batch": 0.0}})
    first, second = shown.getvalue().split("\r")[1:]
    assert first == "batch 9 [rrrrrrrrrrrrrrrrrrff] 10 rows in, 2,000 rows/s, state 0 rows"
    assert second == "batch 10 [....................] 1 rows in, 2,000 rows/s, state 0 rows"
    pickle.loads(pickle.dumps(sb.spark.progress_bar()))
    for rows in (10_000, 1):
        more = {"processedRowsPerSecond": 1.0, "durationMs": {"batch": 1.0}}
        on_batch({"batchId": 1, "numInputRows": rows, "numRowsTotal": rows, **more})
    first, second = shown.getvalue().split("\r")[3:]
    assert len(second) == len(first), "a shorter line leaves nothing of the one before"
    assert second.rstrip().endswith("state 1 rows")


def test_rows_are_read_by_attribute_position_and_name() -> None:
    row = row_class(("user", "a b", "class"))("ann", 2, ("x",))
    assert (row.user, row["user"], row[0], row[-3]) == ("ann",) * 4
    assert (row["a b"], row["class"], row[1:]) == (2, ("x",), (2, ("x",)))
    user, *_ = pickle.loads(pickle.dumps(row))
    assert user == "ann"
    with pytest.raises(KeyError, match="lacks the field 'use'; it has user, a b, class"):
        row["use"]
    with pytest.raises(IndexError):
        row[3]

    def read(row: Any) -> Any:
        return row["a b"], row["nest"]["x.y"]

    with Harness(Echo(read), key="a b") as harness:
        assert harness.process_batch([{"a b": 1, "nest": {"x.y": 7}}]) == [(1, 7)]


class AsksForTime(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        if row.n:
            ctx.timer_service().register_processing_time_timer(ctx.now)
        else:
            yield (ctx.timestamp,)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        yield (ctx.timestamp,)

    process_broadcast = on_timer


class KeyRowsAskForTime(sb.KeyRowsFunction):
    def process_rows(self, key: Any, rows: list[Any], ctx: sb.FunctionContext) -> Any:
        yield (ctx.timestamp,)


class BatchAsksForTime(sb.BatchProcessFunction):
    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
        return pa.record_batch({"at": [ctx.timestamp]})


@pytest.mark.parametrize("function", [AsksForTime, KeyRowsAskForTime, BatchAsksForTime])
def test_timestamp_names_event_time_in_a_job_without_it(function: Any) -> None:
    calls = [(0, False), (1, False), (0, True)] if function is AsksForTime else [(0, False)] * 2
    with Harness(function(), key="user", broadcast_when="all") as harness:
        for n, is_broadcast in calls:  # in a row, a timer and a broadcast row
            with pytest.raises(sb.UsageError, match="ctx.timestamp needs event time.*event_time=") as caught:
                harness.process_batch([{"user": 1, "n": n, "all": is_broadcast}])
            assert caught.value.code == "USAGE.NO_EVENT_TIME"
    with Harness(AsksForTime(), key="id") as harness, pytest.raises(sb.UsageError, match="event_time="):
        harness.process_element({"id": 1, "n": 0})


def test_timestamp_is_none_for_a_null_event_time() -> None:
    with Harness(AsksForTime(), key="user", event_time="at") as harness:
        assert harness.process_batch([{"user": 1, "at": at, "n": 0} for at in (None, 5)]) == [(None,), (5,)]


def test_class_of_rows_is_whole_after_garbage_collection() -> None:
    from statebackend.spark_functions import spark_rows

    class Collecting(str):
        def startswith(self, *_: Any) -> bool:  # type: ignore[override]
            gc.collect()
            return False

    row = spark_rows.row_class((Collecting("user"), Collecting("n")))
    assert tuple.__new__(row, ("ann", 1)).n == 1
