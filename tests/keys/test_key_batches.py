"""A batch of keys, in any layout, has the forms of its keys one by one, or the error of one of them."""

from __future__ import annotations

import datetime
import decimal
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from type_samples import key_types, values_of

from statebackend import types as t
from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.keys import key_encoder

pytestmark = pytest.mark.checked

D = decimal.Decimal


def listed(canonical: Any) -> list[Any]:
    if isinstance(canonical, tuple):
        offsets, data = canonical
        assert offsets.dtype == np.int64
        assert data.dtype == np.uint8
        return [data[a:b].tobytes() for a, b in itertools.pairwise(offsets)]
    assert canonical.dtype == np.int64
    assert canonical.flags.c_contiguous
    return list(map(int, canonical))


def arrow_of(declared: t.Type, keys: list[Any]) -> pa.Array:
    def plain(part: t.Type, value: Any) -> Any:
        if value is None or not isinstance(part, (t.RowType, t.TupleType)):
            return value
        names = [field.name for field in part.arrow]
        return {name: plain(inner, item) for name, inner, item in zip(names, part.types, value, strict=True)}

    return pa.array([plain(declared, key) for key in keys], declared.arrow)


batches = key_types.flatmap(lambda k: st.tuples(st.just(k), st.lists(values_of(k), max_size=12)))


@given(batches, st.integers(0, 3), st.integers(0, 3))
def test_every_layout_gives_the_forms_of_single_keys(
    case: tuple[t.Type, list[Any]], front: int, back: int
) -> None:
    declared, keys = case
    encoder = key_encoder(declared)
    wanted = [encoder.encode(key) for key in keys]
    assert listed(encoder.encode_many(keys)) == wanted
    assert listed(encoder.encode_many(iter(keys))) == wanted
    array = arrow_of(declared, keys)
    assert listed(encoder.encode_many(array)) == wanted
    assert listed(encoder.encode_many(pa.chunked_array([array[:2], array[2:]]))) == wanted
    padding = array.take(pa.array([0] * 3)) if len(array) else array
    sliced = pa.concat_arrays([padding, array, padding]).slice(len(padding), len(array))
    assert listed(encoder.encode_many(sliced)) == wanted
    cut = slice(front, len(keys) - back)
    assert listed(encoder.encode_many(array[cut])) == wanted[cut]


@given(batches)
def test_batches_come_back_as_arrow(case: tuple[t.Type, list[Any]]) -> None:
    declared, keys = case
    encoder = key_encoder(declared)
    canonical = encoder.encode_many(keys)
    array = encoder.decode_many(canonical)
    assert array.type == declared.arrow
    array.validate(full=True)
    assert listed(encoder.encode_many(array)) == listed(canonical)
    expected = arrow_of(declared, [encoder.decode(encoder.encode(key)) for key in keys])
    assert repr(array.to_pylist()) == repr(expected.to_pylist())


UTC = datetime.timezone.utc
NOON = datetime.datetime(2024, 5, 1, 12, 0, 0, 123000)

