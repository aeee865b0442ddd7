"""Columns of keys: the forms in which they may come, to canonical integers or to offsets and data, and back to Arrow.

`ints_of` and `byte_runs_of` return None for a batch that needs the scalar encoder: it is a sequence of mixed objects,
or some key is refused and the scalar encoder, `encode_each`, will name it and the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.types import DecimalType, Type

Int64s: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
#: Offsets (n + 1 of them) and data.
ByteRuns: TypeAlias = tuple[Int64s, Bytes]
Columnar: TypeAlias = "pa.Array | np.ndarray[Any, Any] | list[Any]"

_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}


def as_columnar(keys: Any, what: str = "keys") -> Columnar:
    """``keys`` as one Arrow array without dictionary, a one-dimensional numpy array, or a list.

    ``what`` they are is for the error.
    """
    if not isinstance(keys, (pa.Array, pa.ChunkedArray)):
        if isinstance(keys, np.ndarray):
            if keys.ndim != 1 or keys.dtype.fields is not None:
                raise SerializationTypeError(
                    f"{what} are not a one-dimensional array", detail=f"{keys.ndim} dimensions"
                )
            return list(keys) if keys.dtype == object else keys
        if isinstance(keys, (str, bytes, bytearray)):
            raise SerializationTypeError(
                f"a single {type(keys).__name__} is not a batch of {what}", hint="give a list"
            )
        if hasattr(keys, "__arrow_c_array__"):
            keys = pa.array(keys)
        elif hasattr(keys, "__arrow_c_stream__"):
            keys = pa.chunked_array(keys)
        else:
            try:
                return keys if isinstance(keys, list) else list(keys)
            except TypeError:
                raise SerializationTypeError(f"a {type(keys).__name__} is not a batch of {what}") from None
    if pa.types.is_dictionary(keys.type):
        if isinstance(keys, pa.ChunkedArray):
            # Each chunk has its own dictionary, and Arrow cannot unite dictionaries of nested types.
            plain = [without_dictionary(chunk) for chunk in keys.chunks]
            keys = pa.chunked_array(plain) if plain else pa.array([], keys.type.value_type)
        else:
            keys = without_dictionary(keys)
    if isinstance(keys, pa.ChunkedArray):
        keys = _combined(keys)
    return keys


def without_dictionary(array: pa.DictionaryArray) -> pa.Array:
    """The values of a dictionary array, one for each row. O(n)."""
    values = without_views(array.dictionary)
    return pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()


def without_views(array: pa.Array) -> pa.Array:
    """The same values, with text and bytes instead of views, from which Arrow cannot take single rows. O(bytes)."""
    plain = _without_views(array.type)
    return array if plain == array.type else array.cast(plain)


def _without_views(arrow: pa.DataType) -> pa.DataType:
    types = pa.types
    if str(arrow) in ("string_view", "binary_view"):
        return pa.large_string() if str(arrow) == "string_view" else pa.large_binary()
    if types.is_struct(arrow):
        return pa.struct([field.with_type(_without_views(field.type)) for field in arrow])
    if types.is_map(arrow):
        key, item = arrow.key_field, arrow.item_field
        return pa.map_(
            key.with_type(_without_views(key.type)),
            item.with_type(_without_views(item.type)),
            arrow.keys_sorted,
        )
    inner = None if not types.is_nested(arrow) else getattr(arrow, "value_field", None)
    if inner is None:
        return arrow
    inner = inner.with_type(_without_views(inner.type))
    if types.is_list(arrow):
        return pa.list_(inner)
    if types.is_large_list(arrow):
        return pa.large_list(inner)
    return pa.list_(inner, arrow.list_size) if types.is_fixed_size_list(arrow) else arrow


def _combined(chunked: pa.ChunkedArray) -> pa.Array:
    if chunked.num_chunks == 1:
        return chunked.chunk(0)
    if pa.types.is_string(chunked.type) or pa.types.is_binary(chunked.type):
        # 32-bit offsets may be too narrow for all chunks together.
        chunked = chunked.cast(pa.large_string() if pa.types.is_string(chunked.type) else pa.large_binary())
    combined = chunked.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        combined = pa.concat_arrays(combined.chunks)
    return combined


def encode_each(keys: Columnar, encode: Callable[[Any], Any]) -> list[Any]:
    """The canonical forms of keys one by one; an error names the position of its key."""
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


# --- whole columns ---


def ints_of(keys: Columnar, declared: Type) -> Int64s | None:
    """Canonical integers of a batch; shares memory with int64 and microsecond columns."""
    if isinstance(keys, pa.Array) and not keys.null_count:
        if isinstance(declared, DecimalType):
            return _unscaled(keys, declared)
        if pa.types.is_timestamp(declared.arrow):
            if not pa.types.is_timestamp(keys.type) or (keys.type.tz is None) != (declared.arrow.tz is None):
                return None
            return _to_microseconds(_values(keys, np.int64), keys.type.unit)
        if declared.name == "DATE":
            return _to_days(keys)
    numbers = numpy_of(keys, declared)
    result = None if numbers is None else _ints_of_numpy(numbers, declared)
    return None if result is None else np.ascontiguousarray(result)


def numpy_of(column: Columnar, declared: Type) -> np.ndarray[Any, Any] | None:
    """A column as numpy's; None for one with nulls, or of anything but numbers."""
    if isinstance(column, list):
        wanted = declared.layout.python
        if not declared.layout.is_number or not column or set(map(type, column)) != {wanted}:
            return None
        try:
            return np.array(column, dtype=np.int64 if wanted is int else wanted)
        except OverflowError:
            return None
    if not isinstance(column, pa.Array):
        return column
    checks, kind = pa.types, column.type
    is_number = checks.is_integer(kind) or checks.is_floating(kind) or checks.is_boolean(kind)
    return column.to_numpy(zero_copy_only=False) if is_number and not column.null_count else None


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
    layout = declared.layout
    if layout.family == "integer":
        return _fitting(keys, layout.dtype) if kind in "iu" else None
    if layout.family == "boolean":
        return keys.astype(np.int64) if kind == "b" else None
    if layout.family == "float":
        return _float_bits(keys, np.dtype(layout.dtype))
    if kind != "M" or np.isnat(keys).any():
        return None
    unit, step = np.datetime_data(keys.dtype)
    if declared.name == "DATE":
        return keys.view(np.int64) if (unit, step) == ("D", 1) else None
    if declared.name == "TIMESTAMP_NTZ" and step == 1 and unit in (*_MICROSECONDS, "ns"):
        return _to_microseconds(keys.view(np.int64), unit)
    return None


