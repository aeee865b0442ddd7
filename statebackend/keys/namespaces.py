"""Namespaces and their bytes. The bytes carry their own type, so namespaces need no declared type.

`VOID` is the empty string. All others begin with a tag byte. After it come 8 bytes, big-endian with the sign bit
flipped, for an int (so that bytes sort as the numbers do); two of these for a `TimeWindow`; a length (u32, big-endian)
and the bytes for str and bytes; a count (u32) and the encoded parts for a tuple.
"""

from __future__ import annotations

import dataclasses
import datetime
import operator
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.errors import SerializationError, SerializationTypeError, UsageError, usage
from statebackend.keys.columns import ByteRuns, as_columnar, runs_of_list, take_rows, without_views
from statebackend.keys.time_columns import WINDOW, AssignedWindows, windows_of


class _Sentinel:
    """A single object with a name, the same one after pickling."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name


#: The namespace of a state that uses no other.
VOID = _Sentinel("VOID")
#: Replaces a namespace in calls that can take all of them.
ALL_NAMESPACES = _Sentinel("ALL_NAMESPACES")


@dataclasses.dataclass(frozen=True, order=True)
class TimeWindow:
    """The window of time from ``start`` to before ``end``, in milliseconds; ordered by start, then end.

    >>> window = TimeWindow(0, 60_000)
    >>> window.max_timestamp(), window < TimeWindow(60_000, 120_000)
    (59999, True)
    """

    __slots__ = ("end", "start")
    start: int
    end: int

    def __init__(self, start: int, end: int) -> None:
        object.__setattr__(self, "start", _integer(start))
        object.__setattr__(self, "end", _integer(end))

    def __reduce__(self) -> tuple[Any, ...]:
        return TimeWindow, (self.start, self.end)

    @classmethod
    def of(
        cls, timestamp: int, size: int | datetime.timedelta, offset: int | datetime.timedelta = 0
    ) -> TimeWindow:
        """The window of this size that a time is in; windows begin at multiples of it, plus ``offset``.

        >>> TimeWindow.of(65_000, datetime.timedelta(minutes=1))
        TimeWindow(start=60000, end=120000)
        >>> TimeWindow.of(-1, 10, offset=3)
        TimeWindow(start=-7, end=3)
        """
        width, shift = _duration(size), _duration(offset)
        if width <= 0:
            raise usage.argument("the size of a window is more than nothing")
        time = _integer(timestamp)
        start = time - (time - shift) % width
        return cls(start, start + width)

    @staticmethod
    def assign_many(
        times: Any,
        size: int | datetime.timedelta,
        *,
        slide: int | datetime.timedelta | None = None,
        offset: int | datetime.timedelta = 0,
    ) -> AssignedWindows:
        """The windows that a column of times is in: the number of each one's row, and the windows as a column. O(n).

        Each time is in one window of this size; with ``slide``, in all that begin so far one after the other, the
        earliest first. A null is in none. Times are milliseconds or timestamps.

        >>> rows, windows = TimeWindow.assign_many([65_000, None], datetime.timedelta(minutes=1))
        >>> rows.to_pylist(), windows.to_pylist()
        ([0], [{'start': 60000, 'end': 120000}])
        >>> rows, windows = TimeWindow.assign_many([7, 12], 10, slide=5)
        >>> rows.to_pylist(), windows.field("start").to_pylist()
        ([0, 0, 1, 1], [0, 5, 5, 10])
        """
        step = None if slide is None else _duration(slide)
        return windows_of(times, _duration(size), step, _duration(offset))

    def max_timestamp(self) -> int:
        """The last millisecond that still belongs to the window.

        >>> TimeWindow(0, 10).max_timestamp()
        9
        """
        return self.end - 1

    def intersects(self, other: TimeWindow) -> bool:
        """Return True if the windows overlap or touch; Flink merges sessions by the same rule.

        >>> TimeWindow(0, 10).intersects(TimeWindow(10, 20))
        True
        """
        return self.start <= other.end and self.end >= other.start

    def cover(self, other: TimeWindow) -> TimeWindow:
        """The smallest window that covers both.

        >>> TimeWindow(0, 10).cover(TimeWindow(5, 20))
        TimeWindow(start=0, end=20)
        """
        return TimeWindow(min(self.start, other.start), max(self.end, other.end))


Namespace: TypeAlias = "_Sentinel | TimeWindow | int | str | bytes | tuple[Namespace, ...]"


def _duration(value: Any) -> int:
    if isinstance(value, datetime.timedelta):
        milliseconds, rest = divmod(value, datetime.timedelta(milliseconds=1))
        if rest:
            raise UsageError("a duration is a whole number of milliseconds", code="USAGE.DURATION")
        return milliseconds
    return _integer(value)


_INT, _WINDOW, _STR, _BYTES, _TUPLE = 1, 2, 3, 4, 5
_LENGTH = struct.Struct(">I")
_INTEGER = struct.Struct(">Q")
_FLIP = 1 << 63
_MAX_DEPTH = 64


def _integer(value: Any) -> int:
    if isinstance(value, (bool, np.bool_, float)):
        raise _refused(value)
    try:
        number = operator.index(value)
    except TypeError:
        raise _refused(value) from None
    if not -_FLIP <= number < _FLIP:
        raise OverflowError("integer out of range for a namespace (64 bits)")
    return number


def _refused(value: Any) -> SerializationTypeError:
    return SerializationTypeError(
        f"a value of type {type(value).__name__} cannot be a namespace",
        code="SERIALIZATION.NAMESPACE",
        hint="use VOID, a TimeWindow, an int, str, bytes, or a tuple of these",
    )


def encode_namespace(namespace: Any) -> bytes:
    """The bytes of a namespace; different namespaces have different bytes, and equal ones the same."""
    if namespace is VOID:
        return b""
    out = bytearray()
    _encode(namespace, out, 0)
    return bytes(out)


def _encode(namespace: Any, out: bytearray, depth: int) -> None:
    if isinstance(namespace, TimeWindow):
        out.append(_WINDOW)
        out += _INTEGER.pack(namespace.start + _FLIP) + _INTEGER.pack(namespace.end + _FLIP)
    elif isinstance(namespace, str):
        try:
            data = namespace.encode("utf-8")
        except UnicodeEncodeError as error:
            raise SerializationError(
                "the namespace has a lone surrogate, without a UTF-8 form",
                code="SERIALIZATION.SURROGATE",
                detail=f"at character {error.start}",
            ) from None
        out.append(_STR)
        out += _LENGTH.pack(len(data)) + data
    elif isinstance(namespace, (bytes, bytearray)):
        out.append(_BYTES)
        out += _LENGTH.pack(len(namespace)) + namespace
    elif isinstance(namespace, tuple):
        if depth >= _MAX_DEPTH:
            raise SerializationError(
                "a namespace is nested too deeply",
                code="SERIALIZATION.NAMESPACE",
                detail=f"at most {_MAX_DEPTH} levels",
            )
        out.append(_TUPLE)
        out += _LENGTH.pack(len(namespace))
        for part in namespace:
            _encode(part, out, depth + 1)
    else:
        number = _integer(namespace)
        out.append(_INT)
        out += _INTEGER.pack(number + _FLIP)


def decode_namespace(data: bytes) -> Any:
    """The namespace that ``data``, from `encode_namespace`, encodes."""
    if not data:
        return VOID
    data = bytes(data)
    try:
        namespace, at = _decode(data, 0, 0)
    except (struct.error, IndexError, UnicodeDecodeError):
        at = -1
        namespace = None
    if at != len(data):
        raise SerializationError(
            "the bytes of a namespace cannot be read",
            code="SERIALIZATION.NAMESPACE",
            detail=f"{len(data)} bytes",
        )
    return namespace


def _decode(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    tag = data[at]
    at += 1
    if tag == _INT:
        return _INTEGER.unpack_from(data, at)[0] - _FLIP, at + 8
    if tag == _WINDOW:
        start, end = _INTEGER.unpack_from(data, at)[0], _INTEGER.unpack_from(data, at + 8)[0]
        return TimeWindow(start - _FLIP, end - _FLIP), at + 16
    (length,) = _LENGTH.unpack_from(data, at)
    at += 4
    if tag in (_STR, _BYTES):
        if at + length > len(data):
            raise IndexError
        raw = data[at : at + length]
        return (raw.decode("utf-8") if tag == _STR else raw), at + length
    if tag != _TUPLE or depth > _MAX_DEPTH:
        raise IndexError
    parts = []
    for _ in range(length):
        part, at = _decode(data, at, depth + 1)
        parts.append(part)
    return tuple(parts), at


def _same(namespace: Any) -> Any:
    return namespace


#: For namespaces of a single sort: the type of their column, and the conversion into it.
_SORTS: dict[type, tuple[pa.DataType, Callable[[Any], Any]]] = {
    int: (pa.int64(), _same),
    str: (pa.string(), _same),
    bytes: (pa.binary(), _same),
    TimeWindow: (WINDOW, lambda window: {"start": window.start, "end": window.end}),
}


class NamespaceColumn(NamedTuple):
    """A column of namespaces: ``distinct`` are the encoded ones, in the order of their first rows."""

    #: For each row the number of its namespace.
    numbers: NDArray[np.int64]
    distinct: list[bytes]
    #: The type of the Arrow column that it was; null where it was none, or held nothing but nulls.
    sort: pa.DataType = pa.null()

    def take(self, rows: NDArray[np.int64]) -> NamespaceColumn:
        """Some of the rows, by their numbers. O(rows)."""
        return self._replace(numbers=self.numbers[rows])

    def runs(self) -> ByteRuns:
        """The encoded namespace of each row: offsets, and data. O(bytes)."""
        runs: ByteRuns = take_rows(runs_of_list(self.distinct), self.numbers)
        return runs

    def shown(self) -> pa.Array | list[Any]:
        """The column as `namespace_column` takes it: an array if they are of one sort, else a list of namespaces."""
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
            raise SerializationError("a window lacks a start or an end", code="SERIALIZATION.NAMESPACE")
    if missing is not None:
        starts, ends = pc.if_else(missing, None, starts), pc.if_else(missing, 0, ends)
    numbers, first = numbers_of(starts)
    upto = ends.to_numpy()
    if not np.array_equal(upto, upto[first][numbers]):
        # Windows of several lengths begin at one time.
        both = pa.array(numbers * len(upto) + numbers_of(ends)[0])
        numbers, first = numbers_of(both if missing is None else pc.if_else(missing, None, both))
    shown = zip(starts.take(pa.array(first)).to_pylist(), upto[first].tolist(), strict=True)
    distinct = [b"" if start is None else encode_namespace(TimeWindow(start, end)) for start, end in shown]
    return NamespaceColumn(numbers, distinct, WINDOW)


def numbers_of(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
            "the bounds of a window are not whole milliseconds", code="SERIALIZATION.NAMESPACE"
        ) from None


def readable_namespaces(encoded: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Decode encoded namespaces, each distinct one once; O(n).

    `VOID` and null become null. Namespaces of one sort become int64, string, binary, or the start and end of windows.
    Tuples, and namespaces of several sorts, become text, as Python shows them.
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
