"""Turns a value state that holds maps into a map state, in a savepoint of a store or of another savepoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.checkpoint import CheckpointReader
from statebackend.checkpoint.keyed.description import StateDescription, different_states
from statebackend.checkpoint.keyed.savepoint_rows import keyed_parts
from statebackend.checkpoint.keyed.state_restore import PART as KEYED
from statebackend.checkpoint.store.savepoint_folder import (
    PartWriter,
    Savepoint,
    SavepointPart,
    SavepointState,
)
from statebackend.errors import SerializationError, StateMigrationError, UsageError
from statebackend.operator_state.element_columns import column_type, to_column
from statebackend.operator_state.operator_snapshots import PART as OPERATOR, operator_parts
from statebackend.runtime.start_checks import no_state
from statebackend.state import MapStateDescriptor
from statebackend.tools.export import write_savepoint
from statebackend.tools.progress_line import Progress
from statebackend.tools.read import open_saved, pinned_checkpoint
from statebackend.tools.tables import map_entries, unreadable
from statebackend.types import PICKLE, from_config
from statebackend.types.serializers import describe, serializer_for

#: Entries that are read and written at a time, about; one map is read at least.
_PIECE_ENTRIES = 65_536
#: Bytes in the file that are read at a time. Names that recur take few bytes there.
_BATCH_BYTES = 16 << 20


def split_maps(
    store: str | os.PathLike[str] | CheckpointReader | Savepoint,
    name: str,
    *,
    target: str | os.PathLike[str] | Savepoint,
    descriptor: MapStateDescriptor | None = None,
) -> Savepoint:
    """Make a savepoint in a new folder in which the value state ``name``, which holds maps, is a map state.

    ``store`` is a store, whose newest checkpoint is read, or a savepoint. ``descriptor`` describes the map state under
    the old name or a new one. Default: the old name, and the types of the maps. Maps of PICKLE need it. The tool
    unpickles them, which executes their content, so trust the savepoint. Every entry has the namespace of its map, and
    its time stamp, if there is a time to live. A key whose map is empty has nothing in the copy. O(bytes); memory for a
    savepoint: some 16 MB of maps, or one map; for a store as `savepoint`. If anything fails, no copy is left.

    >>> import tempfile
    >>> from statebackend.backends import create_backend
    >>> from statebackend.state import ValueStateDescriptor
    >>> folder = tempfile.TemporaryDirectory()
    >>> keyed = create_backend("reference").create_keyed_backend(int)
    >>> keyed.get_value_state(ValueStateDescriptor("seen", dict[str, int])).update_many([7], [{"a": 1, "b": None}])
    >>> _ = keyed.savepoint(folder.name + "/old")
    >>> made = split_maps(folder.name + "/old", "seen", target=folder.name + "/new")
    >>> again = create_backend("reference").create_keyed_backend(int, restore=made)
    >>> again.set_current_key(7)
    >>> list(again.get_map_state(MapStateDescriptor("seen", str, int)).items())
    [('a', 1), ('b', None)]
    >>> folder.cleanup()
    """
    if descriptor is not None and not isinstance(descriptor, MapStateDescriptor):
        raise UsageError(
            "cannot describe a map state with another descriptor",
            code="USAGE.DESCRIPTOR",
            detail=f"a {type(descriptor).__name__}",
            hint='pass descriptor=sb.MapStateDescriptor("seen", str, int)',
        )
    copied = target if isinstance(target, Savepoint) else Savepoint(target)
    saved = open_saved(store, None)
    if isinstance(saved, Savepoint):
        _split_in_savepoint(saved, copied, name, descriptor)
        return copied
    assert not isinstance(store, Savepoint)
    with pinned_checkpoint(store, saved.id) as (checkpoint, keep):
        known = [
            (each.extra.get("part") != OPERATOR, state)
            for each in checkpoint.snapshots
            for state in each.states
        ]
        change = _change_of(known, name, descriptor, f"checkpoint {checkpoint.id}")
        write_savepoint(checkpoint, copied, keep, change.applied)
    return copied


def _split_in_savepoint(
    savepoint: Savepoint, copied: Savepoint, name: str, descriptor: MapStateDescriptor | None
) -> None:
    savepoint.check_exists()
    parts = [*(part for part, _ in keyed_parts(savepoint)), *operator_parts(savepoint)]
    known = [(_as_written(part)[0] == KEYED, state.described) for part in parts for state in part.states]
    change = _change_of(known, name, descriptor, f"savepoint {savepoint.uri}")
    total = sum(state.size for part in parts for state in part.states)
    with (
        Progress(f"making {name!r} a map state", total) as progress,
        copied.write_whole([_as_written(part) for part in parts]) as writers,
    ):
        for part, writer in zip(parts, writers, strict=True):
            for state in part.states:
                if state.described["name"] == name:
                    _write_changed(savepoint, state, change, writer, progress)
                else:
                    writer.copy_state(savepoint, state, progress.advance)


class _Entries(NamedTuple):
    """Entries of a column of maps: for each its row in the column, its key, its value."""

    rows: NDArray[Any]
    keys: pa.Array
    values: pa.Array


_EntriesOf: TypeAlias = Callable[[pa.Array], Iterator[_Entries]]


class _Change(NamedTuple):
    """What the state becomes, and how a column of its maps is taken apart."""

    name: str
    becomes: StateDescription
    #: The types of the columns ``map_key`` and ``value``.
    key_type: pa.DataType
    value_type: pa.DataType
    entries: _EntriesOf

    def applied(
        self, state: StateDescription, batches: Iterable[pa.RecordBatch]
    ) -> tuple[StateDescription, Iterable[pa.RecordBatch]]:
        """The description and the rows of any state after the change."""
        if state.name != self.name:
            return state, batches
        return self.becomes, (piece for batch in batches for piece in _pieces(batch, self, self.name))


def _as_written(part: SavepointPart) -> tuple[str, str, Mapping[str, object]]:
    """A part as `Savepoint.write_whole` takes it."""
    kind, _, own = os.path.basename(part.name).removesuffix(".json").partition("-")
    described = {
        each: value for each, value in part.described.items() if each not in ("format", "states", "parts")
    }
    return kind, own, described


def _change_of(
    known: list[tuple[bool, dict[str, Any]]], name: str, descriptor: MapStateDescriptor | None, where: str
) -> _Change:
    """The change of a state among those that are known: whether each is keyed, and its description."""
    named = [(is_keyed, described) for is_keyed, described in known if described["name"] == name]
    if not named:
        raise no_state(name, [described["name"] for _, described in known], where)
    is_keyed, described = named[0]
    if any(each != described for _, each in named):
        raise different_states(where.partition(" ")[0], name).at(where)
    kind, types = described["kind"], described["types"]
    config = types.get("value")
    if not is_keyed or kind != "value" or config["type"] not in ("map", "pickle"):
        raise UsageError(
            f"state {name!r} is no value state that holds maps",
            code="USAGE.STATE_KIND",
            detail=f"it is {kind.upper()} of {', '.join(map(describe, types.values()))}; {where}",
            hint="name a value state of MAP, or of PICKLE with dicts in it",
        )
    if descriptor is None:
        if config["type"] == "pickle":
            raise UsageError(
                f"missing the types of the map state {name!r}, whose maps are pickled",
                code="USAGE.DESCRIPTOR",
                detail=where,
                hint='pass descriptor=sb.MapStateDescriptor("seen", str, int)',
            )
        descriptor = MapStateDescriptor(name, from_config(config["key"]), from_config(config["value"]))
    if descriptor.name != name and any(each["name"] == descriptor.name for _, each in known):
        raise UsageError(
            f"there is a state {descriptor.name!r} already",
            code="USAGE.DESCRIPTOR",
            detail=where,
            hint=f"give the map state another name; {name!r} itself is free",
        )
    if config["type"] == "map":
        types = {"key": config["key"], "value": config["value"]}
        entries: _EntriesOf = _of_maps
    else:
        types = descriptor.config()["types"]
        entries = partial(_of_pickles, _Pickles(name, descriptor))
    old = StateDescription.read(described, where)
    becomes = StateDescription(descriptor.name, "map", types, old.ttl, old.lifetime)
    becomes.check(descriptor)  # what a restart would refuse is refused now
    key_type, value_type = (column_type(types[role]).arrow for role in ("key", "value"))
    return _Change(name, becomes, key_type, value_type, entries)


# --- the rows ---


def _write_changed(
    savepoint: Savepoint, state: SavepointState, change: _Change, writer: PartWriter, progress: Progress
) -> None:
    if not state.rows:
        writer.write_state(change.becomes.to_json(), ())
        return
    with savepoint.open_state(state) as file:
        writer.write_state(change.becomes.to_json(), _changed(file, state, change, progress))


def _changed(
    file: Any, state: SavepointState, change: _Change, progress: Progress
) -> Iterator[pa.RecordBatch]:
    metadata = file.metadata
    for group in range(metadata.num_row_groups):
        about = metadata.row_group(group)
        entries = max(about.column(column).num_values for column in range(about.num_columns))
        bytes_of_row = about.total_byte_size / about.num_rows
        entries_of_row = entries / about.num_rows
        rows = min(_BATCH_BYTES / bytes_of_row, _PIECE_ENTRIES / entries_of_row)
        for batch in file.iter_batches(max(int(rows), 1), row_groups=[group]):
            yield from _pieces(batch, change, state.file)
            progress.advance(state.size * batch.num_rows // state.rows)


def _pieces(batch: pa.RecordBatch, change: _Change, where: str) -> Iterator[pa.RecordBatch]:
    """The rows of a map state that a batch of maps becomes, some at a time."""
    try:
        for rows, keys, values in change.entries(batch["value"]):
            for start in range(0, len(rows), _PIECE_ENTRIES):
                piece = slice(start, start + _PIECE_ENTRIES)
                at = pa.array(rows[piece])
                columns = {}
                for name in batch.schema.names:
                    if name == "value":
                        columns["map_key"] = keys[piece].cast(change.key_type)
                        columns["value"] = values[piece].cast(change.value_type)
                    else:
                        columns[name] = batch[name].take(at)
                yield pa.record_batch(columns)
    except (pa.ArrowException, AttributeError) as error:
        raise unreadable(change.name, where) from error


def _of_maps(column: pa.Array) -> Iterator[_Entries]:
    rows = np.arange(len(column))
    if column.null_count:
        there = column.is_valid()
        rows, column = rows[there.to_numpy(zero_copy_only=False)], column.filter(there)
    owners, keys, values = map_entries(column)
    yield _Entries(rows[owners], keys, values)


class _Pickles:
    """Reads pickled dicts, and writes their entries as the types of a descriptor."""

    def __init__(self, name: str, descriptor: MapStateDescriptor) -> None:
        self._name = name
        self._descriptor = descriptor
        self._read = serializer_for(PICKLE).deserialize
        self._key = serializer_for(descriptor.key_type)
        self._value = serializer_for(descriptor.value_type)

    def entries(self, pickled: bytes) -> Iterator[tuple[bytes, bytes | None]]:
        """The entries of a dict, in its order, as stored bytes."""
        found = self._read(pickled)
        if not isinstance(found, Mapping):
            raise self._refused(f"holds a value of type {type(found).__name__} beside maps")
        stored: dict[bytes, bytes | None] = {}
        try:
            for key, value in found.items():
                stored[self._key.serialize(key)] = None if value is None else self._value.serialize(value)
        except SerializationError as error:
            raise self._refused(f"has an entry of another type: {error.message}") from error
        if len(stored) < len(found):
            raise self._refused(f"has two keys in a map that are one {self._descriptor.key_type.name}")
        yield from stored.items()

    def columns(self, keys: list[bytes], values: list[bytes | None]) -> tuple[pa.Array, pa.Array]:
        types = self._descriptor.config()["types"]
        return to_column(keys, types["key"]), to_column(values, types["value"])

    def _refused(self, why: str) -> StateMigrationError:
        return StateMigrationError(
            f"state {self._name!r} {why}",
            code="STATE_MIGRATION.INCOMPATIBLE",
            detail=f"it is to become {self._descriptor.describe()}",
            hint="give the descriptor types that take every entry; PICKLE takes any value, but no key",
        )


def _of_pickles(pickles: _Pickles, column: pa.Array) -> Iterator[_Entries]:
    rows: list[int] = []
    keys: list[bytes] = []
    values: list[bytes | None] = []
    for row, pickled in enumerate(column):
        if not pickled.is_valid:
            continue
        for key, value in pickles.entries(pickled.as_py()):
            rows.append(row)
            keys.append(key)
            values.append(value)
            if len(rows) == _PIECE_ENTRIES:
                yield _Entries(np.array(rows), *pickles.columns(keys, values))
                rows, keys, values = [], [], []
    if rows:
        yield _Entries(np.array(rows), *pickles.columns(keys, values))
