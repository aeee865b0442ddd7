"""`begin` fixes the time: values expire by it, and the clock is not asked."""

from __future__ import annotations

import pytest
from contract.conftest import MakeKeyed

import statebackend as sb
from statebackend.types import LONG

pytestmark = pytest.mark.checked

TTL = 100


class CountedClock:
    """A clock of its own time, which knows how often it was asked."""

    def __init__(self) -> None:
        self.time, self.asked = 0, 0

    def now(self) -> int:
        self.asked += 1
        return self.time


@pytest.fixture
def clock() -> CountedClock:
    return CountedClock()


@pytest.fixture
def keyed(backend: sb.StateBackend, clock: CountedClock) -> sb.KeyedStateBackend:
    return backend.create_keyed_backend(LONG, max_parallelism=4, clock=clock)


def aging(keyed: sb.KeyedStateBackend) -> sb.ValueState:
    descriptor = sb.ValueStateDescriptor("aging", int)
    descriptor.enable_time_to_live(sb.StateTtlConfig.new_builder(TTL).build())
    return keyed.get_value_state(descriptor)


def test_values_expire_by_the_time_of_the_batch(keyed: sb.KeyedStateBackend, clock: CountedClock) -> None:
    state = aging(keyed)
    clock.time = 10 * TTL  # nobody asks
    keyed.begin(0)
    keyed.set_current_key(1)
    state.update(7)
    keyed.begin(TTL - 1)
    keyed.set_current_key(1)
    assert state.value() == 7
    keyed.begin(TTL)
    keyed.set_current_key(1)
    assert state.value() is None
    assert list(keyed.keys("aging")) == []


def test_the_clock_is_not_asked_within_a_batch(keyed: sb.KeyedStateBackend, clock: CountedClock) -> None:
    state = aging(keyed)
    keyed.begin(5)
    clock.asked = 0
    for key in range(100):
        keyed.set_current_key(key)
        state.update(key)
        assert state.value() == key
    state.update_many(list(range(10)), list(range(10)))
    assert len(state.get_many(list(range(10)))) == 10
    keyed.release(keyed.mark())
    assert sorted(keyed.keys("aging")) == list(range(100))
    keyed.advance()
    assert clock.asked == 0


def test_the_time_outlives_vectorised_calls_and_enumeration(
    keyed: sb.KeyedStateBackend, clock: CountedClock
) -> None:
    state = aging(keyed)
    clock.time = 5
    keyed.set_current_key(1)
    state.update(1)
    keyed.begin(TTL + 5)
    state.update_many([2], [2])
    assert list(keyed.keys("aging")) == [2]
    keyed.set_current_key(1)
    assert state.value() is None
    keyed.set_current_key(2)
    assert state.value() == 2
    with pytest.raises(sb.SerializationTypeError):
        state.update_many([3], ["not a number"])
    keyed.set_current_key(2)
    assert state.value() == 2


def test_the_clock_tells_again_after_none(keyed: sb.KeyedStateBackend, clock: CountedClock) -> None:
    state = aging(keyed)
    keyed.begin(0)
    keyed.set_current_key(1)
    state.update(7)
    keyed.begin(None)
    clock.time = TTL
    keyed.set_current_key(1)
    assert state.value() is None


@pytest.mark.parametrize("wrong", [1.5, "now", True, 2**63])
def test_values_that_are_not_times_are_refused(keyed: sb.KeyedStateBackend, wrong: object) -> None:
    with pytest.raises(sb.UsageError):
        keyed.begin(wrong)  # type: ignore[arg-type]


def test_a_cleared_key_is_none(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    keyed.set_current_key(1)
    keyed.clear_current_key()
    with pytest.raises(sb.UsageError, match="no current key"):
        _ = keyed.current_key
    keyed.set_current_key(2)
    assert keyed.current_key == 2
