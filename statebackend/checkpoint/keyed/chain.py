"""The files that a checkpoint builds on, and the moment since which changes are known.

    committed ---- in flight ---- in flight ---- now
        |              |              |
     chain.point   flight.point   flight.point       points: what has changed since can be read
        |
     base + deltas, and perhaps a base that is being rewritten, with a point of its own

Every snapshot builds on the newest checkpoint that was committed when it was taken. It opens a point of its own, which
becomes the chain's when it is committed. An aborted snapshot drops its point: what it held is read again from the
chain's. A point that a rollback has gone behind is no longer valid, and the next snapshot is a base.

>>> Chain((), object()).needs_base
False
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple

from statebackend.checkpoint.format import read_data_file
from statebackend.checkpoint.keyed.points import Point
from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import StoredFile
from statebackend.checkpoint.store.pending import SnapshotInFlight

__all__ = ["Chain", "Flight", "Rewriting", "written_and_read_back"]

_log = logging.getLogger(__name__)

#: A base is rewritten when there are so many deltas, or when they are larger than it, and than this.
MOST_DELTAS = 64
SMALLEST_REWRITTEN = 256 << 10


class Chain(NamedTuple):
    """A committed checkpoint that can be built on."""

    files: tuple[StoredFile, ...]
    #: The moment of the checkpoint, for the backend.
    point: Point
    #: What made the base, where no manifest names it yet.
    base_writer: DataWriter | None = None

    @property
    def deltas(self) -> list[StoredFile]:
        """The files after the base."""
        return [file for file in self.files if file.kind == "delta"]

    def is_kept_for(self, writer: DataWriter) -> bool:
        """Return True if the files will be there when the snapshot of ``writer`` is committed."""
        base = self.base_writer
        own = base.unsettled if base is not None and base.shares_store_with(writer) else ()
        return all(file.name in writer.builds_on or file.name in own for file in self.files)

    @property
    def needs_base(self) -> bool:
        """True if the deltas have outgrown the base."""
        deltas = sum(file.size for file in self.deltas)
        base = sum(file.size for file in self.files) - deltas
        return len(self.deltas) >= MOST_DELTAS or deltas > max(base, SMALLEST_REWRITTEN)


class Flight(SnapshotInFlight):
    """A snapshot of keyed state that is neither committed nor aborted."""

    def __init__(self, target: DataWriter, point: Point, now: int, chain: Chain | None) -> None:
        super().__init__(target)
        self.point = point
        #: The time of its batch.
        self.now = now
        #: What it builds on; None: it is a base.
        self.chain = chain
        #: All files that it consists of; None until they are written.
        self.files: tuple[StoredFile, ...] | None = None

    @property
    def has_landed(self) -> bool:
        """True if its checkpoint is committed."""
        return self.files is not None and self.is_committed


class Rewriting:
    """A base that is being written in the background; the next manifest names it."""

    def __init__(
        self, writer: DataWriter, point: Point, written: Future[tuple[StoredFile, ...] | None]
    ) -> None:
        self.writer = writer
        self.point = point
        self._written = written

    @property
    def is_running(self) -> bool:
        """True while it is being written."""
        return not self._written.done()

    def wait(self) -> None:
        """Wait until it is written, or has failed."""
        wait([self._written])

    def chain(self) -> Chain | None:
        """The chain for the next snapshot to build on; None if nothing came of it."""
        files = self._written.result()
        if files is None or self.writer.is_aborted:
            return None
        return Chain(files, self.point, self.writer)


def written_and_read_back(
    writer: DataWriter, write: Callable[[DataWriter], tuple[StoredFile, ...]]
) -> tuple[StoredFile, ...] | None:
    """Return what ``write`` has written, once it has been read again; None if that fails, and nothing is left of it."""
    try:
        files = write(writer)
        for file in files:
            with writer.read_back(file) as source:
                read_data_file(source, file.name).verify()
    except Exception as error:  # noqa: BLE001 - the deltas are there, and another attempt will be made
        if not writer.is_aborted:
            _log.warning("a base could not be rewritten, deltas go on: %s", str(error))
        writer.abort()
        return None
    return files
