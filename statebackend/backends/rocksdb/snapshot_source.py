"""The rows of the backend: of a whole view, and of the changes since a point.

A view holds an iterator of each column family, which sees the database as it was. The open batch's changes are read at
once. A reader on another thread goes over both, in order of the composite keys, and so of key groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend._core.rocksdb.handles.value_layouts import split_lists, split_values
from statebackend._core.rocksdb.overlay.composite_keys import split_many
from statebackend._core.rocksdb.overlay.key_changes import CLEARED, KeyChanges
from statebackend._core.rocksdb.overlay.keyed_store import Table
from statebackend._core.rocksdb.overlay.merging_iterator import MergingIterator
from statebackend._core.rocksdb.overlay.sorted_rows import are_below, picked
from statebackend.backends.rocksdb.family_states import Runs, chosen_rows
from statebackend.checkpoint.format import GroupedBatch, Op, Section
from statebackend.checkpoint.keyed import ExpiredAt, Source, compiled_backend as compiled, state_schema
from statebackend.checkpoint.keyed.chain import Point
from statebackend.checkpoint.keyed.compiled_backend import CompiledPoints, cuts, group_ranges
from statebackend.checkpoint.keyed.description import value_role
from statebackend.checkpoint.keyed.row_source import grouped, stamp_count, without_expired
from statebackend.columns.codec_factory import holds_references
from statebackend.columns.nested_columns import decoded_keys
from statebackend.columns.stored_columns import Array, arrow_column, list_column, stored_column
from statebackend.errors import overlapping_call
from statebackend.keys import arrow_of_byte_runs, key_encoder
from statebackend.state import StateDescriptor, newest_expired
from statebackend.types import BYTES, Type
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed_backend import RocksDbKeyedBackend


#: Writes are refused where these are to take what they change.
_REFUSING = KeyChanges(is_busy=True)


class Segment:
    """The changes from one remembered moment to the next."""

    __slots__ = ("is_of_mark", "is_valid", "tables")

    def __init__(self, tables: int, *, is_of_mark: bool = False) -> None:
        #: True for a mark, or for the batch that the first mark begins; False for a snapshot.
        self.is_of_mark = is_of_mark
        #: By the number of the table: each key, and its change.
        self.tables = [KeyChanges() for _ in range(tables)]
        #: False once it was dropped, or a rollback went behind it.
        self.is_valid = True

    def __len__(self) -> int:
        return sum(map(len, self.tables))


class ChangeLog:
    """The segments between the moments that marks and points remember, oldest first; ``note_in`` gets the newest one.

    While no moment is remembered, nothing is noted.
    """

    def __init__(self, note_in: Callable[[list[KeyChanges] | None], object]) -> None:
        self._segments: list[Segment] = []
        self._tables = 0
        self._note_in = note_in

    def __len__(self) -> int:
        return len(self._segments)

    def add_table(self) -> int:
        """The number of a new table."""
        self._tables += 1
        for segment in self._segments:
            segment.tables.append(KeyChanges())
        return self._tables - 1

    def open(self, *, is_of_mark: bool = False) -> Segment:
        """Remember this moment. O(tables)."""
        self._segments.append(Segment(self._tables, is_of_mark=is_of_mark))
        self._note()
        return self._segments[-1]

    def _note(self) -> None:
        self._note_in(self._segments[-1].tables if self._segments else None)

    def drop(self, segment: Segment) -> None:
        """Forget a moment. Later changes are passed on to the moment before, if there is one. Idempotent."""
        if not segment.is_valid:
            return
        segment.is_valid = False
        try:
            # Or another thread writes into a table that is joined already.
            self._note_in([_REFUSING] * self._tables)
            at = self._segments.index(segment)
            del self._segments[at]
            if at:
                before = self._segments[at - 1].tables
                for number, noted in enumerate(segment.tables):
                    before[number] = _joined(before[number], noted)
        finally:
            self._note()

    def drop_lost(self, known: Collection[Segment | None]) -> bool:
        """Forget the moments of marks that are not among the known ones, and the changes since.

        Return True if there were any: then the next snapshot must be a base.
        """
        lost = [each for each in self._segments if each.is_of_mark and each not in known]
        for segment in lost:
            segment.is_valid = False
            self._segments.remove(segment)
        if lost:
            self._note()
        return bool(lost)

    def back_to(self, segment: Segment) -> None:
        """Forget what has changed since a moment, and the moments after it. O(changes)."""
        at = self._segments.index(segment)
        for later in self._segments[at + 1 :]:
            later.is_valid = False
        del self._segments[at + 1 :]
        segment.tables[:] = [KeyChanges() for _ in range(self._tables)]
        self._note()

    def since(self, segment: Segment, number: int) -> KeyChanges:
        """The keys of a table that have changed since a moment. O(changes)."""
        at = self._segments.index(segment)
        return _joined_all(self._segments[at:], number)

    def between(self, first: Segment, last: Segment, number: int) -> KeyChanges:
        """The keys that have changed from a moment on until a later one."""
        start, end = self._segments.index(first), self._segments.index(last)
        return _joined_all(self._segments[start:end], number)

    def count_since(self, segment: Segment) -> int:
        """About how many keys have changed since a moment. O(moments and tables)."""
        return sum(map(len, self._segments[self._segments.index(segment) :]))

    def close(self) -> None:
        for segment in self._segments:
            segment.is_valid = False
        self._segments.clear()
        self._note()


def _joined(before: KeyChanges, after: KeyChanges) -> KeyChanges:
    """One of the two, changed to hold both. O(the smaller one)."""
    if len(after) <= len(before):
        before.follow(after)
        return before
    after.precede(before)
    return after


def _joined_all(segments: list[Segment], number: int) -> KeyChanges:
    """What a table has in all of them; not to be changed."""
    filled = [each.tables[number] for each in segments if len(each.tables[number])]
    if len(filled) == 1:
        return filled[0]
    joined = KeyChanges()
    for each in filled:
        joined = _joined(joined, each.copy())
    return joined


def groups_of(keys: Runs) -> Array:
    """The key groups of composite keys."""
    offsets, data = keys
    starts = offsets[:-1]
    groups: Array = data[starts].astype(np.int64) << 8 | data[starts + 1]
    return groups


def joined_runs(parts: Sequence[Runs]) -> Runs:
    """Concatenate runs, without the bytes before the first row and after the last row of each."""
    ends, data, size = [np.zeros(1, np.int64)], [], 0
    for offsets, part in parts:
        ends.append(offsets[1:] - offsets[0] + size)
        data.append(part[offsets[0] : offsets[-1]])
        size += int(offsets[-1] - offsets[0])
    return np.concatenate(ends), np.concatenate(data)


class FamilyReader:
    """A state, or the timers of a domain, on its way into a file."""

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: StateDescriptor, table: Table) -> None:
        self.descriptor = descriptor
        self.name = descriptor.name
        self.table = table
        self._encoder = backend.encoder
        self._has_namespaces = table.has_namespaces
        self._is_map, self.is_list = descriptor.kind == "map", descriptor.kind == "list"
        self._is_stamped = descriptor.ttl_config is not None
        types = descriptor.stored_types()
        self._value_type: Type = types[value_role(descriptor.kind)]
        self._width = serializer_for(self._value_type).fixed_width or 0
        self._map_encoder = key_encoder(types["key"]) if self._is_map else None

    def schema(self, *, ops: bool) -> pa.Schema:
        """The columns in a file of changes, or in a base."""
        key_type = self._encoder.declared_type
        return state_schema(key_type, self.descriptor, namespaces=self._has_namespaces, ops=ops)

    def batch(self, keys: Runs, values: Runs | None, op: Op | None) -> tuple[pa.RecordBatch, Array]:
        """Composite keys, and the stored bytes (None: nothing), as a batch; and the key group of each row."""
        inner_encoder = None if op is Op.CLEAR else self._map_encoder
        map_is_int = None if inner_encoder is None else inner_encoder.kind == "int"
        groups, canonical, namespaces, inner = split_many(*keys, self._encoder.kind == "int", map_is_int)
        schema = self.schema(ops=op is not None)
        columns = {"key": decoded_keys(self._encoder, canonical)}
        if self._has_namespaces:
            columns["namespace"] = arrow_of_byte_runs(namespaces[0], namespaces[1], BYTES)
        if inner_encoder is not None:
            columns["map_key"] = decoded_keys(inner_encoder, inner)
        elif self._map_encoder is not None:
            columns["map_key"] = pa.nulls(len(groups), schema.field("map_key").type)
        if values is None:
            columns["value"] = pa.nulls(len(groups), schema.field("value").type)
            columns["timestamp"] = pa.nulls(len(groups), pa.int64())
            if self._is_stamped:
                columns["timestamp"] = pa.nulls(len(groups), schema.field("timestamp").type)
        elif self.is_list:
            self._add_lists(columns, values, schema)
        else:
            stamps, nulls, ends, data = split_values(*values, self._is_stamped, self._is_map, self._width)
            columns["value"] = self._arrow((ends, data), None if nulls is None else ~nulls)
            if stamps is not None:
                columns["timestamp"] = pa.array(stamps)
        if op is not None:
            columns["op"] = pa.array(np.full(len(groups), op, dtype=np.uint8))
        arrays = [columns[name] for name in schema.names]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if self.is_list and values is not None:
            kept = np.flatnonzero(np.diff(values[0]))
            if len(kept) < len(groups):  # empty bytes are not a list
                return batch.take(pa.array(kept)), groups[kept]
        return batch, groups

    def _add_lists(self, columns: dict[str, pa.Array], values: Runs, schema: pa.Schema) -> None:
        list_ends, stamps, ends, data = split_lists(*values, self._width, self._is_stamped)
        columns["value"] = self._arrow((ends, data), None)
        if stamps is not None:
            columns["timestamp"] = pa.array(stamps)
        for name in columns.keys() & {"value", "timestamp"}:
            of_lists = schema.field(name).type
            columns[name] = list_column(list_ends, columns[name], of_lists, f"state {self.name!r}")

    def _arrow(self, runs: Runs, valid: Array | None) -> pa.Array:
        """Serialised values as Arrow has them; objects stay bytes."""
        if holds_references(self._value_type):
            column = arrow_of_byte_runs(*runs, BYTES)
            if valid is not None:
                column = column.take(pa.array(np.arange(len(column)), mask=~valid))
            return column.cast(self._value_type.arrow)
        return arrow_column(stored_column(runs, self._value_type), valid, self._value_type)


_WITHOUT_VALUES = (Op.CLEAR, Op.REMOVE)


class RocksDbPoints(CompiledPoints):
    """Points are moments of `Changes`."""

    def __init__(self, backend: RocksDbKeyedBackend) -> None:
        self._backend = backend

    def open(self) -> Point:
        return self._backend.changes.open()

    def drop(self, point: Point) -> None:
        self._backend.changes.drop(point)

    def is_valid(self, point: Point) -> bool:
        return bool(point.is_valid)

    def changes_since(self, point: Point) -> int:
        return self._backend.changes.count_since(point)

    def row_counts(self) -> Iterator[int]:
        return self._backend.row_counts()


class _Rows(NamedTuple):
    keys: Runs
    values: Runs

    def __len__(self) -> int:
        return len(self.keys[0]) - 1

    def picked(self, rows: Array, begin: Array | None = None) -> _Rows:
        return _Rows(picked(*self.keys, rows), picked(*self.values, rows, begin))


class _ChangedRows(NamedTuple):
    """Keys that have changed, in order, with the bytes stored there now."""

    rows: _Rows
    is_there: Array
    #: The change of each, as `Changes` says.
    became: Array
    #: The places of maps that were cleared as a whole.
    cleared: Runs

    @classmethod
    def of(cls, backend: RocksDbKeyedBackend, state: FamilyReader, noted: KeyChanges) -> _ChangedRows:
        """What is stored at these keys now, through the batch."""
        runs, became = noted.in_order()
        is_cleared = became == CLEARED
        cleared = _places(*chosen_rows(runs, is_cleared))
        if is_cleared.any():
            runs, became = chosen_rows(runs, ~is_cleared), became[~is_cleared]
        found, ends, data = backend.store.get_many(state.table, *runs)
        if state.is_list:  # empty bytes are not a list
            found = np.diff(ends) > 0
        return cls(_Rows(runs, (ends, data)), found, became, cleared)

    def operations(self) -> list[tuple[Op, _Rows]]:
        """The steps of a delta, in this order: clear maps, removes, puts, and appends to lists that only grew."""
        sizes = np.diff(self.rows.values[0])
        grew = self.is_there & (self.became < 0) & (sizes > -self.became)
        removed = np.flatnonzero(~self.is_there & ~are_below(*self.rows.keys, *self.cleared))
        put = np.flatnonzero(self.is_there & ~grew)
        appended = np.flatnonzero(grew)
        begin = (sizes + self.became)[appended]
        return [
            (Op.CLEAR, _Rows(self.cleared, self.cleared)),
            (Op.REMOVE, self.rows.picked(removed)),
            (Op.PUT, self.rows.picked(put)),
            (Op.APPEND, self.rows.picked(appended, begin)),
        ]


def _places(ends: Array, data: Array) -> Runs:
    """The places of cleared maps: their notes lack the last byte, which is 0."""
    places = np.zeros(len(data) + len(ends) - 1, np.uint8)
    places[np.arange(len(data)) + np.repeat(np.arange(len(ends) - 1), np.diff(ends))] = data
    return ends + np.arange(len(ends)), places


class _StateView:
    """One state at a moment: a walk over the database as it was, and over a copy of the batch's changes."""

    def __init__(self, backend: RocksDbKeyedBackend, state: FamilyReader) -> None:
        self.state = state
        layer = backend.store.frozen(state.table)
        self._walk = MergingIterator(state.table.family, layer, fill_cache=False)
        first = MergingIterator(state.table.family, layer, fill_cache=False)
        self.is_empty = not first.rows(1)
        first.close()
        self._scans = 0

    def rows(self) -> Iterator[_Rows]:
        """The rows, a batch at a time, in order. One scan at a time: another one ends it."""
        self._walk.restart()
        scan = self._scans = self._scans + 1
        while len(rows := self._read()):
            yield rows
            if scan != self._scans:
                raise overlapping_call()

    def _read(self) -> _Rows:
        keys, key_data, values, value_data = self._walk.read_many(compiled.BATCH_ROWS, compiled.BATCH_BYTES)
        return _Rows((keys, key_data), (values, value_data))

    def close(self) -> None:
        self._walk.close()


