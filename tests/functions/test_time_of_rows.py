"""What a function sees of the time of its rows: watermarks, lateness, expiry by each row's own time, order."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from event_days import in_event_time
from functions.conftest import each_way
from house_tools import ROOT, module

import statebackend as sb
from statebackend.backends.reference import ReferenceBackend, ReferenceKeyedBackend
from statebackend.runtime import Job
from statebackend.testing import Harness, ManualClock

pytestmark = [pytest.mark.usefixtures("either_way"), each_way]

TTL = 100


#: Rows come in their order, and timers after them.
AFTER = sb.EventTime("at", timers="after_batch")


def rows(*given: tuple[int, int | None], **more: list[Any]) -> pa.Table:
    columns = {"k": [key for key, _ in given], "at": pa.array([at for _, at in given], pa.int64())}
    return pa.table({**columns, **more})


class Looking(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield ctx.timestamp, ctx.watermark, ctx.now


def test_a_batch_has_the_clocks_time_and_the_watermark_before_it(backend: str) -> None:
    clock = ManualClock(7_000_000)
    with Harness(
        Looking(),
        key="k",
        event_time=sb.EventTime("at", watermark_delay=10, timers="after_batch"),
        clock=clock,
        backend=backend,
    ) as harness:
        assert harness.watermark is None
        assert harness.process_batch(rows((1, 50), (2, None), (3, 20))) == [
            (50, None, 7_000_000),
            (None, None, 7_000_000),
            (20, None, 7_000_000),
        ]
        assert harness.watermark == 40
        clock.set(8_000_000)
        assert harness.process_batch(rows((1, 30))) == [(30, 40, 8_000_000)]
        assert harness.process_batch(rows((1, None))) == [(None, 40, 8_000_000)]
        assert harness.process_batch(rows((1, 60))) == [(60, 40, 8_000_000)]
        harness.restart()
        clock.set(5)
        assert harness.process_batch(rows((1, -10))) == [(-10, 50, 8_000_000)]
        assert harness.process_element({"k": 1, "at": 75}) == [(75, 50, 8_000_000)]
        assert harness.process_element({"k": 1, "at": None}) == [(None, 65, 8_000_000)]


def test_times_are_timestamps_or_milliseconds(backend: str) -> None:
    for at, milliseconds in (
        (pa.array([1_700_000_000_123], pa.int64()), 1_700_000_000_123),
        (pa.array([1_700_000_000_123], pa.timestamp("ms", "UTC")), 1_700_000_000_123),
        (pa.array([1_700_000_000_123_999], pa.timestamp("us")), 1_700_000_000_123),
        (pa.array([1_700_000_000_123_999_999], pa.timestamp("ns", "Europe/Berlin")), 1_700_000_000_123),
        (pa.array([-1], pa.timestamp("us")), -1),
    ):
        with Harness(Looking(), key="k", event_time="at", backend=backend) as harness:
            assert harness.process_batch(pa.table({"k": [1], "at": at}))[0][0] == milliseconds
            assert harness.watermark == milliseconds


def test_columns_that_tell_no_time_are_refused(backend: str) -> None:
    with Harness(Looking(), key="k", event_time="at", backend=backend) as harness:
        for at in (["noon"], [1.5], pa.array([2**63], pa.uint64())):
            with pytest.raises(sb.UsageError, match="neither a timestamp nor"):
                harness.process_batch(pa.table({"k": [1], "at": at}))
        with pytest.raises(sb.UsageError, match="neither a timestamp nor"):
            harness.process_element({"k": 1, "at": "noon"})
        with pytest.raises(sb.UsageError, match="further from 1970"):
            harness.process_batch(rows((1, 2**62)))
        moment = datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.timezone.utc)
        assert harness.process_element({"k": 1, "at": moment})[0][0] == 1000


def test_late_rows_are_kept_or_dropped_or_fail_the_batch(backend: str) -> None:
    for late, wanted in (
        ("keep", [(30, 40, 0), (40, 40, 0), (None, 40, 0)]),
        ("drop", [(40, 40, 0), (None, 40, 0)]),
    ):
        event_time = sb.EventTime("at", watermark_delay=10, late=late, timers="after_batch")
        with Harness(Looking(), key="k", event_time=event_time, backend=backend) as harness:
            harness.process_batch(rows((1, 50)))
            assert harness.process_batch(rows((1, 30), (2, 40), (3, None))) == wanted
            kept = harness.process_element({"k": 1, "at": 39})
            assert kept == ([(39, 40, 0)] if late == "keep" else [])
    event_time = sb.EventTime("at", watermark_delay=10, late="fail")
    with Harness(Looking(), key="k", event_time=event_time, backend=backend) as harness:
        harness.process_batch(rows((1, 50)))
        with pytest.raises(sb.UsageError, match=r"1 rows are late.*\[USAGE.LATE_ROWS\]"):
            harness.process_batch(rows((1, 30), (2, 40), (3, None)))
        with pytest.raises(sb.UsageError, match=r"\[USAGE.LATE_ROWS\]"):
            harness.process_element({"k": 1, "at": 39})
        assert harness.process_batch(rows((2, 40))) == [(40, 40, 0)]


def test_times_far_ahead_of_the_clock_do_not_count(backend: str) -> None:
    clock = ManualClock(1000)
    far = datetime.timedelta(milliseconds=500)
    for late in ("keep", "drop"):
        event_time = sb.EventTime("at", max_ahead=far, late=late, timers="after_batch")
        with Harness(Looking(), key="k", event_time=event_time, clock=clock, backend=backend) as harness:
            given = harness.process_batch(rows((1, 1501), (1, 1500), (1, 10**17)))
            assert [at for at, *_ in given] == ([1501, 1500, 10**17] if late == "keep" else [1500])
            assert harness.watermark == 1500
            assert bool(harness.process_element({"k": 1, "at": 1501})) == (late == "keep")


def recipes_join() -> Any:
    """The join of the page of recipes, with the time to live that the page recommends for orders that wait."""
    pages = module(ROOT / "tests" / "house" / "test_docs.py", "pages")
    (join, *_) = pages.python_blocks((ROOT / "docs/build/recipes.md").read_text(encoding="utf-8"))
    waiting = 'sb.ListStateDescriptor("waiting", "struct<order:bigint,amount:bigint>")'
    assert waiting in join.code
    names: dict[str, Any] = {"in_event_time": in_event_time}
    exec(join.code.replace(waiting, f"in_event_time({waiting}, 30)"), names)
    return names["Join"]()


def test_the_join_of_the_recipes_finds_orders_that_wait_and_have_not_expired(backend: str) -> None:
    given = [
        {"side": side, "customer": customer, "name": "ann", "order": number, "amount": 5, "at": at}
        for number, (side, customer, at) in enumerate(
            [
                ("order", 1, 0),
                ("order", 2, 0),
                ("order", 1, 35),  # the watermark is 25
                ("customer", 1, 28),  # comes late and on time
                ("customer", 2, 30),  # comes when the order has expired
                ("order", 1, 27),
                ("order", 2, 36),
            ]
        )
    ]
    join, event_time = recipes_join(), sb.EventTime("at", watermark_delay=10, timers="after_batch")
    for size in (1, 2, 7):
        with Harness(join, key="customer", event_time=event_time, backend=backend) as harness:
            batches = (given[at : at + size] for at in range(0, len(given), size))
            found = [row for batch in batches for row in harness.process_batch(batch)]
        assert found == [("ann", 0, 5), ("ann", 2, 5), ("ann", 5, 5), ("ann", 6, 5)], size


class Seen(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.seen = ctx.get_value_state(in_event_time(sb.ValueStateDescriptor("seen", int), TTL))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield self.seen.value() is not None
        self.seen.update(1)


def test_single_row_uses_its_own_time(backend: str) -> None:
    with Harness(
        Seen(), key="k", event_time=sb.EventTime("at", watermark_delay=5000), backend=backend
    ) as harness:
        given = [(1, 1000), (2, 1150), (1, 1099), (1, 1199)]
        seen = [harness.process_element({"k": key, "at": at}) for key, at in given]
        assert seen == [[False], [False], [True], [False]]


def test_rows_without_a_time_use_the_watermark_after_the_batch(backend: str) -> None:
    with Harness(Seen(), key="k", event_time="at", backend=backend) as harness:
        assert harness.process_batch(rows((1, None), (2, 1000))) == [False, False]  # 1 is stamped with 1000
        assert harness.process_batch(rows((1, None), (2, 1099))) == [True, True]  # with 1099
        assert harness.process_batch(rows((2, 1198), (1, None))) == [True, True]
        assert harness.process_batch(rows((2, 1297), (1, None))) == [True, True]
        assert harness.process_batch(rows((1, None), (2, 1397))) == [False, False]


def test_times_far_ahead_use_the_watermark_too(backend: str) -> None:
    event_time, clock = sb.EventTime("at", max_ahead=100), ManualClock(1000)
    with Harness(Seen(), key="k", event_time=event_time, clock=clock, backend=backend) as harness:
        assert harness.process_batch(rows((1, 1000), (1, 9000), (1, 1050))) == [False, True, True]
        assert harness.process_batch(rows((1, 1100))) == [True]


def test_nothing_expires_before_the_first_watermark(backend: str) -> None:
    with Harness(Seen(), key="k", event_time="at", backend=backend) as harness:
        for n in range(3):
            harness.clock.advance(datetime.timedelta(days=n))
            assert harness.process_batch(rows((1, None))) == [n > 0]


class Ticking(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.seen = ctx.get_value_state(in_event_time(sb.ValueStateDescriptor("seen", int), TTL))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield ctx.timestamp, self.seen.value()
        self.seen.update(row.at)
        for timer in row.timers or ():
            ctx.timer_service().register_event_time_timer(timer)
        if row.processing is not None:
            ctx.timer_service().register_processing_time_timer(row.processing)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield timestamp, ctx.timestamp, self.seen.value()
        if self.seen.value() is not None:
            self.seen.update(timestamp)


def ticks(*given: tuple[int, int, list[int], int | None]) -> pa.Table:
    return pa.table(
        {
            "k": [key for key, *_ in given],
            "at": [at for _, at, *_ in given],
            "timers": pa.array([timers for *_, timers, _ in given], pa.list_(pa.int64())),
            "processing": pa.array([processing for *_, processing in given], pa.int64()),
        }
    )


def test_a_timer_sees_state_at_its_own_time(backend: str) -> None:
    clock = ManualClock(5)
    with Harness(Ticking(), key="k", event_time=AFTER, clock=clock, backend=backend) as harness:
        # The watermark jumps from nothing to 9000; the timers of key 1 are of long before.
        assert harness.process_batch(ticks((1, 1000, [1099, 1198, 1298, 9001], 3), (2, 9000, [], None))) == [
            (1000, None),
            (9000, None),
            (1099, 1099, 1000),
            (1198, 1198, 1099),
            (1298, 1298, None),
            (3, None, None),  # in processing time: by the watermark after the batch
        ]
        assert harness.process_batch(ticks((2, 9001, [], None))) == [(9001, 9000), (9001, 9001, None)]
        assert harness.keyed.timers.count("event") == 0


def test_timers_in_order_fire_between_rows(backend: str) -> None:
    batch = ticks(
        (1, 1000, [1050, 1100], None), (1, 1210, [], None), (2, 1500, [1400], None), (1, 1160, [], None)
    )
    late = sb.EventTime("at", watermark_delay=60, timers="after_batch")
    in_order = sb.EventTime("at", watermark_delay=60)
    with Harness(Ticking(), key="k", event_time=late, backend=backend) as harness:
        assert harness.process_batch(batch) == [
            (1000, None),
            (1210, None),
            (1500, None),
            (1160, 1210),  # older than what it sees
            (1050, 1050, 1160),
            (1100, 1100, 1050),
            (1400, 1400, 1500),
        ]
    with Harness(Ticking(), key="k", event_time=in_order, backend=backend) as harness:
        assert harness.process_batch(batch) == [
            (1000, None),
            (1050, 1050, 1000),
            (1100, 1100, 1050),  # by 1160 - 60
            (1160, 1100),
            (1210, 1160),
            (1500, None),
            (1400, 1400, 1500),
        ]


def test_a_timer_is_due_before_the_row_whose_time_less_the_delay_is_its_own(backend: str) -> None:
    in_order = sb.EventTime("at", watermark_delay=60)
    for at, fires_before in ((1159, False), (1160, True)):
        with Harness(Ticking(), key="k", event_time=in_order, backend=backend) as harness:
            batch = ticks((1, 1000, [1100], None), (1, at, [], None), (2, 5000, [], None))
            times = [time for time, *_ in harness.process_batch(batch)]
            assert (times.index(1100) < times.index(at)) == fires_before


class Minutely(sb.KeyedProcessFunction):
    """A timer that registers the next one by the watermark, a few times more than any batch may fire."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.fired = 0

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        timers = ctx.timer_service()
        assert (timers.current_watermark(), ctx.time_domain) == (ctx.watermark, None)
        yield "row", ctx.timestamp, ctx.watermark
        if row.at == 1000:
            timers.register_event_time_timer(1000)
            timers.register_processing_time_timer(10)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        assert ctx.time_domain == ("processing" if ctx.timestamp is None else "event")
        assert ctx.timer_service().current_watermark() == ctx.watermark
        assert ctx.timer_service().current_processing_time() == ctx.now
        yield "timer", timestamp, ctx.watermark
        self.fired += 1
        if ctx.timestamp is not None and self.fired < 20:
            assert ctx.watermark is not None
            ctx.timer_service().register_event_time_timer(ctx.watermark + 60)


