"""Rules of vectorised operations, which are atomic.

`test_vectorised_sequences` compares them with loops, `test_type_matrix` has all types and layouts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed
from contract.samples import KEYS, Longest, dump, join

from statebackend import types as t
from statebackend.errors import (
    ClosedError,
    KeyGroupError,
    SerializationError,
    SerializationTypeError,
    UsageError,
)
from statebackend.keys import VOID, key_encoder
from statebackend.keys.key_groups import KeyGroupRange
from statebackend.state import (
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    KeyedStateBackend,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)

pytestmark = pytest.mark.checked

NUMPY_TYPES = [t.LONG, t.INT, t.SHORT, t.BYTE, t.DOUBLE, t.FLOAT]


@pytest.mark.parametrize("key_type", NUMPY_TYPES, ids=repr)
@pytest.mark.parametrize("value_type", NUMPY_TYPES, ids=repr)
def test_numpy_columns(make_keyed: MakeKeyed, key_type: t.Type, value_type: t.Type) -> None:
    descriptor = ReducingStateDescriptor("s", "max", value_type)
    one, many = make_keyed(key_type), make_keyed(key_type)
    columns = [
        np.array(
            [KEYS[declared][n % len(KEYS[declared])] for n in range(7)], declared.arrow.to_pandas_dtype()
        )
        for declared in (key_type, value_type)
    ]
    state = one.get_reducing_state(descriptor)
    for key, value in zip(*(column.tolist() for column in columns), strict=True):
        one.set_current_key(key)
        state.add(value)
    many.get_reducing_state(descriptor).add_many(*columns)
    assert dump(one, descriptor) == dump(many, descriptor)


def test_results_of_a_users_aggregate(keyed: KeyedStateBackend) -> None:
    state = keyed.get_aggregating_state(AggregatingStateDescriptor("s", Longest(), str, str))
    keys, results = state.add_many([1, 2, 1], ["a", "b", "cc"], return_changed=True)
    assert keys.to_pylist() == [1, 2]
    assert results.to_pylist() == [{"length": 2, "text": "cc"}, {"length": 1, "text": "b"}]
    assert state.get_many([3, 1]).to_pylist() == [None, {"length": 2, "text": "cc"}]


def test_results_that_arrow_has_no_type_for(keyed: KeyedStateBackend) -> None:
    class Odd(Longest):
        result_type = None

        def get_result(self, accumulator: Any) -> Any:
            return [1, "a"]

    state = keyed.get_aggregating_state(AggregatingStateDescriptor("s", Odd(), str, str))
    state.add("a")
    with pytest.raises(UsageError, match="result_type"):
        state.get_many([1])
    with pytest.raises(UsageError, match="result_type"):
        state.add_many([1, 2], ["bb", "b"], return_changed=True)
    assert list(keyed.keys("s")) == [1]


def test_the_default_is_read_too(keyed: KeyedStateBackend) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", "struct<a:bigint>", default=(7,)))
    state.update_many([1], [(1,)])
    assert state.get_many([1, 2]).to_pylist() == [{"a": 1}, {"a": 7}]


def test_objects_are_read_as_bytes(keyed: KeyedStateBackend) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", t.PICKLE))
    state.update_many([1, 2, 3], [{"a": 1}, None, (1, 2)])
    keyed.set_current_key(3)
    assert state.value() == (1, 2)
    assert state.get_many([1, 2]).type == pa.binary()
    assert state.get_many([1, 2]).null_count == 1


def test_a_call_needs_no_current_key_and_leaves_it(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    state.update_many([1, 2], [1, 2])
    with pytest.raises(UsageError):
        _ = keyed.current_key
    keyed.set_current_key(7)
    keyed.set_current_namespace("n")
    state.update_many([1, 2], [3, 4])
    assert state.get_many([1, 2, 3]).to_pylist() == [3, 4, None]
    assert keyed.current_key == 7
    keyed.set_current_namespace(VOID)
    assert state.get_many([1, 2, 3]).to_pylist() == [1, 2, None]


def test_empty_columns(keyed: KeyedStateBackend) -> None:
    value = keyed.get_value_state(ValueStateDescriptor("v", str))
    total = keyed.get_reducing_state(ReducingStateDescriptor("r", "sum", int))
    counts = keyed.get_map_state(MapStateDescriptor("m", str, int))
    words = keyed.get_list_state(ListStateDescriptor("l", str))
    for nothing in ([], np.array([], dtype=np.int64), pa.array([], pa.int64())):
        value.update_many(nothing, [])
        words.add_many(nothing, [])
        counts.put_many(nothing, [], [])
        keys, results = total.add_many(nothing, [], return_changed=True)
        assert (keys.type, results.type, len(keys), len(results)) == (pa.int64(), pa.int64(), 0, 0)
        assert value.get_many(nothing).type == pa.string()
        assert words.get_many(nothing).type == pa.list_(pa.string())
        assert len(counts.get_many(nothing, [])) == 0
    assert keyed.num_entries() == 0


# --- atomicity: a call that fails has changed nothing ---


def failing(old: Any, new: Any) -> Any:
    if new == "bad":
        raise ZeroDivisionError
    return join(old, new)


STATES: dict[str, StateDescriptor] = {
    "value": ValueStateDescriptor("value", str),
    "list": ListStateDescriptor("list", str),
    "map": MapStateDescriptor("map", str, str),
    "sum": ReducingStateDescriptor("sum", "sum", "tinyint"),
    "reduce": ReducingStateDescriptor("reduce", failing, str),
    "avg": AggregatingStateDescriptor("avg", "avg", int),
    "fold": FoldingStateDescriptor("fold", "", failing, str),
}
FAILING = [
    ("value", lambda s: s.update_many([1, 2], ["a", 3]), SerializationTypeError),
    ("value", lambda s: s.update_many([1, 2], ["a"]), UsageError),
    ("value", lambda s: s.update_many([1, None], ["a", "b"]), SerializationTypeError),
    ("value", lambda s: s.update_many([1, "x"], ["a", "b"]), SerializationTypeError),
    ("value", lambda s: s.update_many([1, 2**63], ["a", "b"]), OverflowError),
    ("value", lambda s: s.update_many([1, 2], ["a", "\ud800"]), SerializationError),
    ("value", lambda s: s.update_many([1, 2], pa.array([1, 2])), SerializationTypeError),
    ("value", lambda s: s.update_many("12", ["a", "b"]), SerializationTypeError),
    ("value", lambda s: s.update_many(pa.array([1, None]), ["a", "b"]), SerializationTypeError),
    ("value", lambda s: s.clear_many([1, None]), SerializationTypeError),
    ("list", lambda s: s.add_many([1, 2], ["a", None]), SerializationTypeError),
    ("list", lambda s: s.add_many([1, 2], pa.array(["a", None])), SerializationTypeError),
    ("map", lambda s: s.put_many([1, 2], ["a", None], ["x", "y"]), SerializationTypeError),
    ("map", lambda s: s.put_many([1, 2], ["a", "b"], ["x", 1]), SerializationTypeError),
    ("map", lambda s: s.put_many([1, 2], ["a"], ["x", "y"]), UsageError),
    ("map", lambda s: s.remove_many([1, 1], ["k", 1]), SerializationTypeError),
    ("sum", lambda s: s.add_many([1, 2, 1], [1, 1, 127]), OverflowError),
    ("sum", lambda s: s.add_many([2, 3], [1, 128]), OverflowError),
    ("sum", lambda s: s.add_many([2, 3], [None, 1.5], return_changed=True), SerializationTypeError),
    ("reduce", lambda s: s.add_many([2, 1, 1], ["a", "b", "bad"]), ZeroDivisionError),
    ("reduce", lambda s: s.add_many([2, 1], [None, 1]), SerializationTypeError),
    ("avg", lambda s: s.add_many([2, 1], [None, "a"]), SerializationTypeError),
    ("fold", lambda s: s.add_many([2, 1], ["a", "bad"]), ZeroDivisionError),
]


@pytest.mark.parametrize(("name", "call", "error"), FAILING)
def test_a_failed_call_changes_nothing(
    keyed: KeyedStateBackend, name: str, call: Any, error: type[Exception]
) -> None:
    descriptor = STATES[name]
    state = keyed.get_state(descriptor)
    filled = {"map": lambda: state.put("k", "v"), "value": lambda: state.update("v")}
    add_one = filled.get(name) or (lambda: state.add(1 if name in ("sum", "avg") else "v"))
    add_one()
    before = dump(keyed, descriptor)
    with pytest.raises(error) as raised:
        call(state)
    assert dump(keyed, descriptor) == before
    assert keyed.current_key == 1
    if isinstance(raised.value, SerializationError) and "batch" not in str(raised.value):
        assert "position" in str(raised.value)
    add_one()


def test_key_groups_are_checked_before_anything_else(make_keyed: MakeKeyed) -> None:
    groups = {key: key_encoder(int).key_group(key, 8) for key in range(50)}
    own = [key for key, group in groups.items() if group <= 3]
    foreign = [key for key, group in groups.items() if group > 3]
    keyed = make_keyed(int, max_parallelism=8, key_group_range=KeyGroupRange(0, 3))
    called = []
    state = keyed.get_reducing_state(
        ReducingStateDescriptor("s", lambda old, new: called.append(new) or new, int)
    )
    with pytest.raises(KeyGroupError):
        state.add_many([own[0], own[0], own[1], foreign[0]], [1, 2, 3, 4])
    with pytest.raises(KeyGroupError):
        state.get_many([foreign[0]])
    assert called == []
    assert keyed.num_entries() == 0
    state.add_many([own[0], own[0], own[1]], [1, 2, 3])
    assert called == [2]


@pytest.mark.parametrize(
    ("declared", "function", "given", "expected"),
    [
        ("tinyint", lambda a, b: a + b, [100, 100, -100], OverflowError),
        ("bigint", lambda a, b: None if b == 2 else a + b, [1, 2, 3], SerializationTypeError),
        ("bigint", lambda a, b: "x" if b == 2 else b, [1, 2, 3], SerializationTypeError),
        ("float", lambda a, b: a + b, [2.0**24, 1.0, 1.0], 2.0**24),
    ],
)
def test_what_comes_between_rows_is_stored(
    keyed: KeyedStateBackend, declared: str, function: Any, given: list[Any], expected: Any
) -> None:
    """A column of one key does what one call after the other does: each result has to fit the type, and is rounded."""
    state = keyed.get_reducing_state(ReducingStateDescriptor("r", function, declared))
    if isinstance(expected, type):
        with pytest.raises(expected):
            state.add_many([1] * len(given), given)
        assert state.get() is None
    else:
        state.add_many([1] * len(given), given)
        assert state.get() == expected


@pytest.mark.parametrize("form", ["arrow", "list"])
def test_errors_name_the_state_and_the_position(keyed: KeyedStateBackend, form: str) -> None:
    columns: Any = pa.array if form == "arrow" else list
    value = keyed.get_value_state(ValueStateDescriptor("v", str))
    maps = keyed.get_map_state(MapStateDescriptor("m", str, int))
    for call in (
        lambda: value.update_many([1, 2], columns([1, 2])),
        lambda: maps.put_many([1, 2], ["a", "b"], columns(["x", "y"])),
        lambda: maps.get_many([1, 2], columns([1, 2])),
    ):
        with pytest.raises(SerializationError, match=r"state '[vm]'.*position 0"):
            call()
    with pytest.raises(OverflowError, match="position 1"):
        keyed.get_value_state(ValueStateDescriptor("b", "tinyint")).update_many([1, 2], columns([1, 300]))
    assert keyed.num_entries() == 0


@pytest.mark.parametrize("columns", [{}, {"namespaces": ["n"]}], ids=["", "namespaces"])
def test_a_closed_backend_refuses(make_keyed: MakeKeyed, columns: dict[str, Any]) -> None:
    keyed = make_keyed()
    states: list[Any] = [
        keyed.get_value_state(ValueStateDescriptor("v", str)),
        keyed.get_reducing_state(ReducingStateDescriptor("r", "sum", int)),
        keyed.get_list_state(ListStateDescriptor("l", int)),
    ]
    keyed.close()
    for state in states:
        for call in (state.get_many, state.clear_many):
            with pytest.raises(ClosedError):
                call([1], **columns)
    with pytest.raises(ClosedError):
        states[1].add_many([1], [1], **columns)


def test_keys_are_looked_at_before_map_keys(make_keyed: MakeKeyed) -> None:
    state = make_keyed(int).get_map_state(MapStateDescriptor("m", int, int))
    calls = (
        lambda keys: state.put_many(keys, ["b"], [1]),
        lambda keys: state.get_many(keys, ["b"]),
        lambda keys: state.remove_many(keys, ["b"]),
    )
    for call in calls:
        with pytest.raises(SerializationError, match="map keys of state 'm'"):
            call([1])
        with pytest.raises(SerializationError) as raised:
            call(["a"])
        assert "map keys" not in str(raised.value)
