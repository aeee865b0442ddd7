"""Merges rows of data files: base and changes into what remains, or deltas into one delta of the same effect.

It does nothing row by row. The rows of one key share a number, and the position of the last row that removes or
replaces a value decides which of them still count. Files that replace others are written in the background: checked,
paced, and put off while the disk is full.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.checkpoint.format import (
    DataFileReader,
    GroupedBatch,
    Op,
    Section,
    key_group_slices,
    read_data_file,
    write_data_file,
)
from statebackend.checkpoint.format.index import COLUMNS
from statebackend.checkpoint.keyed.chain import KeyedSnapshot
from statebackend.checkpoint.keyed.row_source import (
    GROUP,
    NATIVE,
    RANK,
    grouped_batches,
    with_key_groups,
    with_namespaces,
)
from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import StoredFile
from statebackend.keys import KeyGroupRange

_log = logging.getLogger(__name__)

Rows = NDArray[np.integer]


def applied(kind: str, tables: Sequence[pa.Table]) -> pa.Table:
    """The rows that remain of a state of this kind, given in the order of applying. O(rows).

    The columns are as in data files without ``op``. Elements of a list and entries of a map keep their order; keys
    have none.
    """
    rows = with_namespaces(pa.concat_tables(tables, promote_options="default"))
    if "op" in rows.schema.names:
        ops = pc.fill_null(rows["op"], pa.scalar(Op.PUT, pa.uint8())).to_numpy()
        rows = rows.drop_columns(["op"])
    else:
        ops = np.full(rows.num_rows, Op.PUT, np.uint8)
    of_key = numbered(_places(rows))
    if kind == "map":
        at, ops = _map_rows(of_key, rows["map_key"], ops)
        return _chosen(rows, at[ops == Op.PUT])
    if kind == "list":
        live, _ = _live_parts(of_key, ops)
        return lists_joined(rows, live, of_key)[0] if (ops[live] == Op.APPEND).any() else _chosen(rows, live)
    last = last_of(of_key, np.arange(len(ops)))
    return _chosen(rows, np.sort(last[ops[last] == Op.PUT]))


# --- numbers of keys ---


def _places(rows: pa.Table) -> list[pa.ChunkedArray]:
    return [rows[name] for name in ("key", "namespace") if name in rows.schema.names]


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


def _live_parts(numbers: Rows, ops: Rows) -> tuple[Rows, Rows]:
    """The rows that still count for the lists; and for each list the last row that put or removed it, or -1."""
    resets = np.flatnonzero(ops != Op.APPEND)
    reset = last_of(numbers[resets], resets, size=numbers.max(initial=-1) + 1)
    at, since = np.arange(len(ops)), reset[numbers]
    return at[((ops == Op.PUT) & (at == since)) | ((ops == Op.APPEND) & (at > since))], reset


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
    (chunk,) = lists.chunks
    ends = np.cumsum(pc.list_value_length(chunk).to_numpy(zero_copy_only=False))
    offsets = np.concatenate(([0], ends))[np.append(starts, len(chunk))]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), chunk.flatten(), type=chunk.type)


#: After so many failures in a row, the time to the next attempt does not grow any more.
_MOST_DOUBLINGS = 10
#: Bytes to leave free for batches next to a large file; next to a small file, four times its size.
_SPARE = 64 << 20
#: Snapshots until the disk is asked again for room.
_PAUSE = 16


class Backoff:
    """Waits after a failure. Each further one in a row doubles the wait, in snapshots, to at most 1,024."""

    def __init__(self) -> None:
        self._failures = 0
        self._to_wait = 0

    def may_try(self) -> bool:
        """Return True if it is time for another attempt; asked once for each snapshot."""
        self._to_wait = max(self._to_wait - 1, -1)
        return self._to_wait < 0

    def failed(self) -> None:
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS)
        self._to_wait = 2**self._failures

    def wait(self) -> None:
        """The disk was too full for an attempt: wait a little."""
        self._to_wait = _PAUSE

    def succeeded(self) -> None:
        self._failures = self._to_wait = 0


def has_room(writer: DataWriter, expected: int) -> bool:
    """Return True if the disk can take a file of about this size and the next batches, as far as is known."""
    room = writer.room()
    return room is None or room >= expected + expected // 4 + min(_SPARE, 4 * expected)


def _read_back(writer: DataWriter, file: StoredFile) -> None:
    if file.kind == NATIVE:
        writer.verify(file)
        return
    with writer.read_back(file) as source:
        read_data_file(source, file.name).verify()


def write_in_background(
    snapshot: KeyedSnapshot, write: Callable[[DataWriter], tuple[StoredFile, ...]]
) -> None:
    """Write files for a later snapshot to name, and read them again. If that fails, remove them."""
    writer = snapshot.writer
    try:
        files = write(writer)
        made = set(writer.unsettled)
        for file in files:
            if file.name in made:
                _read_back(writer, file)
    except Exception as error:  # noqa: BLE001 - the deltas are there, and another attempt will be made
        if not writer.is_aborted:
            _log.warning("files could not be merged, deltas go on: %s", str(error))
        writer.abort()
    else:
        snapshot.files = files


#: Rows merged at a time, and bytes of the files that hold them; more only if a single key group has more.
PIECE_ROWS = 1 << 20
PIECE_BYTES = 16 << 20


def write_merged(
    writer: DataWriter, files: Sequence[StoredFile], kinds: Mapping[str, str]
) -> tuple[StoredFile, ...]:
    """Write one delta with the effect of these, which are read from the store of ``writer``.

    ``kinds`` has the kind of each state in them. Memory: about a million rows at a time, or 16 MB of the files, several
    times over; more if one key group has more.
    """
    with ExitStack() as opened:
        readers = [read_data_file(opened.enter_context(writer.read_back(file)), file.name) for file in files]
        names = sorted({name for reader in readers for name in reader.states})
        sections = []
        for name in names:
            own = [reader for reader in readers if name in reader.states]
            schema = _joint_schema([reader.schema(name) for reader in own])
            sections.append(Section(name, schema, _merged_pieces(own, name, kinds[name], schema)))
        made = opened.enter_context(writer.create("delta", key_groups=_all_groups(files)))
        write_data_file(made, sections, name=made.name, compression=writer.compression)
        return (made.finish(),)


def _all_groups(files: Sequence[StoredFile]) -> KeyGroupRange | None:
    ranges = [file.key_groups for file in files]
    if any(each is None for each in ranges):
        return None
    known = [each for each in ranges if each is not None]
    return KeyGroupRange(min(each.start for each in known), max(each.end for each in known))


def _joint_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The columns of all: a later file of a state may have namespaces that earlier ones did not need."""
    joint = {"op": pa.uint8()}
    for schema in schemas:
        joint.update(zip(schema.names, schema.types, strict=True))
    return pa.schema([(role, joint[role]) for role in COLUMNS if role in joint])


