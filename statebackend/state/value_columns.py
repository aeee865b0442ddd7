"""Columns of values: Arrow, numpy or sequences to Python values, one by one, and Python values to Arrow.

This is the plain way, for every type. Backends convert the types that they store natively by whole columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError, SerializationTypeError, usage
from statebackend.keys import as_columnar
from statebackend.types import DOUBLE, ListType, MapType, RowType, TupleType, Type, record_reader
from statebackend.types.serializers import serializer_for

Convert = Callable[[Any], Any]
#: Values with maps that are converted at once: fewer than make 2 GiB, if each has less than 32 MiB.
_ROWS_OF_MAPS = 64
#: Of numpy's types: those whose values are Python's as a list. Numpy's own would calculate in their width.
_PLAIN_KINDS = "biufSU"


def to_values(column: Any, declared: Type | None) -> list[Any]:
    """The Python values of a column of ``declared`` values (None: of any type), with None for nulls; O(n)."""
    columnar = as_columnar(column, "values")
    if isinstance(columnar, pa.Array):
        convert = None if declared is None else _from_arrow(declared)
        result = []
        for position in range(len(columnar)):
            try:
                value = columnar[position].as_py()
            except (ValueError, UnicodeDecodeError):  # nanoseconds, or text that is not UTF-8
                raise SerializationError(
                    "a value cannot be read from Arrow", detail=f"position {position}"
                ) from None
            result.append(value if value is None or convert is None else convert(value))
        return result
    is_alike = declared is None or _is_alike(declared)
    if is_alike and isinstance(columnar, np.ndarray) and columnar.dtype.kind in _PLAIN_KINDS:
        plain: list[Any] = columnar.tolist()
        return plain
    return [_plain(value) for value in columnar]


def _is_alike(declared: Type) -> bool:
    """Whether a type takes these from Python as from numpy. FLOAT rounds only numpy's integers."""
    layout = declared.layout
    return layout.family in ("integer", "boolean", "bytes") or declared == DOUBLE


def elements_of(values: Any, element_type: Type, where: str) -> list[Any]:
    """The elements that a call of a list state was given, as a new list; ``where`` names the state for errors."""
    if values is None or isinstance(values, (str, bytes, bytearray)):
        raise SerializationTypeError(
            f"a {type(values).__name__} is not a collection of elements",
            code="SERIALIZATION.NULL" if values is None else None,
            detail=where,
            hint="give a list; clear() removes all elements" if values is None else "give a list",
        )
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        try:
            return to_values(values, element_type)
        except SerializationError as error:
            raise error.at(where) from None
    return list(values)


def entries_of(entries: Any, where: str) -> list[tuple[Any, Any]]:
    """The entries that a call of a map state was given, as a new list; ``where`` names the state for errors."""
    if not isinstance(entries, Mapping):
        raise SerializationTypeError(
            f"put_all does not take a {type(entries).__name__}",
            code="SERIALIZATION.NULL" if entries is None else None,
            detail=where,
            hint="give a dict",
        )
    return list(entries.items())


def _plain(value: Any) -> Any:
    """Convert numpy's bytes and datetimes to Python's; serializers take everything else as it is."""
    if isinstance(value, np.datetime64):
        if np.isnat(value):
            return None
        rounded = value.astype("datetime64[us]")
        if rounded != value:
            raise SerializationError(
                "a datetime64 is not a whole number of microseconds", hint="round it, or store it as LONG"
            )
        return value.item() if np.datetime_data(value.dtype)[0] in ("D", "W", "M", "Y") else rounded.item()
    return bytes(value) if isinstance(value, np.bytes_) else value


def from_arrow(column: pa.Array, declared: Type) -> list[Any]:
    """The values of a column that `to_arrow` has made, objects included; O(n)."""
    convert = _from_arrow(declared, True) or _same
    return [None if value is None else convert(value) for value in column.to_pylist()]


def has_objects(declared: Type) -> bool:
    """Return True if values of a type are, or hold, objects of PICKLE or of a user's serializer."""
    return declared.layout.family == "object" or any(map(has_objects, declared.parts))


