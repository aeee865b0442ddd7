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
from statebackend.keys import key_batches
from statebackend.keys.key_columns import ByteRuns, Columnar, Int64s, as_columnar, encode_each, without_views
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
        result = key_batches.ints_of(columnar, self.declared_type)
        if result is None:
            encoded = encode_each(columnar, self.encode)
            result = np.fromiter(encoded, dtype=np.int64, count=len(encoded))
        return result

    def decode_many(self, canonical: Any) -> pa.Array:
        return key_batches.arrow_of_ints(np.ascontiguousarray(canonical, dtype=np.int64), self.declared_type)


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
        result = key_batches.byte_runs_of(columnar, self.declared_type)
        return key_batches.runs_of_list(encode_each(columnar, self.encode)) if result is None else result

    def decode_many(self, canonical: ByteRuns) -> pa.Array:
        return key_batches.arrow_of_byte_runs(*key_batches.checked_runs(canonical), self.declared_type)


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
        columnar = as_columnar(keys)
        result = encode_structs(self, columnar)
        if result is not None:
            return result
        if isinstance(columnar, pa.Array):
            return key_batches.runs_of_list(
                encode_each(columnar, lambda key: self.encode(plain_key(self, key)))
            )
        return key_batches.runs_of_list(encode_each(columnar, self.encode))

    def decode_many(self, canonical: ByteRuns) -> pa.Array:
        return decode_structs(self, *key_batches.checked_runs(canonical))


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


Mask = np.ndarray[Any, np.dtype[np.bool_]]


def plain_key(encoder: CompositeKeyEncoder, key: Any) -> Any:
    """Convert a key from Arrow, which names the fields of tuples too, to the form that `encode` takes.

    >>> from statebackend.keys import key_encoder
    >>> plain_key(key_encoder(tuple[int, int]), {"_1": 1, "_2": 2})
    (1, 2)
    """
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


class _Leaf:
    """One field over all rows: the positions of its presence bytes and values, and the values that are present."""

    def __init__(self, active: Mask, present: Mask, values: Any) -> None:
        self.active = active
        self.present = present
        self.values = values  # int64s, byte runs, or None for the head of a nested composite


def encode_structs(encoder: CompositeKeyEncoder, keys: Columnar) -> ByteRuns | None:
    """Offsets and data of struct keys; None if the scalar encoder must look. O(rows x fields + bytes)."""
    if not isinstance(keys, pa.Array) or not pa.types.is_struct(keys.type) or keys.null_count:
        return None
    leaves: list[_Leaf] = []
    try:
        if not _collect(encoder, keys, np.ones(len(keys), dtype=bool), leaves):
            return None
    except (SerializationError, OverflowError):
        return None  # positions count present values only, so the scalar encoder must name the row
    return _assemble(leaves, len(keys))


def _collect(encoder: CompositeKeyEncoder, structs: pa.Array, active: Mask, leaves: list[_Leaf]) -> bool:
    if structs.type.num_fields != len(encoder.parts):
        return False
    order = list(range(len(encoder.parts)))
    if isinstance(encoder.declared_type, RowType):
        names = [structs.type.field(i).name for i in order]
        if sorted(names) != sorted(encoder.names):
            return False
        order = [names.index(name) for name in encoder.names]
    for part, at in zip(encoder.parts, order, strict=True):
        child = structs.field(at)
        present = active.copy()
        if child.null_count:
            present &= child.is_valid().to_numpy(zero_copy_only=False)
        if isinstance(part, CompositeKeyEncoder):
            if not pa.types.is_struct(child.type):
                return False
            leaves.append(_Leaf(active, present, None))
            if not _collect(part, child, present, leaves):
                return False
            continue
        kept = child if present.all() else without_views(child).filter(pa.array(present))
        leaves.append(_Leaf(active, present, part.encode_many(kept)))
    return True


