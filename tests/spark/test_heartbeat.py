"""Streams that pause: ticks let time go on, reach no function, and end where a trigger ends."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pyarrow as pa
import pytest
from local_spark import settings
from spark_streams import Collecting, Fails, Stream, numbers

import statebackend as sb
from statebackend.spark.heartbeats import COLUMN
from statebackend.testing import ManualClock, use_clock

pytestmark = pytest.mark.spark


class Closing(sb.KeyedProcessFunction):
    """Gives a row when its key has had none for some seconds, by the clock and by event time."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        assert row.user is not None, "a tick has reached the function"
        assert not hasattr(row, COLUMN)
        ctx.timer_service().register_processing_time_timer(ctx.now + 7_000)
        ctx.timer_service().register_event_time_timer(ctx.timestamp + 10_000)
        return [(row.user, 0)]

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        return [(ctx.current_key, timestamp)]


def test_time_goes_on_in_a_stream_without_rows(stream: Stream) -> None:
    """Three runs in a session whose times are far from UTC. The first fails; its tick and its row are read again."""
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    begin = int(at.timestamp() * 1000)
    clock, sink, figures = ManualClock(begin), Collecting(Fails(0)), []
    stream.add(pa.table({"user": ["a"], "at": pa.array([at], pa.timestamp("us", "UTC"))}))
    options: dict[str, Any] = {
        "event_time": sb.EventTime("at", watermark_delay=1000, idle_after=datetime.timedelta(seconds=5)),
        "on_batch": figures.append,
    }

    def ticking(frame: Any) -> Any:
        return sb.spark.heartbeat(frame, every="1 ms")

    times = {"spark.sql.timestampType": "TIMESTAMP_NTZ", "spark.sql.session.timeZone": "Asia/Tokyo"}
    with settings(stream.spark, times):
        batches = use_clock(stream.batches(Closing(), sink, **options), clock)
        assert "Outage" in stream.fails(batches, transform=ticking)
        for seconds in (0, 16):
            clock.advance(1000 * seconds)
            time.sleep(0.002)
            stream.run(use_clock(stream.batches(Closing(), sink, **options), clock), transform=ticking)
    names = ("batchId", "isReplay", "numInputRows", "numHeartbeats", "watermark")
    # Rows stay away for 16 seconds. Of many ticks a batch has one.
    assert [tuple(each[name] for name in names) for each in figures] == [
        (0, True, 1, 0, begin - 1000),
        (1, False, 0, 1, begin + 10_000),
    ]
    fired = [("a", begin + 7_000), ("a", begin + 10_000)]
    assert [sorted(rows) for _, rows in sink.calls] == [[("a", 0)], [("a", 0)], fired]


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


def test_refusals(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    whole = stream.spark.read.parquet(str(stream.folder / "in"))
    with pytest.raises(sb.UsageError, match="for a stream"):
        sb.spark.heartbeat(whole)
    rows = stream.spark.readStream.schema(whole.schema).parquet(str(stream.folder / "in"))
    with pytest.raises(sb.UsageError, match="has a heartbeat already"):
        sb.spark.heartbeat(sb.spark.heartbeat(rows))
    for wrong in ("soon", "10", "-1 second", 10.0, datetime.timedelta(0), "0 s"):
        with pytest.raises(sb.UsageError, match=r"\(every\)"):
            sb.spark.heartbeat(rows, every=wrong)  # type: ignore[arg-type]
    assert sb.spark.heartbeat(rows, every="1 min").columns == ["user", "n", COLUMN]
