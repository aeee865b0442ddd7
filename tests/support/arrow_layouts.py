"""The same values in every layout that Arrow has for them.

>>> import pyarrow as pa
>>> from statebackend.types import LIST, STRING
>>> column = pa.array([["a"], None])
>>> str(laid_out(column, LIST(STRING), "view").type)
'list_view<item: string_view>'
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa

from statebackend import types as t

#: The layouts that change a column in depth, and those that only cut or stack it.
DEEP = ("dictionary", "large", "view", "other")
LAYOUTS = ("plain", "sliced", "chunked", "chunked dictionary", *DEEP)


def laid_out(array: pa.Array, declared: t.Type, layout: str) -> Any:
    """The values of an array, which is of the type's own Arrow type, in another layout.

    ``other`` has other widths of integers, wider decimals, and the fields of a ROW in another order.
    """
    if layout == "sliced":
        return pa.concat_arrays([array[:1], array, array[-1:]])[1 : 1 + len(array)]
    if layout == "chunked":
        return pa.chunked_array([array[:1], array[:0], array[1:]])
    if layout == "chunked dictionary":
        return pa.chunked_array([_dictionary(array[:1]), _dictionary(array[1:])])
    if layout in DEEP:
        made = _relaid(array, declared, layout)
        return _dictionary(made) if layout == "dictionary" and _is_nested(declared) else made
    return array


def _is_nested(declared: t.Type) -> bool:
    return declared.name in ("LIST", "MAP", "TUPLE", "ROW")


def _dictionary(array: pa.Array) -> pa.DictionaryArray:
    """One entry for each row, in reverse; a null is a null index, or an index to a null."""
    count = len(array)
    indices = np.arange(count)[::-1]
    mask = array.is_null().to_numpy(zero_copy_only=False) & (np.arange(count) % 2 == 0)
    return pa.DictionaryArray.from_arrays(
        pa.array(indices, mask=mask), array.take(pa.array(indices, pa.int64()))
    )


def _leaf(array: pa.Array, declared: t.Type, layout: str) -> pa.Array:
    name = declared.name
    if layout == "dictionary":
        return _dictionary(array)
    if name in ("STRING", "BYTES") and layout != "other":
        kinds = {"large": ("large_string", "large_binary"), "view": ("string_view", "binary_view")}
        return array.cast(getattr(pa, kinds[layout][name == "BYTES"])())
    if layout != "other":
        return array
    if name in ("INT", "SHORT", "BYTE"):
        return array.cast(pa.int64())
    if name == "FLOAT":
        return array.cast(pa.float64())
    if isinstance(declared, t.DecimalType):
        return array.cast(pa.decimal256(declared.precision + 2, declared.scale + 1))
    return array


def _bits(array: pa.Array) -> pa.Buffer:
    return pa.py_buffer(np.packbits(array.is_valid().to_numpy(zero_copy_only=False), bitorder="little"))


def _relaid(array: pa.Array, declared: t.Type, layout: str) -> pa.Array:
    if isinstance(declared, (t.TupleType, t.RowType)):
        order = list(range(len(declared.types)))
        if isinstance(declared, t.RowType) and layout == "other":
            order.reverse()
        children = [_relaid(array.field(i), declared.types[i], layout) for i in order]
        names = [array.type.field(i).name for i in order]
        return pa.StructArray.from_arrays(children, names=names, mask=array.is_null())
    if isinstance(declared, t.ListType):
        return _relaid_list(array, declared, layout)
    if isinstance(declared, t.MapType):
        keys, items = (
            _relaid(array.keys, declared.key, layout),
            _relaid(array.items, declared.value, layout),
        )
        arrow = pa.map_(keys.type, items.type)
        entries = pa.Array.from_buffers(arrow.field(0).type, len(keys), [None], children=[keys, items])
        offsets = pa.py_buffer(array.offsets.to_numpy())
        return pa.Array.from_buffers(arrow, len(array), [_bits(array), offsets], children=[entries])
    return _leaf(array, declared, layout)


def _relaid_list(array: pa.Array, declared: t.ListType, layout: str) -> pa.Array:
    ends = array.offsets.to_numpy()
    if layout == "view":
        # The lists lie in reverse, the last one first.
        spans = [np.arange(*span) for span in itertools.pairwise(ends.tolist())]
        places = np.concatenate([*spans[::-1], np.empty(0, np.int64)]).astype(np.int64)
        values = _relaid(array.values.take(pa.array(places)), declared.element, layout)
        sizes = np.diff(ends).astype(np.int32)
        offsets = (sizes.sum() - np.cumsum(sizes)).astype(np.int32)
        buffers = [_bits(array), pa.py_buffer(offsets), pa.py_buffer(sizes)]
        return pa.Array.from_buffers(pa.list_view(values.type), len(array), buffers, children=[values])
    values = _relaid(array.values, declared.element, layout)
    if layout == "large":
        wide = pa.py_buffer(ends.astype(np.int64))
        return pa.Array.from_buffers(
            pa.large_list(values.type), len(array), [_bits(array), wide], children=[values]
        )
    return pa.Array.from_buffers(
        pa.list_(values.type), len(array), [_bits(array), pa.py_buffer(ends)], children=[values]
    )
