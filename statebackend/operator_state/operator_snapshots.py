"""Writing operator state: the view of one moment, and the file that it becomes.

>>> view = StateView("split", {"element": {"type": "string"}}, [b"a", b"b"])
>>> view.rows(), view.described("buffered")
([b'a', b'b'], {'name': 'buffered', 'kind': 'split', 'types': {'element': {'type': 'string'}}})
>>> section("buffered", view).schema.names
['value']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend.checkpoint import CheckpointStore, DataWriter, PendingSnapshot, StateSnapshot
from statebackend.checkpoint.format import GroupedBatch, Section, write_data_file
from statebackend.checkpoint.store.pending import SnapshotInFlight, WritingThreads, tell
from statebackend.checkpoint.store.store import target_for
from statebackend.errors import UsageError
from statebackend.operator_state.element_columns import column_type, to_column
from statebackend.operator_state.redistribution import BROADCAST

__all__ = ["PART", "SnapshotHistory", "StateView", "section", "type_roles"]

#: The ``extra["part"]`` of a snapshot of operator state.
PART = "operator"

#: Converts at most this many rows and bytes at a time.
_PIECE_ROWS = 65_536
_PIECE_BYTES = 32 << 20


def _as_kept(kept: Any) -> Any:
    return kept


class StateView(NamedTuple):
    """A state at one moment.

    >>> StateView("broadcast", {"key": {"type": "int"}, "value": {"type": "int"}}, []).is_empty
    True
    """

    mode: str
    #: The configurations of the stored types, by role.
    types: dict[str, Any]
    #: The object that holds the state. It never changes: a change makes another one.
    kept: Any
    #: Converts that object to stored elements, or to pairs of stored key and value.
    read: Callable[[Any], Sequence[Any]] = _as_kept

    def rows(self) -> Sequence[Any]:
        """Stored elements, or pairs of stored key and value. O(n)."""
        return self.read(self.kept)

    @property
    def is_empty(self) -> bool:
        """True if there are none."""
        return not self.kept

    def described(self, name: str) -> dict[str, Any]:
        """The description of the state in a snapshot."""
        return {"name": name, "kind": self.mode, "types": self.types}


def type_roles(mode: str) -> dict[str, str]:
    """The columns of a state of this mode, and the role of each column's type.

    >>> type_roles("union"), type_roles("broadcast")
    ({'value': 'element'}, {'map_key': 'key', 'value': 'value'})
    """
    return {"map_key": "key", "value": "value"} if mode == BROADCAST else {"value": "element"}


class SnapshotHistory:
    """The snapshots of one instance and their contents, so that unchanged state is not written again.

    >>> import tempfile
    >>> history = SnapshotHistory(subtask_index=0, parallelism=1)
    >>> with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder) as store:
    ...     history.take(0, store.open_for_writing(), {}).result().extra
    {'part': 'operator'}
    """

    def __init__(self, *, subtask_index: int, parallelism: int) -> None:
        self._subtask_index = subtask_index
        self._parallelism = parallelism
        #: The newest committed snapshot, and those after it that may still be committed.
        self._taken: list[_Taken] = []
        self._threads = WritingThreads()

    def take(
        self,
        checkpoint_id: int,
        store: CheckpointStore | DataWriter,
        views: Mapping[str, StateView],
        *,
        incremental: bool = True,
    ) -> PendingSnapshot:
        """Begin to write states. Writes nothing if they are all empty.

        If they are as they were in the newest committed checkpoint, its file is named again, unless ``incremental`` is
        false.
        """
        if not isinstance(store, (CheckpointStore, DataWriter)):
            raise UsageError(f"a snapshot is written to a CheckpointStore, not to a {type(store).__name__}")
        writer = target_for(store, checkpoint_id)
        try:
            snapshot = StateSnapshot(
                checkpoint_id,
                writer.epoch,
                self._subtask_index,
                self._parallelism,
                states=tuple(views[name].described(name) for name in sorted(views)),
                extra={"part": PART},
            )
            taken = _Taken(writer, views, snapshot)
            before = self._newest_committed()
            if incremental and before is not None and before.can_stand_for(taken):
                taken.snapshot = dataclasses.replace(snapshot, files=before.snapshot.files)
            pending = PendingSnapshot(checkpoint_id, taken.write, writer.abort, self._threads)
        except BaseException:
            writer.abort()
            raise
        self._taken.append(taken)
        return pending

    def committed(self, checkpoint_id: int) -> None:
        """A checkpoint is committed, by this process or another."""
        tell(self._taken, checkpoint_id, is_committed=True)

    def aborted(self, checkpoint_id: int) -> None:
        """A checkpoint will never be committed."""
        tell(self._taken, checkpoint_id, is_committed=False)

    def close(self) -> None:
        """Forget earlier snapshots. Writes that have begun go on."""
        self._taken = []
        self._threads.close()

    def _newest_committed(self) -> _Taken | None:
        self._taken = [each for each in self._taken if not each.is_aborted]
        for at in range(len(self._taken) - 1, -1, -1):
            if self._taken[at].is_committed:
                del self._taken[:at]
                return self._taken[0]
        return None


class _Taken(SnapshotInFlight):
    """A snapshot that was taken; complete once its file is written."""

    def __init__(self, writer: DataWriter, views: Mapping[str, StateView], snapshot: StateSnapshot) -> None:
        super().__init__(writer)
        self.snapshot = snapshot
        self._views = views

    def can_stand_for(self, other: _Taken) -> bool:
        """Return True if its file holds what ``other`` would write, and will be kept for it."""
        files = self.snapshot.files
        return (
            all(file.name in other.target.builds_on for file in files)
            and self.snapshot.states == other.snapshot.states
            and all(view.kept is self._views[name].kept for name, view in other._views.items())
        )

    def write(self) -> StateSnapshot:
        """Write the file, unless there is nothing to write."""
        if self.snapshot.files or all(view.is_empty for view in self._views.values()):
            return self.snapshot
        try:
            sections = [section(name, self._views[name]) for name in sorted(self._views)]
            with self.target.create("operator", subtask=self.snapshot.subtask_index) as file:
                write_data_file(
                    file,
                    sections,
                    extra={"part": PART},
                    name=file.name,
                    compression=self.target.compression,
                )
                self.snapshot = dataclasses.replace(self.snapshot, files=(file.finish(),))
        except BaseException as error:
            if self.target.is_aborted:
                raise UsageError(
                    "the snapshot has been aborted", detail=f"checkpoint {self.snapshot.checkpoint_id}"
                ) from error
            self.target.abort()
            raise
        return self.snapshot


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
