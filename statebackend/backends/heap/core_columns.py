"""Columns as the core returns them: functions that measure and slice them.

A column of varying width is a pair of offsets and data, such as ``key_offsets`` and ``key``. ``list_offsets`` assign
the rows of ``value`` and ``timestamp``, which are elements, to their lists.

>>> sliced({"list_offsets": np.array([0, 2, 3]), "value": np.array([7, 8, 9])}, slice(1, 2))
{'list_offsets': array([0, 1]), 'value': array([9])}
"""

from __future__ import annotations

import numpy as np

from statebackend.columns.stored_columns import Array

__all__ = ["bytes_of_rows", "sliced"]


def bytes_of_rows(columns: dict[str, Array], count: int) -> Array:
    """Return the bytes that each row takes in the columns of varying width. O(rows).

    >>> bytes_of_rows({"key_offsets": np.array([0, 3, 4]), "value": np.array([1, 2])}, 2).tolist()
    [3, 1]
    """
    found = np.zeros(count, dtype=np.int64)
    if "key_offsets" in columns:
        found += np.diff(columns["key_offsets"])
    ends = columns.get("value_offsets")
    if "list_offsets" in columns:
        owners = columns["list_offsets"]
        found += np.diff(owners) * columns["value"][:1].nbytes if ends is None else np.diff(ends[owners])
    elif ends is not None:
        found += np.diff(ends)
    return found


def sliced(columns: dict[str, Array], rows: slice) -> dict[str, Array]:
    """Consecutive rows, with offsets that begin at 0 again. O(rows); copies only the offsets, not what they point into.

    >>> columns = {"key_offsets": np.array([0, 3, 4]), "key": np.arange(4), "value": np.array([1, 2])}
    >>> sliced(columns, slice(1, 2))
    {'key_offsets': array([0, 1]), 'key': array([3]), 'value': array([2])}
    """
    taken = {}
    of_values = rows
    if "list_offsets" in columns:
        taken["list_offsets"], of_values = _run(columns["list_offsets"], rows)
    for name, column in columns.items():
        of_elements = name in ("value", "value_offsets", "is_null", "timestamp")
        own = of_values if of_elements else rows
        if name.endswith("_offsets"):
            if name != "list_offsets":
                taken[name], of_bytes = _run(column, own)
                data = name.removesuffix("_offsets")
                taken[data] = columns[data][of_bytes]
        elif f"{name}_offsets" not in columns:
            taken[name] = column[own]
    return taken


def _run(offsets: Array, rows: slice) -> tuple[Array, slice]:
    """The offsets of some rows, shifted to begin at 0, and the slice of the data that they cover."""
    own = offsets[rows.start : rows.stop + 1]
    return own - own[0], slice(int(own[0]), int(own[-1]))
