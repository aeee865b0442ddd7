"""The history of a backend's snapshots: those in flight, the newest committed one, and the files the next builds on.

It also has the work of a snapshot's writing thread: its files and its description.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial

from statebackend.checkpoint.keyed.chain import Chain, ChangePoints, KeyedSnapshot
from statebackend.checkpoint.keyed.compaction import Backoff, has_room, write_in_background, write_merged
from statebackend.checkpoint.keyed.description import StateDescriptions
from statebackend.checkpoint.keyed.row_source import Source
from statebackend.checkpoint.keyed.state_restore import PART
from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import StateSnapshot, StoredFile
from statebackend.checkpoint.store.pending import WritingThreads, tell
from statebackend.types import Type

_log = logging.getLogger(__name__)


def write_snapshot(
    snapshot: KeyedSnapshot, source: Source, states: StateDescriptions, key_type: Type, max_parallelism: int
) -> StateSnapshot:
    """Write the files of a snapshot and describe them. If that fails, the snapshot is given up."""
    writer = snapshot.writer
    assert writer.checkpoint_id is not None
    try:
        made = source.write(writer)
        files = made if snapshot.chain is None else (*snapshot.chain.files, *made)
        contents = StateSnapshot(
            writer.checkpoint_id,
            writer.epoch,
            files=files,
            key_groups=source.key_groups,
            states=states.checked,
            now=snapshot.now,
            extra={"part": PART, "key_type": key_type.config(), "max_parallelism": max_parallelism},
        )
    except BaseException:
        writer.abort()
        raise
    snapshot.files = files
    return contents


class SnapshotLog:
    """All that a backend needs to know of its snapshots.

    The chain is the newest checkpoint that is known to be committed. The next snapshot is a delta on it, or a base.

    | event | the snapshot | the chain | a merged file, or a base, that no manifest names |
    |---|---|---|---|
    | `taken` | is in flight, with its own point | stays | if it is written, the next snapshot adopts it |
    | `committed` | becomes the chain; older ones go | is replaced | is settled if it is named, else it goes |
    | `aborted` | goes | stays | goes if nothing else builds on it |
    | `rolled_back` | stays | without its point, the next snapshot is a base | stays |

    Whatever goes drops its point. Files that a snapshot in flight builds on stay until it is decided.

    The writer of a snapshot tells the backend that it is committed or aborted. The backend then calls `settle`, at the
    end of the present call or with the next one: only the thread that calls the backend changes anything here.
    """

    def __init__(self, points: ChangePoints, committed_now: int | None) -> None:
        self._points = points
        #: The time of the newest checkpoint that is known to be committed. Values expired by then are left out.
        self.committed_now = committed_now
        #: Its watermark, by which states in event time leave out expired values; None if it has none.
        self.committed_watermark: int | None = None
        #: The merging of deltas, or the writing of a base, that goes on in the background.
        self.rewriting: KeyedSnapshot | None = None
        self._patience = Backoff()
        self._chain: Chain | None = None
        self._in_flight: list[KeyedSnapshot] = []
        #: The writers of adopted files that no manifest names yet.
        self._unnamed: list[DataWriter] = []

    # --- events ---

    def restored(self, files: tuple[StoredFile, ...]) -> None:
        """The state is what these files hold, and nothing else."""
        self._chain = Chain(files, self._points.open())

    def taken(
        self, writer: DataWriter, now: int, watermark: int | None, chain: Chain | None
    ) -> KeyedSnapshot:
        """A snapshot has been taken of this moment: its rows are still to be written."""
        snapshot = KeyedSnapshot(writer, self._points.open(), chain=chain, now=now, watermark=watermark)
        self._in_flight.append(snapshot)
        return snapshot

    def withdraw(self, snapshot: KeyedSnapshot) -> None:
        """The snapshot could not be begun after all."""
        self._points.drop(snapshot.point)
        self._in_flight.remove(snapshot)

    def committed(self, checkpoint_id: int) -> None:
        """A checkpoint is committed, by another process."""
        tell(self._in_flight, checkpoint_id, is_committed=True)

    def aborted(self, checkpoint_id: int) -> None:
        """A checkpoint will never be committed."""
        tell(self._in_flight, checkpoint_id, is_committed=False)

    def rolled_back(self) -> None:
        """State has gone back to a mark. Points behind it are void."""
        if self._chain is not None and not self._points.is_valid(self._chain.point):
            self._points.drop(self._chain.point)

    def settle(self) -> None:
        """Make the newest committed snapshot the chain, and forget aborted snapshots.

        Dropping a point may run what was deferred, and so call this again: it comes last.
        """
        landed = [at for at, snapshot in enumerate(self._in_flight) if snapshot.has_landed]
        if landed:
            self._land(landed[-1])
        aborted = [each.point for each in self._in_flight if each.writer.is_aborted]
        if aborted:
            self._in_flight = [each for each in self._in_flight if not each.writer.is_aborted]
            for point in aborted:
                self._points.drop(point)
        if self._unnamed:
            self._abort_unused([self._chain, *(snapshot.chain for snapshot in self._in_flight)])

    def _land(self, at: int) -> None:
        newest, older = self._in_flight[at], self._in_flight[:at]
        assert newest.files is not None
        points = [each.point for each in (self._chain, *older) if each is not None]
        self._chain = Chain(newest.files, newest.point)
        self.committed_now, self.committed_watermark = newest.now, newest.watermark
        del self._in_flight[: at + 1]
        if self._unnamed:  # another process may have committed: its store cannot tell our writers
            # An older snapshot may be committed although the backend was not told.
            named = newest.names.union(*(each.names for each in older if not each.writer.is_aborted))
            for writer in self._unnamed:
                writer.settle(named)
        for point in points:
            self._points.drop(point)

    def _abort_unused(self, used: Iterable[Chain | None]) -> None:
        """Remove adopted files that no manifest names and none of the chains builds on."""
        self._unnamed = [each for each in self._unnamed if each.unsettled]
        kept = [writer for chain in used if chain is not None for writer in chain.unnamed]
        for writer in self._unnamed:
            if writer not in kept:
                writer.abort()

    # --- what the next snapshot builds on ---

    def chain_for(self, target: DataWriter) -> Chain | None:
        """The chain, with its rewritten files; None if the next file must be a base."""
        self._adopt_rewritten()
        chain, points = self._chain, self._points
        if chain is None or not points.is_valid(chain.point) or not chain.is_kept_for(target):
            return None  # rolled back behind it; or another store, or one whose checkpoints were dropped
        is_small = points.holds(2 * points.changes_since(chain.point))
        return chain if is_small else None

    def _adopt_rewritten(self) -> None:
        rewriting = self.rewriting
        if rewriting is not None and rewriting.writer.is_of_another_process:
            self._give_up(rewriting)  # only the other process goes on with it
            return
        if rewriting is None or not rewriting.done():
            return
        made, chain = rewriting.made(), self._chain
        if made is None:
            self._patience.failed()
        else:
            self._patience.succeeded()
        if made is None or chain is None:
            self._give_up(rewriting)
            return
        adopted = chain.with_merged(rewriting, made)
        if adopted is None:
            names = {file.name for file in rewriting.parts}
            if not any(
                each is rewriting.replaces or (names and names <= each.names) for each in self._in_flight
            ):
                self._give_up(rewriting)
            return  # a snapshot in flight has the parts, and may become the chain
        self.rewriting = None
        self._chain = adopted
        self._unnamed.append(rewriting.writer)

    def _give_up(self, rewriting: KeyedSnapshot) -> None:
        self.rewriting = None
        rewriting.writer.abort()

    def rewrite(
        self,
        taken: KeyedSnapshot,
        chain: Chain,
        begin: Callable[[], DataWriter],
        take: Callable[[], Source],
        kinds: Callable[[], Mapping[str, str]],
        threads: WritingThreads,
    ) -> None:
        """If there are many files of one size, or the deltas have outgrown the base, begin to replace them.

        ``taken`` is a snapshot of this moment on ``chain``. ``begin`` gives a writer, ``take`` all rows of this moment,
        and ``kinds`` the kind of each state. A failure here fails no snapshot: it is tried again, later and later.
        """
        if self.rewriting is not None:
            return
        is_base_due, parts = chain.is_base_due, chain.mergeable
        if not (is_base_due or parts) or not self._patience.may_try():
            return
        try:
            with ExitStack() as undo:
                writer = begin()
                undo.callback(writer.abort)
                is_base_due = is_base_due and has_room(writer, chain.base_size)
                if not is_base_due and not (parts and has_room(writer, sum(file.size for file in parts))):
                    _log.info("files are not merged until the disk has more room")
                    self._patience.wait()
                    return
                write: Callable[[DataWriter], tuple[StoredFile, ...]]
                if is_base_due:
                    source = take()
                    undo.callback(source.release)
                    rewriting = KeyedSnapshot(writer, replaces=taken)
                    write = source.write
                else:
                    rewriting = KeyedSnapshot(writer, replaces=parts)
                    write = partial(write_merged, files=parts, kinds=kinds())
                rewriting.begin(partial(write_in_background, rewriting, write), threads)
                undo.pop_all()
        except Exception as error:  # noqa: BLE001 - the snapshot that was asked for has been taken
            _log.warning("files could not be merged, deltas go on: %s", str(error))
            self._patience.failed()
            return
        self.rewriting = rewriting

    def drop_outgrown_point(self) -> None:
        """Drop the chain's point if so much has changed that the next file will be a base."""
        if self._chain is not None and self._points.is_outgrown(self._chain.point):
            self._points.drop(self._chain.point)

    # --- the end ---

    def forget(self) -> None:
        """Build on nothing that was written so far."""
        if self._chain is not None:
            self._points.drop(self._chain.point)
            self._chain = None
        for snapshot in self._in_flight:
            self._points.drop(snapshot.point)

    def close(self) -> None:
        """No snapshot is taken any more. Those in flight may still be committed."""
        self._abort_unused(snapshot.chain for snapshot in self._in_flight if not snapshot.writer.is_aborted)
        self._chain, self._in_flight = None, []
        if self.rewriting is not None:
            self._give_up(self.rewriting)
