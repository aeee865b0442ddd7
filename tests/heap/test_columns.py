"""Columns of values hold what the serializers write, however Arrow lays them out, and come back equal; errors, too."""

from __future__ import annotations

import datetime
import decimal
import itertools
import math
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from arrow_layouts import DEEP, LAYOUTS, laid_out
from hypothesis import example, given, strategies as st
from type_samples import key_types, scalar_key_types, value_types, values_of

from statebackend import types as t
from statebackend._core.codecs.nested_reader import SinkPart, read_values
from statebackend._core.codecs.nested_writer import SourcePart, write_keys, write_values
from statebackend.backends.heap import HeapBackend
from statebackend.columns.nested_columns import arrow_of_stored, decoded_keys, encoded_keys, stored_runs
from statebackend.columns.stored_columns import arrow_column, double_column, null_column, value_column
from statebackend.errors import SerializationError, SerializationTypeError, UsageError
from statebackend.keys import key_encoder
from statebackend.state import ValueStateDescriptor
from statebackend.state.value_columns import check_values, to_arrow, to_values
from statebackend.types.serializers import serializer_for

pytestmark = pytest.mark.checked

Runs = tuple[Any, Any]
UTC = datetime.timezone.utc


def split(runs: Runs) -> list[bytes]:
    offsets, data = runs
    return [data[a:b].tobytes() for a, b in itertools.pairwise(offsets)]


def joined(rows: list[bytes]) -> Runs:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets, np.frombuffer(b"".join(rows), dtype=np.uint8)


def plain(column: Any, declared: t.Type, nullable: bool = True) -> list[bytes | None]:
    """The stored bytes of each row in Python's way, None for a null."""
    values = to_values(column, declared)
    check_values(values, declared, nullable)
    serialize = serializer_for(declared).serialize
    return [None if value is None else serialize(value) for value in values]


def by_value(stored: list[bytes | None], declared: t.Type) -> pa.Array:
    read = serializer_for(declared).deserialize
    return to_arrow([None if data is None else read(data) for data in stored], declared)


def stored_rows(column: pa.Array, declared: t.Type) -> list[bytes | None]:
    """The rows of `stored_runs`, which must not need to look at each value."""
    runs = stored_runs(column, declared)
    assert runs is not None
    present = column.is_valid().to_pylist()
    return [data if there else None for data, there in zip(split(runs), present, strict=True)]


def name_of(each: Any) -> str:
    """The same in every process: arrays print where they are."""
    return each.ddl() if isinstance(each, t.Type) else type(each).__name__


# --- columns of any type ---


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
PLAIN_FINE: list[tuple[Any, t.Type]] = [
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


@pytest.mark.parametrize(("column", "declared"), PLAIN_FINE, ids=name_of)
def test_each_form_of_a_column_is_taken(column: Any, declared: t.Type) -> None:
    assert rows_of(*value_column(column, declared)) == plain(column, declared)


PLAIN_REFUSED: list[tuple[Any, t.Type]] = [
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


def test_columns_that_only_count_are_checked_too() -> None:
    assert null_column([object(), None], None)[1].tolist() == [False, True]  # type: ignore[union-attr]
    assert null_column(pa.array(["a"]), t.STRING) == (1, None)
    with pytest.raises(OverflowError):
        null_column([2**70], t.LONG)


# --- nested types ---


def one_layer(inner: st.SearchStrategy[t.Type]) -> st.SearchStrategy[t.Type]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda types: t.TUPLE(*types)),
        several.map(lambda types: t.ROW(**{f"f{i}": field for i, field in enumerate(types)})),
        inner.map(t.LIST),
        st.builds(t.MAP, key_types, inner),
    )


nested_types: st.SearchStrategy[t.Type] = one_layer(scalar_key_types)
for _ in range(4):
    nested_types = one_layer(scalar_key_types | nested_types)


@st.composite
def nested_columns(draw: st.DrawFn) -> tuple[t.Type, list[Any]]:
    declared = draw(nested_types)
    return declared, draw(st.lists(st.none() | values_of(declared), min_size=1, max_size=8))


