"""Encoders: convert one key to its canonical form and back, and lead to the batch forms.

The canonical form of a key of kind "int" is a signed 64-bit integer: the value of an integer or BOOL; the
days of DATE; the microseconds of TIMESTAMP and TIMESTAMP_NTZ; the unscaled value of DECIMAL up to 18 digits; the IEEE
bits of DOUBLE and of FLOAT (sign-extended from 32 bits), with one zero and one NaN. The canonical form of kind "bytes"
is the UTF-8 of STRING, the BYTES, or the minimal big-endian two's complement of a longer DECIMAL. For TUPLE and ROW it
is the fields in order: a presence byte, then 8 bytes little-endian (int kinds), or a length (u32, little-endian) and
the bytes, or the fields of a nested composite. Equal keys have equal canonical forms, different ones different.

>>> encoder = key_encoder("struct<user:bigint,item:string>")
>>> encoder.kind, encoder.encode((7, "x")).hex(" ")
('bytes', '01 07 00 00 00 00 00 00 00 01 01 00 00 00 78')
>>> encoder.decode(encoder.encode((7, None)))
Row(user=7, item=None)
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count, repeat
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError, SerializationTypeError, UsageError
from statebackend.keys.columns import (
    ByteRuns,
    arrow_of_byte_runs,
    arrow_of_ints,
    as_columnar,
    byte_runs_of,
    canonical_list,
    checked_runs,
    encode_each,
    ints_of,
    runs_of_list,
    without_views,
)
from statebackend.keys.key_groups import key_group_of, spark_hash
from statebackend.types import DecimalType, RowType, TupleType, Type, of, record_form

_LONG = struct.Struct("<q")
_LENGTH = struct.Struct("<I")
#: A number, its bits, and the bits of the one NaN.
_DOUBLE = (struct.Struct("<d"), struct.Struct("<q"), 0x7FF8_0000_0000_0000)
_SINGLE = (struct.Struct("<f"), struct.Struct("<i"), 0x7FC0_0000)


class KeyEncoder(ABC):
    """Turns keys of one declared type into their canonical form and back; get one from `key_encoder`."""

    #: "int": canonical forms are 64-bit integers; "bytes": they are bytes.
    kind: Literal["int", "bytes"]
    #: How Spark hashes the keys: "int32", "int64", "bytes" or ("struct", (plan, ...)), as `HashPlan` takes it.
    hash_plan: Any

    def __init__(self, declared_type: Type) -> None:
        self.declared_type = declared_type

    def __repr__(self) -> str:
        return f"key_encoder({self.declared_type!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return key_encoder, (self.declared_type,)

    @abstractmethod
    def encode(self, key: Any) -> Any:
        """The canonical form of ``key``, never None; raises for a key that the type does not take."""

    @abstractmethod
    def decode(self, canonical: Any) -> Any:
        """The key that has this canonical form."""

    def decode_each(self, canonical: Iterable[Any]) -> Iterator[Any]:
        """`decode` for each of these canonical forms, lazily."""
        return map(self.decode, canonical)

    def spark_hash(self, canonical: Any) -> int:
        """Spark's ``hash`` of a key given in canonical form, in plain Python."""
        return spark_hash(canonical, self.hash_plan)

    def key_group(self, key: Any, max_parallelism: int) -> int:
        """The key group of a key, in plain Python."""
        return key_group_of(self.spark_hash(self.encode(key)), max_parallelism)

    @abstractmethod
    def encode_many(self, keys: Any) -> Any:
        """Canonical forms of a batch: an Arrow array or chunked array, a numpy array, or a sequence.

        Kind "int" returns a contiguous int64 array. Kind "bytes" returns int64 offsets (n + 1, not always from 0) and
        uint8 data. Where the layout allows, the result shares the memory of ``keys``: do not write to either. O(n). A
        key that the scalar `encode` refuses raises the same error, which names the position.
        """

    @abstractmethod
    def decode_many(self, canonical: Any) -> pa.Array:
        """The Arrow array, of the declared type's `arrow`, for a result of `encode_many`; O(n)."""


def _null_key() -> SerializationTypeError:
    return SerializationTypeError(
        "a key is None",
        code="SERIALIZATION.NULL_KEY",
        hint="fields of a composite key may be None, a key may not",
    )


def _unreadable(declared_type: Type) -> SerializationError:
    return SerializationError(
        f"the canonical bytes of a {declared_type.name} key cannot be read", code="SERIALIZATION.LENGTH"
    )


