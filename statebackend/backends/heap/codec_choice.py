"""The form in which the compiled core stores each type of value and key.

| types | stored as |
|---|---|
| LONG INT SHORT BYTE DOUBLE FLOAT BOOL | themselves, in the entry |
| DATE TIMESTAMP TIMESTAMP_NTZ DECIMAL, short TUPLE and ROW of fixed width | serialised, in the entry |
| STRING BYTES, and every other declared type | serialised, in the arena |
| PICKLE and a user's own serializer | a reference |

>>> from statebackend.types import of
>>> value_codec(of("bigint"), "state 's'").layout, value_codec(of("date"), "state 's'").layout
('long', 4)
>>> value_codec(of("array<int>"), "state 's'").layout, value_codec(PICKLE, "state 's'").layout
('bytes', 'object')
"""

from __future__ import annotations

from statebackend._core.codecs.codecs import WIDEST_IN_ENTRY, KeyCodec, ValueCodec
from statebackend.keys import key_encoder
from statebackend.types import PICKLE, CustomType, Type
from statebackend.types.serializers import serializer_for

__all__ = ["holds_references", "key_codec", "value_codec"]

_OWN_FORMS = ("LONG", "INT", "SHORT", "BYTE", "DOUBLE", "FLOAT", "BOOL", "STRING", "BYTES")
_INTEGER_BITS = {"LONG": 64, "INT": 32, "SHORT": 16, "BYTE": 8}


def holds_references(declared: Type) -> bool:
    """Return True if values of a type are kept as Python objects.

    >>> from statebackend.types import of
    >>> holds_references(PICKLE), holds_references(of(list[int]))
    (True, False)
    """
    return declared == PICKLE or isinstance(declared, CustomType)


def value_form(declared: Type) -> str | int:
    """The form of a type, as `ValueCodec` takes it.

    >>> from statebackend.types import of
    >>> value_form(of("string")), value_form(of("struct<a:bigint,b:int>")), value_form(of("map<int,int>"))
    ('string', 13, 'serialized')
    """
    if holds_references(declared):
        return "object"
    if declared.name in _OWN_FORMS:
        return declared.name.lower()
    width = serializer_for(declared).fixed_width
    return "serialized" if width is None or not 0 < width <= WIDEST_IN_ENTRY else width


def value_codec(declared: Type, where: str) -> ValueCodec:
    """The codec of values of a type. O(fields). Errors name the state by ``where``.

    >>> from statebackend.types import of
    >>> value_codec(of("double"), "state 's'").width
    8
    """
    serializer = serializer_for(declared)
    copy = serializer.copy if holds_references(declared) and not serializer.is_immutable else None
    return ValueCodec(value_form(declared), serializer, where, copy)


def key_codec(declared: Type) -> KeyCodec:
    """The codec of keys, or map keys, of a type.

    >>> from statebackend.types import of
    >>> key_codec(of("string")).is_int, key_codec(of("timestamp")).is_int
    (False, True)
    """
    name = declared.name
    form: str | int = "encoded"
    if name in _INTEGER_BITS:
        form = _INTEGER_BITS[name]
    elif name in ("STRING", "BYTES"):
        form = name.lower()
    return KeyCodec(form, key_encoder(declared))
