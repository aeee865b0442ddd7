"""Timers of functions, run by the harness on the real backends: time of rows and of the clock, failures, order."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import statebackend as sb
from statebackend.testing import Harness, ManualClock

pytestmark = pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])

CLICK_SESSIONS = Path(__file__).parents[2] / "examples" / "spark" / "click_sessions.py"


class Reminders(sb.KeyedProcessFunction):
    """Registers what it is told to, and tells when it is called."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        for timestamp in row.at:
            ctx.timers.register(timestamp, row.domain)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield timestamp, ctx.current_key, ctx.now


def remind(*at: int, domain: str = "processing") -> dict[str, Any]:
    return {"at": at, "domain": domain}


def test_timers_fire_after_the_rows_of_the_batch(backend: str) -> None:
    with Harness(Reminders(), str, backend=backend) as harness:
        assert harness.process_element("b", remind(10, 20)) == []
        assert harness.process_element("a", remind(20)) == []
        assert harness.advance_time(9) == []
        assert harness.advance_time(20) == [(10, "b", 20), (20, "a", 20), (20, "b", 20)]
        assert harness.advance_time(1000) == []
        assert harness.process_element("c", remind(999)) == [(999, "c", 1000)]


def test_the_clock_of_a_job_moves_timers_in_processing_time(backend: str) -> None:
    clock = ManualClock(100)
    with Harness(Reminders(), str, backend=backend, clock=clock) as harness:
        harness.process_element("a", remind(150))
        clock.set(149)
        assert harness.process_element("b", remind()) == []
        clock.set(150)
        assert harness.process_element("b", remind()) == [(150, "a", 150)]


def test_event_time_comes_from_the_rows(backend: str) -> None:
    with Harness(
        Reminders(), str, key="user", event_time="time", delay=10, backend=backend, schema=None
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
    with Harness(Reminders(), str, backend=backend) as harness:
        with pytest.raises(sb.UsageError, match=r"timer in event time.*event_time="):
            harness.process_element("a", remind(1, domain="event"))
        with pytest.raises(sb.UsageError, match="'event' or 'processing'"):
            harness.process_element("a", remind(1, domain="wall"))


class Chain(sb.KeyedProcessFunction):
    """A timer of one domain registers one of the other, three times."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        ctx.timers.register(row.time_of_timer)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[int]:
        yield timestamp
        if timestamp < 3:
            ctx.timers.register(timestamp + 1, "processing" if timestamp % 2 else "event")


def test_what_is_registered_while_firing_fires_in_the_same_round(backend: str) -> None:
    table = pa.table(
        {
            "key": ["a"],
            "time_of_timer": [0],
            "time": pa.array([5000], pa.timestamp("ms", "UTC")),
        }
    )
    clock = ManualClock(10)
    with Harness(Chain(), str, key="key", event_time="time", clock=clock, backend=backend) as harness:
        assert harness.process_batch(table) == [0, 1, 2, 3]
        assert harness.keyed.timers.fired == 4


class FailsOnce(Reminders):
    fails = False

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield from super().on_timer(timestamp, ctx)
        if FailsOnce.fails and ctx.current_key == "b":
            raise ConnectionError("as told")


def test_a_failed_batch_returns_its_timers(backend: str) -> None:
    with Harness(FailsOnce(), str, backend=backend) as harness:
        harness.process_element("a", remind(10, 30))
        harness.process_element("b", remind(20))
        FailsOnce.fails = True
        with pytest.raises(ConnectionError, match="as told"):
            harness.advance_time(25)
        FailsOnce.fails = False
        assert harness.keyed.timers.count("processing") == 3
        assert harness.advance_time(25) == [(10, "a", 25), (20, "b", 25)]
        assert harness.advance_time(30) == [(30, "a", 30)]


class NoMethod(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        ctx.timers.register(0, "processing")


def test_what_became_due_while_a_job_was_down_fires_in_its_first_batch(backend: str) -> None:
    with Harness(Reminders(), str, backend=backend) as harness:
        harness.process_element("a", remind(10, 30, 50))
        harness.process_element("b", remind(20))
        checkpoint = harness.snapshot()
        assert harness.advance_time(20) == [(10, "a", 20), (20, "b", 20)]
        harness.restore(checkpoint)
        assert harness.keyed.timers.count("processing") == 4
        harness.clock.set(35)
        assert harness.process_element("c", remind(33)) == [
            (10, "a", 35),
            (20, "b", 35),
            (30, "a", 35),
            (33, "c", 35),
        ]
        harness.restart()
        assert harness.advance_time(100) == [(50, "a", 100)]


def test_a_function_that_registers_timers_has_on_timer(backend: str) -> None:
    with (
        Harness(NoMethod(), str, backend=backend) as harness,
        pytest.raises(NotImplementedError, match="NoMethod registers timers and has no on_timer"),
    ):
        harness.process_element("a", {"n": 1})


class Last(sb.BatchProcessFunction):
    """Keeps the last amount of each user for 100 ms, and gives what it had."""

    def open(self, ctx: sb.FunctionContext) -> None:
        descriptor = sb.ValueStateDescriptor("last", int)
        descriptor.enable_time_to_live(sb.StateTtlConfig.new_builder(100).build())
        self.last = ctx.get_value_state(descriptor)

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
        had = self.last.get_many(ctx.keys)
        self.last.update_many(ctx.keys, batch["amount"])
        return pa.record_batch({"user": batch["user"], "had": had})


def test_time_goes_on_for_a_batch_function(backend: str) -> None:
    rows = [{"user": "a", "amount": 7}]
    with Harness(Last(), str, key="user", backend=backend) as harness:
        assert [row.had for row in harness.process_batch(rows)] == [None]
        assert harness.advance_time(99) == []
        assert [row.had for row in harness.process_batch(rows)] == [7]
        assert harness.advance_time(199) == []
        assert [row.had for row in harness.process_batch(rows)] == [None]


@pytest.mark.parametrize("restarts", [False, True])
def test_sessions_of_clicks_are_those_of_a_loop(backend: str, tmp_path: Path, restarts: bool) -> None:
    spec = importlib.util.spec_from_file_location("click_sessions", CLICK_SESSIONS)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    clicks, users = (2_000, 1_200) if backend == "heap" else (100, 60)
    example.generate(tmp_path, batches=12, clicks=clicks, users=users)
    sessions: list[Any] = []
    with Harness(
        example.Sessions(),
        str,
        key="user",
        schema=example.SCHEMA,
        event_time="at",
        delay=example.LATE,
        order_by="at",
        backend=backend,
    ) as harness:
        for path in sorted((tmp_path / "in").iterdir()):
            sessions += map(tuple, harness.process_batch(pq.read_table(path)))
            if restarts:
                harness.restart()
        assert harness.keyed.timers.count() == 1, "of the click that ends the stream"
        if not restarts:  # after which no function has asked for its states
            assert harness.keyed.num_entries("pages") == 1
    assert len(sessions) > users
    assert sorted(sessions) == example.expected(tmp_path)
