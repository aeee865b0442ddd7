"""Every kind of state over every type of value: what goes in comes out, and what is refused changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract.conftest import Keyed, MakeKeyed
from contract.samples import KEYS, KINDS, Kind, LastAdded, dump, last_of
from type_samples import SORTS, SORTS_OF_KEYS, WRONG, keys_of, sample

import statebackend as sb
from statebackend import types as t
from statebackend.keys import key_encoder
from statebackend.state import StateDescriptor
from statebackend.types.serializers import serializer_for

pytestmark = pytest.mark.checked

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


NUMBERS = [t.LONG, t.INT, t.SHORT, t.BYTE, t.DOUBLE, t.FLOAT]


def test_zero_and_nan_keys_are_one(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed("double")
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", int))
    for key in (0.0, float("nan")):
        keyed.set_current_key(key)
        state.update(1)
    for key in (-0.0, -float("nan"), np.float64("nan")):
        keyed.set_current_key(key)
        assert state.value() == 1
    assert len(list(keyed.keys("s"))) == 2
    counts = keyed.get_map_state(sb.MapStateDescriptor("m", float, int))
    counts[-0.0] = 1
    counts[float("nan")] = 2
    assert counts[0.0] == 1
    assert counts[float("nan")] == 2
    assert str(list(counts)) == "[0.0, nan]"


@pytest.mark.parametrize("key_type", NUMBERS, ids=repr)
def test_numpy_columns_are_what_their_values_are(make_keyed: MakeKeyed, key_type: t.Type) -> None:
    one, many = make_keyed(key_type), make_keyed(key_type)
    for value_type in NUMBERS:
        descriptor = sb.ReducingStateDescriptor(repr(value_type), "max", value_type)
        keys, values = (
            np.array(([*KEYS[each]] * 4)[:7], each.arrow.to_pandas_dtype()) for each in (key_type, value_type)
        )
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            one.set_current_key(key)
            one.get_reducing_state(descriptor).add(value)
        many.get_reducing_state(descriptor).add_many(keys, values)
        assert dump(one, descriptor) == dump(many, descriptor)


def test_numpy_scalars_are_numbers(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed("int")
    keyed.set_current_key(np.int64(7))
    assert keyed.current_key == 7
    assert type(keyed.current_key) is int
    state = keyed.get_list_state(sb.ListStateDescriptor("s", float))
    state.add_all(np.array([1.5, 2.5]))
    state.add(np.float32(0.5))
    assert state.get() == [1.5, 2.5, 0.5]
    assert {type(each) for each in state} == {float}


@every_kind
def test_returned_value_is_not_the_stored_value(keyed: Keyed, kind: Kind) -> None:
    state = keyed.get_state(kind.descriptor("s", t.LIST(t.STRING)))
    given = ["a"]
    kind.write(state, given)
    given.append("b")
    assert kind.read(state) == ["a"]
    kind.read(state).append("c")
    assert kind.read(state) == ["a"]


OBJECTS = [value for value in WRONG if value is not None]


OBJECTS += [[value] for value in WRONG] + [(value, value) for value in WRONG]


def refusal(call: Callable[[Any], Any], value: Any) -> Any:
    try:
        call(value)
    except (sb.SerializationError, OverflowError) as error:
        return error
    return None


def sort_of(error: Exception) -> tuple[Any, ...]:
    return type(error), getattr(error, "code", None)


@pytest.mark.parametrize("sort", SORTS)
def test_values(keyed: sb.KeyedStateBackend, sort: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    serializer = serializer_for(given.declared)
    descriptors: list[StateDescriptor] = [
        sb.ValueStateDescriptor("v", given.declared),
        sb.ListStateDescriptor("l", given.declared),
        sb.MapStateDescriptor("m", int, given.declared),
        sb.ReducingStateDescriptor("r", "last", given.declared),
        sb.AggregatingStateDescriptor("a", LastAdded(), given.declared, given.declared),
        sb.FoldingStateDescriptor("f", given.present[0], last_of, given.declared),
    ]
    states: list[Any] = [keyed.get_state(each) for each in descriptors]
    value, elements, entries, last, aggregate, fold = states
    first = given.present[0]
    for state in (value, elements, last, aggregate, fold):
        getattr(state, "update" if state is value else "add")(first)
    entries.put(1, first)
    before = [dump(keyed, each) for each in descriptors]
    calls: list[tuple[str, Callable[[Any], Any]]] = [
        ("v", value.update),
        ("l", elements.add),
        ("l", lambda each: elements.add_all([first, each])),
        ("l", lambda each: elements.update([first, each])),
        ("m", lambda each: entries.put(1, each)),
        ("m", lambda each: entries.put_all({2: first, 3: each})),
        ("r", last.add),
        ("a", aggregate.add),
        ("f", fold.add),
        ("v", lambda each: value.update_many([7, 0], [first, each])),
        ("l", lambda each: elements.add_many([7, 0], [first, each])),
        ("m", lambda each: entries.put_many([7, 0], [1, 1], [first, each])),
        ("r", lambda each: last.add_many([7, 0], [first, each])),
    ]
    for each in OBJECTS:
        expected = refusal(serializer.serialize, each)
        if expected is None:
            continue
        keyed.set_current_key(rng.choice([1, 99]))  # where something is, or nothing
        for name, call in calls:
            error = refusal(call, each)
            assert sort_of(error) == sort_of(expected), (name, type(each))
            assert isinstance(error, OverflowError) or f"'{name}'" in str(error)
            assert len(repr(each)) < 4 or repr(each) not in str(error)
        assert [dump(keyed, descriptor) for descriptor in descriptors] == before


@pytest.mark.parametrize("sort", SORTS_OF_KEYS)
def test_keys_and_map_keys(make_keyed: MakeKeyed, sort: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    encoder, first = key_encoder(given.declared), keys_of(given)[1][0]
    keyed = make_keyed(given.declared)
    keyed.set_current_key(first)
    value = keyed.get_value_state(sb.ValueStateDescriptor("v", int))
    entries = keyed.get_map_state(sb.MapStateDescriptor("m", given.declared, int))
    value.update(1)
    entries.put(first, 1)
    calls: list[Callable[[Any], Any]] = [
        keyed.set_current_key,
        lambda each: entries.put(each, 2),
        entries.get,
        entries.contains,
        entries.remove,
        lambda each: value.update_many([first, each], [2, 2]),
        lambda each: value.get_many([first, each]),
        lambda each: entries.put_many([first, first], [first, each], [2, 2]),
        lambda each: entries.get_many([each], [first]),
    ]
    for each in OBJECTS:
        expected = refusal(encoder.encode, each)
        if expected is None:
            continue
        for number, call in enumerate(calls):
            assert sort_of(refusal(call, each)) == sort_of(expected), (number, type(each))
        assert repr(keyed.current_key) == repr(first)
    assert value.value() == 1
    assert [repr(each) for each in entries.items()] == [repr((first, 1))]
    assert keyed.num_entries() == 2
