"""Merges deltas, one after the other, into one delta that has the same effect. Nothing is done row by row.

>>> first = pa.table({"key": [1, 2], "value": [10, 20], "op": pa.array([0, 0], pa.uint8())})
>>> second = pa.table({"key": [2, 3], "value": [None, 30], "op": pa.array([1, 0], pa.uint8())})
>>> merged("value", pa.concat_tables([first, second])).to_pylist()
[{'key': 2, 'value': None, 'op': 1}, {'key': 1, 'value': 10, 'op': 0}, {'key': 3, 'value': 30, 'op': 0}]

Writes files in the background that replace others: checked, paced, and put off while the disk has no room.

>>> patience = Patience()
>>> patience.failed()
>>> [patience.may_try() for _ in range(3)]
[False, False, True]
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
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
from statebackend.checkpoint.format.rows import COLUMNS
from statebackend.checkpoint.keyed.merged_rows import last_of, lists_joined, numbered
from statebackend.checkpoint.keyed.native_files import NATIVE
from statebackend.checkpoint.keyed.rows import (
    GROUP,
    RANK,
    grouped_batches,
    with_key_groups,
    with_namespaces,
)
from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import StoredFile
from statebackend.keys import KeyGroupRange

__all__ = ["Patience", "has_room", "merged", "write_merged", "written_and_read_back"]

_log = logging.getLogger(__name__)

#: After so many failures in a row, the time to the next attempt does not grow any more.
_MOST_DOUBLINGS = 10
#: Room that is left for batches, beside a large file; beside a small one, four times what that takes.
_SPARE = 64 << 20
#: Snapshots until the disk is asked again for room.
_PAUSE = 16


class Patience:
    """Waits after a failure. After each further failure in a row it waits for twice as many snapshots, at most 1,024.

    >>> Patience().may_try()
    True
    """

    def __init__(self) -> None:
        self._failures = 0
        self._to_wait = 0

    def may_try(self) -> bool:
        """Return True if it is time for another attempt; asked once for each snapshot."""
        self._to_wait = max(self._to_wait - 1, -1)
        return self._to_wait < 0

    def failed(self) -> None:
        """An attempt has failed, or could not be made."""
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS)
        self._to_wait = 2**self._failures

    def wait(self) -> None:
        """There was no room for an attempt: wait a little."""
        self._to_wait = _PAUSE

    def succeeded(self) -> None:
        """An attempt has succeeded."""
        self._failures = self._to_wait = 0


def has_room(writer: DataWriter, expected: int) -> bool:
    """Return True if the disk can take a file of about this size, and batches beside it, as far as can be told."""
    room = writer.room()
    return room is None or room >= expected + expected // 4 + min(_SPARE, 4 * expected)


def _read_back(writer: DataWriter, file: StoredFile) -> None:
    if file.kind == NATIVE:
        writer.verify(file)
        return
    with writer.read_back(file) as source:
        read_data_file(source, file.name).verify()


def written_and_read_back(
    writer: DataWriter, write: Callable[[DataWriter], tuple[StoredFile, ...]]
) -> tuple[StoredFile, ...] | None:
    """Return what ``write`` has written, once it has been read again. If that fails, remove it and return None."""
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
        return None
    return files


#: Rows merged at a time, and bytes of the files that hold them; more only if a single key group has more.
PIECE_ROWS = 1 << 20
PIECE_BYTES = 16 << 20

Rows = NDArray[np.integer]


def write_merged(writer: DataWriter, files: Sequence[StoredFile], kinds: Mapping[str, str]) -> StoredFile:
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
        return made.finish()


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

    >>> rows = pa.table({"key": [1, 1], "value": [[5], [6, 7]], "op": pa.array([2, 2], pa.uint8())})
    >>> merged("list", rows).to_pylist()
    [{'key': 1, 'value': [5, 6, 7], 'op': 2}]
    """
    rows = with_namespaces(rows)
    places = [rows["key"]]
    if "namespace" in rows.schema.names:
        places.append(rows["namespace"])
    ops = rows["op"].to_numpy()
    of_key = numbered(places)
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

    An entry that was removed and put again stands at the end of its map, so both rows stay. Where the map was cleared,
    there is nothing left to remove. Puts come in the order in which they created their entries.
    """
    at = np.arange(len(ops))
    clears = at[ops == Op.CLEAR]
    cleared = last_of(of_map[clears], clears, size=of_map.max(initial=-1) + 1)
    others = at[(ops != Op.CLEAR) & (at > cleared[of_map])]
    entries = numbered([pa.chunked_array([of_map[others]]), map_keys.take(pa.array(others))])
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
    at = np.arange(len(ops))
    n_keys = of_key.max(initial=-1) + 1
    resets = at[ops != Op.APPEND]
    reset = last_of(of_key[resets], resets, size=n_keys)
    last = last_of(of_key, at, size=n_keys)
    only_removed = reset[(reset == last) & (reset >= 0)]
    only_removed = only_removed[ops[only_removed] != Op.PUT]
    is_live = ((ops == Op.PUT) & (at == reset[of_key])) | ((ops == Op.APPEND) & (at > reset[of_key]))
    joined, firsts = lists_joined(rows, at[is_live], of_key)
    of_joined = np.where(reset[of_key[firsts]] >= 0, int(Op.PUT), int(Op.APPEND))
    removals = rows.take(pa.array(only_removed))
    return pa.concat_tables([removals, joined]), np.concatenate([ops[only_removed], of_joined])