class IntKeyEncoder(KeyEncoder):
    """Keys whose canonical form is a 64-bit integer."""

    kind = "int"

    def __init__(self, declared_type: Type) -> None:
        super().__init__(declared_type)
        layout = declared_type.layout
        self.hash_plan = "int64" if layout.width == 8 else "int32"
        self._to_int: Callable[[Any], int] = layout.pack
        self._from_int = layout.unpack
        if layout.family == "float":
            self._to_int, self._from_int = _float_bits(layout.pack, layout.width)

    def encode(self, key: Any) -> int:
        if key is None:
            raise _null_key()
        return self._to_int(key)

    def decode(self, canonical: int) -> Any:
        return self._from_int(canonical)

    def decode_each(self, canonical: Iterable[int]) -> Iterator[Any]:
        return map(self._from_int, canonical)

    def encode_many(self, keys: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        columnar = as_columnar(keys)
        result = ints_of(columnar, self.declared_type)
        if result is None:
            encoded = encode_each(columnar, self.encode)
            result = np.fromiter(encoded, dtype=np.int64, count=len(encoded))
        return result

    def decode_many(self, canonical: Any) -> pa.Array:
        return arrow_of_ints(np.ascontiguousarray(canonical, dtype=np.int64), self.declared_type)


class BytesKeyEncoder(KeyEncoder):
    """STRING, BYTES and DECIMAL of more than 18 digits."""

    kind = "bytes"
    hash_plan = "bytes"

    def __init__(
        self, declared_type: Type, to_bytes: Callable[[Any], bytes], from_bytes: Callable[[bytes], Any]
    ) -> None:
        super().__init__(declared_type)
        self._to_bytes = to_bytes
        self._from_bytes = from_bytes

    def encode(self, key: Any) -> bytes:
        if key is None:
            raise _null_key()
        return self._to_bytes(key)

    def decode(self, canonical: bytes) -> Any:
        return self._from_bytes(canonical)

    def decode_each(self, canonical: Iterable[bytes]) -> Iterator[Any]:
        return map(self._from_bytes, canonical)

    def encode_many(self, keys: Any) -> ByteRuns:
        columnar = as_columnar(keys)
        result = byte_runs_of(columnar, self.declared_type)
        return runs_of_list(encode_each(columnar, self.encode)) if result is None else result

    def decode_many(self, canonical: ByteRuns) -> pa.Array:
        return arrow_of_byte_runs(*checked_runs(canonical), self.declared_type)


class CompositeKeyEncoder(KeyEncoder):
    """TUPLE and ROW: the fields one after another, each behind a presence byte."""

    kind = "bytes"

    def __init__(self, declared_type: TupleType | RowType, parts: Sequence[KeyEncoder]) -> None:
        super().__init__(declared_type)
        self.parts = tuple(parts)
        self.hash_plan = ("struct", tuple(part.hash_plan for part in self.parts))
        self.names, self._fields, self._build = record_form(declared_type, f"a {declared_type.name} key")

    def encode(self, key: Any) -> bytes:
        if key is None:
            raise _null_key()
        out = bytearray()
        self._write(key, out)
        return bytes(out)

    def _write(self, key: Any, out: bytearray) -> None:
        for name, part, field in zip(self.names, self.parts, self._fields(key), strict=True):
            if field is None:
                out.append(0)
                continue
            out.append(1)
            try:
                if isinstance(part, CompositeKeyEncoder):
                    part._write(field, out)
                    continue
                canonical = part.encode(field)
            except SerializationError as error:
                raise error.at(f"field {name!r}") from None
            out += _field_bytes(part, canonical)

    def decode(self, canonical: bytes) -> Any:
        return self._parsed(bytes(canonical), False)

    def _parsed(self, data: bytes, is_raw: bool) -> Any:
        try:
            key, at = self._parse(data, 0, is_raw)
        except (struct.error, IndexError):
            at = -1
        if at != len(data):
            raise _unreadable(self.declared_type)
        return key

    def _parse(self, data: bytes, at: int, is_raw: bool) -> tuple[Any, int]:
        """A key and the position after it; with ``is_raw``, the list of its fields in canonical form."""
        fields: list[Any] = []
        for part in self.parts:
            present = data[at]
            at += 1
            if present > 1:
                raise IndexError
            if not present:
                fields.append(None)
                continue
            if isinstance(part, CompositeKeyEncoder):
                field, at = part._parse(data, at, is_raw)
                fields.append(field)
                continue
            if part.kind == "int":
                canonical = _LONG.unpack_from(data, at)[0]
                at += 8
            else:
                (length,) = _LENGTH.unpack_from(data, at)
                at += 4
                if at + length > len(data):
                    raise IndexError
                canonical = data[at : at + length]
                at += length
            fields.append(canonical if is_raw else part.decode(canonical))
        return fields if is_raw else self._build(fields), at

    def encode_many(self, keys: Any) -> ByteRuns:
        columnar = as_columnar(keys)
        encode: Callable[[Any], bytes] = self.encode
        if isinstance(columnar, pa.Array):
            try:
                found = None if columnar.null_count else self._encode_structs(columnar)
            except (SerializationError, OverflowError):
                found = None  # positions count present values only, so the scalar encoder must name the row
            if found is not None:
                return runs_of_list(found)
            encode = lambda key: self.encode(plain_key(self, key))  # noqa: E731
        return runs_of_list(encode_each(columnar, encode))

    def _encode_structs(self, structs: pa.Array) -> list[bytes] | None:
        """Struct keys, none of them null, by whole fields; None if the scalar encoder must look. O(rows x fields)."""
        if not pa.types.is_struct(structs.type) or structs.type.num_fields != len(self.parts):
            return None
        order = list(range(len(self.parts)))
        if isinstance(self.declared_type, RowType):
            names = [field.name for field in structs.type]
            if sorted(names) != sorted(self.names):
                return None
            order = [names.index(name) for name in self.names]
        columns = []
        for part, at in zip(self.parts, order, strict=True):
            child = structs.field(at)
            are_there = child.is_valid()
            kept = without_views(child).filter(are_there) if child.null_count else child
            if isinstance(part, CompositeKeyEncoder):
                encoded = part._encode_structs(kept)
                if encoded is None:
                    return None
            else:
                canonical = canonical_list(part.encode_many(kept))
                encoded = [_field_bytes(part, each) for each in canonical]
            present = iter(encoded)
            columns.append([b"\1" + next(present) if there else b"\0" for there in are_there.to_pylist()])
        return list(map(b"".join, zip(*columns, strict=True)))

    def decode_many(self, canonical: ByteRuns) -> pa.Array:
        keys = canonical_list(checked_runs(canonical))
        return self._arrow_of([self._parsed(key, True) for key in keys])

    def _arrow_of(self, keys: Sequence[list[Any] | None]) -> pa.Array:
        """The struct array of keys, each the list of its fields in canonical form; None: null."""
        rows = [[None] * len(self.parts) if key is None else key for key in keys]
        children = []
        for part, column in zip(self.parts, zip(*rows, strict=True) if rows else repeat(()), strict=False):
            if isinstance(part, CompositeKeyEncoder):
                children.append(part._arrow_of(column))
                continue
            kept = [field for field in column if field is not None]
            array = part.decode_many(np.array(kept, np.int64) if part.kind == "int" else runs_of_list(kept))
            if len(kept) < len(column):
                row = count()
                places = [None if field is None else next(row) for field in column]
                array = array.take(pa.array(places, pa.int64()))
            children.append(array)
        fields = list(self.declared_type.arrow)
        mask = pa.array([key is None for key in keys], pa.bool_())
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)


