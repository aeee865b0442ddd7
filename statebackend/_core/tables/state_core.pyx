"""The shared part of one backend's tables: the arena, the version counter, open marks, live snapshots.

Threads: one call at a time is inside a StateCore, on whichever thread. A SnapshotView may be read and released
on any other thread meanwhile.

While the user's code runs `inside` a call, other calls are refused. `close()`, `release()` and the end of an iteration
take effect at the end of the outermost call. Code that releases the GIL halfway is `busy`: calls of other threads are
refused, and `close()` and snapshots of other threads wait.

Objects that the state lets go of end between calls (`end_objects`). But a collection runs the finalisers of other
objects wherever a Python object is made, on any thread, and they may use the backend. So nothing is half changed where
objects are made. Code that reads state while it makes objects is `inside`.
"""

import os
from functools import partial

cimport cython
from cpython.mem cimport PyMem_RawFree
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memmove, memset
from posix.unistd cimport getpid

from statebackend._core.memory.arena cimport (
    CHECKED, LIVE_ENTRIES, LIVE_SNAPSHOTS, REFUSED_BY_LIMIT, REFUSED_BY_REFS, REFUSED_BY_SYSTEM, blob_drop, Blob,
    count, give_back_unused, raw_alloc, raw_free)
from statebackend._core.tables.cow_map cimport (
    FREE_SLOT, LAST_VERSION, RETIRED_RUN, VALUE_FIXED, BucketTable, CowMap, Directory, Entry, Journal, Segment, Table,
    count_records, drain, entry_at, first_of_run, forget_empty_journals, forget_moves, let_die, map_clear_storage,
    payload_drop, payload_of, segment_for_writing, undo_log, wait_for_others)
from statebackend._core.memory.journal cimport Log, LogChunk, chunk_data, log_append, log_clear
from statebackend._core.tables.invariants cimport check_logs
from statebackend._core.tables.namespaces cimport new_namespaces
from statebackend._core.memory.platform cimport spin_lock, spin_unlock, store_u32, unlikely

from statebackend.errors import ClosedError, MemoryLimitError, UsageError, overlapping_call

_snapshot_view = None                    # the module, which imports this one

cdef enum:
    RECLAIM_AT_CLOSE = 1 << 30
    RECLAIMS_PER_LOOK = 1024             # how often unused extents are given back
    RECLAIM_PER_OPERATION = 8            # so that no operation pays for the end of a snapshot or a list


@cython.final
cdef class CoreMark:
    """A point to roll back to; made by `StateCore.mark`."""


