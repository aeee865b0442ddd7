"""Outputs of a function, which rows each gets, and what sinks are given; found out before anything is committed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.runtime import Job
from statebackend.spark.sinks.committed_sink import SinkContext, call, check
from statebackend.testing import Harness

SCHEMAS = {"sums": "user string, total bigint", "large": "user string, n bigint", "timers": "at bigint"}


class Sums(sb.KeyedProcessFunction):
    """A running total; large numbers, timers and broadcast rows in outputs of their own."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.total.add(row.n)
        ctx.timer_service().register_processing_time_timer(ctx.now + row.n)
        if row.n >= 100:
            ctx.output("large", {"n": row.n, "user": row.user})
        if row.n < 0:
            ctx.output("sums", (row.user, 0))
            raise ValueError("negative")
        yield row.user, self.total.get()

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        ctx.output("timers", (timestamp,))

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> Any:
        ctx.output("large", ("all", row.n))


def rows(*numbers: int, user: str = "ann") -> list[dict[str, Any]]:
    return [{"user": user, "n": n, "is_broadcast": False} for n in numbers]


def test_rows_go_to_the_outputs_that_are_named() -> None:
    with Harness(Sums(), key="user", schema=SCHEMAS, broadcast_when="is_broadcast") as harness:
        told = {"user": "x", "n": 5, "is_broadcast": True}
        assert harness.process_batch([*rows(7, 100), told]) == [("ann", 7), ("ann", 107)]
        assert harness.outputs == {
            "sums": [("ann", 7), ("ann", 107)],
            "large": [("all", 5), ("ann", 100)],
            "timers": [],
        }
        assert harness.advance_processing_time(50) == []
        assert harness.outputs == {"sums": [], "large": [], "timers": [(7,)]}


def test_rows_of_a_failed_batch_are_in_no_output() -> None:
    with Harness(Sums(), key="user", schema=SCHEMAS) as harness:
        with pytest.raises(ValueError, match="negative"):
            harness.process_batch(rows(100, -1))
        assert harness.process_batch(rows(200)) == [("ann", 200)]
        assert harness.outputs["large"] == [("ann", 200)]


