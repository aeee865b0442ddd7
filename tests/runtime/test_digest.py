"""The digest of the rows of a batch: what changes it, what does not, and that it never changes with a version."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, strategies as st

import statebackend as sb
from statebackend._core import row_digest
from statebackend.runtime.batch_identity import merged_digest, rows_digest

pytestmark = pytest.mark.checked

MASK = 2**64 - 1
MIXERS = (
    (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33),
    (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31),
)
NULLS = (0x9FB21C651E98DF25, 0xC2B2AE3D27D4EB4F)
ROWS = (0x165667B19E3779F9, 0x27D4EB2F165667C5)
STEP = 0x9E3779B97F4A7C15


def mix(lane: int, h: int) -> int:
    first, by, second, by_too, third = MIXERS[lane]
    h &= MASK
    h = (h ^ (h >> first)) * by & MASK
    h = (h ^ (h >> second)) * by_too & MASK
    return h ^ (h >> third)


def oracle(table: pa.Table) -> str:
    """The same digest, one row and one lane at a time."""
    sums = [0, 0]
    for row in range(table.num_rows):
        for lane in (0, 1):
            columns = enumerate(zip(table.schema.names, table.columns, strict=True))
            hashed = sum(hash_of(lane, column[row], (), (at, name)) for at, (name, column) in columns)
            sums[lane] += mix(lane, hashed + ROWS[lane])
    return "".join(f"{each & MASK:016x}" for each in sums)


def hash_of(lane: int, scalar: Any, parents: Any, at: tuple[int, str]) -> int:
    kind = scalar.type
    if isinstance(scalar, pa.DictionaryScalar):
        return hash_of(
            lane, scalar.value if scalar.is_valid else pa.scalar(None, kind.value_type), parents, at
        )
    tag = tag_of(kind)
    path = (*parents, (*at, tag))
    seed = seed_of(lane, path)
    if not scalar.is_valid:
        return mix(lane, seed ^ NULLS[lane])
    if tag == "struct":
        fields = enumerate(zip(kind, scalar.values(), strict=True))
        found = sum(hash_of(lane, value, path, (place, field.name)) for place, (field, value) in fields)
        return mix(lane, found + seed)
    if tag == "list":
        elements = list(scalar.values or ())
        h = mix(lane, seed + STEP * len(elements))
        for each in elements:
            h = mix(lane, h ^ hash_of(lane, each, path, (0, "element")))
        return h
    if tag == "map":
        entries = list(scalar.values or ())
        of_entries = seed_of(lane, (*path, (2, "", "entry")))
        h = mix(lane, seed + STEP * len(entries))
        for entry in entries:
            pair = zip(("key", "value"), entry.values(), strict=True)
            found = sum(hash_of(lane, each, path, (n, name)) for n, (name, each) in enumerate(pair))
            h += mix(lane, found + of_entries)
        return mix(lane, h)
    value = plain_value(scalar, tag)
    if isinstance(value, int):
        return mix(lane, value + seed)
    h = mix(lane, seed + STEP * len(value))
    for start in range(0, len(value), 8):
        h = mix(lane, h ^ int.from_bytes(value[start : start + 8], "little"))
    return h


def seed_of(lane: int, path: Any) -> int:
    digest = hashlib.blake2b(json.dumps(path).encode("ascii"), digest_size=16).digest()
    return int.from_bytes(digest[8 * lane : 8 * lane + 8], "little")


TAGS = {
    pa.null(): "null", pa.bool_(): "bool", pa.string(): "string", pa.binary(): "binary", pa.binary(3): "binary",
    pa.int8(): "int8", pa.int16(): "int16", pa.int32(): "int32", pa.int64(): "int64", pa.uint64(): "uint64",
    pa.float16(): "float16", pa.float32(): "float32", pa.float64(): "float64", pa.date32(): "date32",
    pa.timestamp("us"): "timestamp.us", pa.timestamp("us", "UTC"): "instant.us", pa.time64("ns"): "time64.ns",
    pa.duration("us"): "duration.us", pa.month_day_nano_interval(): "interval",
    pa.decimal128(38, 10): "decimal.10", pa.decimal128(10, 2): "decimal.2",
}  # fmt: skip


def tag_of(kind: pa.DataType) -> str:
    if kind in TAGS:
        return TAGS[kind]
    if pa.types.is_timestamp(kind):
        return "instant.us"
    return "map" if pa.types.is_map(kind) else "list" if pa.types.is_list(kind) else "struct"


def plain_value(scalar: Any, tag: str) -> int | bytes:
    value = (
        scalar.as_py() if not tag.startswith(("timestamp", "instant", "time64", "duration", "date")) else None
    )
    if value is None:
        bits = 32 if tag == "date32" else 64
        return int(scalar.value) & (2**bits - 1)
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value & (2 ** int(tag.lstrip("uint")) - 1)
    if isinstance(value, float):
        form = {"float16": "e", "float32": "f", "float64": "d"}[tag]
        canonical = {"e": 0x7E00, "f": 0x7FC00000, "d": 0x7FF8000000000000}[form]
        return canonical if math.isnan(value) else int.from_bytes(struct.pack(f"<{form}", value), "little")
    if tag.startswith("decimal"):
        unscaled = int(value.scaleb(int(tag.partition(".")[2]), decimal.Context(prec=60)))
        return unscaled.to_bytes(16, "little", signed=True)
    if tag == "interval":
        return struct.pack("<iiq", *value)
    return value.encode() if isinstance(value, str) else value


def bounded(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


UTC = datetime.timezone.utc
SCALARS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    *((getattr(pa, f"int{bits}")(), bounded(bits)) for bits in (8, 16, 32, 64)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.string(), st.text(max_size=20)),
    (pa.binary(), st.binary(max_size=20)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.time64("ns"), st.times()),
    (pa.duration("us"), st.timedeltas(datetime.timedelta(days=-9999), datetime.timedelta(days=9999))),
    (pa.month_day_nano_interval(), st.tuples(bounded(32), bounded(32), bounded(64)).map(pa.MonthDayNano)),
    (pa.decimal128(10, 2), st.integers(-(10**10) + 1, 10**10 - 1).map(lambda n: decimal.Decimal(n).scaleb(-2))),
    (
        pa.decimal128(38, 10),
        st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: decimal.Decimal(n).scaleb(-10, decimal.Context(prec=60))),
    ),
]  # fmt: skip


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Pairs of a type and values of it, of lists, maps and structs of pairs."""

    def lists(pair: Any) -> Any:
        return pa.list_(pair[0]), st.lists(st.none() | pair[1], max_size=3)

    def maps(pair: Any) -> Any:
        made = st.dictionaries(st.text(max_size=2), st.none() | pair[1], max_size=3)
        return pa.map_(pa.string(), pair[0]), made.map(lambda each: list(each.items()))

    def structs(pairs: Any) -> Any:
        names = [f"f{n}" for n in range(len(pairs))]
        kind = pa.struct([(name, pair[0]) for name, pair in zip(names, pairs, strict=True)])
        values = {name: st.none() | pair[1] for name, pair in zip(names, pairs, strict=True)}
        return kind, st.fixed_dictionaries(values)

    return inner.map(lists) | inner.map(maps) | st.lists(inner, min_size=1, max_size=3).map(structs)


