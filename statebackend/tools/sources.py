"""The sources of state rows that are stored: checkpoints and savepoints, read in batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.checkpoint import Checkpoint, CheckpointReader, StateSnapshot
from statebackend.checkpoint.format import DataFileReader, GroupedBatch, key_group_slices, read_data_file
from statebackend.checkpoint.keyed.compaction import applied
from statebackend.checkpoint.keyed.description import StateDescription, different_states
from statebackend.checkpoint.keyed.row_source import NATIVE, has_native, open_native_rows
from statebackend.checkpoint.keyed.savepoint_rows import keyed_parts, with_encoded_namespaces
from statebackend.checkpoint.keyed.state_source import Selection, StateSource, is_among
from statebackend.checkpoint.store.savepoint_folder import Savepoint, SavepointPart, SavepointState
from statebackend.errors import usage
from statebackend.keys import MAX_PARALLELISM, KeyGroupRange
from statebackend.operator_state.operator_snapshots import PART as OPERATOR, operator_parts
from statebackend.tools.read import SnapshotFiles, open_saved, pinned, reading
from statebackend.tools.tables import check_readable, unreadable
from statebackend.types import Type, from_config

#: A store, a savepoint, or the path of either; a checkpoint; a query, a view of it, or a Harness.
Stored: TypeAlias = str | os.PathLike[str] | CheckpointReader | Checkpoint | Savepoint | Any

#: Rows of changes that are applied at a time, and bytes of the files that hold them; more if one key group has more.
_PIECE_ROWS = 1 << 17
_PIECE_BYTES = 8 << 20
_BATCH_ROWS = 65_536

_ReadBase: TypeAlias = Callable[[NDArray[np.int64]], Iterable[GroupedBatch]]
#: Reads a state of a file, of some key groups and columns, as `DataFileReader.read` does.
ReadBase: TypeAlias = Callable[
    [DataFileReader, str, NDArray[np.int64], frozenset[str] | None], Iterable[GroupedBatch]
]


def source_of(store: Stored, checkpoint_id: int | None = None) -> StateSource:
    """The source of a store's newest checkpoint, or the one with an id; of a savepoint, a query or a Harness."""
    given = getattr(type(store), "_state_source", None)
    saved = store if given is None else given(store)
    if isinstance(saved, (StateSource, Checkpoint)):
        if checkpoint_id is not None:
            raise usage.checkpoint_id(
                f"cannot choose a checkpoint of a {type(store).__name__}",
                hint="leave id out, or give a store",
            )
        return saved if isinstance(saved, StateSource) else CheckpointSource(saved)
    if not isinstance(saved, (str, os.PathLike, CheckpointReader, Savepoint)):
        raise usage.not_a_store(
            f"cannot read state from a {type(store).__name__}",
            hint="give a store, a savepoint, the path of either, a running query or a Harness",
        )
    opened = open_saved(saved, checkpoint_id)
    return CheckpointSource(opened) if isinstance(opened, Checkpoint) else SavepointSource(opened)


