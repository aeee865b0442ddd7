"""Every kind of state over every type of value, key and map key: what goes in comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract.conftest import MakeKeyed
from contract.samples import KEYS, KINDS, VALUES, Kind
from type_strategies import same

from statebackend import types as t
from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.state import (
    KeyedStateBackend,
    ListStateDescriptor,
    MapStateDescriptor,
    ValueStateDescriptor,
)

pytestmark = pytest.mark.checked

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@every_kind
@pytest.mark.parametrize("declared", VALUES, ids=repr)
def test_values_come_back(keyed: KeyedStateBackend, kind: Kind, declared: t.Type) -> None:
    state = keyed.get_state(kind.descriptor("s", declared))
    assert same(kind.read(state), kind.nothing)
    for value in VALUES[declared]:
        kind.write(state, value)
        assert same(kind.read(state), value)
    state.clear()
    assert not state.exists()
    assert same(kind.read(state), kind.nothing)


@every_kind
@pytest.mark.parametrize("key_type", KEYS, ids=repr)
def test_every_key_has_its_own(make_keyed: MakeKeyed, kind: Kind, key_type: t.Type) -> None:
    keyed = make_keyed(key_type)
    state = keyed.get_state(kind.descriptor("s", t.LONG))
    for number, key in enumerate(KEYS[key_type]):
        keyed.set_current_key(key)
        assert same(keyed.current_key, key)
        assert not state.exists()
        kind.write(state, number)
    for number, key in enumerate(KEYS[key_type]):
        keyed.set_current_key(key)
        assert kind.read(state) == number
    assert len(list(keyed.keys("s"))) == len(KEYS[key_type])
    assert all(any(same(found, key) for key in KEYS[key_type]) for found in keyed.keys("s"))


def test_zero_and_nan_keys_are_one(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed("double")
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    for key in (0.0, float("nan")):
        keyed.set_current_key(key)
        state.update(1)
    for key in (-0.0, -float("nan"), np.float64("nan")):
        keyed.set_current_key(key)
        assert state.value() == 1
    assert len(list(keyed.keys("s"))) == 2
    counts = keyed.get_map_state(MapStateDescriptor("m", float, int))
    counts[-0.0] = 1
    counts[float("nan")] = 2
    assert counts[0.0] == 1
    assert counts[float("nan")] == 2
    assert str(list(counts)) == "[0.0, nan]"


def test_values_keep_the_sign_of_zero(keyed: KeyedStateBackend) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", float))
    state.update(-0.0)
    assert str(state.value()) == "-0.0"


#: A key that a type refuses, and the error; `test_wrong_values` has values.
WRONG = (
    (t.LONG, True, SerializationTypeError),
    (t.LONG, 1.0, SerializationTypeError),
    (t.LONG, "1", SerializationTypeError),
    (t.LONG, 2**63, OverflowError),
    (t.BYTE, 128, OverflowError),
    (t.DOUBLE, "1", SerializationTypeError),
    (t.BOOL, 1, SerializationTypeError),
    (t.STRING, b"a", SerializationTypeError),
    (t.STRING, "\ud800", SerializationError),
    (t.BYTES, "a", SerializationTypeError),
    (t.DATE, KEYS[t.TIMESTAMP][0], SerializationTypeError),
    (t.TIMESTAMP, KEYS[t.TIMESTAMP_NTZ][0], SerializationTypeError),
    (t.TIMESTAMP_NTZ, KEYS[t.TIMESTAMP][0], SerializationTypeError),
    (t.DECIMAL(4, 1), KEYS[t.DECIMAL(10, 2)][2], SerializationError),
    (t.TUPLE(t.LONG, t.STRING), (1, 2), SerializationTypeError),
    (t.TUPLE(t.LONG, t.STRING), (1,), SerializationTypeError),
)


@pytest.mark.parametrize(("declared", "value", "error"), WRONG, ids=repr)
def test_a_refused_key_changes_nothing(
    make_keyed: MakeKeyed, declared: t.Type, value: Any, error: type[Exception]
) -> None:
    keyed = make_keyed(declared)
    good = KEYS[declared][0]
    keyed.set_current_key(good)
    with pytest.raises(error):
        keyed.set_current_key(value)
    with pytest.raises(SerializationTypeError):
        keyed.set_current_key(None)
    assert keyed.current_key == good
    counts = keyed.get_map_state(MapStateDescriptor("m", declared, t.LONG))
    for call in (
        lambda: counts.put(value, 1),
        lambda: counts.put_all({good: 1, value: 2}),
        lambda: counts.get(value),
        lambda: counts.contains(value),
        lambda: counts.remove(value),
    ):
        with pytest.raises(error):
            call()
    assert not counts.exists()


def test_numpy_scalars_are_numbers(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed("int")
    keyed.set_current_key(np.int64(7))
    assert keyed.current_key == 7
    assert type(keyed.current_key) is int
    state = keyed.get_list_state(ListStateDescriptor("s", float))
    state.add_all(np.array([1.5, 2.5]))
    state.add(np.float32(0.5))
    assert state.get() == [1.5, 2.5, 0.5]
    assert {type(each) for each in state} == {float}


@every_kind
def test_what_is_returned_is_not_what_is_stored(keyed: KeyedStateBackend, kind: Kind) -> None:
    state = keyed.get_state(kind.descriptor("s", t.LIST(t.STRING)))
    given = ["a"]
    kind.write(state, given)
    given.append("b")
    assert kind.read(state) == ["a"]
    kind.read(state).append("c")
    assert kind.read(state) == ["a"]
