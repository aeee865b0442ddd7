"""Batches that come through files a piece at a time give what they give in one piece, and leave nothing behind."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import large_batch
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from local_spark import settings
from processes import run
from spark_streams import Collecting, Stream, Total, len_of, numbers

import statebackend as sb
from statebackend.errors import UsageError
from statebackend.runtime.job import Job
from statebackend.spark import driver_mode
from statebackend.spark.driver_mode import write_batch
from statebackend.spark.session import arrow_of

pytestmark = pytest.mark.spark

FILES = partial(sb.spark.Driver, input="files")
#: A piece of one row, and of a few.
SIZES = [1, 250]
SCHEMA = {"main": "user string, n bigint, seen bigint", "late": "user string, at bigint, n bigint"}


class Rows(sb.KeyedProcessFunction):
    """Says of each row how many rows of its key there were, of all that broadcast rows have set, and of timers."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.count = ctx.get_reducing_state(sb.ReducingStateDescriptor("count", "sum", int))
        self.told = 0

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.told = (31 * self.told + row.n) % 1_000_007
        yield "broadcast", row.n, self.told

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.count.add(1)
        ctx.timer_service().register_event_time_timer((ctx.timestamp or 0) + 10)
        yield row.user, row.n, self.count.get()

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        yield ctx.current_key, -timestamp, self.count.get()


