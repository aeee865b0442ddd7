"""The current namespace is known again when it is given as the same object, and is never mistaken for another."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest

from statebackend.backends.heap import HeapBackend
from statebackend.checkpoint.keyed import compiled_backend
from statebackend.keys import VOID, TimeWindow, encode_namespace
from statebackend.state import ValueStateDescriptor

pytestmark = pytest.mark.checked


@pytest.fixture
def keyed() -> Iterator[Any]:
    with HeapBackend(threads=1).create_keyed_backend(int, max_parallelism=4) as keyed:
        keyed.set_current_key(1)
        yield keyed


def place_of(namespace: Any) -> int:
    """The set of places where an object is looked for, by its address; there are 32 of them, for eight objects each."""
    return (id(namespace) * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 59


def windows_that_fit() -> list[TimeWindow]:
    """As many for each set. By chance some would have more than they hold: where objects lie is up to the memory."""
    made = [TimeWindow(start, start + 10) for start in range(0, 20_000, 10)]
    by_place: list[list[TimeWindow]] = [[] for _ in range(32)]
    for window in made:
        by_place[place_of(window)].append(window)
    assert min(map(len, by_place)) >= 4
    return [each[number] for number in range(4) for each in by_place]


def test_windows_in_turn_are_encoded_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        compiled_backend, "encode_namespace", lambda each: given.append(each) or encode_namespace(each)
    )
    with HeapBackend(threads=1).create_keyed_backend(int) as keyed:
        keyed.set_current_key(1)
        state = keyed.get_value_state(ValueStateDescriptor("s", int))
        windows = windows_that_fit()
        for turn in range(20):
            for number, window in enumerate(windows):
                keyed.set_current_namespace(window)
                assert state.value() == (None if turn == 0 else 1_000 * (turn - 1) + number)
                state.update(1_000 * turn + number)
                assert keyed._namespace == encode_namespace(window)
        assert given == windows


def test_a_number_that_went_to_another_namespace_is_not_used(keyed: Any) -> None:
    """The object stays known while its number is freed and given away."""
    window = TimeWindow(0, 10)
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    for turn in range(3):
        keyed.set_current_namespace(window)
        number = keyed.core.namespaces.find(encode_namespace(window))
        keyed.set_current_namespace(VOID)
        taken = False
        for step in range(5_000):
            name = encode_namespace(f"{turn} {step}")
            taken = taken or keyed.core.namespaces.number(name) == number
        assert taken
        assert keyed.core.namespaces.find(encode_namespace(window)) is None
        keyed.set_current_namespace(window)
        assert keyed._namespace == encode_namespace(window)
        state.update(turn)
        keyed.set_current_namespace(VOID)
        assert state.value() is None
        keyed.set_current_namespace(TimeWindow(0, 10))
        assert state.value() == turn
        state.clear()


def test_few_namespaces_are_kept_and_no_long_ones(keyed: Any) -> None:
    def windows() -> int:
        return sum(type(each) is TimeWindow for each in gc.get_objects())

    before = windows()
    for start in range(5_000):
        keyed.set_current_namespace(TimeWindow(start, start + 1))
    # TimeWindows are not tracked one by one everywhere; names are counted instead.
    assert windows() - before <= 257
    for number in range(300):
        keyed.set_current_namespace("long" * 1_000 + str(number))
        assert keyed.current_namespace == "long" * 1_000 + str(number)


@pytest.mark.parametrize("seed", range(3))
def test_random_namespaces_agree_with_their_encoding(keyed: Any, seed: int) -> None:
    r = random.Random(seed)
    known = (
        [TimeWindow(n, n + 1) for n in range(300)] + list(range(1000, 1200)) + [f"s{n}" for n in range(100)]
    )
    for _ in range(8_000):
        space = r.choice(known) if r.random() < 0.9 else TimeWindow(r.randrange(300), 300)
        keyed.set_current_namespace(space)
        assert keyed._namespace == encode_namespace(space)
