"""Batches of keys of kind "bytes" without parts: to offsets and data, and back to Arrow.

`byte_runs_of` returns None for a batch that needs the scalar encoder: it is a sequence of mixed objects, or some key
is refused and the scalar encoder will name it and the reason.

>>> from statebackend.types import BYTES
>>> byte_runs_of([b"a", b"bc"], BYTES)
(array([0, 1, 3]), array([97, 98, 99], dtype=uint8))
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError
from statebackend.keys.int_batch import decimal_words, rescaled_decimals
from statebackend.keys.key_columns import ByteRuns, Bytes, Columnar, Int64s
from statebackend.types import DecimalType, Type

__all__ = [
    "arrow_of_byte_runs",
    "byte_runs_of",
    "canonical_list",
    "checked_runs",
    "count_of",
    "runs_of_list",
    "take_rows",
]

#: Set in a word of eight bytes unless all of them are ASCII.
_HIGH_BITS = 0x8080_8080_8080_8080


def byte_runs_of(keys: Columnar, declared: Type) -> ByteRuns | None:
    """Offsets and data of STRING, BYTES or wide DECIMAL keys; shares the data of string columns.

    >>> from statebackend.types import STRING
    >>> byte_runs_of(pa.array(["a", "bc"]), STRING)
    (array([0, 1, 3]), array([97, 98, 99], dtype=uint8))
    """
    if isinstance(declared, DecimalType):
        return _wide_decimal_runs(keys, declared)
    is_text = declared.name == "STRING"
    if isinstance(keys, list):
        if set(map(type, keys)) != {str if is_text else bytes}:
            return None
        try:
            keys = pa.array(keys, pa.large_string() if is_text else pa.large_binary())
        except (UnicodeEncodeError, pa.ArrowException):
            return None
    elif isinstance(keys, np.ndarray):
        if keys.dtype.kind != "U" or not is_text:
            return None
        try:
            keys = pa.array(keys).cast(pa.large_string())
        except (UnicodeEncodeError, ValueError, pa.ArrowException):
            return None
    elif keys.null_count or not _is_run_type(keys.type, is_text):
        return None
    else:
        try:
            if not _is_plain(keys, is_text):
                keys.validate(full=True)  # Arrow checks neither offsets nor UTF-8 by itself
        except pa.ArrowInvalid:
            _check_offsets(keys)
            return None
    if _has_no_offsets(keys.type):
        keys = keys.cast(pa.large_string() if is_text else pa.large_binary())
    offsets, data = _buffers_of(keys)
    return offsets.astype(np.int64, copy=False), data


def _has_no_offsets(arrow: pa.DataType) -> bool:
    return str(arrow) in ("string_view", "binary_view") or pa.types.is_fixed_size_binary(arrow)


def _check_offsets(keys: pa.Array) -> None:
    """Raise unless each value lies in the data: to look at one that does not ends the process."""
    bytes_of = {"string": pa.binary(), "large_string": pa.large_binary(), "string_view": pa.binary_view()}
    try:
        keys.view(bytes_of.get(str(keys.type), keys.type)).validate(full=True)
    except pa.ArrowInvalid as error:
        raise SerializationError(
            "a column has offsets that lead outside of its data",
            code="SERIALIZATION.LENGTH",
            detail=f"Arrow's {keys.type}",
            hint="whatever made the column is wrong, or has freed its memory",
        ) from error


def _buffers_of(keys: pa.Array) -> ByteRuns:
    _, offsets_buffer, data_buffer = keys.buffers()
    large = pa.types.is_large_string(keys.type) or pa.types.is_large_binary(keys.type)
    dtype = np.dtype(np.int64 if large else np.int32)
    if not len(keys) or offsets_buffer is None:
        offsets = np.zeros(1, dtype=np.int64)
    else:
        offsets = np.frombuffer(
            offsets_buffer, dtype, count=len(keys) + 1, offset=keys.offset * dtype.itemsize
        )
    return offsets, np.empty(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)


def _is_plain(keys: pa.Array, is_text: bool) -> bool:
    """Return True for bytes, or ASCII, with right offsets: that is seen without a look at each value. O(bytes).

    >>> _is_plain(pa.array(["a", "bc"]), True), _is_plain(pa.array(["é"]), True)
    (True, False)
    """
    if _has_no_offsets(keys.type):
        return False
    keys.validate()  # the lengths of the buffers
    offsets, data = _buffers_of(keys)
    first, last = int(offsets[0]), int(offsets[-1])
    if first < 0 or last > len(data) or (offsets[1:] < offsets[:-1]).any():
        return False
    if not is_text:
        return True
    text = data[first:last]
    whole = len(text) // 8 * 8
    words, rest = text[:whole].view(np.uint64), text[whole:]
    return not (int(np.bitwise_or.reduce(words)) & _HIGH_BITS or int(np.bitwise_or.reduce(rest)) & 0x80)


def _is_run_type(arrow: pa.DataType, is_text: bool) -> bool:
    checks = pa.types
    if is_text:
        return checks.is_string(arrow) or checks.is_large_string(arrow) or str(arrow) == "string_view"
    if checks.is_binary(arrow) or checks.is_large_binary(arrow) or checks.is_fixed_size_binary(arrow):
        return True
    return str(arrow) == "binary_view"


def runs_of_list(parts: list[bytes]) -> ByteRuns:
    """Offsets and data of a list of byte strings.

    >>> runs_of_list([b"a", b"bc"])
    (array([0, 1, 3]), array([97, 98, 99], dtype=uint8))
    """
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), out=offsets[1:])
    return offsets, np.frombuffer(b"".join(parts), dtype=np.uint8)


def canonical_list(canonical: Any) -> list[Any]:
    """The keys of a batch, in the form of `encode_many`, one by one.

    >>> canonical_list((np.array([0, 1, 3]), np.frombuffer(b"abc", np.uint8))), canonical_list(np.array([7]))
    ([b'a', b'bc'], [7])
    """
    if not isinstance(canonical, tuple):
        return canonical.tolist()  # type: ignore[no-any-return]
    ends, data = canonical[0].tolist(), bytes(canonical[1])
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def count_of(canonical: Any) -> int:
    """The number of rows of a column of keys or values, an array or (offsets, data).

    >>> count_of(np.array([1, 2])), count_of((np.array([0, 1, 1]), b"a"))
    (2, 2)
    """
    return len(canonical[0]) - 1 if isinstance(canonical, tuple) else len(canonical)


def canonical_column(canonical: Any) -> pa.Array:
    """An array or (offsets, data) as Arrow's column. O(1), or O(bytes) where they are not contiguous.

    >>> canonical_column((np.array([0, 1, 3]), np.frombuffer(b"abc", np.uint8))).to_pylist()
    [b'a', b'bc']
    """
    if not isinstance(canonical, tuple):
        return pa.array(canonical)
    offsets, data = (pa.py_buffer(np.ascontiguousarray(part)) for part in canonical)
    return pa.Array.from_buffers(pa.large_binary(), count_of(canonical), [None, offsets, data])


def take_rows(values: Any, rows: np.ndarray[Any, Any]) -> Any:
    """Some rows of an array or of (offsets, data). O(rows and their bytes).

    >>> take_rows((np.array([0, 1, 3]), np.frombuffer(b"abc", np.uint8)), np.array([1]))
    (array([0, 2]), array([98, 99], dtype=uint8))
    """
    if not isinstance(values, tuple):
        return values[rows]
    _, offsets, data = canonical_column(values).take(pa.array(rows)).buffers()
    empty = np.empty(0, dtype=np.uint8)
    return (
        np.frombuffer(offsets, dtype=np.int64, count=len(rows) + 1),
        empty if data is None else np.frombuffer(data, dtype=np.uint8),
    )


def _wide_decimal_runs(keys: Columnar, declared: DecimalType) -> ByteRuns | None:
    if not isinstance(keys, pa.Array) or keys.null_count:
        return None
    rescaled = rescaled_decimals(keys, declared)
    if rescaled is None:
        return None
    try:
        rescaled.validate(full=True)
    except pa.ArrowInvalid:
        return None
    big_endian = decimal_words(rescaled).view(np.uint8).reshape(-1, 16)[:, ::-1]
    # A leading byte is redundant if it only repeats the sign bit of the byte after it.
    fill = np.where(big_endian[:, :1] >> 7, np.uint8(0xFF), np.uint8(0))
    repeats = (big_endian[:, :-1] == fill) & (big_endian[:, 1:] >> 7 == fill & 1)
    kept = np.ones(big_endian.shape, dtype=bool)
    kept[:, :-1] = ~np.logical_and.accumulate(repeats, axis=1)
    offsets = np.zeros(len(keys) + 1, dtype=np.int64)
    np.cumsum(kept.sum(axis=1), out=offsets[1:])
    return offsets, big_endian[kept]


def checked_runs(canonical: Any) -> ByteRuns:
    """Check that offsets and data from a caller fit each other, and return them.

    >>> checked_runs((np.array([0, 2]), b"ab"))[1].tolist()
    [97, 98]
    """
    offsets = np.ascontiguousarray(canonical[0], dtype=np.int64)
    data = canonical[1]
    data = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    if not len(offsets) or offsets[0] < 0 or offsets[-1] > len(data) or (np.diff(offsets) < 0).any():
        raise SerializationError("offsets do not ascend within the data", code="SERIALIZATION.LENGTH")
    return offsets, np.ascontiguousarray(data)


def arrow_of_byte_runs(offsets: Int64s, data: Bytes, declared: Type) -> pa.Array:
    """The Arrow array of canonical byte strings; for more than 2 GB of data its offsets are 64 bits wide.

    >>> from statebackend.types import BYTES
    >>> arrow_of_byte_runs(np.array([0, 1]), np.array([97], dtype=np.uint8), BYTES).to_pylist()
    [b'a']
    """
    count = len(offsets) - 1
    if isinstance(declared, DecimalType):
        return _wide_decimals(offsets, data, declared)
    if offsets[-1] >= 2**31 and offsets[-1] - offsets[0] < 2**31:
        data = data[offsets[0] : offsets[-1]]
        offsets = offsets - offsets[0]
    fits = offsets[-1] < 2**31
    is_text = declared.name == "STRING"
    arrow = declared.arrow if fits else (pa.large_string() if is_text else pa.large_binary())
    own_offsets = offsets.astype(np.int32) if fits else offsets
    array = pa.Array.from_buffers(arrow, count, [None, pa.py_buffer(own_offsets), pa.py_buffer(data)])
    if is_text:
        try:
            if not _is_plain(array, is_text):
                array.validate(full=True)
        except pa.ArrowInvalid:
            raise SerializationError(
                "a stored string is not valid UTF-8", code="SERIALIZATION.UTF8"
            ) from None
    return array


def _wide_decimals(offsets: Int64s, data: Bytes, declared: DecimalType) -> pa.Array:
    lengths = np.diff(offsets)
    if len(lengths) and (lengths.min() < 1 or lengths.max() > 16):
        raise SerializationError(
            f"a stored {declared!r} key has the wrong length", code="SERIALIZATION.LENGTH"
        )
    sign = np.where(data[offsets[:-1]] >> 7, np.uint8(0xFF), np.uint8(0))
    big_endian = np.repeat(sign[:, None], 16, axis=1)
    big_endian[np.arange(16) >= 16 - lengths[:, None]] = data[offsets[0] : offsets[-1]]
    little_endian = np.ascontiguousarray(big_endian[:, ::-1])
    return pa.Array.from_buffers(declared.arrow, len(lengths), [None, pa.py_buffer(little_endian)])