class WholeKeys(sb.KeyRowsFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.count = ctx.get_reducing_state(sb.ReducingStateDescriptor("count", "sum", int))

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> Any:
        yield "broadcast", row.n, 0

    def process_rows(self, key: Any, rows: list[Any], ctx: sb.FunctionContext) -> Any:
        self.count.add(len(rows))
        for row in rows:
            yield key, row.n, self.count.get()


class Columns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.count = ctx.get_reducing_state(sb.ReducingStateDescriptor("count", "sum", int))

    def process_broadcast(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
        return self.given(batch, pa.array([0] * batch.num_rows, pa.int64()))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
        self.count.add_many(ctx.keys, pa.array([1] * batch.num_rows, pa.int64()))
        return self.given(batch, pc.multiply(batch["n"], 2))

    def on_timers(self, keys: Any, timestamps: Any, namespaces: Any, ctx: sb.FunctionContext) -> Any:
        return None

    def given(self, batch: pa.RecordBatch, seen: pa.Array) -> pa.RecordBatch:
        return pa.record_batch({"user": batch["user"], "n": batch["n"], "seen": seen})


def batch_of(rng: random.Random, number: int) -> pa.Table:
    """Rows with null keys, late and null times, one far ahead, and broadcast rows all over; order by ``by``."""
    rows = [
        {
            "user": rng.choice(["a", "b", "c", "d", None]),
            "at": rng.choice([None, 0, 10**15, *(number * 1000 + rng.randrange(900) for _ in range(9))]),
            "n": 1000 * number + at,
            "by": rng.choice([None, float("nan"), 0.0, -0.0, 1.5, rng.random()]),
            "all": rng.choice([None, False, False, False, False, True]),
        }
        for at in range(24)
    ]
    schema = {"user": pa.string(), "at": pa.int64(), "n": pa.int64(), "by": pa.float64(), "all": pa.bool_()}
    return pa.Table.from_pylist(rows, schema=pa.schema(schema))


def given_by(stream: Stream, way: str, function: Any, **options: Any) -> list[Any]:
    """What each sink got, and what progress counted, in a run with a store of its own."""
    main, late = Collecting(), Collecting()
    figures = []
    batches = stream.batches(
        function,
        state=stream.folder / f"state-{way}",
        sink={"main": main, "late": late},
        schema=SCHEMA,
        broadcast_when="all",
        null_keys="drop",
        on_batch=figures.append,
        **options,
    )
    sb.testing.use_clock(batches, sb.testing.ManualClock(10**12))
    stream.run(batches, checkpoint=f"stream-{way}", files=2)
    names = ("numInputRows", "numRowsDroppedByNullKey", "numRowsLate", "numRowsAhead", "watermark", "outputs")
    counted = [[each[name] for name in names] for each in figures]
    assert {each["input"] for each in figures} == {"memory" if way == "memory" else "files"}
    assert not os.path.exists(stream.folder / f"state-{way}" / driver_mode.FOLDER)
    return [main.calls, late.calls, counted]


@pytest.mark.parametrize("function", [Rows, WholeKeys, Columns])
@pytest.mark.parametrize("is_sorted", [False, True], ids=["as they come", "sorted"])
def test_pieces_mean_what_the_whole_means(
    stream: Stream,
    rng: random.Random,
    day_rng: random.Random,
    is_stress: bool,
    function: Any,
    is_sorted: bool,
) -> None:
    for number in range(4):
        stream.add(batch_of(rng, number))
    in_order = "between_rows" if is_sorted and function is Rows else "after_batch"
    event_time = sb.EventTime("at", late=sb.to_output("late"), timers=in_order, max_ahead=0)
    options = {"event_time": event_time, "order_by": "by" if is_sorted else None}
    whole = given_by(stream, "memory", function(), **options)
    assert whole[2][1][2] > 0, "rows were late"
    for size in SIZES if is_stress else [day_rng.choice(SIZES)]:
        pieces = given_by(stream, f"files-{size}", function(), run_on=FILES(4 * size), **options)
        if function is WholeKeys:  # whose keys come by their values
            whole, pieces = _by_key(whole), _by_key(pieces)
        # Late rows are put aside before they are sorted, or after that.
        assert [pieces[0], pieces[2]] == [whole[0], whole[2]]
        assert [(batch_id, sorted(rows)) for batch_id, rows in pieces[1]] == [
            (batch_id, sorted(rows)) for batch_id, rows in whole[1]
        ]


def _by_key(given: list[Any]) -> list[Any]:
    main = [(batch_id, sorted(rows, key=lambda row: row[0])) for batch_id, rows in given[0]]
    return [main, *given[1:]]


def test_a_batch_that_is_too_large_goes_through_files_and_so_do_those_after_it(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(frame: Any) -> pa.Table:
        called.append(1)
        raise UsageError("the batch is larger than what Spark brings", code="USAGE.BATCH_TOO_LARGE")

    called: list[int] = []
    for n in range(3):
        stream.add(numbers(("a", n), ("b", 1)))
    sink = Collecting()
    with monkeypatch.context() as patch:
        patch.setattr(driver_mode, "arrow_of", refuses)
        stream.run(stream.batches(sink=sink))
    assert sink.calls == [(0, [("a", 0), ("b", 1)]), (1, [("a", 1), ("b", 2)]), (2, [("a", 3), ("b", 3)])]
    assert len(called) == 1

    stream.add(numbers(("a", 1), ("b", 1)))
    stream.add(numbers(("a", 1), ("b", 1)))
    ways: list[str] = []
    batches = stream.batches(
        sink=len_of, run_on=sb.spark.Driver(8), on_batch=lambda figures: ways.append(figures["input"])
    )
    stream.run(batches)
    assert ways == ["memory", "files"]


def test_an_error_in_a_late_piece_takes_the_whole_batch_back(stream: Stream) -> None:
    class Fails(Total):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            yield from super().process_element(row, ctx)
            if row.n == 99:
                raise RuntimeError("in the last piece")

    stream.add(numbers(("a", 1)))
    stream.run(stream.batches(sink=len_of, run_on=FILES(4)))
    before = files_of(stream.state)
    stream.add(numbers(*[("a", 10)] * 50, ("a", 99)))
    assert "in the last piece" in stream.fails(stream.batches(Fails(), len_of, run_on=FILES(4)))
    assert files_of(stream.state) == before
    sink = Collecting()
    stream.run(stream.batches(sink=sink, run_on=FILES(4)))
    assert sink.calls[0][1][-1] == ("a", 600)


def files_of(state: Path) -> set[str]:
    return {str(path.relative_to(state)) for path in state.rglob("*.arrow")} | {
        str(path.relative_to(state)) for path in state.rglob("*.parquet")
    }


def test_files_of_a_killed_run_are_removed_and_nothing_else(stream: Stream) -> None:
    left = stream.state / driver_mode.FOLDER / "run-0123456789abcdef" / "0123" / "part-00000-x.parquet"
    ours = [stream.state / driver_mode.FOLDER / "mine.csv", stream.state / "input" / "mine.csv"]
    for path in (left, *ours):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    stream.add(numbers(("a", 1)))
    stream.run(stream.batches(sink=len_of, run_on=FILES()))
    assert not left.parent.parent.exists()
    assert all(path.exists() for path in ours)


def test_a_run_that_ends_late_leaves_the_files_of_the_next_one_alone(stream: Stream) -> None:
    frame = stream.spark.range(100)
    job = Job(Total(), key="id", schema="id bigint")
    with sb.CheckpointStore(str(stream.state)) as store:
        earlier, later = driver_mode.DriverMode(FILES()), driver_mode.DriverMode(FILES())
        earlier.open(store, frame)
        later.open(store, frame)
        rows = later.read(frame, job)
        earlier.close()
        assert sum(piece.num_rows for piece in rows.pieces()) == 100
        later.close()
    assert not os.path.exists(stream.state / driver_mode.FOLDER)


def written(frame: Any, folder: Path, **job: Any) -> pa.Table:
    """The rows of a frame after they went through files."""
    files = write_batch(frame, Job(Total(), key="id", schema="id bigint", **job), str(folder), 64)
    return pa.concat_tables(files.pieces())


def test_rows_keep_their_order_however_many_files_a_task_writes(stream: Stream) -> None:
    rows = written(stream.spark.range(0, 1200, 1, 1), stream.folder / "rows")
    assert rows["id"].to_pylist() == list(range(1200))
    with settings(stream.spark, {"spark.sql.files.maxRecordsPerFile": "1"}):
        rows = written(stream.spark.range(0, 1010, 1, 1), stream.folder / "single")
    assert rows["id"].to_pylist() == list(range(1010))


def test_variants_and_collated_text_come_as_they_would_at_once(stream: Stream) -> None:
    frame = stream.spark.sql(
        """SELECT id, parse_json(concat('{"a":1,"x', id, '":2}')) AS v,
            collate(substr('aAaAb', cast(id + 1 AS int), 1), 'UTF8_LCASE') AS text FROM range(0, 5, 1, 1)"""
    )
    assert written(frame, stream.folder / "rows").equals(arrow_of(frame))
    ordered = written(frame, stream.folder / "ordered", order_by=["text"])
    assert ordered["id"].to_pylist() == [1, 3, 0, 2, 4]


def test_columns_that_spark_cannot_sort_are_refused(stream: Stream) -> None:
    frame = stream.spark.sql("SELECT id, map(id, id) AS m FROM range(3)")
    with pytest.raises(
        UsageError, match="Spark cannot write this batch as files, or not in this order.*order_by m"
    ):
        written(frame, stream.folder / "rows", order_by=["m"])
    assert not (stream.folder / "rows").exists()


def test_settings_of_the_session_stay(stream: Stream) -> None:
    """Those that would change what files hold are set while they are written, and no longer."""
    name = "spark.sql.parquet.outputTimestampType"
    stream.add(numbers(("a", 1)))
    seen = []
    stream.run(stream.batches(sink=lambda df, _: seen.append(df.sparkSession.conf.get(name)), run_on=FILES()))
    assert seen == [stream.spark.conf.get(name)]


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize("kind", large_batch.KINDS)
def test_twenty_million_rows_under_limits(tmp_path: Path, kind: str) -> None:
    """A JVM with a heap of 1 GiB, and Python held to 2 GiB: a running sum of 200,000 keys."""
    print(run(large_batch, tmp_path, kind, timeout=3000).stdout)
