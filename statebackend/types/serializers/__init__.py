"""Converts values of every declared type to bytes and back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.types import (
    Compatibility,
    CustomType,
    ListType,
    MapType,
    RowType,
    Serializer,
    TupleType,
    Type,
    of,
)
from statebackend.types.serializers.migration import arrow_migration, compatibility
from statebackend.types.serializers.migration import describe as describe
from statebackend.types.serializers.nested import ListSerializer, MapSerializer, RecordSerializer
from statebackend.types.serializers.scalars import TypeSerializer, scalar_serializer

__all__ = [
    "Compatibility",
    "Serializer",
    "TypeSerializer",
    "arrow_migration",
    "compatibility",
    "serializer_for",
]


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
    """The serializer of a type, given in any notation; O(1) after the first call for a type.

    >>> serializer_for(int).fixed_width, serializer_for(str).fixed_width
    (8, None)
    """
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
        raise SerializationTypeError(f"there is no serializer for {declared_type.name}")
    return serializer
