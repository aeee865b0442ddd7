"""Batches of composite keys: Arrow structs to canonical bytes and back, field by field over all rows.

>>> from statebackend.keys import key_encoder
>>> encoder = key_encoder("struct<a:bigint,b:string>")
>>> structs = pa.array([{"a": 1, "b": "x"}, {"a": None, "b": ""}], encoder.declared_type.arrow)
>>> encoder.decode_many(encoder.encode_many(structs)).equals(structs)
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from statebackend.errors import SerializationError
from statebackend.keys.key_columns import ByteRuns, Columnar, Int64s, without_views
from statebackend.types import RowType

if TYPE_CHECKING:
    from statebackend.keys.encoders import CompositeKeyEncoder

__all__ = ["decode_structs", "encode_structs", "plain_key"]

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
        plain_key(part, key[name]) if hasattr(part, "parts") else key[name]  # type: ignore[arg-type]
        for part, name in pairs
    )


class _Leaf:
    """One field over all rows: the positions of its presence bytes and values, and the values that are present."""

    def __init__(self, active: Mask, present: Mask, values: Any) -> None:
        self.active = active
        self.present = present
        self.values = values  # int64s, byte runs, or None for the head of a nested composite


def encode_structs(encoder: CompositeKeyEncoder, keys: Columnar) -> ByteRuns | None:
    """Offsets and data of struct keys; None if the scalar encoder must look. O(rows x fields + bytes).

    >>> from statebackend.keys import key_encoder
    >>> encode_structs(key_encoder(tuple[int, int]), [(1, 2)]) is None
    True
    """
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
        nested = getattr(part, "parts", None)
        if nested is not None:
            if not pa.types.is_struct(child.type):
                return False
            leaves.append(_Leaf(active, present, None))
            if not _collect(part, child, present, leaves):  # type: ignore[arg-type]
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
        raise _unreadable(encoder)
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
            raise _unreadable(encoder)
        flags = data[position[rows]]
        if (flags > 1).any():
            raise _unreadable(encoder)
        position[rows] += 1
        present = rows[flags == 1]
        absent = np.ones(count, dtype=bool)
        absent[present] = False
        if getattr(part, "parts", None) is not None:
            children.append(_parse(part, data, position, end, present, absent))  # type: ignore[arg-type]
            continue
        values: Any
        if part.kind == "int":
            values = _words_at(encoder, data, position, end, present, "<i8")
        else:
            lengths = _words_at(encoder, data, position, end, present, "<u4").astype(np.int64)
            start = position[present]
            if (lengths > end[present] - start).any():
                raise _unreadable(encoder)
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
        raise _unreadable(encoder)
    position[rows] += size
    return np.ascontiguousarray(data[start[:, None] + np.arange(size)]).view(dtype).reshape(-1)


def _unreadable(encoder: CompositeKeyEncoder) -> SerializationError:
    return SerializationError(
        f"the canonical bytes of a {encoder.declared_type.name} key cannot be read",
        code="SERIALIZATION.LENGTH",
    )
