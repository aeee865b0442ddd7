"""Serializers of the types without parts: little-endian numbers, UTF-8, raw bytes, pickles."""

from __future__ import annotations

import copy
import math
import pickle
import struct
from collections.abc import Callable
from typing import Any

from statebackend.errors import SerializationError, StateMigrationError
from statebackend.types import Compatibility, Serializer, Type, convert, from_config
from statebackend.types.serializers import migration as rules

_LENGTH = struct.Struct("<I")
_NAN = math.nan


class TypeSerializer(Serializer):
    """A serializer of a declared type; its configuration is the type's.

    Inside lists, maps, tuples and rows a value takes a *slot*: its bytes if they have a fixed width, otherwise their
    length (u32, little-endian) and the bytes. A null's slot is zeros, or a zero length; a bitmap marks it as null.
    """

    def __init__(self, declared_type: Type) -> None:
        self.declared_type = declared_type
        self.is_immutable = declared_type.is_immutable
        self.fixed_width = declared_type.fixed_width

    def __repr__(self) -> str:
        return f"serializer_for({self.declared_type!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TypeSerializer) and self.declared_type == other.declared_type

    def __hash__(self) -> int:
        return hash((TypeSerializer, self.declared_type))

    def __reduce__(self) -> tuple[Any, ...]:
        from statebackend.types.serializers import serializer_for

        return serializer_for, (self.declared_type,)

    def config(self) -> dict[str, Any]:
        return self.declared_type.config()

    def compatibility(self, old_config: dict[str, Any]) -> Compatibility:
        return rules.compatibility(old_config, self.declared_type)

    def migration(self, old_config: dict[str, Any]) -> Callable[[bytes], bytes]:
        from statebackend.types.serializers import serializer_for

        answer = self.compatibility(old_config)
        if answer is Compatibility.AS_IS:
            return bytes
        if answer is Compatibility.INCOMPATIBLE:
            raise StateMigrationError(
                f"stored values cannot be read as {self.declared_type.ddl()}",
                code="STATE_MIGRATION.INCOMPATIBLE",
                detail=f"stored as {rules.describe(old_config)}",
                hint="integers and floats can be widened, fields of a ROW added, removed and reordered",
            )
        old_type = from_config(old_config)
        old = serializer_for(old_type)
        convert_value = rules.value_migration(old_type, self.declared_type)
        return lambda data: self.serialize(convert_value(old.deserialize(data)))

    def write_part(self, value: Any, out: bytearray, what: str, which: int | str) -> None:
        """Append the slot of a value or a null; an error names the part."""
        if value is None:
            out += bytes(4 if self.fixed_width is None else self.fixed_width)
            return
        try:
            data = self.serialize(value)
            if self.fixed_width is None:
                if len(data) > 0xFFFF_FFFF:
                    raise SerializationError(
                        "a nested value is longer than 4 GB", detail=f"{len(data)} bytes"
                    )
                out += _LENGTH.pack(len(data))
        except SerializationError as error:
            raise error.at(f"{what} {which!r}") from None
        out += data

    def read_slot(self, data: bytes, at: int) -> tuple[bytes, int]:
        """The bytes of the slot at ``at``, and the position of the next one."""
        width = self.fixed_width
        if width is None:
            if at + 4 > len(data):
                raise cut_short(self.declared_type)
            width = _LENGTH.unpack_from(data, at)[0]
            at += 4
        end = at + width
        if end > len(data):
            raise cut_short(self.declared_type)
        return data[at:end], end


def cut_short(declared_type: Type) -> SerializationError:
    """The error for bytes that end inside a value."""
    return SerializationError(
        f"the bytes of a {declared_type.name} value have the wrong length",
        code="SERIALIZATION.LENGTH",
        hint="they were written for another type, or are damaged",
    )


