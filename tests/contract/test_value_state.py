"""The rules of value states."""

from __future__ import annotations

from typing import Any

import pytest
from contract.conftest import Keyed

import statebackend as sb

pytestmark = pytest.mark.checked


def test_a_value_is_present_until_it_is_cleared(keyed: Keyed) -> None:
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", int))
    for clear in (state.clear, lambda: state.update(None)):
        clear()
        assert state.value() is None
        assert not state.exists()
        assert keyed.num_entries() == 0
        state.update(0)
        assert state.value() == 0
        assert state.exists()
    keyed.set_current_key(2)
    assert state.value() is None


@pytest.mark.parametrize(("declared", "default"), [("bigint", 7), ("array<bigint>", [1]), ("string", "")])
def test_the_default_is_returned_as_a_copy(keyed: Keyed, declared: str, default: Any) -> None:
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", declared, default=default))
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


def test_the_newest_default_counts(keyed: Keyed) -> None:
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", int, default=1))
    assert keyed.get_value_state(sb.ValueStateDescriptor("s", int, default=2)) is state
    assert state.value() == 2
