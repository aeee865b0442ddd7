"""Columns of values: converts Arrow, numpy or lists to the form that tables store, and back to Arrow.

Declared types given as Arrow or numpy make no Python object per row, and share memory where the layout allows. LIST,
MAP, TUPLE and ROW, however deep, go through `nested_columns`, which walks over Arrow's buffers. Some
columns cannot be converted as a whole: lists of mixed objects, a column with a value that is refused, types that hold
pickles. Of these, `statebackend.state.value_columns` makes Python values, which the codec converts one by one; the
serializer words every error.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend.columns.codec_factory import type_codec, value_form
from statebackend.columns.nested_columns import arrow_of_stored, stored_runs
from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.keys import (
    Columnar,
    as_columnar,
    byte_runs_of,
    floats_of,
    ints_of,
    numpy_of,
    runs_of_list,
    wide_decimals_of,
)
from statebackend.state import to_arrow, to_values
from statebackend.types import DecimalType, Type
from statebackend.types.serializers import serializer_for

Array = np.ndarray[Any, Any]


class Column(NamedTuple):
    """Values in stored form, and the rows that are null (None: no row is). A null row may hold any value."""

    #: An array of the type's own numbers, rows of bytes (uint8, two dimensions), or (offsets, data).
    values: Any
    nulls: Array | None


def value_column(column: Any, declared: Type, nullable: bool = True) -> Column:
    """The stored form of a column of values. O(n). Errors are as in `check_values`, naming the position."""
    columnar = as_columnar(column, "values")
    if len(columnar):
        if declared.layout.family == "nested":
            values, nulls = _nested(columnar, declared)
        else:
            filled, nulls = _without_nulls(columnar)
            values = None if filled is None else _whole(filled, declared)
        if values is not None and (nulls is None or nullable):
            return Column(values, nulls)
    return _by_value(columnar, declared, nullable)


def _without_nulls(column: Columnar) -> tuple[Columnar | None, Array | None]:
    """The column with a harmless value in place of each null, or None if it has none, and the null rows."""
    if isinstance(column, list):
        missing = [value is None for value in column]
        if not any(missing):
            return column, None
        something = next((value for value in column if value is not None), None)
        return [something if value is None else value for value in column], np.array(missing)
    if isinstance(column, np.ndarray):
        if column.dtype.kind != "M" or not np.isnat(column).any():
            return column, None
        return np.where(np.isnat(column), np.zeros(1, column.dtype), column), np.isnat(column)
    if not column.null_count:
        return column, None
    if str(column.type) in _PLAIN_FORMS:  # Arrow cannot fill nulls in view types
        column = column.cast(_PLAIN_FORMS[str(column.type)])
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_nested(column.type) or pa.types.is_null(column.type):
        return None, nulls
    if column.null_count == len(column):
        return pa.repeat(_zero(column.type), len(column)), nulls
    return column.fill_null(_zero(column.type)), nulls


_PLAIN_FORMS = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}


def _zero(arrow: pa.DataType) -> pa.Scalar:
    types = pa.types
    if types.is_string(arrow) or types.is_large_string(arrow):
        return pa.scalar("", arrow)
    if types.is_fixed_size_binary(arrow) and not types.is_decimal(arrow):
        return pa.scalar(bytes(arrow.byte_width), arrow)
    if types.is_binary(arrow) or types.is_large_binary(arrow):
        return pa.scalar(b"", arrow)
    if types.is_primitive(arrow) or types.is_decimal(arrow):
        return pa.Array.from_buffers(arrow, 1, [None, pa.py_buffer(bytes(32))])[0]
    return pa.scalar(None, arrow)


# --- whole columns ---


def _whole(column: Columnar, declared: Type) -> Any:
    """The stored form of a column without nulls; None if the plain way must look at each value."""
    layout = declared.layout
    if layout.family == "float":
        reals = numpy_of(column, declared)
        floats = None if reals is None else floats_of(reals, np.dtype(layout.dtype))
        return None if floats is None else np.ascontiguousarray(floats)
    if layout.family == "bytes":
        return byte_runs_of(column, declared)
    if isinstance(declared, DecimalType) and layout.width == 16:
        return wide_decimals_of(column, declared)
    if not layout.dtype:
        return None
    try:
        numbers = ints_of(column, declared)
    except (SerializationError, OverflowError):
        return None
    if numbers is None:
        return None
    values = numbers.astype(layout.dtype, copy=False)
    return values if layout.is_number else _bytes_of(values)


def _bytes_of(values: Array) -> Array:
    """One-dimensional values as rows of bytes."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def _nested(column: Columnar, declared: Type) -> tuple[Any, Array | None]:
    """The stored form of a column of LIST, MAP, TUPLE or ROW, or None, and the null rows."""
    is_fixed = in_entry(declared)
    runs = stored_runs(column, declared, has_offsets=not is_fixed) if isinstance(column, pa.Array) else None
    if runs is None:
        return None, None
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None  # type: ignore[union-attr]
    return (runs[1].reshape(len(column), -1) if is_fixed else runs), nulls


# --- value by value ---


def _by_value(column: Columnar, declared: Type, nullable: bool) -> Column:
    serializer, encode = serializer_for(declared), type_codec(declared).encode
    values = to_values(column, declared)
    width = serializer.fixed_width
    empty = b"" if width is None else bytes(width)
    data: list[bytes] = []
    for position, value in enumerate(values):
        if value is None:
            if not nullable:
                raise SerializationTypeError(
                    "a value is None", code="SERIALIZATION.NULL", detail=f"position {position}"
                )
            data.append(empty)
            continue
        try:
            stored = encode(value)
            data.append(serializer.serialize(value) if stored is None else stored)
        except SerializationError as error:
            raise error.at(f"position {position}") from None
        except OverflowError as error:
            raise OverflowError(f"{error}, at position {position}") from None
    missing = np.fromiter((value is None for value in values), dtype=bool, count=len(values))
    nulls = missing if missing.any() else None
    if width is None or not in_entry(declared):
        return Column(runs_of_list(data), nulls)
    raw = np.frombuffer(b"".join(data), dtype=np.uint8)
    if declared.layout.is_number:
        return Column(raw.view(declared.layout.dtype), nulls)
    return Column(raw.reshape(len(values), width), nulls)