KINDS = st.recursive(st.sampled_from(SCALARS), nested, max_leaves=4)


@st.composite
def tables(draw: st.DrawFn, max_rows: int = 8) -> pa.Table:
    rows = draw(st.integers(0, max_rows))
    columns = []
    for kind, values in draw(st.lists(KINDS, min_size=1, max_size=3)):
        held = draw(st.lists(st.none() | values, min_size=rows, max_size=rows))
        columns.append(pa.array(held, kind))
    return pa.table(columns, names=[f"c{n}" for n in range(len(columns))])


@given(tables(), st.data())
def test_it_is_what_plain_python_makes_of_the_rows_in_any_order_chunks_and_slices(
    table: pa.Table, data: st.DataObject
) -> None:
    digest = oracle(table)
    assert rows_digest(table) == digest
    order = data.draw(st.permutations(range(table.num_rows)))
    shuffled = table.take(pa.array(order, pa.int64()))
    cuts = sorted(data.draw(st.lists(st.integers(0, table.num_rows), max_size=4)))
    pieces = [shuffled.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, table.num_rows], strict=True)]
    assert rows_digest(pa.concat_tables(pieces)) == merged_digest(map(rows_digest, pieces)) == digest
    around = pa.concat_tables([table, table, table]).combine_chunks().slice(table.num_rows, table.num_rows)
    assert rows_digest(around) == digest
    assert rows_digest(pa.Table.from_batches(around.to_batches(), table.schema)) == digest


