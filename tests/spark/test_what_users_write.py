"""What users of Spark write without thinking: any names of columns, rows in any form, scalars of numpy and pandas."""

from __future__ import annotations

import collections
import datetime
import re
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from spark_streams import Collecting, Stream, numbers, spark, stream

import statebackend as sb

__all__ = ["spark", "stream"]
pytestmark = pytest.mark.spark

UTC = datetime.timezone.utc
AT = datetime.datetime(2024, 2, 29, 12, 0, 0, 5, tzinfo=UTC)


class Sums(sb.KeyedProcessFunction):
    """Reads columns by their names, which are no attributes."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.sum = ctx.get_value_state(sb.ValueStateDescriptor("sum", str, default=""))
        self.rules = ctx.operator_state_store.get_list_state(sb.ListStateDescriptor("rules", int))

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
        event_time=sb.spark.EventTime("event.time at", late="too late"),
        order_by=["event.time at", "n`s"],
        broadcast="is a.rule",
    )
    stream.run(batches)
    rows = stream.spark.read.parquet(str(stream.folder / "out")).collect()
    found = sorted((row["the.user"], row["total of"], row["rules"]) for row in rows)
    assert found == [("a", "1", 70), ("a", "12", 70), ("a", "123", 70), ("b", "9", 70)]
    assert [[row[1] for row in rows] for _, rows in sinks["too late"].calls] == [[], [9]]  # type: ignore[union-attr]


def test_rows_go_out_in_any_form(stream: Stream) -> None:
    from pyspark.sql import Row

    named = collections.namedtuple("named", ["total", "user"])

    class Forms(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            yield row.user, row.n
            yield {"total": row.n, "user": row.user}
            yield named(row.n, row.user)
            yield Row(total=row.n, user=row.user)

    stream.add(numbers(("a", 1)))
    sink = Collecting()
    stream.run(stream.batches(Forms(), sink))
    assert sink.calls == [(0, [("a", 1)] * 4)]


class Scalars(sb.KeyedProcessFunction):
    """Keeps and gives out scalars of numpy and pandas."""

    def open(self, ctx: sb.FunctionContext) -> None:
        types = {"n": "bigint", "x": "double", "ok": "boolean", "at": "timestamp", "day": "date"}
        self.states = {
            name: ctx.get_value_state(sb.ValueStateDescriptor(name, kind)) for name, kind in types.items()
        }

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        scalars = {
            "n": np.int16(row.n),
            "x": np.float32(0.5),
            "ok": np.bool_(True),
            "at": pd.Timestamp(AT),
            "day": np.datetime64("2024-02-29"),
        }
        for name, scalar in scalars.items():
            self.states[name].update(scalar)
        yield scalars
        yield {name: state.value() for name, state in self.states.items()}
        yield {"n": None, "x": None, "ok": None, "at": pd.NaT, "day": np.datetime64("NaT")}


def test_scalars_of_numpy_and_pandas(stream: Stream) -> None:
    stream.add(numbers(("a", 7)))
    sink = Collecting()
    schema = "n bigint, x double, ok boolean, at timestamp, day date"
    stream.run(stream.batches(Scalars(), sink, schema=schema))
    ((_, rows),) = sink.calls
    local = AT.astimezone().replace(tzinfo=None)  # Spark collects times as local ones
    whole = (7, 0.5, True, local, AT.date())
    assert rows == [whole, whole, (None,) * 5]


class Failing(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.n = ctx.get_value_state(sb.ValueStateDescriptor("n", "int"))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.n.update("seven" if row.n == 7 else 0)
        yield row.user, "eight" if row.n == 8 else row.n


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ([("a", 1), ("b", 7)], "state 'n'"),
        ([("a", 1), ("b", 8)], "output column 'total', position 1"),
        ([("a", 1), (None, 1)], "column 'user', position 1"),
    ],
    ids=["a value of state", "a row out", "a key"],
)
def test_the_last_line_of_an_error_says_where(
    stream: Stream, rows: list[tuple[str | None, int]], where: str
) -> None:
    stream.add(numbers(*rows))
    message = stream.fails(stream.batches(Failing(), Collecting()))
    trace = message.partition("Traceback (most recent call last):")[2]
    lines = [line for line in trace.splitlines() if line.strip() and not line.startswith("\tat ")]
    last = next(line for line in lines if line.startswith("statebackend.errors."))
    assert where in last
    assert "batch 0 of Failing" in last
    assert re.search(r"\[SERIALIZATION[.A-Z_]*\]$", last)
