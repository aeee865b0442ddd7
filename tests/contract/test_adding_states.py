"""The rules of reducing, aggregating and folding states, and the results of what has a name."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import pytest
from contract.conftest import Keyed
from contract.samples import Longest
from type_samples import same

import statebackend as sb

pytestmark = pytest.mark.checked

NAN, INF = float("nan"), float("inf")

DESCRIPTORS = [
    sb.ReducingStateDescriptor("s", "sum", int),
    sb.ReducingStateDescriptor("s", lambda old, new: old + new, int),
    sb.AggregatingStateDescriptor("s", "sum", int),
    sb.FoldingStateDescriptor("s", 0, lambda old, new: old + new, int),
]


@pytest.mark.parametrize("descriptor", DESCRIPTORS, ids=lambda d: f"{d.kind}-{d._function_name()}")
def test_adding(keyed: Keyed, descriptor: Any) -> None:
    """None and `clear` leave nothing behind; an overflow changes nothing."""
    state = keyed.get_state(descriptor)
    for clear in (state.clear, lambda: state.add(None)):
        clear()
        assert state.get() is None
        assert not state.exists()
        assert keyed.num_entries() == 0
        with pytest.raises(OverflowError):
            state.add(2**63)
        assert state.get() is None
        state.add(0)
        assert state.get() == 0
        state.add(2)
        state.add(3)
        with pytest.raises(OverflowError):
            state.add(2**63 - 1)
        assert state.get() == 5
    keyed.set_current_key(2)
    assert state.get() is None


def failing(*_: Any) -> Any:
    raise ZeroDivisionError


def nothing(*_: Any) -> Any:
    return None


def text(*_: Any) -> Any:
    return "text"


@pytest.mark.parametrize(
    ("function", "error"),
    [(failing, ZeroDivisionError), (nothing, sb.SerializationTypeError), (text, sb.SerializationTypeError)],
)
def test_a_function_that_fails_changes_nothing(keyed: Keyed, function: Any, error: type[Exception]) -> None:
    class Failing(Longest):
        add = staticmethod(function)  # type: ignore[assignment]

    reducing = keyed.get_reducing_state(sb.ReducingStateDescriptor("r", function, int))
    folding = keyed.get_folding_state(sb.FoldingStateDescriptor("f", 0, function, int))
    aggregating = keyed.get_aggregating_state(sb.AggregatingStateDescriptor("a", Failing(), str, int))
    reducing.add(1)
    with pytest.raises(error):
        reducing.add(2)
    with pytest.raises(error):
        folding.add(2)
    with pytest.raises(error):
        aggregating.add("a")
    assert reducing.get() == 1
    assert folding.get() is None
    assert aggregating.get() is None


def test_the_newest_function_counts(keyed: Keyed) -> None:
    state = keyed.get_reducing_state(sb.ReducingStateDescriptor("s", failing, int))
    state.add(1)
    keyed.get_reducing_state(sb.ReducingStateDescriptor("s", lambda old, new: old * 10 + new, int))
    state.add(2)
    assert state.get() == 12


def test_an_aggregate_function(keyed: Keyed) -> None:
    state = keyed.get_aggregating_state(sb.AggregatingStateDescriptor("s", Longest(), str, str))
    assert state.get() is None
    for word in ("bb", "a", "ccc"):
        state.add(word)
    assert state.get() == (3, "ccc")
    with pytest.raises(sb.SerializationTypeError):
        state.add(1)


@pytest.mark.parametrize(
    "column",
    [
        np.array([100, 100], "i1"),
        np.array([200, 100], "u1"),
        np.array([2**62, 2**62]),
        np.array([0.5, 0.25], "f4"),
        np.array([True, False]),
        np.array(["a", "b"]),
        np.array([b"a", b"b"]),
    ],
    ids=lambda column: str(column.dtype),
)
def test_functions_get_numpys_values_as_pythons(keyed: Keyed, column: np.ndarray[Any, Any]) -> None:
    """Numpy's own calculate in their width: twice 100 is -56 in a byte, or an error."""
    given: list[Any] = []

    def fold(accumulator: str, value: Any) -> str:
        given.append(value)
        return accumulator + repr(value + value)

    state = keyed.get_folding_state(sb.FoldingStateDescriptor("s", "", fold, str))
    state.add_many([1, 2], column)
    assert given == column.tolist()
    assert [type(each) for each in given] == [type(column.tolist()[0])] * 2
    assert state.get_many([1, 2]).to_pylist() == [repr(2 * each) for each in column.tolist()]


def test_values_of_no_declared_type_reach_the_function(keyed: Keyed) -> None:
    class Parts(Longest):
        def add(self, value: Any, accumulator: Any) -> Any:
            return accumulator + type(value).__name__

    state = keyed.get_aggregating_state(sb.AggregatingStateDescriptor("s", Parts(), None, str))
    state.add(1)
    state.add({})
    assert state.get() == (7, "intdict")


