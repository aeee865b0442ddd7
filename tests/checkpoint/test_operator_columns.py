"""Operator state becomes columns, and columns become operator state, as value by value: bytes, types and errors."""

from __future__ import annotations

import datetime
import decimal
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from arrow_layouts import LAYOUTS
from hypothesis import given, settings, strategies as st
from type_samples import SORTS, SORTS_OF_KEYS, WRONG, key_types, sample, texts, value_types, values_of

import statebackend as sb
from statebackend import types as t
from statebackend.errors import SerializationError
from statebackend.keys import key_encoder
from statebackend.operator_state import OperatorStateBackend, element_columns, operator_snapshots
from statebackend.operator_state.element_columns import (
    CanonicalKeys,
    ElementBytes,
    canonical_keys,
    column_type,
    stored_keys,
    to_bytes,
    to_column,
)
from statebackend.state.value_columns import to_arrow, to_values
from statebackend.types.serializers import serializer_for

UTC = datetime.timezone.utc


def column_by_value(data: list[bytes | None], config: Any) -> pa.Array:
    declared = column_type(config)
    read = serializer_for(declared).deserialize
    return to_arrow([None if each is None else read(each) for each in data], declared)


def bytes_by_value(column: pa.Array, config: Any) -> list[bytes | None]:
    declared = column_type(config)
    write = serializer_for(declared).serialize
    return [None if value is None else write(value) for value in to_values(column, declared)]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        found = call()
    except (SerializationError, OverflowError, ValueError) as error:
        return type(error), str(error)
    if isinstance(found, pa.Array):
        found.validate(full=True)
        return found.type, repr(found.to_pylist())
    return found


@st.composite
def stored_columns(draw: st.DrawFn) -> tuple[t.Type, list[bytes | None]]:
    declared = draw(value_types)
    values = draw(st.lists(st.none() | values_of(declared), max_size=8))
    write = serializer_for(declared).serialize
    return declared, [None if value is None else write(value) for value in values]


@settings(max_examples=200)
@given(stored_columns())
def test_columns_are_those_that_values_give_one_by_one(drawn: tuple[t.Type, list[bytes | None]]) -> None:
    declared, data = drawn
    config = declared.config()
    column = to_column(data, config)
    assert outcome(lambda: column) == outcome(lambda: column_by_value(data, config))
    assert to_bytes(column, config) == bytes_by_value(column, config) == data
    assert to_bytes(column[1:], config) == data[1:]


@settings(max_examples=100)
@given(st.data(), key_types)
def test_keys_keep_their_canonical_forms(data: st.DataObject, declared: t.Type) -> None:
    encoder, serializer = key_encoder(declared), serializer_for(declared)
    keys = [encoder.encode(key) for key in data.draw(st.lists(values_of(declared), max_size=6))]
    stored = stored_keys(keys, encoder)
    assert stored == [serializer.serialize(encoder.decode(key)) for key in keys]
    assert canonical_keys(stored, encoder) == keys


