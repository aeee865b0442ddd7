"""Encoders: convert one key to its canonical form and back, and lead to the batch forms.

The canonical form of a key of kind "int" is a signed 64-bit integer: the value of LONG, INT, SHORT, BYTE, BOOL; the
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
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError, SerializationTypeError, UsageError
from statebackend.keys import int_batch, run_batch
from statebackend.keys.key_columns import ByteRuns, as_columnar, encode_each
from statebackend.keys.key_groups import key_group_of, spark_hash
from statebackend.types import (
    DecimalType,
    RowType,
    TupleType,
    Type,
    convert,
    of,
    record_builder,
    record_reader,
)

__all__ = ["BytesKeyEncoder", "CompositeKeyEncoder", "IntKeyEncoder", "KeyEncoder", "key_encoder"]

_LONG = struct.Struct("<q")
_LENGTH = struct.Struct("<I")
_DOUBLE_BITS = (struct.Struct("<d"), struct.Struct("<q"))
_FLOAT_BITS = (struct.Struct("<f"), struct.Struct("<i"))
_CANONICAL_NAN = {8: 0x7FF8_0000_0000_0000, 4: 0x7FC0_0000}


class KeyEncoder(ABC):
    """Turns keys of one declared type into their canonical form and back; get one from `key_encoder`.

    >>> key_encoder("double").encode(-0.0)
    0
    """

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
        """The canonical form of ``key``, never None; raises for a key that the type does not take.

        >>> key_encoder("int").encode(True)
        Traceback (most recent call last):
        statebackend.errors.SerializationTypeError: INT does not take a value of type bool...
        """

    @abstractmethod
    def decode(self, canonical: Any) -> Any:
        """The key that has this canonical form.

        >>> key_encoder("date").decode(1)
        datetime.date(1970, 1, 2)
        """

    def decode_each(self, canonical: Iterable[Any]) -> Iterator[Any]:
        """`decode` for each of these canonical forms, lazily."""
        return map(self.decode, canonical)

    def spark_hash(self, canonical: Any) -> int:
        """Spark's ``hash`` of a key given in canonical form, in plain Python.

        >>> key_encoder("bigint").spark_hash(42)
        1316951768
        """
        return spark_hash(canonical, self.hash_plan)

    def key_group(self, key: Any, max_parallelism: int) -> int:
        """The key group of a key, in plain Python.

        >>> key_encoder("bigint").key_group(-1, 128)
        41
        """
        return key_group_of(self.spark_hash(self.encode(key)), max_parallelism)

    @abstractmethod
    def encode_many(self, keys: Any) -> Any:
        """Canonical forms of a batch: an Arrow array or chunked array, a numpy array, or a sequence.

        Kind "int" returns a contiguous int64 array. Kind "bytes" returns int64 offsets (n + 1, not always from 0) and
        uint8 data. Where the layout allows, the result shares the memory of ``keys``: do not write to either. O(n). A
        key that the scalar `encode` refuses raises the same error, which names the position.

        >>> key_encoder("int").encode_many([3, 4])
        array([3, 4])
        >>> key_encoder("string").encode_many(["a", "bc"])
        (array([0, 1, 3]), array([97, 98, 99], dtype=uint8))
        """

    @abstractmethod
    def decode_many(self, canonical: Any) -> pa.Array:
        """The Arrow array, of the declared type's `arrow`, for a result of `encode_many`; O(n).

        >>> key_encoder("smallint").decode_many(np.array([3, 4])).type
        DataType(int16)
        """


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
    """Keys whose canonical form is a 64-bit integer.

    >>> key_encoder("decimal(10,2)").encode(3)
    300
    """

    kind = "int"

    def __init__(
        self,
        declared_type: Type,
        hash_plan: str,
        to_int: Callable[[Any], int],
        from_int: Callable[[int], Any],
    ) -> None:
        super().__init__(declared_type)
        self.hash_plan = hash_plan
        self._to_int = to_int
        self._from_int = from_int

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
        result = int_batch.ints_of(columnar, self.declared_type)
        if result is None:
            encoded = encode_each(columnar, self.encode)
            result = np.fromiter(encoded, dtype=np.int64, count=len(encoded))
        return result

    def decode_many(self, canonical: Any) -> pa.Array:
        return int_batch.arrow_of_ints(np.ascontiguousarray(canonical, dtype=np.int64), self.declared_type)


class BytesKeyEncoder(KeyEncoder):
    """STRING, BYTES and DECIMAL of more than 18 digits.

    >>> key_encoder("decimal(38,0)").encode(-1)
    b'\\xff'
    """

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
        result = run_batch.byte_runs_of(columnar, self.declared_type)
        return run_batch.runs_of_list(encode_each(columnar, self.encode)) if result is None else result

    def decode_many(self, canonical: ByteRuns) -> pa.Array:
        return run_batch.arrow_of_byte_runs(*run_batch.checked_runs(canonical), self.declared_type)


class CompositeKeyEncoder(KeyEncoder):
    """TUPLE and ROW: the fields one after another, each behind a presence byte.

    >>> pair = key_encoder(tuple[int, str])
    >>> pair.decode(pair.encode((1, "a")))
    (1, 'a')
    """

    kind = "bytes"

    def __init__(self, declared_type: TupleType | RowType, parts: Sequence[KeyEncoder]) -> None:
        super().__init__(declared_type)
        self.parts = tuple(parts)
        self.hash_plan = ("struct", tuple(part.hash_plan for part in self.parts))
        self._read: Callable[[Any], Sequence[Any] | None]
        self._build: Callable[[Sequence[Any]], Any]
        if isinstance(declared_type, RowType):
            self.names = declared_type.names
            self._read = record_reader(declared_type.names)
            self._build = record_builder(declared_type.names, declared_type.record_class)
        else:
            self.names = tuple(f"_{i + 1}" for i in range(len(self.parts)))
            self._read = self._read_tuple
            self._build = tuple

    def _read_tuple(self, key: Any) -> Sequence[Any] | None:
        return key if isinstance(key, tuple) and len(key) == len(self.parts) else None

    def encode(self, key: Any) -> bytes:
        if key is None:
            raise _null_key()
        out = bytearray()
        self._write(key, out)
        return bytes(out)

    def _write(self, key: Any, out: bytearray) -> None:
        fields = self._read(key)
        if fields is None:
            takes = (
                "a tuple" if isinstance(self.declared_type, TupleType) else "a tuple, mapping or dataclass"
            )
            raise SerializationTypeError(
                f"a {self.declared_type.name} key is {takes} with exactly its fields, not this value",
                detail=f"value of type {type(key).__name__}, fields {', '.join(self.names)}",
            )
        for name, part, field in zip(self.names, self.parts, fields, strict=True):
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
            if part.kind == "int":
                out += _LONG.pack(canonical)
            else:
                if len(canonical) > 0xFFFF_FFFF:
                    raise SerializationError("a field of a composite key is longer than 4 GB")
                out += _LENGTH.pack(len(canonical)) + canonical

    def decode(self, canonical: bytes) -> Any:
        data = bytes(canonical)
        try:
            key, at = self._parse(data, 0)
        except (struct.error, IndexError):
            raise _unreadable(self.declared_type) from None
        if at != len(data):
            raise _unreadable(self.declared_type)
        return key

    def _parse(self, data: bytes, at: int) -> tuple[Any, int]:
        fields: list[Any] = []
        for part in self.parts:
            present = data[at]
            at += 1
            if present > 1:
                raise IndexError
            if not present:
                fields.append(None)
            elif isinstance(part, CompositeKeyEncoder):
                field, at = part._parse(data, at)
                fields.append(field)
            elif part.kind == "int":
                fields.append(part.decode(_LONG.unpack_from(data, at)[0]))
                at += 8
            else:
                (length,) = _LENGTH.unpack_from(data, at)
                at += 4
                if at + length > len(data):
                    raise IndexError
                fields.append(part.decode(data[at : at + length]))
                at += length
        return self._build(fields), at

    def encode_many(self, keys: Any) -> ByteRuns:
        from statebackend.keys import composite_batch

        columnar = as_columnar(keys)
        result = composite_batch.encode_structs(self, columnar)
        if result is not None:
            return result
        if isinstance(columnar, pa.Array):
            return run_batch.runs_of_list(
                encode_each(columnar, lambda key: self.encode(composite_batch.plain_key(self, key)))
            )
        return run_batch.runs_of_list(encode_each(columnar, self.encode))

    def decode_many(self, canonical: ByteRuns) -> pa.Array:
        from statebackend.keys import composite_batch

        return composite_batch.decode_structs(self, *run_batch.checked_runs(canonical))


def _float_bits(
    convert_value: Callable[[Any], float], layouts: tuple[struct.Struct, struct.Struct]
) -> tuple[Callable[[Any], int], Callable[[int], float]]:
    as_float, as_int = layouts
    nan = _CANONICAL_NAN[as_float.size]

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
    """The encoder of keys of a type, given in any notation; O(1) after the first call for a type.

    >>> key_encoder(str)
    key_encoder(STRING)
    """
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
    if isinstance(declared_type, DecimalType):
        scale = declared_type.scale
        unscaled = convert.unscaled_converter(declared_type.precision, scale)
        if declared_type.precision <= 18:
            return IntKeyEncoder(
                declared_type, "int64", unscaled, lambda number: convert.decimal_from_unscaled(number, scale)
            )
        return BytesKeyEncoder(
            declared_type,
            lambda key: _minimal_big_endian(unscaled(key)),
            lambda data: convert.decimal_from_unscaled(int.from_bytes(data, "big", signed=True), scale),
        )
    name = declared_type.name
    if name in _BITS:
        hash_plan = "int64" if name == "LONG" else "int32"
        return IntKeyEncoder(declared_type, hash_plan, convert.integer_converter(name, _BITS[name]), int)
    if name in _INTS:
        return IntKeyEncoder(declared_type, *_INTS[name])
    return BytesKeyEncoder(declared_type, *_RUNS[name])


_BITS = {"LONG": 64, "INT": 32, "SHORT": 16, "BYTE": 8}
_INTS: dict[str, tuple[str, Callable[[Any], int], Callable[[int], Any]]] = {
    "BOOL": ("int32", convert.truth, bool),
    "DATE": ("int32", convert.days, convert.from_days),
    "TIMESTAMP": ("int64", convert.microseconds, convert.from_microseconds),
    "TIMESTAMP_NTZ": ("int64", convert.naive_microseconds, convert.from_naive_microseconds),
    "DOUBLE": ("int64", *_float_bits(convert.double, _DOUBLE_BITS)),
    "FLOAT": ("int32", *_float_bits(convert.single, _FLOAT_BITS)),
}
_RUNS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "STRING": (convert.utf8, convert.text_from_utf8),
    "BYTES": (convert.raw_bytes, bytes),
}
