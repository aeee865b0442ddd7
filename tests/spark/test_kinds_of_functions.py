"""Every kind of function in real queries: plain, with the time of rows and several outputs, and with rows that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from spark_streams import Collecting, Fails, Stream, numbers, timed

import statebackend as sb

pytestmark = pytest.mark.spark

GAP = 10_000
OUTPUTS = {
    "totals": "user string, total bigint",
    "large": "user string, n bigint",
    "closed": "user string, at bigint",
    "late": "user string, n bigint",
}


class ByRow(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        if row.n == 13:
            self.total.add(1000)
            raise ValueError("thirteen")
        self.total.add(row.n)
        if hasattr(row, "at"):
            ctx.timer_service().register_event_time_timer(ctx.timestamp + GAP)
            if row.n >= 100:
                ctx.output("large", {"n": row.n, "user": row.user})
        yield row.user, self.total.get()

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> None:
        ctx.output("closed", (ctx.current_key, timestamp - GAP))


class ByKey(sb.KeyRowsFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_value_state(sb.ValueStateDescriptor("total", int, default=0))

    def process_rows(self, key: str, rows: list[Any], ctx: sb.FunctionContext) -> Any:
        assert {row.user for row in rows} == {key}
        self.total.update(self.total.value() + sum(row.n for row in rows))
        if hasattr(rows[0], "at"):
            for row in rows:
                ctx.timer_service().register_event_time_timer(round(row.at.timestamp() * 1000) + GAP)
                if row.n >= 100:
                    ctx.output("large", {"n": row.n, "user": row.user})
        yield key, self.total.value()

    on_timer = ByRow.on_timer


class OverColumns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
        users, totals, _ = self.total.add_many(ctx.keys, batch["n"], return_changed=True)
        given = pa.record_batch({"user": users, "total": totals})
        if "at" not in batch.schema.names:
            return given
        times = batch["at"].cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
        ctx.timer_service().register_event_time_timers(ctx.keys, pc.add(times, GAP))
        large = batch.select(["user", "n"]).filter(pc.greater_equal(batch["n"], 100))
        return {"totals": given, "large": large}

    def on_timers(
        self, keys: pa.Array, timestamps: pa.Array, namespaces: Any, ctx: sb.FunctionContext
    ) -> Any:
        return {"closed": pa.record_batch({"user": keys, "at": pc.subtract(timestamps, GAP)})}


def running(row: Any, total: int | None) -> tuple[Any, int]:
    if row.n == 13:
        raise ValueError("thirteen")
    total = (total or 0) + row.n
    return {"total": total, "user": row.user}, total


KINDS: dict[str, Callable[[], Any]] = {
    "row by row": ByRow,
    "all rows of a key": ByKey,
    "whole batches": OverColumns,
    "a plain function": lambda: sb.map_with_state(running, int),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def newest(sink: Collecting) -> dict[str, int]:
    """The last row of each user."""
    return {user: total for _, rows in sink.calls for user, total in rows}


@EVERY_KIND
def test_totals_of_each_batch_and_a_sink_that_fails_once(stream: Stream, kind: str) -> None:
    batches = [[("a", 1), ("b", 2), ("a", 3)], [("b", 10)], [("a", 100), ("c", 5), ("b", -1)]]
    for rows in batches:
        stream.add(numbers(*rows))
    sink = Collecting(Fails(1))
    assert "Outage" in stream.fails(stream.batches(KINDS[kind](), sink))
    job = stream.batches(KINDS[kind](), sink)
    stream.run(job)
    assert [batch_id for batch_id, _ in sink.calls] == [0, 1, 1, 2]
    assert sink.calls[1] == sink.calls.pop(2)
    expected: Counter[str] = Counter()
    for number, rows in enumerate(batches):
        for user, n in rows:
            expected[user] += n
        given = dict(sink.calls[number][1])
        assert given == {user: expected[user] for user, _ in rows}
    assert job.last_progress["numRowsTotal"] == 3


@EVERY_KIND
def test_with_the_time_of_rows_and_several_outputs(stream: Stream, kind: str) -> None:
    stream.add(timed(("a", 1, 5000), ("b", 100, 8000), ("a", 2, 6000)))
    stream.add(timed(("a", 7, 7999), ("b", 3, 17_000), ("c", 5, 8000)))
    stream.add(timed(("c", 200, 30_000)))
    has_outputs = kind != "a plain function"  # it has no context
    outputs = OUTPUTS if has_outputs else {name: OUTPUTS[name] for name in ("totals", "late")}
    sinks = {name: Collecting() for name in outputs}
    time = sb.EventTime("at", late=sb.to_output("late"))
    job = stream.batches(KINDS[kind](), sinks, schema=outputs, event_time=time)
    stream.run(job)
    assert newest(sinks["totals"]) == {"a": 3, "b": 103, "c": 205}
    assert [rows for _, rows in sinks["late"].calls] == [[], [("a", 7)], []]
    if has_outputs:
        assert [rows for _, rows in sinks["large"].calls] == [[("b", 100)], [], [("c", 200)]]
        assert [rows for _, rows in sinks["closed"].calls] == [
            [],
            [("a", 5000), ("a", 6000)],
            [("b", 8000), ("c", 8000), ("b", 17_000)],
        ]
        assert job.last_progress["numTimersPending"] == 1
    assert job.last_progress["watermark"] == 30_000


@pytest.mark.parametrize("kind", ["row by row", "a plain function"])
def test_rows_that_fail(stream: Stream, kind: str) -> None:
    schema = {"totals": OUTPUTS["totals"], "errors": "user string, n bigint, error_class string"}
    sinks = {name: Collecting() for name in schema}
    stream.add(numbers(("a", 1), ("a", 13), ("b", 13), ("a", 2)))
    stream.add(numbers(("b", 13)))
    job = stream.batches(KINDS[kind](), sinks, schema=schema, errors=sb.to_output("errors"))
    stream.run(job)
    assert sinks["totals"].calls == [(0, [("a", 1), ("a", 3)]), (1, [])]
    failed = [[("a", 13, "ValueError"), ("b", 13, "ValueError")], [("b", 13, "ValueError")]]
    assert [rows for _, rows in sinks["errors"].calls] == failed
    assert job.last_progress["numRowsFailed"] == 1
    assert job.last_progress["numRowsTotal"] == 1, "what failed calls have added is taken back"