class _FixedSerializer(TypeSerializer):
    """Values that are stored as numbers."""

    def __init__(self, declared_type: Type, canonical: bool) -> None:
        super().__init__(declared_type)
        layout = declared_type.layout
        pack = layout.pack
        self._unpack = None if layout.family in ("integer", "float") else layout.unpack
        self._struct = struct.Struct(_STRUCTS[layout.dtype])
        is_changed = canonical and layout.family == "float"
        self._pack = (lambda value: _canonical(pack(value))) if is_changed else pack

    def serialize(self, value: Any) -> bytes:
        return self._struct.pack(self._pack(value))

    def deserialize(self, data: bytes) -> Any:
        try:
            (number,) = self._struct.unpack(data)
        except struct.error:
            raise cut_short(self.declared_type) from None
        return number if self._unpack is None else self._unpack(number)


class _WideDecimalSerializer(TypeSerializer):
    """DECIMAL of more than 18 digits: the unscaled value as 16 bytes, little-endian two's complement."""

    def serialize(self, value: Any) -> bytes:
        number: int = self.declared_type.layout.pack(value)
        return number.to_bytes(16, "little", signed=True)

    def deserialize(self, data: bytes) -> Any:
        if len(data) != 16:
            raise cut_short(self.declared_type)
        return self.declared_type.layout.unpack(int.from_bytes(data, "little", signed=True))


class _RunSerializer(TypeSerializer):
    """STRING and BYTES: the bytes themselves."""

    def serialize(self, value: Any) -> bytes:
        data: bytes = self.declared_type.layout.pack(value)
        return data

    def deserialize(self, data: bytes) -> Any:
        return self.declared_type.layout.unpack(data)

    def copy(self, value: Any) -> Any:
        return bytes(value) if isinstance(value, (bytearray, memoryview)) else value


class _PickleSerializer(TypeSerializer):
    """Any Python object, by pickle protocol 5; used only for a state that declares PICKLE."""

    def serialize(self, value: Any) -> bytes:
        if value is None:
            convert.refuse("PICKLE", value)
        try:
            return pickle.dumps(value, protocol=5)
        except RecursionError:
            raise _too_deep(value, "pickled") from None  # its traceback has a thousand lines
        except Exception as error:  # pickling runs the object's own code, which may raise anything
            raise SerializationError(
                f"an object of type {type(value).__name__} cannot be pickled",
                code="SERIALIZATION.PICKLE",
                detail=type(error).__name__,
                hint="define its class at module level, or __reduce__",
            ) from error

    def deserialize(self, data: bytes) -> Any:
        try:
            return pickle.loads(data)
        except Exception as error:
            raise SerializationError(
                "a pickled value cannot be read",
                code="SERIALIZATION.PICKLE",
                detail=type(error).__name__,
                hint="its class must be importable under the name that it had when it was written",
            ) from error

    def copy(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value)
        except RecursionError:
            raise _too_deep(value, "copied") from None


def _too_deep(value: Any, done: str) -> SerializationError:
    return SerializationError(
        f"an object of type {type(value).__name__} is nested too deeply to be {done}",
        code="SERIALIZATION.PICKLE",
        hint="store its parts one by one, in a list or map state, or raise sys.setrecursionlimit()",
    )


def _canonical(number: float) -> float:
    # -0.0 + 0.0 is 0.0, and every NaN becomes math.nan.
    return number + 0.0 if number == number else _NAN


def scalar_serializer(declared_type: Type, canonical: bool = False) -> TypeSerializer | None:
    """The serializer of a type without parts, or None; ``canonical`` is for keys: one zero and one NaN."""
    layout = declared_type.layout
    if layout.dtype:
        return _FixedSerializer(declared_type, canonical)
    made: dict[str, Callable[[Type], TypeSerializer]]
    made = {"decimal": _WideDecimalSerializer, "bytes": _RunSerializer, "object": _PickleSerializer}
    return made[layout.family](declared_type) if layout.family in made else None


#: How `struct` names what numpy names so.
_STRUCTS = {"<i8": "<q", "<i4": "<i", "<i2": "<h", "<i1": "<b", "<f8": "<d", "<f4": "<f", "?": "<B"}
