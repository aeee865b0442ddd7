"""A day of events that come in disorder, and functions over it that place rows by their own time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

import statebackend as sb

MINUTE = 60_000
DAY = 24 * 60 * MINUTE
START = 1_700_000_000_000
#: No event comes later than this after the newest before it.
DELAY = 20 * MINUTE
GAP = 15 * MINUTE
SIZE = 30 * MINUTE
USERS = [f"u{number}" for number in range(7)]


class Event(NamedTuple):
    """An event of a user; ``number`` is its own."""

    number: int
    user: str
    at: int


def table_of(events: list[Event]) -> pa.Table:
    columns = {
        "number": pa.array([event.number for event in events], pa.int64()),
        "user": pa.array([event.user for event in events], pa.string()),
        "at": pa.array([1000 * event.at for event in events], pa.timestamp("us", "UTC")),
    }
    return pa.table(columns)


def day(rng: random.Random, n: int, *, ordered_by_user: bool) -> list[Event]:
    """Events in the order in which they come. Users lag behind each other; one's own events may change places, too."""
    lag = {user: rng.randrange(DELAY) for user in USERS}
    bursts = [rng.randrange(DAY) for _ in range(n // 12)]
    coming = []
    for number in range(n):
        at = (
            min(DAY - 1, rng.choice(bursts) + rng.randrange(GAP))
            if rng.random() < 0.8
            else rng.randrange(DAY)
        )
        user = rng.choice(USERS)
        late = lag[user] if ordered_by_user else rng.randrange(DELAY)
        coming.append((at + late, at, number, Event(number, user, START + at)))
    return [event for *_, event in sorted(coming)]


def cut(events: list[Event], batches: int) -> list[list[Event]]:
    """The events in so many batches of about one size."""
    bounds = [len(events) * number // batches for number in range(batches + 1)]
    return [events[begin:end] for begin, end in itertools.pairwise(bounds)]


def cut_at_random(events: list[Event], rng: random.Random) -> list[list[Event]]:
    """The events in batches of any sizes, some of them empty."""
    bounds = sorted(rng.choices(range(len(events) + 1), k=rng.randrange(1, 30)))
    bounds = [0, *bounds, len(events)]
    return [events[begin:end] for begin, end in itertools.pairwise(bounds)]


def in_event_time(descriptor: Any, ttl: int, **options: Any) -> Any:
    event_time = sb.StateTtlConfig.TtlTimeCharacteristic.EventTime
    return descriptor.enable_time_to_live(
        sb.StateTtlConfig(ttl, ttl_time_characteristic=event_time, **options)
    )


class Counts(sb.KeyedProcessFunction):
    """Counts the events of a user; a pause of half an hour begins anew. Remembers the last in a list and a map."""

    def open(self, ctx: sb.FunctionContext) -> None:
        ttl = 30 * MINUTE
        on_read = sb.StateTtlConfig.UpdateType.OnReadAndWrite
        self.n = ctx.get_reducing_state(in_event_time(sb.ReducingStateDescriptor("n", "sum", int), ttl))
        self.last = ctx.get_value_state(
            in_event_time(sb.ValueStateDescriptor("last", int), ttl, update_type=on_read, cleanup_idle=True)
        )
        self.list = ctx.get_list_state(
            in_event_time(sb.ListStateDescriptor("list", int), ttl, cleanup_idle=True)
        )
        self.map = ctx.get_map_state(in_event_time(sb.MapStateDescriptor("map", int, int), 2 * ttl))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.n.add(1)
        self.list.add(row.number)
        self.map.put(row.number % 3, row.number)
        yield (
            ctx.current_key,
            ctx.timestamp,
            [
                row.number,
                self.n.get(),
                self.last.value() or -1,
                *self.list.get(),
                *dict(self.map.items()).values(),
            ],
        )
        self.last.update(row.number)


class Windows(sb.KeyedProcessFunction):
    """The number of a user's events in each half hour, in a namespace of its own."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.n = ctx.get_reducing_state(
            in_event_time(sb.ReducingStateDescriptor("n", "sum", int), 2 * SIZE, cleanup_idle=True)
        )

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        start = ctx.timestamp - ctx.timestamp % SIZE
        ctx.current_namespace = sb.TimeWindow(start, start + SIZE)
        self.n.add(1)
        ctx.timer_service().register_event_time_timer(start + SIZE)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        assert timestamp == ctx.timestamp
        yield ctx.current_key, timestamp - SIZE, [timestamp, self.n.get()]
        self.n.clear()


class Sessions(sb.KeyedProcessFunction):
    """Events of a user with less than a quarter of an hour between each two. Sessions grow together in any order."""

    def open(self, ctx: sb.FunctionContext) -> None:
        descriptor = sb.MapStateDescriptor("sessions", int, tuple[int, int])
        self.sessions = ctx.get_map_state(in_event_time(descriptor, DAY))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        assert ctx.timestamp is not None
        start, end, n = ctx.timestamp, ctx.timestamp + GAP, 1
        for other, (last, m) in list(self.sessions.items()):
            if other < end and start < last:
                self.sessions.remove(other)
                ctx.timer_service().delete_event_time_timer(last)
                start, end, n = min(start, other), max(end, last), n + m
        self.sessions.put(start, (end, n))
        ctx.timer_service().register_event_time_timer(end)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        for start, (end, n) in list(self.sessions.items()):
            if end == timestamp:
                yield ctx.current_key, start, [end, n]
                self.sessions.remove(start)


SCHEMA = "user string, at bigint, what array<bigint>"


def sessions_of(events: list[Event], watermark: int) -> list[tuple[str, int, list[int]]]:
    """The sessions that have ended, by a loop over each user's events."""
    found = []
    for user in USERS:
        times = sorted(event.at for event in events if event.user == user)
        runs: list[list[int]] = []
        for at in times:
            if not runs or at >= runs[-1][-1] + GAP:
                runs.append([])
            runs[-1].append(at)
        found += [(user, run[0], [run[-1] + GAP, len(run)]) for run in runs if run[-1] + GAP <= watermark]
    return sorted(found)
