"""The shortest way to a data file and to a checkpoint, and a thread that goes on writing them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

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


@contextmanager
def busy(step: Callable[[int], None]) -> Iterator[Future[None]]:
    """Take steps, which are numbered, in a thread until the block ends. An error of a step is raised then."""
    is_over = threading.Event()

    def go_on() -> None:
        number = 0
        while not is_over.is_set():
            step(number)
            number += 1

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(go_on)
        try:
            yield writer
        finally:
            is_over.set()
    writer.result()
