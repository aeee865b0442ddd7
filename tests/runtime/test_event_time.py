"""Both times of a batch through commits, restarts, faults and upgrades; what progress says of the rows' time."""

from __future__ import annotations

import errno
import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from event_days import DELAY, MINUTE, SCHEMA, START, Counts, Event, cut, day, in_event_time, table_of
from host_queries import rows_out
from pieces import either_way

import statebackend as sb
from statebackend.runtime import Batch, BatchSource, CommittedBatch, Job, Runner
from statebackend.runtime.batch_progress import Stopwatch, describe
from statebackend.runtime.start_checks import StartFrom
from statebackend.testing import ManualClock
from statebackend.types import STRING

__all__ = ["either_way"]


class Query:
    """A job on a store, opened anew as often as a test likes."""

    def __init__(self, folder: Path, function: Any, event_time: Any, **options: Any) -> None:
        self.folder, self.clock = folder, ManualClock(options.pop("now", START))
        self.options = {"key": "user", "schema": SCHEMA, "event_time": event_time, **options}
        self.function = function
        self.more: dict[str, Any] = {}
        self.runner: Runner | None = None

    def run(self, batch_id: int, table: pa.Table) -> CommittedBatch:
        if self.runner is None or not self.runner.is_open:
            job = Job(self.function, **self.options)
            self.runner = Runner(job, sb.CheckpointStore(self.folder), STRING, clock=self.clock, **self.more)
        return self.runner.run(batch_id, BatchSource(lambda: table), Stopwatch())

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()

    def times(self) -> tuple[int | None, int | None]:
        newest = sb.CheckpointStore(self.folder).open_latest()
        return newest.now, newest.watermark


def at(*minutes: float | None) -> pa.Table:
    """Rows of one user at these minutes."""
    events = [Event(number, "u", 0) for number in range(len(minutes))]
    times = [None if each is None else START + int(each * MINUTE) for each in minutes]
    return table_of(events).set_column(2, "at", pa.array(times, pa.timestamp("ms", "UTC")))


@pytest.fixture
def queries(tmp_path: Path) -> Iterator[Any]:
    made: list[Query] = []

    def make(name: str, *arguments: Any, **options: Any) -> Query:
        made.append(Query(tmp_path / name, *arguments, **options))
        return made[-1]

    yield make
    for query in made:
        query.close()


@pytest.mark.usefixtures("either_way")
def test_progress_and_manifest_count_late_rows_and_those_ahead(queries: Any) -> None:
    for late, dropped in (("keep", 0), ("drop", 3)):
        event_time = sb.EventTime("at", watermark_delay=MINUTE, late=late, max_ahead=60 * MINUTE)
        query = queries(late, Counts(), event_time)
        assert query.run(0, at(10, 5, None)).progress["numRowsLate"] == 0
        committed = query.run(1, at(8.5, 9, 61, -3, None, 20))
        for progress in (committed.progress, committed.checkpoint.manifest.progress):
            assert progress["numInputRows"] == 6
            assert (progress["numRowsLate"], progress["numRowsAhead"]) == (2, 1)
            assert progress["numRowsDroppedByWatermark"] == dropped
            assert progress["watermark"] == START + 19 * MINUTE
        assert committed.progress["numOutputRows"] == 6 - dropped
        assert "2 rows late, 1 ahead" in describe(
            {**committed.progress, "processedRowsPerSecond": 1.0, "commitTimeMs": 1.0}
        )
        again = query.run(1, at(8.5, 9, 61, -3, None, 20))
        assert again.is_replay
        assert again.progress["numRowsLate"] == 2
    without = queries("without", Plain(), None)
    assert not {"watermark", "numRowsLate"} & without.run(0, at(1)).progress.keys()


class Plain(sb.KeyedProcessFunction):
    """What a job without event time may do."""

    def open(self, ctx: sb.FunctionContext) -> None:
        ttl = sb.StateTtlConfig(10 * MINUTE)
        self.seen = ctx.get_value_state(sb.ValueStateDescriptor("seen", int).enable_time_to_live(ttl))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        yield ctx.current_key, ctx.now, [row.number, -1 if self.seen.value() is None else self.seen.value()]
        self.seen.update(row.number)
        ctx.timer_service().register_processing_time_timer(ctx.now + 5 * MINUTE)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        yield ctx.current_key, timestamp, []


def test_late_rows_with_a_null_key_or_in_broadcast_are_counted_as_that(queries: Any) -> None:
    job = Job(Plain(), key="user", event_time="at", broadcast_when="all", null_keys="drop")
    times = pa.array([0, 0, 5, 0, 2**62], pa.int64())
    table = pa.table(
        {"user": ["a", None, "a", "a", "a"], "all": [False, False, False, True, True], "at": times}
    )
    batch = Batch(job, table, watermark=3)
    assert (batch.dropped_rows, batch.num_late, batch.times.after) == (1, 1, 5)
    assert batch.times.own.tolist() == batch.rows["at"].to_pylist() == [0, 5]