def null_column(column: Any, declared: Type | None) -> tuple[int, Array | None]:
    """Return the number of values and the null rows, after checking every value against the type."""
    columnar = as_columnar(column, "values")
    if declared is not None:
        return len(columnar), value_column(columnar, declared).nulls
    nulls = np.fromiter((value is None for value in to_values(columnar, None)), bool, count=len(columnar))
    return len(columnar), nulls if nulls.any() else None


def double_column(column: Any, declared: Type) -> Column:
    """The values of a column of numbers as ``float(value)`` gives them, for averages and moments."""
    values, nulls = value_column(column, declared)
    if not isinstance(declared, DecimalType):
        return Column(values.astype(np.float64, copy=False), nulls)
    if declared.precision <= 18:
        unscaled = values.view("<i8").reshape(-1)
        # Both operands are exact, so the quotient is rounded once, as float(Decimal) is.
        exact = np.abs(unscaled) <= 2**53
        doubles = unscaled / 10.0**declared.scale
    else:
        exact, doubles = np.zeros(len(values), dtype=bool), np.zeros(len(values))
    serializer = serializer_for(declared)
    for position in np.flatnonzero(~exact):
        doubles[position] = float(serializer.deserialize(values[position].tobytes()))
    return Column(doubles, nulls)


# --- back to Arrow ---


def in_entry(declared: Type) -> bool:
    """Return True if entries hold the values of the type, with a fixed width; False if the arena holds them."""
    return declared.layout.is_number or isinstance(value_form(declared), int)


def stored_column(runs: tuple[Array, Array], declared: Type) -> Any:
    """Serialised values, as offsets and data, in the form that `arrow_column` takes. O(n), or nothing is copied."""
    if not in_entry(declared):
        return runs
    offsets, data = runs
    whole = data[int(offsets[0]) : int(offsets[-1])]
    if declared.layout.is_number:
        return whole.view(declared.layout.dtype)
    return whole.reshape(len(offsets) - 1, serializer_for(declared).fixed_width or 0)


def serialised_column(values: Any) -> tuple[Array, Array]:
    """Values in stored form as serialised ones, offsets and data: the opposite of `stored_column`. O(n)."""
    if isinstance(values, tuple):
        return values
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    width = len(raw) // len(values) if len(values) else 0
    return np.arange(len(values) + 1, dtype=np.int64) * width, raw


def arrow_column(values: Any, valid: Array | None, declared: Type) -> pa.Array:
    """The Arrow array, of the type's `arrow`, of values in stored form; shares their memory where it can. O(n).

    ``valid`` tells which rows are present; None: all.
    """
    if valid is not None and valid.all():
        valid = None
    if isinstance(values, tuple):
        return _arrow_of_runs(values[0], values[1], valid, declared)
    if declared.layout.family == "nested":
        return _arrow_of_runs(None, np.ascontiguousarray(values).reshape(-1), valid, declared)
    return _arrow_of_fixed(values, valid, declared)


def list_column(offsets: Array, elements: Any, arrow: pa.DataType, where: str) -> pa.Array:
    """Lists of these elements, of the type ``arrow``. ``where`` names the state for the error. O(lists)."""
    if isinstance(elements, pa.ChunkedArray) or elements.type != arrow.value_type:
        raise SerializationError(
            "the elements of one list take more than 2 GiB, and no checkpoint can hold it",
            detail=where,
            hint="clear the list; keep such elements under several keys, or in a map state",
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), elements, type=arrow)


def _bitmap(valid: Array | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _arrow_of_fixed(values: Array, valid: Array | None, declared: Type) -> pa.Array:
    count = len(values)
    if isinstance(declared, DecimalType) and declared.precision <= 18:
        unscaled = values.view("<i8").reshape(-1)
        values = np.stack((unscaled, unscaled >> 63), axis=1)
    elif declared.layout.family == "boolean":
        values = np.packbits(values.view(bool).reshape(-1), bitorder="little")
    return pa.Array.from_buffers(
        declared.arrow, count, [_bitmap(valid), pa.py_buffer(np.ascontiguousarray(values))]
    )


def _arrow_of_runs(offsets: Array | None, data: Array, valid: Array | None, declared: Type) -> pa.Array:
    if offsets is None or declared.layout.family != "bytes":
        array = arrow_of_stored(offsets, data, valid, declared)
        if array is not None:
            return array
        raw, width = data.tobytes(), declared.fixed_width
        ends = range(0, len(raw) + 1, width or 1) if offsets is None else offsets.tolist()
        return _arrow_by_value([raw[a:b] for a, b in itertools.pairwise(ends)], valid, declared)
    arrow = declared.arrow
    if offsets[-1] < 2**31:
        offsets = offsets.astype(np.int32)
    else:
        arrow = pa.large_string() if declared.name == "STRING" else pa.large_binary()
    return pa.Array.from_buffers(
        arrow, len(offsets) - 1, [_bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def _arrow_by_value(stored: list[bytes], valid: Array | None, declared: Type) -> pa.Array:
    deserialize = serializer_for(declared).deserialize
    present = itertools.repeat(True) if valid is None else valid.tolist()
    return to_arrow(
        [deserialize(data) if there else None for data, there in zip(stored, present)],  # noqa: B905
        declared,
    )