@given(nested_columns())
@example((t.LIST(t.BOOL), [[True, None] * 9, None, [], [False]]))
@example((t.LIST(t.LIST(t.LIST(t.LIST(t.LIST(t.STRING))))), [[[[[["a", None], None]]]], None]))
@example((t.MAP(t.TUPLE(t.DOUBLE, t.STRING), t.LIST(t.FLOAT)), [{(-0.0, None): [-0.0, math.nan]}]))
@example((t.TUPLE(*[t.LIST(t.BYTE)] * 9), [tuple([[-128], None] * 4 + [[]])]))
@example((t.ROW(a=t.TUPLE(t.DECIMAL(38, 2))), [((decimal.Decimal("-" + "9" * 36 + ".99"),),)]))
@example((t.MAP(t.LONG, t.STRING), [dict.fromkeys(range(-50, 50), "x")]))
def test_nested_columns_hold_what_the_serializer_writes(drawn: tuple[t.Type, list[Any]]) -> None:
    declared, values = drawn
    array = to_arrow(values, declared)
    expected = plain(values, declared)
    twice = pa.concat_arrays([array, array])
    assert stored_rows(array, declared) == expected
    assert stored_rows(twice[1:], declared) == expected[1:] + expected
    for layout in ("large", "view", "other"):
        assert stored_rows(laid_out(array, declared, layout), declared) == expected
    chunked = pa.chunked_array([array[:1], array[1:], array[:0]])
    for form in (chunked, array.slice(0), values):
        column = value_column(form, declared)
        valid = None if column.nulls is None else ~column.nulls
        back = arrow_column(column.values, valid, declared)
        back.validate(full=True)
        assert back.type == declared.arrow
        assert plain(back, declared) == expected
        assert repr(back.to_pylist()) == repr(by_value(expected, declared).to_pylist())
    present = np.array([row is not None for row in expected])
    rows = [b"\xff" if row is None else row for row in expected]  # nobody looks at the bytes of a null
    back = arrow_of_stored(*joined(rows), present, declared)
    assert back is not None
    back.validate(full=True)
    assert repr(back.to_pylist()) == repr(by_value(expected, declared).to_pylist())


def map_of(keys: pa.Array, items: pa.Array, *ends: int) -> pa.Array:
    return pa.MapArray.from_arrays(pa.array([0, *ends], pa.int32()), keys, items)


DOUBLES = pa.array([1.0, -0.0, math.nan, 0.0, math.nan, 1.0, 2.0, -0.0])
PAIRS = pa.array([{"_1": 1, "_2": "a"}, {"_1": 1, "_2": "b"}, {"_1": None, "_2": "a"}, {"_1": 1, "_2": "a"}])


@pytest.mark.parametrize(
    ("column", "declared"),
    [
        (map_of(DOUBLES, pa.array(range(8)), 5, 8), t.MAP(t.DOUBLE, t.LONG)),
        (map_of(DOUBLES.cast(pa.float32()), pa.array(range(8)), 8), t.MAP(t.FLOAT, t.LONG)),
        (map_of(PAIRS, pa.array(["x", None, "y", "z"]), 0, 4), t.MAP(t.TUPLE(t.LONG, t.STRING), t.STRING)),
        (map_of(PAIRS, pa.array([[1], None, [], [2]]), 4), t.MAP(t.TUPLE(t.LONG, t.STRING), t.LIST(t.INT))),
        (
            map_of(pa.array([i * 7 % 31 for i in range(100)]), pa.array(range(100)), 0, 40, 100),
            t.MAP(t.INT, t.LONG),
        ),
        (
            map_of(pa.array([f"k{i % 9}" for i in range(40)]), pa.array([None] * 39 + [1]), 20, 40),
            t.MAP(t.STRING, t.LONG),
        ),
    ],
    ids=name_of,
)
def test_of_equal_keys_of_a_map_the_last_value_counts(column: pa.Array, declared: t.Type) -> None:
    assert stored_rows(column, declared) == plain(column, declared)
    nested = pa.StructArray.from_arrays([column, column], ["a", "b"])
    assert stored_rows(nested, t.ROW(a=declared, b=declared)) == plain(nested, t.ROW(a=declared, b=declared))
    listed = map_of(pa.array(["p", "p", "q"][: len(column)]), column, len(column))
    outer = t.MAP(t.STRING, declared)
    assert stored_rows(listed, outer) == plain(listed, outer)


