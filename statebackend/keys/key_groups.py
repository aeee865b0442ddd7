"""Key groups: the group of each key among ``max_parallelism``, and the groups that each instance serves.

The groups are Spark's ``pmod(hash(key), max_parallelism)``. The hashes here are plain Python: they serve the reference
backend, and the compiled `_core.key_groups` is tested against them. This module also has Flink's own assignment and
its formulas for ranges.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from statebackend.errors import SerializationError, usage

#: The largest ``max_parallelism``, as in Flink.
MAX_PARALLELISM = 32_768

SPARK_SEED = 42
_MASK = 0xFFFF_FFFF


class KeyGroupRange:
    """The key groups from ``start`` to ``end``, both included.

    >>> groups = KeyGroupRange(4, 7)
    >>> len(groups), 7 in groups, 8 in groups, list(groups)
    (4, True, False, [4, 5, 6, 7])
    """

    __slots__ = ("end", "start")
    start: int
    end: int

    def __init__(self, start: int, end: int) -> None:
        if not 0 <= start <= end < MAX_PARALLELISM:
            raise usage.key_groups(
                "not a range of key groups",
                detail=f"{start} to {end}",
                hint=f"both ends are included, and 0 <= start <= end < {MAX_PARALLELISM}",
            )
        object.__setattr__(self, "start", operator.index(start))
        object.__setattr__(self, "end", operator.index(end))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a KeyGroupRange is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyGroupRange, (self.start, self.end)

    def __repr__(self) -> str:
        return f"KeyGroupRange({self.start}, {self.end})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyGroupRange) and (self.start, self.end) == (other.start, other.end)

    def __hash__(self) -> int:
        return hash((self.start, self.end))

    def __len__(self) -> int:
        return self.end - self.start + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end + 1))

    def __contains__(self, key_group: object) -> bool:
        return isinstance(key_group, (int, np.integer)) and self.start <= int(key_group) <= self.end

    def intersection(self, other: KeyGroupRange) -> KeyGroupRange | None:
        """The groups that are in both ranges, or None."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return KeyGroupRange(start, end) if start <= end else None


def _check(max_parallelism: int, parallelism: int = 1) -> None:
    if not 1 <= max_parallelism <= MAX_PARALLELISM:
        raise usage.key_groups(
            "max_parallelism is out of range", detail=f"{max_parallelism}, allowed are 1 to 32768"
        )
    if not 1 <= parallelism <= max_parallelism:
        raise usage.key_groups(
            "parallelism is out of range",
            detail=f"{parallelism}, max_parallelism {max_parallelism}",
            hint="parallelism is 1 to max_parallelism",
        )


def range_for(max_parallelism: int, parallelism: int, index: int) -> KeyGroupRange:
    """The key groups that instance ``index`` of ``parallelism`` serves, by Flink's formula."""
    _check(max_parallelism, parallelism)
    if not 0 <= index < parallelism:
        raise usage.key_groups(
            "no instance has this index", detail=f"index {index}, parallelism {parallelism}"
        )
    start = (index * max_parallelism + parallelism - 1) // parallelism
    end = ((index + 1) * max_parallelism - 1) // parallelism
    return KeyGroupRange(start, end)


def operator_index_for(max_parallelism: int, parallelism: int, key_group: int) -> int:
    """The index of the instance that serves ``key_group``: the inverse of `range_for`."""
    _check(max_parallelism, parallelism)
    if not 0 <= key_group < max_parallelism:
        raise usage.key_groups(
            "no such key group", detail=f"key group {key_group}, max_parallelism {max_parallelism}"
        )
    return key_group * parallelism // max_parallelism


