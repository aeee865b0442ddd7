"""Namespaces by number: stable while something carries them, gone afterwards."""

import pytest

from statebackend._core.tables.state_core import StateCore
from statebackend._core.tables.state_table import StateTable


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


def test_passed_windows_leave_nothing_behind(core):
    table = StateTable(core, value="long", namespaces=True, max_parallelism=2)
    for i in range(20_000):
        table.put(1, i, core.namespaces.number(b"window-%d" % i))
        if i >= 10:
            assert table.remove(1, core.namespaces.find(b"window-%d" % (i - 10)))
    assert len(core.namespaces) < 2000
    assert {core.namespaces.name(entry.namespace): entry.value for entry in table} == {
        b"window-%d" % i: i for i in range(19_990, 20_000)
    }


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
        assert held.items(table) == {(1, number): 10}
        held.release()
        while core.advance(1000):
            pass
        for i in range(5000):
            core.namespaces.number(b"more-%d" % i)
        assert core.namespaces.find(b"kept") is None
