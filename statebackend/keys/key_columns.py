"""The forms in which a batch of keys may come, and a way to encode them one key at a time.

>>> as_columnar(range(2))
[0, 1]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError, SerializationTypeError

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
