"""Batches of keys without parts: Arrow, numpy or a sequence to canonical forms, whole columns at a time.

Each function answers None where a batch needs the scalar encoder: because it is a sequence of mixed objects,
or because some key is refused and the scalar encoder says which one and why. Only `encode_each` visits keys
one by one.

>>> from statebackend.types import INT
>>> ints_of(np.array([1, 2], dtype=np.uint8), INT)
array([1, 2])
>>> ints_of(np.array([1.5]), INT) is None
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.types.model import DecimalType, Type

__all__ = [
    "ByteRuns",
    "arrow_of_byte_runs",
    "arrow_of_ints",
    "as_columnar",
    "byte_runs_of",
    "checked_runs",
    "encode_each",
    "ints_of",
    "runs_of_list",
]

Int64s: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
#: Offsets (int64, n + 1 of them) and data (uint8).
ByteRuns: TypeAlias = tuple[Int64s, np.ndarray[Any, np.dtype[np.uint8]]]
Columnar: TypeAlias = "pa.Array | np.ndarray[Any, Any] | list[Any]"

_INTEGERS = {"LONG": np.int64, "INT": np.int32, "SHORT": np.int16, "BYTE": np.int8}
_EXACT_LIST_TYPES = {
    "LONG": int,
    "INT": int,
    "SHORT": int,
    "BYTE": int,
    "DOUBLE": float,
    "FLOAT": float,
    "BOOL": bool,
}
_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}


def as_columnar(keys: Any) -> Columnar:
    """``keys`` as one Arrow array without dictionary, a one-dimensional numpy array, or a list.

    >>> as_columnar(pa.chunked_array([[1], [2]])).type
    DataType(int64)
    """
    if not isinstance(keys, (pa.Array, pa.ChunkedArray)):
        if isinstance(keys, np.ndarray):
            if keys.ndim != 1 or keys.dtype.fields is not None:
                raise SerializationTypeError(
                    "keys are not a one-dimensional array", detail=f"{keys.ndim} dimensions"
                )
            return list(keys) if keys.dtype == object else keys
        if isinstance(keys, (str, bytes, bytearray)):
            raise SerializationTypeError(
                f"a single {type(keys).__name__} is not a batch of keys", hint="give a list"
            )
        if hasattr(keys, "__arrow_c_array__"):
            keys = pa.array(keys)
        elif hasattr(keys, "__arrow_c_stream__"):
            keys = pa.chunked_array(keys)
        else:
            try:
                return keys if isinstance(keys, list) else list(keys)
            except TypeError:
                raise SerializationTypeError(f"a {type(keys).__name__} is not a batch of keys") from None
    if pa.types.is_dictionary(keys.type):
        if isinstance(keys, pa.ChunkedArray):
            keys = keys.unify_dictionaries().combine_chunks()
        keys = keys.dictionary_decode() if isinstance(keys, pa.Array) else keys
    if isinstance(keys, pa.ChunkedArray):
        keys = _combined(keys)
    return keys


def _combined(chunked: pa.ChunkedArray) -> pa.Array:
    if chunked.num_chunks == 1:
        return chunked.chunk(0)
    if pa.types.is_string(chunked.type) or pa.types.is_binary(chunked.type):
        # 32-bit offsets may not reach across all chunks together.
        chunked = chunked.cast(pa.large_string() if pa.types.is_string(chunked.type) else pa.large_binary())
    combined = chunked.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        combined = pa.concat_arrays(combined.chunks)
    return combined


def encode_each(keys: Columnar, encode: Callable[[Any], Any]) -> list[Any]:
    """The canonical forms of keys one by one; an error names the position of its key.

    >>> encode_each([1, 2], int)
    [1, 2]
    """
    result = []
    arrow = isinstance(keys, pa.Array)
    for position in range(len(keys)):
        try:
            key = keys[position].as_py() if arrow else keys[position]
            if isinstance(key, np.datetime64):
                key = _datetime_of(key)
            elif isinstance(key, np.bytes_):
                key = bytes(key)
            result.append(encode(key))
        except SerializationError as error:
            raise error.at(f"position {position}") from None
        except OverflowError as error:
            raise OverflowError(f"{error}, at position {position}") from None
        except UnicodeDecodeError as error:
            raise SerializationError(
                "a string is not valid UTF-8",
                code="SERIALIZATION.UTF8",
                detail=f"position {position}, at byte {error.start}",
            ) from None
        except ValueError:
            raise SerializationError(
                "a key cannot be read from Arrow", detail=f"position {position}"
            ) from None
    return result


def _datetime_of(value: np.datetime64) -> Any:
    if np.isnat(value):
        return None
    if np.datetime_data(value.dtype)[0] in ("ns", "ps", "fs", "as"):
        raise SerializationError(
            "a datetime64 finer than microseconds is not a whole microsecond",
            hint="cast it to datetime64[us]",
        )
    return value.astype(object)


# --- kind "int"
# ------------------------------------------------------------------------------------------------


def ints_of(keys: Columnar, declared: Type) -> Int64s | None:
    """Canonical integers of a batch; shares memory with int64 and microsecond columns.

    >>> from statebackend.types import LONG
    >>> column = np.array([1, 2])
    >>> ints_of(column, LONG) is column
    True
    """
    if isinstance(keys, list):
        wanted = _EXACT_LIST_TYPES.get(declared.name)
        if wanted is None or not keys or set(map(type, keys)) != {wanted}:
            return None
        try:
            keys = np.array(keys, dtype=np.int64 if wanted is int else wanted)
        except OverflowError:
            return None
    elif isinstance(keys, pa.Array):
        if keys.null_count:
            return None
        if isinstance(declared, DecimalType):
            return _unscaled(keys, declared)
        if declared.name in ("TIMESTAMP", "TIMESTAMP_NTZ"):
            zoned = pa.types.is_timestamp(keys.type) and keys.type.tz is not None
            if not pa.types.is_timestamp(keys.type) or zoned != (declared.name == "TIMESTAMP"):
                return None
            return _to_microseconds(_values(keys, np.int64), keys.type.unit)
        if declared.name == "DATE":
            return _to_days(keys)
        is_number = pa.types.is_integer(keys.type) or pa.types.is_floating(keys.type)
        if not is_number and not pa.types.is_boolean(keys.type):
            return None
        keys = keys.to_numpy(zero_copy_only=False)
    result = _ints_of_numpy(keys, declared)
    return None if result is None else np.ascontiguousarray(result)


def _values(array: pa.Array, dtype: Any) -> np.ndarray[Any, Any]:
    """The values of a fixed-width array without nulls, sharing its memory."""
    size = np.dtype(dtype).itemsize
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype=dtype)
    return np.frombuffer(buffer, dtype=dtype, count=len(array), offset=array.offset * size)


def _ints_of_numpy(keys: np.ndarray[Any, Any], declared: Type) -> np.ndarray[Any, Any] | None:
    kind = keys.dtype.kind
    if not keys.dtype.isnative:
        keys = keys.astype(keys.dtype.newbyteorder("="))
    if declared.name in _INTEGERS:
        return _fitting(keys, _INTEGERS[declared.name]) if kind in "iu" else None
    if declared.name == "BOOL":
        return keys.astype(np.int64) if kind == "b" else None
    if declared.name in ("DOUBLE", "FLOAT"):
        return _float_bits(keys, declared.name) if kind in "iuf" else None
    if kind != "M" or np.isnat(keys).any():
        return None
    unit, step = np.datetime_data(keys.dtype)
    if declared.name == "DATE":
        return keys.view(np.int64) if (unit, step) == ("D", 1) else None
    if declared.name == "TIMESTAMP_NTZ" and step == 1 and unit in (*_MICROSECONDS, "ns"):
        return _to_microseconds(keys.view(np.int64), unit)
    return None


def _fitting(keys: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any] | None:
    bounds = np.iinfo(dtype)
    own = np.iinfo(keys.dtype)
    could_pass = len(keys) and (own.min < bounds.min or own.max > bounds.max)
    if could_pass and (int(keys.min()) < bounds.min or int(keys.max()) > bounds.max):
        return None
    return keys.astype(np.int64, copy=False)


def _float_bits(keys: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any] | None:
    target = np.float64 if name == "DOUBLE" else np.float32
    if keys.dtype.kind in "iu":
        exact = 2 ** (53 if name == "DOUBLE" else 24)
        if len(keys) and (int(keys.min()) < -exact or int(keys.max()) > exact):
            return None  # beyond here not every integer is held exactly: let each be looked at
    with np.errstate(over="ignore", invalid="ignore"):
        floats: np.ndarray[Any, np.dtype[Any]] = keys.astype(target)
        np.add(floats, target(0), out=floats)  # -0.0 becomes 0.0; a signalling NaN is no error
    if keys.dtype.itemsize > floats.dtype.itemsize and (np.isinf(floats) & ~np.isinf(keys)).any():
        return None
    missing = np.isnan(floats)
    if missing.any():
        floats[missing] = np.nan
    return floats.view(np.int64) if name == "DOUBLE" else floats.view(np.int32).astype(np.int64)


def _to_microseconds(ticks: Int64s, unit: str) -> Int64s | None:
    if unit == "ns":
        micros = ticks // 1_000
        return micros if (micros * 1_000 == ticks).all() else None
    factor = _MICROSECONDS[unit]
    if factor == 1 or not len(ticks):
        return ticks
    limit = np.iinfo(np.int64).max // factor
    return ticks * factor if int(ticks.min()) >= -limit and int(ticks.max()) <= limit else None


def _to_days(keys: pa.Array) -> Int64s | None:
    if pa.types.is_date32(keys.type):
        return _values(keys, np.int32).astype(np.int64)
    if pa.types.is_date64(keys.type):
        millis = _values(keys, np.int64)
        day_numbers = millis // 86_400_000
        odd = np.flatnonzero((day_numbers * 86_400_000 != millis) | (np.abs(day_numbers) >= 2**31))
        if len(odd):  # reading them one by one would cut off the time of day
            raise SerializationError("a date64 is not a whole day", detail=f"position {odd[0]}")
        return day_numbers
    return None


def _rescaled(keys: pa.Array, declared: DecimalType) -> pa.Array | None:
    if not pa.types.is_decimal(keys.type):
        return None
    if keys.type == declared.arrow:
        return keys
    try:
        return keys.cast(declared.arrow)
    except pa.ArrowInvalid:
        return None


def _unscaled(keys: pa.Array, declared: DecimalType) -> Int64s | None:
    rescaled = _rescaled(keys, declared)
    if rescaled is None:
        return None
    words = _words(rescaled)
    return np.ascontiguousarray(words[:, 0]) if _fit_precision(words, declared.precision) else None


def _words(decimals: pa.Array) -> np.ndarray[Any, Any]:
    """Low and high 64-bit words of a decimal128 array, one row each."""
    buffer = decimals.buffers()[1]
    if buffer is None or not len(decimals):
        return np.empty((0, 2), dtype=np.int64)
    words = np.frombuffer(buffer, dtype=np.int64, count=2 * len(decimals), offset=decimals.offset * 16)
    return words.reshape(-1, 2)


def _fit_precision(words: np.ndarray[Any, Any], precision: int) -> bool:
    # Arrow does not check on construction that values respect their precision.
    low, high = words[:, 0], words[:, 1]
    limit = 10**precision
    return bool((high == low >> 63).all() and (low > -limit).all() and (low < limit).all())


# --- kind "bytes"
# ----------------------------------------------------------------------------------------------


def byte_runs_of(keys: Columnar, declared: Type) -> ByteRuns | None:
    """Offsets and data of STRING, BYTES or wide DECIMAL keys; the data of string columns is shared.

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
            keys.validate(full=True)  # offsets within the data, and valid UTF-8: Arrow promises neither
        except pa.ArrowInvalid:
            return None
    if str(keys.type) in ("string_view", "binary_view") or pa.types.is_fixed_size_binary(keys.type):
        keys = keys.cast(pa.large_string() if is_text else pa.large_binary())
    _, offsets_buffer, data_buffer = keys.buffers()
    large = pa.types.is_large_string(keys.type) or pa.types.is_large_binary(keys.type)
    dtype = np.dtype(np.int64 if large else np.int32)
    if not len(keys) or offsets_buffer is None:
        offsets = np.zeros(1, dtype=np.int64)
    else:
        offsets = np.frombuffer(
            offsets_buffer, dtype, count=len(keys) + 1, offset=keys.offset * dtype.itemsize
        )
    data = np.empty(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)
    return offsets.astype(np.int64, copy=False), data


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


