"""Operator state in files: the view of one moment, its part of a checkpoint or savepoint, and its readers.

A restore first settles the share of the instance, then reads only that. `redistribute` deals the state of the old
instances out to the new ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from statebackend.checkpoint import Checkpoint, DataWriter, Snapshot, StateSnapshot
from statebackend.checkpoint.format import (
    DataFileReader,
    GroupedBatch,
    Section,
    read_data_file,
    write_data_file,
)
from statebackend.checkpoint.store.savepoint_folder import (
    Savepoint,
    SavepointPart,
    SavepointState,
    reading_part,
)
from statebackend.checkpoint.store.sealed import JsonObject, integer
from statebackend.errors import CorruptCheckpointError, SerializationError, StateMigrationError, usage
from statebackend.operator_state.element_columns import column_type, to_bytes, to_column

#: The states of one instance, by name, as plain data. Each is a dict with ``mode``, ``config`` (of the types) and
#: either ``elements``, a list of serialised elements, or ``entries``, a list of pairs of serialised key and value (None
#: for None).
OperatorContents: TypeAlias = "dict[str, dict[str, Any]]"

SPLIT, UNION, BROADCAST = "split", "union", "broadcast"


def redistribute(snapshots: Sequence[Mapping[str, Any]], new_parallelism: int) -> list[OperatorContents]:
    """The contents of ``new_parallelism`` instances, from the old ones, in order. O(elements).

    *Split* states stay as they are if the number of instances does. Otherwise the elements of all old instances are
    concatenated and cut into even runs. The runs that are longer by one go to consecutive instances; for each state, in
    sorted order of names, these begin after the last instance that got one. *Union*: every instance gets all elements.
    *Broadcast*: a new instance gets the copy of the old instance with its number; if there are fewer, they take turns.
    """
    if type(new_parallelism) is not int or new_parallelism < 1:
        raise usage.key_groups("the new parallelism is a positive int")
    new: list[OperatorContents] = [{} for _ in range(new_parallelism)]
    same = len(snapshots) == new_parallelism
    start = 0
    for name in sorted({name for snapshot in snapshots for name in snapshot}):
        mode = _mode_of(name, snapshots)
        reported = [snapshot[name] for snapshot in snapshots if name in snapshot]
        if mode == BROADCAST:
            unchanged = same and len(reported) == len(snapshots)
            for i, contents in enumerate(new):
                contents[name] = dict(snapshots[i][name] if unchanged else reported[i % len(reported)])
            continue
        if mode == SPLIT and same:
            for contents, snapshot in zip(new, snapshots, strict=True):
                if name in snapshot:
                    contents[name] = dict(snapshot[name])
            continue
        elements = [element for state in reported for element in state["elements"]]
        if mode == UNION:
            shares = [elements] * new_parallelism
        else:
            shares, start = _even_runs(elements, new_parallelism, start)
        for contents, share in zip(new, shares, strict=True):
            contents[name] = {**reported[0], "elements": list(share)}
    return new


def _even_runs(elements: list[Any], n: int, start: int) -> tuple[list[list[Any]], int]:
    """The run of each instance, and the instance at which the next state begins."""
    base, longer = divmod(len(elements), n)
    shares: list[list[Any]] = [[] for _ in range(n)]
    at = 0
    for turn in range(n):
        size = base + (turn < longer)
        shares[(start + turn) % n] = elements[at : at + size]
        at += size
    return shares, (start + longer) % n


def _mode_of(name: str, snapshots: Sequence[Mapping[str, Any]]) -> str:
    modes = {snapshot[name]["mode"] for snapshot in snapshots if name in snapshot}
    configs = [snapshot[name]["config"] for snapshot in snapshots if name in snapshot]
    if len(modes) > 1 or any(config != configs[0] for config in configs):
        raise StateMigrationError(
            f"the instances disagree about the operator state {name!r}",
            code="STATE_MIGRATION.OPERATOR_STATE",
            detail=f"modes {', '.join(sorted(modes))}",
            hint="they must come from one checkpoint",
        )
    mode: str = modes.pop()
    return mode


#: The ``extra["part"]`` of a snapshot of operator state.
PART = "operator"

#: Converts at most this many rows and bytes at a time.
_PIECE_ROWS = 65_536
_PIECE_BYTES = 32 << 20


class StateView(NamedTuple):
    """A state at one moment."""

    mode: str
    types: dict[str, Any]
    #: The object that holds the state. It never changes: a change makes another one.
    kept: Any
    #: Converts that object to stored elements, or to pairs of stored key and value.
    read: Callable[[Any], Sequence[Any]] = lambda kept: kept

    def rows(self) -> Sequence[Any]:
        """Stored elements, or pairs of stored key and value. O(n)."""
        return self.read(self.kept)

    @property
    def is_empty(self) -> bool:
        return not self.kept

    def described(self, name: str) -> dict[str, Any]:
        return {"name": name, "kind": self.mode, "types": self.types}


def type_roles(mode: str) -> dict[str, str]:
    """The columns of a state of this mode, and the role of each column's type."""
    return {"map_key": "key", "value": "value"} if mode == BROADCAST else {"value": "element"}


