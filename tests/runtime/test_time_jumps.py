"""A clock that is wrong fails the batch before anything expires, and a store can be given another time."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.runtime import BatchSource, Job, Runner
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.testing import ManualClock
from statebackend.types import STRING

DAY = 86_400_000
START = 1_700_000_000_000


class Seen(sb.KeyedProcessFunction):
    """How often each user was seen within a year; and a timer an hour later."""

    def open(self, ctx: sb.FunctionContext) -> None:
        ttl = sb.StateTtlConfig(datetime.timedelta(days=365), cleanup_idle=True)
        self.n = ctx.get_reducing_state(sb.ReducingStateDescriptor("n", "sum", int).enable_time_to_live(ttl))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.n.add(1)
        ctx.timer_service().register_processing_time_timer(ctx.now + 3_600_000)
        yield row.user, self.n.get()

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield "timer", timestamp


class Years:
    """Runs batches of one row on a store, opened anew each time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock(START)
        self.next = 0
        self.options: dict[str, Any] = {}

    def run(self, at: int | None = None, **job: Any) -> int:
        """The number that the user has been seen."""
        store = sb.CheckpointStore(self.folder, **self.options)
        made = Job(Seen(), key="user", schema="user string, n bigint", **job)
        with closing(Runner(made, store, STRING, clock=self.clock)) as runner:
            table = pa.table({"user": ["a"], "at": [self.clock.now() if at is None else at]})
            runner.run(self.next, BatchSource(lambda: table), Stopwatch())
            self.next += 1
            return sb.tools.state(self.folder, "n").to_table()["value"].to_pylist()[0]


@pytest.fixture
def years(tmp_path: Path) -> Years:
    return Years(tmp_path / "store")


def now_of(years: Years) -> int | None:
    return sb.CheckpointStore(years.folder).open_latest().now


def watermark_of(years: Years) -> int | None:
    return sb.CheckpointStore(years.folder).open_latest().watermark


def test_a_clock_that_jumps_ahead_changes_nothing(years: Years) -> None:
    assert [years.run(), years.run()] == [1, 2]
    for days in (31, 3650):
        years.clock.set(START + days * DAY)
        with pytest.raises(sb.UsageError, match=f"{days:,} days ahead") as caught:
            years.run()
        assert caught.value.code == "USAGE.CLOCK_JUMP"
        assert "set_time" in str(caught.value.hint)
    years.clock.set(START + 29 * DAY)
    assert years.run() == 3
    assert now_of(years) == START + 29 * DAY


def test_a_query_that_really_paused_goes_on_after_set_time(years: Years) -> None:
    years.run()
    years.clock.set(START + 100 * DAY)
    sb.tools.set_time(years.folder, now=START + 100 * DAY - 1)
    assert years.run() == 2
    years.clock.set(START + 200 * DAY)
    years.options["max_clock_jump"] = datetime.timedelta(days=101)
    assert years.run() == 3
    years.clock.set(START + 600 * DAY)
    years.options["max_clock_jump"] = None
    assert years.run() == 1  # a year has passed: it is forgotten


def test_time_that_ran_ahead_is_set_back(years: Years, caplog: pytest.LogCaptureFixture) -> None:
    years.run()
    years.options["max_clock_jump"] = None
    years.clock.set(START + 3650 * DAY)
    assert years.run() == 1
    years.clock.set(START + DAY)
    del years.options["max_clock_jump"]
    years.run()
    assert "3,649 days behind" in caplog.text
    assert now_of(years) == START + 3650 * DAY, "time stands still"
    times = sb.tools.set_time(
        years.folder, now=datetime.datetime.fromtimestamp((START + DAY) / 1000, datetime.timezone.utc)
    )
    assert times.now == now_of(years) == START + DAY
    years.clock.set(START + 2 * DAY)
    assert years.run() == 3
    assert now_of(years) == START + 2 * DAY


def test_jumps_of_the_clock_are_checked_and_jumps_of_rows_are_not(years: Years) -> None:
    """A stream of events may rest for as long as it likes."""
    for days in (0, 100, 90, 10_000):
        years.run(event_time="at", at=START + days * DAY)
    years.clock.set(START + 31 * DAY)
    with pytest.raises(sb.UsageError, match="31 days ahead"):
        years.run(event_time="at", at=5)
    assert (now_of(years), watermark_of(years)) == (START, START + 10_000 * DAY)


def test_the_watermark_of_a_store_is_set(years: Years) -> None:
    years.run(event_time="at", at=START + 10_000 * DAY)
    times = sb.tools.set_time(years.folder, watermark=START)
    assert (times.now, times.watermark) == (START, START)
    years.run(event_time="at", at=START - 7)
    assert watermark_of(years) == START
    sb.tools.set_time(
        years.folder, now=START + 5, watermark=datetime.datetime.fromtimestamp(0, datetime.timezone.utc)
    )
    years.run(event_time="at", at=9)
    assert (now_of(years), watermark_of(years)) == (START + 5, 9)


def test_values_that_are_not_times_are_refused(years: Years) -> None:
    with pytest.raises(sb.UsageError, match="there is no store"):
        sb.tools.set_time(years.folder, now=1)
    years.run()
    for wrong in (1.5, "1", True, 10**18, None):
        with pytest.raises(sb.UsageError, match="now is a number"):
            sb.tools.set_time(years.folder, now=wrong)  # type: ignore[arg-type]
    with pytest.raises(sb.UsageError, match="needs a time zone"):
        sb.tools.set_time(years.folder, now=datetime.datetime(2024, 1, 1))
    with pytest.raises(sb.UsageError, match="watermark is a number"):
        sb.tools.set_time(years.folder, watermark=1.5)  # type: ignore[arg-type]
    for wrong in (0, -1, 1.5, "x"):
        with pytest.raises(sb.UsageError, match="max_clock_jump"):
            sb.CheckpointStore(years.folder, max_clock_jump=wrong)
    assert now_of(years) == START