def test_a_timer_has_the_watermark_that_fires_it(backend: str) -> None:
    clock = ManualClock(10)
    with Harness(Minutely(), key="k", event_time=AFTER, clock=clock, backend=backend) as harness:
        first = [("row", 1000, None), ("row", 1100, None), ("timer", 1000, 1100), ("timer", 10, None)]
        assert harness.process_batch(rows((1, 1000), (2, 1100))) == first
        assert harness.keyed.timers.next_due("event") == 1160
        assert harness.process_batch(rows((2, 1159))) == [("row", 1159, 1100)]
        assert harness.process_batch(rows((2, 5000))) == [("row", 5000, 1159), ("timer", 1160, 5000)]
        assert harness.advance_watermark(5060) == [("timer", 5060, 5060)]


def test_between_rows_a_timer_has_the_watermark_of_the_next_row(backend: str) -> None:
    in_order = sb.EventTime("at", watermark_delay=10, timers="between_rows")
    with Harness(Minutely(), key="k", event_time=in_order, backend=backend) as harness:
        assert harness.process_batch(rows((1, 1000), (2, 1130), (2, 1005), (2, 1200))) == [
            ("row", 1000, None),
            ("row", 1005, None),
            ("timer", 1000, 1120),
            ("row", 1130, None),
            ("timer", 1180, 1190),
            ("row", 1200, None),
        ]
        # Late rows come before the watermark, which never falls.
        assert harness.process_batch(rows((1, 1000), (2, 1195), (2, 1300))) == [
            ("row", 1000, 1190),
            ("timer", 1000, 1190),
            ("row", 1195, 1190),
            ("timer", 1250, 1290),
            ("row", 1300, 1190),
        ]