@given(st.data())
def test_layouts_of_one_type_are_one(data: st.DataObject) -> None:
    kind, each = data.draw(st.sampled_from(SCALARS))
    values = data.draw(st.lists(st.none() | each, max_size=9))
    plain = pa.array(values, kind)
    digest = rows_digest(pa.table({"c": plain}))
    layouts = []
    if not pa.types.is_null(kind) and not pa.types.is_interval(kind):
        layouts.append(plain.dictionary_encode())
        layouts.append(pa.concat_arrays([plain, plain]).dictionary_encode().slice(len(values)))
    casts = {pa.string(): (pa.large_string(), pa.string_view()), pa.binary(): (pa.large_binary(), pa.binary_view()),
             pa.binary(3): (pa.binary(),), pa.decimal128(10, 2): (pa.decimal128(12, 2), pa.decimal64(10, 2)),
             pa.timestamp("us", "UTC"): (pa.timestamp("us", "Asia/Tokyo"),)}  # fmt: skip
    layouts += [plain.cast(each) for each in casts.get(kind, ())]
    for each in layouts:
        assert rows_digest(pa.table({"c": each})) == digest


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), 5),
        (pa.string(), "x"),
        (pa.list_(pa.int32()), [1, 2]),
        (pa.struct({"x": pa.string()}), {"x": "y"}),
    ],
    ids=str,
)
def test_layouts_of_lists_are_one(kind: pa.DataType, value: Any) -> None:
    values = [[value, None], None, [None, value], [value, value]]
    lists = pa.array(values, pa.list_(kind))
    digest = rows_digest(pa.table({"c": lists}))
    fixed = pa.array([[None, None], *values, [None, None]], pa.list_(kind, 2)).slice(1, 4)
    named = pa.array(values, pa.list_(pa.field("item of it", kind)))
    for other in (lists.cast(pa.large_list(kind)), fixed, named):
        assert rows_digest(pa.table({"c": other})) == digest
    for view in (pa.list_view(kind), pa.large_list_view(kind)):
        views = pa.array([[None], *values], view).slice(1)
        assert rows_digest(pa.table({"c": views})) == digest


def test_runs_and_extension_types_are_what_they_hold() -> None:
    plain = pa.array([1, 1, 1, None, 2, 2], pa.int64())
    digest = rows_digest(pa.table({"c": plain}))
    assert rows_digest(pa.table({"c": pc.run_end_encode(plain)})) == digest
    uuids = pa.array([bytes(range(16)), None], pa.binary(16))
    digest = rows_digest(pa.table({"c": uuids}))
    assert rows_digest(pa.table({"c": pa.ExtensionArray.from_storage(pa.uuid(), uuids)})) == digest


def test_a_large_dictionary_is_hashed_once_and_another_one_again() -> None:
    rows = 100_000
    values = pa.array([f"user {n % 7}" for n in range(rows)])
    other = pa.array([f"user {n % 7 + 1}" for n in range(rows)])
    chunks = pa.chunked_array([values.dictionary_encode(), other.dictionary_encode()])
    plain = pa.chunked_array([values, other])
    assert rows_digest(pa.table({"c": chunks})) == rows_digest(pa.table({"c": plain}))


def test_dictionaries_with_nulls_in_them_and_of_every_index() -> None:
    values = pa.array(["a", None, "b"])
    plain = rows_digest(pa.table({"c": values.take(pa.array([0, 1, 2, 0, None]))}))
    for index in (getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)):
        encoded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 0, None], index), values)
        assert rows_digest(pa.table({"c": encoded})) == plain
    nothing = pa.DictionaryArray.from_arrays(pa.array([None, None], pa.int8()), pa.array([], pa.string()))
    assert rows_digest(pa.table({"c": nothing})) == rows_digest(pa.table({"c": pa.nulls(2, pa.string())}))


def test_bytes_under_a_null_are_ignored() -> None:
    bits = pa.py_buffer(bytes([0b101]))
    found = set()
    for under in (0, 7, -1):
        numbers = pa.py_buffer(np.array([1, under, 3], np.int64))
        texts = pa.py_buffer(b"ab" + b"x" * (under % 5) + b"cd")
        offsets = pa.py_buffer(np.array([0, 2, 2 + under % 5, 4 + under % 5], np.int32))
        elements = pa.concat_arrays(
            [pa.array([8, 9]), pa.array([under] * (under % 5), pa.int64()), pa.array([8, 9])]
        )
        found.add(rows_digest(pa.table({
            "n": pa.Array.from_buffers(pa.int64(), 3, [bits, numbers]),
            "s": pa.Array.from_buffers(pa.string(), 3, [bits, offsets, texts]),
            "l": pa.Array.from_buffers(pa.list_(pa.int64()), 3, [bits, offsets], children=[elements]),
            "t": pa.Array.from_buffers(pa.struct({"x": pa.int64()}), 3, [bits], children=[
                pa.Array.from_buffers(pa.int64(), 3, [None, numbers])]),
        })))  # fmt: skip
    assert len(found) == 1


def different(*tables: pa.Table) -> None:
    digests = [rows_digest(each) for each in tables]
    assert len(set(digests)) == len(digests)


