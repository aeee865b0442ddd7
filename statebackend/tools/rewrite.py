"""Copies a checkpoint into its own store and may change it on the way: other key groups, or one state less.

The copy has the id, the time, the output and the progress of the original, so a query can continue from it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.checkpoint import (
    Checkpoint,
    CheckpointReader,
    CheckpointStore,
    DataWriter,
    StateSnapshot,
    StoredFile,
)
from statebackend.checkpoint.format import (
    DataFileReader,
    GroupedBatch,
    Op,
    Section,
    read_data_file,
    write_data_file,
)
from statebackend.checkpoint.keyed.description import StateDescription, different_states
from statebackend.checkpoint.keyed.row_source import RANK
from statebackend.checkpoint.keyed.savepoint_rows import grouping
from statebackend.errors import usage
from statebackend.keys import MAX_PARALLELISM, KeyGroupRange
from statebackend.operator_state.operator_snapshots import PART as OPERATOR
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.runtime.start_checks import check_droppable, check_name, names_of
from statebackend.state import RESERVED
from statebackend.tools.history import writing
from statebackend.tools.progress_line import Progress
from statebackend.tools.read import open_checkpoint
from statebackend.tools.results import Dropped
from statebackend.tools.tables import OWN_FORMAT
from statebackend.types import from_config

_CHUNK = 4 << 20
_PIECE_ROWS = 65_536

Source = str | os.PathLike[str] | CheckpointReader
Target = str | os.PathLike[str] | CheckpointStore


def drop_state(
    store: Source, name: str, *, target: Target | None = None, id: int | None = None, dry_run: bool = False
) -> Dropped:
    """Drop the state ``name`` from the newest checkpoint of a store.

    One record in the store's log does it, in O(1). The rows go with the next checkpoint, which writes the other states
    in full; native checkpoints of RocksDB name the files of the other states again. The query must not run meanwhile.
    Older checkpoints keep the state: a query that goes back to one of them has it again. In a store without
    checkpoints, the state is dropped from the savepoint or store with which the query begins. If that lacks the
    state, the query does not start; ``rewind`` to None undoes the drop.

    `UsageError` if the state does not exist, if a keyed and an operator state share the name, or for timers.

    With ``target``, nothing in the store changes. A checkpoint, by default the newest, is copied into a new store
    without the state. Rewrites only files that hold the state. O(bytes of the checkpoint). The copy of an encrypted
    store is encrypted by the same cipher, unless ``target`` is a `CheckpointStore`, which has its own options. If the
    call fails, no copy is left. If its process is killed, opening the copy raises `CorruptCheckpointError`.

    With ``dry_run``, the call checks the same, returns the same result, and only reads.
    """
    check_name(name)
    if target is not None:
        checkpoint = open_checkpoint(store, id)
        check_droppable(name, checkpoint)
        if not dry_run:
            _copy_without(checkpoint, name, target)
        return _dropped(name, checkpoint)
    if id is not None:
        raise usage.checkpoint_id(
            "id= needs target=", hint="without target=, the state is dropped from the newest checkpoint"
        )
    if isinstance(store, CheckpointReader) and not isinstance(store, CheckpointStore):
        raise usage.not_a_store(
            "cannot drop a state from a store that is open for reading only",
            detail=store.uri,
            hint="give its path, or an sb.CheckpointStore",
        )
    with writing(store, dry_run=dry_run) as opened:
        newest = opened.latest()
        newest_checkpoint = None if newest is None else opened.open(newest)
        if newest_checkpoint is not None:
            check_droppable(name, newest_checkpoint)
        if not dry_run:
            opened.drop_state(name)
    return _dropped(name, newest_checkpoint)


def _dropped(name: str, checkpoint: Checkpoint | None) -> Dropped:
    if checkpoint is None:
        return Dropped(name, None, [])
    left = {each for each in names_of(checkpoint) if each != name and not each.startswith(RESERVED)}
    return Dropped(name, checkpoint.id, sorted(left))


def _copy_without(checkpoint: Checkpoint, name: str, target: Target) -> None:
    left_out = checkpoint.dropped_states | {name}
    # The manifest names states that were dropped before: their rows are in the files.
    for snapshot in checkpoint.manifest.snapshots:
        if any(state["name"] in left_out for state in snapshot.states):
            for file in snapshot.files:
                _check_kind(file)
    left = checkpoint.without(frozenset({name}))
    with copying(
        checkpoint, target, f"dropping {name!r}", checkpoint.metadata.max_parallelism, left_out
    ) as copy:
        copy.commit([copy.moved(each) for each in left.snapshots])


def rescale(store: Source, target: Target, *, max_parallelism: int, id: int | None = None) -> Checkpoint:
    """Copy a checkpoint, by default the newest, into a new store with another number of key groups.

    Every row of keyed state moves to the new key group of its key. O(rows); memory: the largest part of a state that
    one file holds. The copy of an encrypted store is encrypted by the same cipher, unless ``target`` is a
    `CheckpointStore`, which has its own options. If the call fails, no copy is left. If its process is killed, opening
    the copy raises `CorruptCheckpointError`.
    """
    if type(max_parallelism) is not int or not 1 <= max_parallelism <= MAX_PARALLELISM:
        raise usage.key_groups(f"max_parallelism is an int from 1 to {MAX_PARALLELISM}")
    checkpoint = open_checkpoint(store, id)
    keyed = [each for each in checkpoint.snapshots if each.extra.get("part") != OPERATOR]
    operators = [each for each in checkpoint.snapshots if each.extra.get("part") == OPERATOR]
    states = _states_of(keyed, checkpoint.manifest.name)
    with copying(checkpoint, target, "rescaling", max_parallelism, checkpoint.dropped_states) as copy:
        snapshots = [copy.moved(each) for each in operators]
        if keyed:
            regroup = _regrouping(checkpoint, keyed[0], max_parallelism)
            files = [
                made
                for snapshot in keyed
                for file in snapshot.files
                if (made := copy.regrouped(file, snapshot.key_groups, regroup, max_parallelism)) is not None
            ]
            whole = dataclasses.replace(
                keyed[0],
                subtask_index=0,
                parallelism=1,
                key_groups=KeyGroupRange(0, max_parallelism - 1),
                files=tuple(files),
                states=states,
                now=checkpoint.now,
                extra={**keyed[0].extra, "max_parallelism": max_parallelism},
            )
            snapshots.append(whole)
        copy.commit(snapshots)
    return copy.opened()


def _states_of(snapshots: list[StateSnapshot], where: str) -> tuple[dict[str, Any], ...]:
    states: dict[str, dict[str, Any]] = {}
    for snapshot in snapshots:
        for state in snapshot.states:
            known = states.setdefault(state["name"], state)
            if StateDescription.read(known, where) != StateDescription.read(state, where):
                raise different_states("checkpoint", state["name"])
    return tuple(states[name] for name in sorted(states))


Regroup = Callable[[pa.Array], NDArray[Any]]


def _regrouping(checkpoint: Checkpoint, snapshot: StateSnapshot, max_parallelism: int) -> Regroup:
    """The function from keys to their key groups."""
    config = snapshot.extra.get("key_type") or checkpoint.metadata.key_type
    if config is None:
        raise usage.no_key_type(
            "the checkpoint does not say what type its keys have",
            detail=f"checkpoint {checkpoint.id}",
            hint="open its store with open_for_writing(key_type=...)",
        )
    return grouping(from_config(config), max_parallelism)


@contextmanager
def copying(
    source: Checkpoint,
    target: Target,
    doing: str,
    max_parallelism: int | None,
    left_out: frozenset[str],
    keep: Callable[[], None] | None = None,
) -> Iterator[Copy]:
    """Make a new store for a copy of a checkpoint: whole at the end of the block, or not at all."""
    if isinstance(target, CheckpointStore):
        store = target.unopened()
    else:
        store = CheckpointStore(target, single_writer=True, encryption=source.encryption)
    metadata = source.metadata
    key_type = None if metadata.key_type is None else from_config(metadata.key_type)
    total = sum(file.size for file in source.files.values())
    made = store.made_whole(query=metadata.query, key_type=key_type, max_parallelism=max_parallelism)
    with made, Progress(doing, total, meanwhile=keep) as progress:
        yield Copy(source, store, progress, left_out)


class Copy:
    """Copies the files of a checkpoint into another store, without the states that are left out."""

    def __init__(
        self, source: Checkpoint, store: CheckpointStore, progress: Progress, left_out: frozenset[str]
    ) -> None:
        self._source = source
        self._store = store
        self._progress = progress
        self._writer: DataWriter = store.begin_snapshot(source.id)
        self._left_out = left_out
        self._copied: dict[str, StoredFile | None] = {}

    def commit(self, snapshots: list[StateSnapshot], stream: Iterable[StoredFile] | None = None) -> None:
        """Publish the copy, with the files that belong to no snapshot as they are, or with others of the stream."""
        source, manifest = self._source, self._source.manifest
        epoch = self._store.epoch
        self._store.commit(
            self._source.id,
            [dataclasses.replace(each, epoch=epoch) for each in snapshots],
            outputs={name: self.files(files) for name, files in self._source.outputs.items()},
            files=self.files(manifest.files) if stream is None else stream,
            now=source.now,
            watermark=source.watermark,
            batch=BatchRecord.of(manifest).to_json(),
            progress=manifest.progress,
        )

    def added(self, path: Path, label: str) -> StoredFile:
        """Copy a local file of the stream. `StoreError` if it is gone."""
        made = self._writer.add(path, "stream", label=label)
        self._progress.advance(made.size)
        return made

    def verify(self, stream: Iterable[StoredFile]) -> None:
        """Read all copied files back, and compare them with their checksums."""
        for file in (*self._copied.values(), *stream):
            if file is not None:
                self._writer.verify(file)

    def opened(self) -> Checkpoint:
        return self._store.open(self._source.id)

    def moved(self, snapshot: StateSnapshot) -> StateSnapshot:
        return dataclasses.replace(snapshot, files=self.files(snapshot.files))

    def files(self, files: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
        """Copy files, each once even if it is named often; compares checksums first. Nothing may be left of a file."""
        for file in files:
            if file.name not in self._copied:
                self._copied[file.name] = self._copy(file)
        copied = [self._copied[file.name] for file in files]
        return tuple(file for file in copied if file is not None)

    def _copy(self, file: StoredFile) -> StoredFile | None:
        if file.kind in OWN_FORMAT:
            # A data file holds its own name, so its copy has to be rewritten.
            with self._source.open_file(file) as opened:
                reader = read_data_file(opened, file.name)
                reader.verify()
                sections = [
                    Section(each, reader.schema(each), reader.read(each)) for each in self._states(reader)
                ]
                return self._written(file, reader, sections, file.key_groups)
        self._source.verify([file])
        suffix = os.path.splitext(file.name)[1]
        created = self._writer.create(file.kind, key_groups=file.key_groups, label=file.label, suffix=suffix)
        with created as sink, self._source.open_file(file) as opened:
            while chunk := opened.read(_CHUNK):
                sink.write(chunk)
                self._progress.advance(len(chunk))
            return sink.finish()

    def _states(self, reader: DataFileReader) -> list[str]:
        return [each for each in reader.states if each not in self._left_out]

    def regrouped(
        self, file: StoredFile, own: KeyGroupRange | None, regroup: Regroup, max_parallelism: int
    ) -> StoredFile | None:
        """The rows of a data file that belong to an instance's own key groups, regrouped by the new key groups."""
        _check_kind(file)
        with self._source.open_file(file) as opened:
            reader = read_data_file(opened, file.name)
            sections = [
                Section(each, reader.schema(each), _sorted_rows(reader, each, own, regroup))
                for each in self._states(reader)
            ]
            return self._written(file, reader, sections, KeyGroupRange(0, max_parallelism - 1))

    def _written(
        self,
        file: StoredFile,
        reader: DataFileReader,
        sections: list[Section],
        key_groups: KeyGroupRange | None,
    ) -> StoredFile | None:
        if not sections:
            return None
        with self._writer.create(file.kind, key_groups=key_groups, label=file.label) as sink:
            write_data_file(sink, sections, extra=reader.extra, name=sink.name)
            self._progress.advance(file.size)
            return sink.finish()


