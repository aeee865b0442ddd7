"""The walk over entries rests while nothing can have expired: each case in which it must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from statebackend import types as t
from statebackend.backends.heap import HeapBackend
from statebackend.keys import VOID
from statebackend.state import ListStateDescriptor, ValueStateDescriptor
from statebackend.state.ttl import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

HOUR = 3_600_000
KEYS = 50
ABSENT = 1_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def keyed(clock: ManualClock) -> Iterator[Any]:
    with HeapBackend(threads=1).create_keyed_backend(int, max_parallelism=1, clock=clock) as keyed:
        yield keyed


@pytest.fixture
def at(keyed: Any, clock: ManualClock) -> Callable[..., None]:
    """Call something for keys at a time."""

    def run(now: int, call: Callable[..., Any], *arguments: Any, keys: Any = range(KEYS)) -> None:
        clock.set(now)
        for key in keys:
            keyed.set_current_key(key)
            call(*arguments)

    return run


def expiring(descriptor: Any) -> Any:
    return descriptor.enable_time_to_live(StateTtlConfig(HOUR))


def rest(at: Any, now: int, state: Any) -> None:
    """Accesses for two rounds over everything."""
    at(now, state.clear, keys=[ABSENT] * KEYS)


def begin_round(at: Any, now: int, state: Any) -> None:
    """The walk has begun anew and is a few entries on: a clock that goes back makes it."""
    at(now - 1, state.clear, keys=[ABSENT])
    rest(at, now, state)
    at(now - 1, state.clear, keys=[ABSENT])
    at(now, state.clear, keys=[ABSENT] * 2)


def test_it_goes_on_when_the_oldest_expires(keyed: Any, at: Any) -> None:
    state = keyed.get_state(expiring(ValueStateDescriptor("value", int)))
    at(0, state.update, 1)
    at(10, state.update, 1, keys=range(KEYS // 2))
    rest(at, HOUR - 1, state)
    assert keyed.num_entries() == KEYS
    rest(at, HOUR, state)
    assert keyed.num_entries() == KEYS // 2
    rest(at, HOUR + 10, state)
    assert keyed.num_entries() == 0


def test_a_rollback_brings_old_entries_back(keyed: Any, at: Any) -> None:
    state = keyed.get_state(expiring(ValueStateDescriptor("value", int)))
    at(0, state.update, 1)
    mark = keyed.mark()
    at(HOUR, state.update, 2, keys=[1])
    rest(at, HOUR, state)
    assert keyed.num_entries() == 1
    keyed.rollback(mark)
    assert keyed.num_entries() == KEYS
    rest(at, HOUR, state)
    assert keyed.num_entries() == 0


def test_a_clock_that_was_set_back_stamps_what_is_older(keyed: Any, at: Any) -> None:
    state = keyed.get_state(expiring(ValueStateDescriptor("value", int)))
    at(HOUR, state.update, 1, keys=[1])
    rest(at, HOUR, state)
    at(0, state.update, 1, keys=[2])
    rest(at, HOUR, state)
    assert keyed.num_entries() == 1


def test_an_entry_is_cloned_to_where_the_walk_has_been(keyed: Any, at: Any) -> None:
    state = keyed.get_state(expiring(ValueStateDescriptor("objects", t.PICKLE)))
    at(0, state.update, (1,))
    at(0, state.clear, keys=[0])  # whose slot is free then
    at(10, state.update, (2,), keys=range(1, KEYS - 1))
    begin_round(at, 10, state)
    snapshot = keyed.core.snapshot()
    at(10, state.value, keys=[KEYS - 1])  # a copy, as the snapshot has the object
    snapshot.release()
    rest(at, 10, state)
    rest(at, HOUR, state)
    assert keyed.num_entries() == KEYS - 2


def test_a_list_keeps_elements_that_expire_later(keyed: Any, at: Any) -> None:
    state = keyed.get_list_state(expiring(ListStateDescriptor("list", int)))
    at(0, state.add, 1, keys=[1])
    at(20, state.add, 2, keys=[1])
    at(HOUR, state.add, 3, keys=[2])
    rest(at, HOUR, state)
    assert keyed.num_entries() == 2
    rest(at, HOUR + 20, state)
    assert keyed.num_entries() == 1


def test_a_merge_moves_old_elements_to_where_the_walk_has_been(keyed: Any, at: Any) -> None:
    descriptor = expiring(ListStateDescriptor("list", int))
    state = keyed.get_list_state(descriptor)
    at(0, state.add, 1)
    at(0, state.clear, keys=[0])
    keyed.set_current_namespace("n")
    at(0, state.add, 1, keys=[0])
    keyed.set_current_namespace(VOID)
    at(10, state.update, [2], keys=range(1, KEYS))
    begin_round(at, 10, state)
    at(10, keyed.merge_namespaces, descriptor, VOID, ["n"], keys=[0])
    assert keyed.num_entries() == KEYS
    rest(at, 10, state)
    rest(at, HOUR, state)
    assert keyed.num_entries() == KEYS - 1


def test_what_is_written_behind_the_walk_is_as_old_as_its_round(keyed: Any, at: Any) -> None:
    state = keyed.get_state(expiring(ValueStateDescriptor("value", int)))
    at(0, state.update, 1)
    at(0, state.clear, keys=reversed(range(KEYS)))
    begin_round(at, 10, state)
    at(12, state.update, 1, keys=[0])
    at(30, state.update, 1, keys=range(1, KEYS))
    rest(at, 30, state)
    rest(at, HOUR + 12, state)
    assert keyed.num_entries() == KEYS - 1
