"""Finds the keyed state of a checkpoint: rows of some key groups, which stay in their files until states are declared.

The rows are read when they are asked for, one batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from statebackend.checkpoint.format import DataFileReader, GroupedBatch, Op, Section, read_data_file
from statebackend.checkpoint.keyed.compaction import applied
from statebackend.checkpoint.keyed.description import (
    StateDescription,
    check_key_type,
    different_states,
    value_role,
)
from statebackend.checkpoint.keyed.row_source import (
    GROUP,
    NATIVE,
    NativeRows,
    OpenNative,
    grouped_batches,
    open_native_rows,
    phases,
    with_key_groups,
)
from statebackend.checkpoint.store.checkpoint_reader import Checkpoint
from statebackend.checkpoint.store.manifest import StateSnapshot, StoredFile
from statebackend.errors import CorruptCheckpointError, StateMigrationError, usage
from statebackend.keys import KeyEncoder, KeyGroupRange, canonical_list
from statebackend.state import StateDescriptor, TimerRow, to_arrow, to_values
from statebackend.types import RowType, Type, from_config
from statebackend.types.serializers import arrow_migration, serializer_for

#: So many files stay open until their states are declared; further ones are opened again.
_MOST_OPEN = 64


class StoredRows:
    """Rows in the order in which to apply them, as often as they are asked for. One thread at a time reads them."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], Iterator[GroupedBatch]]] = []
        self._kept: list[GroupedBatch] | None = None
        #: The first source, if its rows are stored where only this backend removes or changes them.
        self._held: Callable[[], Iterator[GroupedBatch]] | None = None

    def hold(self, source: Callable[[], Iterator[GroupedBatch]]) -> None:
        """Begin with rows that stay where they are: `keep` leaves them there."""
        self._held = source

    def take_changes(self) -> StoredRows:
        """Take out the rows after the rows that are held."""
        changes = StoredRows()
        changes._sources, self._sources = self._sources, []
        return changes

    def add(self, source: Callable[[], Iterator[GroupedBatch]]) -> None:
        """Append rows that a call reads."""
        self._sources.append(source)

    def __iter__(self) -> Iterator[GroupedBatch]:
        if self._held is not None:
            yield from self._held()
        if self._kept is not None:
            yield from self._kept
            return
        for source in self._sources:
            yield from source()

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def keep(self) -> None:
        """Hold the rows in memory from now on: the files may go, and any thread may read. O(rows), once."""
        if self._kept is None:
            self._kept = [rows for source in self._sources for rows in source()]
            self._sources.clear()


class RestoredFile:
    """A data file of a checkpoint whose rows are read later; it is compared with its checksums now."""

    def __init__(self, checkpoint: Checkpoint, file: StoredFile, key_groups: KeyGroupRange) -> None:
        self._checkpoint = checkpoint
        self._file = file
        self._key_groups = key_groups
        reader = self._opened()
        reader.compare(key_groups)
        self.states = reader.states
        self._reader: DataFileReader | None = reader

    def _opened(self) -> DataFileReader:
        return read_data_file(self._checkpoint.open_file(self._file), self._file.name)

    def close(self) -> None:
        """Do not hold it open: it is opened again where its rows are asked for, and must still be there."""
        self._reader = None

    def read(self, name: str) -> Iterator[GroupedBatch]:
        reader = self._opened() if self._reader is None else self._reader
        yield from reader.read(name, self._key_groups)


#: The ``extra["part"]`` of a snapshot of keyed state.
PART = "keyed"


class RestoredState(NamedTuple):
    """A state of a checkpoint: its description, and its rows in the order in which to apply them."""

    description: StateDescription
    rows: StoredRows

    def section(self) -> Section:
        """The remaining rows of an undeclared state, sorted by key group, to be written again."""
        joined = applied(self.description.kind, [with_key_groups(rows) for rows in self.rows])
        order = np.argsort(joined[GROUP].to_numpy(), kind="stable")
        batches = list(grouped_batches(joined.take(pa.array(order))))
        return Section(self.description.name, joined.drop_columns([GROUP]).schema, batches)


class RestoredStates(dict[str, RestoredState]):
    """The states of a checkpoint that are not declared yet, by name, for the key groups of one backend."""

    def __init__(
        self, states: dict[str, RestoredState], now: int | None, watermark: int | None = None
    ) -> None:
        super().__init__(sorted(states.items()))
        self.now = now
        self.watermark = watermark


