"""The rows of the heap backend's states: of a whole view, and of what has changed since a mark.

>>> from statebackend.backends.heap import HeapBackend
>>> from statebackend.descriptors import ValueStateDescriptor
>>> keyed = HeapBackend().create_keyed_backend(int)
>>> keyed.get_value_state(ValueStateDescriptor("count", int)).update_many([1, 2], [10, 20])
>>> view = HeapView(keyed, None)
>>> [rows.batch.to_pydict() for section in view.sections() for rows in section.batches]
[{'key': [2, 1], 'value': [20, 10]}]
>>> view.release()
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from statebackend._core.changes import changed_entries
from statebackend._core.entry_rows import EntryRows
from statebackend.backends.heap.codecs import holds_references
from statebackend.backends.heap.columns import Array, arrow_column
from statebackend.backends.heap.core_columns import bytes_of_rows, sliced
from statebackend.checkpoint.format import GroupedBatch, Op, Section
from statebackend.checkpoint.keyed import RowSource, state_schema
from statebackend.checkpoint.keyed.description import value_role
from statebackend.checkpoint.keyed.rows import grouped, stamp_count, without_expired
from statebackend.key_encoding import KeyEncoder, key_encoder
from statebackend.state.columns import to_arrow
from statebackend.types.model import Type

if TYPE_CHECKING:
    from statebackend.backends.heap.keyed import HeapKeyedBackend

__all__ = ["HeapChanges", "HeapView", "row_tables"]

#: Rows, and bytes beside those of fixed width, that are made into one batch.
BATCH_ROWS = 65_536
BATCH_BYTES = 64 << 20


class HeapView(RowSource):
    """All states at this moment: the maps are shared with it, not copied.

    >>> HeapView.__mro__[1].__name__
    'RowSource'
    """

    def __init__(self, backend: HeapKeyedBackend, expired_at: int | None) -> None:
        super().__init__()
        self._readers = [
            _Reader(backend, state, ops=False, expired_at=expired_at, expired=self.expired)
            for state in backend._written_states()
        ]
        self._view = backend.core.snapshot()

    @cached_property
    def _sizes(self) -> list[Array]:
        """By state, how many entries each key group has."""
        return [
            np.sum([self._view.group_sizes(table) for table in reader.tables], axis=0)
            for reader in self._readers
        ]

    @property
    def is_empty(self) -> bool:
        return not any(sizes.any() for sizes in self._sizes)

    def sections(self) -> Sequence[Section]:
        return [
            Section(reader.name, reader.schema, self._batches(reader, sizes))
            for reader, sizes in zip(self._readers, self._sizes, strict=True)
        ]

    def _batches(self, reader: _Reader, sizes: Array) -> Iterator[GroupedBatch]:
        for first, last in _ranges(sizes, reader.first_group):
            yield from _batched(reader.parts_of(self._view, first, last))

    def release(self) -> None:
        self._view.release()


class HeapChanges(RowSource):
    """What was inserted, written or removed since a mark. Its columns are copied at once, by the backend's thread.

    >>> HeapChanges.__mro__[1].__name__
    'RowSource'
    """

    def __init__(self, backend: HeapKeyedBackend, mark: Any) -> None:
        super().__init__()
        self._changes = []
        for state in backend._written_states():
            reader = _Reader(backend, state, ops=True)
            parts = [part for part in reader.changes_since(mark) if len(part)]
            if parts:
                self._changes.append((reader, parts))

    @property
    def is_empty(self) -> bool:
        return not self._changes

    def sections(self) -> Sequence[Section]:
        return [
            Section(reader.name, reader.schema, self._batches(reader, parts))
            for reader, parts in self._changes
        ]

    def _batches(self, reader: _Reader, parts: list[_Copied]) -> Iterator[GroupedBatch]:
        sizes = np.bincount(np.concatenate([part.groups for part in parts]) - reader.first_group)
        for first, last in _ranges(sizes, reader.first_group):
            yield from _batched([part.take(_rows_of(part, first, last)) for part in parts])

    def release(self) -> None:
        self._changes = []


def _batched(parts: Sequence[_Part | _Copied]) -> Iterator[GroupedBatch]:
    """The rows of some key groups in batches: of each key group in the order of the parts, which have theirs sorted."""
    parts = [part for part in parts if len(part)]
    if sum(int(_sizes(part).sum()) for part in parts) <= 2 * BATCH_BYTES:
        yield from _not_empty([part.rows() for part in parts])
        return
    for group in np.unique(np.concatenate([part.groups for part in parts])):
        for part in parts:
            for piece in _pieces(part.take(_rows_of(part, group, group))):
                yield from _not_empty([piece.rows()])


def _rows_of(part: _Part | _Copied, first: int, last: int) -> slice:
    start, end = np.searchsorted(part.groups, [first, last + 1])
    return slice(int(start), int(end))


def _sizes(part: _Part | _Copied) -> Array:
    sizes: Array = part.weights() + BATCH_BYTES // BATCH_ROWS
    return sizes


def _not_empty(parts: list[tuple[pa.RecordBatch, Array]]) -> Iterator[GroupedBatch]:
    """The parts as one batch, without what has expired, if anything is left."""
    left = [(batch, groups) for batch, groups in parts if batch.num_rows]
    if left:
        yield grouped(left)


def _ranges(sizes: Array, first_group: int) -> Iterator[tuple[int, int]]:
    """Ranges of key groups with about as many rows as a batch has, without those at the ends that are empty."""
    filled = np.flatnonzero(sizes)
    if not len(filled):
        return
    number = (np.cumsum(sizes[filled]) - 1) // BATCH_ROWS
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    for of_range in np.split(filled, starts[1:]):
        yield first_group + int(of_range[0]), first_group + int(of_range[-1])


def _pieces(part: _Part | _Copied) -> Iterator[_Part | _Copied]:
    """Parts of about as many rows and bytes as a batch has."""
    if not len(part):
        return
    number = (np.cumsum(_sizes(part)) - 1) // BATCH_BYTES
    starts = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(part)], strict=True):
        yield part.take(slice(start, end))


def _maps_of(state: Any) -> list[Any]:
    return [maps for maps in (state.plain_map, state.spaced_map) if maps is not None]


def row_tables(state: Any) -> list[Any]:
    """The tables of a state whose entries are rows of a checkpoint.

    >>> from statebackend.backends.heap import HeapBackend
    >>> from statebackend.descriptors import MapStateDescriptor
    >>> seen = HeapBackend().create_keyed_backend(int).get_state(MapStateDescriptor("seen", int, int))
    >>> [len(table) for table in row_tables(seen)]
    [0]
    """
    if state.descriptor.kind == "map":
        return [maps.entries for maps in _maps_of(state)]
    tables: list[Any] = state._tables()
    return tables


class _Reader:
    """One state: which tables it has, and how its columns become Arrow's.

    It is made when the snapshot is taken. All that only follows from the descriptor is found out when it is asked for,
    which is on the writing thread.
    """

    def __init__(
        self,
        backend: HeapKeyedBackend,
        state: Any,
        *,
        ops: bool,
        expired_at: int | None = None,
        expired: Counter[str] | None = None,
    ) -> None:
        #: A state that is declared anew gets another descriptor; this one stays as it is.
        self._descriptor = state.descriptor
        self._expired_at = expired_at
        #: Where what has expired is counted, by state.
        self.expired = Counter() if expired is None else expired
        self.name = self._descriptor.name
        self.ops = ops
        self.is_map = self._descriptor.kind == "map"
        self.is_list = self._descriptor.kind == "list"
        self.maps = _maps_of(state) if self.is_map else []
        self.tables = [maps.entries for maps in self.maps] if self.is_map else state._tables()
        self.has_namespaces = len(self.tables) > 1
        self.key_encoder = backend._encoder
        self._namespaces = backend.core.namespaces
        self.first_group = backend.key_group_range.start

    @cached_property
    def schema(self) -> pa.Schema:
        key_type = self.key_encoder.declared_type
        return state_schema(key_type, self._descriptor, namespaces=self.has_namespaces, ops=self.ops)

    @cached_property
    def value_type(self) -> Type:
        return self._descriptor.stored_types()[value_role(self._descriptor.kind)]

    @cached_property
    def holds_objects(self) -> bool:
        return holds_references(self.value_type)

    @cached_property
    def map_key_encoder(self) -> KeyEncoder:
        return key_encoder(self._descriptor.stored_types()["key"])

    @cached_property
    def has_timestamps(self) -> bool:
        return self._descriptor.ttl_config is not None

    @cached_property
    def expired_before(self) -> int | None:
        """Up to which timestamp values are left out; None if all are written."""
        ttl = self._descriptor.ttl_config
        if ttl is None or not ttl.cleanup_full_snapshot or self._expired_at is None:
            return None
        return self._expired_at - ttl.ttl

    def parts_of(self, view: Any, first: int, last: int) -> list[_Part]:
        """The rows of some key groups, table by table."""
        if not self.is_map:
            return [_Part(self, view.rows(table, first, last)) for table in self.tables]
        parts = []
        for maps in self.maps:
            entries, heads = view.rows(maps.entries, first, last), view.rows(maps.heads, first, last)
            anchors, places = entries.links()
            order = np.lexsort((places, entries.groups))
            numbers = heads.columns()["value"]
            by_number = np.argsort(numbers)
            owners = by_number[np.searchsorted(numbers, anchors[order], sorter=by_number)]
            parts.append(_Part(self, entries.take(order), heads.take(owners)))
        return parts

    def changes_since(self, mark: Any) -> list[_Copied]:
        """What has changed, in the order in which it is to be applied within a key group."""
        removed, put = [], []
        if self.is_map:
            for maps in self.maps:
                cleared = changed_entries(maps.heads, mark)
                removed.append(_Copied(self, Op.CLEAR, cleared.keys(), cleared.groups))
                entries = changed_entries(maps.entries, mark)
                owners = entries.heads(maps.heads)
                # What lies below a key that was removed is gone with it.
                of_cleared = np.isin(owners.addresses, cleared.addresses[cleared.is_live])
                # So is the place in the order of an entry that was removed and has come back.
                left = ~entries.is_live | entries.was_removed
                gone = np.flatnonzero(owners.is_live & left & ~of_cleared)
                map_keys, keys = entries.take(gone).keys(), owners.take(gone).keys()
                removed.append(_Copied(self, Op.REMOVE, keys, entries.groups[gone], map_keys))
                there = np.flatnonzero(owners.is_live & entries.is_live)
                there = there[np.lexsort((entries.take(there).links()[1], entries.groups[there]))]
                columns, keys = entries.take(there).columns(), owners.take(there).keys()
                put.append(_Copied(self, Op.PUT, keys, entries.groups[there], columns))
            return removed + put
        for table in self.tables:
            rows = changed_entries(table, mark)
            absent, live = rows.take(~rows.is_live), rows.take(rows.is_live)
            removed.append(_Copied(self, Op.REMOVE, absent.keys(), absent.groups))
            grown = np.zeros(len(live), dtype=bool)
            if self.is_list and live.kept is not None:
                grown = live.kept > 0
            for op, rows in ((Op.PUT, live.take(~grown)), (Op.APPEND, live.take(grown))):
                columns = rows.columns()
                put.append(_Copied(self, op, columns, rows.groups, columns))
        return removed + put

    # --- columns to Arrow ---

    def batch(
        self,
        op: Op | None,
        keys: dict[str, Array],
        namespaces: pa.Array | None,
        columns: dict[str, Array] | None,
    ) -> pa.RecordBatch:
        """Columns of the core as a batch of the state's schema; without values where only keys are given."""
        arrays = [self.key_encoder.decode_many(_canonical(keys))]
        count = len(arrays[0])
        if namespaces is not None:
            arrays.append(namespaces)
        if self.is_map:
            arrays.append(
                _nulls(self.schema.field("map_key"), count)
                if columns is None
                else self.map_key_encoder.decode_many(_canonical(columns))
            )
        if op in (Op.REMOVE, Op.CLEAR) or columns is None:
            arrays.append(_nulls(self.schema.field("value"), count))
            if self.has_timestamps:
                arrays.append(_nulls(self.schema.field("timestamp"), count))
        else:
            arrays += self._values(columns)
        if op is not None:
            arrays.append(pa.array(np.full(count, op, dtype=np.uint8)))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def namespaces(self, keys: dict[str, Array], count: int) -> pa.Array | None:
        """The column of namespaces, if there is one. Numbers mean something only while their entries are held."""
        if not self.has_namespaces:
            return None
        numbers = keys.get("namespace", np.zeros(count, dtype=np.uint32))
        distinct, inverse = np.unique(numbers, return_inverse=True)
        names = [b"" if number == 0 else self._namespaces.name(int(number)) for number in distinct]
        return pa.array(names, pa.binary()).take(pa.array(inverse.reshape(-1)))

    def _values(self, columns: dict[str, Array]) -> list[pa.Array]:
        if not self.is_list:
            value = self._arrow(columns)
            return [value, pa.array(columns["timestamp"])] if self.has_timestamps else [value]
        offsets = pa.array(columns["list_offsets"].astype(np.int32))
        lists = [pa.ListArray.from_arrays(offsets, self._arrow(columns), self.schema.field("value").type)]
        if self.has_timestamps:
            stamps = pa.array(columns["timestamp"])
            lists.append(pa.ListArray.from_arrays(offsets, stamps, self.schema.field("timestamp").type))
        return lists

    def _arrow(self, columns: dict[str, Array]) -> pa.Array:
        value = columns["value"]
        if self.holds_objects:
            return to_arrow(value.tolist(), self.value_type)
        is_null = columns.get("is_null")
        stored = (columns["value_offsets"], value) if "value_offsets" in columns else value
        return arrow_column(stored, None if is_null is None else ~is_null, self.value_type)


