"""Operator state as files hold it: stored bytes to columns of the declared types, and back.

>>> column = to_column([b"\\x01\\0\\0\\0", None], {"type": "int"})
>>> column.type, column.to_pylist()
(DataType(int32), [1, None])
>>> to_bytes(column, {"type": "int"})
[b'\\x01\\x00\\x00\\x00', None]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from statebackend.errors import SerializationError
from statebackend.state import to_arrow, to_values
from statebackend.types import BYTES, PICKLE, ListType, MapType, RowType, TupleType, Type, from_config
from statebackend.types.serializers import serializer_for

__all__ = ["column_type", "to_bytes", "to_column"]


def column_type(config: Any) -> Type:
    """The column type in files for values stored under ``config``.

    Pickles are BYTES there, also within other types, so that nothing is executed to write or read them. A value that
    involves a user's own serializer is BYTES as a whole.

    >>> column_type({"type": "row", "fields": [["a", {"type": "long"}], ["b", {"type": "pickle"}]]})
    ROW(a=LONG, b=BYTES)
    >>> column_type({"type": "list", "element": {"type": "custom", "serializer": {}}})
    BYTES
    """
    try:
        return _without_pickles(from_config(config))
    except SerializationError as error:
        if error.code == "SERIALIZATION.CUSTOM_CONFIG":
            return BYTES
        raise


def _without_pickles(declared: Type) -> Type:
    if isinstance(declared, ListType):
        return ListType(_without_pickles(declared.element))
    if isinstance(declared, MapType):
        return MapType(declared.key, _without_pickles(declared.value))
    if isinstance(declared, TupleType):
        return TupleType(tuple(map(_without_pickles, declared.types)))
    if isinstance(declared, RowType):
        return RowType(declared.names, tuple(map(_without_pickles, declared.types)))
    return BYTES if declared == PICKLE else declared


def to_column(data: Sequence[bytes | None], config: Any) -> pa.Array:
    """The column of stored values, with null for None. O(n).

    >>> to_column([b"a"], {"type": "pickle"}).type
    DataType(binary)
    """
    declared = column_type(config)
    # A pickle and its bytes have the same layout within other types.
    read = serializer_for(declared).deserialize
    return to_arrow([None if each is None else read(each) for each in data], declared)


def to_bytes(column: pa.Array, config: Any) -> list[bytes | None]:
    """The stored values of a column. O(n).

    >>> to_bytes(pa.array(["a", None]), {"type": "string"})
    [b'a', None]
    """
    declared = column_type(config)
    write = serializer_for(declared).serialize
    return [None if value is None else write(value) for value in to_values(column, declared)]