LAYOUTS: list[tuple[Any, Any, list[Any]]] = [
    ("bigint", np.array([1, 2], dtype=np.uint8), [1, 2]),
    ("bigint", np.array([1, 2], dtype=">i4"), [1, 2]),
    ("bigint", np.arange(10)[::3], [0, 3, 6, 9]),
    ("bigint", pa.array([1, 2], pa.int16()), [1, 2]),
    ("bigint", pa.array([1, 2], pa.uint64()), [1, 2]),
    ("bigint", pa.array([3, 3, 4]).dictionary_encode(), [3, 3, 4]),
    ("bigint", [np.int64(1), 2, np.uint8(3)], [1, 2, 3]),
    ("bigint", np.array([1, 2], dtype=object), [1, 2]),
    ("tinyint", pa.array([127, -128], pa.int64()), [127, -128]),
    ("boolean", np.array([True, False]), [True, False]),
    ("double", np.array([1, 2]), [1.0, 2.0]),
    ("double", pa.array([1.5], pa.float32()), [1.5]),
    ("double", np.array([-0.0, np.nan]), [0.0, float("nan")]),
    ("double", [1, 2.5], [1.0, 2.5]),
    ("double", [2**60], [float(2**60)]),
    ("float", np.array([0.1, 1e-50]), [0.1, 0.0]),
    ("float", pa.array([0.1]), [0.1]),
    ("string", np.array(["a", "bé"]), ["a", "bé"]),
    ("string", pa.array(["a", "b", "c"], pa.large_string())[1:], ["b", "c"]),
    ("string", pa.array(["a", "b" * 30], pa.string_view()), ["a", "b" * 30]),
    ("string", pa.chunked_array([pa.array(["a", "b"]).dictionary_encode()] * 2), ["a", "b"] * 2),
    ("string", pa.chunked_array([], pa.string()), []),
    ("string", pa.chunked_array([], pa.dictionary(pa.int8(), pa.string())), []),
    (
        "string",
        pa.DictionaryArray.from_arrays([1, 0, 1], pa.array(["a", "b"], pa.string_view())),
        ["b", "a", "b"],
    ),
    (
        "struct<a:bigint,b:string>",
        pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([None, "b"], pa.string_view())], ["a", "b"]),
        [(1, None), (2, "b")],
    ),
    (
        "struct<a:string>",
        pa.DictionaryArray.from_arrays([0, 0], pa.array([{"a": "x"}], pa.struct([("a", pa.string_view())]))),
        [("x",), ("x",)],
    ),
    (
        "struct<a:bigint>",
        pa.chunked_array([pa.DictionaryArray.from_arrays([1, 0], pa.array([{"a": 1}, {"a": 2}]))] * 2),
        [(2,), (1,)] * 2,
    ),
    ("string", [np.str_("a"), "b"], ["a", "b"]),
    ("binary", pa.array([b"ab", b"cd"], pa.binary(2))[1:], [b"cd"]),
    ("binary", pa.array([b"ab", b"c" * 20], pa.binary_view()), [b"ab", b"c" * 20]),
    ("binary", [bytearray(b"a"), b"b"], [b"a", b"b"]),
    ("binary", np.array([b"a", b"bc"]), [b"a", b"bc"]),
    ("date", pa.array([datetime.date(2020, 1, 1)], pa.date64()), [datetime.date(2020, 1, 1)]),
    ("date", np.array(["2020-01-01"], dtype="M8[D]"), [datetime.date(2020, 1, 1)]),
    ("timestamp", pa.array([NOON], pa.timestamp("ms", "Asia/Tokyo")), [NOON.replace(tzinfo=UTC)]),
    (
        "timestamp",
        pa.array([1, 2], pa.timestamp("s", "UTC")),
        [datetime.datetime.fromtimestamp(n, UTC) for n in (1, 2)],
    ),
    (
        "timestamp_ntz",
        pa.array([1_000, 2_000], pa.timestamp("ns")),
        [datetime.datetime(1970, 1, 1, 0, 0, 0, n) for n in (1, 2)],
    ),
    ("timestamp_ntz", np.array([NOON], dtype="M8[ms]"), [NOON]),
    ("timestamp_ntz", np.array([NOON], dtype="M8[ns]"), [NOON]),
    ("decimal(10,2)", pa.array([D("1.5")], pa.decimal128(5, 1)), [D("1.50")]),
    ("decimal(10,2)", pa.array([D("1.500")], pa.decimal256(50, 3)), [D("1.50")]),
    ("decimal(38,2)", pa.array([D("-1.5")], pa.decimal128(5, 1)), [D("-1.50")]),
    ("decimal(10,2)", [D("1.5"), 2], [D("1.50"), 2]),
    (
        "struct<a:bigint,b:string>",
        pa.StructArray.from_arrays([pa.array(["x"]), pa.array([1], pa.int16())], ["b", "a"]),
        [(1, "x")],
    ),
    (tuple[int, str], pa.StructArray.from_arrays([pa.array([1]), pa.array(["x"])], ["p", "q"]), [(1, "x")]),
]