def _canonical(columns: dict[str, Array]) -> Any:
    return (columns["key_offsets"], columns["key"]) if "key_offsets" in columns else columns["key"]


def _nulls(field: pa.Field, count: int) -> pa.Array:
    return pa.nulls(count, field.type)


class _Part:
    """Rows of one table of a state; of a map state also the entry of each row's key."""

    def __init__(self, reader: _Reader, rows: EntryRows, owners: EntryRows | None = None) -> None:
        self._reader = reader
        self._entries = rows
        self._owners = owners

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def groups(self) -> Array:
        return self._entries.groups

    def weights(self) -> Array:
        weights = self._entries.weights()
        # The key stands in the row of each of its entries.
        return weights if self._owners is None else weights + self._owners.weights()

    def take(self, rows: Any) -> _Part:
        owners = None if self._owners is None else self._owners.take(rows)
        return _Part(self._reader, self._entries.take(rows), owners)

    def rows(self) -> tuple[pa.RecordBatch, Array]:
        """A batch and the key group of each row, without what has expired."""
        expired_before = self._reader.expired_before
        columns = self._entries.columns()
        keys = columns if self._owners is None else self._owners.keys()
        namespaces = self._reader.namespaces(keys, len(self))
        batch, groups = self._reader.batch(None, keys, namespaces, columns), self.groups
        if expired_before is None:
            return batch, groups
        left, kept = without_expired(batch, expired_before)
        self._reader.expired[self._reader.name] += stamp_count(batch) - stamp_count(left)
        return left, groups[kept]


class _Copied:
    """Rows whose columns have been copied out of the core."""

    def __init__(
        self,
        reader: _Reader,
        op: Op,
        keys: dict[str, Array],
        groups: Array,
        columns: dict[str, Array] | None = None,
    ) -> None:
        self.groups = groups
        self._reader = reader
        self._op = op
        self._keys = keys
        self._namespaces = reader.namespaces(keys, len(groups))
        self._columns = columns

    def __len__(self) -> int:
        return len(self.groups)

    def weights(self) -> Array:
        weights = bytes_of_rows(self._keys, len(self))
        if self._columns is None or self._columns is self._keys:
            return weights
        return weights + bytes_of_rows(self._columns, len(self))

    def take(self, rows: slice) -> _Copied:
        """Consecutive rows; nothing is copied."""
        taken = copy.copy(self)
        taken.groups = self.groups[rows]
        taken._keys = sliced(self._keys, rows)
        if self._namespaces is not None:
            taken._namespaces = self._namespaces[rows]
        if self._columns is not None:
            taken._columns = sliced(self._columns, rows)
        return taken

    def rows(self) -> tuple[pa.RecordBatch, Array]:
        return self._reader.batch(self._op, self._keys, self._namespaces, self._columns), self.groups
