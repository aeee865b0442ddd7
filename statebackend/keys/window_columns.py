"""Windows of times, as columns.

>>> of_rows, windows = windows_of([5, None, 12], 10)
>>> of_rows.to_pylist(), windows.field("start").to_pylist()
([0, 2], [0, 10])
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend.errors import UsageError
from statebackend.keys.time_columns import time_column

__all__ = ["WINDOW", "AssignedWindows", "windows_of"]

#: Windows as a column.
WINDOW = pa.struct([("start", pa.int64()), ("end", pa.int64())])


class AssignedWindows(NamedTuple):
    """The windows that rows are in, one after the other: each row comes once for each of its windows.

    >>> AssignedWindows(pa.array([0]), pa.array([{"start": 0, "end": 10}], WINDOW)).rows[0].as_py()
    0
    """

    #: For each window the number of its row, as ``batch.take(rows)`` takes it.
    rows: pa.Array
    #: The windows, as the ``namespaces`` of vectorised calls: structs of a start and an end, in milliseconds.
    windows: pa.StructArray


def windows_of(times: Any, size: int, slide: int | None = None, offset: int = 0) -> AssignedWindows:
    """The windows of each time, the earliest first; a null is in none. O(n and the windows).

    >>> windows_of([25], 20, 10).windows.to_pylist()
    [{'start': 10, 'end': 30}, {'start': 20, 'end': 40}]
    """
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
