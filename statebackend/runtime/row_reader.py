"""From Arrow to the rows that per-record functions get: light named tuples, made one by one.

>>> table = pa.table({"user": ["ann", "bob"], "at": [{"x": 1}, None]})
>>> list(rows_of(table))
[Row(user='ann', at=Row(x=1)), Row(user='bob', at=None)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from statebackend._core.codecs.decimals import in_use
from statebackend._core.codecs.row_maker import RowMaker
from statebackend._core.codecs.type_codec import TypeCodec
from statebackend.errors import SerializationError
from statebackend.types import DATE, TIMESTAMP, TIMESTAMP_NTZ, row_class
from statebackend.types.serializers import serializer_for

__all__ = ["Row", "column_values", "row_maker", "rows_of"]

T = TypeVar("T")
#: What per-record functions see: a named tuple, made by `row_class`.
Row: TypeAlias = tuple[object, ...]

_TIMESTAMP = TypeCodec("TIMESTAMP", serializer_for(TIMESTAMP))
_TIMESTAMP_NTZ = TypeCodec("TIMESTAMP_NTZ", serializer_for(TIMESTAMP_NTZ))
_DATE = TypeCodec("DATE", serializer_for(DATE))
#: Columns whose values are made from Arrow's buffers, when their row is.
_FORMS = {
    pa.int64(): "INT_64",
    pa.int32(): "INT_32",
    pa.int16(): "INT_16",
    pa.int8(): "INT_8",
    pa.float64(): "DOUBLE",
    pa.float32(): "FLOAT",
    pa.bool_(): "BOOL",
    pa.string(): "STRING",
    pa.binary(): "BYTES",
}
#: Rows are made in pieces of this many, so that a large batch is never held as Python objects.
_PIECE = 65_536


def rows_of(table: pa.Table) -> Iterator[Row]:
    """The rows of a table, in order, each a named tuple. Memory: some tens of thousands of rows at a time.

    >>> [row.n for row in rows_of(pa.table({"n": [1, 2]}))]
    [1, 2]
    """
    for batch in table.to_batches(max_chunksize=_PIECE):
        yield from row_maker(batch)


def row_maker(batch: pa.RecordBatch) -> RowMaker:
    """What makes the rows of a record batch, each when it is asked for. What no buffer shows is converted here.

    >>> list(row_maker(pa.record_batch({"n": [1, 2]})))
    [Row(n=1), Row(n=2)]
    """

    def unreadable(at: int) -> SerializationError:
        return _unreadable(batch.schema.names[at], batch.schema.types[at])

    columns = [_column(column, name) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
    return RowMaker(batch.num_rows, row_class(tuple(batch.schema.names)), columns, unreadable)


def _column(array: pa.Array, name: str) -> Any:
    """A column as `RowMaker` takes it."""
    kind, is_a = array.type, pa.types
    codec: TypeCodec | None = None
    scale = 0
    if kind in _FORMS:
        form = _FORMS[kind]
    elif is_a.is_decimal128(kind) and kind.scale >= 0 and in_use():
        form, scale = "DECIMAL", kind.scale
    elif is_a.is_timestamp(kind) and kind.unit == "us":
        form, codec = "TICKS", _TIMESTAMP if kind.tz is not None else _TIMESTAMP_NTZ
    elif is_a.is_date32(kind):
        form, codec = "DAYS", _DATE
    else:
        return column_values(array, name)
    valid, *others = array.buffers()
    ends = others[0] if len(others) > 1 else None
    return form, array.offset, valid if array.null_count else None, ends, others[-1], codec, scale


def column_values(column: pa.Array | pa.ChunkedArray, name: str = "") -> list[object]:
    """The values of a column as state takes them: rows for structs, dicts for maps, aware times in UTC; O(n).

    >>> column_values(pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())))
    [{'a': 1}, None]
    """
    values: list[object] = []
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    try:
        for chunk in chunks:
            values += _values(chunk)
    except (ValueError, OverflowError, UnicodeDecodeError):
        raise _unreadable(name, column.type) from None
    return values


def _unreadable(name: str, kind: pa.DataType) -> SerializationError:
    return SerializationError(
        "a value cannot be read from Arrow",
        detail=f"column {name!r} of type {kind}",
        hint="leave the column out, or cast it before foreachBatch",
    )


def _values(array: pa.Array) -> Sequence[object]:
    kind = array.type
    is_a = pa.types
    if is_a.is_dictionary(kind):
        return _values(array.dictionary_decode())
    if is_a.is_integer(kind) or is_a.is_floating(kind):
        if not array.null_count:
            return array.to_numpy().tolist()
        values = array.fill_null(0).to_numpy().tolist()
        for at in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            values[at] = None
        return values
    if is_a.is_decimal128(kind) and len(array) and kind.scale >= 0 and in_use():
        return _decimals(array)
    if is_a.is_string(kind) or is_a.is_binary(kind) or is_a.is_decimal(kind):
        return array.to_numpy(zero_copy_only=False).tolist()
    if is_a.is_timestamp(kind) and kind.unit == "us":
        codec = _TIMESTAMP if kind.tz is not None else _TIMESTAMP_NTZ
        return _numbered(codec, array, array.view(pa.int64()))
    if is_a.is_date32(kind):
        return _numbered(_DATE, array, array.view(pa.int32()).cast(pa.int64()))
    if is_a.is_struct(kind):
        return _structs(array)
    if is_a.is_list(kind) or is_a.is_large_list(kind):
        return _runs(array, lambda start, length: _values(array.values.slice(start, length)))
    if is_a.is_map(kind):
        return [None if run is None else dict(run) for run in _runs(array, partial(_pairs, array))]
    return array.to_pylist()


def _numbered(codec: TypeCodec, array: pa.Array, numbers: pa.Array) -> list[object]:
    """The values of dates and times, given as integers: no numpy object is made on the way."""
    return codec.values_of(numbers.fill_null(0).to_numpy(), _null_rows(array))


def _decimals(array: pa.Array) -> list[object]:
    codec = TypeCodec("DECIMAL", None, precision=38, scale=array.type.scale)
    words = np.frombuffer(array.buffers()[1], dtype=np.int64, count=2 * (array.offset + len(array)))
    return codec.values_of(words[2 * array.offset :], _null_rows(array))


def _null_rows(array: pa.Array) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    return array.is_null().to_numpy(zero_copy_only=False).view(np.uint8) if array.null_count else None


def _structs(array: pa.Array) -> list[Row | None]:
    names = tuple(field.name for field in array.type)
    if not names:
        return array.to_pylist()
    make = partial(tuple.__new__, row_class(names))
    rows: list[Row | None] = list(map(make, zip(*map(_values, array.flatten()), strict=True)))
    if array.null_count:
        for at in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            rows[at] = None
    return rows


def _pairs(array: pa.Array, start: int, length: int) -> list[tuple[object, object]]:
    keys, items = _values(array.keys.slice(start, length)), _values(array.items.slice(start, length))
    return list(zip(keys, items, strict=True))


def _runs(array: pa.Array, read: Callable[[int, int], Sequence[T]]) -> list[Sequence[T] | None]:
    """The elements of a list or map array, list by list; ``read(start, length)`` reads them from its child."""
    offsets = array.offsets.to_numpy().tolist()
    if not offsets or len(array) == 0:
        return []
    first = offsets[0]
    flat = read(first, offsets[-1] - first)
    missing = array.is_null().to_numpy(zero_copy_only=False).tolist()
    bounds = zip(offsets, offsets[1:], missing, strict=False)
    return [None if null else flat[begin - first : end - first] for begin, end, null in bounds]
