"""Rows for functions out of Arrow, light named tuples made one by one; and back to Arrow, with every value checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from statebackend._core.codecs.decimals import in_use
from statebackend._core.codecs.row_maker import RowMaker
from statebackend._core.codecs.row_writer import RowWriter
from statebackend._core.codecs.type_codec import TypeCodec
from statebackend.columns.codec_factory import type_codec
from statebackend.columns.stored_columns import arrow_column
from statebackend.errors import SerializationError, SerializationTypeError, UsageError, usage
from statebackend.state import check_values, to_chunks
from statebackend.types import (
    SCALARS,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    DecimalType,
    MapType,
    RowType,
    TupleType,
    Type,
    is_not_a_time,
    of,
    record_reader,
    row_class,
)

T = TypeVar("T")
#: The rows of per-record functions: a named tuple, made by `row_class`.
Row: TypeAlias = tuple[object, ...]

#: The codecs of columns whose values are made from Arrow's buffers, when their row is.
_CODECS = {kind.arrow: type_codec(kind) for kind in SCALARS if type_codec(kind).is_compiled}
#: Times whose form in Python is their zone's.
_OF_A_ZONE = (TIMESTAMP.arrow,)
#: The stored type of times, by its bytes.
_INTEGERS: dict[int | None, pa.DataType] = {4: pa.int32(), 8: pa.int64()}
#: Rows are made in pieces of this many, so that a large batch is never held as Python objects.
_PIECE = 65_536


def rows_of(table: pa.Table) -> Iterator[Row]:
    """The rows of a table, in order, each a named tuple. Memory: some tens of thousands of rows at a time."""
    for batch in table.to_batches(max_chunksize=_PIECE):
        yield from row_maker(batch)


def row_maker(batch: pa.RecordBatch) -> RowMaker:
    """What makes the rows of a record batch, each when it is asked for. Values outside of buffers are converted
    here."""

    def unreadable(at: int) -> SerializationError:
        return _unreadable(batch.schema.names[at], batch.schema.types[at])

    columns = [_column(column, name) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
    return RowMaker(batch.num_rows, row_class(tuple(batch.schema.names)), columns, unreadable)


def _column(array: pa.Array, name: str) -> Any:
    """A column as `RowMaker` takes it."""
    codec = _codec_of(array.type)
    return column_values(array, name) if codec is None else _buffers(array, codec)


def made_column(array: pa.Array, values: Callable[[pa.Array], list[object]]) -> Any:
    """The same for a column whose values are those that ``values`` gives, unless they have one form in Python."""
    codec = _CODECS.get(array.type) if array.type not in _OF_A_ZONE else None
    return values(array) if codec is None else _buffers(array, codec)


def _buffers(array: pa.Array, codec: TypeCodec) -> Any:
    valid, *others = array.buffers()
    ends = others[0] if len(others) > 1 else None
    return codec, array.offset, valid if array.null_count else None, ends, others[-1]


def _codec_of(kind: pa.DataType) -> TypeCodec | None:
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return type_codec(TIMESTAMP if kind.tz is not None else TIMESTAMP_NTZ)
    if pa.types.is_decimal128(kind) and kind.scale >= 0 and in_use():
        return TypeCodec("DECIMAL", None, precision=38, scale=kind.scale)
    return _CODECS.get(kind)


def column_values(column: pa.Array | pa.ChunkedArray, name: str = "") -> list[object]:
    """The values of a column as state takes them: rows for structs, dicts for maps, aware times in UTC; O(n)."""
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
    codec = _codec_of(kind)
    if is_a.is_decimal128(kind) and len(array) and codec is not None:
        words = np.frombuffer(array.buffers()[1], dtype=np.int64, count=2 * (array.offset + len(array)))
        return codec.values_of(words[2 * array.offset :], _null_rows(array))
    if is_a.is_string(kind) or is_a.is_binary(kind) or is_a.is_decimal(kind):
        return array.to_numpy(zero_copy_only=False).tolist()
    if codec is not None and is_a.is_temporal(kind):  # no numpy object is made on the way
        numbers = array.view(_INTEGERS[codec.width]).cast(pa.int64())
        return codec.values_of(numbers.fill_null(0).to_numpy(), _null_rows(array))
    if is_a.is_struct(kind):
        return _structs(array)
    if is_a.is_list(kind) or is_a.is_large_list(kind):
        return _runs(array, lambda start, length: _values(array.values.slice(start, length)))
    if is_a.is_map(kind):
        return [None if run is None else dict(run) for run in _runs(array, partial(_pairs, array))]
    return array.to_pylist()


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


class OutputSchema:
    """The columns that a function outputs.

    ``schema`` is Spark DDL, a Spark ``StructType``, a ``pyarrow.Schema``, a ROW, or a dataclass or NamedTuple.
    """

    def __init__(self, schema: object) -> None:
        if isinstance(schema, pa.Schema):
            schema = pa.struct(list(schema))
        declared = of(schema)
        if not isinstance(declared, RowType):
            raise usage.schema(
                "expected a schema of rows",
                detail=repr(declared),
                hint='write for example "user bigint, n int"',
            )
        self.row_type = declared
        self.arrow = pa.schema(list(declared.arrow))
        self._names = declared.names
        self._read = record_reader(declared.names)
        self._codecs = tuple(type_codec(kind) if _is_written(kind) else None for kind in declared.types)

    def __repr__(self) -> str:
        return f"OutputSchema({self.row_type!r})"

    def __reduce__(self) -> tuple[type[OutputSchema], tuple[RowType]]:
        return OutputSchema, (self.row_type,)

    def empty(self) -> pa.Table:
        return self.arrow.empty_table()

    # --- from rows ---

    def table_of_rows(self, rows: Sequence[object]) -> pa.Table:
        """The table of rows in any form that a function may output; O(n)."""
        writer = self.writer()
        writer.extend(rows)
        return self.table_of_written(writer)

    def writer(self) -> RowWriter:
        """What takes rows one by one, for `table_of_written`."""
        return RowWriter(self._codecs, self._names, self._fields, self._values)

    def table_of_written(self, writer: RowWriter) -> pa.Table:
        """The table of the rows that a writer has, which then has none; raises for the first that does not fit."""
        if writer.misfit is not None:
            row, position = writer.misfit
            raise _no_row(row, position, self._names)
        if not writer.count:
            return self.empty()
        arrays = [
            self._column(name, kind, taken) if isinstance(taken, list) else _written(kind, taken)
            for name, kind, taken in zip(self._names, self.row_type.types, writer.take(), strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=self.arrow)

    def _values(self, at: int, taken: Any) -> list[object]:
        return column_values(_written(self.row_type.types[at], taken), self._names[at])

    def _fields(self, row: object) -> Sequence[object] | None:
        """Take a named tuple with the schema's names by name, any other tuple by position."""
        if isinstance(row, tuple):
            own = getattr(row, "__fields__", None) or getattr(row, "_fields", None)
            if own is not None and tuple(own) != self._names and set(own) == set(self._names):
                by_name = dict(zip(own, row, strict=True))
                return [by_name[name] for name in self._names]
        return self._read(row)

    def _column(self, name: str, kind: Type, values: list[object]) -> pa.Array | pa.ChunkedArray:
        layout = kind.layout
        if layout.family == "time" and type_codec(kind).is_compiled:
            numbers, nulls = np.empty(len(values), np.int64), np.empty(len(values), np.uint8)
            if not type_codec(kind).numbers_of(values, numbers, nulls):
                return self._checked(name, kind, values)
            mask = nulls.view(bool) if nulls.any() else None
            return pa.array(numbers, pa.int64(), mask=mask).cast(_INTEGERS[layout.width]).view(kind.arrow)
        # Arrow takes these exactly as the declared type's serializer does.
        if kind.is_key_type and set(map(type, values)) <= {layout.python, type(None)}:
            try:
                return pa.array(values, kind.arrow)
            except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError, OverflowError):
                pass  # the code below names the wrong value
        return self._checked(name, kind, values)

    def _checked(self, name: str, kind: Type, values: list[object]) -> pa.Array | pa.ChunkedArray:
        if kind.layout.family == "time":  # pandas and numpy have their own time for none
            values = [None if is_not_a_time(value) else value for value in values]
        try:
            check_values(values, kind, nullable=True)
            return to_chunks(values, kind)
        except SerializationError as error:
            raise error.at(f"output column {name!r}") from None
        except OverflowError as error:
            raise OverflowError(f"{error}, output column {name!r}") from None

    # --- from batches ---

    def conformed(self, table: pa.Table) -> pa.Table:
        """The table with the columns and types of the schema, in its order; raises if something would be lost."""
        if sorted(table.column_names) != sorted(self._names):
            raise SerializationTypeError(
                "the columns of the output differ from the schema",
                code="SERIALIZATION.OUTPUT",
                detail=f"columns {', '.join(table.column_names)}; schema {', '.join(self._names)}",
                hint="return a table with the columns of schema=, or change schema=",
            )
        columns = [
            self._cast(name, kind, table.column(name))
            for name, kind in zip(self._names, self.row_type.types, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=self.arrow)

    def _cast(self, name: str, kind: Type, column: pa.ChunkedArray) -> pa.ChunkedArray:
        if column.type == kind.arrow:
            return column
        try:
            found: Type | None = None if pa.types.is_null(column.type) else of(column.type)
            if found is None or _is_close(found, kind):
                return column.cast(kind.arrow)
        except UsageError:
            pass  # an Arrow type that no state has
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise SerializationError(
                "a value of the output does not fit its column",
                code="SERIALIZATION.OUTPUT",
                detail=f"output column {name!r}: {column.type} is not {kind.arrow}",
            ) from None
        raise SerializationTypeError(
            "a column of the output has another type than the schema",
            code="SERIALIZATION.OUTPUT",
            detail=f"output column {name!r}: {column.type} instead of {kind.arrow}",
            hint="cast it in process_batch, or change the schema",
        )


def _is_written(kind: Type) -> bool:
    """Return True if the bytes of state hold each value exactly as the column does, and need no Python to be made."""
    if isinstance(kind, MapType) and (
        kind.key.parts or kind.key.layout.family in ("float", "decimal") or kind.key == TIMESTAMP
    ):
        return False  # map keys that are one in state may be two in a column
    return all(map(_is_written, kind.parts)) if kind.parts else type_codec(kind).is_compiled


def _written(kind: Type, taken: tuple[bytes, bytes | None, bytes]) -> pa.Array:
    """The column of results of a `RowWriter` gave."""
    valid, ends, data = taken
    there = np.frombuffer(valid, np.bool_)
    values = np.frombuffer(data, np.uint8)
    if ends is not None:
        return arrow_column((np.frombuffer(ends, np.int64), values), there, kind)
    return arrow_column(values.reshape(len(there), -1), there, kind)


def _is_close(found: Type, wanted: Type) -> bool:
    """Return True if Arrow's checked cast from one to the other keeps every value or fails."""
    if found == wanted or (isinstance(found, DecimalType) and isinstance(wanted, DecimalType)):
        return True
    if isinstance(wanted, TupleType) and isinstance(found, RowType):
        return bool(wanted.arrow == found.arrow)
    return found.layout.family == wanted.layout.family in ("integer", "float")


def _no_row(row: object, position: int, names: tuple[str, ...]) -> SerializationTypeError:
    detail = f"output row {position} is a {type(row).__name__}"
    hint = "yield tuples, dicts, named tuples or Spark rows; a single row is yielded, not returned"
    if isinstance(row, tuple):
        detail = f"output row {position} has {len(row)} fields"
        hint = f"the schema has {len(names)}: {', '.join(names)}"
    elif isinstance(row, dict):
        detail = f"output row {position} is a dict with other fields"
        hint = f"the schema has {', '.join(names)}"
    return SerializationTypeError(
        "an output row does not fit the schema", code="SERIALIZATION.OUTPUT", detail=detail, hint=hint
    )
