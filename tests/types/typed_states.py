"""What type checkers are to infer: read by `test_type_checkers`, and run by nobody.

A wrong line is marked as such for both checkers, and each tells of a mark that it does not need.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
from collections.abc import Iterator

from typing_extensions import assert_type

import statebackend as sb
from statebackend.types import DECIMAL, LIST, LONG, MAP, STRING, TIMESTAMP


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int


class Mean(sb.AggregateFunction[int, tuple[int, int], float]):
    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value: int, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator[0] + value, accumulator[1] + 1

    def get_result(self, accumulator: tuple[int, int]) -> float:
        return accumulator[0] / accumulator[1]

    def merge(self, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], a[1] + b[1]


def values(ctx: sb.FunctionContext) -> None:
    n = ctx.get_state(sb.ValueStateDescriptor("n", LONG))
    assert_type(n, sb.ValueState[int])
    assert_type(n.value(), int | None)
    n.update(3)
    n.update(None)
    n.update("three")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(ctx.get_value_state(sb.ValueStateDescriptor("n", int)).value(), int | None)
    total = ctx.get_value_state(sb.ValueStateDescriptor("total", LONG, default=0))
    total.update(total.value() + 1)
    assert_type(ctx.get_state(sb.ValueStateDescriptor("s", STRING)).value(), str | None)
    assert_type(ctx.get_state(sb.ValueStateDescriptor("p", Point)), sb.ValueState[Point])
    assert_type(ctx.get_state(sb.ValueStateDescriptor("l", LIST(LONG))), sb.ValueState[list[int]])
    assert_type(ctx.get_state(sb.ValueStateDescriptor("m", MAP(str, LONG))), sb.ValueState[dict[str, int]])
    pair = ctx.get_value_state(sb.ValueStateDescriptor("t", tuple[int, str]))
    assert_type(pair, sb.ValueState[tuple[int, str]])
    assert_type(ctx.get_state(sb.ValueStateDescriptor("at", TIMESTAMP)), sb.ValueState[datetime.datetime])
    assert_type(ctx.get_state(sb.ValueStateDescriptor("d", DECIMAL(10, 2))), sb.ValueState[decimal.Decimal])
    kept = sb.StateTtlConfig(datetime.timedelta(days=1))
    assert_type(
        ctx.get_state(sb.ValueStateDescriptor("e", int).enable_time_to_live(kept)), sb.ValueState[int]
    )
    # A checker does not read DDL: what it says nothing of may be anything.
    print(ctx.get_value_state(sb.ValueStateDescriptor("ddl", "struct<a:int>", default=(1,))).value().a)


def collections(ctx: sb.FunctionContext) -> None:
    tags = ctx.get_state(sb.ListStateDescriptor("tags", str))
    assert_type(tags.get(), list[str])
    assert_type(list(tags), list[str])
    tags.add_all(["a"])
    tags.add(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    seen = ctx.get_state(sb.MapStateDescriptor("seen", str, LONG))
    assert_type(seen, sb.MapState[str, int])
    assert_type(seen["a"], int)
    assert_type(seen.get("a"), int | None)
    assert_type(seen.get("a", 0), int)
    assert_type(dict(seen.items()), dict[str, int])
    seen["a"] = 2
    seen[1] = 2  # type: ignore[index]  # pyright: ignore[reportArgumentType]
    points = ctx.get_map_state(sb.MapStateDescriptor("points", "bigint", Point))
    for point in points.values():
        assert_type(point, Point)


def adding(ctx: sb.FunctionContext) -> None:
    total = ctx.get_state(sb.ReducingStateDescriptor("total", "sum", LONG))
    assert_type(total, sb.ReducingState[int])
    assert_type(total.get(), int | None)
    longest = ctx.get_reducing_state(
        sb.ReducingStateDescriptor("longest", lambda old, new: max(old, new, key=len), str)
    )
    assert_type(longest, sb.ReducingState[str])
    longest.add(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mean = ctx.get_state(sb.AggregatingStateDescriptor("mean", Mean(), accumulator_type=tuple[int, int]))
    assert_type(mean.get(), float | None)
    mean.add("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(ctx.get_state(sb.AggregatingStateDescriptor("n", "count", str)).get(), int | None)
    assert_type(ctx.get_state(sb.AggregatingStateDescriptor("m", "max", str)).get(), str | None)
    assert_type(ctx.get_state(sb.AggregatingStateDescriptor("v", "stddev", LONG)).get(), float | None)

    def joined(path: str, step: int) -> str:
        return f"{path}/{step}"

    path = ctx.get_state(sb.FoldingStateDescriptor("path", "", joined, str))
    assert_type(path, sb.FoldingState[int, str])
    assert_type(path.get(), str | None)


def operators(ctx: sb.FunctionContext) -> None:
    store = ctx.operator_backend
    offsets = store.get_list_state(sb.ListStateDescriptor("offsets", int))
    assert_type(offsets.get(), list[int])
    assert_type(store.get_union_list_state(sb.ListStateDescriptor("all", str)).get(), list[str])
    rules = store.get_broadcast_state(sb.MapStateDescriptor("rules", str, Point))
    assert_type(rules, sb.BroadcastState[str, Point])
    assert_type(rules.read_only()["a"], Point)
    rules.put("a", 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def backends(keyed: sb.KeyedStateBackend) -> None:
    assert_type(keyed.get_state(sb.ValueStateDescriptor("n", int)), sb.ValueState[int])
    assert_type(keyed.get_map_state(sb.MapStateDescriptor("m", str, int)), sb.MapState[str, int])


class Total(sb.KeyedProcessFunction):
    """A handle that is kept has its type, too; and one may be written down."""

    last: sb.ValueState[str]

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        self.last = ctx.get_value_state(sb.ValueStateDescriptor("last", str))

    def process_element(
        self, row: object, ctx: sb.FunctionContext
    ) -> Iterator[tuple[int | None, str | None]]:
        yield self.total.get(), self.last.value()


def query() -> None:
    batches = sb.spark.stateful(
        Total(),
        key=["user", "country"],
        schema="total bigint, last string",
        state=sb.CheckpointStore("/data/state", retain="2 days"),
        sink={"main": sb.spark.sinks.parquet("/data/out"), "late": sb.spark.sinks.delta("/data/late")},
        event_time=sb.EventTime("at", watermark_delay="10 minutes", late=sb.to_output("late")),
        run_on=sb.spark.Driver(batch_memory="512m"),
        null_keys="drop",
        on_batch=lambda progress: print(progress["batchId"]),
    )
    batches.close()
    sb.spark.stateful(Total(), key=1, state="/data/state")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sb.spark.stateful(Total(), keys="user", state="/data/state")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
