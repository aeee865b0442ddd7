"""The rules of map states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from contract.conftest import Keyed, MakeKeyed
from type_samples import Backwards

import statebackend as sb

pytestmark = pytest.mark.checked


@pytest.fixture
def state(keyed: Keyed) -> sb.MapState:
    return keyed.get_map_state(sb.MapStateDescriptor("s", str, int))


def test_none_among_objects_of_a_users_serializer_is_never_copied(make_keyed: MakeKeyed) -> None:
    """Its copy() and serialize() take values only; a read below a mark copies what can be changed."""
    keyed = make_keyed()
    keyed.set_current_key(0)
    state = keyed.get_map_state(sb.MapStateDescriptor("s", int, Backwards()))
    state.put_all({1: None, 2: "ab"})
    mark = keyed.mark()
    assert dict(state.items()) == {1: None, 2: "ab"}
    assert state[1] is None
    assert state.get_many([0], [1]).to_pylist() == [None]
    state.put(1, "c")
    keyed.rollback(mark)
    assert list(state.values()) == [None, "ab"]


def test_methods_and_operators_agree(state: sb.MapState) -> None:
    state.put("a", 1)
    state["b"] = 2
    assert (state.get("a"), state["b"], state.get("c"), state.get("c", 7)) == (1, 2, None, 7)
    assert state.contains("a")
    assert "b" in state
    assert "c" not in state
    assert list(state) == list(state.keys()) == ["a", "b"]
    assert list(state.values()) == [1, 2]
    assert list(state.items()) == [("a", 1), ("b", 2)]
    state.remove("a")
    del state["b"]
    assert state.is_empty()


def test_an_absent_key_is_a_key_error_for_operators_only(state: sb.MapState) -> None:
    state["a"] = 1
    with pytest.raises(KeyError) as raised:
        state["secret"]
    assert "secret" not in str(raised.value)
    with pytest.raises(KeyError):
        del state["secret"]
    state.remove("secret")
    assert list(state.items()) == [("a", 1)]


def test_values_may_be_none(keyed: Keyed, state: sb.MapState) -> None:
    state["a"] = None
    assert state.contains("a")
    assert state["a"] is None
    assert state.get("a", 7) is None
    assert state.exists()
    assert list(state.items()) == [("a", None)]
    state["a"] = 1
    state.put_all({"a": None})
    assert state["a"] is None
    assert keyed.num_entries() == 1


@pytest.mark.parametrize(
    "empty",
    [
        lambda s: (s.remove("a"), s.remove("b")),
        lambda s: (s.__delitem__("b"), s.__delitem__("a")),
        lambda s: s.clear(),
        lambda s: s.remove_many([1, 1], ["a", "b"]),
        lambda s: s.clear_many([1]),
        lambda s: s.backend.clear_key(),
        lambda s: [s.remove(key) for key in list(s)],
    ],
)
def test_an_emptied_map_leaves_nothing_behind(keyed: Keyed, state: sb.MapState, empty: Any) -> None:
    state.put_all({"a": 1, "b": 2})
    empty(state)
    assert state.is_empty()
    assert not state.exists()
    assert list(state.items()) == []
    assert keyed.num_entries() == 0
    assert list(keyed.keys("s")) == []


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.put(None, 1),
        lambda s: s.put_all(None),
        lambda s: s.put_all({"a": 1, None: 2}),
        lambda s: s.put_all({"a": 1, "b": "x"}),
        lambda s: s.put_all({"a": 1, 2: 2}),
        lambda s: s.put_all([("a", 1)]),
        lambda s: s.put("a", "x"),
        lambda s: s.get(None),
        lambda s: s.contains(None),
        lambda s: s.remove(None),
        lambda s: s[None],
    ],
)
def test_refused_calls_change_nothing(keyed: Keyed, state: sb.MapState, present: bool, call: Any) -> None:
    if present:
        state["p"] = 7
    with pytest.raises(sb.SerializationTypeError):
        call(state)
    assert list(state.items()) == [("p", 7)] * present
    assert keyed.num_entries() == present


@pytest.mark.parametrize("view", ["keys", "values", "items", "__iter__"])
@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.put("z", 9),
        lambda s: s.put_all({"a": 5, "z": 9}),
        lambda s: s.remove("a"),
        lambda s: s.remove("c"),
        lambda s: s.clear(),
        lambda s: s.backend.clear_key(),
        lambda s: s.put_many([1], ["z"], [1]),
    ],
)
def test_keys_changed_while_iterating_raise_at_next_step(state: sb.MapState, view: str, change: Any) -> None:
    state.put_all({"a": 1, "b": 2, "c": 3})
    steps = getattr(state, view)()
    next(steps)
    change(state)
    with pytest.raises(RuntimeError):
        next(steps)


def test_values_may_be_replaced_while_iterating(state: sb.MapState) -> None:
    state.put_all({"a": 1, "b": 2, "c": 3})
    for key, value in state.items():
        state[key] = value * 10
    assert list(state.values()) == [10, 20, 30]


def test_other_keys_may_change_while_iterating(keyed: Keyed, state: sb.MapState) -> None:
    state.put_all({"a": 1, "b": 2})
    steps = state.items()
    keyed.set_current_key(2)
    state["z"] = 1
    keyed.set_current_namespace("n")
    state["z"] = 2
    assert list(steps) == [("a", 1), ("b", 2)]


def test_values_of_any_width_with_nulls_within(make_keyed: MakeKeyed, tmp_path: Path) -> None:
    """Records of 2 to 17 bytes: one by one, in a batch, restored. The flag of a null lies beside them."""
    keys = list(range(12))
    keyed = make_keyed()
    written = []
    for fields in range(1, 16):
        declared = f"struct<{','.join(f'f{i}:tinyint' for i in range(fields))}>"
        made = [
            None if key == 5 else tuple(None if key % 3 == 1 else -key for _ in range(fields)) for key in keys
        ]
        descriptor = sb.MapStateDescriptor(f"rows {fields}", "bigint", declared)
        written.append((descriptor, made))
        state = keyed.get_map_state(descriptor)
        for key, value in zip(keys, made, strict=True):
            keyed.set_current_key(key)
            state.put(0, value)
        column = [None if row is None else {f"f{i}": each for i, each in enumerate(row)} for row in made]
        arrow = pa.struct([(f"f{i}", pa.int8()) for i in range(fields)])
        state.put_many(keys, [1] * len(keys), pa.array(column, arrow))
    for each in (keyed, make_keyed(restore=keyed.savepoint(tmp_path / "savepoint"))):
        for descriptor, made in written:
            state = each.get_map_state(descriptor)
            for key, value in zip(keys, made, strict=True):
                each.set_current_key(key)
                assert dict(state.items()) == {0: value, 1: value}
                assert 0 in state
