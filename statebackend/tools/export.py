"""Makes a savepoint of a checkpoint, without a backend and without disturbing the writer of the store."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from statebackend.checkpoint import Checkpoint, CheckpointReader, StateSnapshot
from statebackend.checkpoint.keyed.description import StateDescription, different_states
from statebackend.checkpoint.keyed.savepoint_rows import ShownNamespaces, are_whole, keyed_part
from statebackend.checkpoint.keyed.state_restore import keyed_snapshots
from statebackend.checkpoint.store.savepoint_folder import PartWriter, Savepoint
from statebackend.errors import CorruptCheckpointError, SerializationError, UsageError, usage
from statebackend.keys import KeyGroupRange
from statebackend.operator_state.operator_snapshots import operator_part, operator_snapshots
from statebackend.tools.progress_line import Progress
from statebackend.tools.read import SnapshotFiles, pinned_checkpoint, reading
from statebackend.tools.tables import unreadable

#: Rows, of base and changes together, that are applied at a time.
_SLICE_ROWS = 1 << 20
_BATCH_ROWS = 65_536


def savepoint(
    store: str | os.PathLike[str] | CheckpointReader,
    target: str | os.PathLike[str] | Savepoint,
    *,
    id: int | None = None,
) -> Savepoint:
    """Make a savepoint of a checkpoint, by default the newest, in a new folder.

    O(rows); it reads namespaced states twice. Memory: the rows of about a million entries, or of one key group if that
    has more, and the distinct namespaces of a state. The savepoint has the time of the checkpoint, all keyed state,
    also undeclared states and expired values, timers, and operator state. No value is decoded: nothing is
    executed. It disturbs no writer, so the query may run: it pins the checkpoint meanwhile, with a small file in the
    store. If it may only read there, and the writer drops the checkpoint before it is read, it raises `UsageError`,
    and no savepoint is left.

    >>> import tempfile
    >>> from statebackend.backends import create_backend
    >>> from statebackend.checkpoint import CheckpointStore
    >>> from statebackend.state import ValueStateDescriptor
    >>> folder = tempfile.TemporaryDirectory()
    >>> keyed = create_backend("reference").create_keyed_backend(int)
    >>> keyed.get_value_state(ValueStateDescriptor("name", str)).update_many([7], ["Ann"])
    >>> with CheckpointStore(folder.name + "/state").open_for_writing(key_type=int, max_parallelism=128) as store:
    ...     _ = store.commit(0, [keyed.snapshot(0, store).result()])
    >>> made = savepoint(folder.name + "/state", folder.name + "/savepoint")
    >>> again = create_backend("reference").create_keyed_backend(int, max_parallelism=64, restore=made)
    >>> again.get_value_state(ValueStateDescriptor("name", str)).get_many([7]).to_pylist()
    ['Ann']
    >>> folder.cleanup()
    """
    made = target if isinstance(target, Savepoint) else Savepoint(target)
    with pinned_checkpoint(store, id) as (checkpoint, keep):
        write_savepoint(checkpoint, made, keep, lambda state, batches: (state, batches))
    return made


_Batches = Iterable[pa.RecordBatch]
#: Changes the description and the rows of a state on their way.
Change = Callable[[StateDescription, _Batches], tuple[StateDescription, _Batches]]


def write_savepoint(
    checkpoint: Checkpoint, target: Savepoint, keep: Callable[[], None], change: Change
) -> None:
    """Write a checkpoint's states as ``change`` gives them; calls ``keep`` now and then."""
    keyed, operators = _keyed_of(checkpoint), operator_snapshots(checkpoint)
    if not keyed and not operators:
        raise UsageError(
            "the checkpoint holds no state",
            code="USAGE.NO_STATE",
            detail=f"checkpoint {checkpoint.id}, {checkpoint!r}",
        )
    times = {"now": checkpoint.now, "watermark": checkpoint.watermark}
    parts = [each.part(times) for each in keyed]
    parts += [operator_part(each.subtask_index, each.parallelism, checkpoint.now) for each in operators]
    total = sum(file.size for each in (*(one.snapshot for one in keyed), *operators) for file in each.files)
    with (
        Progress("writing a savepoint", total, meanwhile=keep) as progress,
        target.write_whole(parts) as writers,
    ):
        for each, writer in zip(keyed, writers, strict=False):
            _write_keyed(checkpoint, each, writer, progress, change)
        for snapshot, writer in zip(operators, writers[len(keyed) :], strict=True):
            _write_operator(checkpoint, snapshot, writer, progress)


