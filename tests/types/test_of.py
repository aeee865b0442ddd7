"""Every notation of a type means the type it should, and what has no stored form is refused with a hint."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import pickle
import typing
from typing import Annotated, Any, NamedTuple, NewType, Optional, Union

import pyarrow as pa
import pytest
from hypothesis import given
from type_samples import value_types

from statebackend import types as t
from statebackend.errors import SerializationError, UsageError
from statebackend.types import Serializer
from statebackend.types.serializers import serializer_for


class Point(NamedTuple):
    x: int
    label: str | None


@dataclasses.dataclass
class Total:
    amount: decimal.Decimal
    when: Optional[datetime.datetime]  # noqa: UP045
    small: Annotated[int, t.SHORT]
    points: list[Point]
    registry: typing.ClassVar[dict[str, int]] = {}


@dataclasses.dataclass(frozen=True)
class Frozen:
    key: int


class Tree(NamedTuple):
    left: Optional[Tree]  # noqa: UP045


UserId = NewType("UserId", int)


class Upper(Serializer):
    is_immutable = True

    def serialize(self, value: str) -> bytes:
        return value.upper().encode()

    def deserialize(self, data: bytes) -> str:
        return bytes(data).decode()


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (int, t.LONG),
        (float, t.DOUBLE),
        (bool, t.BOOL),
        (str, t.STRING),
        (bytes, t.BYTES),
        (datetime.datetime, t.TIMESTAMP),
        (datetime.date, t.DATE),
        (decimal.Decimal, t.DECIMAL(38, 18)),
        (list[int], t.LIST(t.LONG)),
        (typing.List[int], t.LIST(t.LONG)),  # noqa: UP006
        (dict[str, int], t.MAP(t.STRING, t.LONG)),
        (tuple[int, str], t.TUPLE(t.LONG, t.STRING)),
        (int | None, t.LONG),
        (Union[str, None], t.STRING),  # noqa: UP007
        (UserId, t.LONG),
        (Annotated[int, "smallint"], t.SHORT),
        (Annotated[int, 7], t.LONG),
        (
            dict[Annotated[int, t.INT], list[tuple[str, bool]]],
            t.MAP(t.INT, t.LIST(t.TUPLE(t.STRING, t.BOOL))),
        ),
        (t.PICKLE, t.PICKLE),
    ],
    ids=str,
)
def test_python_types(spec: Any, wanted: t.Type) -> None:
    assert t.of(spec) == wanted


@pytest.mark.parametrize(
    ("arrow", "wanted"),
    [
        *((declared.arrow, declared) for declared in (t.LONG, t.INT, t.SHORT, t.BYTE, t.DOUBLE, t.FLOAT)),
        *((declared.arrow, declared) for declared in (t.BOOL, t.STRING, t.BYTES, t.DATE, t.TIMESTAMP)),
        (t.TIMESTAMP_NTZ.arrow, t.TIMESTAMP_NTZ),
        (pa.timestamp("ns", "Europe/Berlin"), t.TIMESTAMP),
        (pa.date64(), t.DATE),
        (pa.large_string(), t.STRING),
        (pa.string_view(), t.STRING),
        (pa.binary_view(), t.BYTES),
        (pa.large_binary(), t.BYTES),
        (pa.binary(4), t.BYTES),
        (pa.decimal128(10, 2), t.DECIMAL(10, 2)),
        (pa.decimal256(20, 2), t.DECIMAL(20, 2)),
        (pa.dictionary(pa.int32(), pa.string()), t.STRING),
        (pa.list_(pa.int32()), t.LIST(t.INT)),
        (pa.list_(pa.int32(), 3), t.LIST(t.INT)),
        (pa.large_list(pa.int32()), t.LIST(t.INT)),
        (pa.list_view(pa.int32()), t.LIST(t.INT)),
        (pa.map_(pa.string(), pa.int32()), t.MAP(t.STRING, t.INT)),
        (pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]), t.ROW(a=t.LONG, b=t.LIST(t.STRING))),
    ],
    ids=str,
)
def test_arrow_types(arrow: pa.DataType, wanted: t.Type) -> None:
    assert t.of(arrow) == wanted


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (pa.uint64(), "Arrow type uint64 .* next wider signed type"),
        (pa.float16(), "Arrow type halffloat"),
        (pa.null(), "Arrow type null"),
        (pa.time64("us"), "Arrow type time64"),
        (pa.duration("us"), "Arrow type duration"),
        (pa.decimal256(60, 2), "precision or scale of a DECIMAL is out of range"),
        (list, "class list is not a type .* list\\[int\\]"),
        (dict, "dict\\[str, int\\]"),
        (tuple, "tuple\\[int, str\\]"),
        (tuple[int, ...], "use list"),
        (int | str, "union"),
        (Any, "not a type"),
        (object, "class object is not a type"),
        (None, "class NoneType is not a type"),
        (set[int], "not a type"),
        (7, "an object of class int is not a type"),
        (collections.namedtuple("Bare", "a b"), "fields without a type .*a, b"),
        (Tree, "contains itself"),
        (dict[list[int], int], "LIST cannot be the key type"),
        (dict[Total, int], "cannot be the key type"),
    ],
    ids=str,
)
def test_types_without_a_stored_form_are_refused(spec: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        t.of(spec)


def test_records_remember_their_class() -> None:
    point = t.of(Point)
    assert point == t.ROW(x=t.LONG, label=t.STRING).returning(Point)
    assert point != t.ROW(x=t.LONG, label=t.STRING)
    total = t.of(Total)
    assert isinstance(total, t.RowType)
    assert total.record_class is Total
    assert total.names == ("amount", "when", "small", "points")
    assert total.types == (t.DECIMAL(38, 18), t.TIMESTAMP, t.SHORT, t.LIST(point))
    assert t.of(Frozen).is_immutable
    assert not total.is_immutable
    assert total.config() == t.ROW(**dict(zip(total.names, total.types, strict=True))).config()


def test_returning_needs_the_same_fields() -> None:
    for row, cls in ((t.ROW(y=t.LONG, label=t.STRING), Point), (t.ROW(x=t.LONG), int)):
        with pytest.raises(UsageError, match="does not have the fields of the ROW"):
            row.returning(cls)


def test_a_mutable_record_cannot_be_a_map_key() -> None:
    @dataclasses.dataclass
    class Mutable:
        a: int

    with pytest.raises(UsageError, match="not hashable"):
        t.MAP(Mutable, int)
    assert t.MAP(Frozen, int).key == t.of(Frozen)


def test_a_class_whose_field_types_cannot_be_found_is_refused() -> None:
    class Local(NamedTuple):
        a: Missing  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(UsageError, match="cannot resolve the field types of class .*Local.*'Missing'"):
        t.of(Local)


def test_a_serializer_is_a_type() -> None:
    custom = t.of(Upper())
    assert isinstance(custom, t.CustomType)
    assert custom == t.of(Upper())
    assert custom.is_immutable
    assert not custom.is_key_type
    assert t.of(serializer_for(int)) is t.LONG
    assert pickle.loads(pickle.dumps(custom)) == custom
    with pytest.raises(SerializationError, match="cannot be rebuilt"):
        t.from_config(custom.config())


@given(value_types)
def test_repr_config_ddl_arrow_and_pickle_give_the_type_back(declared: t.Type) -> None:
    assert eval(repr(declared), vars(t)) == declared
    assert t.from_config(declared.config()) == declared
    assert t.of(declared.ddl()).ddl() == declared.ddl()
    assert t.of(declared.arrow).ddl() == declared.ddl()
    copy = pickle.loads(pickle.dumps(declared))
    assert copy == declared
    assert hash(copy) == hash(declared)
    assert copy.arrow == declared.arrow


@given(value_types, value_types)
def test_equal_types_are_those_with_equal_configurations(a: t.Type, b: t.Type) -> None:
    assert (a == b) == (a.config() == b.config())


def test_constants_are_one_object_each() -> None:
    assert pickle.loads(pickle.dumps(t.LONG)) is t.LONG
    assert t.LONG != t.INT
    assert t.LONG != "LONG"


def test_types_are_immutable() -> None:
    with pytest.raises(AttributeError, match="types are immutable"):
        t.LONG.name = "INT"
    with pytest.raises(AttributeError, match="types are immutable"):
        t.ROW(a=int).names = ("b",)  # type: ignore[misc]
    with pytest.raises(AttributeError, match="types are immutable"):
        del t.LONG.name


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"type": "novelty"},
        {"type": ["long"]},
        {"type": "decimal", "precision": 99, "scale": 0},
        {"type": "decimal", "precision": True, "scale": 0},
        {"type": "decimal"},
        {"type": "list"},
        {"type": "row", "fields": [["a"]]},
        {"type": "row", "fields": [[1, {"type": "long"}]]},
        {"type": "row", "fields": []},
        {"type": "map", "key": {"type": "pickle"}, "value": {"type": "long"}},
        {"type": "tuple", "fields": 3},
    ],
    ids=str,
)
def test_a_damaged_configuration_is_refused(config: Any) -> None:
    with pytest.raises(SerializationError, match="stored type configuration cannot be read"):
        t.from_config(config)


def test_a_bottomless_configuration_is_refused() -> None:
    config: dict[str, Any] = {"type": "long"}
    for _ in range(5000):
        config = {"type": "list", "element": config}
    with pytest.raises(SerializationError, match="stored type configuration cannot be read"):
        t.from_config(config)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: t.DECIMAL(39, 0), "precision or scale"),
        (lambda: t.DECIMAL(5, 6), "precision or scale"),
        (t.ROW, "at least one field"),
        (t.TUPLE, "at least one field"),
        (lambda: t.of(pa.struct([("a", pa.int64()), ("a", pa.int64())])), "two fields of the same name"),
    ],
)
def test_bad_constructor_arguments_are_refused(make: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        make()


def test_widths() -> None:
    assert t.ROW(a=int, b=t.DECIMAL(20, 0)).fixed_width == 1 + 8 + 16
    assert t.TUPLE(*[t.BYTE] * 9).fixed_width == 2 + 9
    assert t.ROW(a=int, b=str).fixed_width is None


def test_key_types() -> None:
    assert t.TUPLE(int, t.ROW(a=str)).is_key_type
    assert not t.TUPLE(int, list[int]).is_key_type
    assert not t.PICKLE.is_key_type