@cython.final
@cython.no_gc_clear                      # the arena must outlive what is freed into it
cdef class StateCore:
    """The arena, versions, marks and snapshots that all tables of one backend share.

    >>> from statebackend._core.tables.state_table import StateTable
    >>> core = StateCore()
    >>> table = StateTable(core, key="int", value="long", max_parallelism=4)
    >>> table.put(1, 10)
    >>> mark = core.mark()
    >>> table.put(1, 11); table.put(2, 20)
    >>> core.rollback(mark)
    >>> len(table), table.remove(1), table.remove(2)
    (1, True, False)
    """

    def __cinit__(self, max_bytes=0, seed=None):
        global _snapshot_view
        if _snapshot_view is None:        # made here, not at the first snapshot, which has to take microseconds
            import statebackend._core.snapshots.snapshot_view as _snapshot_view
        memset(&self.core, 0, sizeof(Core))
        self.arena = Arena()
        self.arena.set_limit(max_bytes)
        self.core.arena = &self.arena.core
        self.core.blobs = self.arena.blobs
        self.core.objects.probe = self.arena.budget.probe
        self.namespaces = new_namespaces(&self.core)
        self.core.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.open_marks = []
        self.later = []
        self.process = getpid()

    def __dealloc__(self):
        teardown(&self.core)
        end_dead(&self.core.objects)
        PyMem_RawFree(self.core.objects.dead)
        if self.namespaces is not None:
            self.namespaces.free_storage()
            self.namespaces.core = NULL

    def close(self):
        """Drop all state; every later call raises. Live snapshots stay readable until they are released."""
        if self.process == getpid():     # the other threads of a parent do not exist in its child
            wait_for_others(&self.core)
        if self.closed:
            return
        self.end()
        self.after_close()

    cdef void end(self) noexcept:
        """Make every later call raise; `after_close` frees the state."""
        cdef CoreMark mark
        self.closed = True
        self.calls += 1                  # handles that remember a slot look again, and find the core closed
        for mark in self.open_marks:
            mark.is_open = False
        self.open_marks = []
        self.core.journal_version = 0
        self.core.keeps_maps = True
        self.core.sparse = NULL

    cdef void after_close(self) noexcept:
        """Free the state of a closed backend once no call is inside and no snapshot is left."""
        if self.inside or self.core.busy:
            return                       # the outermost call comes back here
        drain(&self.core, RECLAIM_AT_CLOSE)
        if self.core.newest == NULL:
            teardown(&self.core)
            self.arena.leave()
        end_objects(self)

    cdef int refuse(self) except -1:
        """Raise in a call that finds the backend closed, or another call in progress."""
        if self.closed:
            raise ClosedError("the backend is closed", hint="create a new backend and restore into it")
        if self.inside or self.core.busy and self.core.busy_thread != PyThread_get_thread_ident():
            raise overlapping_call()
        return 0

    cdef int settle(self) except -1:
        """Run what was deferred to the end of the outermost call."""
        while self.later and not self.inside and not self.under_way and not self.core.busy:
            self.later.pop(0)()
        end_objects(self)
        return 0

    def _do_later(self, deferred):
        """Call `deferred` at the end of the outermost call."""
        self.later.append(deferred)
        self.core.pending = 1            # the next call looks

    def _check_call(self):
        """Run what was deferred, then raise if a call may not begin."""
        self.settle()
        if self.inside or self.core.busy or self.closed:
            self.refuse()

    cdef int occupy(self) except -1:
        """Have calls of other threads refused until `vacate`; wait for one that is at work."""
        wait_for_others(&self.core)
        self.core.busy_thread = PyThread_get_thread_ident()
        store_u32(&self.core.busy, self.core.busy + 1)
        self.core.pending = 1            # so that handles too, check before they work
        return 0

    cdef void vacate(self) noexcept:
        store_u32(&self.core.busy, self.core.busy - 1)
        if unlikely(self.closed):
            self.after_close()

    cdef int enter(self) except -1:
        if unlikely(self.closed or self.core.busy or self.inside):
            self.refuse()
        if unlikely(self.core.pending):  # before the call begins: objects that end may call the backend
            self.settle()
            if not self.closed:
                self.reclaim(RECLAIM_PER_OPERATION)
            if self.closed or self.core.busy or self.inside:
                self.refuse()
        self.inside += 1
        self.inside_thread = PyThread_get_thread_ident()
        self.calls += 1
        return 0

    cdef int enter_step(self) except -1:
        """Begin a call, or a step of one that refuses others already."""
        if not self.inside:
            return self.enter()
        if unlikely(self.closed or self.core.busy and self.core.busy_thread != PyThread_get_thread_ident()):
            self.refuse()
        begin_inside(self)
        self.calls += 1
        return 0

    cdef void reclaim(self, int64_t budget) noexcept:
        """Take up to `budget` steps of waiting work. No slot may be remembered meanwhile."""
        drain(&self.core, budget)
        self.calls += 1                  # entries may have moved
        self.reclaims += 1
        if self.reclaims % RECLAIMS_PER_LOOK == 0:
            give_back_unused(&self.arena.core)
        end_objects(self)

    cdef void leave(self) noexcept:
        self.inside -= 1
        if unlikely(self.closed):
            self.after_close()
        end_objects(self)

    cdef int out_of_memory(self) except -1:
        """Raise the proper error after an operation ran out of memory."""
        cdef uint32_t refused = self.arena.budget.refused
        self.arena.budget.refused = REFUSED_BY_SYSTEM
        if refused == REFUSED_BY_LIMIT:
            raise MemoryLimitError(
                "the state would pass its memory limit", detail=f"max_bytes={self.arena.budget.limit}",
                hint="raise max_bytes, or expire or clear state")
        if refused == REFUSED_BY_REFS:
            raise MemoryLimitError(
                "the state is as large as that of one backend can be", detail="its arena holds at most 32 GB",
                hint="share the key groups out to more backends, or expire or clear state")
        raise MemoryError("no memory for state; nothing has changed")

    # --- marks ---

    def mark(self):
        """Open a mark. O(1)."""
        cdef CoreMark mark = CoreMark.__new__(CoreMark)
        self.enter_step()
        try:
            # Under a snapshot, clones get versions that tell only of the newest segment if they were journalled.
            mark.before = self.core.journal_version if self.core.newest == NULL else 0
            self.bump_version()
            self.core.journal_version = self.core.state_version
            self.marks_opened += 1
            mark.owner = self
            mark.number = self.marks_opened
            mark.version = self.core.state_version
            mark.is_open = True
            self.open_marks.append(mark)
            return mark
        finally:
            self.leave()

    def rollback(self, CoreMark mark not None):
        """Return every table to its contents at `mark`; newer marks become invalid. O(changes since).

        The rollback itself needs a little memory, and only while a snapshot is live; this may pass `max_bytes`. If
        the system's memory runs out midway, the call can be repeated.
        """
        cdef Journal *journal
        cdef CoreMark other
        cdef UndoNote *note
        cdef int64_t limit = self.arena.budget.limit
        self.enter_step()
        try:
            self.arena.budget.limit = 0
            self.require_open(mark)
            self.rollbacks += 1
            while self.open_marks[len(self.open_marks) - 1] is not mark:
                other = self.open_marks.pop()
                other.is_open = False
            journal = self.core.filled_journals
            try:
                while journal != NULL:
                    self.undo_to(journal, mark.version)
                    journal = journal.next_filled
            finally:
                # Undone changes are no longer journalled: a new segment takes them when they are written again.
                self.bump_version()
                self.core.journal_version = self.core.state_version
            note = self.undo_notes
            while note != NULL:
                note.mark = min(note.mark, mark.number)
                note = note.next
            journal = self.core.filled_journals
            while journal != NULL:
                if not self.keep_carried(journal):
                    self.out_of_memory()
                journal = journal.next_filled
        finally:
            forget_moves(&self.core)
            self.arena.budget.limit = limit
            self.leave()

    cdef int undo_to(self, Journal *journal, uint32_t version) except -1:
        forget_moves(&self.core)
        self.core.moves.floor = version
        journal.carried.until = self.core.highest_required_snapshot_version
        if journal.carried.last != NULL:         # of an undo that memory ended: new records go behind its own
            journal.carried.last.until = journal.carried.until
        while journal.n_segments and journal.segments[journal.n_segments - 1].version >= version:
            if not undo_log(journal, &journal.segments[journal.n_segments - 1].log, 0, &journal.carried):
                raise MemoryError("no memory to finish a rollback; make room and call it again")
            journal.n_segments -= 1
        return 0

    cdef int undo_call(self, Journal *journal, Log *log) except -1:
        """Undo the steps of a failed call, which went to `log` instead of the journal."""
        cdef Log carried
        cdef int64_t limit = self.arena.budget.limit
        memset(&carried, 0, sizeof(Log))
        carried.until = self.core.highest_required_snapshot_version
        self.arena.budget.limit = 0      # undoing may need a little
        try:
            forget_moves(&self.core)
            self.undo_failed(journal, log, 0, &carried)
            self.settle_undone(journal, &carried)
        finally:
            forget_moves(&self.core)
            self.arena.budget.limit = limit
        return 0

    cdef int undo_failed(self, Journal *journal, Log *log, uint64_t down_to, Log *carried) except -1:
        """Reverse the effects of a failed call. If the little memory for that is missing twice, the backend ends."""
        # Reversed records are off the log: the second attempt continues.
        if undo_log(journal, log, down_to, carried) or undo_log(journal, log, down_to, carried):
            return 0
        let_die(&self.core, journal, log)
        self.give_up(journal, carried)

    cdef int give_up(self, Journal *journal, Log *carried) except -1:
        """End the backend, because half a call cannot be undone and must not be visible."""
        let_die(&self.core, journal, carried)
        self.end()
        raise MemoryError("no memory to undo a failed call; the backend was closed, restore its last checkpoint")

    cdef int settle_undone(self, Journal *journal, Log *carried) except -1:
        """After the undo of a failed call, keep the moves that it leaves, for older records that name the same slots.

        The call's changes are no longer journalled: a new segment takes them when they are written again.
        """
        cdef Log *log
        if self.core.journal_version == 0:
            discard_log(&self.core, journal, carried)
        elif segment_for_writing(&self.core, journal, &log) or segment_for_writing(&self.core, journal, &log):
            log_append(self.core.arena, log, carried)
            self.bump_version()
            self.core.journal_version = self.core.state_version
        else:
            self.give_up(journal, carried)
        return 0

    cdef bint keep_carried(self, Journal *journal) noexcept:
        cdef Log *log
        if journal.carried.records == 0:
            return True
        if not segment_for_writing(&self.core, journal, &log):
            return False
        log_append(self.core.arena, log, &journal.carried)
        return True

    def release(self, CoreMark mark not None):
        """Give up the possibility to roll back to `mark`. Idempotent. Reclaiming continues step by step.

        O(states written since the oldest mark), however many marks are open or were opened before.
        """
        cdef Journal *journal
        cdef CoreMark last
        cdef uint32_t keep_from, back_to = 0
        cdef bint is_newest
        if not mark.is_open or mark.owner is not self or self.closed:
            return
        self.enter_step()
        try:
            if not mark.is_open:         # a finaliser was first, before the call began
                return
            mark.is_open = False
            is_newest = self.open_marks[len(self.open_marks) - 1] is mark
            del self.open_marks[len(self.open_marks) - 1 if is_newest else self.place_of(mark)]
            if self.open_marks:
                keep_from = (<CoreMark>self.open_marks[0]).version
                if is_newest:
                    last = self.open_marks[len(self.open_marks) - 1]
                    if self.core.newest == NULL and self.core.journal_version == mark.version and mark.before:
                        # What was journalled for the mark before need not be journalled again.
                        back_to = mark.before
                        self.core.journal_version = back_to
                    journal = self.core.filled_journals
                    while journal != NULL:
                        join_segments(&self.core, journal, mark.version, last.version, back_to)
                        journal = journal.next_filled
            else:
                keep_from = FREE_SLOT
                self.core.journal_version = 0
            journal = self.core.filled_journals
            while journal != NULL:
                drop_segments(&self.core, journal, keep_from)
                journal = journal.next_filled
            forget_empty_journals(&self.core)
        finally:
            self.leave()

    def release_soon(self, CoreMark mark not None):
        """Release `mark` now, or at the end of the call that is inside, on whatever thread."""
        if self.inside or self.core.busy:
            self._do_later(partial(self.release, mark))
        else:
            self.release(mark)

    cdef Py_ssize_t place_of(self, CoreMark mark) noexcept:
        """The place of an open mark in the list, which is in the order of versions."""
        cdef Py_ssize_t low = 0, high = len(self.open_marks) - 1, middle
        while low < high:
            middle = (low + high) // 2
            if (<CoreMark>self.open_marks[middle]).version < mark.version:
                low = middle + 1
            else:
                high = middle
        return low

    def changes_since(self, CoreMark mark not None):
        """The minimum number of changes journalled since `mark`, over all tables.

        O(marks, and states written since the oldest one).
        """
        cdef Journal *journal = self.core.filled_journals
        cdef uint64_t total = 0
        wait_for_others(&self.core)
        self.require_open(mark)
        while journal != NULL:
            total += count_records(journal, mark.version)
            journal = journal.next_filled
        return total

    def written_since(self, CoreMark mark not None):
        """The journals that have anything since `mark`, by the `journal` of their tables; O(what `changes_since` is).

        >>> from statebackend._core.tables.state_table import StateTable
        >>> core = StateCore()
        >>> one, other = StateTable(core), StateTable(core)
        >>> mark = core.mark()
        >>> one.put(1, 10)
        >>> core.written_since(mark) == [one.journal]
        True
        """
        cdef Journal *journal
        cdef list found = []
        wait_for_others(&self.core)
        self.require_open(mark)
        begin_inside(self)               # a finaliser in between could write, or release marks
        try:
            journal = self.core.filled_journals
            while journal != NULL:
                if count_records(journal, mark.version):
                    found.append(<uintptr_t>journal)
                journal = journal.next_filled
        finally:
            self.leave()
        return found

    def begin_load(self):
        """Until `end_load`, treat changes as if they had always been there, under any mark."""
        self.enter()
        self.core.journal_version = 0
        self.core.is_loading = True
        self.leave()

    def end_load(self):
        """Journal changes again, if marks are open."""
        self.core.is_loading = False
        self.core.pending = 1            # maps may go on to shrink
        self.enter()
        try:
            if self.open_marks:
                self.bump_version()
                self.core.journal_version = self.core.state_version
        finally:
            self.leave()

    cdef int require_open(self, CoreMark mark) except -1:
        if mark.owner is not self:
            raise UsageError("the mark belongs to another backend", code="USAGE.FOREIGN_MARK")
        if not mark.is_open:
            raise UsageError("the mark is no longer valid", code="USAGE.STALE_MARK",
                             hint="it was released, or an older mark was rolled back to")

    cdef void keep_note(self, UndoNote *note) noexcept:
        """Tell a note about rollbacks, until `forget_note`."""
        note.mark = NOT_UNDONE
        note.next = self.undo_notes
        self.undo_notes = note

    cdef void forget_note(self, UndoNote *note) noexcept:
        cdef UndoNote **link = &self.undo_notes
        while link[0] != NULL:
            if link[0] == note:
                link[0] = note.next
                return
            link = &link[0].next

    cdef uint64_t oldest_mark(self) noexcept:
        """The number of the oldest open mark; if none is open, one that no mark has."""
        return (<CoreMark>self.open_marks[0]).number if self.open_marks else NOT_UNDONE

    # --- snapshots ---

    def snapshot(self):
        """A consistent view of all tables at this moment. O(1); maps are shared, not copied."""
        return _snapshot_view.SnapshotView(self)

    cdef Snapshot *open_snapshot(self) except NULL:
        """Increment the version and make the maps keep their present contents; begins a SnapshotView."""
        cdef Snapshot *snapshot
        self.enter_step()
        try:
            snapshot = <Snapshot *>raw_alloc(&self.arena.budget, sizeof(Snapshot))
            if snapshot == NULL:
                self.out_of_memory()
            memset(snapshot, 0, sizeof(Snapshot))
            self.bump_version()
            snapshot.version = snapshot.retired.until = self.core.state_version
            spin_lock(&self.core.directory_lock)
            snapshot.older = self.core.newest
            if self.core.newest != NULL:
                self.core.newest.newer = snapshot
            else:
                self.core.oldest = snapshot
            self.core.newest = snapshot
            self.core.highest_required_snapshot_version = snapshot.version
            self.core.holder, self.core.holder_until = NULL, 0
            spin_unlock(&self.core.directory_lock)
            if self.core.journal_version:
                # A new segment, so that the journal's version stays above every snapshot's.
                self.bump_version()
                self.core.journal_version = self.core.state_version
            count(self.arena.budget.probe, LIVE_SNAPSHOTS, 1)
            return snapshot
        finally:
            self.leave()

    def advance(self, budget=1000):
        """Reclaim up to about `budget` unused entries, pages and records; return True if more are left."""
        self._check_call()
        self.reclaim(budget)
        return bool(self.core.pending)

    # --- versions ---

    cdef int bump_version(self) except -1:
        if unlikely(self.core.state_version >= LAST_VERSION):
            self.renumber()
        self.core.state_version += 1
        return 0

    cdef int renumber(self) except -1:
        """Restart the version counter, keeping every comparison that matters. O(entries), once in 2^32 marks."""
        cdef Snapshot *snapshot = self.core.oldest
        cdef Journal *journal = self.core.journals
        cdef Table *table = self.core.tables
        cdef CoreMark mark
        cdef uint32_t *old               # the versions that are compared with, each once, in order
        cdef uint32_t i, n = 0
        cdef uint64_t most = 1 + 2 * len(self.open_marks)
        while snapshot != NULL:
            most += 1
            snapshot = snapshot.newer
        while journal != NULL:
            most += journal.n_segments
            journal = journal.next
        old = <uint32_t *>malloc(most * sizeof(uint32_t))
        if old == NULL:
            raise MemoryError("no memory to count versions anew; nothing has changed")
        if self.core.journal_version:
            enter_version(old, &n, self.core.journal_version)
        snapshot = self.core.oldest
        while snapshot != NULL:
            enter_version(old, &n, snapshot.version)
            snapshot = snapshot.newer
        for mark in self.open_marks:
            enter_version(old, &n, mark.version)
            if mark.before:
                enter_version(old, &n, mark.before)
        journal = self.core.journals
        while journal != NULL:
            for i in range(journal.n_segments):
                enter_version(old, &n, journal.segments[i].version)
            journal = journal.next
        spin_lock(&self.core.directory_lock)
        while table != NULL:
            renumber_table(table, old, n)
            table = table.next
        snapshot = self.core.oldest
        while snapshot != NULL:
            snapshot.version = renumbered(snapshot.version, old, n)
            renumber_retired(&snapshot.retired, old, n)
            snapshot = snapshot.newer
        renumber_retired(&self.core.garbage, old, n)
        self.core.holder, self.core.holder_until = NULL, 0
        if self.core.newest != NULL:
            self.core.highest_required_snapshot_version = self.core.newest.version
        spin_unlock(&self.core.directory_lock)
        journal = self.core.journals
        while journal != NULL:
            for i in range(journal.n_segments):
                journal.segments[i].version = renumbered(journal.segments[i].version, old, n)
                renumber_log(&journal.segments[i].log, old, n)
            renumber_log(&journal.carried, old, n)
            renumber_log(&journal.dead, old, n)
            renumber_log(&journal.waiting, old, n)
            journal = journal.next
        for mark in self.open_marks:
            mark.version = renumbered(mark.version, old, n)
            if mark.before:
                mark.before = renumbered(mark.before, old, n)
        if self.core.journal_version:
            self.core.journal_version = renumbered(self.core.journal_version, old, n)
        self.core.state_version = n
        free(old)
        return 0

    # --- inspection ---

    def metrics(self):
        """Versions, marks, snapshots, memory and copies so far, as a dict."""
        cdef list live = []              # made before anything is read: making it may run finalisers
        cdef Snapshot *snapshot = self.core.oldest
        cdef Table *table = self.core.tables
        cdef uint64_t entries = 0, pages = 0, moved = 0
        while snapshot != NULL:
            live.append(snapshot.version)
            snapshot = snapshot.newer
        while table != NULL:
            entries += table.lane.copied_entries
            pages += table.lane.copied_pages
            moved += table.lane.moved_entries
            table = table.next
        return {
            "state_version": self.core.state_version,
            "highest_required_snapshot_version": self.core.highest_required_snapshot_version,
            "journal_version": self.core.journal_version,
            "snapshots": live,
            "marks": len(self.open_marks),
            "copied_entries": entries,
            "copied_pages": pages,
            "rehashed_entries": moved,
            **self.arena.usage(),
        }

    def _check(self):
        """Verify the arena, journals and snapshots; tables have their own `_check`."""
        self.arena._check()
        check_logs(&self.core)
        assert self.inside or self.under_way or self.core.objects.ending or self.core.objects.n_dead == 0, (
            f"{self.core.objects.n_dead} dead objects between calls")