def _check_kind(file: StoredFile) -> None:
    """Raise unless the states in a file can be changed."""
    if file.kind not in OWN_FORMAT:
        raise usage.native_files(
            f"files of kind {file.kind!r} cannot be changed",
            detail=file.name,
            hint="restore the checkpoint into the backend that wrote it, and take a savepoint",
        )


def _sorted_rows(
    reader: DataFileReader, name: str, own: KeyGroupRange | None, regroup: Regroup
) -> Iterator[GroupedBatch]:
    found = list(reader.read(name, own))
    if not found:
        return
    table = pa.Table.from_batches([rows.batch for rows in found]).combine_chunks()
    groups = np.concatenate([regroup(rows.batch["key"]) for rows in found]).astype(np.int64)
    order = _order(table, groups, np.concatenate([rows.key_group_of_rows() for rows in found]))
    for start in range(0, len(order), _PIECE_ROWS):
        piece = order[start : start + _PIECE_ROWS]
        (batch,) = table.take(pa.array(piece)).combine_chunks().to_batches()
        yield GroupedBatch.of(batch, groups[piece])


def _order(table: pa.Table, groups: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
    """An order by key group that keeps the rows of one key in their order.

    If the rows of each old key group were ordered by operation, so are the new ones.
    """
    if "op" not in table.schema.names:
        return np.argsort(groups, kind="stable")
    rank = RANK[pc.fill_null(table["op"], pa.scalar(Op.PUT, pa.uint8())).to_numpy()]
    if np.any((np.diff(rank) < 0) & (np.diff(before) == 0)):
        return np.argsort(groups, kind="stable")
    return np.lexsort((rank, groups))