FINE: list[tuple[pa.Array, t.Type]] = [
    (pa.array([{"b": "x", "a": 1}]), t.ROW(a=t.LONG, b=t.STRING)),
    (pa.array([{"x": "x", "y": 1}]), t.TUPLE(t.STRING, t.LONG)),
    (pa.array([[1, None], None], pa.list_(pa.uint64(), 2)), t.LIST(t.BYTE)),
    (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))[1:], t.LIST(t.LONG)),
    (pa.array([[1, None], None, [], [2, 3]], pa.list_view(pa.int64()))[1:], t.LIST(t.LONG)),
    (pa.array([["a", None], None, ["b"]], pa.large_list_view(pa.string_view()))[:2], t.LIST(t.STRING)),
    (
        laid_out(pa.array([[[1], None], None, [[2, 3], []]]), t.LIST(t.LIST(t.LONG)), "view"),
        t.LIST(t.LIST(t.LONG)),
    ),
    (pa.array([[b"ab", None], [b"cd"]], pa.list_(pa.binary(2)))[1:], t.LIST(t.BYTES)),
    (pa.array([[1, None]], pa.list_(pa.int16())), t.LIST(t.DOUBLE)),
    (pa.array([[1, 2**24]], pa.list_(pa.int32())), t.LIST(t.FLOAT)),
    (pa.array([[0.1, math.inf, -math.inf, None]]), t.LIST(t.FLOAT)),
    (pa.array([[1, None]], pa.list_(pa.timestamp("s", "Europe/Paris"))), t.LIST(t.TIMESTAMP)),
    (pa.array([[1_000, None]], pa.list_(pa.timestamp("ns"))), t.LIST(t.TIMESTAMP_NTZ)),
    (pa.array([[datetime.date(2020, 1, 1), None]], pa.list_(pa.date64())), t.LIST(t.DATE)),
    (pa.array([[decimal.Decimal("1.50")]], pa.list_(pa.decimal128(20, 4))), t.LIST(t.DECIMAL(10, 2))),
    (pa.array([[None]]), t.LIST(t.STRING)),
    (pa.array([{"a": None, "b": []}]), t.ROW(a=t.MAP(t.LONG, t.LONG), b=t.LIST(t.STRING))),
    (pa.array([["a", "b", "a"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))), t.LIST(t.STRING)),
    (
        pa.array([{f"f{i:02}": i for i in range(20)}, None]),
        t.ROW(**{f"f{i:02}": t.LONG for i in range(20)}),
    ),
    (pa.array([{"a": [], "b": "é" * 100}]), t.ROW(a=t.LIST(t.LONG), b=t.STRING)),
]


@pytest.mark.parametrize(("column", "declared"), FINE, ids=name_of)
def test_columns_sure_to_be_equal_are_not_converted_value_by_value(
    column: pa.Array, declared: t.Type
) -> None:
    expected = plain(column, declared)
    found = stored_rows(column, declared)
    assert [row for row in found if row is not None] == [row for row in expected if row is not None]
    assert [row is None for row in found] == [row is None for row in expected]


