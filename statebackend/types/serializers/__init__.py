"""Converts values of every declared type to bytes and back; scalar types are in `scalars`.

Layouts of nested types, with *slot* as `TypeSerializer` explains it, and bitmaps with bit ``i % 8`` of byte ``i // 8``
set where part ``i`` is null:

* TUPLE, ROW: bitmap over the fields, one slot per field (of fixed width if all fields are)
* LIST: count (u32, little-endian), bitmap over the elements, one slot per element
* MAP: count (u32, little-endian), bitmap over the values, then per entry the key's slot and the value's slot

>>> serializer_for("struct<a:tinyint,b:tinyint>").serialize((7, None)).hex(" ")
'02 07 00'
>>> serializer_for("array<string>").serialize(["a", None]).hex(" ")
'02 00 00 00 02 01 00 00 00 61 00 00 00 00'
"""

from __future__ import annotations

import collections.abc
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.types import (
    Compatibility as Compatibility,
    CustomType,
    ListType,
    MapType,
    RowType,
    Serializer as Serializer,
    TupleType,
    Type,
    convert,
    of,
    record_form,
)
from statebackend.types.serializers.migration import (
    arrow_migration as arrow_migration,
    compatibility as compatibility,
    describe as describe,
)
from statebackend.types.serializers.scalars import (
    TypeSerializer as TypeSerializer,
    cut_short,
    scalar_serializer,
)


class CustomSerializer(TypeSerializer):
    """A user's own serializer in the role of a declared type's; it checks the results of the user's code."""

    def __init__(self, declared_type: CustomType) -> None:
        super().__init__(declared_type)
        self._inner: Serializer = declared_type.serializer

    def serialize(self, value: Any) -> bytes:
        data = self._inner.serialize(value)
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise SerializationTypeError(
                "serialize() did not return bytes",
                detail=f"class {type(self._inner).__qualname__}, type {type(data).__name__}",
            )
        if self.fixed_width is not None and len(data) != self.fixed_width:
            raise SerializationError(
                "serialize() did not return fixed_width bytes",
                code="SERIALIZATION.LENGTH",
                detail=f"class {type(self._inner).__qualname__}: {len(data)}, not {self.fixed_width}",
            )
        return bytes(data)

    def deserialize(self, data: bytes) -> Any:
        return self._inner.deserialize(bytes(data))

    def copy(self, value: Any) -> Any:
        return self._inner.copy(value)

    def compatibility(self, old_config: dict[str, Any]) -> Compatibility:
        old = old_config.get("serializer") if old_config.get("type") == "custom" else None
        return Compatibility.INCOMPATIBLE if old is None else self._inner.compatibility(old)

    def migration(self, old_config: dict[str, Any]) -> Any:
        if self.compatibility(old_config) is Compatibility.INCOMPATIBLE:
            return super().migration(old_config)
        return self._inner.migration(old_config["serializer"])


def serializer_for(spec: Any) -> TypeSerializer:
    """The serializer of a type, given in any notation; O(1) after the first call for a type."""
    return _build(of(spec), False)


@lru_cache(maxsize=4096)
def _build(declared_type: Type, canonical: bool) -> TypeSerializer:
    if isinstance(declared_type, (TupleType, RowType)):
        return RecordSerializer(declared_type, [_build(field, canonical) for field in declared_type.types])
    if isinstance(declared_type, ListType):
        return ListSerializer(declared_type, _build(declared_type.element, canonical))
    if isinstance(declared_type, MapType):
        return MapSerializer(
            declared_type, _build(declared_type.key, True), _build(declared_type.value, canonical)
        )
    if isinstance(declared_type, CustomType):
        return CustomSerializer(declared_type)
    serializer = scalar_serializer(declared_type, canonical)
    if serializer is None:
        raise SerializationTypeError(f"no serializer for {declared_type.name}")
    return serializer


_COUNT = struct.Struct("<I")


