"""Columns that a type refuses, wherever in a type and a layout they lie: an error that names the row, and no change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.conftest import MakeKeyed

import statebackend as sb
from statebackend import types as t
from statebackend.state.value_columns import check_values, to_values

pytestmark = pytest.mark.checked


def raw(arrow: pa.DataType, *buffers: bytes) -> pa.Array:
    return pa.Array.from_buffers(arrow, 2, [None, *map(pa.py_buffer, buffers)])


#: Two texts, of which the second is not UTF-8, in three layouts.
NOT_TEXT = [
    raw(pa.string(), np.array([0, 2, 3], np.int32).tobytes(), b"ok\xff"),
    raw(pa.large_string(), np.array([0, 2, 3], np.int64).tobytes(), b"ok\xff"),
    raw(pa.string_view(), b"\2\0\0\0ok".ljust(16, b"\0") + b"\1\0\0\0\xff".ljust(16, b"\0")),
]

#: Columns of two rows, of which a type refuses the second and perhaps the first.
WRONG: dict[str, list[pa.Array]] = {
    "bigint": [pa.array([1, 2**63], pa.uint64()), pa.array(["a", "b"]), pa.array([1.0, 2.0]), pa.array([True, False])],
    "int": [pa.array([1, 2**31])],
    "smallint": [pa.array([1, -(2**15) - 1], pa.int32())],
    "tinyint": [pa.array([1, 128], pa.int16())],
    "boolean": [pa.array([0, 1])],
    "double": [pa.array([1, 2**53 + 1]), pa.array(["a", "b"])],
    "float": [pa.array([1.0, 1e300]), pa.array([1, 2**24 + 1])],
    "string": [*NOT_TEXT, pa.array([b"a", b"b"]), pa.array([1, 2])],
    "binary": [pa.array(["a", "b"])],
    "date": [pa.array([1, 2], pa.timestamp("us")), pa.array([1, 2])],
    "timestamp": [pa.array([1, 2], pa.timestamp("us")), pa.array([1000, 1], pa.timestamp("ns", "UTC"))],
    "timestamp_ntz": [pa.array([1, 2], pa.timestamp("us", "UTC")), pa.array([1000, 1], pa.timestamp("ns"))],
    "decimal(18,2)": [pa.array([1.5, 2.0]), pa.array(["1.00", "1.005"]).cast(pa.decimal128(18, 3))],
    "decimal(5,5)": [pa.array(["0.00001", "1.00000"]).cast(pa.decimal128(6, 5))],
    "decimal(38,0)": [pa.array(["1.0", "1.5"]).cast(pa.decimal128(38, 1))],
}  # fmt: skip
#: How a wrong column becomes part of another type.
WITHIN: dict[str, Callable[[Any, pa.Array], tuple[Any, pa.Array]]] = {
    "itself": lambda declared, column: (declared, column),
    "an element": lambda declared, column: (
        t.LIST(declared),
        pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), column),
    ),
    "a field": lambda declared, column: (
        t.ROW(a=t.LONG, b=declared),
        pa.StructArray.from_arrays([pa.array([1, 2]), column], ["a", "b"]),
    ),
    "a map value": lambda declared, column: (
        t.MAP(t.STRING, declared),
        pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b"]), column),
    ),
    "a map key": lambda declared, column: (
        t.MAP(declared, t.LONG),
        pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), column, pa.array([1, 2])),
    ),
    "a field of an element": lambda declared, column: (
        t.LIST(t.TUPLE(declared)),
        pa.ListArray.from_arrays(
            pa.array([0, 1, 2], pa.int32()), pa.StructArray.from_arrays([column], ["_1"])
        ),
    ),
}


def shapes(column: pa.Array) -> list[Any]:
    """The column as it is, sliced, in chunks, and as a dictionary."""
    found = [
        column,
        pa.concat_arrays([column, column])[2:],
        pa.chunked_array([column[:1], column[1:]]),
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), column),
    ]
    return [shape for shape in found if len(shape) == 2]


def attempts(keyed: sb.KeyedStateBackend, declared: t.Type) -> list[tuple[str, Callable[[Any], Any]]]:
    """What takes a column of a type's values, each beside the name that its errors have."""
    value = keyed.get_value_state(sb.ValueStateDescriptor("v", declared))
    elements = keyed.get_list_state(sb.ListStateDescriptor("l", declared))
    entries = keyed.get_map_state(sb.MapStateDescriptor("m", int, declared))
    found: list[tuple[str, Callable[[Any], Any]]] = [
        ("state 'v'", lambda column: value.update_many([1, 2], column)),
        ("state 'l'", lambda column: elements.add_many([1, 2], column)),
        ("state 'm'", lambda column: entries.put_many([1, 2], [1, 2], column)),
    ]
    if declared.is_key_type:
        by_key = keyed.get_map_state(sb.MapStateDescriptor("k", declared, int))
        found.append(("state 'k'", lambda column: by_key.put_many([1, 2], column, [1, 2])))
    return found


@pytest.mark.parametrize("where", WITHIN)
@pytest.mark.parametrize("sort", WRONG)
def test_wrong_columns_are_refused_and_change_nothing(make_keyed: MakeKeyed, sort: str, where: str) -> None:
    for wrong in WRONG[sort]:
        declared, column = WITHIN[where](t.of(sort), wrong)
        with pytest.raises((sb.SerializationError, OverflowError)) as expected:
            check_values(to_values(column, declared), declared, nullable=True)
        keyed = make_keyed()
        for (name, call), shape in itertools.product(attempts(keyed, declared), shapes(column)):
            with pytest.raises(type(expected.value), match="position") as raised:
                call(shape)
            if name != "state 'k'":  # text of keys has an error of its own
                assert getattr(raised.value, "code", None) == getattr(expected.value, "code", None)
            assert isinstance(raised.value, OverflowError) or name in str(raised.value)
        assert keyed.num_entries() == 0
