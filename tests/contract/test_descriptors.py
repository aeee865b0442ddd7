"""Descriptors: what they refuse, when they are equal, what they say of themselves."""

from __future__ import annotations

import json
import operator
import pickle
from typing import Any

import pytest
from contract.samples import LastAdded, last_of
from ids import stable_repr

import statebackend as sb
from statebackend import types as t
from statebackend.state import AGGREGATE_NAMES, REDUCTION_NAMES, named_aggregate, named_reduction

MAKERS = [
    lambda: sb.ValueStateDescriptor("s", "struct<a:bigint>", default=(1,)),
    lambda: sb.ListStateDescriptor("s", str),
    lambda: sb.MapStateDescriptor("s", str, t.PICKLE),
    lambda: sb.ReducingStateDescriptor("s", "sum", int),
    lambda: sb.ReducingStateDescriptor("s", operator.add, int),
    lambda: sb.AggregatingStateDescriptor("s", "stddev", "decimal(10,2)"),
    lambda: sb.AggregatingStateDescriptor("s", LAST, int, int),
    lambda: sb.FoldingStateDescriptor("s", [], last_of, list[int]),
    lambda: sb.ListStateDescriptor("s", str).enable_time_to_live(sb.StateTtlConfig(1)),
]
LAST = LastAdded()


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: stable_repr(make())[:60])
def test_equal_ones_are_equal(make: Any) -> None:
    one, two = make(), make()
    assert one == two
    assert hash(one) == hash(two)
    assert one != MAKERS[0]() or make is MAKERS[0]
    assert one != "s"
    one.check_same_state(two)
    if one.kind != "aggregating" or one.aggregation:
        assert pickle.loads(pickle.dumps(one)) == one
    json.dumps(one.config())
    assert repr(one).startswith(type(one).__name__)


@pytest.mark.parametrize("name", ["", None, 1, b"s", "\ud800"])
def test_bad_names(name: Any) -> None:
    with pytest.raises(sb.UsageError, match="name of a state"):
        sb.ListStateDescriptor(name, str)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: sb.ValueStateDescriptor("s", list), "list"),
        (lambda: sb.MapStateDescriptor("s", list[int], int), "key type.*'s'"),
        (lambda: sb.MapStateDescriptor("s", t.PICKLE, int), "key type.*'s'"),
        (lambda: sb.ReducingStateDescriptor("s", "sun", int), "'sum'"),
        (lambda: sb.ReducingStateDescriptor("s", "sum", str), "'sum' does not work on STRING.*'s'"),
        (lambda: sb.ReducingStateDescriptor("s", "any", int), "BOOL"),
        (lambda: sb.ReducingStateDescriptor("s", "min", list[int]), "'min'"),
        (lambda: sb.ReducingStateDescriptor("s", "product", "decimal(10,2)"), "'product'"),
        (lambda: sb.ReducingStateDescriptor("s", 5, int), "function"),
        (lambda: sb.AggregatingStateDescriptor("s", "avg"), "needs the type of the values"),
        (lambda: sb.AggregatingStateDescriptor("s", "mean", int), "'avg'"),
        (lambda: sb.AggregatingStateDescriptor("s", "avg", str), "'avg'"),
        (lambda: sb.AggregatingStateDescriptor("s", "avg", int, str), "leave accumulator_type out"),
        (lambda: sb.AggregatingStateDescriptor("s", LastAdded(), int), "accumulator_type="),
        (lambda: sb.AggregatingStateDescriptor("s", LastAdded, int, int), "instance"),
        (lambda: sb.AggregatingStateDescriptor("s", max, int, int), "AggregateFunction"),
        (lambda: sb.FoldingStateDescriptor("s", None, last_of, int), "initial"),
        (lambda: sb.FoldingStateDescriptor("s", 0, "sum", int), "function"),
        (lambda: sb.ListStateDescriptor("s", int).enable_time_to_live(1000), "StateTtlConfig"),
    ],
)
def test_bad_arguments_are_refused_with_a_correction(make: Any, complaint: str) -> None:
    with pytest.raises(sb.UsageError, match=complaint):
        make()


@pytest.mark.parametrize(
    "make", [sb.ValueStateDescriptor, lambda n, d, v: sb.FoldingStateDescriptor(n, v, last_of, d)]
)
def test_a_default_is_checked_at_once(make: Any) -> None:
    with pytest.raises(sb.SerializationError, match="'s'"):
        make("s", t.LONG, "text")
    with pytest.raises(OverflowError):
        make("s", t.BYTE, 1000)


def test_a_default_is_taken_as_it_was() -> None:
    default = [1]
    descriptor = sb.ValueStateDescriptor("s", list[int], default=default)
    default.append(2)
    assert descriptor.default_copy() == [1]


def test_disabled_ttl_is_none() -> None:
    descriptor = sb.ListStateDescriptor("s", int).enable_time_to_live(sb.StateTtlConfig(1))
    assert descriptor.enable_time_to_live(sb.StateTtlConfig.DISABLED).ttl_config is None


def test_named_functions_pickle() -> None:
    for name in REDUCTION_NAMES:
        function = named_reduction(name, bool if name in ("any", "all") else int)
        assert pickle.loads(pickle.dumps(function)) == function
    for name in AGGREGATE_NAMES:
        function = named_aggregate(name, int)
        assert pickle.loads(pickle.dumps(function)) == function


@pytest.mark.parametrize("name", AGGREGATE_NAMES)
def test_merging_gives_what_adding_gives(name: str) -> None:
    function = named_aggregate(name, "double")

    def accumulate(values: list[float]) -> Any:
        accumulator = function.create_accumulator()
        for value in values:
            accumulator = function.add(value, accumulator)
        return accumulator

    values = [1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16]
    merged = function.merge(accumulate(values[:1]), accumulate(values[1:]))
    assert function.get_result(merged) == function.get_result(accumulate(values))
