"""Timers of functions, run by the harness on the real backends: time of rows and of the clock, failures, order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.state import Timers
from statebackend.testing import Harness, ManualClock

pytestmark = pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])


class Reminders(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        for timestamp in row.at:
            getattr(ctx.timer_service(), f"register_{row.domain}_time_timer")(timestamp)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield timestamp, ctx.current_key, ctx.now


def remind(*at: int, domain: str = "processing") -> dict[str, Any]:
    return {"at": at, "domain": domain}


def test_timers_fire_after_the_rows_of_the_batch(backend: str) -> None:
    with Harness(Reminders(), key="user", backend=backend) as harness:
        assert harness.process_element({"user": "b", **remind(10, 20)}) == []
        assert harness.process_element({"user": "a", **remind(20)}) == []
        assert harness.advance_processing_time(9) == []
        assert harness.advance_processing_time(20) == [(10, "b", 20), (20, "a", 20), (20, "b", 20)]
        assert harness.advance_processing_time(1000) == []
        assert harness.process_element({"user": "c", **remind(999)}) == [(999, "c", 1000)]


def test_event_time_comes_from_the_rows(backend: str) -> None:
    with Harness(
        Reminders(),
        key="user",
        event_time=sb.EventTime("time", watermark_delay=10),
        backend=backend,
        schema=None,
    ) as harness:

        def batch(user: str, seconds: int, *at: int, domain: str = "event") -> list[Any]:
            return harness.process_batch(
                pa.table(
                    {
                        "user": [user],
                        "time": pa.array([seconds * 1000], pa.timestamp("ms", "UTC")),
                        "at": pa.array([list(at)], pa.list_(pa.int64())),
                        "domain": [domain],
                    }
                )
            )

        assert batch("a", 1, 2000) == []
        assert batch("b", 2) == []
        assert batch("b", 3, 5000, domain="processing") == [(2000, "a", 0)]
        assert batch("b", 6) == []
        harness.clock.set(5000)
        assert batch("b", 6) == [(5000, "b", 5000)]


def test_event_time_without_a_column_is_refused(backend: str) -> None:
    class Refused(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
            timers = ctx.timer_service()
            for name in [each for each in dir(Timers) if "event_time_timer" in each]:
                with pytest.raises(sb.UsageError, match=r"timer in event time.*event_time=.*NO_EVENT_TIME"):
                    getattr(timers, name)(1)
            assert (timers.current_watermark(), timers.current_processing_time()) == (None, ctx.now)
            timers.register_processing_time_timers(["a", "b"], [90, 91])
            timers.delete_processing_time_timers(["b"], [91])
            timers.register_processing_time_timer(80)
            timers.delete_processing_time_timer(80)
            assert timers.pending_processing_time_timers() == [90]

    with Harness(Refused(), key="user", backend=backend) as harness:
        harness.process_element({"user": "a"})
        assert harness.keyed.timers.count("processing") == 1


class Chain(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        ctx.timer_service().register_event_time_timer(row.time_of_timer)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[int]:
        yield timestamp
        if timestamp < 3:
            timers = ctx.timer_service()
            register = (timers.register_event_time_timer, timers.register_processing_time_timer)
            register[timestamp % 2](timestamp + 1)


def test_timer_registered_while_firing_fires_in_the_same_round(backend: str) -> None:
    table = pa.table(
        {"key": ["a"], "time_of_timer": [0], "time": pa.array([5000], pa.timestamp("ms", "UTC"))}
    )
    clock = ManualClock(10)
    with Harness(Chain(), key="key", event_time="time", clock=clock, backend=backend) as harness:
        assert harness.process_batch(table) == [0, 1, 2, 3]
        assert harness.keyed.timers.fired == 4


class FailsOnce(Reminders):
    fails = False

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield from super().on_timer(timestamp, ctx)
        if FailsOnce.fails and ctx.current_key == "b":
            raise ConnectionError("as told")


def test_a_failed_batch_returns_its_timers(backend: str) -> None:
    with Harness(FailsOnce(), key="user", backend=backend) as harness:
        harness.process_element({"user": "a", **remind(10, 30)})
        harness.process_element({"user": "b", **remind(20)})
        FailsOnce.fails = True
        with pytest.raises(ConnectionError, match="as told"):
            harness.advance_processing_time(25)
        FailsOnce.fails = False
        assert harness.keyed.timers.count("processing") == 3
        assert harness.advance_processing_time(25) == [(10, "a", 25), (20, "b", 25)]
        assert harness.advance_processing_time(30) == [(30, "a", 30)]