def _wide_decimal_runs(keys: Columnar, declared: DecimalType) -> ByteRuns | None:
    if not isinstance(keys, pa.Array) or keys.null_count:
        return None
    rescaled = _rescaled(keys, declared)
    if rescaled is None:
        return None
    try:
        rescaled.validate(full=True)
    except pa.ArrowInvalid:
        return None
    big_endian = _words(rescaled).view(np.uint8).reshape(-1, 16)[:, ::-1]
    # A leading byte is redundant if it only repeats the sign bit of the byte after it.
    fill = np.where(big_endian[:, :1] >> 7, np.uint8(0xFF), np.uint8(0))
    repeats = (big_endian[:, :-1] == fill) & (big_endian[:, 1:] >> 7 == fill & 1)
    kept = np.ones(big_endian.shape, dtype=bool)
    kept[:, :-1] = ~np.logical_and.accumulate(repeats, axis=1)
    offsets = np.zeros(len(keys) + 1, dtype=np.int64)
    np.cumsum(kept.sum(axis=1), out=offsets[1:])
    return offsets, big_endian[kept]


def checked_runs(canonical: Any) -> ByteRuns:
    """Offsets and data given by a caller, once they are known to lie within each other.

    >>> checked_runs((np.array([0, 2]), b"ab"))[1].tolist()
    [97, 98]
    """
    offsets = np.ascontiguousarray(canonical[0], dtype=np.int64)
    data = canonical[1]
    data = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    if not len(offsets) or offsets[0] < 0 or offsets[-1] > len(data) or (np.diff(offsets) < 0).any():
        raise SerializationError("offsets do not ascend within the data", code="SERIALIZATION.LENGTH")
    return offsets, np.ascontiguousarray(data)