def test_a_batch_ends_with_a_cleanup_by_the_watermark_after_it(backend: str) -> None:
    class Idle(Seen):
        def open(self, ctx: sb.FunctionContext) -> None:
            descriptor = sb.ValueStateDescriptor("seen", int)
            self.seen = ctx.get_value_state(in_event_time(descriptor, TTL, cleanup_idle=True))

    with Harness(Idle(), key="k", event_time="at", backend=backend) as harness:
        harness.process_batch(rows(*((key, 1000) for key in range(50)), (99, 1099)))
        assert harness.keyed.num_entries("seen") == 51
        harness.process_batch(rows((99, 1100)))
        assert harness.keyed.num_entries("seen") == 1


def test_rows_come_in_order_of_their_times_nulls_first_and_then_by_the_order_given(backend: str) -> None:
    class Order(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
            yield ctx.timestamp, row.n

    given = rows((1, 30), (1, None), (1, 10), (1, 30), (1, None), n=[5, 4, 3, 2, 1])
    in_order = "at"
    with Harness(Order(), key="k", event_time=in_order, order_by="n", backend=backend) as harness:
        assert harness.process_batch(given) == [(None, 1), (None, 4), (10, 3), (30, 2), (30, 5)]
    with Harness(Order(), key="k", event_time=in_order, backend=backend) as harness:
        assert harness.process_batch(given) == [(None, 4), (None, 1), (10, 3), (30, 5), (30, 2)]
    with Harness(Order(), key="k", event_time=AFTER, order_by="n", backend=backend) as harness:
        assert [at for at, _ in harness.process_batch(given)] == [None, 30, 10, None, 30]


def test_a_batch_of_many_pieces_has_the_times_of_its_rows(backend: str, either_way: int | None) -> None:
    """A batch that comes whole is cut after 65,536 rows; one that comes in pieces has a row in each."""
    n = 2_000 if either_way else 70_000
    at = list(range(n, 0, -1))
    with Harness(Looking(), key="k", event_time=AFTER, backend=backend) as harness:
        parts = [rows(*((1, each) for each in at[begin : begin + 40_000])) for begin in range(0, n, 40_000)]
        given = harness.process_batch(pa.concat_tables(parts))
        assert [each for each, *_ in given] == at


class Broadcasting(Seen):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield ctx.timestamp
        yield from super().process_element(row, ctx)

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield ctx.timestamp, sorted(ctx.keyed_backend.keys("seen"))


def test_broadcast_rows_are_never_late_and_move_nothing(backend: str) -> None:
    def batch(*given: tuple[int, int | None, bool]) -> list[Any]:
        flags = [flag for *_, flag in given]
        return harness.process_batch(rows(*((key, at) for key, at, _ in given), everywhere=flags))

    event_time = sb.EventTime("at", late="drop")
    with Harness(
        Broadcasting(), key="k", event_time=event_time, broadcast_when="everywhere", backend=backend
    ) as harness:
        assert batch((1, 1000, False), (0, 9**9, True)) == [(9**9, []), 1000, False]
        assert harness.watermark == 1000
        assert batch((0, 10, True), (2, 10, False)) == [(10, [1])]
        # It sees state by the watermark after its batch.
        assert batch((0, None, True), (2, 1099, False)) == [(None, [1]), 1099, False]
        assert batch((0, None, True), (3, 1100, False)) == [(None, [2]), 1100, False]


class Columns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.n = ctx.get_reducing_state(in_event_time(sb.ReducingStateDescriptor("n", "sum", int), TTL))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
        assert ctx.timestamp is None
        watermark = pa.array([ctx.watermark] * batch.num_rows, pa.int64())
        columns = {"n": self.n.get_many(ctx.keys), "watermark": watermark}
        self.n.add_many(ctx.keys, batch["at"])
        return pa.record_batch(columns)


def test_whole_batches_use_the_watermark_after_them(backend: str) -> None:
    with Harness(Columns(), key="k", event_time="at", backend=backend) as harness:
        harness.process_batch(rows((1, 10), (2, 1000)))
        assert tuple(harness.process_batch(rows((1, 0), (3, 1099)))[0]) == (10, 1000)
        assert tuple(harness.process_batch(rows((2, 0), (3, 1100)))[0]) == (None, 1099)


def test_processing_time_to_live_uses_the_clock(backend: str) -> None:
    class ByClock(sb.KeyedProcessFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            ttl = sb.StateTtlConfig(TTL)
            self.n = ctx.get_value_state(sb.ValueStateDescriptor("n", int).enable_time_to_live(ttl))

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
            yield self.n.value()
            self.n.update(row.at)

    with Harness(ByClock(), key="k", event_time="at", backend=backend) as harness:
        assert harness.process_batch(rows((1, 1000), (1, 10**9))) == [None, 1000]
        harness.clock.advance(TTL - 1)
        assert harness.process_batch(rows((1, 10**10))) == [10**9]
        harness.clock.advance(TTL)
        assert harness.process_batch(rows((1, 10**10))) == [None]


def test_a_failed_batch_leaves_the_watermark(backend: str, tmp_path: Path) -> None:
    fails_to_open = [False]

    class Fails(Seen):
        def open(self, ctx: sb.FunctionContext) -> None:
            super().open(ctx)
            if fails_to_open[0]:
                raise ValueError("as told")

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
            yield from super().process_element(row, ctx)
            if row.at == 666:
                raise ValueError("as told")

    with Harness(Fails(), key="k", event_time="at", backend=backend) as harness:
        harness.process_batch(rows((1, 600)))
        with pytest.raises(ValueError, match="as told"):
            harness.process_batch(rows((2, 9000), (1, 666)))
        assert harness.watermark == harness.keyed.savepoint(tmp_path / "after rows").watermark == 600
        fails_to_open[0] = True
        with pytest.raises(ValueError, match="as told"):
            harness.process_batch(rows((2, 9000)))
        assert harness.keyed.savepoint(tmp_path / "after open").watermark == 600
        assert list(harness.keyed.keys("seen")) == [1]
        fails_to_open[0] = False
        assert harness.process_batch(rows((2, 650), (1, 650))) == [False, True]


class WithoutTheTimeOfRows(ReferenceKeyedBackend):
    """As a backend of another package that was written before rows had a time."""

    begin = sb.KeyedStateBackend.begin
    set_event_time = sb.KeyedStateBackend.set_event_time


class Older(ReferenceBackend):
    def create_keyed_backend(self, key_type: Any, **options: Any) -> WithoutTheTimeOfRows:
        return WithoutTheTimeOfRows(key_type, **options)


def test_backend_without_the_time_of_rows_refuses_state_that_needs_it(backend: str) -> None:
    with Harness(Seen(), key="k", event_time="at", backend=Older()) as harness:
        with pytest.raises(sb.UsageError, match="WithoutTheTimeOfRows lacks event time") as caught:
            harness.process_batch(rows((1, 1000)))
        assert caught.value.code == "USAGE.NOT_AVAILABLE"
    with Harness(Looking(), key="k", event_time="at", backend=Older()) as harness:
        assert harness.process_batch(rows((1, 1000))) == [(1000, None, 0)]


def test_options_that_make_no_sense_are_refused(backend: str) -> None:
    def job(event_time: Any, function: Any = None, **options: Any) -> Job:
        return Job(function or Looking(), key="k", event_time=event_time, backend=backend, **options)

    delayed = sb.EventTime("at", watermark_delay=datetime.timedelta(seconds=1))
    assert job(delayed).event_time == sb.EventTime("at", watermark_delay=1000)
    assert job("at").event_time == sb.EventTime("at")
    for wrong, options in (
        ("watermark_delay", {"watermark_delay": -1}),
        ("watermark_delay", {"watermark_delay": 1.5}),
        ("max_ahead", {"max_ahead": -1}),
        ("late is not a rule", {"late": None}),
        ("unknown timers='sometimes'; expected 'between_rows' or", {"timers": "sometimes"}),
    ):
        with pytest.raises(sb.UsageError, match=wrong):
            sb.EventTime("at", **options)  # type: ignore[arg-type]
    with pytest.raises(sb.UsageError, match=r"output of that name.*\[USAGE\.NO_OUTPUT\]"):
        job(sb.EventTime("at", late=sb.to_output("an_output")))
    for column in (7, ""):
        with pytest.raises(sb.UsageError, match="name of a column"):
            sb.EventTime(column)  # type: ignore[arg-type]
    with pytest.raises(sb.UsageError, match="name of a column"):
        job(7)
    with pytest.raises(sb.UsageError, match="between_rows.*KeyedProcessFunction"):
        job(sb.EventTime("at", timers="between_rows"), Columns())
    with (
        Harness(Looking(), key="k", backend=backend) as harness,
        pytest.raises(sb.UsageError, match="watermark needs rows"),
    ):
        harness.advance_watermark(1)


def test_the_harness_lets_time_pass(backend: str) -> None:
    with Harness(Ticking(), key="k", event_time="at", backend=backend) as harness:
        harness.process_batch(ticks((1, 1000, [1050, 2000], 70)))
        assert harness.advance_watermark(1050) == [(1050, 1050, 1000)]
        assert (harness.clock.now(), harness.watermark) == (0, 1050)
        assert harness.advance_watermark(0) == []
        assert harness.advance_processing_time(2000) == [(70, None, 1050)]
        assert (harness.clock.now(), harness.watermark) == (2000, 1050)
        assert harness.advance_watermark(2000) == [(2000, 2000, None)]


@pytest.mark.parametrize("restarts", [False, True])
def test_in_a_harness_the_watermark_follows_the_clock_without_rows(backend: str, restarts: bool) -> None:
    """As in a query: when rows with a time last came, outlives a restart, and a late row counts as one."""
    clock, idle = ManualClock(1000), sb.EventTime("at", watermark_delay=10, late="drop", idle_after=500)
    with Harness(Looking(), key="k", event_time=idle, clock=clock, backend=backend) as harness:

        def step(now: int, *given: tuple[int, int | None]) -> int | None:
            clock.set(now)
            if len(given) == 1:
                ((key, at),) = given
                harness.process_element({"k": key, "at": at})
            else:
                harness.process_batch(rows(*given))
            if restarts and backend != "reference":
                harness.restart()
            return harness.watermark

        assert step(1000, (1, 990), (1, None)) == 980
        assert step(1499) == 980
        assert step(1500) == 990
        assert step(1600, (1, None)) == 1090
        assert step(1700, (1, 5)) == 1090, "the late row tells that the stream goes on"
        assert step(2199, (1, None), (2, None)) == 1090
        assert step(2300, (1, None)) == 1790