def test_the_main_output_takes_rows_by_its_name_too_in_the_order_they_are_given() -> None:
    class Both(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            for n in range(row.n):
                ctx.output("sums", (row.user, 2 * n))
                yield row.user, 2 * n + 1

    with Harness(Both(), key="user", schema=SCHEMAS) as harness:
        assert [n for _, n in harness.process_batch(rows(40_000))] == list(range(80_000))


def test_without_a_schema_rows_stay_as_they_are() -> None:
    with Harness(Sums(), key="user", schema=dict.fromkeys(SCHEMAS)) as harness:
        harness.process_element({"user": "ann", "n": 100})
        assert harness.outputs["large"] == [{"n": 100, "user": "ann"}]


class Split(sb.BatchProcessFunction):
    def __init__(self, give: Any) -> None:
        self.give = give

    def __deepcopy__(self, memo: Any) -> Split:
        return Split(self.give)

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
        return self.give(batch, ctx)


BATCH = pa.table({"user": ["ann", "bob", "cid"], "n": [1, 200, 3]})


def split(give: Any, schema: Any = None) -> Harness:
    return Harness(Split(give), key="user", schema=SCHEMAS if schema is None else schema)


@pytest.mark.parametrize("schema", [None, dict.fromkeys(SCHEMAS)], ids=["in Arrow", "as they are"])
def test_whole_batches_go_to_the_outputs_that_are_named(schema: Any) -> None:
    def give(batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
        sums = batch.rename_columns(["user", "total"])
        yield {"sums": sums, "large": [batch.slice(1, 1), None, batch.slice(2)]}
        ctx.output("large", ("row", 7))
        yield sums.slice(0, 1)
        yield {"large": pa.Table.from_batches([batch.slice(0, 1)])}

    with split(give, schema) as harness:
        given = [("ann", 1), ("bob", 200), ("cid", 3), ("ann", 1)]
        assert [tuple(row) for row in harness.process_batch(BATCH)] == given
        large = [("bob", 200), ("cid", 3), ("row", 7), ("ann", 1)]
        assert [tuple(row) for row in harness.outputs["large"]] == large
        assert harness.outputs["timers"] == []


def test_an_output_that_the_schema_does_not_name_fails_the_batch() -> None:
    class Unknown(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            ctx.output("lat", row)

    for schema in (SCHEMAS, "user string, n bigint", None):
        with Harness(Unknown(), key="user", schema=schema) as harness:
            with pytest.raises(sb.UsageError) as caught:
                harness.process_batch(rows(1))
            assert caught.value.code == "USAGE.NO_OUTPUT"
    with split(lambda batch, ctx: {"lat": batch}) as harness, pytest.raises(sb.UsageError) as caught:
        harness.process_batch(BATCH)
    assert caught.value.code == "USAGE.NO_OUTPUT"
    assert "sums, large, timers" in str(caught.value)


def test_a_row_that_does_not_fit_names_its_output() -> None:
    class Wrong(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            ctx.output("large", (row.user, "many"))

    with Harness(Wrong(), key="user", schema=SCHEMAS) as harness:
        with pytest.raises(sb.SerializationError) as caught:
            harness.process_batch(rows(1))
        assert caught.value.detail == "output 'large', output column 'n', position 0"
    with split(lambda batch, ctx: {"large": batch.select(["n"])}) as harness:
        with pytest.raises(sb.SerializationError) as caught:
            harness.process_batch(BATCH)
        assert str(caught.value.detail).startswith("output 'large', columns n")


def test_rows_are_emitted_while_a_batch_runs_only() -> None:
    class Early(sb.KeyedProcessFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            ctx.output("sums", ("ann", 1))

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            raise AssertionError("never opened")

    with (
        Harness(Early(), key="user", schema=SCHEMAS) as harness,
        pytest.raises(sb.UsageError, match="while a batch"),
    ):
        harness.process_batch(rows(1))


def test_the_schema_of_a_job_names_its_outputs() -> None:
    assert list(Job(Sums(), key="user", schema=SCHEMAS).outputs) == ["sums", "large", "timers"]
    assert list(Job(Sums(), key="user", schema="n int").outputs) == ["main"]


CONTEXT = SinkContext(7, 3, "0" * 32, False)


def given(*arguments: Any, **named: Any) -> tuple[Any, ...]:
    seen.append((*arguments, named))
    return seen[-1]


seen: list[tuple[Any, ...]] = []


class Sink:
    def __call__(self, df: Any, batch_id: int, context: Any = None) -> None:
        given(df, batch_id, context)

    def method(self, df: Any, batch_id: int, *, context: Any) -> None:
        given(df, batch_id, context)

    def plain(self, df: Any, batch_id: int) -> None:
        given(df, batch_id)


def with_context(df: Any, batch_id: int, context: Any) -> None:
    given(df, batch_id, context)


@functools.wraps(with_context)
def wrapper(df: Any, batch_id: int) -> None:
    given(df, batch_id)


@pytest.mark.parametrize(
    ("sink", "wanted"),
    [
        (with_context, ("df", 7, CONTEXT, {})),
        (Sink(), ("df", 7, CONTEXT, {})),
        (Sink().method, ("df", 7, CONTEXT, {})),
        (Sink().plain, ("df", 7, {})),
        (lambda df, batch_id: given(df, batch_id), ("df", 7, {})),
        (lambda *both: given(*both), ("df", 7, {})),
        (lambda df, batch_id, *context: given(df, batch_id, *context), ("df", 7, {})),
        (lambda df, batch_id, **context: given(df, batch_id, **context), ("df", 7, {})),
        (lambda context, batch_id: given(context, batch_id), ("df", 7, {})),
        (functools.partial(with_context, context="mine"), ("df", 7, "mine", {})),
        (
            functools.partial(lambda table, df, batch_id, context: given(table, df, batch_id, context), "t"),
            ("t", "df", 7, CONTEXT, {}),
        ),
        (wrapper, ("df", 7, {})),
        (print, None),
    ],
)
def test_a_sink_gets_what_it_asks_for(sink: Callable[..., Any], wanted: Any) -> None:
    seen.clear()
    check(sink)
    call(sink, "df", 7, CONTEXT)
    assert seen == ([] if wanted is None else [wanted])
