"""The states of a heap backend as checkpoints see them: entries of tables, gathered into columns of Arrow."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend._core.key_groups import HashPlan
from statebackend._core.snapshots.changes import changed_entries
from statebackend._core.snapshots.entry_rows import EntryRows
from statebackend.checkpoint.format import Op, Section
from statebackend.checkpoint.keyed import ExpiredAt, state_schema
from statebackend.checkpoint.keyed.description import value_role
from statebackend.checkpoint.keyed.row_source import stamp_count, without_expired
from statebackend.columns.codec_factory import holds_references
from statebackend.columns.nested_columns import decoded_keys, encoded_keys
from statebackend.columns.stored_columns import Array, arrow_column, list_column
from statebackend.errors import SerializationError
from statebackend.keys import KeyEncoder, key_encoder
from statebackend.state import newest_expired
from statebackend.types import Type
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.heap.keyed_backend import HeapKeyedBackend


def bytes_of_rows(columns: dict[str, Array], count: int) -> Array:
    """Return the bytes that each row takes in the columns of varying width. O(rows)."""
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
    """Consecutive rows, with offsets that begin at 0 again. O(rows): only the offsets are copied."""
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


class ExpiryFilter(NamedTuple):
    """Tells a full snapshot which values of a state to leave out, because they have expired."""

    #: Values with a timestamp up to this one have expired.
    before: int
    #: Counts the values left out, by state.
    counts: dict[str, int]


def _maps_of(state: Any) -> list[Any]:
    """The heads and the entries of a map state together."""
    return [maps for maps in (state.plain_map, state.spaced_map) if maps is not None]


def row_tables(state: Any) -> list[Any]:
    """The tables of a state whose entries are rows of a checkpoint."""
    if state.descriptor.kind == "map":
        return [maps.entries for maps in _maps_of(state)]
    tables: list[Any] = state._tables()
    return tables


class TableReader:
    """One state: its tables, and the conversion of their columns to Arrow.

    Snapshots share it: the backend makes another one when the state gets another descriptor or table. Facts that
    follow from the descriptor are computed on first use, which happens on a writing thread.
    """

    def __init__(self, backend: HeapKeyedBackend, state: Any) -> None:
        self.descriptor = state.descriptor
        self.name = self.descriptor.name
        self.is_map = self.descriptor.kind == "map"
        self.is_list = self.descriptor.kind == "list"
        self.maps = _maps_of(state) if self.is_map else []
        #: The tables whose entries are rows of a checkpoint.
        self.tables = row_tables(state)
        self.first_group = backend.key_group_range.start
        #: Those of all tables, as `StateCore.written_since` calls them.
        self.journals = {table.journal for table in state._tables()}
        self._key_encoder = backend._encoder
        self._namespaces = backend.core.namespaces

    # --- what follows from the descriptor ---

    @property
    def has_namespaces(self) -> bool:
        return len(self.tables) > 1

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of a base file."""
        return self._schema(ops=False)

    @cached_property
    def without_rows(self) -> Section:
        """Its section in a base, if it is empty."""
        return Section(self.name, self.schema, ())

    @cached_property
    def delta_schema(self) -> pa.Schema:
        """The columns of a delta file."""
        return self._schema(ops=True)

    def _schema(self, *, ops: bool) -> pa.Schema:
        key_type = self._key_encoder.declared_type
        return state_schema(key_type, self.descriptor, namespaces=self.has_namespaces, ops=ops)

    @cached_property
    def _value_type(self) -> Type:
        found: Type = self.descriptor.stored_types()[value_role(self.descriptor.kind)]
        return found

    @cached_property
    def holds_objects(self) -> bool:
        """True if values are kept as Python objects."""
        return holds_references(self._value_type)

    @cached_property
    def serialize(self) -> Callable[[Any], bytes]:
        """The function that turns an object into the bytes that checkpoints hold."""
        serialize = serializer_for(self._value_type).serialize

        def named(value: Any) -> bytes:
            try:
                return serialize(value)
            except SerializationError as error:
                raise error.at(f"state {self.name!r}") from None

        return named

    @cached_property
    def _map_key_encoder(self) -> KeyEncoder:
        return key_encoder(self.descriptor.stored_types()["key"])

    @cached_property
    def _has_timestamps(self) -> bool:
        return self.descriptor.ttl_config is not None

    def left_out(self, times: ExpiredAt, counts: dict[str, int]) -> ExpiryFilter | None:
        """The values that a full snapshot leaves out, by the times of the last commit; None if it writes all."""
        ttl = self.descriptor.ttl_config
        expired_at = times.of(ttl)
        if ttl is None or expired_at is None:
            return None
        return ExpiryFilter(newest_expired(ttl.ttl, expired_at), counts)

    # --- rows ---

    def parts_of(self, view: Any, first: int, last: int, left_out: ExpiryFilter | None) -> list[TableRows]:
        """The rows of some key groups, table by table."""
        if not self.is_map:
            return [TableRows(self, view.rows(table, first, last), None, left_out) for table in self.tables]
        parts = []
        for maps in self.maps:
            entries, heads = view.rows(maps.entries, first, last), view.rows(maps.heads, first, last)
            anchors, places = entries.links()
            order = np.lexsort((places, entries.groups))
            numbers = heads.columns()["value"]
            by_number = np.argsort(numbers)
            owners = by_number[np.searchsorted(numbers, anchors[order], sorter=by_number)]
            parts.append(TableRows(self, entries.take(order), heads.take(owners), left_out))
        return parts

    def found(
        self, view: Any, keys: pa.Array, max_parallelism: int, namespace: bytes
    ) -> tuple[TableRows, Array]:
        """The rows of keys in a namespace, and the positions of these keys; not of a map state."""
        canonical = encoded_keys(self._key_encoder, keys)
        groups = HashPlan(self._key_encoder.hash_plan).key_groups(canonical, max_parallelism)
        number = self._namespaces.find(namespace) if namespace else 0
        if number is None or (namespace and not self.has_namespaces):
            canonical, groups = encoded_keys(self._key_encoder, keys.slice(0, 0)), groups[:0]
        rows, is_found = view.find(
            self.tables[bool(namespace and self.has_namespaces)], canonical, groups, number or 0
        )
        return TableRows(self, rows, None, None), np.flatnonzero(is_found)

    def changes_since(self, mark: Any) -> list[RowCopy]:
        """The changes since a mark, in the order in which a restore applies them within a key group."""
        removed, put = [], []
        if self.is_map:
            for maps in self.maps:
                cleared = changed_entries(maps.heads, mark)
                removed.append(RowCopy(self, Op.CLEAR, cleared.keys(), cleared.groups))
                entries = changed_entries(maps.entries, mark)
                owners = entries.heads(maps.heads)
                # Removing a key also removes the entries below it.
                of_cleared = owners.are_among(cleared.take(cleared.is_live))
                # An entry that was removed and has come back is at another place in the order.
                left = ~entries.is_live | entries.was_removed
                gone = np.flatnonzero(owners.is_live & left & ~of_cleared)
                map_keys, keys = entries.take(gone).keys(), owners.take(gone).keys()
                removed.append(RowCopy(self, Op.REMOVE, keys, entries.groups[gone], map_keys))
                there = np.flatnonzero(owners.is_live & entries.is_live)
                there = there[np.lexsort((entries.take(there).links()[1], entries.groups[there]))]
                columns, keys = entries.take(there).columns(), owners.take(there).keys()
                put.append(RowCopy(self, Op.PUT, keys, entries.groups[there], columns))
            return removed + put
        for table in self.tables:
            live = changed_entries(table, mark)
            if not live.is_live.all():
                absent, live = live.take(~live.is_live), live.take(live.is_live)
                removed.append(RowCopy(self, Op.REMOVE, absent.keys(), absent.groups))
            parts = [(Op.PUT, live)]
            if self.is_list:
                grown = live.kept > 0
                parts = [(Op.PUT, live.take(~grown)), (Op.APPEND, live.take(grown))]
            for op, rows in parts:
                columns = rows.columns()
                put.append(RowCopy(self, op, columns, rows.groups, columns))
        return removed + put

    # --- columns to Arrow ---

    def batch(
        self,
        op: Op | None,
        keys: dict[str, Array],
        namespaces: pa.Array | None,
        columns: dict[str, Array] | None,
    ) -> pa.RecordBatch:
        """Columns of the core as a batch of the state's schema; without values if only keys are given."""
        arrays = [decoded_keys(self._key_encoder, _canonical(keys))]
        count = len(arrays[0])
        if namespaces is not None:
            arrays.append(namespaces)
        if self.is_map:
            arrays.append(
                _nulls(self.schema.field("map_key"), count)
                if columns is None
                else decoded_keys(self._map_key_encoder, _canonical(columns))
            )
        if op in (Op.REMOVE, Op.CLEAR) or columns is None:
            arrays.append(_nulls(self.schema.field("value"), count))
            if self._has_timestamps:
                arrays.append(_nulls(self.schema.field("timestamp"), count))
        else:
            arrays += self._values(columns)
        if op is not None:
            arrays.append(pa.array(np.full(count, op, dtype=np.uint8)))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema if op is None else self.delta_schema)

    def namespaces(self, keys: dict[str, Array], count: int) -> pa.Array | None:
        """The column of namespaces, if there is one. A namespace's number is valid only while its entries are held."""
        if not self.has_namespaces:
            return None
        numbers = keys.get("namespace", np.zeros(count, dtype=np.uint32))
        distinct, inverse = np.unique(numbers, return_inverse=True)
        names = [b"" if number == 0 else self._namespaces.name(int(number)) for number in distinct]
        return pa.array(names, pa.binary()).take(pa.array(inverse.reshape(-1)))

    def _values(self, columns: dict[str, Array]) -> list[pa.Array]:
        if not self.is_list:
            value = self._arrow(columns)
            return [value, pa.array(columns["timestamp"])] if self._has_timestamps else [value]
        contents = [("value", self._arrow(columns))]
        if self._has_timestamps:
            contents.append(("timestamp", pa.array(columns["timestamp"])))
        return [
            list_column(columns["list_offsets"], each, self.schema.field(name).type, f"state {self.name!r}")
            for name, each in contents
        ]

    def _arrow(self, columns: dict[str, Array]) -> pa.Array:
        value = columns["value"]
        if self.holds_objects:
            return pa.array(value.tolist(), self._value_type.arrow)
        is_null = columns.get("is_null")
        stored = (columns["value_offsets"], value) if "value_offsets" in columns else value
        return arrow_column(stored, None if is_null is None else ~is_null, self._value_type)


