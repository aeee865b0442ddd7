"""Whole-batch functions have what functions of single rows have: timers, broadcast rows, windows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import statebackend as sb
from statebackend.testing import Harness

SCHEMA = "user bigint, at bigint, total bigint"


class Chained(sb.BatchProcessFunction):
    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
        starts = pc.multiply(pc.divide(batch["at"], 100), 100)
        windows = pa.StructArray.from_arrays([starts, pc.add(starts, 100)], ["start", "end"])
        ctx.timer_service().register_processing_time_timers(ctx.keys, batch["at"], namespaces=windows)

    def on_timers(self, keys: Any, timestamps: Any, namespaces: Any, ctx: sb.FunctionContext) -> Any:
        with pytest.raises(sb.UsageError):
            _ = ctx.current_key
        assert ctx.current_namespace is sb.VOID
        early = pc.less(pc.subtract(timestamps, namespaces.field("start")), 3)
        if pc.any(early).as_py():
            later, windows = pc.add(timestamps, 1).filter(early), namespaces.filter(early)
            ctx.timer_service().register_processing_time_timers(keys.filter(early), later, namespaces=windows)
        ctx.current_namespace = "left over"
        return pa.record_batch({"user": keys, "at": timestamps, "total": namespaces.field("end")})


def test_timers_that_timers_register_fire_in_the_same_batch() -> None:
    with Harness(Chained(), key="user", schema=SCHEMA) as harness:
        harness.process_batch([{"user": 1, "at": 200}, {"user": 2, "at": 300}])
        given = [tuple(row) for row in harness.advance_processing_time(302)]
        assert given == [
            (1, 200, 300),
            (2, 300, 400),
            (1, 201, 300),
            (2, 301, 400),
            (1, 202, 300),
            (2, 302, 400),
            (1, 203, 300),
        ]
        assert harness.keyed.timers.count("processing") == 1
        assert [tuple(row) for row in harness.advance_processing_time(303)] == [(2, 303, 400)]


def test_the_watermark_that_fires_them_is_told() -> None:
    class Told(sb.BatchProcessFunction):
        def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
            ctx.timer_service().register_event_time_timers(ctx.keys, pc.add(batch["at"], 100))

        def on_timers(self, keys: Any, timestamps: Any, namespaces: Any, ctx: sb.FunctionContext) -> Any:
            watermarks = pa.array([ctx.watermark] * len(keys), pa.int64())
            return pa.record_batch({"user": keys, "at": timestamps, "total": watermarks})

    with Harness(Told(), key="user", schema=SCHEMA, event_time="at") as harness:
        assert harness.process_batch([{"user": 1, "n": 1, "at": 0}]) == []
        assert [tuple(row) for row in harness.process_batch([{"user": 2, "n": 1, "at": 500}])] == [
            (1, 100, 500)
        ]


def test_broadcast_rows_come_before_the_batch() -> None:
    class Rules(sb.BatchProcessFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            self.rules = ctx.operator_backend.get_broadcast_state(sb.MapStateDescriptor("rules", str, int))

        def process_broadcast(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
            assert isinstance(batch, pa.RecordBatch)
            for row in batch.to_pylist():
                self.rules.put("least", row["n"])
            return {"told": batch.select(["n"])}

        def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
            return batch.filter(pc.greater_equal(batch["n"], self.rules.get("least"))).select(["user", "n"])

    schema = {"main": "user bigint, n bigint", "told": "n bigint"}
    rows = [
        {"user": user, "n": n, "is_rule": rule}
        for user, n, rule in ((1, 3, False), (0, 4, True), (2, 5, False))
    ]
    with Harness(Rules(), key="user", schema=schema, broadcast_when="is_rule") as harness:
        assert [tuple(row) for row in harness.process_batch(rows)] == [(2, 5)]
        assert [tuple(row) for row in harness.outputs["told"]] == [(4,)]
        rows = [{"user": 3, "n": 4, "is_rule": False}]
        assert [tuple(row) for row in harness.process_batch(rows)] == [(3, 4)]


def test_methods_that_are_missing_are_named() -> None:
    class Bare(sb.BatchProcessFunction):
        def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
            ctx.timer_service().register_processing_time_timers(ctx.keys, batch["n"])

    with Harness(Bare(), key="user", broadcast_when="b") as harness:
        with pytest.raises(NotImplementedError, match="Bare registers timers but lacks on_timers"):
            harness.process_batch([{"user": 1, "n": 0, "b": False}])
        with pytest.raises(NotImplementedError, match="Bare lacks process_broadcast"):
            harness.process_batch([{"user": 1, "n": 0, "b": True}])
        assert harness.keyed.timers.count("processing") == 0


def test_event_timers_need_event_time() -> None:
    class Wrong(sb.BatchProcessFunction):
        def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
            ctx.timer_service().register_event_time_timers(ctx.keys, batch["n"])

    with Harness(Wrong(), key="user") as harness, pytest.raises(sb.UsageError, match="needs event time"):
        harness.process_batch([{"user": 1, "n": 0}])
