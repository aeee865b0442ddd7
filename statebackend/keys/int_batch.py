"""Batches of keys of kind "int": whole columns to canonical integers and back to Arrow.

`ints_of` returns None for a batch that needs the scalar encoder: it is a sequence of mixed objects, or some key is
refused and the scalar encoder will name it and the reason.

>>> from statebackend.types import INT
>>> ints_of(np.array([1, 2], dtype=np.uint8), INT)
array([1, 2])
>>> ints_of(np.array([1.5]), INT) is None
True
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError
from statebackend.keys.key_columns import Columnar, Int64s
from statebackend.types import DecimalType, Type

__all__ = ["arrow_of_ints", "decimal_words", "ints_of", "rescaled_decimals"]

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
            return None  # beyond this not every integer is held exactly: look at each value
    with np.errstate(over="ignore", invalid="ignore"):
        floats: np.ndarray[Any, np.dtype[Any]] = keys.astype(target)
        np.add(floats, target(0), out=floats)  # -0.0 becomes 0.0; a signalling NaN raises no error
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
        if len(odd):  # reading these one by one would cut off the time of day
            raise SerializationError("a date64 is not a whole day", detail=f"position {odd[0]}")
        return day_numbers
    return None


def rescaled_decimals(keys: pa.Array, declared: DecimalType) -> pa.Array | None:
    """Convert a decimal array exactly to the Arrow type of ``declared``; None if that is not possible.

    >>> rescaled_decimals(pa.array([1]).cast(pa.decimal128(19, 0)), DecimalType(10, 2)).type
    Decimal128Type(decimal128(10, 2))
    """
    if not pa.types.is_decimal(keys.type):
        return None
    if keys.type == declared.arrow:
        return keys
    try:
        return keys.cast(declared.arrow)
    except pa.ArrowInvalid:
        return None


def _unscaled(keys: pa.Array, declared: DecimalType) -> Int64s | None:
    rescaled = rescaled_decimals(keys, declared)
    if rescaled is None:
        return None
    words = decimal_words(rescaled)
    return np.ascontiguousarray(words[:, 0]) if _fit_precision(words, declared.precision) else None


def decimal_words(decimals: pa.Array) -> np.ndarray[Any, Any]:
    """Low and high 64-bit words of a decimal128 array, one row each, sharing its memory.

    >>> decimal_words(pa.array([-1]).cast(pa.decimal128(19, 0))).tolist()
    [[-1, -1]]
    """
    buffer = decimals.buffers()[1]
    if buffer is None or not len(decimals):
        return np.empty((0, 2), dtype=np.int64)
    words = np.frombuffer(buffer, dtype=np.int64, count=2 * len(decimals), offset=decimals.offset * 16)
    return words.reshape(-1, 2)


def _fit_precision(words: np.ndarray[Any, Any], precision: int) -> bool:
    # Arrow does not check that values respect their precision when an array is made.
    low, high = words[:, 0], words[:, 1]
    limit = 10**precision
    return bool((high == low >> 63).all() and (low > -limit).all() and (low < limit).all())


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
