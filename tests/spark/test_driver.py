"""`stateful` in real streaming queries: effectively once, every type, sinks that misbehave, who may run."""

from __future__ import annotations

import contextlib
import decimal
import pickle
import time
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from local_spark import settings
from spark_streams import DDL, FULL, Collecting, Fails, Outage, Stream, Total, len_of, numbers, spark, stream

import statebackend as sb

__all__ = ["spark", "stream"]
pytestmark = pytest.mark.spark


def test_state_lives_from_batch_to_batch_and_from_run_to_run(stream: Stream) -> None:
    for n in range(3):
        stream.add(numbers(("a", n), ("b", 10)))
    sink = Collecting()
    batches = stream.batches(sink=sink)
    stream.run(batches)
    assert sink.calls[2] == (2, [("a", 3), ("b", 30)])
    progress = batches.last_progress
    assert (progress["batchId"], progress["numInputRows"], progress["numRowsTotal"]) == (2, 2, 2)
    assert (progress["numRowsUpdated"], progress["numRowsRemoved"]) == (2, 0)
    assert {"read", "function", "state", "output", "commit", "sink"} <= progress["durationMs"].keys()

    stream.add(numbers(("a", 1)))
    stream.run(batches)  # the same object again
    stream.add(numbers(("b", 1)))
    stream.run(pickle.loads(pickle.dumps(stream.batches(sink=len_of))))
    assert sink.calls[3] == (3, [("a", 4)])
    stream.add(numbers(("b", 1)))
    stream.run(stream.batches(sink=sink))
    assert sink.calls[4] == (5, [("b", 32)])


def test_a_sink_that_fails_gets_the_same_rows_again(stream: Stream) -> None:
    class Random(Total):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            (before, after) = super().process_element(row, ctx), time.perf_counter_ns()
            yield row.user, after
            yield from before

    for n in range(3):
        stream.add(numbers(("a", n), ("b", n)))
    sink = Collecting(Fails(1, 1, 2))
    for _ in range(3):
        assert "Outage" in stream.fails(stream.batches(Random(), sink))
    stream.run(stream.batches(Random(), sink))
    given: dict[int, list[Any]] = {}
    for batch_id, rows in sink.calls:
        assert given.setdefault(batch_id, rows) == rows
    assert Counter(batch_id for batch_id, _ in sink.calls) == {0: 1, 1: 3, 2: 2}
    assert given[2][1] == ("a", 3)


def test_a_function_that_fails_is_run_again_on_the_state_before(stream: Stream) -> None:
    class Flaky(Total):
        failures = 2

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            yield from super().process_element(row, ctx)
            if ctx.batch_id == 1 and row.user == "b" and Flaky.failures:
                Flaky.failures -= 1
                raise Outage("in the function")

    for _ in range(3):
        stream.add(numbers(("a", 1), ("b", 1)))
    sink = Collecting()
    for _ in range(2):
        assert "in the function" in stream.fails(stream.batches(Flaky(), sink))
    stream.run(stream.batches(Flaky(), sink))
    assert sink.calls == [(n, [("a", n + 1), ("b", n + 1)]) for n in range(3)]


def test_whatever_the_sink_does_state_is_right(stream: Stream) -> None:
    for _ in range(3):
        stream.add(numbers(("a", 1), ("b", 1)))
    seen = []

    def sink(frame: Any, batch_id: int) -> None:
        if batch_id == 0:  # several actions
            seen.append((frame.count(), frame.distinct().count(), frame.limit(1).collect(), frame.isEmpty()))
        if batch_id == 2:  # an exception swallowed; batch 1: no action at all
            with contextlib.suppress(Exception):
                frame.selectExpr("assert_true(total < 0)").collect()
            seen.append("swallowed")

    stream.run(stream.batches(sink=sink))
    assert len(seen) == 2
    stream.add(numbers(("a", 1)))
    last = Collecting()
    stream.run(stream.batches(sink=last))
    assert last.calls == [(3, [("a", 4)])]


def test_a_sink_cannot_close_what_calls_it(stream: Stream) -> None:
    codes = []

    def close(df: Any, batch_id: int) -> None:
        with pytest.raises(sb.UsageError) as caught:
            batches.close()
        codes.append(caught.value.code)

    stream.add(numbers(("a", 1)))
    batches = stream.batches(sink=close)
    stream.run(batches)
    assert codes == ["USAGE.OVERLAPPING_CALL"]


