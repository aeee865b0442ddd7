"""Columns of values become what the serializers make of each value, errors included, and come back as Arrow."""

from __future__ import annotations

import datetime
import decimal
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from arrow_layouts import LAYOUTS, laid_out
from hypothesis import example, given
from hypothesis import strategies as st
from type_strategies import value_types, values_of

from statebackend import types as t
from statebackend.columns.stored_columns import arrow_column, double_column, null_column, value_column
from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.state.value_columns import check_values, to_arrow, to_values
from statebackend.types.serializers import serializer_for

pytestmark = pytest.mark.checked

UTC = datetime.timezone.utc


def rows_of(values: Any, nulls: Any) -> list[bytes | None]:
    """The stored bytes of each row, None for a null."""
    if isinstance(values, tuple):
        offsets, data = values
        found = [data[a:b].tobytes() for a, b in itertools.pairwise(offsets)]
    elif values.ndim == 2:
        found = [row.tobytes() for row in values]
    else:
        found = [value.tobytes() for value in values]
    return found if nulls is None else [None if n else v for v, n in zip(found, nulls, strict=True)]


def plain(column: Any, declared: t.Type, nullable: bool = True) -> list[bytes | None]:
    """The same in the plain way."""
    values = to_values(column, declared)
    check_values(values, declared, nullable)
    serialize = serializer_for(declared).serialize
    return [None if value is None else serialize(value) for value in values]


def forms_of(values: list[Any], declared: t.Type) -> list[Any]:
    array = to_arrow(values, declared)
    return [values, *(laid_out(array, declared, layout) for layout in (LAYOUTS if values else ["plain"]))]


@st.composite
def typed_columns(draw: st.DrawFn) -> tuple[t.Type, list[Any]]:
    declared = draw(value_types)
    return declared, draw(st.lists(st.none() | values_of(declared), max_size=12))


@given(typed_columns())
@example((t.STRING, [None, ""]))
@example((t.BYTES, [None, b"a"]))
def test_columns_hold_what_the_serializer_writes(drawn: tuple[t.Type, list[Any]]) -> None:
    declared, values = drawn
    expected = plain(values, declared)
    for form in forms_of(values, declared):
        column = value_column(form, declared)
        assert rows_of(*column) == expected
        valid = None if column.nulls is None else ~column.nulls
        back = arrow_column(column.values, valid, declared)
        back.validate(full=True)
        assert back.type == declared.arrow
        assert plain(back, declared) == expected


