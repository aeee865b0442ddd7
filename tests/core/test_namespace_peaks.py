"""Namespaces come and go: numbers are used again from below, and a peak leaves nothing behind."""

from __future__ import annotations

import random

import pytest

from statebackend._core.core_probe import fail_allocation
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked

PEAK = 20_000


@pytest.fixture
def core():
    return StateCore()


def names_of(kind: str, count: int) -> list[bytes]:
    return [b"%s-%d" % (kind.encode(), number) for number in range(count)]


def hold(core: StateCore, names: list[bytes]) -> list[int]:
    numbers = []
    for name in names:
        numbers.append(core.namespaces.number(name))
        core.namespaces.pin(numbers[-1], 1)
    return numbers


def drop(core: StateCore, numbers: list[int]) -> None:
    for number in numbers:
        core.namespaces.pin(number, -1)


def pass_by(core: StateCore, count: int) -> None:
    """Namespaces that live for ten others each."""
    held: list[int] = []
    for name in names_of("passing", count):
        held += hold(core, [name])
        if len(held) > 10:
            drop(core, [held.pop(0)])
    drop(core, held)


def test_the_lowest_free_number_is_used_first(core):
    numbers = hold(core, names_of("held", 3_000))
    freed = [number for number in numbers if number % 7 == 0]
    drop(core, freed)
    new = hold(core, names_of("new", 2_000))
    core.namespaces._check()
    again = sorted(number for number in new if number <= max(numbers))
    # The first ones come before anything is free; each call looks at eight numbers.
    assert set(again) <= set(freed)
    assert len(again) > len(freed) * 0.9


def test_each_new_namespace_frees_a_few_others(core):
    numbers = hold(core, names_of("held", PEAK))
    drop(core, numbers)
    before = len(core.namespaces)
    for count, name in enumerate(names_of("new", 500), 1):
        core.namespaces.number(name)
        assert len(core.namespaces) >= before - 8 * count
    assert len(core.namespaces) < before - 3_000
    core.namespaces._check()


@pytest.mark.parametrize("left", [0, 50])
def test_a_peak_leaves_nothing_behind(core, left):
    rng = random.Random(3)
    numbers = hold(core, names_of("peak", PEAK))
    assert core.namespaces._sizes()[:2] == (PEAK + 1, 1 << 15)
    full = core.metrics()["used_bytes"]
    rng.shuffle(numbers)
    low = sorted(numbers)[:left]
    drop(core, [number for number in numbers if number not in set(low)])
    pass_by(core, PEAK)
    core.namespaces._check()
    given, room, largest = core.namespaces._sizes()
    assert len(core.namespaces) < 2_200
    assert given < 2_500
    assert room <= 8_192
    assert largest < 256 * 64
    assert core.metrics()["used_bytes"] < full / 3


def test_what_is_held_keeps_its_number_through_a_peak(core):
    rng = random.Random(5)
    held: dict[int, bytes] = {}
    for step in range(15_000):
        name = b"name-%d" % step
        (number,) = hold(core, [name])
        assert number not in held
        held[number] = name
        if rng.random() < (0.3 if step < 7_000 else 1.0):
            for other in rng.sample(list(held), min(2, len(held))):
                drop(core, [other])
                del held[other]
        if step % 2_500 == 0:
            core.namespaces._check()
            assert {number: core.namespaces.name(number) for number in held} == held
            assert [core.namespaces.find(name) for name in held.values()] == list(held)


def test_without_memory_a_namespace_gets_a_number_or_not(core):
    numbers = []
    for name in names_of("name", 3_000):
        for nth in (1, 2, 3):
            fail_allocation(nth)
            try:
                numbers.append(core.namespaces.number(name))
                break
            except MemoryError:
                assert core.namespaces.find(name) is None
            finally:
                fail_allocation(0)
        else:
            numbers.append(core.namespaces.number(name))
        core.namespaces.pin(numbers[-1], 1)
    core.namespaces._check()
    assert len(set(numbers)) == 3_000