def _bitmap(values: Sequence[Any]) -> bytes:
    bits = 0
    for i, value in enumerate(values):
        if value is None:
            bits |= 1 << i
    return bits.to_bytes((len(values) + 7) // 8, "little")


def _read_head(data: bytes, owner: TypeSerializer) -> tuple[int, int, int]:
    """The count, the null bits and the start of the slots; checks that the bytes can hold that many."""
    if len(data) < 4:
        raise cut_short(owner.declared_type)
    (count,) = _COUNT.unpack_from(data)
    at = 4 + (count + 7) // 8
    if at > len(data):
        raise cut_short(owner.declared_type)
    return count, int.from_bytes(data[4:at], "little"), at


class RecordSerializer(TypeSerializer):
    """TUPLE and ROW: the fields' slots behind a null bitmap."""

    def __init__(self, declared_type: TupleType | RowType, parts: Sequence[TypeSerializer]) -> None:
        super().__init__(declared_type)
        self._parts = tuple(parts)
        self._names, self._fields, self._build = record_form(declared_type, declared_type.name)

    def serialize(self, value: Any) -> bytes:
        fields = self._fields(value)
        out = bytearray(_bitmap(fields))
        for name, part, field in zip(self._names, self._parts, fields, strict=True):
            part.write_part(field, out, "field", name)
        return bytes(out)

    def deserialize(self, data: bytes) -> Any:
        data = bytes(data)
        at = (len(self._parts) + 7) // 8
        if len(data) < at:
            raise cut_short(self.declared_type)
        nulls = int.from_bytes(data[:at], "little")
        fields = []
        for i, part in enumerate(self._parts):
            slot, at = part.read_slot(data, at)
            fields.append(None if nulls >> i & 1 else part.deserialize(slot))
        if at != len(data):
            raise cut_short(self.declared_type)
        return self._build(fields)

    def copy(self, value: Any) -> Any:
        if self.is_immutable and isinstance(value, tuple):
            return value
        pairs = zip(self._parts, self._fields(value), strict=True)
        return self._build([None if field is None else part.copy(field) for part, field in pairs])


class ListSerializer(TypeSerializer):
    """LIST: takes lists, tuples, other sequences and numpy arrays, and returns lists."""

    def __init__(self, declared_type: ListType, element: TypeSerializer) -> None:
        super().__init__(declared_type)
        self._element = element

    def _elements(self, value: Any) -> Sequence[Any]:
        if isinstance(value, (list, tuple)):
            return value
        if isinstance(value, (str, bytes, bytearray, memoryview)):
            convert.refuse("LIST", value)
        if not isinstance(value, (collections.abc.Sequence, np.ndarray)):
            convert.refuse("LIST", value)
        return list(value)

    def serialize(self, value: Any) -> bytes:
        elements = self._elements(value)
        out = bytearray(_COUNT.pack(len(elements)))
        out += _bitmap(elements)
        for i, element in enumerate(elements):
            self._element.write_part(element, out, "element", i)
        return bytes(out)

    def deserialize(self, data: bytes) -> Any:
        data = bytes(data)
        count, nulls, at = _read_head(data, self)
        elements = []
        for i in range(count):
            slot, at = self._element.read_slot(data, at)
            elements.append(None if nulls >> i & 1 else self._element.deserialize(slot))
        if at != len(data):
            raise cut_short(self.declared_type)
        return elements

    def copy(self, value: Any) -> Any:
        copy = self._element.copy
        return [None if element is None else copy(element) for element in self._elements(value)]


class MapSerializer(TypeSerializer):
    """MAP: takes mappings and returns dicts, in the same order; keys have one zero and one NaN."""

    def __init__(self, declared_type: MapType, key: TypeSerializer, value: TypeSerializer) -> None:
        super().__init__(declared_type)
        self._key = key
        self._value = value

    def _items(self, value: Any) -> Iterable[tuple[Any, Any]]:
        if not isinstance(value, collections.abc.Mapping):
            convert.refuse("MAP", value)
        return value.items()

    def serialize(self, value: Any) -> bytes:
        slots: dict[bytes, Any] = {}  # two NaNs are two keys of a dict, but one key here: the last one wins
        for i, (key, item) in enumerate(self._items(value)):
            slot = bytearray()
            if key is None:
                raise SerializationTypeError(
                    "a MAP key is None", code="SERIALIZATION.NULL_KEY", detail=f"entry {i}"
                )
            self._key.write_part(key, slot, "key of entry", i)
            slots[bytes(slot)] = item
        items = list(slots.values())
        out = bytearray(_COUNT.pack(len(items)))
        out += _bitmap(items)
        for i, (key_slot, item) in enumerate(slots.items()):
            out += key_slot
            self._value.write_part(item, out, "value of entry", i)
        return bytes(out)

    def deserialize(self, data: bytes) -> Any:
        data = bytes(data)
        count, nulls, at = _read_head(data, self)
        result = {}
        for i in range(count):
            slot, at = self._key.read_slot(data, at)
            key = self._key.deserialize(slot)
            slot, at = self._value.read_slot(data, at)
            result[key] = None if nulls >> i & 1 else self._value.deserialize(slot)
        if at != len(data):
            raise cut_short(self.declared_type)
        return result

    def copy(self, value: Any) -> Any:
        copy = self._value.copy
        return {key: None if item is None else copy(item) for key, item in self._items(value)}
