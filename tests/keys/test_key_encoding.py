"""One canonical form per key: it comes back, it is injective, and what is no key is refused."""

from __future__ import annotations

import dataclasses
import datetime
import math
import pickle
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from type_samples import SCALAR_KEY_TYPES, key_types, same, values_of, with_values

from statebackend import types as t
from statebackend.errors import SerializationError, SerializationTypeError, UsageError
from statebackend.keys import key_encoder

pytestmark = pytest.mark.checked


@given(with_values(key_types))
def test_keys_come_back(case: tuple[t.Type, Any]) -> None:
    declared, key = case
    encoder = key_encoder(declared)
    canonical = encoder.encode(key)
    assert type(canonical) is {"int": int, "bytes": bytes}[encoder.kind]
    assert same(encoder.decode(canonical), key, keys=True)
    assert encoder.encode(encoder.decode(canonical)) == canonical


@given(
    key_types.flatmap(lambda declared: st.tuples(st.just(declared), values_of(declared), values_of(declared)))
)
def test_different_keys_have_different_forms(case: tuple[t.Type, Any, Any]) -> None:
    declared, a, b = case
    encoder = key_encoder(declared)
    assert (encoder.encode(a) == encoder.encode(b)) == same(a, b, keys=True)


@given(st.lists(st.none() | st.text(max_size=3), min_size=2, max_size=4), st.data())
def test_fields_do_not_run_into_each_other(parts: list[str | None], data: Any) -> None:
    other = data.draw(st.lists(st.none() | st.text(max_size=3), min_size=len(parts), max_size=len(parts)))
    assume(parts != other)
    encoder = key_encoder(t.TUPLE(*[str] * len(parts)))
    assert encoder.encode(tuple(parts)) != encoder.encode(tuple(other))


def test_one_zero_and_one_nan() -> None:
    for spec, layout in (("double", "<d"), ("float", "<f")):
        encoder = key_encoder(spec)
        assert encoder.encode(-0.0) == encoder.encode(0.0) == 0
        odd = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]
        assert encoder.encode(odd) == encoder.encode(math.nan)
        assert math.isnan(encoder.decode(encoder.encode(math.nan)))
        canonical = encoder.encode(1.5)
        assert canonical == int.from_bytes(struct.pack(layout, 1.5), "little", signed=True)
        assert encoder.encode(-1.5) < 0


def test_canonical_integers() -> None:
    assert key_encoder("bigint").encode(np.int32(-5)) == -5
    assert key_encoder("boolean").encode(np.True_) == 1
    assert key_encoder("date").encode(datetime.date(1970, 1, 2)) == 1
    assert key_encoder("decimal(18,3)").encode(2) == 2000
    assert key_encoder("float").encode(0.1) == key_encoder("float").encode(float(np.float32(0.1)))


def test_wide_decimals_are_minimal_big_endian() -> None:
    encoder = key_encoder("decimal(38,0)")
    for number, wanted in [(0, "00"), (-1, "ff"), (127, "7f"), (128, "0080"), (-128, "80"), (-129, "ff7f")]:
        assert encoder.encode(number).hex() == wanted
        assert encoder.decode(encoder.encode(number)) == number


@pytest.mark.parametrize("declared", SCALAR_KEY_TYPES, ids=str)
def test_a_key_is_never_none(declared: t.Type) -> None:
    encoder = key_encoder(declared)
    with pytest.raises(SerializationError, match="a key is None"):
        encoder.encode(None)
    with pytest.raises(SerializationError, match="a key is None"):
        key_encoder(t.TUPLE(declared)).encode(None)
    assert key_encoder(t.TUPLE(declared)).encode((None,)) == b"\x00"


WRONG: dict[t.Type, list[Any]] = {
    t.LONG: [True, 1.0, "1", np.True_],
    t.BYTE: [False, b"1"],
    t.DOUBLE: [True, "1.0"],
    t.BOOL: [1, 0, "true"],
    t.STRING: [b"a", 1],
    t.BYTES: ["a", 1],
    t.DATE: [datetime.datetime(2020, 1, 1), 1],
    t.TIMESTAMP: [datetime.datetime(2020, 1, 1), datetime.date(2020, 1, 1), 1],
    t.TIMESTAMP_NTZ: [datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), 1],
    t.DECIMAL(10, 2): [1.0, "1", True],
    t.TUPLE(int, int): [[1, 2], (1,), (1, 2, 3), 1, {"_1": 1, "_2": 2}],
    t.ROW(a=int): [1, [1], {"b": 1}, "a"],
}


@pytest.mark.parametrize(
    ("declared", "key"), [(d, key) for d, keys in WRONG.items() for key in keys], ids=str
)
def test_keys_of_another_type_are_refused(declared: t.Type, key: Any) -> None:
    with pytest.raises(SerializationTypeError, match=declared.name):
        key_encoder(declared).encode(key)
    with pytest.raises(SerializationTypeError, match=f"position 0.*field '_1'|{declared.name}"):
        key_encoder(t.TUPLE(declared)).encode_many([(key,)])


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(OverflowError, match="out of range for BYTE"):
        key_encoder("tinyint").encode(128)
    with pytest.raises(OverflowError, match="out of range for LONG"):
        key_encoder(tuple[int, int]).encode((1, 2**63))


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(SerializationError, match="lone surrogate"):
        key_encoder("string").encode("\udc80")
    with pytest.raises(SerializationError, match="lone surrogate.*field 'a'"):
        key_encoder("struct<a:string>").encode(("\udc80",))


class Point(NamedTuple):
    x: int
    y: str | None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int
    y: str | None


def test_composites_are_equal_by_position_and_type() -> None:
    point = key_encoder(Point)
    wanted = key_encoder("struct<a:bigint,b:string>").encode((1, "a"))
    assert point.encode(Point(1, "a")) == point.encode((1, "a")) == point.encode({"y": "a", "x": 1}) == wanted
    assert key_encoder(Frozen).encode(Frozen(1, "a")) == wanted
    assert key_encoder(tuple[int, str]).encode(Point(1, "a")) == wanted
    assert type(point.decode(wanted)) is Point
    assert key_encoder(Frozen).decode(wanted) == Frozen(1, "a")
    assert type(key_encoder(tuple[int, str]).decode(wanted)) is tuple


@pytest.mark.parametrize("spec", [list[int], dict[str, int], t.PICKLE, tuple[int, list[int]]], ids=str)
def test_types_that_cannot_be_keys_are_refused(spec: Any) -> None:
    with pytest.raises(UsageError, match="cannot be a key type"):
        key_encoder(spec)


@given(with_values(key_types), st.data())
def test_damaged_bytes_are_refused(case: tuple[t.Type, Any], data: Any) -> None:
    declared = t.TUPLE(case[0])
    encoder = key_encoder(declared)
    whole = encoder.encode((case[1],))
    cut = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (whole[:cut], whole + b"\x00", b"\x02" + whole[1:]):
        with pytest.raises(SerializationError, match="cannot be read|not valid UTF-8"):
            encoder.decode(damaged)
        with pytest.raises(SerializationError, match="cannot be read|not valid UTF-8|wrong length"):
            encoder.decode_many((np.array([0, len(damaged)]), damaged))
        with pytest.raises(SerializationError, match="cannot be read"):
            encoder.spark_hash(damaged)


def test_encoders_pickle() -> None:
    encoder = key_encoder(Point)
    assert pickle.loads(pickle.dumps(encoder)) is encoder