cdef void enter_version(uint32_t *versions, uint32_t *n, uint32_t version) noexcept nogil:
    """Insert a version into the sorted ones, unless it is there."""
    cdef uint32_t at = n[0]
    while at and versions[at - 1] > version:
        at -= 1
    if at and versions[at - 1] == version:
        return
    memmove(versions + at + 1, versions + at, (n[0] - at) * sizeof(uint32_t))
    versions[at] = version
    n[0] += 1


cdef inline uint32_t renumbered(uint32_t version, uint32_t *old, uint32_t n) noexcept nogil:
    """The number of sorted thresholds that are at or below `version`."""
    cdef uint32_t i = 0
    while i < n and old[i] <= version:
        i += 1
    return i


cdef void renumber_table(Table *table, uint32_t *old, uint32_t n) noexcept nogil:
    cdef uint32_t g, i, units = table.layout.stride >> 3, slot, end
    cdef uint32_t *version
    cdef uint64_t r
    cdef CowMap *map
    cdef Entry *entry
    cdef BucketTable *buckets
    cdef Directory *directory
    cdef int t
    for g in range(table.n_maps):
        map = table.maps[g]
        if map == NULL:
            continue
        for r in range(map.n_runs):
            slot = first_of_run(table, map, r, &end)
            while slot < end:
                entry = entry_at(table.core, slot)
                if entry.version != FREE_SLOT:
                    entry.version = renumbered(entry.version, old, n)
                    if table.layout.off_value_version:
                        version = <uint32_t *>(<char *>entry + table.layout.off_value_version)
                        version[0] = renumbered(version[0], old, n)
                slot += units
        for t in range(2):
            buckets = &map.primary if t == 0 else &map.secondary
            for i in range(buckets.n_pages):
                buckets.pages[i].version = renumbered(buckets.pages[i].version, old, n)
        directory = map.directories
        while directory != NULL:
            # Covers the same snapshots: those above everything below `low`, up to `high`.
            directory.low = renumbered(directory.low - 1, old, n) + 1
            directory.high = renumbered(directory.high, old, n)
            directory = directory.older
        map.seen_version = renumbered(map.seen_version, old, n)


