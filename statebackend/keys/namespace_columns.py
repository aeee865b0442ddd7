"""Encoded namespaces as columns that people and other programs can read.

>>> from statebackend.keys import VOID, TimeWindow, encode_namespace
>>> encoded = pa.array([encode_namespace(each) for each in (TimeWindow(0, 60), VOID)])
>>> readable_namespaces(encoded).to_pylist()
[{'start': 0, 'end': 60}, None]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.keys.key_columns import ByteRuns, as_columnar, without_views
from statebackend.keys.namespaces import VOID, TimeWindow, decode_namespace, encode_namespace
from statebackend.keys.run_batch import runs_of_list, take_rows
from statebackend.keys.window_columns import WINDOW

__all__ = ["NamespaceColumn", "namespace_column", "readable_namespaces"]


def _same(namespace: Any) -> Any:
    return namespace


def _window(namespace: TimeWindow) -> dict[str, int]:
    return {"start": namespace.start, "end": namespace.end}


#: For namespaces of a single sort: the type of their column, and the conversion into it.
_SORTS: dict[type, tuple[pa.DataType, Callable[[Any], Any]]] = {
    int: (pa.int64(), _same),
    str: (pa.string(), _same),
    bytes: (pa.binary(), _same),
    TimeWindow: (WINDOW, _window),
}


class NamespaceColumn(NamedTuple):
    """A column of namespaces: ``distinct`` are the encoded ones, in the order of their first rows.

    >>> namespace_column([7, VOID, 7]).numbers.tolist()
    [0, 1, 0]
    """

    #: For each row the number of its namespace.
    numbers: NDArray[np.int64]
    distinct: list[bytes]
    #: The type of the Arrow column that it was; null where it was none, or held nothing but nulls.
    sort: pa.DataType = pa.null()

    def take(self, rows: NDArray[np.int64]) -> NamespaceColumn:
        """Some of the rows, by their numbers. O(rows).

        >>> namespace_column([7, VOID, 7]).take(np.array([1])).shown().to_pylist()
        [None]
        """
        return self._replace(numbers=self.numbers[rows])

    def runs(self) -> ByteRuns:
        """The encoded namespace of each row: offsets, and data. O(bytes).

        >>> namespace_column(["a", VOID]).runs()[0].tolist()
        [0, 6, 6]
        """
        runs: ByteRuns = take_rows(runs_of_list(self.distinct), self.numbers)
        return runs

    def shown(self) -> pa.Array | list[Any]:
        """The column as `namespace_column` takes it: an array if they are of one sort, else a list of namespaces.

        >>> namespace_column([TimeWindow(0, 60), VOID]).shown().to_pylist()
        [{'start': 0, 'end': 60}, None]
        """
        if not pa.types.is_null(self.sort) and not any(self.distinct):
            return pa.nulls(len(self.numbers), self.sort)
        decoded = list(map(decode_namespace, self.distinct))
        sorts = {type(each) for each in decoded if each is not VOID}
        if len(sorts) > 1 or not sorts <= _SORTS.keys():
            return [decoded[number] for number in self.numbers.tolist()]
        if not sorts:
            return pa.nulls(len(self.numbers))
        return readable_namespaces(pa.array(self.distinct, pa.binary())).take(pa.array(self.numbers))


def namespace_column(column: Any) -> NamespaceColumn:
    """Encode a column of namespaces, each distinct one once; O(n).

    It is an Arrow or numpy column of integers, texts or bytes, or of structs of a start and an end, which are
    milliseconds or timestamps: those are windows. A null is `VOID`. Or it is a sequence of namespaces.

    >>> windows = pa.array([{"start": 0, "end": 60}, None])
    >>> namespace_column(windows).distinct == [encode_namespace(TimeWindow(0, 60)), b""]
    True
    >>> namespace_column(pa.array(["a"]).cast(pa.string_view())).shown().to_pylist()
    ['a']
    """
    columnar = as_columnar(column, "namespaces")
    if isinstance(columnar, np.ndarray) and columnar.dtype.kind in "iuU":
        columnar = pa.array(columnar)
    if isinstance(columnar, pa.Array):
        columnar = without_views(columnar)
    if not isinstance(columnar, pa.Array):
        encoded = [encode_namespace(VOID if each is None else each) for each in columnar]
        return _numbered(pa.array(encoded, pa.binary()), lambda each: each, pa.null())
    kind = columnar.type
    if pa.types.is_struct(kind) and {field.name for field in kind} == {"start", "end"}:
        return _of_windows(columnar)
    if pa.types.is_integer(kind):
        return _numbered(columnar, encode_namespace, pa.int64())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _numbered(columnar, encode_namespace, pa.string())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _numbered(columnar, encode_namespace, pa.binary())
    if pa.types.is_null(kind):
        return _numbered(columnar.cast(pa.binary()), encode_namespace, kind)
    raise SerializationTypeError(
        "a column of this type holds no namespaces",
        code="SERIALIZATION.NAMESPACE",
        detail=str(kind),
        hint="windows are structs of start and end; others are integers, texts or bytes; or give a list",
    )


def _numbered(column: pa.Array, encode: Callable[[Any], bytes], sort: pa.DataType) -> NamespaceColumn:
    numbered = pc.dictionary_encode(column, null_encoding="encode")
    distinct = [b"" if each is None else encode(each) for each in numbered.dictionary.to_pylist()]
    return NamespaceColumn(numbered.indices.to_numpy().astype(np.int64), distinct, sort)


def _of_windows(windows: pa.Array) -> NamespaceColumn:
    starts, ends = (_milliseconds(windows.field(name)) for name in ("start", "end"))
    missing = windows.is_null() if windows.null_count else None
    if starts.null_count or ends.null_count:
        unknown = pc.or_(starts.is_null(), ends.is_null())
        if pc.any(unknown if missing is None else pc.and_not(unknown, missing)).as_py():
            raise SerializationError("a window has no start, or no end", code="SERIALIZATION.NAMESPACE")
    if missing is not None:
        starts, ends = pc.if_else(missing, None, starts), pc.if_else(missing, 0, ends)
    numbers, first = _numbers_of(starts)
    upto = ends.to_numpy()
    if not np.array_equal(upto, upto[first][numbers]):
        # Windows of several lengths begin at one time.
        both = pa.array(numbers * len(upto) + _numbers_of(ends)[0])
        numbers, first = _numbers_of(both if missing is None else pc.if_else(missing, None, both))
    shown = zip(starts.take(pa.array(first)).to_pylist(), upto[first].tolist(), strict=True)
    distinct = [b"" if start is None else encode_namespace(TimeWindow(start, end)) for start, end in shown]
    return NamespaceColumn(numbers, distinct, WINDOW)


def _numbers_of(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The number of each row's value among the distinct ones, nulls being one, and the first row of each."""
    numbered = pc.dictionary_encode(column, null_encoding="encode")
    numbers = numbered.indices.to_numpy().astype(np.int64)
    first = np.empty(len(numbered.dictionary), dtype=np.int64)
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
    return numbers, first


def _milliseconds(bounds: pa.Array) -> pa.Array:
    try:
        if pa.types.is_timestamp(bounds.type):
            bounds = bounds.cast(pa.timestamp("ms", bounds.type.tz))
        elif not pa.types.is_integer(bounds.type):
            raise SerializationTypeError(
                "the bounds of windows are milliseconds or timestamps",
                code="SERIALIZATION.NAMESPACE",
                detail=str(bounds.type),
            )
        return bounds.cast(pa.int64())
    except pa.ArrowInvalid:
        raise SerializationError(
            "the bounds of a window are no whole milliseconds", code="SERIALIZATION.NAMESPACE"
        ) from None


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