class RocksDbView(Source):
    """All states at this moment. It keeps the database, also if the backend is closed; nothing is copied but the batch.

    Without times it leaves nothing out.
    """

    def __init__(self, backend: RocksDbKeyedBackend, expired_at: ExpiredAt | None) -> None:
        super().__init__("base", backend.key_group_range)
        self._expired_at = expired_at or ExpiredAt()
        self._scratch = backend.scratch
        self._scratch.hold()
        self._is_released = False
        self._views: list[_StateView] = []
        try:
            for state in backend.state_readers():
                self._views.append(_StateView(backend, state))
        except BaseException:
            self.release()
            raise

    @property
    def is_empty(self) -> bool:
        return all(view.is_empty for view in self._views)

    def sections(self) -> Sequence[Section]:
        return [
            Section(view.state.name, view.state.schema(ops=False), self._batches(view))
            for view in self._views
            if not view.is_empty
        ]

    def _batches(self, view: _StateView) -> Iterator[GroupedBatch]:
        state = view.state
        ttl = state.descriptor.ttl_config
        expired_at = self._expired_at.of(ttl)
        for rows in view.rows():
            batch, groups = state.batch(rows.keys, rows.values, None)
            if ttl is not None and expired_at is not None:
                left, kept = without_expired(batch, newest_expired(ttl.ttl, expired_at))
                self.expired[state.name] += stamp_count(batch) - stamp_count(left)
                batch, groups = left, groups[kept]
            if batch.num_rows:
                yield GroupedBatch.of(batch, groups)

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        for view in self._views:
            view.close()
        self._views = []
        self._scratch.release()