def test_entries_of_a_map_may_begin_within_their_buffers() -> None:
    arrow = pa.map_(pa.int64(), pa.string())
    children = [pa.array([0, 1, 2]), pa.array(["z", "a", "b"])]
    entries = pa.Array.from_buffers(arrow.field(0).type, 2, [None], 0, 1, children)
    column = pa.Array.from_buffers(arrow, 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0")], children=[entries])
    declared = t.MAP(t.LONG, t.STRING)
    assert stored_rows(column, declared) == [serializer_for(declared).serialize({1: "a", 2: "b"})]


def text(data: bytes, *ends: int) -> pa.Array:
    """Strings that nobody has checked."""
    offsets = np.array([0, *ends], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def test_bytes_below_a_null_are_not_read() -> None:
    wrong = text(b"ok\xff\xfe", 2, 4)
    numbers = pa.array([1, 2**62], pa.timestamp("us"))
    structs = pa.StructArray.from_arrays([wrong, numbers], ["a", "b"], mask=pa.array([False, True]))
    declared = t.ROW(a=t.STRING, b=t.TIMESTAMP_NTZ)
    assert stored_rows(structs, declared) == [
        serializer_for(declared).serialize(("ok", datetime.datetime(1970, 1, 1, 0, 0, 0, 1))),
        None,
    ]
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), wrong, mask=pa.array([False, True]))
    assert stored_rows(lists, t.LIST(t.STRING)) == [serializer_for(t.LIST(t.STRING)).serialize(["ok"]), None]
    outer = pa.StructArray.from_arrays([lists, structs], ["l", "s"])
    both = t.ROW(l=t.LIST(t.STRING), s=declared)
    assert stored_rows(outer, both) == plain(outer, both)


class Raw(t.Serializer):
    def serialize(self, value: Any) -> bytes:
        return bytes(value)

    def deserialize(self, data: bytes) -> Any:
        return data


def too_large(precision: int, number: int) -> pa.Array:
    """A number that has more digits than its type, which Arrow does not check."""
    buffers = [None, pa.py_buffer(number.to_bytes(16, "little"))]
    return pa.Array.from_buffers(pa.decimal128(precision, 0), 1, buffers)


LIST_OF_LONG = pa.array([[1, 2]])
FAR = pa.array([[2**62]], pa.list_(pa.timestamp("us", "UTC")))
REFUSED: list[tuple[Any, t.Type]] = [
    (pa.array([[1, None, 300]]), t.LIST(t.BYTE)),
    (pa.array([[1.5]]), t.LIST(t.LONG)),
    (pa.array([[True]]), t.LIST(t.LONG)),
    (pa.array([{"a": ["x"], "c": 1}]), t.ROW(a=t.LIST(t.STRING), b=t.LONG)),
    (pa.array([{"a": ["x"]}]), t.ROW(a=t.LIST(t.STRING), b=t.LONG)),
    (pa.array([{"a": ["x"]}]), t.TUPLE(t.LIST(t.STRING), t.LONG)),
    (pa.StructArray.from_arrays([LIST_OF_LONG] * 2, ["a", "a"]), t.TUPLE(t.LIST(t.LONG), t.LIST(t.LONG))),
    (pa.array([1]), t.LIST(t.LONG)),
    (pa.array([[decimal.Decimal("1.005")]]), t.LIST(t.DECIMAL(10, 2))),
    (pa.array([[decimal.Decimal("123.4")]]), t.LIST(t.DECIMAL(3, 1))),
    (FAR, t.LIST(t.TIMESTAMP)),
    (pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), text(b"ok\xff", 2, 3)), t.LIST(t.STRING)),
    (pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), text(b"\xed\xa0\x80", 3)), t.LIST(t.STRING)),
    (too_large(20, 10**25), t.DECIMAL(20, 0)),
    (pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), too_large(3, 1000)), t.LIST(t.DECIMAL(3, 0))),
]


@pytest.mark.parametrize(("column", "declared"), [*PLAIN_REFUSED, *REFUSED], ids=name_of)
def test_errors_are_worded_value_by_value(column: pa.Array, declared: t.Type) -> None:
    with pytest.raises((SerializationError, OverflowError)) as expected:
        plain(column, declared)
    with pytest.raises(type(expected.value)) as raised:
        value_column(column, declared)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize(
    ("column", "declared"),
    [
        (pa.array([[b"a"]]), t.LIST(t.PICKLE)),
        (pa.array([{"a": b"a"}]), t.ROW(a=t.of(Raw()))),
        (LIST_OF_LONG, t.MAP(t.LONG, t.LONG)),
        (
            map_of(pa.array([1], pa.timestamp("us", "Europe/Paris")), pa.array([1]), 1),
            t.MAP(t.TIMESTAMP, t.LONG),
        ),
    ],
    ids=name_of,
)
def test_columns_that_may_differ_are_left_to_conversion_by_value(column: pa.Array, declared: t.Type) -> None:
    assert stored_runs(column, declared) is None


