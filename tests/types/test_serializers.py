"""Values come back as they went in; what does not fit is refused, with its place and without its value."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st
from type_samples import WIDTHS, same, value_types, with_values

from statebackend import types as t
from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.types import Compatibility, Serializer
from statebackend.types.serializers import serializer_for

UTC = datetime.timezone.utc
TOKYO = datetime.timezone(datetime.timedelta(hours=9))


@given(with_values(value_types))
def test_values_come_back(case: tuple[t.Type, Any]) -> None:
    declared, value = case
    serializer = serializer_for(declared)
    data = serializer.serialize(value)
    assert type(data) is bytes
    if declared.fixed_width is not None:
        assert len(data) == declared.fixed_width == serializer.fixed_width
    assert same(serializer.deserialize(data), value)
    assert same(serializer.deserialize(memoryview(data)), value)  # type: ignore[arg-type]
    assert same(serializer.copy(value), value)


@given(with_values(value_types), st.data())
def test_cut_or_lengthened_bytes_are_refused_or_another_value(case: tuple[t.Type, Any], data: Any) -> None:
    """Nothing but SerializationError leaves deserialize, whatever the bytes are."""
    declared, value = case
    serializer = serializer_for(declared)
    whole = serializer.serialize(value)
    cut = data.draw(st.integers(0, len(whole)))
    damaged = data.draw(
        st.sampled_from([whole[:cut], whole + b"\x00", whole[:cut] + b"\xff" + whole[cut + 1 :]])
    )
    try:
        serializer.deserialize(damaged)
    except SerializationError:
        pass


@given(with_values(value_types.filter(lambda declared: declared.fixed_width is not None)))
def test_fixed_width_bytes_of_another_length_are_refused(case: tuple[t.Type, Any]) -> None:
    declared, value = case
    serializer = serializer_for(declared)
    data = serializer.serialize(value)
    for wrong in (data[:-1], data + b"\x00"):
        with pytest.raises(SerializationError, match="wrong length"):
            serializer.deserialize(wrong)


def test_layouts() -> None:
    def hexed(spec: Any, value: Any) -> str:
        return serializer_for(spec).serialize(value).hex(" ")

    assert hexed("bigint", -2) == "fe ff ff ff ff ff ff ff"
    assert hexed("int", 1) == "01 00 00 00"
    assert hexed("smallint", 258) == "02 01"
    assert hexed("tinyint", -1) == "ff"
    assert hexed("boolean", True) == "01"
    assert hexed("double", 1.0) == "00 00 00 00 00 00 f0 3f"
    assert hexed("float", 1.0) == "00 00 80 3f"
    assert hexed("date", datetime.date(1969, 12, 31)) == "ff ff ff ff"
    assert hexed("timestamp", datetime.datetime(1970, 1, 1, 9, 0, 0, 1, TOKYO)) == "01 00 00 00 00 00 00 00"
    assert hexed("decimal(10,2)", decimal.Decimal("1")) == "64 00 00 00 00 00 00 00"
    assert hexed("decimal(20,2)", decimal.Decimal("-0.01")) == "ff " * 15 + "ff"
    assert hexed("string", "é") == "c3 a9"
    assert hexed("binary", b"\x00\xff") == "00 ff"
    assert hexed("struct<a:tinyint,b:smallint>", (None, 1)) == "01 00 01 00"
    assert hexed("struct<a:tinyint,b:string>", (1, "xy")) == "00 01 02 00 00 00 78 79"
    assert hexed("array<tinyint>", [1, None]) == "02 00 00 00 02 01 00"
    assert hexed("map<tinyint,tinyint>", {7: None, 8: 9}) == "02 00 00 00 01 07 00 08 09"


@pytest.mark.parametrize("declared", WIDTHS, ids=str)
def test_integers_take_what_fits_and_nothing_else(declared: t.Type) -> None:
    serializer = serializer_for(declared)
    bits = WIDTHS[declared]
    high = 2 ** (bits - 1) - 1
    for number in (high, -high - 1, np.int64(5), np.uint8(5), np.array(5)):
        assert serializer.deserialize(serializer.serialize(number)) == int(number)
    for number in (high + 1, -high - 2, 2**70, np.uint64(2**63)):
        with pytest.raises(OverflowError, match=f"out of range for {declared.name}"):
            serializer.serialize(number)
    for value in (True, np.True_, 1.0, "1", None, decimal.Decimal(1), np.float64(1)):
        with pytest.raises(SerializationTypeError, match=f"{declared.name} does not take"):
            serializer.serialize(value)


def test_floats() -> None:
    double, single = serializer_for("double"), serializer_for("float")
    assert double.deserialize(double.serialize(3)) == 3.0
    assert double.deserialize(double.serialize(np.float32(0.5))) == 0.5
    assert math.copysign(1, double.deserialize(double.serialize(-0.0))) == -1
    assert single.deserialize(single.serialize(0.1)) == np.float32(0.1)
    assert single.deserialize(single.serialize(math.inf)) == math.inf
    for serializer, name, large, odd in ((double, "DOUBLE", 10**400, 2**53), (single, "FLOAT", 1e39, 2**24)):
        with pytest.raises(OverflowError, match=f"out of range for {name}"):
            serializer.serialize(large)
        with pytest.raises(SerializationError, match=f"integer cannot be held exactly by {name}"):
            serializer.serialize(odd + 1)
        for value in (True, "1.0", None, decimal.Decimal(1)):
            with pytest.raises(SerializationTypeError, match=f"{name} does not take"):
                serializer.serialize(value)


@pytest.mark.parametrize(
    ("spec", "value", "complaint"),
    [
        ("boolean", 1, "BOOL does not take a value of type int"),
        ("string", b"a", "STRING does not take a value of type bytes"),
        ("string", None, "STRING does not take None"),
        ("string", "a\ud800", "lone surrogate.*at character 1"),
        ("binary", "a", "BYTES does not take a value of type str"),
        ("date", datetime.datetime(2020, 1, 1, tzinfo=UTC), "DATE does not take .*datetime"),
        ("timestamp", datetime.datetime(2020, 1, 1), "TIMESTAMP takes datetimes with a time zone"),
        ("timestamp", datetime.date(2020, 1, 1), "TIMESTAMP does not take a value of type date"),
        ("timestamp_ntz", datetime.datetime(2020, 1, 1, tzinfo=UTC), "without a time zone"),
        ("decimal(4,2)", decimal.Decimal("1.005"), "more decimals"),
        ("decimal(4,2)", decimal.Decimal("100"), "too many digits"),
        ("decimal(4,2)", decimal.Decimal("1E+999999"), "too many digits"),
        ("decimal(4,2)", decimal.Decimal("1E-999999"), "more decimals"),
        ("decimal(4,2)", 100, "too many digits"),
        ("decimal(4,2)", decimal.Decimal("NaN"), "NaN and infinity"),
        ("decimal(4,2)", 1.5, "does not take a value of type float"),
        ("decimal(4,2)", True, "does not take a value of type bool"),
        ("array<int>", "abc", "LIST does not take a value of type str"),
        ("array<int>", {1, 2}, "LIST does not take a value of type set"),
        ("array<int>", [1, "x"], "INT does not take .*element 1"),
        ("map<int,int>", [1], "MAP does not take a value of type list"),
        ("map<int,int>", {None: 1}, "a MAP key is None"),
        ("map<int,int>", {1: 2, "x": 3}, "key of entry 1"),
        ("map<int,int>", {1: "x"}, "value of entry 0"),
        ("struct<a:int,b:int>", (1,), "exactly its fields"),
        ("struct<a:int,b:int>", {"a": 1}, "exactly its fields"),
        ("struct<a:int,b:int>", {"a": 1, "b": 2, "c": 3}, "exactly its fields"),
        ("struct<a:int,b:int>", [1, 2], "exactly its fields"),
        ("struct<a:int,b:struct<c:int>>", (1, ("x",)), "field 'b', field 'c'"),
        (tuple[int, int], {"_1": 1, "_2": 2}, "TUPLE takes a tuple"),
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_refused(spec: Any, value: Any, complaint: str) -> None:
    with pytest.raises(SerializationError, match=complaint):
        serializer_for(spec).serialize(value)


def test_decimals_are_rescaled_exactly() -> None:
    serializer = serializer_for("decimal(38,10)")
    for text in ("1", "1.50", "-12345678901234567890.0123456789", "0E+50", "1.000000000000000000000"):
        back = serializer.deserialize(serializer.serialize(decimal.Decimal(text)))
        assert back == decimal.Decimal(text)
        assert back.as_tuple().exponent == -10
    assert serializer.deserialize(serializer.serialize(7)) == 7


class Point(NamedTuple):
    x: int
    y: int | None


@dataclasses.dataclass
class Total:
    amount: int
    tags: list[str]

    def __post_init__(self) -> None:
        self.checked = True


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("a",)
    a: int


def test_rows_come_back_as_their_class() -> None:
    point, total, slotted = serializer_for(Point), serializer_for(Total), serializer_for(Slotted)
    back = point.deserialize(point.serialize((1, None)))
    assert type(back) is Point
    assert back == Point(1, None)
    for given_value in (Total(1, ["a"]), {"tags": ["a"], "amount": 1}, (1, ["a"])):
        assert total.deserialize(total.serialize(given_value)) == Total(1, ["a"])
    assert slotted.deserialize(slotted.serialize(Slotted(3))) == Slotted(3)
    original = Total(1, ["a"])
    copy = total.copy(original)
    assert copy == original
    assert copy.tags is not original.tags


def test_rows_without_a_class_are_light_named_tuples() -> None:
    row = serializer_for("struct<a:bigint,`b c`:string>")
    back = row.deserialize(row.serialize({"a": 1, "b c": "x"}))
    assert back == (1, "x")
    assert back.a == 1
    assert back._asdict() == {"a": 1, "b c": "x"}
    assert pickle.loads(pickle.dumps(back)) == back
    assert type(pickle.loads(pickle.dumps(back))) is type(back)


def test_map_keys_have_one_zero_and_one_nan() -> None:
    serializer = serializer_for(dict[float, int])
    assert serializer.serialize({-0.0: 1}) == serializer.serialize({0.0: 1})
    two = {float("nan"): 1, float("nan"): 2}
    assert len(two) == 2
    (value,) = serializer.deserialize(serializer.serialize(two)).values()
    assert value == 2


def test_numpy_arrays_are_lists() -> None:
    serializer = serializer_for(list[int])
    assert serializer.deserialize(serializer.serialize(np.arange(3))) == [0, 1, 2]


def test_pickle_takes_any_object_and_says_what_it_cannot() -> None:
    serializer = serializer_for(t.PICKLE)
    assert serializer.deserialize(serializer.serialize({1, 2})) == {1, 2}
    original = [[1]]
    assert serializer.copy(original)[0] is not original[0]
    with pytest.raises(SerializationError, match="type function cannot be pickled"):
        serializer.serialize(lambda: None)
    with pytest.raises(SerializationError, match="pickled value cannot be read"):
        serializer.deserialize(b"junk")
    with pytest.raises(SerializationError, match="PICKLE does not take None"):
        serializer.serialize(None)


def test_out_of_range_datetimes_say_so() -> None:
    with pytest.raises(SerializationError, match="outside the years 1 to 9999"):
        serializer_for("timestamp").deserialize((2**62).to_bytes(8, "little"))


class Versioned(Serializer):
    fixed_width = 2

    def __init__(self, version: int = 1) -> None:
        self.version = version

    def serialize(self, value: Any) -> bytes:
        return bytes(value)

    def deserialize(self, data: bytes) -> Any:
        assert type(data) is bytes
        return list(data)

    def config(self) -> dict[str, Any]:
        return {"version": self.version}

    def compatibility(self, old_config: dict[str, Any]) -> Compatibility:
        if old_config["version"] == self.version:
            return Compatibility.AS_IS
        older = old_config["version"] < self.version
        return Compatibility.AFTER_MIGRATION if older else Compatibility.INCOMPATIBLE

    def migration(self, old_config: dict[str, Any]) -> Any:
        return lambda data: data[::-1]


def test_a_serializer_of_the_users_own() -> None:
    serializer = serializer_for(t.LIST(Versioned()))
    assert serializer.deserialize(serializer.serialize([b"ab", None])) == [[97, 98], None]
    with pytest.raises(SerializationError, match="did not return fixed_width bytes"):
        serializer.serialize([b"abc"])
    new, old = serializer_for(Versioned(2)), serializer_for(Versioned(1))
    assert new.compatibility(new.config()) is Compatibility.AS_IS
    assert new.compatibility(old.config()) is Compatibility.AFTER_MIGRATION
    assert old.compatibility(new.config()) is Compatibility.INCOMPATIBLE
    assert new.compatibility({"type": "long"}) is Compatibility.INCOMPATIBLE
    assert new.migration(old.config())(b"ab") == b"ba"


@given(value_types)
def test_serializers_pickle_and_compare(declared: t.Type) -> None:
    serializer = serializer_for(declared)
    assert pickle.loads(pickle.dumps(serializer)) == serializer
    assert serializer.config() == declared.config()
    assert serializer.compatibility(declared.config()) is Compatibility.AS_IS
