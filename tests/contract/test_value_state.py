"""The rules of value states."""

from __future__ import annotations

from typing import Any

import pytest

from statebackend.state import KeyedStateBackend, ValueStateDescriptor

pytestmark = pytest.mark.checked


def test_absent_and_present(keyed: KeyedStateBackend) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    assert state.value() is None
    assert not state.exists()
    state.update(0)
    assert state.value() == 0
    assert state.exists()
    keyed.set_current_key(2)
    assert state.value() is None


def test_update_none_clears(keyed: KeyedStateBackend) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    state.update(1)
    state.update(None)
    assert not state.exists()
    assert keyed.num_entries() == 0
    state.update(None)
    state.clear()
    assert keyed.num_entries() == 0


@pytest.mark.parametrize(("declared", "default"), [("bigint", 7), ("array<bigint>", [1]), ("string", "")])
def test_the_default_is_returned_as_a_copy(keyed: KeyedStateBackend, declared: str, default: Any) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", declared, default=default))
    assert state.value() == default
    assert not state.exists()
    if isinstance(default, list):
        state.value().append(2)
        assert state.value() == default
    state.update(default)
    assert state.exists()
    state.clear()
    assert state.value() == default
    assert list(keyed.keys("s")) == []


def test_the_newest_default_counts(keyed: KeyedStateBackend) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", int, default=1))
    assert keyed.get_value_state(ValueStateDescriptor("s", int, default=2)) is state
    assert state.value() == 2