DAMAGED: list[tuple[t.Type, Any]] = [
    (t.ROW(a=t.LONG, b=t.STRING), (7, "bé")),
    (t.TUPLE(t.STRING, t.BYTES, t.BOOL), (None, b"\xff", True)),
    (t.LIST(t.LONG), [1, None, 3]),
    (t.LIST(t.STRING), ["a", "", None, "bcd"]),
    (t.LIST(t.LIST(t.INT)), [[1], [], None, [2, None]]),
    (t.MAP(t.STRING, t.LONG), {"a": 1, "b": None}),
    (
        t.MAP(t.TUPLE(t.DOUBLE, t.STRING), t.LIST(t.DATE)),
        {(1.5, None): [datetime.date(2020, 1, 1)], (None, "x"): []},
    ),
    (t.ROW(a=t.MAP(t.FLOAT, t.DECIMAL(10, 2)), b=t.TIMESTAMP), ({2.5: decimal.Decimal("1.25")}, None)),
    (t.ROW(**{f"f{i}": t.LONG for i in range(20)}, b=t.BOOL), (*range(20), True)),
]


def outcome(call: Any) -> Any:
    try:
        return repr(call().to_pylist())
    except (SerializationError, pa.ArrowInvalid) as error:
        return type(error).__name__, getattr(error, "code", None), str(error)


@pytest.mark.parametrize(("declared", "value"), DAMAGED, ids=name_of)
def test_damaged_bytes_raise_what_the_serializer_raises(declared: t.Type, value: Any) -> None:
    whole = serializer_for(declared).serialize(value)
    chance = random.Random(5)
    damaged = [whole[:cut] for cut in range(len(whole))] + [whole + b"\0", whole + whole]
    for at in range(len(whole)):
        for byte in (0x00, 0x01, 0x7F, 0x80, 0xFF, chance.randrange(256)):
            damaged.append(whole[:at] + bytes([byte]) + whole[at + 1 :])
        damaged.append(whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 :])
    for data in damaged:
        # Copied, so that a checked or sanitized build notices a byte read past the end.
        runs = joined([whole, data])
        found = outcome(lambda runs=runs: arrow_column(runs, None, declared))
        assert found == outcome(lambda data=data: by_value([whole, data], declared))


def test_offsets_that_leave_the_data_are_not_followed() -> None:
    declared = t.LIST(t.LONG)
    data = np.zeros(8, dtype=np.uint8)
    for offsets in ([0, 9], [-1, 4], [4, 0], [0, 2**62]):
        assert arrow_of_stored(np.array(offsets), data, None, declared) is None
    broken = pa.Array.from_buffers(
        pa.list_(pa.int64()),
        2,
        [None, pa.py_buffer(np.array([0, 99, 1], dtype=np.int32))],
        children=[pa.array([1])],
    )
    assert stored_runs(broken, declared) is None


def test_text_of_a_record_is_not_followed_where_its_offsets_fall() -> None:
    """They fall in null rows, which nobody looks at. So the other rows have more bytes than there is room for."""
    ends = [0, *(at for _ in range(500) for at in (4000, 0)), 4000]
    names = pa.Array.from_buffers(
        pa.string(), 1001, [None, pa.py_buffer(np.array(ends, np.int32)), pa.py_buffer(b"x" * 4000)]
    )
    there = pa.py_buffer(np.packbits(np.arange(1001) % 2 == 0, bitorder="little"))
    column = pa.Array.from_buffers(pa.struct([("a", pa.string())]), 1001, [there], 500, children=[names])
    assert stored_runs(column, t.ROW(a=t.STRING)) is None


