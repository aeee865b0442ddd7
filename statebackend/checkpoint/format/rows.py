"""The content of data files: rows of one state, and the key groups they belong to.

>>> rows = GroupedBatch.of(pa.record_batch({"key": [1, 2, 3]}), [4, 4, 9])
>>> Section("sum", rows.batch.schema, [rows]).name
'sum'
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

__all__ = ["ARROW_MAGIC", "ARROW_TAIL", "COLUMNS", "GroupedBatch", "Op", "Section"]

#: The columns that a state may have, in file order.
COLUMNS = ("key", "namespace", "map_key", "value", "timestamp", "op")

#: The end of an Arrow file: the length of its footer, then this.
ARROW_MAGIC = b"ARROW1"
ARROW_TAIL = struct.Struct("<i6s")


class Op(enum.IntEnum):
    """The effect of a row. Rows are applied in file order. A state without the column ``op`` only puts.

    >>> Op.APPEND.value
    2
    """

    PUT = 0
    REMOVE = 1
    APPEND = 2
    CLEAR = 3


class GroupedBatch(NamedTuple):
    """Rows of one state in ascending order of key groups: ``counts[i]`` rows of ``key_groups[i]``, and so on.

    >>> batch = pa.record_batch({"key": [1, 2, 3]})
    >>> GroupedBatch(batch, np.array([4, 9]), np.array([2, 1])).key_group_of_rows().tolist()
    [4, 4, 9]
    """

    batch: pa.RecordBatch
    key_groups: NDArray[np.integer]
    counts: NDArray[np.integer]

    @classmethod
    def of(cls, batch: pa.RecordBatch, key_group_of_rows: ArrayLike) -> GroupedBatch:
        """Make one from the key group of each row; the key groups must ascend. O(rows).

        >>> GroupedBatch.of(pa.record_batch({"key": [1, 2, 3]}), [4, 4, 9]).counts.tolist()
        [2, 1]
        """
        groups = np.asarray(key_group_of_rows, np.int64)
        if len(groups) and (groups == groups[0]).all():
            return cls(batch, groups[:1], np.array([len(groups)]))
        starts = np.flatnonzero(np.concatenate(([len(groups) > 0], groups[1:] != groups[:-1])))
        return cls(batch, groups[starts], np.diff(np.append(starts, len(groups))))

    def key_group_of_rows(self) -> NDArray[np.integer]:
        """The key group of each row. O(rows)."""
        return np.repeat(self.key_groups, self.counts)


class Section(NamedTuple):
    """A state of a file to be written: its name, its columns, and its rows, in any number of batches.

    >>> Section("sum", pa.schema({"key": pa.int64()}), []).name
    'sum'
    """

    name: str
    schema: pa.Schema
    batches: Iterable[GroupedBatch]