@pytest.mark.parametrize(("spec", "keys", "wanted"), LAYOUTS, ids=lambda value: None)
def test_layouts(spec: Any, keys: Any, wanted: list[Any]) -> None:
    encoder = key_encoder(spec)
    assert listed(encoder.encode_many(keys)) == [encoder.encode(key) for key in wanted]


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    ("bigint", [1, None], SerializationError, "a key is None .*position 1"),
    ("bigint", pa.array([1, 2, None]), SerializationError, "a key is None .*position 2"),
    ("string", pa.array(["a", None]), SerializationError, "a key is None .*position 1"),
    ("string", pa.array(["a", None]).dictionary_encode(), SerializationError, "a key is None .*position 1"),
    (tuple[int, int], pa.array([{"_1": 1, "_2": 2}, None]), SerializationError, "a key is None .*position 1"),
    ("bigint", [1, True], SerializationTypeError, "LONG does not take a value of type bool .*position 1"),
    ("bigint", np.array([True]), SerializationTypeError, "LONG does not take .*bool.*position 0"),
    ("bigint", pa.array([True]), SerializationTypeError, "LONG does not take .*bool"),
    ("bigint", np.array([1.0]), SerializationTypeError, "LONG does not take .*float"),
    ("bigint", pa.array([1.0]), SerializationTypeError, "LONG does not take .*float"),
    ("bigint", pa.array(["1"]), SerializationTypeError, "LONG does not take .*str"),
    ("bigint", "12", SerializationTypeError, "not a batch of keys"),
    ("bigint", 12, SerializationTypeError, "not a batch of keys"),
    ("bigint", np.zeros((2, 2), np.int64), SerializationTypeError, "one-dimensional"),
    ("bigint", np.array([1, 2**63], dtype=np.uint64), OverflowError, "LONG .*position 1"),
    ("bigint", [1, 2, 2**63], OverflowError, "LONG .*position 2"),
    ("tinyint", np.array([127, 128]), OverflowError, "BYTE .*position 1"),
    ("int", pa.array([1, 2**31]), OverflowError, "INT .*position 1"),
    ("int", [1, -(2**31) - 1], OverflowError, "INT .*position 1"),
    ("boolean", np.array([1]), SerializationTypeError, "BOOL does not take"),
    ("double", np.array([1, 2**53 + 1]), SerializationError, "exactly by DOUBLE .*position 1"),
    ("double", pa.array([True]), SerializationTypeError, "DOUBLE does not take .*bool"),
    ("float", np.array([1.0, 1e39]), OverflowError, "FLOAT .*position 1"),
    ("float", [1.0, 1e39], OverflowError, "FLOAT .*position 1"),
    ("string", ["a", "\ud800"], SerializationError, "lone surrogate.*position 1"),
    ("string", np.array(["a", "\ud800"]), SerializationError, "lone surrogate.*position 1"),
    ("string", ["a", b"b"], SerializationTypeError, "STRING does not take .*position 1"),
    ("string", pa.array([b"a"]), SerializationTypeError, "STRING does not take .*bytes"),
    ("binary", pa.array(["a"]), SerializationTypeError, "BYTES does not take .*str"),
    ("date", pa.array([86_400_000, 1], pa.date64()), SerializationError, "not a whole day .*position 1"),
    ("date", pa.array([NOON]), SerializationTypeError, "DATE does not take"),
    ("timestamp", pa.array([NOON]), SerializationTypeError, "with a time zone.*position 0"),
    ("timestamp", np.array([NOON], dtype="M8[us]"), SerializationTypeError, "with a time zone"),
    (
        "timestamp_ntz",
        pa.array([NOON], pa.timestamp("us", "UTC")),
        SerializationTypeError,
        "without a time zone",
    ),
    ("timestamp_ntz", np.array(["NaT"], dtype="M8[us]"), SerializationError, "a key is None"),
    (
        "timestamp_ntz",
        np.array([1001], dtype="M8[ns]"),
        SerializationError,
        "finer than microseconds .*position 0",
    ),
    ("decimal(10,2)", pa.array([D("1.5"), D("1.005")]), SerializationError, "more decimals .*position 1"),
    ("decimal(4,2)", pa.array([D("100.00")]), SerializationError, "too many digits .*position 0"),
    ("decimal(4,2)", pa.array([1.5]), SerializationTypeError, "does not take .*float"),
    (tuple[int, int], [(1, 2), (1,)], SerializationTypeError, "exactly its fields.*position 1"),
    ("struct<a:int>", pa.array([{"a": 1}, {"a": 2**31}]), OverflowError, "INT .*position 1"),
    ("struct<a:int>", pa.array([{"b": 1}]), SerializationTypeError, "exactly its fields.*position 0"),
    (
        "struct<a:string,b:int>",
        [("x", 1), (None, 2), ("y", "z")],
        SerializationTypeError,
        "position 2, field 'b'",
    ),
]