class CheckpointSource(StateSource):
    """A checkpoint of a store. Its files are pinned while they are read."""

    def __init__(self, checkpoint: Checkpoint, read_base: ReadBase = DataFileReader.read) -> None:
        self.checkpoint = checkpoint
        self._read_base = read_base
        self.where = f"checkpoint {checkpoint.id}, {checkpoint.manifest.name}"
        self.now, self.watermark = checkpoint.now, checkpoint.watermark
        metadata = checkpoint.metadata
        extra = next((each.extra for each in self._keyed if each.extra.get("key_type")), {})
        config = extra.get("key_type") or metadata.key_type
        self.key_type: Type | None = None if config is None else from_config(config)
        self.max_parallelism: int | None = extra.get("max_parallelism") or metadata.max_parallelism

    @property
    def _keyed(self) -> list[StateSnapshot]:
        return [each for each in self.checkpoint.snapshots if each.extra.get("part") != OPERATOR]

    def _operators(self) -> list[StateSnapshot]:
        return [each for each in self.checkpoint.snapshots if each.extra.get("part") == OPERATOR]

    @cached_property
    def _states(self) -> dict[str, StateDescription]:
        where = self.checkpoint.manifest.name
        read = [StateDescription.read(each, where) for snapshot in self._keyed for each in snapshot.states]
        return _by_name(read, "checkpoint")

    def states(self) -> Mapping[str, StateDescription]:
        return self._states

    @contextmanager
    def _opened(self, snapshot: StateSnapshot) -> Iterator[SnapshotFiles]:
        with SnapshotFiles(self.checkpoint, snapshot, skips=frozenset({NATIVE})) as files:
            yield files

    def _with(self, name: str, key_groups: NDArray[np.int64] | None) -> Iterator[StateSnapshot]:
        for snapshot in self._keyed:
            has_state = any(each["name"] == name for each in snapshot.states)
            if has_state and (key_groups is None or len(_within(key_groups, snapshot.key_groups))):
                yield snapshot

    def read(self, name: str, selection: Selection) -> Iterator[pa.RecordBatch]:
        state = self._states[name]
        check_readable(state, self.where)
        with pinned(self.checkpoint) as keep, reading(self.checkpoint):
            for snapshot in self._with(name, selection.key_groups):
                with self._opened(snapshot) as files:
                    for batch in self._remaining(state, snapshot, files.of(name), selection):
                        keep()
                        yield batch

    def _remaining(
        self,
        state: StateDescription,
        snapshot: StateSnapshot,
        readers: list[DataFileReader],
        selection: Selection,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a snapshot. Rows of the base with keys that have not changed are passed on as they are read."""
        name, where = state.name, self.checkpoint.manifest.name
        columns = (
            None if selection.columns is None else selection.columns | {"key", "namespace", "map_key", "op"}
        )
        base: _ReadBase | None = None
        if has_native(snapshot):
            base = self._native_base(name, snapshot, columns)
        elif readers and "op" not in readers[0].schema(name).names:
            first, readers = readers[0], readers[1:]
            kept = columns if readers or columns is None else (selection.columns or frozenset()) | {"key"}
            base = lambda groups: self._read_base(first, name, groups, kept)  # noqa: E731
        groups = _within(np.arange(MAX_PARALLELISM), snapshot.key_groups)
        if selection.key_groups is not None:
            groups = np.intersect1d(groups, selection.key_groups)
        if not readers:
            for rows in base(groups) if base is not None else ():
                yield selection.of(rows.batch)
            return
        for piece in [groups] if has_native(snapshot) else _pieces(readers, name, groups):
            changes = [rows for reader in readers for rows in reader.read(name, piece, columns)]
            try:
                yield from _applied(state.kind, () if base is None else base(piece), changes, selection)
            except (pa.ArrowException, KeyError) as error:
                raise unreadable(name, where) from error

    def _native_base(self, name: str, snapshot: StateSnapshot, columns: frozenset[str] | None) -> _ReadBase:
        """The rows in the files of RocksDB, of all key groups."""
        if self.key_type is None:
            raise usage.no_key_type("the checkpoint does not say what type its keys have", detail=self.where)
        own = snapshot.key_groups or KeyGroupRange(0, (self.max_parallelism or MAX_PARALLELISM) - 1)
        found = open_native_rows(self.checkpoint, snapshot, self.key_type, own).get(name)

        def read(key_groups: NDArray[np.int64]) -> Iterator[GroupedBatch]:
            for rows in () if found is None else found.read():
                names = [each for each in rows.batch.schema.names if columns is None or each in columns]
                yield rows._replace(batch=rows.batch.select(names))

        return read

    def rows(self, name: str) -> int | None:
        total = 0
        with reading(self.checkpoint):
            for snapshot in self._with(name, None):
                with self._opened(snapshot) as files:
                    readers = files.of(name)
                    if has_native(snapshot) or len(readers) > 1:
                        return None
                    for reader in readers:
                        if "op" in reader.schema(name).names:
                            return None
                        groups, counts = reader.rows_of(name)
                        total += int(counts[np.isin(groups, _within(groups, snapshot.key_groups))].sum())
        return total

    def most_rows(self, name: str) -> int:
        """The number of rows of a state in the files, changes included."""
        total = 0
        for snapshot in self._with(name, None):
            with reading(self.checkpoint), self._opened(snapshot) as files:
                total += files.rows(name)
        return total

    def changed_keys(self, name: str, other: CheckpointSource) -> list[pa.Array] | None:
        """Keys outside of which the state is the same in another checkpoint of the store; None if they are unknown.

        Both checkpoints build on the same bases. Then these are the keys in the changes that only one of them has.
        """
        mine, others = self._data_files(), other._data_files()
        if mine["base"] != others["base"]:
            return None
        found = []
        for source, names in (
            (self, mine["delta"] - others["delta"]),
            (other, others["delta"] - mine["delta"]),
        ):
            with pinned(source.checkpoint), reading(source.checkpoint):
                for file in (source.checkpoint.files[each] for each in sorted(names)):
                    with source.checkpoint.open_file(file) as opened:
                        reader = read_data_file(opened, file.name)
                        if name in reader.states:
                            found += [rows.batch["key"] for rows in reader.read(name, None, {"key"})]
        return found

    def _data_files(self) -> dict[str, set[str]]:
        files = [file for snapshot in self._keyed for file in snapshot.files]
        if native := next((file for file in files if file.kind == NATIVE), None):
            raise usage.native_files(
                "cannot compare checkpoints with files of RocksDB",
                detail=f"{native.name}, {self.where}",
                hint="compare savepoints: sb.create_backend(...) restores the checkpoint, and writes one",
            )
        return {kind: {file.name for file in files if file.kind == kind} for kind in ("base", "delta")}

    def bytes(self, name: str) -> int | None:
        """About the bytes that a state takes in the data files, changes included; None for files of RocksDB."""
        total = 0.0
        for snapshot in [*self._with(name, None), *self._operators()]:
            if has_native(snapshot):
                return None
            with reading(self.checkpoint), self._opened(snapshot) as files:
                total += sum(float(reader.bytes_of(name).sum()) for reader in files.of(name))
        return round(total)

    def namespaces(self, name: str) -> pa.Array | None:
        distinct = pa.array([], pa.binary())
        with pinned(self.checkpoint), reading(self.checkpoint):
            for snapshot in self._with(name, None):
                if has_native(snapshot):
                    return super().namespaces(name)
                with self._opened(snapshot) as files:
                    for reader in files.of(name):
                        if "namespace" in reader.schema(name).names:
                            for rows in reader.read(name, snapshot.key_groups, {"namespace"}):
                                distinct = pc.unique(pa.concat_arrays([distinct, rows.batch["namespace"]]))
        return distinct if len(distinct) else None

    def operator_states(self) -> Mapping[str, dict[str, Any]]:
        return {state["name"]: state for snapshot in self._operators() for state in snapshot.states}

    def read_operator(self, name: str) -> Iterator[pa.RecordBatch]:
        with pinned(self.checkpoint), reading(self.checkpoint):
            for snapshot in self._operators():
                if any(state["name"] == name for state in snapshot.states):
                    with self._opened(snapshot) as files:
                        for table in files.read(name):
                            yield from _of_instance(table.to_batches(), snapshot.subtask_index)


def _within(groups: NDArray[np.int64], own: KeyGroupRange | None) -> NDArray[np.int64]:
    return groups if own is None else groups[(groups >= own.start) & (groups <= own.end)]


def _pieces(
    readers: Sequence[DataFileReader], name: str, groups: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """The key groups in pieces, each with so many rows of changes that they fit into memory."""
    slices = key_group_slices(readers, name, _PIECE_ROWS, most_bytes=_PIECE_BYTES)
    ends = np.array([each.end for each in slices][:-1], np.int64)
    piece_of = np.searchsorted(ends, groups, "left")
    yield from np.split(groups, np.flatnonzero(np.diff(piece_of)) + 1)


def _applied(
    kind: str, base: Iterable[GroupedBatch], changes: list[GroupedBatch], selection: Selection
) -> Iterator[pa.RecordBatch]:
    """Apply changes to a base; only rows of the base whose keys have changed are kept in memory."""
    if not changes:
        yield from (selection.of(rows.batch) for rows in base)
        return
    groups = np.concatenate([rows.key_group_of_rows() for rows in changes])
    order = np.argsort(groups, kind="stable")
    groups = groups[order]
    changed = pa.concat_arrays([rows.batch["key"] for rows in changes]).take(pa.array(order))
    left = []
    for rows in base:
        batch = selection.of(rows.batch)
        first, last = np.searchsorted(groups, (rows.key_groups[0], rows.key_groups[-1] + 1))
        is_changed = is_among(batch["key"], changed[first:last])
        left.append(batch.filter(is_changed))
        yield batch.filter(pc.invert(is_changed)) if left[-1].num_rows else batch
    tables = [pa.Table.from_batches([each]) for each in left]
    tables += [pa.Table.from_batches([selection.of(rows.batch)]) for rows in changes]
    yield from applied(kind, tables).to_batches(max_chunksize=_BATCH_ROWS)


def _of_instance(batches: Iterable[pa.RecordBatch], subtask: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        numbers = pa.array(np.full(batch.num_rows, subtask, np.int32))
        yield pa.RecordBatch.from_arrays([numbers, *batch.columns], ["subtask", *batch.schema.names])


def _by_name(read: Iterable[StateDescription], whole: str) -> dict[str, StateDescription]:
    states: dict[str, StateDescription] = {}
    for state in read:
        if states.setdefault(state.name, state) != state:
            raise different_states(whole, state.name)
    return states


class SavepointSource(StateSource):
    """A savepoint. Each of its files is compared with its checksum before it is read."""

    def __init__(self, savepoint: Savepoint) -> None:
        savepoint.check_exists()
        self.where = f"savepoint {savepoint.uri}"
        self.now, self.watermark = savepoint.now, savepoint.watermark
        self._savepoint = savepoint
        self._keyed = keyed_parts(savepoint)
        described = self._keyed[0][0].described if self._keyed else {}
        config = described.get("key_type")
        self.key_type: Type | None = None if config is None else from_config(config)
        self.max_parallelism: int | None = described.get("max_parallelism")

    @cached_property
    def _operators(self) -> list[SavepointPart]:
        return operator_parts(self._savepoint)

    @cached_property
    def _states(self) -> dict[str, StateDescription]:
        read = [
            StateDescription.read(each.described, part.name)
            for part, _ in self._keyed
            for each in part.states
        ]
        return _by_name(read, "savepoint")

    def states(self) -> Mapping[str, StateDescription]:
        return self._states

    def _files(self, name: str, key_groups: NDArray[np.int64] | None = None) -> Iterator[SavepointState]:
        for part, own in self._keyed:
            if key_groups is None or len(_within(key_groups, own)):
                yield from (each for each in part.states if each.described["name"] == name and each.rows)

    def read(self, name: str, selection: Selection) -> Iterator[pa.RecordBatch]:
        wanted = None if selection.columns is None else selection.columns | {"key"}
        for state in self._files(name, selection.key_groups):
            with self._savepoint.open_state(state) as file:
                columns = [
                    each
                    for each in file.schema_arrow.names
                    if wanted is None or each.removesuffix("_bytes") in wanted
                ]
                for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                    yield selection.of(with_encoded_namespaces(batch))

    def rows(self, name: str) -> int:
        return sum(state.rows for state in self._files(name))

    def bytes(self, name: str) -> int:
        """The bytes of the files of a state."""
        parts = [*(part for part, _ in self._keyed), *self._operators]
        return sum(
            each.size
            for part in parts
            for each in part.states
            if each.described["name"] == name and each.rows
        )

    def operator_states(self) -> Mapping[str, dict[str, Any]]:
        return {each.described["name"]: each.described for part in self._operators for each in part.states}

    def read_operator(self, name: str) -> Iterator[pa.RecordBatch]:
        for part in self._operators:
            for state in part.states:
                if state.described["name"] == name and state.rows:
                    with self._savepoint.open_state(state) as file:
                        yield from _of_instance(file.iter_batches(), part.described["subtask"])