@pytest.mark.parametrize("fields", [8, 9, 64, 70])
def test_records_of_many_fields_hold_what_the_serializer_writes(fields: int) -> None:
    declared = t.TUPLE(*[(t.LONG, t.STRING, t.SHORT, t.BYTES)[i % 4] for i in range(fields)])
    samples = (7, "bé", None, b"c" * 70)
    rows = [tuple(samples[j % 4] if (i + j) % 5 else None for j in range(fields)) for i in range(40)]
    column = to_arrow([None, *rows], declared)
    assert stored_rows(column, declared) == plain([None, *rows], declared)
    back = arrow_column(stored_runs(column, declared), column.is_valid().to_numpy(False), declared)
    assert back.equals(column)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("offset", "size"), [(0, 4), (3, 1), (-1, 1), (0, -1), (2**31 - 1, 1), (1, 2**31 - 1)]
)
def test_list_views_that_leave_their_elements_are_not_followed(kind: Any, offset: int, size: int) -> None:
    number = SourcePart("NUMBER", 8, 3, data=bytes(24))
    places = {"offsets": np.array([1, offset], kind).tobytes(), "sizes": np.array([2, size], kind).tobytes()}
    is_wide = kind is np.int64
    assert write_values(SourcePart("LIST", 0, 1, **places, is_wide=is_wide, parts=(number,))) is not None
    assert write_values(SourcePart("LIST", 0, 2, **places, is_wide=is_wide, parts=(number,))) is None


def test_parts_do_not_take_buffers_that_are_too_short() -> None:
    short = pa.py_buffer(bytes(7))
    for part in (
        lambda: SourcePart("NUMBER", 8, 1, data=short),
        lambda: SourcePart("NUMBER", 1, 7, origin=1, data=short),
        lambda: SourcePart("BOOL", 1, 57, data=short),
        lambda: SourcePart("BOOL", 1, 1, data=short, valid=short, first=56),
        lambda: SourcePart("STRING", 0, 1, data=short, offsets=short),
        lambda: SourcePart("STRING", 0, 1, data=short),
        lambda: SourcePart("LIST", 0, 2, offsets=short, sizes=bytes(8), parts=(SourcePart("NUMBER", 1, 0),)),
        lambda: SourcePart("LIST", 0, 2, offsets=bytes(8), sizes=short, parts=(SourcePart("NUMBER", 1, 0),)),
        lambda: SourcePart("RECORD", 9, 2, parts=(SourcePart("NUMBER", 1, 1, data=short),)),
        lambda: SourcePart("LIST", 0, 0),
        lambda: read_values(SinkPart("BOOL", 1), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint8)),
    ):
        with pytest.raises(UsageError):
            part()


def test_many_rows() -> None:
    count = 300_000
    numbers = pa.array(np.arange(count), mask=np.arange(count) % 5 == 0)
    names = pa.array([f"n{i % 1000}" for i in range(count)])
    ends = pa.array(np.arange(0, count + 1, 2, dtype=np.int32))
    maps = pa.MapArray.from_arrays(ends, names, numbers)
    lists = pa.ListArray.from_arrays(ends, names)
    column = pa.StructArray.from_arrays(
        [pa.chunked_array([maps, maps]).combine_chunks(), pa.concat_arrays([lists, lists]), numbers],
        ["m", "l", "n"],
    )
    declared = t.ROW(m=t.MAP(t.STRING, t.LONG), l=t.LIST(t.STRING), n=t.LONG)
    runs = stored_runs(column, declared)
    assert runs is not None
    back = arrow_of_stored(*runs, None, declared)
    assert back is not None
    assert back.equals(column.cast(declared.arrow))
    read = serializer_for(declared).deserialize
    offsets, data = runs
    for row in range(0, count, 29_989):
        stored = read(data[offsets[row] : offsets[row + 1]].tobytes())
        found = column[row].as_py()
        assert (list(stored.m.items()), stored.l, stored.n) == (found["m"], found["l"], found["n"])


# --- composite keys ---