# --- back to Arrow
# ---------------------------------------------------------------------------------------------


def arrow_of_ints(canonical: Int64s, declared: Type) -> pa.Array:
    """The Arrow array of canonical integers.

    >>> from statebackend.types import DATE
    >>> arrow_of_ints(np.array([1]), DATE).to_pylist()
    [datetime.date(1970, 1, 2)]
    """
    count = len(canonical)
    if isinstance(declared, DecimalType):
        values = np.stack((canonical, canonical >> 63), axis=1)
    elif declared.name == "BOOL":
        return pa.array(canonical != 0)
    elif declared.name == "FLOAT":
        values = canonical.astype(np.int32)
    else:
        width = declared.fixed_width or 8
        values = canonical if width == 8 else canonical.astype(f"<i{width}")
        if width != 8 and (values != canonical).any():
            raise OverflowError(f"a canonical integer is out of range for {declared.name}")
    return pa.Array.from_buffers(declared.arrow, count, [None, pa.py_buffer(np.ascontiguousarray(values))])


def arrow_of_byte_runs(offsets: Int64s, data: np.ndarray[Any, Any], declared: Type) -> pa.Array:
    """The Arrow array of canonical byte strings; with more than 2 GB of data its offsets are 64 bits wide.

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
            array.validate(full=True)
        except pa.ArrowInvalid:
            raise SerializationError(
                "a stored string is not valid UTF-8", code="SERIALIZATION.UTF8"
            ) from None
    return array


def _wide_decimals(offsets: Int64s, data: np.ndarray[Any, Any], declared: DecimalType) -> pa.Array:
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