class RocksDbChanges(Source):
    """The rows written or removed since a point. The backend's thread reads them at once."""

    def __init__(self, backend: RocksDbKeyedBackend, point: Segment) -> None:
        super().__init__("delta", backend.key_group_range)
        self._changes: list[tuple[FamilyReader, list[tuple[Op, _Rows]]]] = []
        for state in backend.state_readers():
            noted = backend.changes.since(point, state.table.number)
            if len(noted):
                self._changes.append((state, _ChangedRows.of(backend, state, noted).operations()))

    @property
    def is_empty(self) -> bool:
        return not self._changes

    def sections(self) -> Sequence[Section]:
        return [
            Section(state.name, state.schema(ops=True), _changed(state, operations))
            for state, operations in self._changes
        ]

    def release(self) -> None:
        self._changes = []


def _changed(state: FamilyReader, operations: Sequence[tuple[Op, _Rows]]) -> Iterator[GroupedBatch]:
    """In each key group: cleared, removed, written and appended rows."""
    known = [(op, rows, groups_of(rows.keys)) for op, rows in operations if len(rows)]
    sizes = np.bincount(np.concatenate([groups for _, _, groups in known]))
    for first, last in group_ranges(sizes, 0):
        parts = [(op, rows, each) for op, rows, of_rows in known if len(each := _slice(of_rows, first, last))]
        count = sum(len(each) for _, _, each in parts)
        if count <= 2 * compiled.BATCH_ROWS and sum(map(_bytes, parts)) <= 2 * compiled.BATCH_BYTES:
            yield grouped([_piece(state, op, rows, each) for op, rows, each in parts])
            continue
        for group in range(first, last + 1):
            for op, rows, of_rows in known:
                for piece in _pieces(op, rows, _slice(of_rows, group, group)):
                    yield GroupedBatch.of(*_piece(state, op, rows, piece))