@st.composite
def key_columns(draw: st.DrawFn) -> tuple[t.Type, list[Any]]:
    types = draw(st.lists(key_types, min_size=1, max_size=3))
    declared = t.TUPLE(*types) if draw(st.booleans()) else t.ROW(**{f"f{i}": f for i, f in enumerate(types)})
    return declared, draw(st.lists(values_of(declared), min_size=1, max_size=8))


@given(key_columns())
def test_composite_keys_have_the_forms_of_single_keys(drawn: tuple[t.Type, list[Any]]) -> None:
    declared, keys = drawn
    encoder = key_encoder(declared)
    expected = [encoder.encode(key) for key in keys]
    array = to_arrow(keys, declared)
    for form in (laid_out(array, declared, layout) for layout in ("plain", "sliced", *DEEP[1:])):
        assert split(encoded_keys(OnlySingle(encoder), form)) == expected  # type: ignore[arg-type]
    assert split(encoded_keys(encoder, keys)) == expected
    back = decoded_keys(OnlySingle(encoder), joined(expected))  # type: ignore[arg-type]
    back.validate(full=True)
    assert repr(back.to_pylist()) == repr(to_arrow(list(map(encoder.decode, expected)), declared).to_pylist())


@pytest.mark.parametrize("alphabet", ["ab", "aé€😀"])
@pytest.mark.parametrize("layout", ["plain", "large"])
def test_keys_with_text_of_any_length(alphabet: str, layout: str) -> None:
    rng = random.Random(3)
    texts = ["".join(rng.choices(alphabet, k=length)) for length in [*range(80), 15, 16, 17, 500, 0]]
    declared = t.TUPLE(t.LONG, t.STRING, t.TUPLE(t.STRING, t.INT))
    keys = [
        (
            None if i % 5 == 0 else i << 40,
            None if i % 7 == 0 else text,
            None if i % 11 == 0 else (text[::-1], -i),
        )
        for i, text in enumerate(texts)
    ]
    column = laid_out(to_arrow(keys, declared), declared, layout)
    encoder = key_encoder(declared)
    expected = [encoder.encode(key) for key in keys]
    for start in (0, 1, 9, len(keys)):
        assert split(encoded_keys(OnlySingle(encoder), column[start:])) == expected[start:]  # type: ignore[arg-type]
        assert split(encoded_keys(encoder, keys[start:])) == expected[start:]


def test_keys_of_numbers_are_written_in_blocks() -> None:
    """More rows than a block, of every kind of number, with one that does not fit in the last block."""
    count = 2500
    decimals = [decimal.Decimal(i) / 4 for i in range(count)]
    columns = {
        "a": pa.array(np.arange(count) << 40),
        "b": pa.array(np.arange(count, dtype=np.int32) - 7),
        "c": pa.array((np.arange(count) % 128).astype(np.int8)),
        "d": pa.array(np.where(np.arange(count) % 3, 0.5, -0.0)),
        "e": pa.array(np.where(np.arange(count) % 3, np.nan, 0.25).astype(np.float32)),
        "f": pa.array(np.arange(count) % 2 == 0),
        "g": pa.array(decimals, pa.decimal128(10, 2)),
        "h": pa.array(np.arange(count, dtype=np.int32)).view(pa.date32()),
    }
    declared = t.ROW(
        a=t.LONG, b=t.INT, c=t.BYTE, d=t.DOUBLE, e=t.FLOAT, f=t.BOOL, g=t.DECIMAL(10, 2), h=t.DATE
    )
    encoder = key_encoder(declared)
    column = pa.StructArray.from_arrays(list(columns.values()), list(columns))
    found = split(encoded_keys(OnlySingle(encoder), column[3:]))  # type: ignore[arg-type]
    assert found == [encoder.encode(key) for key in column[3:].to_pylist()]
    columns["b"] = pa.array(np.where(np.arange(count) == count - 1, 2**40, 1))
    wrong = pa.StructArray.from_arrays(list(columns.values()), list(columns))
    with pytest.raises(OverflowError, match=f"position {count - 1}"):
        encoded_keys(encoder, wrong)


