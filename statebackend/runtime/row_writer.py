"""From the results of a function to the Arrow table of the output schema, with every value checked.

>>> writer = OutputSchema("user string, n bigint")
>>> writer.table_of_rows([("ann", 1), {"n": 2, "user": "bob"}]).to_pylist()
[{'user': 'ann', 'n': 1}, {'user': 'bob', 'n': 2}]
>>> writer.table_of_rows([("ann", "x")])
Traceback (most recent call last):
statebackend.errors.SerializationTypeError: LONG does not take a value of type str (output column 'n', position 0) ...
"""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend._core.codecs.row_writer import RowWriter
from statebackend._core.codecs.type_codec import TypeCodec
from statebackend.columns.codec_choice import type_codec
from statebackend.columns.stored_columns import arrow_column
from statebackend.errors import SerializationError, SerializationTypeError, UsageError
from statebackend.runtime.row_reader import column_values
from statebackend.state import check_values, to_chunks
from statebackend.types import (
    DATE,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    DecimalType,
    ListType,
    MapType,
    PrimitiveType,
    RowType,
    TupleType,
    Type,
    is_not_a_time,
    of,
    record_reader,
)
from statebackend.types.serializers import serializer_for

__all__ = ["OutputSchema"]

_INTEGERS = ("LONG", "INT", "SHORT", "BYTE")
_FLOATS = ("DOUBLE", "FLOAT")
#: The Python types that Arrow takes exactly as the declared type's serializer does.
_EXACT: dict[str, frozenset[type]] = {
    **{name: frozenset({int, type(None)}) for name in _INTEGERS},
    **{name: frozenset({float, type(None)}) for name in _FLOATS},
    "BOOL": frozenset({bool, type(None)}),
    "STRING": frozenset({str, type(None)}),
    "BYTES": frozenset({bytes, type(None)}),
}
#: What is written as integers.
_CODECS = {
    name: TypeCodec(name, serializer_for(kind))
    for name, kind in (("DATE", DATE), ("TIMESTAMP", TIMESTAMP), ("TIMESTAMP_NTZ", TIMESTAMP_NTZ))
}
_INTEGERS_OF = {"DATE": pa.int32(), "TIMESTAMP": pa.int64(), "TIMESTAMP_NTZ": pa.int64()}


class OutputSchema:
    """The columns that a function outputs.

    ``schema`` is Spark DDL, a Spark ``StructType``, a ``pyarrow.Schema``, a ROW, or a dataclass or NamedTuple.

    >>> OutputSchema("user bigint, average double").arrow
    user: int64
    average: double
    """

    def __init__(self, schema: object) -> None:
        if isinstance(schema, pa.Schema):
            schema = pa.struct(list(schema))
        declared = of(schema)
        if not isinstance(declared, RowType):
            raise UsageError(
                "a schema is that of rows",
                detail=repr(declared),
                hint='write for example "user bigint, n int"',
            )
        self.row_type = declared
        #: The schema as Arrow has it.
        self.arrow = pa.schema(list(declared.arrow))
        self._names = declared.names
        self._read = record_reader(declared.names)

    def __repr__(self) -> str:
        return f"OutputSchema({self.row_type!r})"

    def __reduce__(self) -> tuple[type[OutputSchema], tuple[RowType]]:
        return OutputSchema, (self.row_type,)

    def empty(self) -> pa.Table:
        """A table without rows."""
        return self.arrow.empty_table()

    # --- from rows ---

    def table_of_rows(self, rows: Sequence[object]) -> pa.Table:
        """The table of rows in any form that a function may output; O(n)."""
        writer = self.writer()
        writer.extend(rows)
        return self.table_of_written(writer)

    def writer(self) -> RowWriter:
        """What takes rows one by one, for `table_of_written`."""
        codecs = tuple(type_codec(kind) if _is_written(kind) else None for kind in self.row_type.types)
        return RowWriter(codecs, self._names, self._fields, self._values)

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
        if kind.name in _CODECS:
            numbers, nulls = np.empty(len(values), np.int64), np.empty(len(values), np.uint8)
            if not _CODECS[kind.name].numbers_of(values, numbers, nulls):
                return self._checked(name, kind, values)
            mask = nulls.view(bool) if nulls.any() else None
            return pa.array(numbers, pa.int64(), mask=mask).cast(_INTEGERS_OF[kind.name]).view(kind.arrow)
        if self._is_exact(kind, values):
            try:
                return pa.array(values, kind.arrow)
            except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError, OverflowError):
                pass  # the code below names the wrong value
        return self._checked(name, kind, values)

    def _is_exact(self, kind: Type, values: list[object]) -> bool:
        found = set(map(type, values))
        exact = _EXACT.get(kind.name)
        if exact is not None:
            return found <= exact
        return kind.name == "DECIMAL" and found <= {decimal.Decimal, type(None)}

    def _checked(self, name: str, kind: Type, values: list[object]) -> pa.Array | pa.ChunkedArray:
        if kind.name in _CODECS:  # pandas and numpy have a time of their own for none
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
                "the columns of the output are not those of the schema",
                code="SERIALIZATION.OUTPUT",
                detail=f"columns {', '.join(table.column_names)}; schema {', '.join(self._names)}",
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
    if isinstance(kind, (RowType, TupleType)):
        return all(map(_is_written, kind.types))
    if isinstance(kind, ListType):
        return _is_written(kind.element)
    if isinstance(kind, MapType):
        # Map keys that are one in state may be two in a column.
        is_plain = isinstance(kind.key, PrimitiveType) and kind.key.name not in (*_FLOATS, "TIMESTAMP")
        return is_plain and _is_written(kind.key) and _is_written(kind.value)
    return type_codec(kind).is_compiled


def _written(kind: Type, taken: tuple[bytes, bytes | None, bytes]) -> pa.Array:
    """The column of what a `RowWriter` gave."""
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
    return any(found.name in family and wanted.name in family for family in (_INTEGERS, _FLOATS))


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