def keyed_snapshots(checkpoint: Checkpoint) -> list[StateSnapshot]:
    return [each for each in checkpoint.snapshots if each.extra.get("part") == PART]


def read_checkpoint(
    checkpoint: object,
    key_type: Type,
    max_parallelism: int,
    key_groups: KeyGroupRange,
    open_native: OpenNative = open_native_rows,
) -> RestoredStates:
    """The states of some key groups. Checks every byte of their rows, which are read when they are asked for.

    ``open_native`` reads the files of a database.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise usage.restore(
            f"a {type(checkpoint).__name__} is nothing to restore from",
            hint="give restore=store.open(id), or store.open_snapshots(snapshots)",
        )
    states: dict[str, RestoredState] = {}
    opened: list[RestoredFile] = []
    for snapshot in keyed_snapshots(checkpoint):
        check_use(snapshot, checkpoint, key_type, max_parallelism)
        for data in snapshot.states:
            add_state(states, StateDescription.read(data, checkpoint.manifest.name), "checkpoint")
        own = key_groups if snapshot.key_groups is None else key_groups.intersection(snapshot.key_groups)
        if own is not None:
            _read_native(states, open_native(checkpoint, snapshot, key_type, own), checkpoint)
            _read_files(states, opened, checkpoint, snapshot, own)
    return RestoredStates(states, checkpoint.now, checkpoint.watermark)


def check_use(snapshot: StateSnapshot, checkpoint: Checkpoint, key_type: Type, max_parallelism: int) -> None:
    """Raise unless a backend with this key type and number of key groups can restore a snapshot."""
    where = f"checkpoint {checkpoint.id}"
    check_key_type(snapshot.extra.get("key_type"), key_type, "checkpoint", where)
    groups = snapshot.extra.get("max_parallelism")
    if groups != max_parallelism:
        raise StateMigrationError(
            f"the checkpoint has {groups} key groups, and this backend {max_parallelism}",
            code="STATE_MIGRATION.MAX_PARALLELISM",
            detail=where,
            hint="create the backend with that max_parallelism; sb.tools.rescale changes it",
        )


def add_state(states: dict[str, RestoredState], found: StateDescription, whole: str) -> RestoredState:
    """Add a state to the states of a checkpoint or savepoint, unless it is there; every instance describes it alike."""
    known = states.setdefault(found.name, RestoredState(found, StoredRows()))
    if known.description != found:
        raise different_states(whole, found.name)
    return known


def _read_native(
    states: dict[str, RestoredState], found: Mapping[str, NativeRows], checkpoint: Checkpoint
) -> None:
    for name, rows in found.items():
        if name not in states:
            raise CorruptCheckpointError(
                f"the files of the database have a state {name!r} that the manifest does not name",
                detail=checkpoint.manifest.name,
            )
        if rows.is_held:
            states[name].rows.hold(rows.read)
        else:
            states[name].rows.add(rows.read)


def _read_files(
    states: dict[str, RestoredState],
    opened: list[RestoredFile],
    checkpoint: Checkpoint,
    snapshot: StateSnapshot,
    own: KeyGroupRange,
) -> None:
    for file in snapshot.files:
        if file.kind == NATIVE:
            continue
        if file.kind not in ("base", "delta"):
            raise usage.native_files(
                f"the checkpoint was written by another backend: it has files of kind {file.kind!r}",
                detail=file.name,
                hint="restore it into that backend, and change backends by a savepoint",
            )
        if file.key_groups is not None and own.intersection(file.key_groups) is None:
            continue
        restored = RestoredFile(checkpoint, file, own)
        opened.append(restored)
        for each in opened[:-_MOST_OPEN]:
            each.close()
        for name in restored.states:
            if name in checkpoint.dropped_states:
                continue
            if name not in states:
                raise CorruptCheckpointError(
                    f"the file has a state {name!r} that the manifest does not name", detail=file.name
                )
            states[name].rows.add(partial(restored.read, name))


def migration(
    description: StateDescription, descriptor: StateDescriptor, now: int
) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """The function from rows as they were written to rows as the descriptor has them; the two are compatible.

    If the state had no time to live before, values get ``now`` or the configuration's ``legacy_timestamp``.
    """
    role = value_role(descriptor.kind)
    new = descriptor.stored_types()[role]
    config = description.types[role]
    steps: list[Callable[[pa.RecordBatch], pa.RecordBatch]] = []
    is_migrated = description.is_migrated(descriptor)
    if config != new.config() or is_migrated:
        old = from_config(config)
        convert = _by_function(descriptor, old, new) if is_migrated else _filling(descriptor, old, new)
        steps.append(
            lambda rows: rows.set_column(
                rows.schema.get_field_index("value"), "value", convert(rows["value"])
            )
        )
    ttl = descriptor.ttl_config
    if description.ttl and ttl is None:
        steps.append(lambda rows: rows.drop_columns(["timestamp"]))
    if not description.ttl and ttl is not None:
        stamp = now if ttl.legacy_timestamp is None else ttl.legacy_timestamp
        steps.append(lambda rows: _stamped(rows, stamp))
    return lambda rows: reduce(lambda migrated, step: step(migrated), steps, rows)


def _by_function(descriptor: StateDescriptor, old: Type, new: Type) -> Callable[[pa.Array], pa.Array]:
    """The descriptor's own function over a column of values or lists."""
    assert descriptor.migrate is not None
    migrate, stored = descriptor.migrate, serializer_for(new)

    def convert(values: pa.Array) -> pa.Array:
        made = (None if value is None else migrate(value) for value in to_values(values, old))
        # Checks the type.
        return to_arrow([None if v is None else stored.deserialize(stored.serialize(v)) for v in made], new)

    return _of_elements(convert, new) if descriptor.kind == "list" else convert


