"""The twin of `statebackend/_core/tables/state_core.pyx`: versions, marks and snapshots; see `cow_map.py`."""

from __future__ import annotations

from bisect import bisect_right
from itertools import count

from statebackend.errors import UsageError
from twin.cow_map import (
    FREE_SLOT,
    LAST_VERSION,
    RECORD_COPIED,
    RECORD_WRITE,
    RETIRED_RUN,
    Log,
    absorb_moves,
    drain,
    segment_for_writing,
    undo_log,
)

RECLAIM_PER_OPERATION = 8


class Mark:
    """A point to roll back to; made by `StateCore.mark`."""

    def __init__(self, owner, version, before):
        self.owner, self.version, self.before, self.is_open = owner, version, before, True


class Snapshot:
    def __init__(self, version):
        self.version, self.released, self.older, self.newer = version, False, None, None
        self.retired, self.directories = Log(version), []


class StateCore:
    """The versions, marks and snapshots that all tables of one backend share."""

    def __init__(self, seed=0):
        self.state_version = self.highest_required_snapshot_version = self.journal_version = 0
        self.newest = self.oldest = None
        self.garbage, self.dead_directories, self.journals = Log(), [], []
        self.pending = self.any_released = False
        self.sparse = []
        self.seed, self.tables, self.open_marks = seed, [], []
        self.next_slot_number = count(1).__next__

    def enter(self):
        if self.pending:
            drain(self, RECLAIM_PER_OPERATION)

    # --- marks ---

    def mark(self):
        self.enter()
        before = self.journal_version if self.newest is None else 0
        self.bump_version()
        self.journal_version = self.state_version
        self.open_marks.append(Mark(self, self.state_version, before))
        return self.open_marks[-1]

    def rollback(self, mark):
        self.enter()
        self.require_open(mark)
        while self.open_marks[-1] is not mark:
            self.open_marks.pop().is_open = False
        for journal in self.journals:
            self.undo_to(journal, mark.version)
        self.bump_version()
        self.journal_version = self.state_version
        for journal in self.journals:
            self.keep_carried(journal)

    def undo_to(self, journal, version):
        moved = {}
        absorb_moves(journal.carried, 0, moved)
        while journal.segments and journal.segments[-1].version >= version:
            journal.carried.until = self.highest_required_snapshot_version
            undo_log(journal, journal.segments[-1].log, journal.carried, moved)
            journal.segments.pop()

    def keep_carried(self, journal):
        if journal.carried.records:
            segment_for_writing(self, journal).append(journal.carried)

    def release(self, mark):
        if not mark.is_open or mark.owner is not self:
            return
        self.enter()
        mark.is_open = False
        is_newest = self.open_marks[-1] is mark
        self.open_marks.remove(mark)
        if self.open_marks:
            keep_from, back_to = self.open_marks[0].version, 0
            if is_newest:
                if self.newest is None and self.journal_version == mark.version and mark.before:
                    back_to = self.journal_version = mark.before
                for journal in self.journals:
                    self.join_segments(journal, mark.version, self.open_marks[-1].version, back_to)
        else:
            keep_from, self.journal_version = FREE_SLOT, 0
        for journal in self.journals:
            while journal.segments and journal.segments[0].version < keep_from:
                self.discard_log(journal, journal.segments.pop(0).log)

    def join_segments(self, journal, since, mark, back_to):
        """Join the segments since a version into one, which belongs to the mark before."""
        joined = [segment for segment in journal.segments if segment.version >= since]
        if not joined:
            return
        del journal.segments[-len(joined) :]
        if journal.segments and journal.segments[-1].version >= mark:
            joined.insert(0, journal.segments.pop())
        elif back_to:
            joined[0].version = back_to
        for segment in joined[1:]:
            joined[0].log.append(segment.log)
        journal.segments.append(joined[0])

    def discard_log(self, journal, log):
        """Leave records that no rollback can reach to `drain`; those that hold nothing go at once."""
        if log.held:
            journal.dead.append(log)
            self.pending = True

    def require_open(self, mark):
        if mark.owner is not self:
            raise UsageError("the mark belongs to another backend", code="USAGE.FOREIGN_MARK")
        if not mark.is_open:
            raise UsageError("the mark is no longer valid", code="USAGE.STALE_MARK")

    # --- snapshots ---

    def snapshot(self):
        from twin.state_table import SnapshotView

        return SnapshotView(self)

    def open_snapshot(self):
        self.enter()
        self.bump_version()
        snapshot = Snapshot(self.state_version)
        snapshot.older = self.newest
        if self.newest is not None:
            self.newest.newer = snapshot
        else:
            self.oldest = snapshot
        self.newest = snapshot
        self.highest_required_snapshot_version = snapshot.version
        if self.journal_version:
            # A new segment, so that the journal's version stays above every snapshot's.
            self.bump_version()
            self.journal_version = self.state_version
        return snapshot

    def live_snapshots(self):
        snapshot = self.oldest
        while snapshot is not None:
            yield snapshot
            snapshot = snapshot.newer

    def advance(self, budget=1000):
        drain(self, budget)
        return self.pending

    # --- versions ---

    def bump_version(self):
        if self.state_version >= LAST_VERSION:
            self.renumber()
        self.state_version += 1

    def renumber(self):
        """Begin counting versions anew, keeping every comparison that matters."""
        segments = [segment for journal in self.journals for segment in journal.segments]
        holders = [*self.live_snapshots(), *self.open_marks, *segments]
        thresholds = {holder.version for holder in holders} | ({self.journal_version} - {0})
        old = sorted(thresholds)

        def renumbered(version):
            return bisect_right(old, version)

        logs = [segment.log for segment in segments] + [each.retired for each in self.live_snapshots()]
        logs += [log for journal in self.journals for log in (journal.carried, journal.dead)]
        for log in [*logs, self.garbage]:
            log.until = renumbered(log.until)
            log.records = [
                (
                    op,
                    map,
                    slot,
                    renumbered(rest) if op == RETIRED_RUN and rest != FREE_SLOT else rest,
                    renumbered(until),
                )
                for op, map, slot, rest, until in log.records
            ]
        for table in self.tables:
            for map in table.maps.values():
                for slot in (slot for run in map.runs for slot in run if slot is not None):
                    if slot.version != FREE_SLOT:
                        slot.version = renumbered(slot.version)
                        slot.value_version = renumbered(slot.value_version)
                for page in map.primary.pages + map.secondary.pages:
                    page.version = renumbered(page.version)
                for directory in map.directories:
                    directory.low = renumbered(directory.low - 1) + 1
                    directory.high = renumbered(directory.high)
                map.seen_version = renumbered(map.seen_version)
        for holder in holders:
            holder.version = renumbered(holder.version)
        if self.newest is not None:
            self.highest_required_snapshot_version = self.newest.version
        self.journal_version = renumbered(self.journal_version) if self.journal_version else 0
        self.state_version = len(old)

    # --- inspection ---

    def metrics(self):
        return {
            "state_version": self.state_version,
            "highest_required_snapshot_version": self.highest_required_snapshot_version,
            "journal_version": self.journal_version,
            "snapshots": [snapshot.version for snapshot in self.live_snapshots()],
            "marks": len(self.open_marks),
            "copied_entries": sum(table.copied_entries for table in self.tables),
            "copied_pages": sum(table.copied_pages for table in self.tables),
            "rehashed_entries": sum(table.moved_entries for table in self.tables),
        }

    def objects_held(self):
        """The references to objects, by invariant 1 of `objects.pxd`."""
        held = 0
        for table in (each for each in self.tables if each.value_type is object):
            journal = table.journal
            held += sum(map.used for map in table.maps.values())
            for log in (*(segment.log for segment in journal.segments), journal.carried, journal.dead):
                held += sum(op in (RECORD_WRITE, RECORD_COPIED) for op, *_ in log.records)
        return held

    def _check(self):
        assert self.newest is None or self.highest_required_snapshot_version == self.newest.version
        assert self.journal_version == 0 or self.journal_version > self.highest_required_snapshot_version
        assert bool(self.open_marks) == bool(self.journal_version)