BIG = decimal.Decimal("9" * 30)
FINE: list[tuple[Any, t.Type]] = [
    (np.array([1, 2], dtype=np.uint8), t.LONG),
    (np.array([1, 2], dtype=">i4"), t.SHORT),
    (np.array([1, 2**63 - 1], dtype=np.uint64), t.LONG),
    (np.array([1.5, np.nan, -0.0]), t.DOUBLE),
    (np.array([1.5, np.inf], dtype=np.float64), t.FLOAT),
    (np.array([0.1, 1e-50]), t.FLOAT),
    (np.array([1, -5], dtype=np.int16), t.FLOAT),
    (np.array([1, 2**24 + 1]), t.FLOAT),
    (np.array([1, 2**60]), t.DOUBLE),
    (np.array([2.5], dtype=np.float16), t.DOUBLE),
    (np.array([True, False]), t.BOOL),
    (np.array(["a", "é", ""]), t.STRING),
    (np.array([b"a", b"bcd"]), t.BYTES),
    (np.array([1, None, "x"], dtype=object)[:2], t.LONG),
    (np.array(["2020-01-01", "NaT"], dtype="M8[D]"), t.DATE),
    (np.array(["2020-01-01T01", "NaT"], dtype="M8[us]"), t.TIMESTAMP_NTZ),
    (np.array(["2020-01-01T01"], dtype="M8[ns]"), t.TIMESTAMP_NTZ),
    (np.arange(10)[::2], t.INT),
    (pa.array([1, None], pa.uint16()), t.INT),
    (pa.array([1, None, 3], pa.int32()), t.DOUBLE),
    (pa.array([0.1, None], pa.float64()), t.FLOAT),
    (pa.array([None, None]), t.LONG),
    (pa.array([None], pa.null()), t.STRING),
    (pa.array([None, None], pa.string()), t.STRING),
    (pa.array([1, None], pa.timestamp("s", "Europe/Paris")), t.TIMESTAMP),
    (pa.array([1, None], pa.timestamp("ms")), t.TIMESTAMP_NTZ),
    (pa.array([86_400_000, None], pa.int64()).cast(pa.date64()), t.DATE),
    (pa.array([decimal.Decimal("1.50"), None], pa.decimal128(20, 4)), t.DECIMAL(10, 2)),
    (pa.array([decimal.Decimal("1.5"), None], pa.decimal256(50, 1)), t.DECIMAL(38, 3)),
    (pa.array([BIG, None], pa.decimal128(30, 0)), t.DECIMAL(38, 0)),
    (pa.array([b"ab", None], pa.binary(2)), t.BYTES),
    (pa.DictionaryArray.from_arrays([1, None, 0], pa.array(["a", "b"], pa.string_view())), t.STRING),
    (
        pa.DictionaryArray.from_arrays(
            [1, 0], pa.array([[{"a": b"x"}], None], pa.list_(pa.struct([("a", pa.binary_view())])))
        ),
        t.LIST(t.ROW(a=t.BYTES)),
    ),
    (
        pa.DictionaryArray.from_arrays(
            [0, 0], pa.array([[("k", ["x"])]], pa.map_(pa.string_view(), pa.large_list(pa.string_view())))
        ),
        t.MAP(t.STRING, t.LIST(t.STRING)),
    ),
    (
        pa.DictionaryArray.from_arrays([0, 0], pa.array([["x"]], pa.list_(pa.string_view(), 1))),
        t.LIST(t.STRING),
    ),
    (
        pa.DictionaryArray.from_arrays([0, 0], pa.array([["x"]], pa.list_view(pa.string_view()))),
        t.LIST(t.STRING),
    ),
    (pa.array([{"b": 1, "a": None}, None]), t.ROW(a=t.LONG, b=t.LONG)),
    (pa.array([{"a": {"x": 1}}, {"a": None}, None]), t.ROW(a=t.ROW(x=t.LONG))),
    (pa.array([{"u": 1, "v": 2.5}]), t.TUPLE(t.INT, t.DOUBLE)),
    (pa.array([{f"f{i:02}": i for i in range(20)}]), t.ROW(**{f"f{i:02}": t.LONG for i in range(20)})),
    ([None, 1, 2.5, np.float32(3)], t.DOUBLE),
    ([np.int8(3), 4], t.LONG),
    ([(1, None), {"b": 2, "a": 1}], t.ROW(a=t.LONG, b=t.LONG)),
    ([datetime.datetime(2020, 1, 1, tzinfo=UTC), None], t.TIMESTAMP),
    (range(3), t.LONG),
    ([], t.STRING),
]


def name_of(each: Any) -> str:
    """The same in every process: arrays print where they are."""
    if isinstance(each, t.Type):
        return repr(each)
    return f"{type(each).__name__}-{getattr(each, 'type', None) or getattr(each, 'dtype', '')}"


@pytest.mark.parametrize(("column", "declared"), FINE, ids=name_of)
def test_whatever_a_column_comes_as(column: Any, declared: t.Type) -> None:
    assert rows_of(*value_column(column, declared)) == plain(column, declared)