def _filling(descriptor: StateDescriptor, old: Type, new: Type) -> Callable[[pa.Array], pa.Array]:
    """The conversion of compatible types, with the descriptor's values in new fields."""
    given = descriptor.new_fields
    widen = arrow_migration(old, new)

    def convert(values: pa.Array) -> pa.Array:
        found = widen(values)
        if not given or not isinstance(new, RowType) or not isinstance(old, RowType):
            return found
        children = [
            to_arrow([given[name]], of).take(pa.array(np.zeros(len(found), np.int64)))
            if name in given and name not in old.names
            else found.field(at)
            for at, (name, of) in enumerate(zip(new.names, new.types, strict=True))
        ]
        return pa.StructArray.from_arrays(children, fields=list(new.arrow), mask=found.is_null())

    return _of_elements(convert, new) if descriptor.kind == "list" else convert


def _of_elements(convert: Callable[[pa.Array], pa.Array], new: Type) -> Callable[[pa.Array], pa.Array]:
    return lambda lists: _with_elements(lists, pa.list_(new.arrow), convert(lists.values))


def _with_elements(lists: pa.Array, made: pa.DataType, elements: pa.Array) -> pa.Array:
    """Lists of the same lengths, with other elements."""
    return pa.Array.from_buffers(
        made, len(lists), lists.buffers()[:2], offset=lists.offset, children=[elements]
    )


def _stamped(rows: pa.RecordBatch, stamp: int) -> pa.RecordBatch:
    value = rows["value"]
    if not pa.types.is_list(value.type):
        return rows.append_column("timestamp", pa.array(np.full(rows.num_rows, stamp, np.int64)))
    elements = pa.array(np.full(len(value.values), stamp, np.int64))
    stamps = _with_elements(value, pa.list_(pa.int64()), elements)
    return rows.append_column("timestamp", stamps)


def timer_rows(restored: RestoredState, domain: str, encoder: KeyEncoder) -> Iterator[TimerRow]:
    """The timers that remain after applying the rows of a checkpoint."""
    left: dict[tuple[object, bytes], set[int]] = {}
    for rows in restored.rows:
        for op, batch in phases(rows):
            keys = canonical_list(encoder.encode_many(batch["key"]))
            names = batch["namespace"].to_pylist() if "namespace" in batch.schema.names else [b""] * len(keys)
            times = batch["map_key"].to_pylist()
            for place, time in zip(zip(keys, names, strict=True), times, strict=True):
                if op is Op.CLEAR:
                    left.pop(place, None)
                elif op is Op.REMOVE:
                    left.get(place, set()).discard(time)
                else:
                    left.setdefault(place, set()).add(time)
    for (key, namespace), found in left.items():
        for time in found:
            yield TimerRow(domain, 0, key, namespace, time)
