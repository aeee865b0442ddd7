"""The time of rows in real streaming queries: lateness, order, expiry; replays of a day; progress."""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from event_days import DELAY, SCHEMA, Sessions, cut, day, sessions_of, table_of
from spark_streams import Collecting, Fails, Stream

import statebackend as sb

pytestmark = pytest.mark.spark


class Looking(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield ctx.current_key, ctx.timestamp, [-1 if ctx.watermark is None else ctx.watermark]


def test_late_rows_are_told_by_the_watermark_before_their_batch(stream: Stream, rng: random.Random) -> None:
    events = day(rng, 300, ordered_by_user=False)
    delay = DELAY // 50
    late, of_last, newest = 0, 0, None
    for batch in cut(events, 5):
        stream.add(table_of(batch))
        if newest is not None:
            of_last = sum(event.at < newest - delay for event in batch)
            late += of_last
        newest = max([event.at for event in batch] + ([] if newest is None else [newest]))
    assert late > 5
    assert newest is not None
    for handling in ("keep", "drop"):
        event_time = sb.EventTime("at", watermark_delay=datetime.timedelta(milliseconds=delay), late=handling)
        sink = Collecting()
        state = stream.folder / handling
        batches = stream.batches(Looking(), sink, schema=SCHEMA, event_time=event_time, state=state)
        stream.run(batches, checkpoint=f"stream-{handling}")
        rows = [row for _, given in sink.calls for row in given]
        assert len(rows) == len(events) - (late if handling == "drop" else 0)
        assert sum(at < watermark for _, at, (watermark,) in rows) == (late if handling == "keep" else 0)
        progress = batches.last_progress
        assert progress["watermark"] == newest - delay
        assert progress["numRowsLate"] == of_last
        assert progress["numRowsDroppedByWatermark"] == (of_last if handling == "drop" else 0)


def test_a_day_is_the_same_with_any_number_of_files_in_a_batch(stream: Stream, rng: random.Random) -> None:
    events = day(rng, 400, ordered_by_user=False)
    for batch in cut(events, 20):
        stream.add(table_of(batch))
    event_time = sb.EventTime("at", watermark_delay=DELAY, timers="between_rows")
    for files in (7, 20):
        sink = Collecting()
        state = stream.folder / f"state-{files}"
        batches = stream.batches(Sessions(), sink, schema=SCHEMA, event_time=event_time, state=state)
        stream.run(batches, files=files, checkpoint=f"stream-{files}")
        assert len(sink.calls) == -(-20 // files)
        watermark = sb.CheckpointStore(state).open_latest().watermark
        assert watermark == max(event.at for event in events) - DELAY
        found = sorted((user, at, list(what)) for _, rows in sink.calls for user, at, what in rows)
        assert found == sessions_of(events, watermark)


def test_a_replay_keeps_both_times(stream: Stream) -> None:
    for minute in (10, 5):
        at = pa.array([1_700_000_000_000_000 + minute * 60_000_000], pa.timestamp("us", "UTC"))
        stream.add(pa.table({"number": [0], "user": ["u"], "at": at}))
    sink = Collecting(Fails(1))
    batches = stream.batches(Looking(), sink, schema=SCHEMA, event_time="at")
    assert "Outage" in stream.fails(batches)
    before = sb.CheckpointStore(stream.state).open_latest()
    stream.run(batches)
    after = sb.CheckpointStore(stream.state).open_latest()
    assert (before.now, before.watermark) == (after.now, after.watermark)
    assert after.watermark == 1_700_000_600_000
    assert sink.calls[-1] == sink.calls[-2]
    assert batches.last_progress["isReplay"]
    assert batches.last_progress["numRowsLate"] == 1
