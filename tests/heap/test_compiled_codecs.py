"""Compiled codecs against the Python serializers and encoders: the same bytes, the same values, the same errors."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import gc
import math
import random
import struct
import sys
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from type_samples import LEAVES, UTC, WRONG, Pair, Point, random_type, random_value

import statebackend as sb
from statebackend._core.codecs import decimals
from statebackend.columns.codec_factory import type_codec
from statebackend.errors import SerializationError, UsageError
from statebackend.keys import key_encoder
from statebackend.types import of
from statebackend.types.serializers import serializer_for

pytestmark = pytest.mark.checked
TYPES = sb.types


def outcome(call: Callable[[Any], Any], argument: Any) -> Any:
    """What a call returns or raises, in a form that can be compared: NaN equals NaN, -0.0 is not 0.0."""
    try:
        found = call(argument)
    except (SerializationError, OverflowError, ValueError) as error:
        return type(error).__name__, str(error)
    return repr(found)


# --- values ---


@pytest.mark.parametrize("ddl", LEAVES)
def test_every_leaf_has_the_serializers_bytes_and_values(ddl: str) -> None:
    codec, serializer = type_codec(of(ddl)), serializer_for(ddl)
    for value in LEAVES[ddl]:
        data = serializer.serialize(value)
        assert codec.encode(value) == data
        assert outcome(codec.decode, data) == outcome(serializer.deserialize, data)


def test_random_values_of_random_types_have_the_serializers_bytes_and_values(rng: random.Random) -> None:
    left = 0
    for _ in range(600):
        declared = random_type(rng, rng.randint(0, 5))
        codec, serializer = type_codec(declared), serializer_for(declared)
        for _ in range(4):
            value = random_value(rng, declared)
            data, written = serializer.serialize(value), codec.encode(value)
            left += written is None
            assert written is None or written == data
            assert repr(codec.decode(data)) == repr(serializer.deserialize(data))
    # Only dicts with keys that may be NaN, and mappings that are no dicts, are left to the serializer.
    assert 0 < left < 1_800


@pytest.mark.parametrize(
    "ddl",
    [
        *LEAVES,
        "struct<a:bigint,b:string>",
        "struct<x:bigint,y:double>",
        "array<bigint>",
        "array<struct<a:bigint,b:string>>",
        "map<string,bigint>",
        "map<double,bigint>",
        "struct<a:decimal(18,2),b:array<date>>",
    ],
)
def test_a_value_of_the_wrong_type_is_left_to_the_serializer(ddl: str) -> None:
    codec, serializer = type_codec(of(ddl)), serializer_for(ddl)
    for value in [*WRONG, *([value] for value in WRONG), *((value, value) for value in WRONG)]:
        written = codec.encode(value)
        assert written is None or repr(written) == outcome(serializer.serialize, value), value


def test_damaged_bytes_are_left_to_the_serializer(rng: random.Random) -> None:
    for _ in range(400):
        declared = random_type(rng, rng.randint(0, 3))
        codec, serializer = type_codec(declared), serializer_for(declared)
        data = bytearray(serializer.serialize(random_value(rng, declared)))
        damaged = [bytes(data[:cut]) for cut in range(min(len(data), 40))] + [bytes(data) + b"\x00"]
        for _ in range(30 if data else 0):
            changed = bytearray(data)
            at = rng.randrange(len(changed))
            changed[at] = rng.choice((0, 1, 255, changed[at] ^ 1 << rng.randrange(8)))
            damaged.append(bytes(changed))
        for each in damaged:
            expected = outcome(serializer.deserialize, each)
            found = outcome(codec.decode, each)
            assert found == expected or found[0] == "ValueError"
            if expected[0] == "SerializationError":
                assert found[0] == "ValueError"


def test_records_come_back_as_their_classes() -> None:
    for cls, value in ((Pair, Pair(1, "b")), (Point, Point(2, 0.5))):
        declared = of(cls)
        codec = type_codec(declared)
        data = serializer_for(declared).serialize(value)
        assert codec.encode(value) == data
        found = codec.decode(data)
        assert type(found) is cls
        assert found == value
    row = type_codec(of("struct<a:bigint,b:string>")).decode(serializer_for(Pair).serialize((1, None)))
    assert repr(row) == "Row(a=1, b=None)"
    assert row.a == 1


class Doubled(tuple):
    def __iter__(self) -> Any:
        return iter([2 * each for each in tuple.__iter__(self)])


class Loud(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return 7


def test_classes_that_change_what_they_hold_are_read_as_the_serializer_reads_them() -> None:
    declared = of("struct<a:bigint,b:bigint>")
    codec, serializer = type_codec(declared), serializer_for(declared)
    for value in (Doubled((1, 2)), Loud(a=1, b=2)):
        assert codec.encode(value) in (None, serializer.serialize(value))
    assert (
        type_codec(of("array<bigint>")).encode(type("L", (list,), {"__iter__": lambda self: iter([9])})([1]))
        is None
    )


@pytest.mark.parametrize("precision", [1, 6, 28, 60])
def test_decimals_do_not_depend_on_the_context(precision: int) -> None:
    assert decimals.in_use()
    rng = random.Random(precision)
    with decimal.localcontext(decimal.Context(prec=precision, traps=[decimal.Inexact])):
        for digits, scale in ((18, 2), (38, 10), (1, 0), (18, 18), (19, 0), (38, 38)):
            declared = TYPES.DECIMAL(digits, scale)
            codec, serializer = type_codec(declared), serializer_for(declared)
            for _ in range(300):
                number = rng.randint(-(10 ** rng.randint(1, digits)) + 1, 10 ** rng.randint(1, digits) - 1)
                value = decimal.Decimal(f"{number}E{-scale + rng.choice((0, 0, 0, 1, 2))}")
                expected = outcome(serializer.serialize, value)
                written = codec.encode(value)
                assert written is None or repr(written) == expected
                if written is not None:
                    back, wanted = codec.decode(written), serializer.deserialize(written)
                    assert back.as_tuple() == wanted.as_tuple()
                    assert hash(back) == hash(wanted)


def test_stored_dates_and_decimals_that_python_does_not_have_are_refused() -> None:
    for ddl, data in (
        ("date", struct.pack("<i", 2_932_897)),
        ("date", struct.pack("<i", -719_163)),
        ("timestamp", struct.pack("<q", 2**63 - 1)),
        ("timestamp_ntz", struct.pack("<q", -(2**63))),
        ("boolean", b"\x02"),
    ):
        with pytest.raises(SerializationError):
            serializer_for(ddl).deserialize(data)
        with pytest.raises(ValueError, match="serializer"):
            type_codec(of(ddl)).decode(data)


# -------------------------------------------------------------------------------------------- keys


def test_random_keys_have_the_encoders_canonical_forms(rng: random.Random) -> None:
    def key_type(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.4:
            return of(rng.choice(list(LEAVES)))
        fields = [key_type(depth - 1) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.5:
            return TYPES.TUPLE(*fields)
        return TYPES.ROW(**{f"k{i}": field for i, field in enumerate(fields)})

    for _ in range(500):
        declared = key_type(3)
        codec, encoder = type_codec(declared), key_encoder(declared)
        for _ in range(4):
            key = random_value(rng, declared)
            canonical, written = encoder.encode(key), codec.encode_key(key)
            assert written is not None or _has_user_dict(key), key
            assert written is None or written == canonical
            assert repr(codec.decode_key(canonical)) == repr(encoder.decode(canonical))


def _has_user_dict(key: Any) -> bool:
    if isinstance(key, (collections.UserDict, collections.OrderedDict)):
        return True
    parts = key.values() if isinstance(key, dict) else key if isinstance(key, tuple) else ()
    return any(map(_has_user_dict, parts))


def test_damaged_keys_are_left_to_the_encoder(rng: random.Random) -> None:
    declared = of("struct<a:bigint,b:string,c:struct<d:date,e:decimal(38,2)>,f:boolean>")
    codec, encoder = type_codec(declared), key_encoder(declared)
    whole = encoder.encode((1, "abc", (datetime.date(2020, 1, 1), decimal.Decimal("-12.34")), True))
    assert codec.decode_key(whole) == encoder.decode(whole)
    for _ in range(2_000):
        data = bytearray(whole[: rng.randrange(len(whole) + 1)])
        for _ in range(rng.randrange(3) if data else 0):
            data[rng.randrange(len(data))] = rng.randrange(256)
        expected = outcome(encoder.decode, bytes(data))
        found = outcome(codec.decode_key, bytes(data))
        assert found == expected or found[0] == "ValueError"
        if expected[0] == "SerializationError":
            assert found[0] == "ValueError"


class Alone(tuple):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclasses.dataclass(eq=False)
class Unequal:
    a: int


AUTUMN = datetime.datetime(2024, 10, 27, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
AS_SINGLE = struct.unpack("<f", struct.pack("<f", 0.1))[0]


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        ("map<float,int>", {0.1: 1, 0.5: 2, AS_SINGLE: 3}),
        ("map<float,int>", {math.nan: 1, -math.nan: 2}),
        ("map<double,int>", {math.nan: 1, -math.nan: 2}),
        ("map<timestamp,int>", {AUTUMN: 1, AUTUMN.astimezone(UTC): 2}),
        ("map<struct<a:bigint>,int>", {Unequal(1): 1, Unequal(1): 2}),
        ("map<struct<a:bigint>,int>", {Alone((1,)): 1, Alone((1,)): 2}),
        ("map<struct<a:float>,int>", {(0.1,): 1, (AS_SINGLE,): 2}),
    ],
)
def test_keys_that_differ_in_a_dict_but_have_the_same_bytes_are_one_key(ddl: str, value: Any) -> None:
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        state = keyed.get_value_state(sb.ValueStateDescriptor("s", ddl))
        keyed.set_current_key(1)
        state.update(value)
        found = state.get_many([1]).to_pylist()[0]
        assert list(state.value().values()) == [item for _, item in found]
        assert len(found) == len(value) - 1
        assert max(value.values()) in state.value().values()
    assert type_codec(of(ddl)).encode(value) is None


@pytest.mark.parametrize("value", [{"b": 1}, {"a": 1, "c": 2}, {"b": 1, "c": 2}])
@pytest.mark.parametrize("count", [1, 2])
def test_a_dict_with_other_fields_is_refused_where_any_object_would_do(value: Any, count: int) -> None:
    declared = TYPES.ROW(**dict.fromkeys("ab"[:count], TYPES.PICKLE))
    assert type_codec(declared).encode(value) is None
    with pytest.raises(SerializationError, match="with exactly its fields"):
        serializer_for(declared).serialize(value)


class Nothing(TYPES.Serializer):
    """Takes no bytes at all."""

    fixed_width = 0
    is_immutable = True

    def serialize(self, value: Any) -> bytes:
        return b""

    def deserialize(self, data: bytes) -> Any:
        return len(data)

    def copy(self, value: Any) -> Any:
        return value

    def config(self) -> dict[str, Any]:
        return {}


def test_serializer_without_bytes_writes_no_length() -> None:
    declared = TYPES.TUPLE(Nothing(), TYPES.LIST(Nothing()), TYPES.STRING)
    for value in ((0, [0, None, 0], "abc"), (None, [], "")):
        data = serializer_for(declared).serialize(value)
        assert type_codec(declared).encode(value) == data
        assert type_codec(declared).decode(data) == serializer_for(declared).deserialize(data) == value


class Short(tuple):
    def __len__(self) -> int:
        return 1


def test_a_tuple_has_as_many_fields_as_it_says() -> None:
    for ddl, value in (("struct<a:bigint,b:bigint>", Short((1, 2))), ("struct<a:bigint>", Short((1, 2)))):
        assert type_codec(of(ddl)).encode(value) is None
        assert type_codec(of(ddl)).encode_key(value) is None


@dataclasses.dataclass
class Failure(Exception):
    a: int


def test_no_object_is_made_that_its_class_in_c_has_not_set_up() -> None:
    declared = of(Failure)
    data = type_codec(declared).encode(Failure(1))
    for read in (type_codec(declared).decode, serializer_for(declared).deserialize):
        for _ in range(2):
            with pytest.raises(TypeError, match="is not safe"):
                read(data)


# --- memory ---


def test_codecs_leave_nothing_behind(rng: random.Random) -> None:
    cases = []
    for _ in range(60):
        declared = random_type(rng, 3)
        codec, value = type_codec(declared), random_value(rng, declared)
        cases.append((codec, value, serializer_for(declared).serialize(value)))

    def all_ways(times: int) -> None:
        for codec, value, data in cases:
            for _ in range(times):
                codec.encode(value)
                codec.decode(data)
                for wrong in (object(), data[:-1]):
                    codec.encode(wrong)
                    try:
                        codec.decode(data[:-1])
                    except ValueError:
                        pass

    all_ways(3)
    gc.collect()
    before = sys.getallocatedblocks()
    all_ways(200)
    gc.collect()
    assert sys.getallocatedblocks() - before < 500
    references = [sys.getrefcount(value) for _, value, _ in cases]
    all_ways(10)
    assert references == [sys.getrefcount(value) for _, value, _ in cases]


def test_an_element_that_changes_its_list_while_it_is_written_does_no_harm() -> None:
    values: list[Any] = []

    class Cutting(datetime.tzinfo):
        def utcoffset(self, moment: Any) -> datetime.timedelta:
            values.clear()
            return datetime.timedelta(0)

    moment = datetime.datetime(2020, 1, 1, tzinfo=Cutting())
    values.extend([moment] * 1_000)
    assert type_codec(of("array<timestamp>")).encode(values) is None


def test_wrong_canonical_forms_and_columns_are_refused() -> None:
    with pytest.raises(TypeError):
        type_codec(of("string")).decode_key(7)
    codec = type_codec(of("decimal(38,0)"))
    numbers = np.zeros(4, np.int64)
    for wrong in ((numbers[:3], None), (numbers, np.zeros(1, np.uint8)), (numbers, np.zeros(4, np.uint8))):
        with pytest.raises(UsageError, match="for each value"):
            codec.values_of(*wrong)
    assert codec.values_of(numbers, np.array([0, 1], np.uint8)) == [decimal.Decimal(0), None]