def _fitting(keys: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any] | None:
    bounds = np.iinfo(dtype)
    own = np.iinfo(keys.dtype)
    could_pass = len(keys) and (own.min < bounds.min or own.max > bounds.max)
    if could_pass and (int(keys.min()) < bounds.min or int(keys.max()) > bounds.max):
        return None
    return keys.astype(np.int64, copy=False)


def floats_of(numbers: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """Numbers as floats of this type; None if there is one that it cannot hold, or only rounded to it."""
    if numbers.dtype.kind in "iu":
        exact = 2 ** (np.finfo(dtype).nmant + 1)
        if len(numbers) and (int(numbers.min()) < -exact or int(numbers.max()) > exact):
            return None  # beyond this not every integer is held exactly: look at each value
    elif numbers.dtype.kind != "f":
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        floats: np.ndarray[Any, Any] = numbers.astype(dtype, copy=False)
    # A number that rounds to infinity is out of range.
    narrows = numbers.dtype.itemsize > dtype.itemsize
    return None if narrows and (np.isinf(floats) & ~np.isinf(numbers)).any() else floats


def _float_bits(keys: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    floats = floats_of(keys, dtype)
    if floats is None:
        return None
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        floats = np.add(floats, dtype.type(0))  # -0.0 becomes 0.0
    missing = np.isnan(floats)
    if missing.any():
        floats[missing] = np.nan
    bits: np.ndarray[Any, Any] = floats.view(f"i{dtype.itemsize}").astype(np.int64, copy=False)
    return bits


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


def _rescaled(keys: pa.Array, declared: DecimalType) -> pa.Array | None:
    """Convert a decimal array exactly to the Arrow type of ``declared``; None if that is not possible."""
    try:
        return keys.cast(declared.arrow) if pa.types.is_decimal(keys.type) else None
    except pa.ArrowInvalid:
        return None


def _unscaled(keys: pa.Array, declared: DecimalType) -> Int64s | None:
    rescaled = _rescaled(keys, declared)
    if rescaled is None:
        return None
    words = _words(rescaled)
    # Arrow does not check that values respect their precision when an array is made.
    low, high, limit = words[:, 0], words[:, 1], 10**declared.precision
    is_fit = (high == low >> 63).all() and (low > -limit).all() and (low < limit).all()
    return np.ascontiguousarray(low) if is_fit else None


def wide_decimals_of(keys: Columnar, declared: DecimalType) -> Bytes | None:
    """The unscaled values of long decimals, rows of 16 bytes; None for a batch that needs the scalar encoder."""
    rescaled = _rescaled(keys, declared) if isinstance(keys, pa.Array) and not keys.null_count else None
    if rescaled is None:
        return None
    try:
        rescaled.validate(full=True)  # Arrow does not guarantee that values respect their precision
    except pa.ArrowInvalid:
        return None
    return np.ascontiguousarray(_words(rescaled)).view(np.uint8).reshape(-1, 16)


def _words(decimals: pa.Array) -> np.ndarray[Any, Any]:
    """Low and high 64-bit words of a decimal128 array, one row each, sharing its memory."""
    return _values(decimals, (np.int64, 2))


def arrow_of_ints(canonical: Int64s, declared: Type) -> pa.Array:
    """The Arrow array of canonical integers."""
    count = len(canonical)
    if isinstance(declared, DecimalType):
        values = np.stack((canonical, canonical >> 63), axis=1)
    elif declared.layout.family == "boolean":
        return pa.array(canonical != 0)
    else:
        width = declared.fixed_width or 8
        values = canonical if width == 8 else canonical.astype(f"<i{width}")
        if width != 8 and (values != canonical).any():
            raise OverflowError(f"a canonical integer is out of range for {declared.name}")
    return pa.Array.from_buffers(declared.arrow, count, [None, pa.py_buffer(np.ascontiguousarray(values))])


#: Set in a word of eight bytes unless all of them are ASCII.
_HIGH_BITS = 0x8080_8080_8080_8080


def byte_runs_of(keys: Columnar, declared: Type) -> ByteRuns | None:
    """Offsets and data of STRING, BYTES or wide DECIMAL keys; shares the data of string columns."""
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
    """Raise unless each value is in the data: to look at one that does not ends the process."""
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
    """Return True for bytes, or ASCII, with right offsets: that is seen without a look at each value. O(bytes)."""
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


def runs_of_list(parts: Sequence[bytes]) -> ByteRuns:
    """Offsets and data of a list of byte strings."""
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), out=offsets[1:])
    return offsets, np.frombuffer(b"".join(parts), dtype=np.uint8)


