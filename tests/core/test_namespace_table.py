"""Namespaces by number: stable while something carries them, gone afterwards, also after a peak of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from statebackend._core.core_probe import StateTable, fail_allocation
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import ClosedError

pytestmark = pytest.mark.checked

PEAK = 20_000


@pytest.fixture
def core():
    return StateCore()


def test_a_namespace_keeps_its_number(core):
    names = [b"window-%d" % i for i in range(500)]
    numbers = [core.namespaces.number(name) for name in names]
    assert len(set(numbers)) == 500
    assert [core.namespaces.number(name) for name in names] == numbers
    assert [core.namespaces.name(number) for number in numbers] == names
    assert core.namespaces.number(b"") == 0


@pytest.mark.parametrize("holder", ["mark", "snapshot", "pin"])
def test_a_number_lives_while_a_mark_a_snapshot_or_a_pin_needs_it(core, holder):
    table = StateTable(core, value="long", namespaces=True)
    number = core.namespaces.number(b"kept")
    table.put(1, 10, number)
    held = {"mark": core.mark, "snapshot": core.snapshot, "pin": lambda: core.namespaces.pin(number, 1)}[
        holder
    ]()
    table.remove(1, number)
    for i in range(5000):
        core.namespaces.number(b"other-%d" % i)
    assert core.namespaces.name(number) == b"kept"
    if holder == "mark":
        core.rollback(held)
        assert table.get(1, number) == 10
    elif holder == "snapshot":
        assert table.rows_in(held) == {(1, number): 10}
        held.release()
        while core.advance(1000):
            pass
        for i in range(5000):
            core.namespaces.number(b"more-%d" % i)
        assert core.namespaces.find(b"kept") is None


def test_numbers_of_many_names_are_held_until_they_are_let_go(core):
    names = [b"%d" % n for n in range(3000)]
    held = core.namespaces.hold_many([b"", *names, b"7"], True)
    assert held.dtype == np.uint32
    assert held[0] == 0
    assert held[-1] == held[8]
    assert [core.namespaces.name(number) for number in held[1:-1].tolist()] == names
    for other in range(20_000):
        core.namespaces.number(b"other %d" % other)
    assert [core.namespaces.name(number) for number in held[1:-1].tolist()] == names
    core.namespaces._check()
    core.namespaces.let_go_many(held)
    for other in range(20_000):
        core.namespaces.number(b"again %d" % other)
    assert all(core.namespaces.find(name) is None for name in names)
    assert core.namespaces.find(b"") == 0
    core.namespaces._check()


def test_names_without_a_number_get_none_when_they_are_only_asked_for(core):
    number = core.namespaces.number(b"known")
    count = len(core.namespaces)
    held = core.namespaces.hold_many([b"known", b"unknown", b""], False)
    assert held.tolist() == [number, 2**32 - 1, 0]
    assert len(core.namespaces) == count
    core.namespaces.let_go_many(held)
    core.namespaces._check()


@pytest.mark.parametrize("names", [[b"a", "text"], [b"a", None], [b"a", 7]])
def test_wrong_name_leaves_nothing_held(core, names):
    with pytest.raises(TypeError):
        core.namespaces.hold_many(names, True)
    for other in range(5000):
        core.namespaces.number(b"other %d" % other)
    assert core.namespaces.find(b"a") is None


def test_holding_when_the_core_is_gone():
    core = StateCore()
    namespaces = core.namespaces
    held = namespaces.hold_many([b"a"], True)
    del core
    with pytest.raises(ClosedError):
        namespaces.hold_many([b"a"], True)
    namespaces.let_go_many(held)


# --- many that come and go: numbers are used again from below, and a peak leaves nothing behind ---


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


def test_held_name_keeps_its_number_through_a_peak(core):
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