@pytest.mark.usefixtures("either_way")
def test_both_times_come_through_faults(
    queries: Any, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits fail before or after they have happened, functions fail, the query is closed and opened."""
    events = day(rng, 400, ordered_by_user=True)
    batches = cut(events, 30)
    event_time = sb.EventTime("at", watermark_delay=DELAY // 10, late="drop", timers="between_rows")
    commit = sb.CheckpointStore.commit
    faults = itertools.count()

    def strikes(one_in: int) -> bool:
        return not rng.randrange(one_in) and bool(next(faults) + 1)

    class Failing(Counts):
        strikes = staticmethod(lambda one_in: False)

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
            if Failing.strikes(60):
                raise OSError(errno.EIO, "as told")
            yield from super().process_element(row, ctx)

    def commits(store: sb.CheckpointStore, *arguments: Any, **options: Any) -> Any:
        if Failing.strikes(6):
            raise OSError(errno.EIO, "as told")
        committed = commit(store, *arguments, **options)
        if Failing.strikes(6):
            raise OSError(errno.EIO, "as told, after the commit")
        return committed

    def run(query: Query) -> list[Any]:
        found = []
        for number, batch in enumerate(batches):
            query.clock.set(START + number * MINUTE)
            while True:
                try:
                    committed = query.run(number, table_of(batch))
                    break
                except OSError:
                    if rng.random() < 0.3:
                        query.close()
            figures = {name: committed.progress[name] for name in ("watermark", "numRowsLate")}
            found.append((query.times(), figures, sorted(rows_out(committed))))
        return found

    wanted = run(queries("calm", Failing(), event_time))
    monkeypatch.setattr(sb.CheckpointStore, "commit", commits)
    monkeypatch.setattr(Failing, "strikes", staticmethod(strikes))
    assert run(queries("faults", Failing(), event_time)) == wanted
    assert next(faults) > 10
    assert sum(figures["numRowsLate"] for _, figures, _ in wanted) > 10


class ByBoth(sb.KeyedProcessFunction):
    """State and timers of both kinds, as a job of an older version may have them."""

    def open(self, ctx: sb.FunctionContext) -> None:
        by_clock = sb.StateTtlConfig(10 * MINUTE)
        self.clock = ctx.get_value_state(sb.ValueStateDescriptor("clock", int).enable_time_to_live(by_clock))
        self.event = ctx.get_value_state(in_event_time(sb.ValueStateDescriptor("event", int), 10 * MINUTE))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield "row", ctx.watermark, [self.clock.value() or -1, self.event.value() or -1]
        self.clock.update(row.number + 1)
        self.event.update(row.number + 1)
        if ctx.batch_id == 0:
            ctx.timer_service().register_event_time_timer(START + 5 * MINUTE)
            ctx.timer_service().register_processing_time_timer(START + 5 * MINUTE)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield "timer", timestamp, []


def test_turning_event_time_on_warns_and_begins_without_a_watermark(
    queries: Any, caplog: pytest.LogCaptureFixture
) -> None:
    query = queries("store", Plain(), None)
    query.run(0, at(0))
    query.close()
    query.options["event_time"] = "at"
    with caplog.at_level(logging.WARNING):
        assert rows_out(query.run(1, at(-(10**6))))[0][1] == START
    assert "event_time= is turned on" in caplog.text
    assert query.times() == (START, START - 10**6 * MINUTE)
    query.close()
    caplog.clear()
    query.run(2, at(0))
    assert "turned on" not in caplog.text
    query.close()
    query.options["event_time"] = None
    query.run(3, at(10))
    assert query.times() == (START, START), "kept, should it come back"


def test_a_savepoint_has_both_times(queries: Any, tmp_path: Path) -> None:
    query = queries("store", ByBoth(), "at")
    query.run(0, at(0, 3))
    query.close()
    checkpoint = sb.CheckpointStore(query.folder).open_latest()
    made = sb.tools.savepoint(query.folder, tmp_path / "made")
    with sb.create_backend("heap").create_keyed_backend("string", restore=checkpoint) as keyed:
        written = keyed.savepoint(tmp_path / "written")
    for savepoint in (made, written):
        assert (savepoint.now, savepoint.watermark) == (START, START + 3 * MINUTE)
        again = Runner(
            Job(ByBoth(), key="user", schema=SCHEMA, event_time="at"),
            sb.CheckpointStore(tmp_path / f"again-{savepoint.uri.split('/')[-1]}"),
            STRING,
            clock=query.clock,
            start=StartFrom(savepoint),
        )
        try:
            committed = again.run(0, BatchSource(lambda: at(4)), Stopwatch())
            assert rows_out(committed) == [("row", START + 3 * MINUTE, [2, 2])]
        finally:
            again.close()


def test_a_stream_is_idle_up_to_the_plan_of_a_batch(tmp_path: Path) -> None:
    """A planned batch without rows that is run again after an outage says nothing of the rows that have come since."""
    clock = ManualClock(START)
    idle = sb.EventTime("at", late="drop", idle_after=5 * MINUTE)

    def runner() -> Runner:
        job = Job(Plain(), key="user", schema=SCHEMA, event_time=idle)
        return Runner(job, sb.CheckpointStore(tmp_path / "store"), STRING, clock=clock)

    def run(opened: Runner, batch_id: int, table: pa.Table, planned: int) -> CommittedBatch:
        identity = {"kind": "plan", "time": planned, "offsets": [batch_id]}
        return opened.run(batch_id, BatchSource(lambda: table, identity, lambda: None), Stopwatch())

    opened = runner()
    run(opened, 0, at(0), START)
    opened.close()  # killed in batch 1, which was planned a minute later, without rows
    clock.advance(121 * MINUTE)
    opened = runner()
    run(opened, 1, at(0).slice(0, 0), START + MINUTE)
    ran = run(opened, 2, at(*range(2, 121, 2)), START + 121 * MINUTE)
    assert ran.progress["numRowsDroppedByWatermark"] == 0
    clock.advance(10 * MINUTE)
    run(opened, 3, at(0).slice(0, 0), START + 131 * MINUTE)
    assert sb.CheckpointStore(tmp_path / "store").open_latest().watermark == START + (131 - 5) * MINUTE
    opened.close()
