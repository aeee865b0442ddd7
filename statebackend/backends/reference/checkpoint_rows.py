"""Rows of the reference backend's states, to a checkpoint and from it: one by one, in plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from statebackend.backends.reference.base_state import EntryKey, StampedValue
from statebackend.checkpoint.format import GroupedBatch, Op, Section
from statebackend.checkpoint.keyed import ExpiredAt, Source, state_schema
from statebackend.checkpoint.keyed.chain import ChangePoints, Point
from statebackend.checkpoint.keyed.description import value_role
from statebackend.keys import key_encoder
from statebackend.state import MapStateDescriptor, expired, from_arrow, timer_state, to_arrow
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.reference.reference_backend import ReferenceKeyedBackend


class TimerState(NamedTuple):
    """The timers of a domain, as the map state that checkpoints store them as."""

    descriptor: MapStateDescriptor
    table: Any


def checkpoint_states(backend: ReferenceKeyedBackend) -> list[Any]:
    timers = backend._timers.tables().items()  # type: ignore[union-attr]
    return [*backend._states.values(), *(TimerState(timer_state(domain), table) for domain, table in timers)]


def _entries(stored: Any) -> dict[Any, StampedValue]:
    """The entries that a map state, or the timers, hold for a key."""
    return stored if isinstance(stored, dict) else dict.fromkeys(sorted(stored or ()), _NOTHING)


class StateCopies:
    """All states at one moment. Copying the dicts is enough: values are replaced, never changed."""

    def __init__(self, backend: ReferenceKeyedBackend, number: int) -> None:
        self.number = number
        self._held = {state.descriptor.name: dict(state.table) for state in checkpoint_states(backend)}

    def held(self, state: Any) -> dict[EntryKey, Any]:
        """The values that a state held, by place."""
        return self._held.get(state.descriptor.name, {})

    def put(self, state: Any, at: EntryKey, stored: Any) -> None:
        """Add a value as if it had always been there."""
        held = self._held.setdefault(state.descriptor.name, {})
        if stored is None:
            held.pop(at, None)
        else:
            held[at] = stored

    def changed_places(self, state: Any) -> list[EntryKey]:
        """The places where a state holds something else now. O(entries)."""
        held = self.held(state)
        changed = [at for at, stored in state.table if held.get(at) is not stored]
        now = {at for at, _ in state.table}
        return changed + [at for at in held if at not in now]


class ReferencePoints(ChangePoints):
    """Copies of all that was held. A rollback voids the points that were opened after its mark."""

    def __init__(self, backend: ReferenceKeyedBackend) -> None:
        self._backend = backend
        #: Counts marks and points.
        self._opened = 0
        self.held: list[StateCopies] = []

    def next_number(self) -> int:
        """The number of a mark or point that is being opened."""
        self._opened += 1
        return self._opened

    def open(self) -> StateCopies:
        self.held.append(StateCopies(self._backend, self.next_number()))
        return self.held[-1]

    def drop(self, point: Point) -> None:
        if point in self.held:
            self.held.remove(point)

    def is_valid(self, point: Point) -> bool:
        return point in self.held

    def changes_since(self, point: Point) -> int:
        return sum(len(point.changed_places(state)) for state in checkpoint_states(self._backend))

    def row_counts(self) -> Iterator[int]:
        return (len(state.table) for state in checkpoint_states(self._backend))


_NOTHING = StampedValue(serializer_for(bool).serialize(False), 0)


class Row(NamedTuple):
    """A row of a data file, with its value in serialised form."""

    group: int
    op: Op
    at: EntryKey
    map_key: Any
    #: `StampedValue`, or a tuple of them for a list.
    stored: Any


class ReferenceRows(Source):
    """All rows of this moment; with ``since``, only the changes since that moment."""

    def __init__(
        self,
        backend: ReferenceKeyedBackend,
        *,
        since: StateCopies | None = None,
        expired_at: ExpiredAt = ExpiredAt(),  # noqa: B008 - it never changes
    ) -> None:
        super().__init__("base" if since is None else "delta", backend.key_group_range)
        self._key_type = backend.key_type
        self._ops = since is not None
        self._states: list[tuple[Any, list[Row]]] = []
        for state in checkpoint_states(backend):
            found = self._all_rows(state, expired_at) if since is None else _changed_rows(state, since)
            rows = sorted(found, key=lambda row: (row.group, row.op in (Op.PUT, Op.APPEND)))
            if rows:
                self._states.append((state.descriptor, rows))

    @property
    def is_empty(self) -> bool:
        return not self._states

    def sections(self) -> Sequence[Section]:
        return [self._section(descriptor, rows) for descriptor, rows in self._states]

    def _section(self, descriptor: Any, rows: list[Row]) -> Section:
        spaced = any(row.at.namespace for row in rows)
        schema = state_schema(self._key_type, descriptor, namespaces=spaced, ops=self._ops)
        keys = key_encoder(self._key_type)
        value_type = descriptor.stored_types()[value_role(descriptor.kind)]
        is_list = descriptor.kind == "list"
        columns: dict[str, Any] = {
            "key": to_arrow([keys.decode(row.at.key) for row in rows], self._key_type),
            "namespace": pa.array([row.at.namespace for row in rows], pa.binary()),
            "op": pa.array([int(row.op) for row in rows], pa.uint8()),
        }
        if descriptor.kind == "map":
            inner = key_encoder(descriptor.key_type)
            decoded = [None if row.map_key is None else inner.decode(row.map_key) for row in rows]
            columns["map_key"] = to_arrow(decoded, descriptor.key_type)
        elements: list[StampedValue] = []
        offsets: list[int | None] = []
        for row in rows:
            stored = (row.stored or ()) if is_list else (row.stored or StampedValue(None, 0),)
            offsets.append(None if row.stored is None else len(elements))
            elements.extend(stored)
        deserialize = serializer_for(value_type).deserialize
        values = to_arrow(
            [None if each.data is None else deserialize(each.data) for each in elements], value_type
        )
        stamps = pa.array([each.timestamp for each in elements], pa.int64())
        if is_list:
            ends = pa.array([*offsets, len(elements)], pa.int32())
            columns["value"] = pa.ListArray.from_arrays(ends, values, type=schema.field("value").type)
            columns["timestamp"] = pa.ListArray.from_arrays(ends, stamps)
        else:
            columns["value"], columns["timestamp"] = values, stamps
        batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
        return Section(descriptor.name, schema, [GroupedBatch.of(batch, [row.group for row in rows])])

    def _all_rows(self, state: Any, times: ExpiredAt) -> Iterator[Row]:
        config = state.descriptor.ttl_config
        expired_at = times.of(config)

        def is_left(stamped: StampedValue) -> bool:
            if config is None or expired_at is None:
                return True
            is_expired = expired(stamped.timestamp, config.ttl, expired_at)
            self.expired[state.descriptor.name] += is_expired
            return not is_expired

        for at, stored in list(state.table):
            if state.descriptor.kind == "map":
                for map_key, entry in _entries(stored).items():
                    if is_left(entry):
                        yield Row(at.group, Op.PUT, at, map_key, entry)
            elif state.descriptor.kind == "list":
                left = tuple(filter(is_left, stored))
                if left:
                    yield Row(at.group, Op.PUT, at, None, left)
            elif is_left(stored):
                yield Row(at.group, Op.PUT, at, None, stored)

    def release(self) -> None:
        self._states = []


def _changed_rows(state: Any, since: StateCopies) -> Iterator[Row]:
    held = since.held(state)
    for at in since.changed_places(state):
        stored = state.table.get(at)
        if state.descriptor.kind == "map":
            new = None if stored is None else _entries(stored)
            yield from _changed_entries(at, _entries(held.get(at)), new)
        elif stored is None:
            yield Row(at.group, Op.REMOVE, at, None, None)
        else:
            yield Row(at.group, Op.PUT, at, None, stored)


def _changed_entries(
    at: EntryKey, old: dict[Any, StampedValue], new: dict[Any, StampedValue] | None
) -> Iterator[Row]:
    kept = [key for key in old if new is not None and key in new]
    if new is None or [key for key in new if key in old] != kept or list(new)[: len(kept)] != kept:
        # Also an entry that was removed and came back: its place in the order has changed.
        yield Row(at.group, Op.CLEAR, at, None, None)
        old = {}
    for key in old:
        if new is None or key not in new:
            yield Row(at.group, Op.REMOVE, at, key, None)
    for key, entry in (new or {}).items():
        if old.get(key) is not entry:
            yield Row(at.group, Op.PUT, at, key, entry)


def load(
    backend: ReferenceKeyedBackend, state: Any, op: Op, rows: pa.RecordBatch
) -> Iterator[tuple[EntryKey, Any]]:
    """Yield each place that rows of a checkpoint change, and its new value. Store each before asking for the next."""
    descriptor = state.descriptor
    value_type = descriptor.stored_types()[value_role(descriptor.kind)]
    serialize = serializer_for(value_type).serialize
    keys = backend._encoder
    inner = key_encoder(descriptor.key_type) if descriptor.kind == "map" else None
    puts = op in (Op.PUT, Op.APPEND)
    names = rows["namespace"].to_pylist() if "namespace" in rows.schema.names else [b""] * rows.num_rows
    map_keys = _plain(rows, "map_key", None if inner is None else descriptor.key_type)
    values: list[Any] = [None] * rows.num_rows
    if puts:
        values = _values(rows, value_type, descriptor.kind == "list")
    stamps = rows["timestamp"].to_pylist() if puts and "timestamp" in rows.schema.names else None
    maps: dict[EntryKey, dict[Any, StampedValue]] = {}
    for row, key in enumerate(from_arrow(rows["key"], backend.key_type)):
        canonical = keys.encode(key)
        at = EntryKey(backend._group_of(canonical), names[row], canonical)
        stamp = 0 if stamps is None else stamps[row]
        if descriptor.kind == "list" and puts:
            each = stamps[row] if stamps is not None else [0] * len(values[row])
            made = tuple(map(StampedValue, map(serialize, values[row]), each))
            yield at, ((state.table.get(at) or ()) if op is Op.APPEND else ()) + made
        elif inner is not None and op in (Op.PUT, Op.REMOVE):
            map_key, value = inner.encode(map_keys[row]), values[row]
            if at not in maps:
                maps[at] = dict(state.table.get(at) or {})
            if op is Op.REMOVE:
                maps[at].pop(map_key, None)
            else:
                maps[at][map_key] = StampedValue(None if value is None else serialize(value), stamp)
        elif puts:
            yield at, StampedValue(serialize(values[row]), stamp)
        else:
            yield at, None
    for at, entries in maps.items():
        yield at, entries or None


def _plain(rows: pa.RecordBatch, name: str, declared: Any) -> list[Any]:
    return [] if declared is None else from_arrow(rows[name], declared)


def _values(rows: pa.RecordBatch, value_type: Any, is_list: bool) -> list[Any]:
    if not is_list:
        return from_arrow(rows["value"], value_type)
    flat: Iterable[Any] = iter(from_arrow(rows["value"].flatten(), value_type))
    lengths = rows["value"].value_lengths().to_pylist()
    return [[next(flat) for _ in range(length)] for length in lengths]  # type: ignore[call-overload]
