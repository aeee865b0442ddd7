"""Rules of vectorised operations, which are atomic.

`test_vectorised_sequences` compares them with loops, `test_type_matrix` has all types and layouts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import Keyed, MakeKeyed
from contract.samples import Longest, dump, join

import statebackend as sb
from statebackend import types as t
from statebackend.keys import key_encoder
from statebackend.state import StateDescriptor

pytestmark = pytest.mark.checked


def test_results_without_an_arrow_type(keyed: Keyed) -> None:
    class Odd(Longest):
        result_type = None

        def get_result(self, accumulator: Any) -> Any:
            return [1, "a"]

    state = keyed.get_aggregating_state(sb.AggregatingStateDescriptor("s", Odd(), str, str))
    state.add("a")
    with pytest.raises(sb.UsageError, match="result_type"):
        state.get_many([1])
    with pytest.raises(sb.UsageError, match="result_type"):
        state.add_many([1, 2], ["bb", "b"], return_changed=True)
    assert list(keyed.keys("s")) == [1]


def test_objects_are_read_as_bytes(keyed: Keyed) -> None:
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", t.PICKLE))
    state.update_many([1, 2, 3], [{"a": 1}, None, (1, 2)])
    keyed.set_current_key(3)
    assert state.value() == (1, 2)
    assert state.get_many([1, 2]).type == pa.binary()
    assert state.get_many([1, 2]).null_count == 1


def test_empty_columns(keyed: Keyed) -> None:
    value = keyed.get_value_state(sb.ValueStateDescriptor("v", str))
    total = keyed.get_reducing_state(sb.ReducingStateDescriptor("r", "sum", int))
    counts = keyed.get_map_state(sb.MapStateDescriptor("m", str, int))
    words = keyed.get_list_state(sb.ListStateDescriptor("l", str))
    for nothing in ([], np.array([], dtype=np.int64), pa.array([], pa.int64())):
        value.update_many(nothing, [])
        words.add_many(nothing, [])
        counts.put_many(nothing, [], [])
        keys, results, _ = total.add_many(nothing, [], return_changed=True)
        assert (keys.type, results.type, len(keys), len(results)) == (pa.int64(), pa.int64(), 0, 0)
        assert value.get_many(nothing).type == pa.string()
        assert words.get_many(nothing).type == pa.list_(pa.string())
        assert len(counts.get_many(nothing, [])) == 0
    assert keyed.num_entries() == 0


def failing(old: Any, new: Any) -> Any:
    if new == "bad":
        raise ZeroDivisionError
    return join(old, new)


STATES: dict[str, StateDescriptor] = {
    "value": sb.ValueStateDescriptor("value", str),
    "list": sb.ListStateDescriptor("list", str),
    "map": sb.MapStateDescriptor("map", str, str),
    "sum": sb.ReducingStateDescriptor("sum", "sum", "tinyint"),
    "reduce": sb.ReducingStateDescriptor("reduce", failing, str),
    "avg": sb.AggregatingStateDescriptor("avg", "avg", int),
    "fold": sb.FoldingStateDescriptor("fold", "", failing, str),
}
FAILING: list[tuple[str, str, tuple[Any, ...], type[Exception]]] = [
    ("value", "update_many", ([1, 2], ["a", 3]), sb.SerializationTypeError),
    ("value", "update_many", ([1, 2], ["a"]), sb.UsageError),
    ("value", "update_many", ([1, None], ["a", "b"]), sb.SerializationTypeError),
    ("value", "update_many", ([1, "x"], ["a", "b"]), sb.SerializationTypeError),
    ("value", "update_many", ([1, 2**63], ["a", "b"]), OverflowError),
    ("value", "update_many", ([1, 2], ["a", "\ud800"]), sb.SerializationError),
    ("value", "update_many", ([1, 2], pa.array([1, 2])), sb.SerializationTypeError),
    ("value", "update_many", ("12", ["a", "b"]), sb.SerializationTypeError),
    ("value", "update_many", (pa.array([1, None]), ["a", "b"]), sb.SerializationTypeError),
    ("value", "clear_many", ([1, None],), sb.SerializationTypeError),
    ("list", "add_many", ([1, 2], ["a", None]), sb.SerializationTypeError),
    ("list", "add_many", ([1, 2], pa.array(["a", None])), sb.SerializationTypeError),
    ("map", "put_many", ([1, 2], ["a", None], ["x", "y"]), sb.SerializationTypeError),
    ("map", "put_many", ([1, 2], ["a", "b"], ["x", 1]), sb.SerializationTypeError),
    ("map", "put_many", ([1, 2], ["a"], ["x", "y"]), sb.UsageError),
    ("map", "remove_many", ([1, 1], ["k", 1]), sb.SerializationTypeError),
    ("sum", "add_many", ([1, 2, 1], [1, 1, 127]), OverflowError),
    ("sum", "add_many", ([2, 3], [1, 128]), OverflowError),
    ("sum", "add_many", ([2, 3], [None, 1.5]), sb.SerializationTypeError),
    ("reduce", "add_many", ([2, 1, 1], ["a", "b", "bad"]), ZeroDivisionError),
    ("reduce", "add_many", ([2, 1], [None, 1]), sb.SerializationTypeError),
    ("avg", "add_many", ([2, 1], [None, "a"]), sb.SerializationTypeError),
    ("fold", "add_many", ([2, 1], ["a", "bad"]), ZeroDivisionError),
]
NAMESPACES = [sb.TimeWindow(0, 1), sb.VOID]


@pytest.mark.parametrize("spaces", [[sb.VOID], NAMESPACES], ids=["", "namespaces"])
def test_a_failed_call_changes_nothing(keyed: Keyed, spaces: list[Any]) -> None:
    for name, method, columns, error in FAILING:
        descriptor = STATES[name]
        state = keyed.get_state(descriptor)
        filled = {"map": lambda: state.put("k", "v"), "value": lambda: state.update("v")}  # noqa: B023
        add_one = filled.get(name) or (lambda: state.add(1 if name in ("sum", "avg") else "v"))  # noqa: B023
        for space in spaces:
            keyed.set_current_namespace(space)
            state.clear()
            add_one()
        before = dump(keyed, descriptor)
        options = (
            {}
            if spaces == [sb.VOID]
            else {"namespaces": [spaces[0], spaces[-1], spaces[0]][: len(columns[0])]}
        )
        with pytest.raises(error) as raised:
            getattr(state, method)(*columns, **options)
        assert dump(keyed, descriptor) == before, (name, method, columns)
        assert (keyed.current_key, keyed.current_namespace) == (1, sb.VOID)
        if isinstance(raised.value, sb.SerializationError) and "batch" not in str(raised.value):
            assert "position" in str(raised.value)
        add_one()


def test_key_groups_are_checked_before_anything_else(make_keyed: MakeKeyed) -> None:
    groups = {key: key_encoder(int).key_group(key, 8) for key in range(50)}
    own = [key for key, group in groups.items() if group <= 3]
    foreign = [key for key, group in groups.items() if group > 3]
    keyed = make_keyed(int, max_parallelism=8, key_group_range=sb.KeyGroupRange(0, 3))
    called = []
    state = keyed.get_reducing_state(
        sb.ReducingStateDescriptor("s", lambda old, new: called.append(new) or new, int)
    )
    window = sb.TimeWindow(0, 1)
    for spaces in (None, [window] * 4, [window, sb.VOID] * 2, [sb.VOID, window] * 2):
        with pytest.raises(sb.KeyGroupError):
            state.add_many([own[0], own[0], own[1], foreign[0]], [1, 2, 3, 4], namespaces=spaces)
        with pytest.raises(sb.KeyGroupError):
            state.get_many([foreign[0]], namespaces=spaces and spaces[:1])
    assert called == []
    assert keyed.num_entries() == 0
    state.add_many([own[0], own[0], own[1]], [1, 2, 3])
    assert called == [2]


@pytest.mark.parametrize(
    ("declared", "function", "given", "expected"),
    [
        ("tinyint", lambda a, b: a + b, [100, 100, -100], OverflowError),
        ("bigint", lambda a, b: None if b == 2 else a + b, [1, 2, 3], sb.SerializationTypeError),
        ("bigint", lambda a, b: "x" if b == 2 else b, [1, 2, 3], sb.SerializationTypeError),
        ("float", lambda a, b: a + b, [2.0**24, 1.0, 1.0], 2.0**24),
    ],
)
def test_results_between_rows_must_fit_the_type_and_are_rounded(
    keyed: Keyed, declared: str, function: Any, given: list[Any], expected: Any
) -> None:
    """A column of one key does what one call after the other does: each result has to fit the type, and is rounded."""
    state = keyed.get_reducing_state(sb.ReducingStateDescriptor("r", function, declared))
    if isinstance(expected, type):
        with pytest.raises(expected):
            state.add_many([1] * len(given), given)
        assert state.get() is None
    else:
        state.add_many([1] * len(given), given)
        assert state.get() == expected


def test_keys_are_looked_at_before_map_keys(make_keyed: MakeKeyed) -> None:
    state = make_keyed(int).get_map_state(sb.MapStateDescriptor("m", int, int))
    calls = (
        lambda keys: state.put_many(keys, ["b"], [1]),
        lambda keys: state.get_many(keys, ["b"]),
        lambda keys: state.remove_many(keys, ["b"]),
    )
    for call in calls:
        with pytest.raises(sb.SerializationError, match="map keys of state 'm'"):
            call([1])
        with pytest.raises(sb.SerializationError) as raised:
            call(["a"])
        assert "map keys" not in str(raised.value)