@pytest.mark.parametrize("sort", SORTS)
def test_damaged_bytes_are_refused_as_one_by_one(sort: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    config = given.declared.config()
    stored = sorted(map(serializer_for(given.declared).serialize, given.present), key=len)
    whole = stored[len(stored) // 2]
    damaged = [whole[:-1], whole + b"\0", b"", b"\xff" * len(whole), b"\x7f" * len(whole)]
    for _ in range(200):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        damaged.append(bytes(data))
    for each in damaged:
        rows = [whole, each, None]
        expected = outcome(lambda rows=rows: column_by_value(rows, config))
        assert outcome(lambda rows=rows: to_column(rows, config)) == expected


def text(data: bytes, arrow: pa.DataType) -> pa.Array:
    offsets = np.array([0, len(data)], np.int32)
    return pa.Array.from_buffers(arrow, 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


FOREIGN: list[tuple[t.Type, pa.Array]] = [
    (t.DATE, pa.array([2_932_897], pa.int32()).view(pa.date32())),
    (t.DATE, pa.array([-719_163, 0], pa.int32()).view(pa.date32())),
    (t.TIMESTAMP, pa.array([2**62]).view(pa.timestamp("us", "UTC"))),
    (t.TIMESTAMP_NTZ, pa.array([-(2**62)]).view(pa.timestamp("us"))),
    (t.STRING, text(b"\xff", pa.string())),
    (t.ROW(a=t.DATE), pa.array([{"a": 2_932_897}], pa.struct({"a": pa.int32()}))),
    (t.DECIMAL(3, 0), pa.array([decimal.Decimal(1000)]).cast(pa.decimal128(4, 0)).view(pa.decimal128(3, 0))),
]


@pytest.mark.parametrize(
    ("declared", "column"), FOREIGN, ids=lambda each: str(getattr(each, "type", "")) or repr(each)
)
def test_foreign_columns_are_refused_as_single_values_are(declared: t.Type, column: pa.Array) -> None:
    if declared.name == "ROW":
        column = pa.StructArray.from_arrays([column.field(0).view(pa.date32())], ["a"])
    config = declared.config()
    expected = outcome(lambda: bytes_by_value(column, config))
    assert isinstance(expected, tuple)
    assert outcome(lambda: to_bytes(column, config)) == expected


def test_no_declared_value_goes_through_python(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    for name in ("to_arrow", "to_values", "serializer_for"):
        monkeypatch.setattr(element_columns, name, None)
    for sort in SORTS:
        declared, values = sample(sort, rng)
        data = [None if value is None else serializer_for(declared).serialize(value) for value in values]
        assert to_bytes(to_column(data, declared.config()), declared.config()) == data


def test_pieces_end_with_the_row_that_makes_them_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_snapshots, "_PIECE_ROWS", 3)
    monkeypatch.setattr(operator_snapshots, "_PIECE_BYTES", 10)
    for sizes, expected in (
        ([], []),
        ([1] * 7, [3, 3, 1]),
        ([10, 1, 9, 1], [1, 2, 1]),
        ([4, 4, 4, 11, 0], [3, 1, 1]),
        ([0, 0, 0, 0], [3, 1]),
    ):
        keys: list[bytes | None] = [bytes(size) for size in sizes]
        for columns in ([keys], [keys, [None] * len(keys)]):
            pieces = list(operator_snapshots._pieces(columns))
            assert [end - start for start, end in pieces] == expected
            assert [start for start, _ in pieces] == [sum(expected[:at]) for at in range(len(expected))]


@pytest.mark.parametrize("sort", SORTS)
def test_values_are_taken_and_refused_as_by_the_serializer(sort: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    elements, serializer = ElementBytes(given.declared), serializer_for(given.declared)
    for value in [*given.present, *WRONG, *([each] for each in WRONG), *((each,) * 2 for each in WRONG)]:
        stored = outcome(lambda value=value: serializer.serialize(value))
        assert outcome(lambda value=value: elements.of(value)) == stored
        if isinstance(stored, bytes):
            assert repr(elements.value(stored)) == repr(serializer.deserialize(stored))
            cut = stored[:-1]
            expected = outcome(lambda cut=cut: repr(serializer.deserialize(cut)))
            assert outcome(lambda cut=cut: repr(elements.value(cut))) == expected


@pytest.mark.parametrize("sort", SORTS_OF_KEYS)
def test_keys_are_taken_and_refused_as_by_the_encoder(sort: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    keys, encoder = CanonicalKeys(given.declared), key_encoder(given.declared)
    for key in [*given.values, *WRONG, *([each] for each in WRONG), *((each,) * 2 for each in WRONG)]:
        canonical = outcome(lambda key=key: encoder.encode(key))
        assert outcome(lambda key=key: keys.of(key)) == canonical
        if not isinstance(canonical, tuple):
            assert repr(keys.key(canonical)) == repr(encoder.decode(canonical))
    if sort in ("date", "timestamp", "timestamp_ntz"):
        assert outcome(lambda: keys.key(2**62)) == outcome(lambda: encoder.decode(2**62))


@pytest.mark.sampled(80)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sort", SORTS)
def test_columns_of_every_type_and_layout_are_added(sort: str, layout: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    write = serializer_for(given.declared).serialize
    with OperatorStateBackend() as operator:
        state = operator.get_union_list_state(sb.ListStateDescriptor("s", given.declared))
        state.add_all(given.column(layout, given.present))
        assert state.view().rows() == [write(value) for value in given.present]
        assert texts(state.get()) == texts(state) == texts(given.present)
        with pytest.raises(SerializationError, match="operator state 's'"):
            state.update(given.column(layout))
        assert len(state.get()) == len(given.present)


def test_a_column_that_arrow_cannot_read_is_refused_by_name() -> None:
    with sb.create_backend("reference").create_operator_backend() as operator:
        state = operator.get_list_state(sb.ListStateDescriptor("names", str))
        for column in (text(b"\xff", pa.string()), pa.array([1]), pa.array([b"a"])):
            with pytest.raises(SerializationError, match="operator state 'names'"):
                state.add_all(column)
        assert state.get() == []