def test_names_places_and_types_of_columns_count() -> None:
    ints = pa.table({"a": [1, 2], "b": [3, 4]})
    different(
        ints,
        pa.table({"b": [1, 2], "a": [3, 4]}),
        pa.table({"b": [3, 4], "a": [1, 2]}),
        pa.table({"a": [3, 4], "b": [1, 2]}),
        pa.table({"a": [1, 2], "b": [4, 3]}),
        pa.table({"a": [1, 2], "c": [3, 4]}),
        ints.select(["a"]),
        ints.cast(pa.schema({"a": pa.int32(), "b": pa.int64()})),
        ints.append_column("c", pa.nulls(2)),
        pa.table({"s": ints.to_struct_array()}),
        pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4])], ["a", "a"]),
    )


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_every_nan_is_one_and_zeros_are_two(kind: Any) -> None:
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[np.dtype(kind).itemsize]
    nan = np.array([np.nan], kind).view(bits)
    others = [nan, nan | 1, nan ^ bits(1 << (8 * np.dtype(kind).itemsize - 1))]
    assert len({rows_digest(pa.table({"c": pa.array(each.view(kind))})) for each in others}) == 1
    different(
        *(pa.table({"c": pa.array(np.array([each], kind))}) for each in (0.0, -0.0, np.nan, np.inf, -np.inf))
    )


GOLDEN: list[tuple[str, Callable[[], pa.Table]]] = [
    ("00000000000000000000000000000000", lambda: pa.table({"n": pa.array([], pa.int64())})),
    ("6e7e81d1ebd332a3b327852a6c484604", lambda: pa.table({
        "user": ["ann", "bob", None], "n": pa.array([1, None, -3], pa.int64()),
    })),
    ("81408460c45857ae4f1a813827d00500", lambda: pa.table({
        "x": pa.array([0.0, -0.0, float("nan"), 1.5]), "y": pa.array([1, 2, 3, 4], pa.int8()),
    })),
    ("4cf1c1d13fdc4e5bd456db11630a3da9", lambda: pa.table({
        "s": ["", "a", "12345678", "longer than a word", "zu spät 🕰"],
    })),
    ("566b2837d97d41c434e7f69340823808", lambda: pa.table({
        "when": pa.array([0, 1_700_000_000_000_000, None], pa.timestamp("us", "Europe/Berlin")),
        "day": pa.array([0, 19_000, -1], pa.date32()),
        "price": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-99999999.99")], pa.decimal128(10, 2)),
        "ok": [True, False, None],
        "none": pa.nulls(3),
    })),
    ("7eab9db36b9d6a4f62ba5d4d744993d1", lambda: pa.table({
        "tags": pa.array([["a", None], [], None], pa.list_(pa.string())),
        "seen": pa.array([[("x", [1])], [], None], pa.map_(pa.string(), pa.list_(pa.int32()))),
        "deep": pa.array([{"a": {"b": [1.5]}}, {"a": None}, None],
                         pa.struct({"a": pa.struct({"b": pa.list_(pa.float64())})})),
    })),
]  # fmt: skip


@pytest.mark.parametrize(("digest", "make"), GOLDEN)
def test_digests_that_are_written_down_stay(digest: str, make: Callable[[], pa.Table]) -> None:
    """If this fails, the code is wrong: batches of checkpoints that exist would not be known again."""
    assert rows_digest(make()) == digest
    assert oracle(make()) == digest


def test_types_that_have_no_digest_are_refused() -> None:
    union = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])
    with pytest.raises(sb.UsageError, match=r"dense_union.* no digest"):
        rows_digest(pa.table({"c": union}))


def test_columns_that_are_not_whole_are_refused() -> None:
    lanes = np.zeros((2, 2), np.uint64)
    byte = np.zeros(16, np.uint8)
    broken: list[Callable[[], None]] = [
        lambda: row_digest.add_numbers(byte, 4, False, None, 0, 1, 2, lanes),
        lambda: row_digest.add_numbers(byte, 8, False, np.zeros(0, np.uint8), 0, 1, 2, lanes),
        lambda: row_digest.add_bytes(byte, np.array([0, 1], np.int32), None, 0, 1, 2, lanes),
        lambda: row_digest.add_bytes(byte, np.array([0, 1, 17], np.int32), None, 0, 1, 2, lanes),
        lambda: row_digest.add_bytes(byte, np.array([0, 2, 1], np.int64), None, 0, 1, 2, lanes),
        lambda: row_digest.add_lists(lanes, np.array([0, 1, 3], np.int64), True, None, 0, 1, 2, lanes),
        lambda: row_digest.add_records(np.zeros((1, 2), np.uint64), None, 0, 1, 2, lanes),
        lambda: row_digest.add_taken(lanes, np.array([0, 2]), None, 0, 1, 2, lanes),
        lambda: row_digest.add_taken(lanes, np.array([-1, 0]), None, 0, 1, 2, lanes),
    ]
    for call in broken:
        with pytest.raises(sb.UsageError):
            call()
