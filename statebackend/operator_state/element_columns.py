"""Operator state as it is held, values as stored bytes, and as files hold it: columns of the declared types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError
from statebackend.keys import KeyEncoder, canonical_list, key_encoder, runs_of_list
from statebackend.state import to_arrow, to_values
from statebackend.types import BYTES, PICKLE, ListType, MapType, RowType, TupleType, Type, from_config
from statebackend.types.serializers import serializer_for


def column_type(config: Any) -> Type:
    """The column type in files for values stored under ``config``.

    Pickles are BYTES there, also within other types, so that nothing is executed to write or read them. A value that
    involves a user's own serializer is BYTES as a whole.
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
    """The column of stored values, with null for None. O(bytes); makes no Python object for a value."""
    from statebackend.columns.nested_columns import arrow_of_stored

    # A pickle and its bytes have the same layout within other types.
    declared = column_type(config)
    valid = None
    filled: list[Any] = list(data)
    if None in filled:
        valid = np.fromiter((each is not None for each in data), bool, count=len(data))
        filled = [b"" if each is None else each for each in data]
    column = arrow_of_stored(*runs_of_list(filled), valid, declared, as_python=True)
    if column is not None:
        return column
    read = serializer_for(declared).deserialize
    return to_arrow([None if each is None else read(each) for each in data], declared)


def to_bytes(column: pa.Array, config: Any) -> list[bytes | None]:
    """The stored values of a column. O(bytes); makes no Python object for a value but its bytes."""
    from statebackend.columns.nested_columns import stored_runs

    declared = column_type(config)
    runs = stored_runs(column, declared, as_python=True)
    if runs is None:
        write = serializer_for(declared).serialize
        return [None if value is None else write(value) for value in to_values(column, declared)]
    found: list[bytes | None] = canonical_list(runs)
    for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)) if column.null_count else ():
        found[row] = None
    return found


def stored_keys(canonical: Sequence[Any], encoder: KeyEncoder) -> list[bytes]:
    """The stored values of keys in their canonical form. O(bytes)."""
    from statebackend.columns.nested_columns import decoded_keys

    keys = list(canonical)
    column = decoded_keys(
        encoder, np.array(keys, dtype=np.int64) if encoder.kind == "int" else runs_of_list(keys)
    )
    stored: list[Any] = to_bytes(column, encoder.declared_type.config())
    return stored


def canonical_keys(stored: Sequence[bytes], encoder: KeyEncoder) -> list[Any]:
    """The canonical forms of stored keys. O(bytes)."""
    from statebackend.columns.nested_columns import encoded_keys

    return canonical_list(encoded_keys(encoder, to_column(stored, encoder.declared_type.config())))


class ElementBytes:
    """Converts values of a type by its compiled codec, and by the serializer what only that can judge."""

    def __init__(self, declared: Type) -> None:
        # Importing the library loads nothing compiled.
        from statebackend.columns.codec_factory import type_codec

        self._type = declared
        self._serialize = serializer_for(declared).serialize
        self._deserialize = serializer_for(declared).deserialize
        codec = type_codec(declared)
        self._encode: Callable[[Any], bytes | None] | None = codec.encode if codec.is_compiled else None
        self._decode: Callable[[bytes], Any] = codec.decode if codec.is_compiled else self._deserialize

    def of(self, value: Any) -> bytes:
        """The bytes of a value. O(bytes). Errors are the serializer's."""
        stored = None if self._encode is None else self._encode(value)
        return self._serialize(value) if stored is None else stored

    def of_column(self, column: pa.Array) -> list[bytes] | None:
        """The bytes of all values of a column without nulls; None if each must be looked at. O(bytes)."""
        from statebackend.columns.nested_columns import stored_runs

        runs = None if column.null_count else stored_runs(column, self._type, as_python=True)
        return None if runs is None else canonical_list(runs)

    def value(self, stored: bytes) -> Any:
        """The value of stored bytes. O(bytes)."""
        try:
            return self._decode(stored)
        except ValueError:
            return self._deserialize(stored)  # which says what is wrong


class CanonicalKeys:
    """Converts keys of a type by its compiled codec, and by the encoder what only that can judge."""

    def __init__(self, declared: Type) -> None:
        from statebackend.columns.codec_factory import type_codec

        self.encoder = key_encoder(declared)
        codec = type_codec(declared)
        self._encode: Callable[[Any], Any] | None = codec.encode_key if codec.is_compiled else None
        self._decode: Callable[[Any], Any] = codec.decode_key if codec.is_compiled else self.encoder.decode

    def of(self, key: Any) -> Any:
        """The canonical form of a key. O(bytes). Errors are the encoder's."""
        canonical = None if self._encode is None else self._encode(key)
        return self.encoder.encode(key) if canonical is None else canonical

    def key(self, canonical: Any) -> Any:
        """The key of a canonical form. O(bytes)."""
        try:
            return self._decode(canonical)
        except ValueError:
            return self.encoder.decode(canonical)
