"""`KeyRowsFunction`: every key of a batch once, with all its rows, and timers and broadcast rows as ever."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from functions.conftest import each_way

import statebackend as sb
from statebackend.testing import Harness


class Gathered(sb.KeyRowsFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.n = ctx.get_reducing_state(sb.ReducingStateDescriptor("n", "sum", int))

    def process_rows(self, key: Any, rows: list[Any], ctx: sb.FunctionContext) -> Any:
        assert ctx.current_key == key or key != key  # NaN
        self.n.add(len(rows))
        ctx.timers.register(ctx.now + 10, "processing")
        yield key, [row.n for row in rows], self.n.get()

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        yield ctx.current_key, [timestamp], self.n.get()

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> Any:
        yield None, [row.n], -1


KEYS: dict[str, tuple[Any, list[Any]]] = {
    "bigint": (pa.int64(), [0, -1, 2**40]),
    "string": (pa.string(), ["", "ann", "é" * 40]),
    "double": (pa.float64(), [0.0, -0.0, float("nan"), 1.5]),
    "struct<a:int,b:string>": (
        pa.struct({"a": pa.int32(), "b": pa.string()}),
        [{"a": 1, "b": None}, {"a": 1, "b": "x"}],
    ),
    "boolean": (pa.bool_(), [True, False]),
    "decimal(30,2)": (pa.decimal128(30, 2), [1, 2]),
}


@each_way
@pytest.mark.parametrize("name", list(KEYS))
def test_each_key_comes_once_with_its_rows_in_order(
    backend: str, name: str, rng: random.Random, either_way: int | None
) -> None:
    arrow, samples = KEYS[name]
    with Harness(Gathered(), name, key="k", backend=backend) as harness:
        counts: dict[str, int] = {}
        for _ in range(3):
            keys = rng.choices(samples, k=30)
            table = pa.table({"k": pa.array(keys, arrow), "n": list(range(30))})
            expected: dict[str, list[int]] = {}
            for n, key in enumerate(table["k"].to_pylist()):
                expected.setdefault(repr(0.0 if key == 0 and arrow == pa.float64() else key), []).append(n)
            given = harness.process_batch(table)
            if either_way is not None:  # then keys come by their values
                given.sort(key=lambda each: each[1])
            assert [rows for _, rows, _ in given] == list(expected.values())
            for (text, rows), (_, _, total) in zip(expected.items(), given, strict=True):
                counts[text] = counts.get(text, 0) + len(rows)
                assert total == counts[text]


def test_composite_keys_order_broadcast_rows_and_timers(either_way: int | None) -> None:
    rows = [
        {"a": a, "b": b, "n": n, "all": to_all}
        for a, b, n, to_all in ((1, "x", 9, False), (2, "x", 5, False), (1, "x", 3, False), (1, "y", 7, True))
    ]
    with Harness(
        Gathered(), "struct<a:bigint,b:string>", key=["a", "b"], order_by="n", broadcast="all"
    ) as harness:
        given = harness.process_batch(rows)
        assert [(key and tuple(key), numbers, n) for key, numbers, n in given] == [
            (None, [7], -1),
            ((1, "x"), [3, 9], 2),
            ((2, "x"), [5], 1),
        ]
        assert sorted(tuple(key) for key, _, _ in harness.advance_time(10)) == [(1, "x"), (2, "x")]
        given = harness.process_element((1, "x"), {"n": 1})
        assert [(tuple(key), *rest) for key, *rest in given] == [((1, "x"), [1], 3)]


def test_no_rows_no_call_and_many_rows_in_pieces() -> None:
    schema = "k bigint, n array<bigint>, total bigint"
    with Harness(Gathered(), int, key="k", schema=schema) as harness:
        assert (
            harness.process_batch(pa.table({"k": pa.array([], pa.int64()), "n": pa.array([], pa.int64())}))
            == []
        )
        many = pa.table({"k": pa.array(range(70_000)), "n": pa.array(range(70_000))})
        assert [row.k for row in harness.process_batch(many)] == list(range(70_000))


def test_a_key_that_fails_fails_the_batch() -> None:
    class Fails(Gathered):
        def process_rows(self, key: Any, rows: list[Any], ctx: sb.FunctionContext) -> Any:
            yield from super().process_rows(key, rows, ctx)
            if key == 2:
                raise ValueError("as told")

    with Harness(Fails(), int, key="k") as harness:
        with pytest.raises(ValueError, match="as told"):
            harness.process_batch([{"k": 1, "n": 1}, {"k": 2, "n": 1}])
        assert harness.keyed.num_entries() == 0
        assert harness.process_batch([{"k": 1, "n": 1}]) == [(1, [1], 1)]


def test_options_for_single_rows_are_refused() -> None:
    for options in (
        {"on_error": "route", "schema": {"main": "n int", "errors": "k bigint"}},
        {"event_time": sb.spark.EventTime("at", timers="in_order")},
    ):
        with pytest.raises(sb.UsageError, match="KeyedProcessFunction"):
            Harness(Gathered(), int, key="k", **options)


def test_state_in_event_time_goes_by_the_watermark_after_the_batch() -> None:
    class Expiring(sb.KeyRowsFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            ttl = sb.StateTtlConfig(
                10, ttl_time_characteristic=sb.StateTtlConfig.TtlTimeCharacteristic.EventTime
            )
            self.n = ctx.get_reducing_state(
                sb.ReducingStateDescriptor("n", "sum", int).enable_time_to_live(ttl)
            )

        def process_rows(self, key: Any, rows: list[Any], ctx: sb.FunctionContext) -> Any:
            self.n.add(len(rows))
            yield key, self.n.get(), ctx.watermark

    with Harness(Expiring(), int, key="k", event_time="at") as harness:
        assert harness.process_batch([{"k": 1, "at": 5}, {"k": 1, "at": 2}]) == [(1, 2, None)]
        assert harness.process_batch([{"k": 1, "at": 14}]) == [(1, 3, 5)]
        assert harness.process_batch([{"k": 1, "at": 24}]) == [(1, 1, 14)]
