"""Columns of times, and the windows that they are in."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.errors import UsageError, usage
from statebackend.keys.columns import as_columnar

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
    return usage.column(
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
        raise usage.argument("the size of a window, and the time from one to the next, are more than nothing")
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