cdef void renumber_log(Log *log, uint32_t *old, uint32_t n) noexcept nogil:
    cdef LogChunk *chunk = log.first
    log.until = renumbered(log.until, old, n)
    while chunk != NULL:
        chunk.until = renumbered(chunk.until, old, n)
        chunk = chunk.next


cdef void renumber_retired(Log *log, uint32_t *old, uint32_t n) noexcept nogil:
    """Renumber a log of retired slots and pages; a page's record holds its version."""
    cdef LogChunk *chunk = log.first
    cdef uint64_t *record
    cdef uint32_t at
    renumber_log(log, old, n)
    while chunk != NULL:
        for at in range(0, chunk.used, 16):
            record = <uint64_t *>(chunk_data(chunk) + at)
            if record[1] >> 56 == RETIRED_RUN and record[0] != FREE_SLOT:
                record[0] = renumbered(<uint32_t>record[0], old, n)
        chunk = chunk.next


cdef void drop_segments(Core *core, Journal *journal, uint32_t keep_from) noexcept nogil:
    """Discard the logs of the segments before a version. The segments themselves go once half of all are without."""
    cdef uint32_t i
    while journal.n_dropped < journal.n_segments and journal.segments[journal.n_dropped].version < keep_from:
        discard_log(core, journal, &journal.segments[journal.n_dropped].log)
        journal.n_dropped += 1
    if 2 * journal.n_dropped > journal.n_segments:
        for i in range(journal.n_dropped, journal.n_segments):
            journal.segments[i - journal.n_dropped] = journal.segments[i]
        journal.n_segments -= journal.n_dropped
        journal.n_dropped = 0


