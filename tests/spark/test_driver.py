"""`stateful` in real streaming queries: from run to run, sinks that misbehave, null keys, the end of a query."""

from __future__ import annotations

import contextlib
import pickle
import time
from typing import Any

import pyarrow as pa
import pytest
from spark_streams import Collecting, Stream, len_of, numbers

import statebackend as sb

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


def test_state_is_right_after_each_act_of_the_sink(stream: Stream) -> None:
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


def test_null_keys_fail_the_batch_or_are_dropped(stream: Stream) -> None:
    stream.add(numbers(("a", 1), (None, 1)))
    sink = Collecting()
    assert "SERIALIZATION.NULL_KEY" in stream.fails(stream.batches(sink=sink))
    batches = stream.batches(sink=sink, null_keys="drop")
    stream.run(batches)
    assert sink.calls == [(0, [("a", 1)])]
    assert batches.last_progress["numRowsDroppedByNullKey"] == 1


def test_a_batch_that_is_too_large_names_the_option() -> None:
    class Refusing:
        columns = ["user", "n"]

        def toArrow(self) -> Any:
            raise RuntimeError("Total size ... is bigger than spark.driver.maxResultSize (1024.0 MiB)")

    from statebackend.spark.session import arrow_of

    with pytest.raises(sb.UsageError, match=r"maxResultSize.*maxFilesPerTrigger") as caught:
        arrow_of(Refusing())
    assert caught.value.code == "USAGE.BATCH_TOO_LARGE"


def test_outside_of_a_query_it_needs_a_uid(stream: Stream) -> None:
    frame = stream.spark.createDataFrame([("a", 1)], "user string, n bigint")
    with pytest.raises(sb.UsageError, match="USAGE.NO_UID"):
        stream.batches(sink=len_of)(frame, 0)
    sink = Collecting()
    batches = stream.batches(sink=sink, uid="mine")
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


class Sums(sb.KeyedProcessFunction):
    """Reads columns by their names, which are no attributes."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.sum = ctx.get_value_state(sb.ValueStateDescriptor("sum", str, default=""))
        self.rules = ctx.operator_backend.get_list_state(sb.ListStateDescriptor("rules", int))

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> None:
        self.rules.add(row["n`s"])

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.sum.update(f"{self.sum.value()}{row['n`s']}")
        yield {"total of": self.sum.value(), "the.user": row["the.user"], "rules": sum(self.rules.get())}


def test_columns_have_dots_and_spaces_in_their_names(stream: Stream) -> None:
    """In the key, the time of rows, the order, the broadcast column, the outputs, and the sink."""
    table = pa.table(
        {
            "the.user": ["a", "a", "a", "b", None],
            "its item": [1, 1, 1, 1, None],
            "event.time at": pa.array([3000, 1000, 2000, 500, None], pa.timestamp("ms", "UTC")),
            "is a.rule": [False, False, False, False, True],
            "n`s": [3, 1, 2, 9, 70],
        }
    )
    stream.add(table)
    stream.add(table.slice(3, 1))
    sinks = {"sums": sb.spark.sinks.parquet(stream.folder / "out"), "too late": Collecting()}
    batches = stream.batches(
        Sums(),
        sinks,
        key=["the.user", "its item"],
        schema={
            "sums": "`the.user` string, `total of` string, rules bigint",
            "too late": "`event.time at` timestamp, `n``s` bigint",
        },
        event_time=sb.EventTime("event.time at", late=sb.to_output("too late")),
        order_by=["event.time at", "n`s"],
        broadcast_when="is a.rule",
    )
    stream.run(batches)
    rows = stream.spark.read.parquet(str(stream.folder / "out")).collect()
    found = sorted((row["the.user"], row["total of"], row["rules"]) for row in rows)
    assert found == [("a", "1", 70), ("a", "12", 70), ("a", "123", 70), ("b", "9", 70)]
    assert [[row[1] for row in rows] for _, rows in sinks["too late"].calls] == [[], [9]]  # type: ignore[union-attr]
