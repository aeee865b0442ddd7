"""``late=to_output(...)``: late rows and those of a far future go to the output, as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.testing import Harness, ManualClock

pytestmark = pytest.mark.usefixtures("either_way")

SCHEMAS = {"main": "user string, at bigint", "late": "at bigint, user string"}
ROUTED = sb.EventTime("at", watermark_delay=10, late=sb.to_output("late"), max_ahead=1000)
LATE = sb.EventTime("at", late=sb.to_output("late"))


class Passed(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.n = ctx.get_reducing_state(sb.ReducingStateDescriptor("n", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.n.add(1)
        if row.at == 7:
            ctx.output("late", (row.at, "by the function"))
        yield row.user, row.at


class PassedWhole(sb.BatchProcessFunction):
    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
        return batch.select(["user", "at"])


def rows(*times: int | None, user: str = "ann") -> pa.Table:
    at = pa.array(times, pa.int64())
    columns = {"user": [user] * len(times), "at": at, "is_broadcast": [False] * len(times)}
    return pa.table(columns)


@pytest.mark.parametrize("function", [Passed(), PassedWhole()], ids=["rows", "batches"])
@pytest.mark.parametrize("schema", [SCHEMAS, dict.fromkeys(SCHEMAS)], ids=["in Arrow", "as they are"])
def test_rows_that_are_not_on_time_go_to_their_output(function: Any, schema: Any) -> None:
    clock = ManualClock(1000)
    event_time = replace(ROUTED, timers="after_batch")
    with Harness(function, key="user", schema=schema, event_time=event_time, clock=clock) as harness:
        first = [tuple(row)[:2] for row in harness.process_batch(rows(100, None, 3))]
        assert first == [("ann", 100), ("ann", None), ("ann", 3)]
        assert harness.outputs["late"] == []
        second = [tuple(row)[:2] for row in harness.process_batch(rows(89, 90, 7777, None, 50, user="bob"))]
        assert second == [("bob", 90), ("bob", None)]
        late = [(89, "bob"), (7777, "bob"), (50, "bob")]
        if schema is not SCHEMAS:  # all columns, as they came
            late = [("bob", at, False) for at, _ in late]
        assert [tuple(row) for row in harness.outputs["late"]] == late
        assert harness.watermark == 90


def test_a_function_may_give_rows_to_that_output_too() -> None:
    with Harness(Passed(), key="user", schema=SCHEMAS, event_time=LATE) as harness:
        harness.process_batch(rows(5))
        harness.process_batch(rows(7, 1))
        assert sorted(harness.outputs["late"]) == [(1, "ann"), (7, "by the function")]


def test_a_late_row_changes_no_state_and_a_failed_batch_gives_none() -> None:
    class Flaky(Passed):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            if row.user == "mallory":
                raise ValueError("as told")
            return super().process_element(row, ctx)

    with Harness(Flaky(), key="user", schema=SCHEMAS, event_time=LATE) as harness:
        harness.process_batch(rows(100))
        mixed = pa.concat_tables([rows(1), rows(200, user="mallory")])
        with pytest.raises(ValueError, match="as told"):
            harness.process_batch(mixed)
        assert harness.watermark == 100
        harness.process_batch(pa.concat_tables([rows(1, user="late"), rows(200)]))
        assert harness.outputs["late"] == [(1, "late")]
        assert list(harness.keyed.keys("n")) == ["ann"]


def test_the_output_must_be_there_and_have_columns_of_the_rows() -> None:
    for late in (None, "", 3, "late"):
        with pytest.raises(sb.UsageError, match=r"late is not a rule.*'fail' or sb.to_output"):
            sb.EventTime("at", late=late)  # type: ignore[arg-type]
    schema = {**SCHEMAS, "late": "at bigint, missing string"}
    with Harness(Passed(), key="user", schema=schema, event_time=ROUTED) as harness:
        with pytest.raises(sb.UsageError) as caught:
            harness.process_batch(rows(1))
        assert caught.value.code == "USAGE.NO_COLUMN"
    schema = {**SCHEMAS, "late": "at string"}
    with Harness(Passed(), key="user", schema=schema, event_time=ROUTED) as harness:
        harness.process_batch(rows(100))
        with pytest.raises(sb.SerializationTypeError, match="another type"):
            harness.process_batch(rows(1))
