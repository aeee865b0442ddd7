"""Operator state as it is held: values to stored bytes, and back.

>>> from statebackend.types import LONG
>>> elements = ElementBytes(LONG)
>>> elements.of(1), elements.value(elements.of(1))
(b'\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00', 1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from statebackend.keys import canonical_list, key_encoder
from statebackend.types import Type
from statebackend.types.serializers import serializer_for

__all__ = ["CanonicalKeys", "ElementBytes"]


class ElementBytes:
    """Converts values of a type by its compiled codec, and by the serializer what only that can judge.

    >>> from statebackend.types import DATE
    >>> ElementBytes(DATE).of("today")
    Traceback (most recent call last):
    statebackend.errors.SerializationTypeError: DATE does not take a value of type str [SERIALIZATION.TYPE]
    """

    def __init__(self, declared: Type) -> None:
        # Importing the library loads nothing compiled.
        from statebackend.columns.codec_choice import type_codec

        self._type = declared
        self._serialize = serializer_for(declared).serialize
        self._deserialize = serializer_for(declared).deserialize
        codec = type_codec(declared)
        self._encode: Callable[[Any], bytes | None] | None = codec.encode if codec.is_compiled else None
        self._decode: Callable[[bytes], Any] = codec.decode if codec.is_compiled else self._deserialize

    def of(self, value: Any) -> bytes:
        """The bytes of a value. O(bytes). Errors are those of the serializer."""
        stored = None if self._encode is None else self._encode(value)
        return self._serialize(value) if stored is None else stored

    def of_column(self, column: pa.Array) -> list[bytes] | None:
        """The bytes of all values of a column without nulls; None if each must be looked at. O(bytes).

        >>> from statebackend.types import TUPLE, STRING
        >>> ElementBytes(TUPLE(STRING)).of_column(pa.array([{"x": "a"}]))
        [b'\\x00\\x01\\x00\\x00\\x00a']
        """
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
    """Converts keys of a type by its compiled codec, and by the encoder what only that can judge.

    >>> from statebackend.types import DATE
    >>> keys = CanonicalKeys(DATE)
    >>> keys.of(keys.key(7))
    7
    """

    def __init__(self, declared: Type) -> None:
        from statebackend.columns.codec_choice import type_codec

        self.encoder = key_encoder(declared)
        codec = type_codec(declared)
        self._encode: Callable[[Any], Any] | None = codec.encode_key if codec.is_compiled else None
        self._decode: Callable[[Any], Any] = codec.decode_key if codec.is_compiled else self.encoder.decode

    def of(self, key: Any) -> Any:
        """The canonical form of a key. O(bytes). Errors are those of the encoder."""
        canonical = None if self._encode is None else self._encode(key)
        return self.encoder.encode(key) if canonical is None else canonical

    def key(self, canonical: Any) -> Any:
        """The key of a canonical form. O(bytes)."""
        try:
            return self._decode(canonical)
        except ValueError:
            return self.encoder.decode(canonical)