def _from_arrow(declared: Type, deserializes: bool = False) -> Convert | None:
    """The conversion from ``as_py``'s result to the serializer's input; None if they are the same.

    Bytes of PICKLE and of a user's serializer count as values themselves, unless ``deserializes`` is true.
    """
    if deserializes and declared.layout.family == "object":
        return serializer_for(declared).deserialize
    if isinstance(declared, TupleType):
        parts = [_from_arrow(part, deserializes) for part in declared.types]

        def tuple_of(value: Any) -> Any:
            if not isinstance(value, dict) or len(value) != len(parts):
                return value  # the serializer names the error
            fields = zip(value.values(), parts, strict=True)
            return tuple(v if v is None or part is None else part(v) for v, part in fields)

        return tuple_of
    if isinstance(declared, RowType):
        named = {
            name: _from_arrow(part, deserializes)
            for name, part in zip(declared.names, declared.types, strict=True)
        }
        if not any(named.values()):
            return None

        def row_of(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            result = {}
            for name, field in value.items():
                convert = named.get(name)
                result[name] = field if field is None or convert is None else convert(field)
            return result

        return row_of
    if isinstance(declared, ListType):
        element = _from_arrow(declared.element, deserializes)
        if element is None:
            return None

        def list_of(values: Any) -> Any:
            if not isinstance(values, list):
                return values
            return [v if v is None else element(v) for v in values]

        return list_of
    if isinstance(declared, MapType):
        item = _from_arrow(declared.value, deserializes)

        def map_of(pairs: Any) -> Any:
            if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
                return pairs
            keys = [_hashable(key, declared.key) for key, _ in pairs]
            values = [v if v is None or item is None else item(v) for _, v in pairs]
            try:
                return dict(zip(keys, values, strict=True))
            except TypeError:  # lists as keys
                return pairs

        return map_of
    return None


def _hashable(key: Any, declared: Type) -> Any:
    """A map key from ``as_py``'s result: records, also within records, come as dicts."""
    if not isinstance(key, dict) or not isinstance(declared, (TupleType, RowType)):
        return key
    fields = list(key.values())
    if isinstance(declared, RowType) and set(key) == set(declared.names):
        fields = [key[name] for name in declared.names]
    if len(fields) != len(declared.types):
        return tuple(fields)  # the serializer names the error
    return tuple(map(_hashable, fields, declared.types))


def to_arrow(values: Sequence[Any], declared: Type | None) -> pa.Array:
    """The Arrow array of values, of the declared type's `arrow`; for None, of the type that Arrow infers. O(n).

    Objects of PICKLE and of a user's serializer appear as their serialised bytes.
    """
    if declared is None:
        try:
            return pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise usage.column(
                "Arrow finds no type for these results",
                detail=type(error).__name__,
                hint="set result_type on the AggregateFunction, for example result_type = 'bigint'",
            ) from None
    array = to_chunks(values, declared)
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def to_chunks(values: Sequence[Any], declared: Type) -> pa.Array | pa.ChunkedArray:
    """The same, in several chunks if one cannot hold all: an array has at most 2 GiB of texts or bytes."""
    shown = _to_arrow(declared)
    if shown is not None:
        values = [None if value is None else shown(value) for value in values]
    if not _has_map(declared.arrow):
        return pa.array(values, declared.arrow)
    # Arrow ends the process, instead of beginning another chunk, where a map has more.
    parts = [values[at : at + _ROWS_OF_MAPS] for at in range(0, len(values), _ROWS_OF_MAPS)]
    return pa.chunked_array([pa.array(part, declared.arrow) for part in parts], declared.arrow)


def _has_map(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) or any(_has_map(kind.field(at).type) for at in range(kind.num_fields))


def _to_arrow(declared: Type) -> Convert | None:
    """The conversion from a value as state returns it to Arrow's input; None if they are the same."""
    if isinstance(declared, (TupleType, RowType)):
        is_row = isinstance(declared, RowType)
        names = declared.names if isinstance(declared, RowType) else [f.name for f in declared.arrow]
        read: Convert = record_reader(declared.names) if isinstance(declared, RowType) else _same
        parts = [_to_arrow(part) for part in declared.types]

        def struct_of(value: Any) -> Any:
            fields = read(value)
            if fields is None and is_row:
                return value
            return {
                name: field if field is None or part is None else part(field)
                for name, part, field in zip(names, parts, fields, strict=True)
            }

        return struct_of
    if isinstance(declared, ListType):
        element = _to_arrow(declared.element)
        return None if element is None else (lambda values: [v if v is None else element(v) for v in values])
    if isinstance(declared, MapType):
        key, item = _to_arrow(declared.key) or _same, _to_arrow(declared.value) or _same
        return lambda entries: [(key(k), v if v is None else item(v)) for k, v in entries.items()]
    if declared.layout.family == "object":
        return serializer_for(declared).serialize
    # Arrow takes no times of numpy among Python's own.
    layout = declared.layout
    if layout.family != "time":
        return None
    return lambda value: layout.unpack(layout.pack(value)) if isinstance(value, np.datetime64) else value


def _same(value: Any) -> Any:
    return value


def check_values(values: list[Any], declared: Type | None, nullable: bool) -> None:
    """Raise, naming the position, for the first value that the type does not take; O(n)."""
    serializer = None if declared is None else serializer_for(declared)
    for position, value in enumerate(values):
        if value is None:
            if nullable:
                continue
            raise SerializationTypeError(
                "a value is None", code="SERIALIZATION.NULL", detail=f"position {position}"
            )
        if serializer is None:
            continue
        try:
            serializer.serialize(value)
        except SerializationError as error:
            raise error.at(f"position {position}") from None
        except OverflowError as error:
            raise OverflowError(f"{error}, at position {position}") from None


def check_lengths(*columns: Any) -> None:
    """Raise unless all columns have the same number of rows."""
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise usage.column(
            "the columns of a batch have different lengths",
            detail=" and ".join(map(str, lengths)),
            hint="give one value for each key",
        )
