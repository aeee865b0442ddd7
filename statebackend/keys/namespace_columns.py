"""Encoded namespaces as columns that people and other programs can read.

>>> from statebackend.keys import VOID, TimeWindow, encode_namespace
>>> encoded = pa.array([encode_namespace(each) for each in (TimeWindow(0, 60), VOID)])
>>> readable_namespaces(encoded).to_pylist()
[{'start': 0, 'end': 60}, None]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from statebackend.keys.namespaces import VOID, TimeWindow, decode_namespace

__all__ = ["readable_namespaces"]

_WINDOW = pa.struct([("start", pa.int64()), ("end", pa.int64())])


def _same(namespace: Any) -> Any:
    return namespace


def _window(namespace: TimeWindow) -> dict[str, int]:
    return {"start": namespace.start, "end": namespace.end}


#: For namespaces of a single sort: the type of their column, and the conversion into it.
_SORTS: dict[type, tuple[pa.DataType, Callable[[Any], Any]]] = {
    int: (pa.int64(), _same),
    str: (pa.string(), _same),
    bytes: (pa.binary(), _same),
    TimeWindow: (_WINDOW, _window),
}


def readable_namespaces(encoded: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Decode encoded namespaces, each distinct one once; O(n).

    `VOID` and null become null. Namespaces of one sort become int64, string, binary, or the start and end of windows.
    Tuples, and namespaces of several sorts, become text, as Python shows them.

    >>> from statebackend.keys import encode_namespace
    >>> readable_namespaces(pa.array([encode_namespace(7), encode_namespace(("a", 7))])).to_pylist()
    ['7', "('a', 7)"]
    """
    if isinstance(encoded, pa.ChunkedArray):
        encoded = pa.concat_arrays(encoded.chunks) if encoded.num_chunks else pa.array([], pa.binary())
    numbered = pc.dictionary_encode(encoded)
    distinct = [decode_namespace(each or b"") for each in numbered.dictionary.to_pylist()]
    sorts = {type(each) for each in distinct if each is not VOID}
    sort = _SORTS.get(sorts.pop()) if len(sorts) == 1 else None
    arrow, show = (pa.string(), repr) if sort is None else sort
    shown = pa.array([None if each is VOID else show(each) for each in distinct], arrow)
    return shown.take(numbered.indices)
