"""The snapshots of a backend: those in flight, the newest committed one, and the files that the next builds on.

>>> from statebackend.backends import create_backend
>>> keyed = create_backend("reference").create_keyed_backend(int)
>>> lineage = Lineage(keyed, None)
>>> lineage.settle()
>>> lineage.committed_now is None
True
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from statebackend.checkpoint.keyed.chain import Chain, Flight, Rewriting, written_and_read_back
from statebackend.checkpoint.keyed.snapshot_files import TakenRows
from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import StoredFile
from statebackend.checkpoint.store.store import CheckpointStore

if TYPE_CHECKING:
    from statebackend.checkpoint.keyed.checkpointed_backend import CheckpointedKeyedBackend

__all__ = ["Lineage"]

_log = logging.getLogger(__name__)


class Lineage:
    """The chain that is built on, the snapshots in flight, and the base that is being rewritten.

    Whether a snapshot was committed or given up is seen when the next one is taken; only the thread that calls the
    backend changes anything here.

    >>> from statebackend.backends import create_backend
    >>> Lineage(create_backend("reference").create_keyed_backend(int), 1000).committed_now
    1000
    """

    def __init__(self, backend: CheckpointedKeyedBackend, committed_now: int | None) -> None:
        self._backend = backend
        #: The time of the newest checkpoint that is known to be committed: what has expired is left out by it.
        self.committed_now = committed_now
        self.rewriting: Rewriting | None = None
        self._chain: Chain | None = None
        self._flights: list[Flight] = []
        #: What made bases that no manifest names yet.
        self._bases: list[DataWriter] = []

    def build_on(self, files: tuple[StoredFile, ...]) -> None:
        """Build on these files: they hold exactly what was restored."""
        self._chain = Chain(files, self._backend._open_point())

    def add(self, flight: Flight) -> None:
        """A snapshot has been taken."""
        self._flights.append(flight)

    def note_committed(self, checkpoint_id: int) -> None:
        """It is known that a checkpoint is committed, by this process or another."""
        for flight in self._flights:
            if flight.writer.checkpoint_id == checkpoint_id:
                flight.is_committed = True

    def note_aborted(self, checkpoint_id: int) -> None:
        """It is known that a checkpoint will never be committed."""
        for flight in self._flights:
            if flight.writer.checkpoint_id == checkpoint_id:
                flight.is_aborted = True

    def settle(self) -> None:
        """Let what has been committed since become what is built on, and forget what was given up."""
        drop_point = self._backend._drop_point
        landed = [at for at, flight in enumerate(self._flights) if flight.has_landed]
        if landed:
            newest = self._flights[landed[-1]]
            if self._chain is not None:
                drop_point(self._chain.point)
            assert newest.files is not None
            self._chain = Chain(newest.files, newest.point)
            self.committed_now = newest.now
            for flight in self._flights[: landed[-1]]:
                drop_point(flight.point)
            del self._flights[: landed[-1] + 1]
        for flight in [each for each in self._flights if each.is_lost]:
            drop_point(flight.point)
            self._flights.remove(flight)
        if self._bases:
            self._abort_bases([self._chain, *(flight.chain for flight in self._flights)])

    def _abort_bases(self, used: Iterable[Chain | None]) -> None:
        """Remove rewritten bases that no manifest names and none of the chains builds on."""
        self._bases = [each for each in self._bases if each.unsettled]
        kept = [chain.base_writer for chain in used if chain is not None]
        for base in self._bases:
            if base not in kept:
                base.abort()

    def chain_for(self, writer: DataWriter) -> Chain | None:
        """The chain, with a rewritten base if there is one; None if the next file is to be a base."""
        self._adopt_rewritten()
        chain, backend = self._chain, self._backend
        if chain is None or not backend._is_valid(chain.point) or not chain.is_kept_for(writer):
            return None  # rolled back behind it; or another store, or one whose checkpoints were dropped
        is_small = 2 * backend._changes_since(chain.point) <= backend._rows_held()
        return chain if is_small else None

    def _adopt_rewritten(self) -> None:
        rewriting = self.rewriting
        if rewriting is None or rewriting.is_running:
            return
        self.rewriting = None
        chain = rewriting.chain()
        if chain is None or self._chain is None or not self._backend._is_valid(rewriting.point):
            self._backend._drop_point(rewriting.point)
            rewriting.writer.abort()
            return
        self._backend._drop_point(self._chain.point)
        self._chain = chain
        self._bases.append(rewriting.writer)

    def rewrite_base(self, store: CheckpointStore, take: Callable[[], TakenRows]) -> None:
        """Begin to write all rows of this moment behind, so that what follows builds on few files."""
        backend = self._backend
        try:
            with ExitStack() as undo:
                writer = store.begin_snapshot(None)
                undo.callback(writer.abort)
                rows = take()
                undo.callback(rows.source.release)
                point = backend._open_point()
                undo.callback(backend._drop_point, point)
                written = backend._threads.run(lambda: written_and_read_back(writer, rows.write))
                undo.pop_all()
        except Exception as error:  # noqa: BLE001 - the snapshot that was asked for has been taken
            _log.warning("a base could not be rewritten, deltas go on: %s", str(error))
            return
        self.rewriting = Rewriting(writer, point, written)

    def drop_outgrown_point(self) -> None:
        """No delta will be written of so many changes: what they hold need not be kept. The next file is a base."""
        if self._flights:
            self.settle()
        if self._chain is not None and self._backend._is_outgrown(self._chain.point):
            self._backend._drop_point(self._chain.point)

    def forget(self) -> None:
        """Build on nothing that was written so far."""
        if self._chain is not None:
            self._backend._drop_point(self._chain.point)
            self._chain = None
        for flight in self._flights:
            self._backend._drop_point(flight.point)
        if self.rewriting is not None:
            self._backend._drop_point(self.rewriting.point)

    def close(self) -> None:
        """Nothing is taken any more. What is in flight may still be committed."""
        self._abort_bases(flight.chain for flight in self._flights if not flight.is_lost)
        self._chain, self._flights = None, []
        if self.rewriting is not None:
            self.rewriting.writer.abort()
            self.rewriting = None