def _slice(groups: Array, first: int, last: int) -> range:
    """The rows of some key groups."""
    start, end = np.searchsorted(groups, [first, last + 1]).tolist()
    return range(start, end)


def _bytes(part: tuple[Op, _Rows, range]) -> int:
    op, rows, chosen = part
    return 0 if op in _WITHOUT_VALUES else int(rows.values[0][chosen.stop] - rows.values[0][chosen.start])


def _pieces(op: Op, part: _Rows, rows: range) -> Iterator[range]:
    """Some of the rows in pieces of at most about a batch; only single rows are larger."""
    if not rows:
        return
    sizes = np.diff(part.keys[0][rows.start : rows.stop + 1]) + compiled.BATCH_BYTES // compiled.BATCH_ROWS
    if op not in _WITHOUT_VALUES:
        sizes = sizes + np.diff(part.values[0][rows.start : rows.stop + 1])
    for start, end in itertools.pairwise([*cuts(sizes, compiled.BATCH_BYTES), len(rows)]):
        yield rows[start:end]


def _piece(state: FamilyReader, op: Op, part: _Rows, rows: range) -> tuple[pa.RecordBatch, Array]:
    """Some of the rows, and their key groups."""
    of_rows = slice(rows.start, rows.stop + 1)
    keys = (part.keys[0][of_rows], part.keys[1])
    values = None if op in _WITHOUT_VALUES else (part.values[0][of_rows], part.values[1])
    return state.batch(keys, values, op)