def _merged_pieces(
    readers: Sequence[DataFileReader], name: str, kind: str, schema: pa.Schema
) -> Iterator[GroupedBatch]:
    for piece in key_group_slices(readers, name, PIECE_ROWS, most_bytes=PIECE_BYTES):
        tables = [_with_operations(rows) for reader in readers for rows in reader.read(name, piece)]
        joined = merged(kind, pa.concat_tables(tables, promote_options="default"))
        for field in schema:
            if field.name not in joined.schema.names:  # only other pieces have namespaces
                joined = joined.append_column(field, pa.repeat(pa.scalar(b"", field.type), joined.num_rows))
        table = joined.select(schema.names).cast(schema).append_column(GROUP, joined[GROUP])
        yield from grouped_batches(table.combine_chunks())


def _with_operations(rows: GroupedBatch) -> pa.Table:
    table = with_key_groups(rows)
    if "op" not in table.schema.names:
        table = table.append_column("op", pa.array(np.full(table.num_rows, Op.PUT, np.uint8)))
    return table


def merged(kind: str, rows: pa.Table) -> pa.Table:
    """The fewest rows with the effect of these on a state of this kind; O(rows).

    By key group, if there is a column of that name; first those that clear and remove, then those that put, then those
    that append.
    """
    rows = with_namespaces(rows)
    ops = rows["op"].to_numpy()
    of_key = numbered(_places(rows))
    if kind == "map":
        at, ops = _map_rows(of_key, rows["map_key"], ops)
        rows = rows.take(pa.array(at))
    elif kind == "list":
        rows, ops = _list_rows(rows, of_key, ops)
    else:
        at = np.sort(last_of(of_key, np.arange(len(ops))))
        rows, ops = rows.take(pa.array(at)), ops[at]
    rows = rows.set_column(rows.schema.get_field_index("op"), "op", pa.array(ops, pa.uint8()))
    order = [RANK[ops]]
    if GROUP in rows.schema.names:
        order.append(rows[GROUP].to_numpy())
    return rows.take(pa.array(np.lexsort(order)))


def _map_rows(of_map: Rows, map_keys: pa.ChunkedArray, ops: Rows) -> tuple[Rows, Rows]:
    """Of each map the last clearing; then, of entries written since, a removal and the last put.

    An entry that was removed and put again is at the end of its map, so both rows stay. Where the map was cleared,
    there is nothing left to remove. Puts come in the order in which they created their entries.
    """
    at = np.arange(len(ops))
    clears = at[ops == Op.CLEAR]
    cleared = last_of(of_map[clears], clears, size=of_map.max(initial=-1) + 1)
    is_other = (ops != Op.CLEAR) & (at > cleared[of_map])
    others = at[is_other]
    entries = numbered([pa.chunked_array([of_map[others]]), map_keys.filter(pa.array(is_other))])
    n_entries = entries.max(initial=-1) + 1
    is_removal = ops[others] == Op.REMOVE
    removed = last_of(entries[is_removal], others[is_removal], size=n_entries)
    is_live = ~is_removal & (others > removed[entries])
    live, puts = entries[is_live], others[is_live]
    last = last_of(live, puts, size=n_entries)
    first = last_of(live[::-1], puts[::-1], size=n_entries)
    there = np.flatnonzero(last >= 0)
    puts = last[there[np.argsort(first[there])]]
    removals = removed[removed >= 0]
    removals = removals[cleared[of_map[removals]] < 0]
    kept = [cleared[cleared >= 0], removals, puts]
    kinds = [np.full(len(own), op) for own, op in zip(kept, (Op.CLEAR, Op.REMOVE, Op.PUT), strict=True)]
    return np.concatenate(kept), np.concatenate(kinds)


def _list_rows(rows: pa.Table, of_key: Rows, ops: Rows) -> tuple[pa.Table, Rows]:
    """One row for each list: put if anything replaced or removed it before, else appended; or only removed."""
    live, reset = _live_parts(of_key, ops)
    last = last_of(of_key, np.arange(len(ops)))
    only_removed = reset[(reset == last) & (reset >= 0)]
    only_removed = only_removed[ops[only_removed] != Op.PUT]
    joined, firsts = lists_joined(rows, live, of_key)
    of_joined = np.where(reset[of_key[firsts]] >= 0, int(Op.PUT), int(Op.APPEND))
    removals = rows.take(pa.array(only_removed))
    return pa.concat_tables([removals, joined]), np.concatenate([ops[only_removed], of_joined])