REFUSED: list[tuple[Any, t.Type]] = [
    (np.array([1, 300]), t.BYTE),
    (np.array([1, 2**63], dtype=np.uint64), t.LONG),
    (np.array([1.0, 2.0]), t.LONG),
    (np.array([True]), t.LONG),
    (np.array([1]), t.BOOL),
    (np.array([1.0, 1e300]), t.FLOAT),
    (np.array([1, 2**53 + 1]), t.DOUBLE),
    (pa.array([1, 2**24 + 1]), t.FLOAT),
    (np.array(["2020-01-01"], dtype="M8[D]"), t.TIMESTAMP_NTZ),
    (np.array(["2020-01-01T00:00:00.000000001"], dtype="M8[ns]"), t.TIMESTAMP_NTZ),
    (np.array([[1]]), t.LONG),
    (pa.array([1, None, 2**40]), t.INT),
    (pa.array(["a"]), t.LONG),
    (pa.array([decimal.Decimal("123.4")]), t.DECIMAL(3, 1)),
    (pa.array([1.5, None]), t.DECIMAL(10, 2)),
    (pa.array([{"a": 1}]), t.ROW(b=t.LONG)),
    (pa.array([{"a": 1, "b": 2}]), t.ROW(a=t.LONG)),
    (pa.array([{"a": 1}, {"a": 2**40}]), t.ROW(a=t.INT)),
    (pa.array([{"a": 1.5}]), t.ROW(a=t.INT)),
    (
        pa.StructArray.from_arrays(
            [pa.array([decimal.Decimal(1)] * 2).dictionary_encode()], ["a"], mask=pa.array([False, True])
        ),
        t.DECIMAL(18, 2),
    ),
    (pa.array([[1], None]), t.LONG),
    (pa.array([1.5]), t.LIST(t.TUPLE(t.LONG))),
    (pa.array([["a"]]), t.LIST(t.LIST(t.TUPLE(t.LONG)))),
    (pa.array([1.5]), t.MAP(t.LONG, t.LONG)),
    (pa.array([[1, 2]]), t.MAP(t.LONG, t.LONG)),
    (pa.array([[[1, 2]]]), t.MAP(t.LONG, t.LONG)),
    (pa.array([[{"x": "a", "y": "b"}]]), t.MAP(t.STRING, t.STRING)),
    (pa.array([[([1], 2)]], pa.map_(pa.list_(pa.int64()), pa.int64())), t.MAP(t.LONG, t.LONG)),
    (
        pa.array([[({"x": [1]}, 2)]], pa.map_(pa.struct({"x": pa.list_(pa.int64())}), pa.int64())),
        t.MAP(t.TUPLE(t.LONG), t.LONG),
    ),
    (pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64())), t.MAP(t.STRING, t.MAP(t.LONG, t.LONG))),
    (
        pa.Array.from_buffers(
            pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
        ),
        t.STRING,
    ),
    ([1, "a"], t.LONG),
    ([1, 2.0], t.LONG),
    (["a", "\ud800"], t.STRING),
    ("ab", t.STRING),
    (7, t.LONG),
]


@pytest.mark.parametrize(("column", "declared"), REFUSED, ids=name_of)
def test_errors_are_those_of_the_plain_way(column: Any, declared: t.Type) -> None:
    with pytest.raises((SerializationError, OverflowError)) as expected:
        plain(column, declared)
    with pytest.raises(type(expected.value)) as raised:
        value_column(column, declared)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("column", [[1, None], pa.array([1, 2, None])])
def test_nulls_that_are_not_taken(column: Any) -> None:
    with pytest.raises(SerializationTypeError, match="position") as expected:
        plain(column, t.LONG, nullable=False)
    with pytest.raises(type(expected.value)) as raised:
        value_column(column, t.LONG, nullable=False)
    assert str(raised.value) == str(expected.value)


def test_numbers_are_shared_and_not_copied() -> None:
    array = pa.array(range(1000))
    values = value_column(array[10:], t.LONG).values
    assert values.__array_interface__["data"][0] == array.buffers()[1].address + 80
    back = arrow_column(values, None, t.LONG)
    assert back.buffers()[1].address == array.buffers()[1].address + 80
    words = pa.array(["a", "bc"] * 500)
    assert (
        value_column(words, t.STRING).values[1].__array_interface__["data"][0] == words.buffers()[2].address
    )


@pytest.mark.parametrize(
    "declared", [t.LONG, t.BYTE, t.FLOAT, t.DECIMAL(9, 4), t.DECIMAL(18, 18), t.DECIMAL(38, 20)], ids=repr
)
def test_doubles_are_rounded_as_float_rounds(declared: t.Type) -> None:
    values: list[Any] = [1, 0, -3, None]
    if isinstance(declared, t.DecimalType):
        digits = "123456789012345678901234567890123456789"[: declared.precision]
        values = [decimal.Decimal(f"{sign}{digits}E-{declared.scale}") for sign in ("", "-")] + [None]
    elif declared == t.LONG:
        values = [2**63 - 1, -(2**53) - 1, None]
    column = double_column(values, declared)
    assert column.nulls is not None
    for value, double, null in zip(values, column.values, column.nulls, strict=True):
        assert null if value is None else double == float(value)


def test_what_only_counts_is_checked_too() -> None:
    assert null_column([object(), None], None)[1].tolist() == [False, True]  # type: ignore[union-attr]
    assert null_column(pa.array(["a"]), t.STRING) == (1, None)
    with pytest.raises(OverflowError):
        null_column([2**70], t.LONG)