@pytest.mark.parametrize(("spec", "keys", "error", "complaint"), REFUSED, ids=lambda value: None)
def test_a_refused_key_is_named_by_its_position(
    spec: Any, keys: Any, error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        key_encoder(spec).encode_many(keys)


def test_invalid_utf8_in_a_column_is_refused() -> None:
    offsets = pa.py_buffer(np.array([0, 1, 3], dtype=np.int32))
    column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff\xfe")])
    with pytest.raises(SerializationError, match="not valid UTF-8 .*position 1"):
        key_encoder("string").encode_many(column)
    with pytest.raises(SerializationError, match="not valid UTF-8"):
        key_encoder("string").decode_many((np.array([0, 1, 3]), b"a\xff\xfe"))


@pytest.mark.parametrize("size", [*range(10), 31, 64, 65])
@pytest.mark.parametrize("large", [False, True], ids=["string", "large string"])
def test_one_byte_of_invalid_text_is_found_at_each_place(size: int, large: bool) -> None:
    """ASCII is seen eight bytes at a time, from where a slice begins to where it ends, and not beyond."""
    arrow, width = (pa.large_string(), np.int64) if large else (pa.string(), np.int32)
    encoder = key_encoder(t.STRING)
    for first in range(10):
        ends = pa.py_buffer(np.array([0, first, first + size // 2, first + size, first + size + 3], width))
        for bad in range(first + size + 3):
            text = bytearray(b"k" * (first + size + 3))
            text[bad] = 0xFF
            column = pa.Array.from_buffers(arrow, 4, [None, ends, pa.py_buffer(bytes(text))]).slice(1, 2)
            if not first <= bad < first + size:
                offsets, data = encoder.encode_many(column)
                assert bytes(data[offsets[0] : offsets[-1]]) == b"k" * size
                continue
            with pytest.raises(SerializationError) as caught:
                encoder.encode_many(column)
            assert caught.value.code == "SERIALIZATION.UTF8"


@pytest.mark.parametrize("declared", [t.STRING, t.BYTES], ids=str)
@pytest.mark.parametrize("ends", [[0, 2, 1], [0, -5, 2], [1, 9, 2], [2, 0, 2]], ids=str)
def test_offsets_that_lead_elsewhere_are_refused(declared: t.Type, ends: list[int]) -> None:
    arrow = pa.string() if declared == t.STRING else pa.binary()
    column = pa.Array.from_buffers(
        arrow, 2, [None, pa.py_buffer(np.array(ends, np.int32)), pa.py_buffer(b"abc")]
    )
    with pytest.raises(SerializationError, match="outside of its data"):
        key_encoder(declared).encode_many(column)


def test_columns_are_shared_not_copied() -> None:
    numbers = pa.array(np.arange(1000))[10:]
    encoded = key_encoder("bigint").encode_many(numbers)
    assert encoded.ctypes.data == numbers.buffers()[1].address + 80
    stamps = pa.array(np.arange(1000)).cast(pa.timestamp("us", "UTC"))
    assert key_encoder("timestamp").encode_many(stamps).ctypes.data == stamps.buffers()[1].address
    plain = np.arange(5)
    assert key_encoder("bigint").encode_many(plain) is plain
    for arrow in (pa.string(), pa.large_string()):
        text = pa.array(["abc"] * 100, arrow)[5:]
        offsets, data = key_encoder("string").encode_many(text)
        assert data.ctypes.data == text.buffers()[2].address
        assert offsets[0] == 15


def test_the_callers_array_is_not_changed() -> None:
    floats = np.array([-0.0, np.nan, 1.0])
    before = floats.tobytes()
    key_encoder("double").encode_many(floats)
    assert floats.tobytes() == before


def test_a_signalling_nan_is_the_one_nan_too() -> None:
    doubles = np.array([0x7FF0000000000001, 0xFFF0000000000001], dtype=np.uint64).view(np.float64)
    singles = np.array([0x7F800001, 0xFF800001], dtype=np.uint32).view(np.float32)
    for spec, column in (("double", doubles), ("float", singles)):
        encoder = key_encoder(spec)
        assert listed(encoder.encode_many(column)) == [encoder.encode(float("nan"))] * 2


def test_a_decimal_column_that_breaks_its_precision_is_refused() -> None:
    words = np.array([10**12, 0], dtype=np.int64)
    column = pa.Array.from_buffers(pa.decimal128(10, 2), 1, [None, pa.py_buffer(words)])
    with pytest.raises(SerializationError, match="too many digits .*position 0"):
        key_encoder("decimal(10,2)").encode_many(column)


def test_decode_many_checks_what_it_is_given() -> None:
    with pytest.raises(SerializationError, match="offsets do not ascend"):
        key_encoder("string").decode_many((np.array([0, 5]), b"abc"))
    with pytest.raises(OverflowError, match="out of range for INT"):
        key_encoder("int").decode_many(np.array([2**40]))
    with pytest.raises(SerializationError, match="wrong length"):
        key_encoder("decimal(38,0)").decode_many((np.array([0, 17]), bytes(17)))