cdef void join_segments(Core *core, Journal *journal, uint32_t since, uint32_t mark, uint32_t back_to) noexcept nogil:
    """Join the segments since a version, whose mark has been released, into one, which belongs to the mark before.

    If there is a segment of that mark, its version is kept; else the joined one gets `back_to`, unless that is 0.
    """
    cdef uint32_t i, first = journal.n_segments
    while first and journal.segments[first - 1].version >= since:
        first -= 1
    if first == journal.n_segments:
        return
    if first and journal.segments[first - 1].version >= mark:
        first -= 1
    elif back_to:
        journal.segments[first].version = back_to
    for i in range(first + 1, journal.n_segments):
        if journal.segments[first].log.records and journal.segments[i].log.records:
            journal.segments[first].joined = True
        journal.segments[first].joined |= journal.segments[i].joined
        log_append(core.arena, &journal.segments[first].log, &journal.segments[i].log)
    journal.n_segments = first + 1


cdef void discard_log(Core *core, Journal *journal, Log *log) noexcept nogil:
    """Leave records that no rollback can reach to `drain`; those that own nothing go at once."""
    if log.held == 0:
        log_clear(core.arena, log)
    elif log.records:
        let_die(core, journal, log)
        core.pending = 1


cdef void teardown(Core *core) noexcept nogil:
    """Free everything that the tables of a backend own. Nobody reads a snapshot any more."""
    cdef Snapshot *snapshot = core.oldest
    cdef Journal *journal = core.journals
    cdef Journal *next_journal
    cdef Table *table = core.tables
    cdef Table *next_table
    cdef uint32_t i
    while snapshot != NULL:
        snapshot.released = 1
        core.any_released = 1
        snapshot = snapshot.newer
    core.keeps_maps = True
    core.sparse = NULL
    while journal != NULL:
        for i in range(journal.n_segments):
            let_die(core, journal, &journal.segments[i].log)
        journal.n_segments = 0
        let_die(core, journal, &journal.carried)
        let_die(core, journal, &journal.waiting)
        journal = journal.next
    core.pending = 1
    while core.pending:
        drain(core, 1 << 40)
        if core.pending and core.garbage.records == 0 and core.dead_lists == NULL and core.dead_directories == NULL:
            break
    while table != NULL:
        next_table = table.next
        teardown_table(table)
        while core.garbage.records or core.dead_lists != NULL:
            drain(core, 1 << 40)
        raw_free(core.arena.budget, table, sizeof(Table))
        core.tables = table = next_table
    journal = core.journals
    while journal != NULL:
        next_journal = journal.next
        raw_free(core.arena.budget, journal.segments, journal.capacity * sizeof(Segment))
        raw_free(core.arena.budget, journal, sizeof(Journal))
        journal = next_journal
    core.journals = core.filled_journals = core.dying_journals = NULL


cdef void teardown_table(Table *table) noexcept nogil:
    cdef uint32_t g, slot, end, units = table.layout.stride >> 3
    cdef uint64_t r
    cdef CowMap *map
    cdef Entry *entry
    # Entries that own nothing vanish with their runs; the checked build still frees them one by one.
    cdef bint walk = CHECKED or table.layout.key_is_blob or table.layout.value_kind != VALUE_FIXED
    for g in range(table.n_maps):
        map = table.maps[g]
        if map == NULL:
            continue
        if walk:
            for r in range(map.n_runs):
                slot = first_of_run(table, map, r, &end)
                while slot < end:
                    entry = entry_at(table.core, slot)
                    if entry.version != FREE_SLOT:
                        payload_drop(table, payload_of(table, entry))
                        if table.layout.key_is_blob:
                            blob_drop(table.core.blobs, <Blob *>entry.key)
                        count(table.core.arena.budget.probe, LIVE_ENTRIES, -1)
                    slot += units
        map.used = 0
        map_clear_storage(table, map)
        raw_free(table.core.arena.budget, map, sizeof(CowMap))
    raw_free(table.core.arena.budget, table.maps, table.n_maps * sizeof(CowMap *))