class OperatorSnapshot(Snapshot):
    """A snapshot of operator state. Its contents are complete once its file is written."""

    def __init__(self, writer: DataWriter, views: Mapping[str, StateView], contents: StateSnapshot) -> None:
        super().__init__(writer)
        self.contents = contents
        self._views = views

    def can_stand_for(
        self, writer: DataWriter, views: Mapping[str, StateView], states: tuple[dict[str, Any], ...]
    ) -> bool:
        """Return True if its file holds the rows of these views, and will be kept for the snapshot of ``writer``."""
        return (
            {file.name for file in self.contents.files} <= writer.builds_on
            and self.contents.states == states
            and all(view.kept is self._views[name].kept for name, view in views.items())
        )

    def write(self) -> StateSnapshot:
        """Write the file, unless there is nothing to write."""
        if self.contents.files or all(view.is_empty for view in self._views.values()):
            return self.contents
        try:
            sections = [section(name, self._views[name]) for name in sorted(self._views)]
            with self.writer.create("operator", subtask=self.contents.subtask_index) as file:
                write_data_file(
                    file, sections, extra={"part": PART}, name=file.name, compression=self.writer.compression
                )
                self.contents = dataclasses.replace(self.contents, files=(file.finish(),))
        except BaseException as error:
            if self.writer.is_aborted:
                raise usage.snapshot(
                    "the snapshot has been aborted", detail=f"checkpoint {self.contents.checkpoint_id}"
                ) from error
            self.writer.abort()
            raise
        return self.contents


def section(name: str, view: StateView) -> Section:
    """The rows of a state as a data file holds them: without keys, all in key group 0."""
    roles = type_roles(view.mode)
    schema = pa.schema([(column, column_type(view.types[role]).arrow) for column, role in roles.items()])
    return Section(name, schema, _batches(view, roles, schema))