def test_offsets_that_fall_do_not_write_past_the_end() -> None:
    size = 2**25  # writing as much past the end of a short buffer ends the process
    for offsets in ([0, size, 0, 1], [0, 60, 0, 60], [60, 60, 0, 60], [0, -1, 3], [0, size + 1]):
        ends = np.array(offsets, dtype=np.int32)
        part = SourcePart("STRING", 0, len(offsets) - 1, data=b"x" * size, offsets=ends.tobytes())
        number = SourcePart("NUMBER", 8, len(offsets) - 1, data=bytes(8 * len(offsets)))
        assert write_keys(SourcePart("RECORD", 0, len(offsets) - 1, parts=(part, number))) is None


def test_lists_of_keys_that_only_the_encoder_knows() -> None:
    encoder = key_encoder(t.TUPLE(t.LONG, t.STRING))
    keys: list[Any] = [(1, "x"), (np.int64(2), "y")]
    assert split(encoded_keys(encoder, keys)) == [encoder.encode((1, "x")), encoder.encode((2, "y"))]
    with pytest.raises(SerializationError, match="position 1"):
        encoded_keys(encoder, [(1, "x"), (1,)])
    with pytest.raises(SerializationError, match="position 2"):
        encoded_keys(encoder, [(1, "x"), (2, "y"), None])
    assert split(encoded_keys(encoder, [])) == []


class OnlySingle:
    """An encoder that has no batches of its own."""

    def __init__(self, encoder: Any) -> None:
        self.declared_type = encoder.declared_type


def test_damaged_keys_are_refused_as_the_encoder_refuses_them() -> None:
    declared = t.TUPLE(t.LONG, t.ROW(s=t.STRING, d=t.DECIMAL(38, 0)), t.DOUBLE, t.BOOL)
    encoder = key_encoder(declared)
    whole = encoder.encode((7, ("é", decimal.Decimal(-300)), None, True))
    for at, byte in itertools.product(range(len(whole) + 1), (0x00, 0x01, 0x02, 0x80, 0xFF)):
        for data in (whole[:at], whole[:at] + bytes([byte]) + whole[at + 1 :]):
            runs = joined([whole, data])
            found = outcome(lambda runs=runs: decoded_keys(encoder, runs))
            assert found == outcome(lambda runs=runs: encoder.decode_many(runs))


@pytest.mark.parametrize(
    ("column", "declared"),
    [
        (pa.array([{"a": 1}, None]), t.ROW(a=t.LONG)),
        (pa.array([{"a": 1}, {"a": 2**40}]), t.ROW(a=t.INT)),
        (pa.array([{"b": 1}]), t.ROW(a=t.LONG)),
        (pa.array([1]), t.TUPLE(t.LONG)),
        (pa.StructArray.from_arrays([text(b"ok\xff", 2, 3)], ["a"]), t.ROW(a=t.STRING)),
    ],
    ids=name_of,
)
def test_refused_keys_are_named_as_the_encoder_names_them(column: pa.Array, declared: t.Type) -> None:
    encoder = key_encoder(declared)
    with pytest.raises((SerializationError, OverflowError)) as expected:
        encoder.encode_many(column)
    with pytest.raises(type(expected.value)) as raised:
        encoded_keys(encoder, column)
    assert str(raised.value) == str(expected.value)


def test_text_of_a_key_outside_the_offsets_is_checked() -> None:
    """The span of a null row may lead anywhere, and so may that of the row behind it."""
    offsets = pa.py_buffer(np.array([0, 5, 2, 3], np.int32).tobytes())
    text = pa.Array.from_buffers(
        pa.string(), 3, [pa.py_buffer(bytes([0b101])), offsets, pa.py_buffer(b"abc\xff\xffcdefgh")]
    )
    keys = pa.StructArray.from_arrays([pa.array([1, 2, 3]), text], names=["a", "b"])
    with HeapBackend().create_keyed_backend("struct<a:bigint,b:string>") as keyed:
        state = keyed.get_value_state(ValueStateDescriptor("v", "bigint"))
        with pytest.raises(SerializationError):
            state.update_many(keys, pa.array([1, 2, 3]))
        assert keyed.num_entries() == 0