def default_max_parallelism(parallelism: int) -> int:
    """Flink's default: one and a half times the parallelism, up to the next power of two, 128 to 32768."""
    _check(MAX_PARALLELISM, parallelism)
    return min(max(1 << (parallelism + parallelism // 2 - 1).bit_length(), 128), MAX_PARALLELISM)


def key_group_of(key_hash: int, max_parallelism: int) -> int:
    """The key group of a hash: Spark's ``pmod(hash, max_parallelism)``, never negative."""
    _check(max_parallelism)
    return key_hash % max_parallelism


# --- Spark's Murmur3


def _signed(x: int) -> int:
    return x - 0x1_0000_0000 if x & 0x8000_0000 else x


def _rotl(x: int, r: int) -> int:
    return ((x << r) | (x >> (32 - r))) & _MASK


def _mix_k1(k1: int) -> int:
    return _rotl((k1 & _MASK) * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK


def _mix_h1(h1: int, k1: int) -> int:
    return (_rotl(h1 ^ k1, 13) * 5 + 0xE6546B64) & _MASK


def _bit_mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B & _MASK
    x ^= x >> 13
    x = x * 0xC2B2AE35 & _MASK
    return x ^ (x >> 16)


def spark_hash_int(value: int, seed: int = SPARK_SEED) -> int:
    """Spark's hash of a 32-bit integer."""
    return _signed(_bit_mix(_mix_h1(seed & _MASK, _mix_k1(value)) ^ 4))


def spark_hash_long(value: int, seed: int = SPARK_SEED) -> int:
    """Spark's hash of a 64-bit integer."""
    h1 = _mix_h1(seed & _MASK, _mix_k1(value))
    return _signed(_bit_mix(_mix_h1(h1, _mix_k1(value >> 32)) ^ 8))


def spark_hash_bytes(data: bytes | memoryview, seed: int = SPARK_SEED) -> int:
    """Spark's hash of bytes: words of four, then each byte of the tail, signed, as its own word; O(n)."""
    h1 = seed & _MASK
    aligned = len(data) & ~3
    for (word,) in struct.iter_unpack("<I", data[:aligned]):
        h1 = _mix_h1(h1, _mix_k1(word))
    for byte in data[aligned:]:
        h1 = _mix_h1(h1, _mix_k1(byte - 256 if byte > 127 else byte))
    return _signed(_bit_mix(h1 ^ (len(data) & _MASK)))


def spark_hash(canonical: int | bytes, plan: Any) -> int:
    """Spark's hash of a key in canonical form, following ``KeyEncoder.hash_plan``.

    >>> spark_hash(42, "int64")
    1316951768
    >>> spark_hash(b"\\x00", ("struct", ("int64",)))  # one null field leaves the seed
    42
    """
    if plan == "int64":
        return spark_hash_long(canonical)  # type: ignore[arg-type]
    if plan == "int32":
        return spark_hash_int(canonical)  # type: ignore[arg-type]
    if plan == "bytes":
        return spark_hash_bytes(canonical)  # type: ignore[arg-type]
    try:
        key_hash, end = _fold(memoryview(canonical), 0, plan[1], SPARK_SEED)  # type: ignore[arg-type]
    except (IndexError, struct.error):
        end = -1
    if end != len(canonical):  # type: ignore[arg-type]
        raise SerializationError(
            "the canonical bytes of a composite key cannot be read", code="SERIALIZATION.LENGTH"
        )
    return key_hash


def _fold(data: memoryview, at: int, fields: tuple[Any, ...], key_hash: int) -> tuple[int, int]:
    for field in fields:
        present = data[at]
        at += 1
        if present > 1:
            raise IndexError
        if not present:
            continue
        if isinstance(field, tuple):
            key_hash, at = _fold(data, at, field[1], key_hash)
        elif field == "bytes":
            (length,) = struct.unpack_from("<I", data, at)
            at += 4
            key_hash = spark_hash_bytes(data[at : at + length], key_hash)
            at += length
        else:
            (number,) = struct.unpack_from("<q", data, at)
            at += 8
            key_hash = (
                spark_hash_int(number, key_hash) if field == "int32" else spark_hash_long(number, key_hash)
            )
    return key_hash, at


# --- Flink's assignment


def flink_key_group(key: Any, max_parallelism: int, *, java_type: str | None = None) -> int:
    """The key group that Flink itself assigns: ``murmurHash(key.hashCode()) % max_parallelism``.

    A Python int counts as an ``Integer`` if it fits in 32 bits, otherwise as a ``Long``. Negative numbers hash
    differently as the two, so pass ``java_type="long"`` (or a ``numpy.int64``) for keys that are ``Long`` in Flink.

    >>> flink_key_group("hello", 128), flink_key_group(42, 128)
    (35, 29)
    >>> flink_key_group(-1, 128), flink_key_group(-1, 128, java_type="long")
    (80, 94)
    """
    _check(max_parallelism)
    return _flink_murmur(java_hash_code(key, java_type=java_type)) % max_parallelism


def _flink_murmur(code: int) -> int:
    mixed = _signed(_bit_mix(_mix_h1(0, _mix_k1(code)) ^ 4))
    if mixed >= 0:
        return mixed
    return -mixed if mixed != -0x8000_0000 else 0


def java_hash_code(key: Any, *, java_type: str | None = None) -> int:
    """Java's ``hashCode`` of the key as Flink has it: a String, a number, a Boolean, or a Tuple of these."""
    if java_type not in (None, "int", "long"):
        raise usage.key_groups("unknown java_type", hint="use 'int', 'long' or None")
    if key is None:
        return 0
    if isinstance(key, (bool, np.bool_)):
        return 1231 if key else 1237
    if isinstance(key, (int, np.integer)):
        number = int(key)
        if not -(2**63) <= number < 2**63:
            raise OverflowError("integer out of range for a Java Long")
        fits = -(2**31) <= number < 2**31
        if java_type == "int" and not fits:
            raise OverflowError("integer out of range for a Java Integer")
        is_long = java_type == "long" or (java_type is None and (not fits or isinstance(key, np.int64)))
        return _signed((number ^ (number >> 32)) & _MASK) if is_long else number
    if isinstance(key, (float, np.float64)):
        bits = 0x7FF8_0000_0000_0000 if key != key else struct.unpack("<q", struct.pack("<d", key))[0]
        return _signed((bits ^ (bits >> 32)) & _MASK)
    if isinstance(key, str):
        code = 0
        for (unit,) in struct.iter_unpack("<H", key.encode("utf-16-le", "surrogatepass")):
            code = (code * 31 + unit) & _MASK
        return _signed(code)
    if isinstance(key, tuple) and key:
        code = java_hash_code(key[0], java_type=java_type)
        for field in key[1:]:
            code = (code * 31 + java_hash_code(field, java_type=java_type)) & _MASK
        return _signed(code & _MASK)
    raise usage.key_groups(
        f"the Java hash code of a {type(key).__name__} is not known",
        hint="str, int, float, bool and tuples of these are",
    )
