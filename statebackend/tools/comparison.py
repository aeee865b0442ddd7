"""Compares checkpoints: the changes of a state from one to the next, and the difference of any two.

Two checkpoints that build on the same bases differ only in keys of the changes that one of them has. These keys are
looked up in both. Other checkpoints are compared as a whole, some key groups at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.checkpoint import CheckpointReader
from statebackend.checkpoint.format import DataFileReader, GroupedBatch
from statebackend.checkpoint.keyed.compaction import last_of, numbered
from statebackend.checkpoint.keyed.description import StateDescription
from statebackend.checkpoint.keyed.row_source import with_namespaces, without_expired
from statebackend.checkpoint.keyed.savepoint_rows import grouping
from statebackend.checkpoint.keyed.state_source import Selection, StateSource, is_among
from statebackend.errors import StateMigrationError, usage
from statebackend.keys import readable_namespaces
from statebackend.operator_state.element_columns import to_bytes
from statebackend.runtime.start_checks import no_state
from statebackend.tools.sources import CheckpointSource, Stored, source_of
from statebackend.tools.state_rows import StateRows
from statebackend.tools.tables import column_value_type, empty_table
from statebackend.types import RowType

#: Rows, of both sides together, that are compared at a time; more if one key group has more.
_PIECE_ROWS = 1 << 20
_INSERT, _UPDATE, _DELETE, _EXPIRE = "insert", "update", "delete", "expire"


def changes(
    store: Stored, name: str, *, since: int | None = None, until: int | None = None, expired: bool = False
) -> StateRows:
    """The changes of a state from each retained checkpoint to the next, with old values.

    The columns are ``batch_id``; ``from_batch_id``, the retained checkpoint before; ``change_type`` (insert, update or
    delete); the key or its fields; ``namespace``, if there are others than `VOID`; ``map_key`` for map states;
    ``value``; and ``old_value``. If the checkpoints between two retained ones are gone, a row has the joint effect of
    their batches. Writing an equal value, or only a later timestamp, is not a change.

    ``since`` is the checkpoint before the first changes, by default the oldest, and ``until`` the last one. With
    ``expired``, entries that have expired give a row ``expire``, by the times of the checkpoints; this scans the whole
    state of each. Else it reads the changed keys only. Memory: the changed keys and values.
    """
    reader = reader_of(store)
    ids = [each for each in reader.checkpoints() if each >= (since or 0) and (until is None or each <= until)]
    for given in (since, until):
        if given is not None and given not in ids:
            reader.open(given)  # which says that there is none, and which there are
            raise usage.checkpoint_id(f"since={since} is after until={until}")
    sources = [CheckpointSource(reader.open(each)) for each in ids]
    if not any(name in source.states() for source in sources):
        known = itertools.chain.from_iterable(source.states() for source in sources)
        raise no_state(name, known, reader.uri)
    touched = [
        None if expired else touched_keys(before, after, name)
        for before, after in itertools.pairwise(sources)
    ]
    bases = _Bases([each for each in touched if each is not None])
    parts = []
    for (before, after), keys in zip(itertools.pairwise(sources), touched, strict=True):
        numbers = {"batch_id": after.checkpoint.id, "from_batch_id": before.checkpoint.id}
        pair = Pair(before, after, name)
        if keys is not None:  # a comparison as a whole needs all rows of the bases
            sides = [CheckpointSource(each.checkpoint, bases.read) for each in (before, after)]
            pair = Pair(sides[0], sides[1], name)
        parts += [(numbers, each) for each in pair.changes(keys, expired=expired)]
    newest = next(source for source in reversed(sources) if name in source.states())
    table = _shown(parts, Pair(newest, newest, name), ("batch_id", "from_batch_id"))
    return StateRows.of_table(f"changes of state {name!r}, {reader.uri}", table)


def reader_of(store: Any) -> CheckpointReader:
    """The store at a path; a reader itself."""
    if isinstance(store, CheckpointReader):
        return store
    opened = source_of(store)
    if not isinstance(opened, CheckpointSource):
        raise usage.not_a_store(
            f"cannot read changes from a {type(store).__name__}",
            hint="give a store or its path; diff takes others",
        )
    return CheckpointReader(store)


class Difference(dict[str, StateRows]):
    """The keyed states that differ, by name, each with its changes. Empty if none differs."""

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.values())) or "no difference"


def diff(store: Stored, other: Stored, *, name: str | None = None) -> Difference:
    """The entries in which two stores, savepoints or checkpoints (``store.open(id)``) differ, by state.

    The rows are the changes from ``store`` to ``other``, as from `changes`, without batches. Each side may also be
    a running query or a `Harness`. Without ``name``, it compares all keyed states, timers among them. Timestamps are
    not compared, and expired entries are left out, by the time of each side. Checkpoints of one store are compared by
    the changes that one of them has, if possible. Memory: the differences, and about a million entries.
    """
    before, after = source_of(store), source_of(other)
    known = {**before.states(), **after.states()}
    if name is not None and name not in known:
        raise no_state(name, known, f"{before.where}, {after.where}")
    found = Difference()
    for each in sorted(known) if name is None else [name]:
        keys = touched_keys(before, after, each)
        pair = Pair(before, after, each)
        parts: list[Any] = [({}, rows) for rows in pair.changes(keys)]
        if parts:
            title = f"state {each!r}, from {before.where} to {after.where}"
            found[each] = StateRows.of_table(title, _shown(parts, pair))
    return found


def touched_keys(before: StateSource, after: StateSource, name: str) -> pa.Array | None:
    """Keys outside of which a state is the same in two checkpoints of one store; None if they are unknown."""
    if not isinstance(before, CheckpointSource) or not isinstance(after, CheckpointSource):
        return None
    if before.checkpoint.metadata.store != after.checkpoint.metadata.store:
        return None
    if name not in before.states() or name not in after.states():
        return None
    keys = before.changed_keys(name, after)
    return None if keys is None else distinct(keys, before)


def distinct(keys: list[pa.Array], source: StateSource) -> pa.Array:
    """Each key once."""
    column = pa.concat_arrays(keys) if keys else pa.array([], source.key_type and source.key_type.arrow)
    if not pa.types.is_nested(column.type):
        return pc.unique(column)
    numbers = numbered([pa.chunked_array([column])])
    return column.take(pa.array(last_of(numbers, np.arange(len(numbers)))))


class _Bases:
    """Reads each base once for all checkpoints that build on it, and keeps the rows of the keys that have changed."""

    def __init__(self, keys: list[pa.Array]) -> None:
        self._keys = keys
        self._kept: dict[str, list[tuple[pa.RecordBatch, NDArray[Any]]]] = {}

    def read(
        self, file: DataFileReader, name: str, groups: NDArray[np.int64], columns: frozenset[str] | None
    ) -> Iterator[GroupedBatch]:
        if not self._keys:
            yield from file.read(name, groups, columns)
            return
        if file.name not in self._kept:
            column = pa.concat_arrays(self._keys)
            keys = column if pa.types.is_nested(column.type) else pc.unique(column)
            self._kept[file.name] = []
            for rows in file.read(name):
                chosen = is_among(rows.batch["key"], keys)
                if pc.any(chosen).as_py():
                    own = rows.key_group_of_rows()[chosen.to_numpy(zero_copy_only=False)]
                    self._kept[file.name].append((rows.batch.filter(chosen), own))
        for batch, own in self._kept[file.name]:
            inside = np.isin(own, groups)
            if inside.any():
                yield GroupedBatch.of(batch.filter(pa.array(inside)), own[inside])


class Pair:
    """A state in two sources, compared entry by entry."""

    def __init__(self, before: StateSource, after: StateSource, name: str) -> None:
        self._sides = (before, after)
        self._name = name
        self._described = tuple(source.states().get(name) for source in self._sides)
        old, new = self._described
        last = new or old
        assert last is not None
        if old is not None and new is not None and _form(before, old) != _form(after, new):
            raise StateMigrationError(
                f"cannot compare state {name!r}: its kind or its types differ",
                code="STATE_MIGRATION.INCOMPATIBLE",
                detail=f"{before.where}, {after.where}",
                hint="compare checkpoints from before or after the migration with each other",
            )
        source = after if new is not None else before
        self.key_type = source.key_type
        self._value = column_value_type(last, source.where)
        key = None if source.key_type is None else source.key_type.config()
        self._schema = empty_table(last.to_json(), key, source.where).schema
        entry = [self._schema.field(each) for each in ("key", "map_key") if each in self._schema.names]
        entry.insert(1, pa.field("namespace", pa.binary()))
        value = self._schema.field("value").type
        changed = [pa.field("change_type", pa.string()), *entry, ("value", value), ("old_value", value)]
        #: The columns of `changes`, with encoded namespaces.
        self.schema = pa.schema(changed)

    def changes(self, keys: pa.Array | None = None, *, expired: bool = False) -> Iterator[pa.Table]:
        """The changes of these keys, or of all, in pieces. Pieces without changes are left out."""
        if keys is not None:
            pieces = [Selection(keys=keys)] if len(keys) else []
        else:
            pieces = list(self._pieces())
        for piece in pieces:
            found = self._compared(self._rows(0, piece), self._rows(1, piece), expired)
            if found.num_rows:
                yield found

    def _pieces(self) -> Iterator[Selection]:
        sides = [s for s, known in zip(self._sides, self._described, strict=True) if known is not None]
        groups = self._max_parallelism
        if groups is None:
            yield Selection()
            return
        count = math.ceil(sum(source.most_rows(self._name) for source in sides) / _PIECE_ROWS)
        for own in np.array_split(np.arange(groups), min(max(count, 1), groups)):
            yield Selection(key_groups=own.astype(np.int64))

    @property
    def _max_parallelism(self) -> int | None:
        before, after = self._sides
        return None if self.key_type is None else after.max_parallelism or before.max_parallelism

    def _rows(self, side: int, piece: Selection) -> pa.Table:
        """The rows of a side with the columns of both, namespaces included."""
        source, state = self._sides[side], self._described[side]
        tables = []
        if state is not None:
            groups, whole = piece.key_groups, self._max_parallelism
            is_exact = isinstance(source, CheckpointSource) and source.max_parallelism == whole
            given = piece if is_exact else Selection(keys=piece.keys)
            for batch in source.read(self._name, given):
                if groups is not None and not is_exact:
                    assert self.key_type is not None
                    assert whole is not None
                    own = grouping(self.key_type, whole)(batch["key"])
                    batch = batch.filter(pa.array(np.isin(own, groups)))
                tables.append(pa.Table.from_batches([batch]))
        schema = self._schema.append(pa.field("namespace", pa.binary()))
        rows = pa.concat_tables([schema.empty_table(), *tables], promote_options="default")
        rows = with_namespaces(rows.select(schema.names))
        bound = None if state is None else state.expired_before(source.now, source.watermark)
        return rows if bound is None else _alive(rows, bound)[0]

    def _compared(self, old: pa.Table, new: pa.Table, expired: bool) -> pa.Table:
        entry = [each for each in ("key", "namespace", "map_key") if each in old.schema.names]
        both = pa.concat_tables([old.select(entry), new.select(entry)])
        numbers = numbered([both[each] for each in entry])
        size = numbers.max(initial=-1) + 1
        old_at = last_of(numbers[: len(old)], np.arange(len(old)), size)
        new_at = last_of(numbers[len(old) :], np.arange(len(new)), size)
        deleted, inserted = np.flatnonzero(new_at < 0), np.flatnonzero(old_at < 0)
        updated = np.flatnonzero((old_at >= 0) & (new_at >= 0))
        is_changed = self._differ(old["value"], old_at[updated], new["value"], new_at[updated])
        updated = updated[is_changed]
        kinds = np.full(len(deleted), _DELETE, object)
        source, state = self._sides[1], self._described[1]
        bound = None if state is None else state.expired_before(source.now, source.watermark)
        if bound is not None:
            gone = old.take(pa.array(old_at[deleted]))
            kinds[:] = _EXPIRE
            kinds[_alive(gone, bound)[1]] = _DELETE
            if not expired:
                deleted, kinds = deleted[kinds == _DELETE], kinds[kinds == _DELETE]
        at = np.concatenate([inserted, updated, deleted])
        kinds = np.concatenate([[_INSERT] * len(inserted), [_UPDATE] * len(updated), kinds])
        entries = both.take(pa.array(np.where(new_at[at] >= 0, len(old) + new_at[at], old_at[at])))
        values = [_taken(rows["value"], found[at]) for rows, found in ((new, new_at), (old, old_at))]
        entries = entries.add_column(0, "change_type", pa.array(kinds, pa.string()))
        return entries.append_column("value", values[0]).append_column("old_value", values[1])

    def _differ(
        self, old: pa.ChunkedArray, old_at: NDArray[Any], new: pa.ChunkedArray, new_at: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """True where the stored bytes of two values differ."""
        declared = self._value
        stored = [
            to_bytes(column.take(pa.array(at)).combine_chunks(), declared.config())
            for column, at in ((old, old_at), (new, new_at))
        ]
        return np.fromiter((a != b for a, b in zip(*stored, strict=True)), bool, count=len(old_at))


def _form(source: StateSource, state: StateDescription) -> tuple[Any, ...]:
    return source.key_type, state.kind, state.types


def _alive(rows: pa.Table, bound: int) -> tuple[pa.Table, NDArray[np.int64]]:
    """The rows that have not expired, and their positions."""
    kept, positions, start = [], [np.empty(0, np.int64)], 0
    for batch in rows.to_batches():
        left, at = without_expired(batch, bound)
        kept.append(left)
        positions.append(at + start)
        start += batch.num_rows
    return pa.Table.from_batches(kept, rows.schema), np.concatenate(positions)


def _taken(column: pa.ChunkedArray, at: NDArray[np.int64]) -> pa.ChunkedArray:
    """The values at these positions; null for -1."""
    return column.take(pa.array(at, mask=at < 0))


def _shown(parts: list[tuple[dict[str, int], pa.Table]], pair: Pair, batches: Sequence[str] = ()) -> pa.Table:
    """The changes as users see them: the numbers of the batches, readable namespaces, and the fields of keys."""
    tables = [pair.schema.empty_table()]
    for numbers, rows in parts:
        for name in reversed(batches):
            rows = rows.add_column(0, name, pa.repeat(pa.scalar(numbers[name], pa.int64()), rows.num_rows))
        tables.append(rows)
    table = pa.concat_tables(tables, promote_options="default")
    columns: dict[str, Any] = {name: pa.array([], pa.int64()) for name in batches}
    columns |= {name: table[name] for name in (*batches, *pair.schema.names) if name in table.schema.names}
    columns["namespace"] = readable_namespaces(table["namespace"])
    if columns["namespace"].null_count == table.num_rows:
        del columns["namespace"]
    key = pair.key_type
    if isinstance(key, RowType) and not set(key.names) & {*columns, "namespace"}:
        fields = {name: pc.struct_field(columns["key"], at) for at, name in enumerate(key.names)}
        columns = {
            name: column
            for each, given in columns.items()
            for name, column in (fields.items() if each == "key" else [(each, given)])
        }
    return pa.table(columns)