def canonical_list(canonical: Any) -> list[Any]:
    """The keys of a batch, in the form of `encode_many`, one by one."""
    if not isinstance(canonical, tuple):
        return canonical.tolist()  # type: ignore[no-any-return]
    ends, data = canonical[0].tolist(), bytes(canonical[1])
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def canonical_batch(keys: Sequence[Any], kind: str) -> Any:
    """The opposite of `canonical_list`, for an encoder of this ``kind``."""
    return np.array(keys, dtype=np.int64) if kind == "int" else runs_of_list(keys)


def count_of(canonical: Any) -> int:
    """The number of rows of a column of keys or values, an array or (offsets, data)."""
    return len(canonical[0]) - 1 if isinstance(canonical, tuple) else len(canonical)


def canonical_column(canonical: Any) -> pa.Array:
    """An array or (offsets, data) as Arrow's column. O(1), or O(bytes) where they are not contiguous."""
    if not isinstance(canonical, tuple):
        return pa.array(canonical)
    offsets, data = (pa.py_buffer(np.ascontiguousarray(part)) for part in canonical)
    return pa.Array.from_buffers(pa.large_binary(), count_of(canonical), [None, offsets, data])


def take_rows(values: Any, rows: np.ndarray[Any, Any]) -> Any:
    """Some rows of an array or of (offsets, data). O(rows and their bytes)."""
    if not isinstance(values, tuple):
        return values[rows]
    _, offsets, data = canonical_column(values).take(pa.array(rows)).buffers()
    empty = np.empty(0, dtype=np.uint8)
    return (
        np.frombuffer(offsets, dtype=np.int64, count=len(rows) + 1),
        empty if data is None else np.frombuffer(data, dtype=np.uint8),
    )


def _wide_decimal_runs(keys: Columnar, declared: DecimalType) -> ByteRuns | None:
    little_endian = wide_decimals_of(keys, declared)
    if little_endian is None:
        return None
    big_endian = little_endian[:, ::-1]
    # A leading byte is redundant if it only repeats the sign bit of the byte after it.
    fill = np.where(big_endian[:, :1] >> 7, np.uint8(0xFF), np.uint8(0))
    repeats = (big_endian[:, :-1] == fill) & (big_endian[:, 1:] >> 7 == fill & 1)
    kept = np.ones(big_endian.shape, dtype=bool)
    kept[:, :-1] = ~np.logical_and.accumulate(repeats, axis=1)
    offsets = np.zeros(len(keys) + 1, dtype=np.int64)
    np.cumsum(kept.sum(axis=1), out=offsets[1:])
    return offsets, big_endian[kept]


def checked_runs(canonical: Any) -> ByteRuns:
    """Check that offsets and data from a caller fit each other, and return them."""
    offsets = np.ascontiguousarray(canonical[0], dtype=np.int64)
    data = canonical[1]
    data = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    if not len(offsets) or offsets[0] < 0 or offsets[-1] > len(data) or (np.diff(offsets) < 0).any():
        raise SerializationError("offsets do not ascend within the data", code="SERIALIZATION.LENGTH")
    return offsets, np.ascontiguousarray(data)


def arrow_of_byte_runs(offsets: Int64s, data: Bytes, declared: Type) -> pa.Array:
    """The Arrow array of canonical byte strings; for more than 2 GB of data its offsets are 64 bits wide."""
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
