"""The shortest way to a data file and to a checkpoint."""

from __future__ import annotations

from statebackend.checkpoint import CheckpointStore, DataWriter, StateSnapshot, StoredFile


def write(writer: DataWriter, content: bytes = b"content", kind: str = "delta") -> StoredFile:
    with writer.create(kind) as file:
        file.write(content)
        return file.finish()


def commit(store: CheckpointStore, checkpoint_id: int, *more: StoredFile, kind: str = "delta") -> StoredFile:
    """A checkpoint with ``more`` files and a new one, which is returned."""
    stored = write(store.begin_snapshot(checkpoint_id), b"of %d" % checkpoint_id, kind)
    store.commit(checkpoint_id, [StateSnapshot(checkpoint_id, store.epoch, files=(*more, stored))])
    return stored
