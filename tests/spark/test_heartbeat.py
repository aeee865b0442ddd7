"""Streams that pause: ticks let time go on, reach no function, and end where a trigger ends."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pyarrow as pa
import pytest
from spark_streams import Collecting, Fails, Stream, numbers, spark, stream

import statebackend as sb
from statebackend.spark.ticks import COLUMN
from statebackend.testing import ManualClock

__all__ = ["spark", "stream"]
pytestmark = pytest.mark.spark


class After(sb.KeyedProcessFunction):
    """Gives a row when its key has had no row for a minute."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        assert row.user is not None, "a tick has reached the function"
        assert not hasattr(row, COLUMN)
        ctx.timers.register(ctx.now + 60_000, "processing")
        return []

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        return [(ctx.current_key, timestamp)]


def test_timers_fire_in_a_stream_without_rows(stream: Stream) -> None:
    """Four runs, each of which ends; the rows come in the first, and its time is over in the third."""
    stream.add(numbers(("a", 1), ("b", 2)))
    clock, sink, heartbeats = ManualClock(1000), Collecting(), []

    def ticking(frame: Any) -> Any:
        return sb.spark.heartbeat(frame, every="1 ms")

    for _ in range(4):
        batches = stream.batches(After(), sink, clock=clock)
        stream.run(batches, transform=ticking)
        heartbeats.append(batches.last_progress["numHeartbeats"])
        assert batches.last_progress["numInputRows"] <= 2
        clock.advance(31_000)
        time.sleep(0.002)
    given = [row for _, rows in sink.calls for row in rows]
    assert sorted(given) == [("a", 61_000), ("b", 61_000)]
    assert heartbeats == [1, 1, 1, 1], "a batch has one tick, however many were due"


def test_it_ticks_while_the_query_runs(stream: Stream) -> None:
    """With no rows after the first batch, a query that does not end goes on to make batches."""
    stream.add(numbers(("a", 1)))
    seen: list[dict[str, Any]] = []
    batches = stream.batches(sink=Collecting())

    def called(frame: Any, batch_id: int) -> None:
        batches(frame, batch_id)
        seen.append(batches.last_progress)

    folder = str(stream.folder / "in")
    rows = stream.spark.readStream.schema("user string, n bigint").parquet(folder)
    query = (
        sb.spark.heartbeat(rows, every=datetime.timedelta(milliseconds=200))
        .writeStream.foreachBatch(called)
        .option("checkpointLocation", str(stream.folder / "stream"))
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    try:
        deadline = time.monotonic() + 120
        while len(seen) < 4 and time.monotonic() < deadline and query.isActive:
            time.sleep(0.05)
    finally:
        query.stop()
        batches.close()
    assert len(seen) >= 4, query.exception()
    assert sum(each["numInputRows"] for each in seen) == 1
    assert all(each["numHeartbeats"] == 1 for each in seen)


def test_a_batch_of_ticks_is_replayed(stream: Stream) -> None:
    """Its rows are read again by Spark's workers, which have nothing of them at hand."""
    stream.add(numbers(("a", 1)))
    sink = Collecting(Fails(0))

    def ticking(frame: Any) -> Any:
        return sb.spark.heartbeat(frame, every="20000 days")  # the next is due in 2079, not at midnight

    assert "Outage" in stream.fails(stream.batches(sink=sink), transform=ticking)
    batches = stream.batches(sink=sink)
    stream.run(batches, transform=ticking)
    assert [rows for _, rows in sink.calls] == [[("a", 1)], [("a", 1)]]
    assert batches.last_progress["isReplay"]
    stream.lose(0, "commits")
    stream.run(stream.batches(sink=sink), transform=ticking)
    assert [rows for _, rows in sink.calls] == [[("a", 1)]] * 3


def test_the_watermark_follows_the_clock_when_rows_stay_away(stream: Stream) -> None:
    class Closing(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            ctx.timers.register(ctx.timestamp + 10_000)
            return []

        def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
            return [(ctx.current_key, timestamp)]

    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    begin = int(at.timestamp() * 1000)
    clock, sink, watermarks = ManualClock(begin), Collecting(), []
    stream.add(pa.table({"user": ["a"], "at": pa.array([at], pa.timestamp("us", "UTC"))}))
    event_time = sb.spark.EventTime("at", delay=1000, idle_after=datetime.timedelta(seconds=5))
    for _ in range(5):
        batches = stream.batches(Closing(), sink, clock=clock, event_time=event_time)
        stream.run(batches, transform=lambda frame: sb.spark.heartbeat(frame, every="1 ms"))
        watermarks.append(batches.last_progress["watermark"] - begin)
        clock.advance(4_000)
        time.sleep(0.002)
    # Rows stay away from 0 on: at 4 seconds that is not long, from 8 on it is.
    assert watermarks == [-1000, -1000, 2000, 6000, 10_000]
    assert [row for _, rows in sink.calls for row in rows] == [("a", begin + 10_000)]


def test_refusals(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    whole = stream.spark.read.parquet(str(stream.folder / "in"))
    with pytest.raises(sb.UsageError, match="for a stream"):
        sb.spark.heartbeat(whole)
    rows = stream.spark.readStream.schema(whole.schema).parquet(str(stream.folder / "in"))
    with pytest.raises(sb.UsageError, match="has a heartbeat already"):
        sb.spark.heartbeat(sb.spark.heartbeat(rows))
    for wrong in ("soon", "10", "-1 second", 10, datetime.timedelta(0), "0 s"):
        with pytest.raises(sb.UsageError, match="every is"):
            sb.spark.heartbeat(rows, every=wrong)  # type: ignore[arg-type]
    assert sb.spark.heartbeat(rows, every="1 min").columns == ["user", "n", COLUMN]