class _Keyed:
    """The keyed state of one instance."""

    def __init__(self, checkpoint: Checkpoint, snapshot: StateSnapshot) -> None:
        extra, metadata = snapshot.extra, checkpoint.metadata
        self.snapshot = snapshot
        key_type = extra.get("key_type") or metadata.key_type
        max_parallelism = extra.get("max_parallelism") or metadata.max_parallelism
        if key_type is None or max_parallelism is None:
            raise usage.no_key_type(
                "the checkpoint does not say what type its keys have, or how many key groups there are",
                detail=f"checkpoint {checkpoint.id}",
                hint="open its store with open_for_writing(key_type=..., max_parallelism=...)",
            )
        self.key_type: dict[str, Any] = key_type
        self.max_parallelism: int = max_parallelism
        self.key_groups = snapshot.key_groups or KeyGroupRange(0, max_parallelism - 1)
        self.states = [StateDescription.read(each, checkpoint.manifest.name) for each in snapshot.states]

    def part(self, times: dict[str, int | None]) -> tuple[str, str, dict[str, object]]:
        return keyed_part(self.key_type, self.max_parallelism, self.key_groups, times)


def _keyed_of(checkpoint: Checkpoint) -> list[_Keyed]:
    """The instances of a checkpoint that can be restored."""
    found = [_Keyed(checkpoint, each) for each in keyed_snapshots(checkpoint)]
    if found and not are_whole([each.max_parallelism for each in found], [each.key_groups for each in found]):
        raise CorruptCheckpointError(
            "the checkpoint does not hold the keyed state of every key group once",
            code="CORRUPT_CHECKPOINT.INCOMPLETE",
            detail=checkpoint.manifest.name,
            hint="commit the snapshots of all instances together",
        )
    states: dict[str, StateDescription] = {}
    for state in itertools.chain.from_iterable(each.states for each in found):
        if states.setdefault(state.name, state) != state:
            raise different_states("checkpoint", state.name)
    return found


@contextmanager
def _opened(checkpoint: Checkpoint, snapshot: StateSnapshot, names: set[str]) -> Iterator[SnapshotFiles]:
    with reading(checkpoint):
        opened = SnapshotFiles(checkpoint, snapshot)
    with opened as files:
        unknown = set(files.states) - names - checkpoint.dropped_states
        if unknown:
            raise CorruptCheckpointError(
                f"the files have a state {min(unknown)!r} that the manifest does not name",
                detail=checkpoint.manifest.name,
            )
        yield files


# --- keyed state ---


def _write_keyed(
    checkpoint: Checkpoint, keyed: _Keyed, writer: PartWriter, progress: Progress, change: Change
) -> None:
    with _opened(checkpoint, keyed.snapshot, {state.name for state in keyed.states}) as files:
        for state in keyed.states:
            batches = (
                batch
                for table in _shown(checkpoint, files, state)
                for batch in table.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS)
            )
            described, changed = change(state, batches)
            writer.write_state(described.to_json(), changed)
            progress.advance(_share(files, state.name, keyed.snapshot))


def _shown(checkpoint: Checkpoint, files: SnapshotFiles, state: StateDescription) -> Iterator[pa.Table]:
    """The rows of a state as savepoints have them, slice by slice; the columns of all slices are the same."""
    namespaces: ShownNamespaces | None = None
    for table in _remaining(checkpoint, files, state):
        if "namespace" in table.schema.names:
            if namespaces is None:
                namespaces = _namespaces(checkpoint, files, state)
            table = namespaces.of(table)
        yield table


def _remaining(checkpoint: Checkpoint, files: SnapshotFiles, state: StateDescription) -> Iterator[pa.Table]:
    for key_groups in files.slices(state.name, _SLICE_ROWS):
        with reading(checkpoint):
            table = files.remaining(state.name, state.kind, key_groups)
        if table.num_rows:
            yield table


def _namespaces(checkpoint: Checkpoint, files: SnapshotFiles, state: StateDescription) -> ShownNamespaces:
    distinct = pa.array([], pa.binary())
    for table in _remaining(checkpoint, files, state):
        distinct = pc.unique(pa.concat_arrays([distinct, pc.unique(table["namespace"])]))
    try:
        return ShownNamespaces(distinct)
    except SerializationError as error:
        raise unreadable(state.name, checkpoint.manifest.name) from error


# --- operator state ---


def _write_operator(
    checkpoint: Checkpoint, snapshot: StateSnapshot, writer: PartWriter, progress: Progress
) -> None:
    names = {state["name"] for state in snapshot.states}
    with _opened(checkpoint, snapshot, names) as files:
        if snapshot.files and not names <= set(files.states):
            raise CorruptCheckpointError(
                "the files do not hold all states that the manifest names", detail=checkpoint.manifest.name
            )
        for state in snapshot.states:
            name = state["name"]
            if not files.rows(name):
                writer.write_state(state, ())
                continue
            with reading(checkpoint):
                (table,) = files.read(name)
            writer.write_state(state, table.to_batches(max_chunksize=_BATCH_ROWS))
            progress.advance(_share(files, name, snapshot))


def _share(files: SnapshotFiles, name: str, snapshot: StateSnapshot) -> int:
    """The bytes that a state has in the files, if all rows are of one size."""
    rows = sum(files.rows(each) for each in files.states)
    return sum(file.size for file in snapshot.files) * files.rows(name) // max(rows, 1)