def _field_bytes(part: KeyEncoder, canonical: Any) -> bytes:
    """A field without parts, as it follows its presence byte."""
    if part.kind == "int":
        return _LONG.pack(canonical)
    if len(canonical) > 0xFFFF_FFFF:
        raise SerializationError("a field of a composite key is longer than 4 GB")
    data: bytes = canonical
    return _LENGTH.pack(len(data)) + data


def _float_bits(
    convert_value: Callable[[Any], float], width: int | None
) -> tuple[Callable[[Any], int], Callable[[int], float]]:
    as_float, as_int, nan = _DOUBLE if width == 8 else _SINGLE

    def to_bits(value: Any) -> int:
        number = convert_value(value)
        if number != number:
            return nan
        bits: int = as_int.unpack(as_float.pack(number + 0.0))[0]  # -0.0 + 0.0 is 0.0
        return bits

    def from_bits(bits: int) -> float:
        return as_float.unpack(as_int.pack(bits))[0]  # type: ignore[no-any-return]

    return to_bits, from_bits


def _minimal_big_endian(number: int) -> bytes:
    # Java's BigInteger.toByteArray uses the same length: room for a sign bit, at least one byte.
    length = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return number.to_bytes(length, "big", signed=True)


def key_encoder(spec: Any) -> KeyEncoder:
    """The encoder of keys of a type, given in any notation; O(1) after the first call for a type."""
    declared_type = of(spec)
    if not declared_type.is_key_type:
        raise UsageError(
            f"{declared_type.name} cannot be a key type",
            code="USAGE.KEY_TYPE",
            hint="keys are numbers, strings, bytes, dates, timestamps, and tuples and rows of these",
        )
    return _encoder(declared_type)


@lru_cache(maxsize=4096)
def _encoder(declared_type: Type) -> KeyEncoder:
    if isinstance(declared_type, (TupleType, RowType)):
        return CompositeKeyEncoder(declared_type, [_encoder(part) for part in declared_type.types])
    if declared_type.layout.dtype:
        return IntKeyEncoder(declared_type)
    pack, unpack = declared_type.layout.pack, declared_type.layout.unpack
    if isinstance(declared_type, DecimalType):
        return BytesKeyEncoder(
            declared_type,
            lambda key: _minimal_big_endian(pack(key)),
            lambda data: unpack(int.from_bytes(data, "big", signed=True)),
        )
    return BytesKeyEncoder(declared_type, pack, unpack)


def plain_key(encoder: CompositeKeyEncoder, key: Any) -> Any:
    """Convert a key from Arrow, which names the fields of tuples too, to the form that `encode` takes."""
    if not isinstance(key, dict) or len(key) != len(encoder.parts):
        return key
    names = encoder.names if isinstance(encoder.declared_type, RowType) else tuple(key)
    if set(names) != set(key):
        return key
    pairs = zip(encoder.parts, names, strict=True)
    return tuple(
        plain_key(part, key[name]) if isinstance(part, CompositeKeyEncoder) else key[name]
        for part, name in pairs
    )
