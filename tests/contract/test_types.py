"""Every kind of state over every type of value, and numbers of numpy: what goes in comes out."""

from __future__ import annotations

import numpy as np
import pytest
from contract.conftest import Keyed, MakeKeyed
from contract.samples import KEYS, KINDS, VALUES, Kind, dump
from type_samples import same

import statebackend as sb
from statebackend import types as t

pytestmark = pytest.mark.checked

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
NUMBERS = [t.LONG, t.INT, t.SHORT, t.BYTE, t.DOUBLE, t.FLOAT]


@every_kind
def test_values_of_every_type_come_back(keyed: Keyed, kind: Kind) -> None:
    for declared, values in VALUES.items():
        state = keyed.get_state(kind.descriptor(repr(declared), declared))
        assert same(kind.read(state), kind.nothing)
        for value in values:
            kind.write(state, value)
            assert same(kind.read(state), value), declared
        state.clear()
        assert not state.exists()
        assert same(kind.read(state), kind.nothing)


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
def test_what_is_returned_is_not_what_is_stored(keyed: Keyed, kind: Kind) -> None:
    state = keyed.get_state(kind.descriptor("s", t.LIST(t.STRING)))
    given = ["a"]
    kind.write(state, given)
    given.append("b")
    assert kind.read(state) == ["a"]
    kind.read(state).append("c")
    assert kind.read(state) == ["a"]
