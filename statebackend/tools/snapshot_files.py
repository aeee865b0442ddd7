"""Reads the states of one snapshot from its files, without a backend.

>>> import tempfile
>>> from statebackend.checkpoint import CheckpointStore
>>> from statebackend.state import ListStateDescriptor
>>> from statebackend.operator_state import OperatorStateBackend
>>> operator = OperatorStateBackend()
>>> operator.get_list_state(ListStateDescriptor("offsets", int)).add_all([7, 9])
>>> folder = tempfile.TemporaryDirectory()
>>> with CheckpointStore(folder.name).open_for_writing() as store:
...     checkpoint = store.commit(0, [operator.snapshot(0, store).result()])
>>> with SnapshotFiles(checkpoint, checkpoint.snapshots[0]) as files:
...     files.states, files.rows("offsets")
(['offsets'], 2)
>>> folder.cleanup()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, StateSnapshot
from statebackend.checkpoint.format import DataFileReader, key_group_slices, read_data_file
from statebackend.checkpoint.keyed.merged_rows import applied
from statebackend.errors import UsageError
from statebackend.keys import KeyGroupRange
from statebackend.tools.tables import unreadable

__all__ = ["SnapshotFiles"]


class SnapshotFiles:
    """The files of a snapshot, open, in the order of applying."""

    def __init__(self, checkpoint: Checkpoint, snapshot: StateSnapshot) -> None:
        self._where = checkpoint.manifest.name
        self._key_groups = snapshot.key_groups
        self._opened = ExitStack()
        self._readers: list[DataFileReader] = []
        with ExitStack() as opened:
            for file in snapshot.files:
                if file.kind not in ("base", "delta", "operator"):
                    raise UsageError(
                        f"the checkpoint has files of kind {file.kind!r}, which only the backend that wrote them reads",
                        detail=file.name,
                        hint="restore it into the backend that wrote it, and take a savepoint",
                    )
                source = opened.enter_context(checkpoint.open_file(file))
                self._readers.append(read_data_file(source, file.name))
            self._opened = opened.pop_all()

    def __enter__(self) -> SnapshotFiles:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()

    @property
    def states(self) -> list[str]:
        """The names of the states that the files hold, sorted."""
        return sorted({name for reader in self._readers for name in reader.states})

    def rows(self, name: str) -> int:
        """The number of rows of a state, of base and changes together."""
        return sum(int(reader.rows_of(name)[1].sum()) for reader in self._of(name))

    def slices(self, name: str, most_rows: int) -> Iterator[KeyGroupRange]:
        """Ranges of key groups that together cover all rows of a state, each with about ``most_rows`` at most, or one
        key group.
        """
        return key_group_slices(self._of(name), name, most_rows, within=self._key_groups)

    def read(self, name: str, key_groups: KeyGroupRange | None = None) -> list[pa.Table]:
        """The rows of a state in each file that has it."""
        return [
            pa.Table.from_batches([rows.batch for rows in reader.read(name, key_groups)], reader.schema(name))
            for reader in self._of(name)
        ]

    def remaining(self, name: str, kind: str, key_groups: KeyGroupRange) -> pa.Table:
        """The rows that remain of a keyed state when all changes have been applied."""
        tables = self.read(name, key_groups)
        try:
            return applied(kind, tables)
        except (pa.ArrowException, KeyError) as error:
            raise unreadable(name, self._where) from error

    def _of(self, name: str) -> list[DataFileReader]:
        return [reader for reader in self._readers if name in reader.states]
