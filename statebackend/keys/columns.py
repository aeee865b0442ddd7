"""The forms in which columns of keys and times may come, keys encoded one at a time, and the windows of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.errors import SerializationError, SerializationTypeError, UsageError

Int64s: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
#: Offsets (n + 1 of them) and data.
ByteRuns: TypeAlias = tuple[Int64s, Bytes]
Columnar: TypeAlias = "pa.Array | np.ndarray[Any, Any] | list[Any]"


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
            # Each chunk has a dictionary of its own, and Arrow cannot unite those of nested types.
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


# --- times ---

_TICKS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


class TimeColumn(NamedTuple):
    """The times of rows."""

    #: Milliseconds; whatever for a null.
    own: NDArray[np.int64]
    is_null: NDArray[np.bool_]


def time_column(column: Any, what: str = "the column of times", where: str = "") -> TimeColumn:
    """Times as milliseconds, of a column of timestamps or of whole milliseconds; parts of one are cut off. O(n).

    ``what`` and ``where`` are for the error.
    """
    columnar = as_columnar(column, "times")
    if not isinstance(columnar, pa.Array):
        try:
            columnar = pa.array(columnar)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
            raise _not_times(what, f"{where}values that are not times of 64 bits") from None
    kind = columnar.type
    if pa.types.is_null(kind):
        columnar = columnar.cast(pa.int64())
    elif not pa.types.is_timestamp(kind) and not pa.types.is_integer(kind):
        raise _not_times(what, f"{where}{kind}")
    is_null = columnar.is_null().to_numpy(zero_copy_only=False)
    times, ticks = _TICKS[kind.unit] if pa.types.is_timestamp(kind) else (1, 1)
    try:
        own = columnar.cast(pa.int64()).fill_null(0).to_numpy()
        if times > 1 and len(own):
            pa.array([int(own.min()) * times, int(own.max()) * times], pa.int64())
    except (pa.ArrowInvalid, OverflowError):
        raise _not_times(what, f"{where}{kind} beyond 64 bits of milliseconds") from None
    if times > 1:
        own = own * times
    return TimeColumn(np.floor_divide(own, ticks) if ticks > 1 else own, is_null)


def _not_times(what: str, detail: str) -> UsageError:
    return UsageError(
        f"{what} is neither a timestamp nor a number of milliseconds",
        detail=detail,
        hint="give a column of timestamps, or of milliseconds as integers",
    )


WINDOW = pa.struct([("start", pa.int64()), ("end", pa.int64())])


class AssignedWindows(NamedTuple):
    """The windows that rows are in, one after the other: each row comes once for each of its windows."""

    #: For each window the number of its row, as ``batch.take(rows)`` takes it.
    rows: pa.Array
    #: The windows, as the ``namespaces`` of vectorised calls: structs of a start and an end, in milliseconds.
    windows: pa.StructArray


def windows_of(times: Any, size: int, slide: int | None = None, offset: int = 0) -> AssignedWindows:
    """The windows of each time, the earliest first; a null is in none. O(n and the windows)."""
    step = size if slide is None else slide
    if size <= 0 or step <= 0:
        raise UsageError("the size of a window, and the time from one to the next, are more than nothing")
    own, is_null = time_column(times)
    rows = np.flatnonzero(~is_null)
    if len(rows) < len(own):
        own = own[rows]
    shift = offset % step
    if len(own) and not -(2**63) + size + step <= int(own.min()) <= int(own.max()) < 2**63 - size - step:
        raise OverflowError("a window of these times is longer than 64 bits of milliseconds")
    past = (own - shift) % step
    last = own - past
    if step >= size:
        is_inside = past < size
        starts = last if is_inside.all() else last[is_inside]
        rows = rows if is_inside.all() else rows[is_inside]
    else:
        counts = (size - 1 - past) // step + 1
        ends = np.cumsum(counts)
        before = np.repeat(ends, counts) - np.arange(1, (ends[-1] if len(ends) else 0) + 1)
        starts = np.repeat(last, counts) - before * step
        rows = np.repeat(rows, counts)
    fields = [pa.array(starts), pa.array(starts + size)]
    return AssignedWindows(pa.array(rows), pa.StructArray.from_arrays(fields, fields=list(WINDOW)))