def test_an_accumulator_may_be_changed_in_place(keyed: Keyed) -> None:
    def append(old: Any, new: Any) -> Any:
        old.append(new)
        return old

    state = keyed.get_folding_state(sb.FoldingStateDescriptor("s", [], append, list[int]))
    for key in (1, 2):
        keyed.set_current_key(key)
        state.add(key)
        state.add(7)
    assert state.get() == [2, 7]
    keyed.set_current_key(1)
    assert state.get() == [1, 7]


REDUCED = [
    ("sum", "bigint", [2**62, 2**62 - 1, -5], 2**63 - 6),
    ("sum", "tinyint", [100, 27], 127),
    ("sum", "tinyint", [-127, -1], -128),
    ("sum", "double", [0.1, 0.2], 0.1 + 0.2),
    ("sum", "double", [INF, -INF], NAN),
    ("sum", "float", [0.1, 0.2], 0.30000001192092896),
    ("sum", "float", [3e38, 3e38], INF),
    ("sum", "decimal(38,2)", ["1" * 36, "0.01"], decimal.Decimal("1" * 36 + ".01")),
    ("product", "int", [6, 7, -1], -42),
    ("product", "double", [1e308, 10.0], INF),
    ("min", "bigint", [3, -2, 5], -2),
    ("min", "double", [NAN, 2.0, INF], 2.0),
    ("max", "double", [1.0, NAN, INF], NAN),
    ("max", "string", ["b", "é", "z"], "é"),
    ("min", "binary", [b"\xff", b"\x01"], b"\x01"),
    ("max", "boolean", [False, True, False], True),
    ("min", "decimal(10,2)", ["2", "-1.5"], decimal.Decimal("-1.50")),
    ("min", "struct<a:double,b:string>", [(1.0, "b"), (1.0, None), (NAN, "a")], (1.0, None)),
    ("max", "struct<a:double,b:string>", [(1.0, "b"), (NAN, None), (INF, "a")], (NAN, None)),
    ("first", "string", ["b", "a"], "b"),
    ("last", "string", ["b", "a"], "a"),
    ("any", "boolean", [False, True, False], True),
    ("any", "boolean", [False, False], False),
    ("all", "boolean", [True, True], True),
    ("all", "boolean", [True, False, True], False),
]


def _given(values: list[Any], declared: str) -> list[Any]:
    return [decimal.Decimal(value) for value in values] if declared.startswith("decimal") else values


@pytest.mark.parametrize(("name", "declared", "values", "expected"), REDUCED, ids=repr)
def test_named_reductions(keyed: Keyed, name: str, declared: str, values: list[Any], expected: Any) -> None:
    values = _given(values, declared)
    state = keyed.get_reducing_state(sb.ReducingStateDescriptor("s", name, declared))
    for value in values:
        state.add(value)
    assert same(state.get(), expected)
    keyed.set_current_key(2)
    state.add_many([2] * len(values), values)
    assert same(state.get(), expected)
    if name in ("sum", "min", "max"):
        aggregated = keyed.get_aggregating_state(sb.AggregatingStateDescriptor("a", name, declared))
        aggregated.add_many([2] * len(values), values)
        assert same(aggregated.get(), expected)


@pytest.mark.parametrize(
    ("name", "declared", "values"),
    [
        ("sum", "bigint", [2**63 - 1, 1]),
        ("sum", "bigint", [-(2**63), -1]),
        ("sum", "tinyint", [100, 28]),
        ("sum", "decimal(4,1)", ["999", "1"]),
        ("product", "smallint", [256, 128]),
        ("product", "int", [-(2**31), -1]),
        ("product", "bigint", [2**32, 2**31]),
    ],
)
def test_overflow_changes_nothing(keyed: Keyed, name: str, declared: str, values: list[Any]) -> None:
    values = _given(values, declared)
    state = keyed.get_reducing_state(sb.ReducingStateDescriptor("s", name, declared))
    state.add(values[0])
    with pytest.raises(OverflowError):
        state.add(values[1])
    with pytest.raises(OverflowError):
        state.add_many([5, 1], [values[0], values[1]])
    assert state.get() == values[0]
    assert list(keyed.keys("s")) == [1]


@pytest.mark.parametrize("name", ["variance", "stddev"])
def test_spread_needs_two_values(keyed: Keyed, name: str) -> None:
    state = keyed.get_aggregating_state(sb.AggregatingStateDescriptor("s", name, "double"))
    assert state.get() is None
    state.add(5.0)
    assert state.get() is None
    assert state.exists()
    state.add(5.0)
    assert state.get() == 0.0
    state.add(NAN)
    assert math.isnan(state.get())
    keyed.set_current_key(2)
    for value in (1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16):  # does not cancel
        state.add(value)
    assert state.get() == (30.0 if name == "variance" else math.sqrt(30.0))
