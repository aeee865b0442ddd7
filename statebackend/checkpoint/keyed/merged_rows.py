"""Merges the rows of data files, base and changes, into the rows that remain when all have been applied.

It does nothing row by row. The rows of one key share a number, and the position of the last row that removes or
replaces a value decides which of them still count.

>>> base = pa.table({"key": ["a", "b"], "value": [1, 2]})
>>> delta = pa.table({"key": ["a", "c"], "value": [None, 3], "op": pa.array([1, 0], pa.uint8())})
>>> applied("value", [base, delta]).to_pylist()
[{'key': 'b', 'value': 2}, {'key': 'c', 'value': 3}]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed.rows import with_namespaces

__all__ = ["applied", "last_of", "lists_joined", "numbered"]

Rows = NDArray[np.integer]


def applied(kind: str, tables: Sequence[pa.Table]) -> pa.Table:
    """The rows that remain of a state of this kind, given in the order of applying. O(rows).

    The columns are those of data files without ``op``. Elements of a list and entries of a map keep their order; keys
    have none.

    >>> rows = pa.table({"key": [1, 1], "value": [[5], [6, 7]], "op": pa.array([0, 2], pa.uint8())})
    >>> applied("list", [rows]).to_pylist()
    [{'key': 1, 'value': [5, 6, 7]}]
    """
    rows = pa.concat_tables(tables, promote_options="default")
    rows = with_namespaces(rows)
    if "op" in rows.schema.names:
        ops = pc.fill_null(rows["op"], pa.scalar(Op.PUT, pa.uint8())).to_numpy()
        rows = rows.drop_columns(["op"])
    else:
        ops = np.full(rows.num_rows, Op.PUT, np.uint8)
    places = [rows["key"], *([rows["namespace"]] if "namespace" in rows.schema.names else [])]
    if kind == "map":
        return _chosen(rows, _live_entries(places, rows["map_key"], ops))
    if kind == "list":
        return _live_lists(rows, numbered(places), ops)
    last = last_of(numbered(places), np.arange(len(ops)))
    return _chosen(rows, np.sort(last[ops[last] == Op.PUT]))


# --- numbers of keys ---


def numbered(columns: Sequence[pa.ChunkedArray]) -> Rows:
    """A number for each row, equal for rows that are equal in all columns; numbers count from 0 without gaps."""
    numbers: Rows | None = None
    for flat in _flat(columns):
        own = _codes(flat)
        # Both are below 2**31, so the product fits.
        numbers = (
            own if numbers is None else _codes(pa.chunked_array([numbers * (own.max(initial=0) + 1) + own]))
        )
    assert numbers is not None
    return numbers


def _flat(columns: Sequence[pa.ChunkedArray]) -> Iterator[pa.ChunkedArray]:
    """The columns with each struct replaced by its fields and by the nulls of the struct."""
    for column in columns:
        if pa.types.is_struct(column.type):
            if column.null_count:
                yield column.is_valid()
            yield from _flat(column.flatten())
        else:
            yield column


def _codes(column: pa.ChunkedArray) -> Rows:
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    codes = [chunk.indices.to_numpy() for chunk in encoded.chunks]
    return np.concatenate(codes).astype(np.int64) if codes else np.empty(0, np.int64)


def last_of(numbers: Rows, at: Rows, size: int | None = None) -> Rows:
    """The last of ``at`` for each number; -1 for a number that has none."""
    found = np.full(numbers.max(initial=-1) + 1 if size is None else size, -1)
    found[numbers] = at  # if a number occurs more than once, the last one stays
    return found


def _chosen(rows: pa.Table, at: Rows) -> pa.Table:
    """Rows in the order of ``at``. Filters by a mask if ``at`` ascends, which works for columns of any size."""
    if np.any(np.diff(at) < 0):
        return rows.take(pa.array(at))
    mask = np.zeros(rows.num_rows, bool)
    mask[at] = True
    return rows.filter(pa.array(mask))


# --- kinds ---


def _live_entries(places: list[pa.ChunkedArray], map_keys: pa.ChunkedArray, ops: Rows) -> Rows:
    """The rows that put an entry last, with no later removal or clearing.

    They come in the order in which the entries were created: putting an existing entry leaves it in its place.
    """
    of_map = numbered(places)
    clears = np.flatnonzero(ops == Op.CLEAR)
    cleared = last_of(of_map[clears], clears, size=of_map.max(initial=-1) + 1)
    others = np.flatnonzero(ops != Op.CLEAR)
    entries = numbered([pa.chunked_array([of_map[others]]), map_keys.filter(pa.array(ops != Op.CLEAR))])
    n_entries = entries.max(initial=-1) + 1
    is_removal = ops[others] == Op.REMOVE
    removed = last_of(entries[is_removal], others[is_removal], size=n_entries)
    is_live = ~is_removal & (others > removed[entries]) & (others > cleared[of_map[others]])
    entries, puts = entries[is_live], others[is_live]
    last = last_of(entries, puts, size=n_entries)
    first = last_of(entries[::-1], puts[::-1], size=n_entries)
    there = np.flatnonzero(last >= 0)
    return last[there[np.argsort(first[there])]]


def _live_lists(rows: pa.Table, numbers: Rows, ops: Rows) -> pa.Table:
    """One row for each list: its last put, and everything appended since."""
    resets = np.flatnonzero(ops != Op.APPEND)
    reset = last_of(numbers[resets], resets, size=numbers.max(initial=-1) + 1)[numbers]
    at = np.arange(len(ops))
    live = at[((ops == Op.PUT) & (at == reset)) | ((ops == Op.APPEND) & (at > reset))]
    if not (ops[live] == Op.APPEND).any():
        return _chosen(rows, live)
    return lists_joined(rows, live, numbers)[0]


def lists_joined(rows: pa.Table, live: Rows, numbers: Rows) -> tuple[pa.Table, Rows]:
    """One row for each list, of the elements of its rows among ``live``; and the first of them for each."""
    live = live[np.argsort(numbers[live], kind="stable")]
    starts = np.flatnonzero(np.diff(numbers[live], prepend=-1))
    # In one chunk, because the parts of a list stand next to each other.
    sorted_rows = rows.take(pa.array(live)).combine_chunks()
    joined = sorted_rows.take(pa.array(starts))
    for name in ("value", "timestamp"):
        if name in rows.schema.names and len(live):
            column = _joined(sorted_rows[name], starts)
            joined = joined.set_column(joined.schema.get_field_index(name), name, column)
    return joined, live[starts]


def _joined(lists: pa.ChunkedArray, starts: Rows) -> pa.Array:
    """The lists from each start to the next, joined into one list."""
    (chunk,) = lists.chunks
    ends = np.cumsum(pc.list_value_length(chunk).to_numpy(zero_copy_only=False))
    offsets = np.concatenate(([0], ends))[np.append(starts, len(chunk))]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), chunk.flatten(), type=chunk.type)
