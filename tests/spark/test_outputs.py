"""Several outputs of a streaming query: each has its sink, and a replay delivers all of them."""

from __future__ import annotations

from typing import Any

import pytest
from spark_streams import Collecting, Fails, Outage, Stream, Total, numbers, spark, stream, timed

import statebackend as sb

__all__ = ["spark", "stream"]
pytestmark = pytest.mark.spark

SCHEMAS = {"totals": "user string, total bigint", "large": "user string, n bigint"}


class Sorted(Total):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        if row.n >= 100:
            ctx.output("large", row)
        yield from super().process_element(row, ctx)


def test_each_output_goes_to_its_sink_and_a_replay_goes_to_all(stream: Stream) -> None:
    stream.add(numbers(("a", 1), ("b", 100)))
    stream.add(numbers(("a", 200)))
    stream.add(numbers(("a", 1)))
    totals, large = Collecting(), Collecting(Fails(1))
    batches = stream.batches(Sorted(), {"large": large, "totals": totals}, schema=SCHEMAS)
    assert "Outage" in stream.fails(batches)
    batches = stream.batches(Sorted(), {"large": large, "totals": totals}, schema=SCHEMAS)
    stream.run(batches)
    second = (1, [("a", 201)])
    assert totals.calls == [(0, [("a", 1), ("b", 100)]), second, second, (2, [("a", 202)])]
    assert large.calls == [(0, [("b", 100)]), (1, [("a", 200)]), (1, [("a", 200)]), (2, [])]
    assert batches.last_progress["outputs"] == {"totals": 1, "large": 0}


class Picky(Total):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        yield from super().process_element(row, ctx)
        if row.n == 13:
            raise Outage


def test_late_rows_and_rows_that_fail_go_to_their_outputs(stream: Stream) -> None:
    stream.add(timed(("a", 1, 5000), ("a", 13, 6000), ("b", 2, 1000)))
    stream.add(timed(("a", 10, 5999), ("b", 13, 3), ("a", 1, 7000)))
    seen: list[dict[str, Any]] = []
    sinks = {"main": Collecting(), "late": Collecting(), "errors": Collecting()}
    batches = stream.batches(
        Picky(),
        sinks,
        schema={
            "main": "user string, total bigint",
            "late": "at timestamp, user string, n bigint",
            "errors": "user string, n bigint, error_class string, error_code string",
        },
        event_time=sb.spark.EventTime("at", late="late"),
        on_error="route",
        on_batch=seen.append,
    )
    stream.run(batches)
    assert [progress["batchId"] for progress in seen] == [0, 1]
    assert seen[-1] == batches.last_progress
    assert sinks["main"].calls == [(0, [("a", 1), ("b", 2)]), (1, [("a", 2)])]
    assert [[row[1:] for row in rows] for _, rows in sinks["late"].calls] == [[], [("a", 10), ("b", 13)]]
    error = ("a", 13, "spark_streams.Outage", None)
    assert sinks["errors"].calls == [(0, [error]), (1, [])]
    progress = batches.last_progress
    assert progress["outputs"] == {"main": 1, "late": 2, "errors": 0}
    assert (progress["numRowsLate"], progress["numRowsDroppedByWatermark"], progress["numRowsFailed"]) == (
        2,
        0,
        0,
    )
