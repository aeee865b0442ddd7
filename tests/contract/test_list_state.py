"""The rules of list states."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from contract.conftest import Keyed

import statebackend as sb
from statebackend import types as t
from statebackend.state import KeyedListState

pytestmark = pytest.mark.checked


@pytest.fixture
def state(keyed: Keyed) -> KeyedListState:
    return keyed.get_list_state(sb.ListStateDescriptor("s", int))


def test_order_is_kept_and_an_empty_list_is_absent(keyed: Keyed, state: sb.KeyedListState) -> None:
    for empty in (lambda: state.add_all([]), lambda: state.update([])):
        empty()
        assert state.get() == list(state) == []
        assert not state.exists()
        assert keyed.num_entries() == 0
        state.add(3)
        state.add_all([1, 2])
        state.add(1)
        state.add_all(iter(()))
        assert state.get() == list(state) == [3, 1, 2, 1]
        state.update([9])
        assert state.get() == [9]
        state.update([])
        assert keyed.num_entries() == 0


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("add", None),
        ("add_all", None),
        ("update", None),
        ("add_all", [1, None]),
        ("update", [1, None]),
        ("add_all", [1, "a"]),
        ("update", ["a"]),
        ("add_all", "12"),
        ("update", b"12"),
        ("add_all", 1),
    ],
)
def test_refused_calls_change_nothing(
    keyed: Keyed, state: KeyedListState, present: bool, method: str, argument: Any
) -> None:
    if present:
        state.add(7)
    with pytest.raises((sb.SerializationTypeError, TypeError)):
        getattr(state, method)(argument)
    assert state.get() == [7] * present
    assert keyed.num_entries() == present


def test_an_iterable_that_fails_changes_nothing(state: KeyedListState) -> None:
    def failing() -> Any:
        yield 1
        raise ZeroDivisionError

    state.add(7)
    for method in (state.add_all, state.update):
        with pytest.raises(ZeroDivisionError):
            method(failing())
    assert state.get() == [7]


def test_any_iterable_will_do(state: KeyedListState) -> None:
    state.add_all(range(2))
    state.add_all(x for x in (2, 3))
    state.add_all(pa.array([4, 5]))
    state.add_all(state)
    assert state.get() == [0, 1, 2, 3, 4, 5] * 2
    state.update(reversed(state.get()))
    assert state.get() == [5, 4, 3, 2, 1, 0] * 2


@pytest.mark.parametrize("method", ["add_all", "update"])
def test_wrong_columns_are_refused(keyed: Keyed, method: str) -> None:
    pairs = keyed.get_list_state(sb.ListStateDescriptor("pairs", tuple[int, str]))
    getattr(pairs, method)(pa.array([{"x": 1, "y": "a"}, {"x": 2, "y": None}]))
    for wrong in (
        pa.array([{"x": 1}]),
        pa.array([{"x": 1, "y": "a"}, None]),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([b"\xff"]).view(pa.string())], ["x", "y"]),
    ):
        with pytest.raises(sb.SerializationError, match="state 'pairs'"):
            getattr(pairs, method)(wrong)
    assert pairs.get() == [(1, "a"), (2, None)]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.add(9),
        lambda s: s.add_all([9]),
        lambda s: s.update([9]),
        lambda s: s.update([]),
        lambda s: s.clear(),
        lambda s: s.backend.clear_key(),
        lambda s: s.add_many([1], [9]),
        lambda s: s.clear_many([1]),
    ],
)
@pytest.mark.parametrize("declared", [t.LONG, t.PICKLE], ids=repr)
def test_a_change_while_iterating_raises_at_next_step(keyed: Keyed, declared: t.Type, change: Any) -> None:
    state = keyed.get_list_state(sb.ListStateDescriptor("changed", declared))
    state.update([1, 2, 3])
    steps = iter(state)
    assert next(steps) == 1
    change(state)
    with pytest.raises(RuntimeError):
        next(steps)


def test_other_keys_may_change_while_iterating(keyed: Keyed, state: KeyedListState) -> None:
    state.update([1, 2])
    steps = iter(state)
    keyed.set_current_key(2)
    state.add(5)
    keyed.set_current_namespace("n")
    state.add(6)
    assert list(steps) == [1, 2]
