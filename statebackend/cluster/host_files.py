"""A host's half of the store: it writes files for the writer of the epoch, which is in the driver and commits them.

>>> from statebackend.checkpoint import CheckpointStore
>>> import tempfile
>>> folder = tempfile.TemporaryDirectory()
>>> store = CheckpointStore(folder.name).open_for_writing(key_type=int, max_parallelism=128)
>>> files = HostFiles(store.data_writer())
>>> with files.begin_snapshot(0).create("base") as file:
...     stored = file.finish()
>>> files.abort(0)
>>> import os
>>> os.listdir(os.path.dirname(os.path.join(folder.name, stored.name)))
[]
>>> store.close()
>>> folder.cleanup()
"""

from __future__ import annotations

from collections.abc import Iterable

from statebackend.checkpoint import DataWriter, StoredFile

__all__ = ["HostFiles"]


class HostFiles:
    """Makes the writers of a host's snapshots and outputs, from one that the driver's store has made."""

    def __init__(self, template: DataWriter, builds_on: Iterable[StoredFile] = ()) -> None:
        self._template = template
        #: What snapshots may name again: the files of this host in the newest checkpoint.
        self.builds_on = frozenset(file.name for file in builds_on)
        self._made: list[DataWriter] = []

    def begin_snapshot(self, checkpoint_id: int) -> DataWriter:
        """Make the writer of the files of one snapshot."""
        writer = self._template.for_checkpoint(checkpoint_id, self.builds_on)
        self._made.append(writer)
        return writer

    def sync(self, named: Iterable[StoredFile]) -> None:
        """Make the names of the new ones among these files durable: the driver may commit them then.

        Some are of no writer here: a base that was written in the background lies in the same folder.
        """
        if any(file.name not in self.builds_on for file in named):
            self._made[0].sync()

    def abort(self, checkpoint_id: int) -> None:
        """Remove what was written for the checkpoint."""
        made, self._made = self._made, []
        for writer in made:
            writer.abort()

    def committed(self, of_state: Iterable[StoredFile], of_outputs: Iterable[StoredFile]) -> None:
        """Note that a checkpoint names these files of this host. Snapshots build on those of its state."""
        self.builds_on = frozenset(file.name for file in of_state)
        named = {*self.builds_on, *(file.name for file in of_outputs)}
        made, self._made = self._made, []
        for writer in made:
            writer.settle(named)
            writer.committed()
