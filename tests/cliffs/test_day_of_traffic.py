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
from keyed_story import DESCRIPTORS, Story, contents

import statebackend as sb
from statebackend.testing import ManualClock

MINUTE, KEYS, HOURS = 60_000, 80, 24

#: The states that expire, and how.
EXPIRING: dict[str, dict[str, Any]] = {
    "name": {"cleanup_idle": True},
    "pair": {"update_type": sb.StateTtlConfig.UpdateType.OnReadAndWrite},
    "numbers": {"cleanup_idle": True},
    "deep": {},
    "mean": {},
    "seen": {"state_visibility": sb.StateTtlConfig.StateVisibility.ReturnExpiredIfNotCleanedUp},
}
#: A read of the last one may give what has expired, or may not: it is not compared.
COMPARED = [name for name in DESCRIPTORS if name != "seen"]


def declared(name: str) -> Any:
    descriptor = DESCRIPTORS[name]()
    if name not in EXPIRING:
        return descriptor
    return descriptor.enable_time_to_live(sb.StateTtlConfig(20 * MINUTE, **EXPIRING[name]))


DECLARED = {name: lambda name=name: declared(name) for name in DESCRIPTORS}


class Side:
    def __init__(self, name: str, clock: ManualClock, rng: random.Random, **options: Any) -> None:
        factory = sb.create_backend(name, **({"threads": 1} if name == "heap" else {}))
        self.keyed: Any = factory.create_keyed_backend(int, max_parallelism=16, clock=clock, **options)
        self.story = Story(self.keyed, rng, int, keys=KEYS, descriptors=DECLARED)
        self.states = self.story.states
        self.marks: list[Any] = []


class Day:
    """Traffic at random, on the heap backend and on the reference alike."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng, self.clock = rng, ManualClock(0)
        self.store = sb.CheckpointStore(folder).open_for_writing(key_type=int, max_parallelism=16)
        seed = rng.randrange(1 << 60)
        self.heap, self.reference = (
            Side(name, self.clock, random.Random(seed)) for name in ("heap", "reference")
        )
        self.minutes = self.checkpoints = 0
        self.pending: list[tuple[int, int, Any]] = []
        self.views: list[tuple[int, Any]] = []

    def both(self, call: Callable[[Side], Any]) -> None:
        found, expected = call(self.heap), call(self.reference)
        assert found == expected, "the backends differ"

    def merge_or_clear_key(self) -> None:
        name, key = self.rng.choice(["total", "tags", "things", None]), self.rng.choice(self.heap.story.keys)

        def call(side: Side) -> None:
            side.keyed.set_current_key(key)
            if name is None:
                side.keyed.clear_key()
            else:
                side.keyed.merge_namespaces(side.states[name].descriptor, 7, [sb.TimeWindow(0, 10), 7])

        self.both(call)

    def burst(self) -> None:
        """Columns of many new keys, perhaps in a new namespace, that go again."""
        keys = list(range(10_000, 10_000 + self.rng.randrange(100, 400)))
        namespace = self.rng.choice([sb.VOID, sb.TimeWindow(0, self.minutes)])

        def call(side: Side) -> None:
            side.keyed.set_current_namespace(namespace)
            side.states["count"].update_many(keys, keys)
            side.states["total"].add_many(keys, keys)
            side.states["deep"].put_many(keys, [1] * len(keys), [["x"]] * len(keys))
            for name in ("count", "total", "deep"):
                side.states[name].clear_many(keys)

        self.both(call)

    def work(self, depth: int = 0) -> None:
        for _ in range(self.rng.randrange(3, 7)):
            what = self.rng.random()
            if what < 0.75:
                self.both(lambda side: side.story.change(2))
            elif what < 0.78:
                name = self.rng.choice(COMPARED)
                self.both(lambda side, name=name: contents(side.keyed, [name], DECLARED))
            elif what < 0.87:
                self.merge_or_clear_key()
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
            for domain in ("event", "processing"):
                self.both(lambda side, domain=domain: list(side.keyed.timers.due(self.clock.now(), domain)))
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
        self.heap = Side("heap", self.clock, self.heap.story.rng, restore=committed)

    def hour(self) -> tuple[int, int, int]:
        """The memory after it, of the core, with what it keeps, and of the process, when all snapshots have ended."""
        for _ in range(60):
            self.minute()
        self.settle(1 << 60)
        self.both(lambda side: contents(side.keyed, COMPARED, DECLARED))
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


@pytest.mark.sampled(1, of="long queries")
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
