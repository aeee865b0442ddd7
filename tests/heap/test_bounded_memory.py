"""An unbounded stream in bounded memory: a simulated day over moving keys, with an hour to live, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import statebackend as sb
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

MINUTE, HOUR = 60_000, 3_600_000

#: Keys that come in a minute, and minutes from one checkpoint to the next.
PACES = [(10, 20), pytest.param((1_000, 1), marks=pytest.mark.stress)]


def descriptors(**options: Any) -> list[Any]:
    made = [
        sb.ValueStateDescriptor("value", int),
        sb.ValueStateDescriptor("text", str),
        sb.ValueStateDescriptor("object", sb.types.PICKLE),
        sb.ListStateDescriptor("list", int),
        sb.MapStateDescriptor("map", str, str),
        sb.ReducingStateDescriptor("reducing", "sum", int),
        sb.AggregatingStateDescriptor("aggregating", "avg", int),
    ]
    return [each.enable_time_to_live(sb.StateTtlConfig(HOUR, **options)) for each in made]


def write(state: Any, now: int) -> None:
    kind, name = state.descriptor.kind, state.descriptor.name
    if kind == "map":
        state.put("a", "x" * 50)
        state.put(str(now % 3), "y")
    elif kind == "value":
        state.update({"value": now, "text": "x" * 100, "object": (now,)}[name])
    else:
        state.add(now)


class Day:
    """A backend that takes checkpoints; from one to the next it can tell what has changed."""

    def __init__(self, folder: Path, descriptor: Any, pace: tuple[int, int]) -> None:
        self.clock = ManualClock()
        self.store = sb.CheckpointStore(folder).open_for_writing(key_type=int, max_parallelism=16)
        self.descriptor = descriptor
        self.keys, self.every = pace
        self.number = 0
        self.open()

    def open(self, **options: Any) -> None:
        factory = sb.create_backend("heap", threads=1)
        self.keyed: Any = factory.create_keyed_backend(int, max_parallelism=16, clock=self.clock, **options)
        self.state = self.keyed.get_state(self.descriptor)

    def restart(self) -> None:
        self.keyed.close()
        self.open(restore=self.store.open(self.store.latest()))

    def minute(self, minute: int, *, traffic: bool) -> None:
        """Every key comes in two minutes, one after the other."""
        self.clock.set(minute * MINUTE)
        if traffic:
            mark = self.keyed.mark()
            for key in range(minute * self.keys, (minute + 2) * self.keys):
                self.keyed.set_current_key(key)
                write(self.state, minute)
            self.keyed.release(mark)
        self.keyed.advance(4 * self.keys)
        if minute % self.every == self.every - 1:
            taken = self.keyed.snapshot(self.number, self.store).result()
            self.store.commit(self.number, [taken], now=self.clock.now())
            self.number += 1

    def memory(self) -> int:
        metrics = self.keyed.core.metrics()
        return int(metrics["run_bytes"] + metrics["blob_bytes"])

    def files(self) -> int:
        files = self.store.open(self.store.latest()).snapshots[0].files
        return sum(file.size for file in files)

    def close(self) -> None:
        self.keyed.close()
        self.store.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pace", PACES, ids=lambda each: f"{each[0]} keys a minute")
@pytest.mark.parametrize("descriptor", descriptors(), ids=lambda each: each.name)
def test_default_settings_hold_memory_flat_under_traffic(
    tmp_path: Path, descriptor: Any, pace: tuple[int, int]
) -> None:
    day = Day(tmp_path, descriptor, pace)
    entries, memory, files = [], [], []
    for minute in range(24 * 60):
        if minute == 12 * 60:
            day.restart()
        day.minute(minute, traffic=True)
        if minute % 60 == 59:
            entries.append(day.keyed.num_entries())
            memory.append(day.memory())
            files.append(day.files())
    live = 61 * day.keys
    assert max(entries) < 3 * live
    assert min(entries[1:]) >= live
    assert max(memory[12:]) <= 1.2 * max(memory[3:12])
    assert max(files[12:]) <= 1.5 * max(files[3:12]) + 300_000, "a base is rewritten when deltas pass 256 KB"
    day.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pace", PACES, ids=lambda each: f"{each[0]} keys a minute")
@pytest.mark.parametrize("descriptor", descriptors(cleanup_idle=True), ids=lambda each: each.name)
def test_idle_cleanup_empties_memory_when_traffic_ends(
    tmp_path: Path, descriptor: Any, pace: tuple[int, int]
) -> None:
    """Several times: what was idle comes back, goes again, and memory is as it was."""
    day = Day(tmp_path, descriptor, pace)
    busy, idle = [], []
    for minute in range(24 * 60):
        traffic = minute % 360 < 180
        day.minute(minute, traffic=traffic)
        if minute % 360 == 179:
            busy.append(day.memory())
            assert day.keyed.num_entries() == 61 * day.keys, "nothing is there that has expired"
        if minute % 360 == 359:
            assert day.keyed.num_entries() == 0
            while day.keyed.core.advance(1 << 20):
                pass
            idle.append(day.memory())
    assert max(busy) <= 1.2 * busy[0]
    assert max(idle) <= busy[0] / 4
    day.close()
