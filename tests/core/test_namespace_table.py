"""Namespaces by number: stable while something carries them, gone afterwards."""

import numpy as np
import pytest

from statebackend._core.core_probe import StateTable
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import ClosedError

pytestmark = pytest.mark.checked


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
def test_what_is_no_name_leaves_nothing_held(core, names):
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
