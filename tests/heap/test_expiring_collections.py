"""What expiry costs in long lists and large maps: no more for each element than in small ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import statebackend as sb
from statebackend._core.core_probe import entries_of
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

SMALL, LARGE = 300, 30_000
IDLE = {"cleanup_idle": True, "cleanup_in_background": False}
OFF = {"cleanup_in_background": False}


class Running:
    """A state with a time to live of as many milliseconds, for one key."""

    def __init__(self, descriptor: Any, ttl: int, options: dict[str, Any], **made: Any) -> None:
        self.clock = ManualClock()
        self.descriptor = descriptor.enable_time_to_live(sb.StateTtlConfig(ttl, **options))
        self.keyed: Any = sb.create_backend("heap", threads=1).create_keyed_backend(
            int, max_parallelism=1, clock=self.clock, **made
        )
        self.state = self.keyed.get_state(self.descriptor)
        self.at(0)

    def at(self, now: int) -> Any:
        self.clock.set(now)
        self.keyed.set_current_key(1)
        return self.state

    def live_elements(self) -> int:
        """How many elements the list has that have not been cleaned up."""
        (entry,) = entries_of(self.state.plain)
        return len(entry.value)

    def slide(self, first: int, last: int) -> None:
        """One element for each millisecond, and what has expired goes."""
        for now in range(first, last):
            self.at(now).add(now)
            self.keyed.advance(10)


def costs_as_much(measure: Callable[[int], float], small: int = SMALL, large: int = LARGE) -> None:
    """A hundred times as many elements make an operation at most three times as slow."""
    ratios: list[float] = []
    while not ratios or (min(ratios) > 3 and len(ratios) < 3):
        ratios.append(measure(large) / min(measure(small) for _ in range(2)))
    assert min(ratios) <= 3, f"{large // small} times as many elements make it {ratios} times as slow"


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    before = time.thread_time()
    call(*arguments)
    return time.thread_time() - before


def lists() -> Any:
    return sb.ListStateDescriptor("list", int)


def maps() -> Any:
    return sb.MapStateDescriptor("map", int, int)


@pytest.mark.parametrize("element", [int, str, sb.types.PICKLE], ids=["int", "str", "object"])
def test_dead_elements_of_a_list_take_no_more_than_live_elements(element: Any) -> None:
    """A list that has grown once and shrinks, as its elements expire."""
    made = {int: int, str: lambda number: f"{number:030}"}.get(element, lambda number: [number])
    run = Running(sb.ListStateDescriptor("list", element), 1_000, IDLE)

    def memory() -> int:
        while run.keyed.core.advance(1 << 20):
            pass
        metrics = run.keyed.core.metrics()
        return int(metrics["blob_bytes"])

    def length_of(elements: int) -> int:
        fresh = Running(sb.ListStateDescriptor("list", element), 1_000, IDLE)
        for number in range(elements):
            fresh.state.add(made(number))
        taken = int(fresh.keyed.core.metrics()["blob_bytes"])
        fresh.keyed.close()
        return taken

    for now in range(1_000):
        run.at(now)
        for number in range(3):
            run.state.add(made(number))
    for now in [1_100, 1_300, 1_600, 1_800, 1_950, 1_990, 1_998]:
        run.at(now)
        run.keyed.advance(10)
        live = 3 * (1_999 - now)
        assert run.live_elements() == live
        assert memory() <= 2.2 * length_of(max(live, 64))
        run.state.plain._check()
    run.at(1_999)
    run.keyed.advance(10)
    assert (run.keyed.num_entries(), memory()) == (0, 0)
    run.keyed.close()


def test_a_list_that_is_in_no_order_loses_what_has_expired_and_may_be_in_order_again() -> None:
    run = Running(lists(), 100, IDLE)
    for now in [50, 60, 10, 70, 20, 80, 90]:
        run.at(now).add(now)
    seen = {}
    for now in [110, 120, 149, 150, 165, 175, 189]:
        run.at(now)
        run.keyed.advance(10)
        run.state.plain._check()
        seen[now] = run.state.get()
    assert seen == {
        110: [50, 60, 70, 20, 80, 90],
        120: [50, 60, 70, 80, 90],
        149: [50, 60, 70, 80, 90],
        150: [60, 70, 80, 90],
        165: [70, 80, 90],
        175: [80, 90],
        189: [90],
    }
    run.keyed.close()


@pytest.mark.parametrize("expires", [True, False])
def test_delta_restores_no_dead_element_and_holds_new_elements_of_a_grown_list(
    tmp_path: Path, expires: bool
) -> None:
    """A longer time to live after the restore shows what was there."""
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=1)
    run = Running(lists(), 1_000, IDLE)
    others = run.keyed.get_state(sb.ValueStateDescriptor("others", int))
    others.update_many(range(100), range(100))  # a delta is for what has hardly changed
    run.slide(0, 1_500)
    for number in range(2):
        taken = run.keyed.snapshot(number, store, incremental=True).result()
        committed = store.commit(number, [taken], now=run.clock.now())
        if number == 0 and expires:
            run.slide(1_500, 1_600)
        elif number == 0:
            run.state.add(1_600)
    run.keyed.close()
    base, delta = store.open(store.latest()).snapshots[0].files
    assert (base.kind, delta.kind) == ("base", "delta")
    again = Running(lists(), 1_000_000, OFF, restore=committed)
    again.at(1_600)
    assert again.state.get() == (list(range(600, 1_600)) if expires else [*range(500, 1_500), 1_600])
    assert (delta.size < base.size / 2) is not expires
    again.state.plain._check()
    again.keyed.close()
    store.close()


def test_exists_sees_what_a_rollback_brings_back_before_what_has_expired_since() -> None:
    run = Running(maps(), 100, OFF)
    run.at(50).put_all({1: 1, 2: 1})
    run.at(90).put(1, 2)
    run.at(95).put(3, 1)
    mark = run.keyed.mark()
    run.state.remove(1)
    assert run.at(155).exists()
    run.keyed.rollback(mark)
    run.at(155).remove(3)
    assert run.state.exists()
    assert list(run.state) == [1]
    run.keyed.release(mark)
    run.state.plain_map._check()
    run.keyed.close()


def test_an_iterator_steps_back_when_the_entry_that_it_returned_last_goes() -> None:
    """Behind those that live, each entry expires as soon as it has been returned, and a read removes it."""

    def measure(entries: int) -> float:
        run = Running(maps(), 100_000, OFF)
        run.state.put_all(dict.fromkeys(range(entries), 1))
        for number in range(entries, 2 * entries):
            run.at(number).put(number, 1)
        run.at(90_000).put_all(dict.fromkeys(range(entries), 1))
        found: list[int] = []

        def iterate() -> None:
            others = [iter(run.state), iter(run.state.values())]
            for number in run.state:
                found.append(number)
                if number < entries:
                    assert [next(each) for each in others] == [number, 1]
                else:
                    run.at(100_000 + number)
                    assert run.state.get(number) is None

        took = timed(iterate)
        assert found == list(range(2 * entries))
        assert list(run.state) == list(range(entries))
        run.state.plain_map._check()
        run.keyed.close()
        return took / entries

    costs_as_much(measure, 160, 16_000)
