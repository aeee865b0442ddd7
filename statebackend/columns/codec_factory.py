"""The form in which the compiled core stores each type of value and key.

| types | stored as |
|---|---|
| integers, floats, BOOL | themselves, in the entry |
| dates, times, DECIMAL, short TUPLE and ROW of fixed width | serialised, in the entry |
| STRING BYTES, and every other declared type | serialised, in the arena |
| PICKLE and a user's own serializer | a reference |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from statebackend._core.codecs.key_value_codecs import WIDEST_IN_ENTRY, KeyCodec, ValueCodec
from statebackend._core.codecs.type_codec import TypeCodec
from statebackend._core.codecs.value_bytes import ValueBytes
from statebackend.errors import SerializationError
from statebackend.keys import key_encoder
from statebackend.types import DecimalType, RowType, Type, record_reader, row_class
from statebackend.types.serializers import serializer_for


def holds_references(declared: Type) -> bool:
    """Return True if values of a type are kept as Python objects."""
    return declared.layout.family == "object"


def value_form(declared: Type) -> str | int:
    """The form of a type, as `ValueCodec` takes it."""
    if holds_references(declared):
        return "object"
    if declared.layout.is_number or declared.layout.family == "bytes":
        return declared.name.lower()
    width = serializer_for(declared).fixed_width
    return "serialized" if width is None or not 0 < width <= WIDEST_IN_ENTRY else width


def value_codec(declared: Type, where: str) -> ValueCodec:
    """The codec of values of a type. O(fields). Errors name the state by ``where``."""
    serializer = serializer_for(declared)
    has_copies = holds_references(declared) and not serializer.is_immutable
    copy = _named_copy(serializer.copy, where) if has_copies else None
    form = value_form(declared)
    typed = type_codec(declared) if form == "serialized" or isinstance(form, int) else None
    return ValueCodec(form, serializer, where, copy, typed)


def _named_copy(copy: Callable[[Any], Any], where: str) -> Callable[[Any], Any]:
    def named(value: Any) -> Any:
        try:
            return copy(value)
        except SerializationError as error:
            raise error.at(where) from None

    return named


def value_bytes(declared: Type, where: str) -> ValueBytes:
    """The compiled conversion of values of a type; errors name the state by ``where``."""
    return ValueBytes(declared, type_codec(declared), serializer_for(declared), where)


def type_codec(declared: Type) -> TypeCodec:
    """The compiled codec of a type's serialised form. O(1) after the first call for a type."""
    return _type_codec(declared, False)


@lru_cache(maxsize=4096)
def _type_codec(declared: Type, is_key: bool) -> TypeCodec:
    serializer = serializer_for(declared)
    # Keys of maps have one zero and one NaN, and so has whatever is in them.
    of_key = [is_key or (declared.name == "MAP" and at == 0) for at in range(len(declared.parts))]
    parts = tuple(map(_type_codec, declared.parts, of_key))
    if isinstance(declared, RowType):
        return TypeCodec(
            "ROW",
            serializer,
            parts,
            names=declared.names,
            record_class=declared.record_class or row_class(declared.names),
            reader=record_reader(declared.names),
        )
    if isinstance(declared, DecimalType):
        return TypeCodec("DECIMAL", serializer, precision=declared.precision, scale=declared.scale)
    return TypeCodec(declared.name, serializer, parts, is_key=is_key)


def key_codec(declared: Type) -> KeyCodec:
    """The codec of keys, or map keys, of a type."""
    layout = declared.layout
    form: str | int = "encoded"
    if layout.family == "integer":
        form = 8 * (layout.width or 0)
    elif layout.family == "bytes":
        form = declared.name.lower()
    return KeyCodec(form, key_encoder(declared), type_codec(declared) if form == "encoded" else None)