def _canonical(columns: dict[str, Array]) -> Any:
    return (columns["key_offsets"], columns["key"]) if "key_offsets" in columns else columns["key"]


def _nulls(field: pa.Field, count: int) -> pa.Array:
    return pa.nulls(count, field.type)


class TableRows:
    """Rows of one table of a state, still in the core. For a map state, each row also knows its key's entry."""

    def __init__(
        self, state: TableReader, rows: EntryRows, owners: EntryRows | None, left_out: ExpiryFilter | None
    ) -> None:
        self.state = state
        self._entries = rows
        self._owners = owners
        self._left_out = left_out

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def groups(self) -> Array:
        return self._entries.groups

    @property
    def has_objects(self) -> bool:
        """True if values are objects, whose size is known only once they are serialised."""
        return self.state.holds_objects

    def weights(self) -> Array:
        """The approximate bytes of each row in columns of varying width, without objects."""
        weights = self._entries.weights()
        # The key is repeated in the row of each of its entries.
        return weights if self._owners is None else weights + self._owners.weights()

    def take(self, rows: Any) -> TableRows:
        """Some of the rows."""
        owners = None if self._owners is None else self._owners.take(rows)
        return TableRows(self.state, self._entries.take(rows), owners, self._left_out)

    def copied(self) -> RowCopy:
        """The columns of all rows."""
        columns = self._entries.columns()
        keys = columns if self._owners is None else self._owners.keys()
        return RowCopy(self.state, None, keys, self.groups, columns, self._left_out)


