"""Columns of times, in milliseconds.

>>> time_column([5, None]).is_null.tolist()
[False, True]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.errors import UsageError
from statebackend.keys.key_columns import as_columnar

__all__ = ["TimeColumn", "time_column"]

_TICKS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


class TimeColumn(NamedTuple):
    """The times of rows.

    >>> TimeColumn(np.array([5]), np.array([False])).own.tolist()
    [5]
    """

    #: Milliseconds; whatever for a null.
    own: NDArray[np.int64]
    is_null: NDArray[np.bool_]


def time_column(column: Any, what: str = "the column of times", where: str = "") -> TimeColumn:
    """Times as milliseconds, of a column of timestamps or of whole milliseconds; parts of one are cut off. O(n).

    ``what`` and ``where`` are for the error.

    >>> time_column(pa.array([-1, 2500], pa.timestamp("us"))).own.tolist()
    [-1, 2]
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