def test_every_type_goes_through_unchanged(stream: Stream) -> None:
    """In a session whose time zone is far from UTC; with nulls; the key is a struct with a null field."""
    full = {**FULL, "user": {"id": decimal.Decimal("1.50"), "at": None}}
    with settings(stream.spark, {"spark.sql.session.timeZone": "Asia/Tokyo"}):
        arrow = sb.types.of(DDL).arrow
        keyed = {**dict.fromkeys(full), "user": {"id": None, "at": FULL["at"]}}
        values = [{**row, "m": None if row["m"] is None else list(row["m"].items())} for row in (full, keyed)]
        stream.add(pa.Table.from_batches([pa.RecordBatch.from_struct_array(pa.array(values, arrow))]))
        seen = []

        class Echo(sb.KeyedProcessFunction):
            def open(self, ctx: sb.FunctionContext) -> None:
                self.last = ctx.get_value_state(sb.ValueStateDescriptor("last", DDL))

            def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
                self.last.update(row)
                yield self.last.value()

        def sink(frame: Any, batch_id: int) -> None:
            assert frame.schema == stream.spark.createDataFrame([], DDL).schema
            seen.extend(frame.toArrow().to_pylist())

        stream.run(stream.batches(Echo(), sink, schema=DDL))
    wanted = pa.array(values, arrow).to_pylist()
    assert seen == wanted


def test_columns_together_are_a_key_and_the_order_is_the_users(stream: Stream) -> None:
    function = sb.map_with_state(lambda row, n: ((row.a, row.b, row.at), None), int)
    table = pa.table({"a": [1, 1, None], "b": ["x", "x", "x"], "at": [2, 1, 3]})
    stream.add(table)
    sink = Collecting()
    stream.run(
        stream.batches(function, sink, key=["a", "b"], schema="a bigint, b string, at bigint", order_by="at")
    )
    assert sink.calls == [(0, [(1, "x", 1), (1, "x", 2), (None, "x", 3)])]


def test_a_large_output_keeps_its_order(stream: Stream) -> None:
    given = np.random.default_rng(1).integers(0, 2**62, 1_000_000)

    class Numbers(sb.BatchProcessFunction):
        def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
            return pa.record_batch({"user": ["a"] * len(given), "total": given})

    read = []

    def sink(frame: Any, batch_id: int) -> None:
        assert frame.rdd.getNumPartitions() > 1, "so large that tasks share it"
        read.append(frame.toArrow()["total"].to_numpy())

    stream.add(numbers(("a", 1)))
    stream.run(stream.batches(Numbers(), sink))
    assert np.array_equal(read[0], given)


def test_batches_without_rows_are_batches(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    stream.add(numbers(("b", 1)))
    stream.add(numbers(("a", 1)))
    sink = Collecting()
    stream.run(stream.batches(sink=sink), transform=lambda rows: rows.where("user = 'a'"))
    assert sink.calls == [(0, [("a", 1)]), (1, []), (2, [("a", 2)])]


def test_null_keys_fail_the_batch_or_are_dropped(stream: Stream) -> None:
    stream.add(numbers(("a", 1), (None, 1)))
    sink = Collecting()
    assert "SERIALIZATION.NULL_KEY" in stream.fails(stream.batches(sink=sink))
    batches = stream.batches(sink=sink, null_keys="drop")
    stream.run(batches)
    assert sink.calls == [(0, [("a", 1)])]
    assert batches.last_progress["numRowsDroppedByNullKey"] == 1


def test_a_batch_that_is_too_large_names_the_option(stream: Stream) -> None:
    class Refusing:
        columns = ["user", "n"]

        def toArrow(self) -> Any:
            raise RuntimeError("Total size ... is bigger than spark.driver.maxResultSize (1024.0 MiB)")

    from statebackend.spark.session import arrow_of

    with pytest.raises(sb.UsageError, match=r"maxResultSize.*maxFilesPerTrigger") as caught:
        arrow_of(Refusing())
    assert caught.value.code == "USAGE.BATCH_TOO_LARGE"


def test_outside_of_a_query_it_needs_a_name(stream: Stream) -> None:
    frame = stream.spark.createDataFrame([("a", 1)], "user string, n bigint")
    with pytest.raises(sb.UsageError, match="name="):
        stream.batches(sink=len_of)(frame, 0)
    sink = Collecting()
    batches = stream.batches(sink=sink, name="mine")
    batches(frame, 0)
    batches.close()
    batches(frame, 1)
    batches.close()
    assert sink.calls == [(0, [("a", 1)]), (1, [("a", 2)])]


def test_everything_is_released_when_the_query_ends(stream: Stream) -> None:
    stream.add(numbers(("a", 1)))
    batches = stream.batches(sink=len_of)
    stream.start(batches).awaitTermination()

    def is_released() -> bool:
        with batches._lock:  # whoever lets go holds it until the store is given up, too
            return batches._runner is None

    deadline = time.monotonic() + 60
    while not is_released():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    store = sb.CheckpointStore(stream.state).open_for_writing(refuse_live=True)
    store.close()
