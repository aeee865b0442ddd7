"""A day of traffic: marks, snapshots, rollbacks, expiry, timers, namespaces, merges, bursts, over states of all kinds.

What is there stays about the same all day, so memory must, too. The `reference` backend runs the same day beside it.
``STATEBACKEND_DAY_SECONDS`` says how long the long run goes on, day after day.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cliffs.measuring import core_bytes
from cliffs.worlds import without_fsync

import statebackend as sb
from statebackend.testing import ManualClock

MINUTE = 60_000
TTL = 20 * MINUTE
KEYS = 80
HOURS = 24

Shown = sb.StateTtlConfig.StateVisibility.ReturnExpiredIfNotCleanedUp
OnRead = sb.StateTtlConfig.UpdateType.OnReadAndWrite
ROW = "struct<a:bigint,b:string>"


def append(path: Any, step: Any) -> Any:
    return (path + step)[-200:]


class Spread(sb.AggregateFunction):
    result_type = "bigint"

    def create_accumulator(self) -> Any:
        return (None, None)

    def add(self, value: Any, accumulator: Any) -> Any:
        low, high = accumulator
        return (value, value) if low is None else (min(low, value), max(high, value))

    def get_result(self, accumulator: Any) -> Any:
        return accumulator[1] - accumulator[0]

    def merge(self, a: Any, b: Any) -> Any:
        return (min(a[0], b[0]), max(a[1], b[1]))


def number(rng: random.Random) -> int:
    return rng.randrange(-1_000, 1_000)


def text(rng: random.Random) -> str:
    return "text" * rng.randrange(1, 40)


def row(rng: random.Random) -> tuple[int, str]:
    return number(rng), text(rng)


def thing(rng: random.Random) -> list[int]:
    return [number(rng)]


def descriptors() -> list[tuple[Any, Callable[[random.Random], Any]]]:
    ttl = sb.StateTtlConfig
    return [
        (sb.ValueStateDescriptor("value", int), number),
        (sb.ValueStateDescriptor("text", str).enable_time_to_live(ttl(TTL, cleanup_idle=True)), text),
        (sb.ValueStateDescriptor("row", ROW), row),
        (sb.ValueStateDescriptor("object", sb.types.PICKLE), thing),
        (sb.ValueStateDescriptor("read", int).enable_time_to_live(ttl(TTL, update_type=OnRead)), number),
        (sb.ListStateDescriptor("list", str), text),
        (sb.ListStateDescriptor("window", int).enable_time_to_live(ttl(TTL, cleanup_idle=True)), number),
        (sb.ListStateDescriptor("objects", sb.types.PICKLE), thing),
        (sb.MapStateDescriptor("map", int, ROW), row),
        (sb.MapStateDescriptor("timed", int, int).enable_time_to_live(ttl(TTL)), number),
        (sb.MapStateDescriptor("things", int, sb.types.PICKLE), thing),
        (
            sb.MapStateDescriptor("shown", int, int).enable_time_to_live(ttl(TTL, state_visibility=Shown)),
            number,
        ),
        (sb.ReducingStateDescriptor("sum", "sum", int), number),
        (sb.ReducingStateDescriptor("path", append, str), text),
        (sb.AggregatingStateDescriptor("mean", "avg", int).enable_time_to_live(ttl(TTL)), number),
        (sb.AggregatingStateDescriptor("spread", Spread(), int, tuple[int, int]), number),
        (sb.FoldingStateDescriptor("fold", "", append, str), text),
    ]


#: A read of it may give what has expired, or may not: it is not compared.
UNSURE = {"shown"}
MERGED = ("sum", "list", "spread", "objects")


class Side:
    def __init__(self, name: str, clock: ManualClock, **options: Any) -> None:
        factory = sb.create_backend(name, **({"threads": 1} if name == "heap" else {}))
        self.keyed: Any = factory.create_keyed_backend(int, max_parallelism=16, clock=clock, **options)
        self.states = {each.name: self.keyed.get_state(each) for each, _ in descriptors()}
        self.marks: list[Any] = []

    def contents(self) -> dict[Any, str]:
        found: dict[Any, str] = {}
        for name, state in self.states.items():

            def note(key: Any, state: Any, name: str = name) -> None:
                if name not in UNSURE:
                    found[name, key, repr(self.keyed.current_namespace)] = repr(read(state))

            self.keyed.apply_to_all_keys(state.descriptor, note, sb.ALL_NAMESPACES)
        for each in self.keyed.timers.rows():
            found["timer", each.key, repr(each.namespace), each.timestamp] = each.domain
        return found


def read(state: Any) -> Any:
    kind = state.descriptor.kind
    if kind == "value":
        return state.value()
    return list(state.items()) if kind == "map" else state.get()


class Day:
    """Traffic at random, on the heap backend and on the reference alike."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng, self.clock = rng, ManualClock(0)
        self.store = sb.CheckpointStore(folder).open_for_writing(key_type=int, max_parallelism=16)
        self.values = {each.name: made for each, made in descriptors()}
        self.heap, self.reference = Side("heap", self.clock), Side("reference", self.clock)
        self.minutes = self.checkpoints = 0
        self.pending: list[tuple[int, int, Any]] = []
        self.views: list[tuple[int, Any]] = []

    def both(self, call: Callable[[Side], Any]) -> None:
        found, expected = call(self.heap), call(self.reference)
        assert found == expected, "the backends differ"

    # --- rows ---

    def one_row(self) -> None:
        rng = self.rng
        name, key = rng.choice(list(self.values)), rng.randrange(KEYS)
        namespace = rng.choice(
            [sb.VOID, sb.VOID, sb.TimeWindow(self.minutes // 5, self.minutes // 5 + 1), "s"]
        )
        value, sub, what = self.values[name](rng), rng.randrange(12), rng.random()

        def call(side: Side) -> Any:
            state = side.states[name]
            kind = state.descriptor.kind
            side.keyed.set_current_key(key)
            side.keyed.set_current_namespace(namespace)
            if what < 0.2:
                state.clear()
            elif what < 0.45:
                found = read(state), state.exists()
                return None if name in UNSURE else repr(found)
            elif kind == "value":
                state.update(value)
            elif kind == "list":
                if what < 0.6:
                    state.update([value, value])
                elif what < 0.7:
                    state.add_all([value] * 3)
                else:
                    state.add(value)
            elif kind == "map":
                if what < 0.55:
                    state.put_all({sub: value, sub + 1: value})
                elif what < 0.7:
                    state.remove(sub)
                else:
                    state.put(sub, value)
            else:
                state.add(value)
            return None

        self.both(call)

    def one_batch(self) -> None:
        rng = self.rng
        name, count = rng.choice(list(self.values)), rng.randrange(1, 40)
        keys = [rng.randrange(KEYS) for _ in range(count)]
        values = [self.values[name](rng) for _ in range(count)]
        subs = [rng.randrange(12) for _ in range(count)]
        what = rng.random()

        def call(side: Side) -> Any:
            side.keyed.set_current_namespace(sb.VOID)
            state = side.states[name]
            kind = state.descriptor.kind
            if what < 0.25:
                state.clear_many(keys)
                return None
            if what < 0.4:
                return None if name in UNSURE else state.exists_many(keys).to_pylist()
            if kind == "map":
                if what < 0.55:
                    state.remove_many(keys, subs)
                else:
                    state.put_many(keys, subs, values)
            elif kind == "value":
                state.update_many(keys, values)
            else:
                if kind == "list":
                    state.clear_many(keys[: count // 2])
                state.add_many(keys, values)
            return None

        self.both(call)

    def merge(self) -> None:
        rng = self.rng
        name, key = rng.choice(MERGED), rng.randrange(KEYS)
        window = sb.TimeWindow(self.minutes // 5, self.minutes // 5 + 1)

        def call(side: Side) -> None:
            side.keyed.set_current_key(key)
            side.keyed.merge_namespaces(side.states[name].descriptor, "s", [window, "s"])

        self.both(call)

    def timers(self) -> None:
        rng = self.rng
        key, at = rng.randrange(KEYS), self.clock.now() + rng.randrange(10 * MINUTE)
        namespace, domain = rng.choice([sb.VOID, "s"]), rng.choice(["event", "processing"])
        what = rng.random()

        def call(side: Side) -> Any:
            side.keyed.set_current_key(key)
            side.keyed.set_current_namespace(namespace)
            timers = side.keyed.timers
            if what < 0.5:
                timers.register(at, domain)
            elif what < 0.8:
                for each in timers.pending(domain)[:3]:
                    timers.delete(each, domain)
                timers.register(at, domain)
            return timers.pending(domain), timers.next_due(domain), timers.count(domain)

        self.both(call)

    def fire(self) -> None:
        now = self.clock.now()
        for domain in ("event", "processing"):

            def call(side: Side, domain: str = domain) -> Any:
                return [
                    (at, side.keyed.current_key, repr(side.keyed.current_namespace))
                    for at in side.keyed.timers.due(now, domain)
                ]

            self.both(call)

    def clear_key(self) -> None:
        key = self.rng.randrange(KEYS)

        def call(side: Side) -> None:
            side.keyed.set_current_key(key)
            side.keyed.clear_key()

        self.both(call)

    def burst(self) -> None:
        keys = list(range(10_000, 10_000 + self.rng.randrange(100, 400)))

        def call(side: Side) -> None:
            side.keyed.set_current_namespace(sb.VOID)
            side.states["value"].update_many(keys, keys)
            side.states["sum"].add_many(keys, keys)
            side.states["map"].put_many(keys, [1] * len(keys), [(1, "x")] * len(keys))
            for name in ("value", "sum", "map"):
                side.states[name].clear_many(keys)

        self.both(call)

    def drop_windows(self) -> None:
        newest = sb.TimeWindow(self.minutes // 5, self.minutes // 5 + 1)

        def call(side: Side) -> None:
            for state in side.states.values():
                name = state.descriptor.name
                for key, namespace in list(side.keyed.keys_and_namespaces(name)):
                    if isinstance(namespace, sb.TimeWindow) and namespace != newest:
                        side.keyed.set_current_key(key)
                        side.keyed.set_current_namespace(namespace)
                        state.clear()
            side.keyed.set_current_namespace(sb.VOID)

        self.both(call)

    # --- batches, checkpoints ---

    def work(self, depth: int = 0) -> None:
        for _ in range(self.rng.randrange(3, 7)):
            what = self.rng.random()
            if what < 0.5:
                self.one_row()
            elif what < 0.7:
                self.one_batch()
            elif what < 0.8:
                self.timers()
            elif what < 0.85:
                self.merge()
            elif what < 0.87:
                self.clear_key()
            elif depth < 3:
                self.batch(depth + 1)

    def batch(self, depth: int = 0) -> None:
        self.both(lambda side: side.marks.append(side.keyed.mark()))
        self.work(depth)
        if self.rng.random() < 0.2:
            self.both(lambda side: side.keyed.rollback(side.marks[-1]))
        self.both(lambda side: side.keyed.release(side.marks.pop()))

    def checkpoint(self) -> None:
        if self.rng.random() < 0.3:
            incremental = self.rng.random() < 0.8
            taken = self.heap.keyed.snapshot(self.checkpoints, self.store, incremental=incremental)
            self.pending.append((self.minutes + self.rng.randrange(3), self.checkpoints, taken))
            self.checkpoints += 1
        if self.rng.random() < 0.3:
            self.views.append((self.minutes + self.rng.randrange(1, 6), self.heap.keyed.core.snapshot()))
        self.settle(self.minutes)

    def settle(self, until: int) -> None:
        while self.pending and self.pending[0][0] <= until:
            _, number, taken = self.pending.pop(0)
            if self.rng.random() < 0.2:
                taken.abort()
            else:
                self.store.commit(number, [taken.result()], now=self.clock.now())
        for each in [each for each in self.views if each[0] <= until]:
            each[1].release()
            self.views.remove(each)

    def minute(self) -> None:
        self.clock.advance(MINUTE)
        self.minutes += 1
        self.batch()
        self.work()
        if self.minutes % 5 == 0:
            self.fire()
            self.drop_windows()
        if self.minutes % 20 == 0:
            self.burst()
        # Only in every other hour: memory is reclaimed without it.
        if self.minutes // 60 % 2:
            self.heap.keyed.advance()
        self.checkpoint()

    def restart(self) -> None:
        self.settle(1 << 60)
        taken = self.heap.keyed.snapshot(self.checkpoints, self.store)
        committed = self.store.commit(self.checkpoints, [taken.result()], now=self.clock.now())
        self.checkpoints += 1
        self.heap.keyed.close()
        self.heap = Side("heap", self.clock, restore=committed)

    def hour(self) -> tuple[int, int, int]:
        """The memory after it, of the core, with what it keeps, and of the process, when all snapshots have ended."""
        for _ in range(60):
            self.minute()
        self.settle(1 << 60)
        assert self.heap.contents() == self.reference.contents()
        self.heap.keyed.core._check()
        for state in self.heap.states.values():
            for table in (state.plain, state.spaced):
                if table is not None:
                    table._check()
        return core_bytes(self.heap.keyed), self.heap.keyed.core.metrics()["used_bytes"], resident()

    def close(self) -> None:
        self.settle(1 << 60)
        self.heap.keyed.close()
        self.reference.keyed.close()
        self.store.close()


def resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture
def day(rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Day]:
    without_fsync(monkeypatch)
    made = Day(rng, tmp_path / "store")
    yield made
    made.close()


def check_flat(hours: list[tuple[int, int, int]]) -> None:
    """No hour of the last three quarters takes more than those before did, but for a little."""
    begin = max(3, len(hours) // 4)
    for name, slack, at in (("core", 16 << 10, 0), ("used", 4 << 20, 1), ("resident", 48 << 20, 2)):
        before, after = (max(each[at] for each in part) for part in (hours[1:begin], hours[begin:]))
        assert after <= 1.5 * before + slack, f"{name} bytes by hour: {[each[at] for each in hours]}"


@pytest.mark.sampled(2, of="long queries")
@pytest.mark.slow
def test_a_day_of_traffic_leaves_memory_flat(day: Day) -> None:
    hours = []
    for hour in range(HOURS):
        hours.append(day.hour())
        if hour == HOURS // 2:
            day.restart()
    check_flat(hours)


@pytest.mark.stress
def test_days_of_traffic_leave_memory_flat(day: Day) -> None:
    until = time.monotonic() + float(os.environ.get("STATEBACKEND_DAY_SECONDS", "3600"))
    hours = []
    while time.monotonic() < until or len(hours) < HOURS:
        hours.append(day.hour())
        if len(hours) % 50 == 0:
            day.restart()
    check_flat(hours)
