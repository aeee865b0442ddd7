"""Keys and entries, functions over all keys, and removing whole keys."""

from __future__ import annotations

from typing import Any

import pytest
from contract.conftest import MakeKeyed
from contract.samples import KINDS, Kind

import statebackend as sb
from statebackend import types as t

pytestmark = pytest.mark.checked


@pytest.fixture
def filled(keyed: sb.KeyedStateBackend) -> sb.KeyedStateBackend:
    """``a`` has keys 1, 2, 3 without a namespace and 3, 4 in "n"; ``b`` has 3, 5. Current are 9 and "n"."""
    a = keyed.get_value_state(sb.ValueStateDescriptor("a", int))
    b = keyed.get_list_state(sb.ListStateDescriptor("b", int))
    for key in (1, 2, 3):
        keyed.set_current_key(key)
        a.update(key)
    for key in (3, 5):
        keyed.set_current_key(key)
        b.add(key)
    keyed.set_current_namespace("n")
    for key in (3, 4):
        keyed.set_current_key(key)
        a.update(key * 10)
    keyed.set_current_key(9)
    return keyed


def test_keys(filled: sb.KeyedStateBackend) -> None:
    assert sorted(filled.keys("a")) == [1, 2, 3]
    assert sorted(filled.keys("a", "n")) == [3, 4]
    assert sorted(filled.keys("a", sb.ALL_NAMESPACES)) == [1, 2, 3, 4]
    assert list(filled.keys("a", "other")) == []
    assert sorted(filled.keys_of(["a", "b"])) == [1, 2, 3, 5]
    assert sorted(filled.keys_of(["b", "a"], sb.ALL_NAMESPACES)) == [1, 2, 3, 4, 5]
    assert list(filled.keys_of([])) == []
    pairs = sorted(filled.keys_and_namespaces("a"), key=str)
    assert pairs == [(1, sb.VOID), (2, sb.VOID), (3, "n"), (3, sb.VOID), (4, "n")]
    assert filled.current_key == 9
    assert filled.current_namespace == "n"


def test_counts(filled: sb.KeyedStateBackend) -> None:
    assert filled.num_entries("a") == 5
    assert filled.num_entries("b") == 2
    assert filled.num_entries() == 7
    counts = filled.get_map_state(sb.MapStateDescriptor("m", str, int))
    counts.put_all({"x": 1, "y": 2})
    assert filled.num_entries("m") == 1


def test_enumeration_needs_no_current_key(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    keyed.get_value_state(sb.ValueStateDescriptor("a", int))
    assert list(keyed.keys("a")) == list(keyed.keys_and_namespaces("a")) == []
    assert keyed.num_entries() == keyed.num_entries("a") == 0
    with pytest.raises(sb.UsageError):
        _ = keyed.current_key


@pytest.mark.parametrize(
    "call",
    [
        lambda k: k.keys("c"),
        lambda k: k.keys_of(["a", "c"]),
        lambda k: k.keys_and_namespaces("c"),
        lambda k: k.num_entries("c"),
    ],
)
def test_an_unknown_name_raises(filled: sb.KeyedStateBackend, call: Any) -> None:
    with pytest.raises(sb.UsageError, match="'c'.*'a', 'b'"):
        call(filled)


def test_one_name_where_several_are_taken(filled: sb.KeyedStateBackend) -> None:
    with pytest.raises(sb.UsageError, match="several"):
        filled.keys_of("ab")


def test_state_may_be_changed_while_enumerating(filled: sb.KeyedStateBackend) -> None:
    a = filled.get_value_state(sb.ValueStateDescriptor("a", int))
    filled.set_current_namespace(sb.VOID)
    seen = []
    for key in filled.keys("a"):
        seen.append(key)
        filled.set_current_key(key)
        a.clear()
        filled.set_current_key(key + 100)
        a.update(0)
    assert sorted(seen) == [1, 2, 3]
    assert sorted(filled.keys("a")) == [101, 102, 103]


def test_apply_to_all_keys(filled: sb.KeyedStateBackend) -> None:
    descriptor = sb.ValueStateDescriptor("a", int)
    state = filled.get_value_state(descriptor)
    seen = []

    def double(key: Any, given: Any) -> None:
        assert given is state
        assert filled.current_key == key
        seen.append((key, filled.current_namespace))
        given.update(given.value() * 2)

    filled.apply_to_all_keys(descriptor, double)
    assert sorted(seen) == [(1, sb.VOID), (2, sb.VOID), (3, sb.VOID)]
    filled.apply_to_all_keys(descriptor, double, "n")
    assert sorted(seen[3:]) == [(3, "n"), (4, "n")]
    del seen[:]
    filled.apply_to_all_keys(descriptor, double, sb.ALL_NAMESPACES)
    assert len(seen) == 5
    assert filled.current_key == 9
    assert filled.current_namespace == "n"
    filled.set_current_key(4)
    assert state.value() == 160
    filled.set_current_namespace(sb.VOID)
    filled.set_current_key(3)
    assert state.value() == 12


def test_apply_goes_over_the_keys_at_the_call(filled: sb.KeyedStateBackend) -> None:
    seen = []

    def move(key: Any, state: Any) -> None:
        seen.append((key, state.value()))
        filled.clear_key()
        for other in (1, 2, 3):
            filled.set_current_key(other)
            state.clear()
        filled.set_current_key(key + 100)
        state.update(key)

    filled.apply_to_all_keys(sb.ValueStateDescriptor("a", int), move)
    assert sorted(key for key, _ in seen) == [1, 2, 3]
    assert sorted(str(value) for _, value in seen)[1:] == ["None", "None"]


def test_apply_restores_key_and_namespace_after_an_error(filled: sb.KeyedStateBackend) -> None:
    def fail(key: Any, state: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        filled.apply_to_all_keys(sb.ValueStateDescriptor("a", int), fail)
    assert filled.current_key == 9
    assert filled.current_namespace == "n"


def test_apply_without_a_current_key_leaves_none(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    descriptor = sb.ValueStateDescriptor("a", int)
    keyed.get_value_state(descriptor).update_many([1, 2], [1, 2])
    keyed.apply_to_all_keys(descriptor, lambda key, state: state.clear())
    assert keyed.num_entries() == 0
    with pytest.raises(sb.UsageError):
        _ = keyed.current_key


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_clear_key_removes_all_states_in_all_namespaces(keyed: sb.KeyedStateBackend, kind: Kind) -> None:
    states = [keyed.get_state(kind.descriptor(name, t.LONG)) for name in ("a", "b")]
    for key in (1, 2):
        keyed.set_current_key(key)
        for namespace in (sb.VOID, "n", sb.TimeWindow(0, 1)):
            keyed.set_current_namespace(namespace)
            for state in states:
                kind.write(state, key)
    keyed.clear_key()
    assert keyed.num_entries() == 6
    assert set(keyed.keys_of(["a", "b"], sb.ALL_NAMESPACES)) == {1}
    assert not states[0].exists()
    keyed.clear_key()
    kind.write(states[0], 5)
    assert kind.read(states[0]) == 5


def test_metrics_count_entries(filled: sb.KeyedStateBackend) -> None:
    metrics = filled.metrics()
    assert metrics["entries"] == 7
    assert metrics["states"]["a"]["entries"] == 5
    assert metrics["states"]["b"]["kind"] == "list"