class RowCopy:
    """Rows whose columns have been copied out of the core."""

    def __init__(
        self,
        state: TableReader,
        op: Op | None,
        keys: dict[str, Array],
        groups: Array,
        columns: dict[str, Array] | None = None,
        left_out: ExpiryFilter | None = None,
    ) -> None:
        self.state = state
        self.groups = groups
        self._op = op
        self._keys = keys
        self._namespaces = state.namespaces(keys, len(groups))
        self._columns = columns
        self._left_out = left_out

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def has_objects(self) -> bool:
        """True if the rows have values that are objects, whose size is known only once they are serialised."""
        return self.state.holds_objects and self._op in (None, Op.PUT, Op.APPEND)

    def weights(self) -> Array:
        """The approximate bytes of each row in columns of varying width, without objects."""
        weights = bytes_of_rows(self._keys, len(self))
        if self._columns is None or self._columns is self._keys:
            return weights
        return weights + bytes_of_rows(self._columns, len(self))

    def take(self, rows: slice) -> RowCopy:
        """Consecutive rows; nothing is copied."""
        taken = copy.copy(self)
        taken.groups = self.groups[rows]
        taken._keys = sliced(self._keys, rows)
        if self._namespaces is not None:
            taken._namespaces = self._namespaces[rows]
        if self._columns is not None:
            taken._columns = sliced(self._columns, rows)
        return taken

    def copied(self) -> RowCopy:
        return self

    def serialised(self, weights: Array, limit: int) -> Iterator[tuple[RowCopy, int]]:
        """The rows in pieces with their objects serialised, and the weight of each; only single rows pass `limit`.

        Serialises at most a piece and a row ahead of the caller.
        """
        assert self._columns is not None
        values = self._columns["value"]
        ends = self._columns["list_offsets"][1:].tolist() if self.state.is_list else range(1, len(self) + 1)
        serialize = self.state.serialize
        start = begin = total = 0
        data: list[bytes | None] = []
        for row, (end, weight) in enumerate(zip(ends, weights.tolist(), strict=True)):
            own = [None if value is None else serialize(value) for value in values[begin:end].tolist()]
            size = weight + sum(len(each) for each in own if each is not None)
            if row > start and total + size > limit:
                yield self._with_data(slice(start, row), data), total
                start, total, data = row, 0, []
            data += own
            total += size
            begin = end
        yield self._with_data(slice(start, len(self)), data), total

    def _with_data(self, rows: slice, data: list[bytes | None]) -> RowCopy:
        taken = self.take(rows)
        column = np.empty(len(data), dtype=object)
        column[:] = data
        taken._columns = {**(taken._columns or {}), "value": column}
        return taken

    def rows(self) -> tuple[pa.RecordBatch, Array]:
        """A batch and the key group of each row, without what has expired. The objects must have been serialised."""
        batch = self.state.batch(self._op, self._keys, self._namespaces, self._columns)
        if self._left_out is None:
            return batch, self.groups
        left, kept = without_expired(batch, self._left_out.before)
        self._left_out.counts[self.state.name] += stamp_count(batch) - stamp_count(left)
        return left, self.groups[kept]