def _batches(view: StateView, roles: dict[str, str], schema: pa.Schema) -> Iterator[GroupedBatch]:
    rows = view.rows()
    columns = list(zip(*rows, strict=True)) if view.mode == BROADCAST else [rows]
    for start, end in _pieces(columns):
        arrays = [
            to_column(data[start:end], view.types[role])
            for data, role in zip(columns, roles.values(), strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        yield GroupedBatch(batch, np.array([0]), np.array([batch.num_rows]))


def _pieces(columns: Sequence[Sequence[bytes | None]]) -> Iterator[tuple[int, int]]:
    """Where pieces of the rows begin and end; a piece ends with the row that makes it large."""
    count = len(columns[0]) if columns else 0
    sizes = np.zeros(count, dtype=np.int64)
    for data in columns:
        sizes += np.fromiter((0 if each is None else len(each) for each in data), np.int64, count=count)
    ends = np.cumsum(sizes)
    start = 0
    while start < count:
        before = ends[start] - sizes[start]
        end = min(start + _PIECE_ROWS, int(np.searchsorted(ends, before + _PIECE_BYTES)) + 1, count)
        yield start, end
        start = end


def write_savepoint(
    savepoint: Savepoint,
    views: Mapping[str, StateView],
    subtask_index: int,
    parallelism: int,
    now: int | None = None,
) -> None:
    with savepoint.write_part(*operator_part(subtask_index, parallelism, now)) as part:
        for name in sorted(views):
            view = views[name]
            rows = () if view.is_empty else section(name, view).batches
            part.write_state(view.described(name), (each.batch for each in rows))


def operator_part(subtask_index: int, parallelism: int, now: int | None) -> tuple[str, str, JsonObject]:
    """The part of an instance as `Savepoint.write_part` takes it."""
    described: JsonObject = {"subtask": subtask_index, "parallelism": parallelism, "now": now}
    return PART, f"{subtask_index}-of-{parallelism}", described


def savepoint_contents(savepoint: Savepoint, subtask_index: int, parallelism: int) -> OperatorContents:
    """The share of an instance in the operator state of a savepoint. O(rows)."""
    savepoint.check_exists()
    contents = [
        {state.described["name"]: _read_state(savepoint, part, state) for state in part.states}
        for part in operator_parts(savepoint)
    ]
    return redistribute(contents, parallelism)[subtask_index] if contents else {}


def operator_parts(savepoint: Savepoint) -> list[SavepointPart]:
    """The part that each instance has written, in order of the instances; every instance is there once."""
    parts = savepoint.parts(PART)
    in_order = sorted(parts, key=_number_of)
    _check_every_instance(
        [(_number_of(part), part.described.get("parallelism")) for part in in_order],
        "savepoint",
        savepoint.uri,
        "let every instance write its part, at the same moment",
    )
    return in_order


def _check_every_instance(found: list[tuple[int, object]], whole: str, where: str, hint: str) -> None:
    """Check that every instance is there once; each is given by its number and the number of instances."""
    if found != [(number, len(found)) for number in range(len(found))]:
        raise CorruptCheckpointError(
            f"the {whole} does not hold the operator state of every instance once",
            code="CORRUPT_CHECKPOINT.INCOMPLETE",
            detail=where,
            hint=hint,
        )


def _number_of(part: SavepointPart) -> int:
    with reading_part(part.name):
        return integer(part.described.get("subtask"), "the number of the instance")


def _config(mode: str, types: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the descriptor that such a state has."""
    return {"kind": "map" if mode == BROADCAST else "list", "types": types, "ttl": False}


def _read_state(savepoint: Savepoint, part: SavepointPart, state: SavepointState) -> dict[str, Any]:
    mode, types = state.described.get("kind"), state.described.get("types")
    roles = type_roles(str(mode))
    if (
        mode not in (SPLIT, UNION, BROADCAST)
        or not isinstance(types, dict)
        or set(types) != set(roles.values())
    ):
        raise CorruptCheckpointError("operator state is not described as it should be", detail=part.name)
    config = _config(mode, types)
    columns: list[list[bytes | None]] = [[] for _ in roles]
    if state.rows:
        with savepoint.open_state(state) as file:
            try:
                wanted = pa.schema([(name, column_type(types[role]).arrow) for name, role in roles.items()])
                for batch in file.iter_batches():
                    for column, found, role in zip(
                        columns, batch.cast(wanted).columns, roles.values(), strict=True
                    ):
                        column += to_bytes(found, types[role])
            except (SerializationError, OverflowError, ValueError) as error:
                raise CorruptCheckpointError(
                    "what a file holds cannot be read as the declared type", detail=state.file
                ) from error
    if None in columns[0]:
        raise CorruptCheckpointError("a file has a null where there can be none", detail=state.file)
    if mode == BROADCAST:
        return {"mode": mode, "config": config, "entries": list(zip(*columns, strict=True))}
    return {"mode": mode, "config": config, "elements": columns[0]}


def restored_contents(checkpoint: Checkpoint, subtask_index: int, parallelism: int) -> OperatorContents:
    """The share of instance ``subtask_index`` of ``parallelism`` in the operator state of a checkpoint.

    Skips snapshots of keyed state. O(rows that the instance gets), and the index of every file.
    """
    snapshots = operator_snapshots(checkpoint)
    if not snapshots:
        return {}
    with ExitStack() as opened:
        saved = [_InstanceSnapshot(checkpoint, snapshot, opened) for snapshot in snapshots]
        share = redistribute(_numbered(saved), parallelism)[subtask_index]
        return {name: _filled(name, state, saved) for name, state in share.items()}


def operator_snapshots(checkpoint: Checkpoint) -> list[StateSnapshot]:
    """The snapshots of operator state: one of each instance, in order."""
    found = [each for each in checkpoint.snapshots if each.extra.get("part") == PART]
    found.sort(key=lambda each: each.subtask_index)
    _check_every_instance(
        [(each.subtask_index, each.parallelism) for each in found],
        "checkpoint",
        checkpoint.manifest.name,
        "commit the snapshots of all instances together",
    )
    return found


class _InstanceSnapshot:
    """The snapshot of one instance, with its file open."""

    def __init__(self, checkpoint: Checkpoint, snapshot: StateSnapshot, opened: ExitStack) -> None:
        self._reader: DataFileReader | None = None
        self.where = checkpoint.manifest.name
        if len(snapshot.files) > 1:
            raise self._corrupt("operator state of an instance is in more than one file")
        for file in snapshot.files:
            self.where = file.name
            self._reader = read_data_file(opened.enter_context(checkpoint.open_file(file)), file.name)
        self.types: dict[str, dict[str, Any]] = {}
        self.modes: dict[str, str] = {}
        for state in snapshot.states:
            self._add(state)

    def _add(self, state: dict[str, Any]) -> None:
        name, mode, types = state["name"], state["kind"], state.get("types")
        if mode not in (SPLIT, UNION, BROADCAST):
            raise self._corrupt("operator state is of an unknown kind", name)
        roles = type_roles(mode)
        if not isinstance(types, dict) or set(types) != set(roles.values()) or name in self.types:
            raise self._corrupt("operator state is not described as it should be", name)
        if self._reader is not None:
            with self.reading(name):
                wanted = pa.schema([(each, column_type(types[role]).arrow) for each, role in roles.items()])
            if name not in self._reader.states or self._reader.schema(name) != wanted:
                raise self._corrupt("the file does not hold a state as its snapshot describes it", name)
        self.types[name], self.modes[name] = types, mode

    def count(self, name: str) -> int:
        return 0 if self._reader is None else int(self._reader.rows_of(name)[1].sum())

    def read(self, name: str, start: int, stop: int) -> Iterator[list[list[bytes | None]]]:
        """Rows from ``start`` to ``stop`` of a state, batch by batch: each column as stored values."""
        if self._reader is None or start >= stop:
            return
        types = [self.types[name][role] for role in type_roles(self.modes[name]).values()]
        at = 0
        for rows in self._reader.read(name):
            first, last = max(start - at, 0), min(stop - at, rows.batch.num_rows)
            if first < last:
                batch = rows.batch.slice(first, last - first)
                if batch.column(0).null_count:  # elements, or map keys
                    raise self._corrupt("what a file holds has a null where there can be none", name)
                with self.reading(name):
                    columns = [to_bytes(*pair) for pair in zip(batch.columns, types, strict=True)]
                yield columns
            at += rows.batch.num_rows

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Report data that matches its checksums but cannot be read: this library did not write it."""
        try:
            yield
        except (SerializationError, OverflowError, pa.ArrowException) as error:
            raise self._corrupt("what a file holds cannot be read as the declared type", name) from error

    def _corrupt(self, message: str, name: str | None = None) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            message, detail=self.where if name is None else f"operator state {name!r}, {self.where}"
        )


def _numbered(saved: list[_InstanceSnapshot]) -> list[OperatorContents]:
    """The contents of the old instances, with numbers in place of the elements, which are not read yet.

    Elements of a state are numbered across all instances; the entries of a broadcast state are the number of the
    instance.
    """
    numbered: list[OperatorContents] = [{} for _ in saved]
    before: dict[str, int] = {}
    for number, (each, contents) in enumerate(zip(saved, numbered, strict=True)):
        for name, mode in each.modes.items():
            contents[name] = {"mode": mode, "config": _config(mode, each.types[name])}
            if mode == BROADCAST:
                contents[name]["entries"] = number
            else:
                first = before.get(name, 0)
                before[name] = first + each.count(name)
                contents[name]["elements"] = range(first, before[name])
    return numbered


def _filled(name: str, state: dict[str, Any], saved: list[_InstanceSnapshot]) -> dict[str, Any]:
    if state["mode"] == BROADCAST:
        source = saved[state["entries"]]
        entries: list[Any] = []
        for keys, values in source.read(name, 0, source.count(name)):
            entries += zip(keys, values, strict=True)
        return {**state, "entries": entries}
    numbers = state["elements"]  # consecutive, without a gap
    elements: list[Any] = []
    at = 0
    for source in saved:
        if name not in source.modes or not len(numbers):
            continue
        count = source.count(name)
        for (column,) in source.read(name, max(numbers[0] - at, 0), min(numbers[-1] + 1 - at, count)):
            elements += column
        at += count
    return {**state, "elements": elements}