def _assemble(leaves: list[_Leaf], count: int) -> ByteRuns:
    lengths = np.zeros(count, dtype=np.int64)
    for leaf in leaves:
        lengths += leaf.active
        if isinstance(leaf.values, tuple):
            runs = np.diff(leaf.values[0])
            if len(runs) and runs.max() > 0xFFFF_FFFF:
                raise SerializationError("a field of a composite key is longer than 4 GB")
            lengths[leaf.present] += 4 + runs
        elif leaf.values is not None:
            lengths[leaf.present] += 8
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    data = np.empty(int(offsets[-1]), dtype=np.uint8)
    position = offsets[:-1].copy()
    for leaf in leaves:
        data[position[leaf.active]] = leaf.present[leaf.active]
        position += leaf.active
        at = position[leaf.present]
        if isinstance(leaf.values, tuple):
            run_offsets, run_data = leaf.values
            runs = np.diff(run_offsets)
            _put_words(data, at, runs.astype("<u4"))
            data[_ranges(at + 4, runs)] = run_data[run_offsets[0] : run_offsets[-1]]
            position[leaf.present] += 4 + runs
        elif leaf.values is not None:
            _put_words(data, at, leaf.values)
            position[leaf.present] += 8
    return offsets, data


def _put_words(data: np.ndarray[Any, Any], at: Int64s, words: np.ndarray[Any, Any]) -> None:
    size = words.dtype.itemsize
    data[at[:, None] + np.arange(size)] = words.view(np.uint8).reshape(-1, size)


def _ranges(starts: Int64s, lengths: Int64s) -> Int64s:
    """All positions start, start + 1, ... of every range, one range after another."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def decode_structs(encoder: CompositeKeyEncoder, offsets: Int64s, data: np.ndarray[Any, Any]) -> pa.Array:
    """The struct array of canonical composite keys; O(rows x fields + bytes).

    >>> from statebackend.keys import key_encoder
    >>> pair = key_encoder(tuple[int, int])
    >>> decode_structs(pair, *pair.encode_many([(1, None)])).to_pylist()
    [{'_1': 1, '_2': None}]
    """
    position = offsets[:-1].copy()
    rows = np.arange(len(position))
    structs = _parse(encoder, data, position, offsets[1:], rows, None)
    if (position != offsets[1:]).any():
        raise _unreadable(encoder.declared_type)
    return structs


def _parse(
    encoder: CompositeKeyEncoder,
    data: np.ndarray[Any, Any],
    position: Int64s,
    end: Int64s,
    rows: Int64s,
    missing: Mask | None,
) -> pa.Array:
    """Parse the fields of ``rows`` and advance their ``position``; ``missing``: rows that have no struct here."""
    children = []
    count = len(position)
    for part in encoder.parts:
        if (position[rows] >= end[rows]).any():
            raise _unreadable(encoder.declared_type)
        flags = data[position[rows]]
        if (flags > 1).any():
            raise _unreadable(encoder.declared_type)
        position[rows] += 1
        present = rows[flags == 1]
        absent = np.ones(count, dtype=bool)
        absent[present] = False
        if isinstance(part, CompositeKeyEncoder):
            children.append(_parse(part, data, position, end, present, absent))
            continue
        values: Any
        if part.kind == "int":
            values = _words_at(encoder, data, position, end, present, "<i8")
        else:
            lengths = _words_at(encoder, data, position, end, present, "<u4").astype(np.int64)
            start = position[present]
            if (lengths > end[present] - start).any():
                raise _unreadable(encoder.declared_type)
            position[present] += lengths
            run_offsets = np.zeros(len(present) + 1, dtype=np.int64)
            np.cumsum(lengths, out=run_offsets[1:])
            values = run_offsets, data[_ranges(start, lengths)]
        array = part.decode_many(values)
        if len(present) != count:
            indices = np.zeros(count, dtype=np.int64)
            indices[present] = np.arange(len(present))
            array = array.take(pa.array(indices, mask=absent))
        children.append(array)
    arrow = encoder.declared_type.arrow
    fields = [arrow.field(i) for i in range(arrow.num_fields)]
    return pa.StructArray.from_arrays(
        children, fields=fields, mask=None if missing is None else pa.array(missing)
    )


def _words_at(
    encoder: CompositeKeyEncoder,
    data: np.ndarray[Any, Any],
    position: Int64s,
    end: Int64s,
    rows: Int64s,
    dtype: str,
) -> np.ndarray[Any, Any]:
    size = np.dtype(dtype).itemsize
    start = position[rows]
    if (start + size > end[rows]).any():
        raise _unreadable(encoder.declared_type)
    position[rows] += size
    return np.ascontiguousarray(data[start[:, None] + np.arange(size)]).view(dtype).reshape(-1)
