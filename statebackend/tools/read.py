"""Opens checkpoints and savepoints for tools, and reads the rows of states in their files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, CheckpointReader, StateSnapshot
from statebackend.checkpoint.format import DataFileReader, key_group_slices, read_data_file
from statebackend.checkpoint.keyed.compaction import applied
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import CorruptCheckpointError, StoreError, UsageError, usage
from statebackend.keys import KeyGroupRange
from statebackend.tools.tables import OWN_FORMAT, unreadable

_log = logging.getLogger(__name__)


class SnapshotFiles:
    """The files of a snapshot, open, in the order of applying."""

    def __init__(
        self, checkpoint: Checkpoint, snapshot: StateSnapshot, *, skips: frozenset[str] = frozenset()
    ) -> None:
        self._where = checkpoint.manifest.name
        self._key_groups = snapshot.key_groups
        self._opened = ExitStack()
        self._readers: list[DataFileReader] = []
        with ExitStack() as opened:
            for file in snapshot.files:
                if file.kind in skips:
                    continue
                if file.kind not in OWN_FORMAT:
                    raise usage.native_files(
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
        return sum(int(reader.rows_of(name)[1].sum()) for reader in self.of(name))

    def slices(self, name: str, most_rows: int) -> Iterator[KeyGroupRange]:
        """Ranges of key groups that together cover all rows of a state, each with about ``most_rows`` at most, or one
        key group.
        """
        return key_group_slices(self.of(name), name, most_rows, within=self._key_groups)

    def read(self, name: str, key_groups: KeyGroupRange | None = None) -> list[pa.Table]:
        """The rows of a state in each file that has it."""
        return [
            pa.Table.from_batches([rows.batch for rows in reader.read(name, key_groups)], reader.schema(name))
            for reader in self.of(name)
        ]

    def remaining(self, name: str, kind: str, key_groups: KeyGroupRange) -> pa.Table:
        """The rows that remain of a keyed state when all changes have been applied."""
        tables = self.read(name, key_groups)
        try:
            return applied(kind, tables)
        except (pa.ArrowException, KeyError) as error:
            raise unreadable(name, self._where) from error

    def of(self, name: str) -> list[DataFileReader]:
        """The files that have a state."""
        return [reader for reader in self._readers if name in reader.states]


def open_checkpoint(uri: str | os.PathLike[str] | CheckpointReader, checkpoint_id: int | None) -> Checkpoint:
    """Open the checkpoint of an id, or for None the newest, of a store or the one at an address."""
    store = uri if isinstance(uri, CheckpointReader) else CheckpointReader(uri)
    return store.open_latest() if checkpoint_id is None else store.open(checkpoint_id)


@contextmanager
def pinned_checkpoint(
    uri: str | os.PathLike[str] | CheckpointReader, checkpoint_id: int | None
) -> Iterator[tuple[Checkpoint, Callable[[], None]]]:
    """Open the same checkpoint and pin it while it is read, with a function to call now and then meanwhile."""
    checkpoint = open_checkpoint(uri, checkpoint_id)
    with pinned(checkpoint) as keep:
        yield checkpoint, keep


@contextmanager
def pinned(checkpoint: Checkpoint) -> Iterator[Callable[[], None]]:
    """Pin a checkpoint while it is read. A store that may only be read is read without a pin."""
    try:
        pin = checkpoint.pin()
    except StoreError as error:
        _log.info("reading without a pin: %s", error)
        yield lambda: None
        return
    with pin:
        yield pin.keep


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Tell what to do if a file could not be read because retention has removed it."""
    try:
        yield
    except (UsageError, CorruptCheckpointError, StoreError) as error:
        if checkpoint.is_kept():
            raise
        raise UsageError(
            f"checkpoint {checkpoint.id} has been dropped by its writer while it was read",
            code="USAGE.NO_CHECKPOINT",
            hint="try again, which takes a newer one; or let the store retain more: CheckpointStore(retain=...)",
        ) from error


def open_saved(uri: Any, checkpoint_id: int | None) -> Checkpoint | Savepoint:
    """The same, or the savepoint at the address, which has no ids; a store may be given too."""
    if isinstance(uri, Savepoint):
        if checkpoint_id is not None:
            raise usage.checkpoint_id(
                "a savepoint has no ids", detail=uri.uri, hint="leave id out, or give the uri of a store"
            )
        return uri
    if (
        checkpoint_id is None
        and not isinstance(uri, CheckpointReader)
        and CheckpointReader(uri).latest() is None
    ):
        savepoint = Savepoint(uri)
        if savepoint.parts("keyed") or savepoint.parts("operator"):
            return savepoint
    return open_checkpoint(uri, checkpoint_id)
