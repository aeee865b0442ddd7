"""State tables with their marks and snapshots, one operation at a time.

`StateCore` is what the tables of one backend share: the arena, the version counter, open marks, live
snapshots. `StateTable` maps keys to values, one copy-on-write map per key group. A map state is two tables
with one journal: keys to anchors, and (anchor, map key) to values. Batches are in `kernels.pyx`.

Threads: one call at a time is inside a StateCore, on whichever thread. A SnapshotView may be read and released
on any other thread meanwhile.
"""

import os

import numpy as np

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.float cimport PyFloat_AsDouble
from cpython.long cimport PyLong_AsLongLong
from cpython.object cimport PyObject
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from statebackend._core.arena cimport (
    CHECKED, LARGEST_CLASS, LIVE_ENTRIES, LIVE_SNAPSHOTS, Blob, Budget, address, blob_data, blob_drop, blob_new, block_alloc, block_free,
    count, raw_alloc, raw_free)
from statebackend._core.cow_map cimport (
    FREE_SLOT, PAGE_BUCKETS, PAGE_SHIFT, LAST_VERSION, MAXIMUM_CAPACITY, MINIMUM_CAPACITY, RECORD_COPIED, RECORD_MOVED, RECORD_WRITE, VALUE_ANCHOR, VALUE_BLOB,
    VALUE_FIXED, VALUE_LIST, VALUE_OBJECT, Anchor, BucketTable, Directory, Lane, ListChunk, Segment, Thread, bucket, chain_head,
    absorb_moves, anchor_new, append_thread, before_operation, blob_hash, check_map, drain, drop_chunks,
    entry_at, find_blob, find_int, hash_blob_key, hash_int_key, hash_of, insert, keep_payload, key_object,
    map_clear_storage, map_new, namespace_of, own_entry, payload_drop, payload_of, payload_ref, reclaim_log, remove, see_snapshots,
    segment_for_writing, slot_for_write, thread_of, undo_log, value_of)
from statebackend._core.journal cimport Log, LogChunk, chunk_data, log_append, log_clear
from statebackend._core.key_groups cimport hash_canonical_bytes, hash_canonical_int, pmod_group
from statebackend._core.platform cimport load_ptr, load_u32, prefetch, spin_lock, spin_unlock, store_u32, unlikely
from statebackend.errors import (
    ClosedError, KeyGroupError, MemoryLimitError, SerializationTypeError, UsageError)

cdef extern from "Python.h":
    void Py_INCREF(PyObject *object)
    void Py_DECREF(PyObject *object)
    bint PyLong_CheckExact(object o)
    bint PyFloat_CheckExact(object o)
    bint PyBytes_CheckExact(object o)

cdef enum:
    RECLAIM_PER_OPERATION = 8            # so that no operation pays for a snapshot's or a list's end
    LIST_FIRST_BYTES = 64

_FIXED_CODES = {
    "long": (CODE_INT64, 8), "int": (CODE_INT32, 4), "short": (CODE_INT16, 2), "byte": (CODE_INT8, 1),
    "double": (CODE_DOUBLE, 8), "float": (CODE_FLOAT, 4), "bool": (CODE_BOOL, 1)}
_DTYPES = {CODE_INT64: "<i8", CODE_INT32: "<i4", CODE_INT16: "<i2", CODE_INT8: "i1", CODE_DOUBLE: "<f8",
           CODE_FLOAT: "<f4", CODE_BOOL: "?"}


def _code_and_width(value):
    """Value code, ValueKind and width of a value specification."""
    if value in _FIXED_CODES:
        code, width = _FIXED_CODES[value]
        return code, VALUE_FIXED, width
    if value == "bytes":
        return CODE_BLOB, VALUE_BLOB, 8
    if value == "object":
        return CODE_OBJECT, VALUE_OBJECT, 8
    if isinstance(value, int) and 0 < value <= 65536:
        return CODE_RAW, VALUE_FIXED, value
    raise UsageError("unknown value layout", detail=repr(value),
                     hint="use one of 'long int short byte double float bool bytes object' or a number of bytes")


@cython.final
cdef class Mark:
    """A point to roll back to; made by `StateCore.mark`."""


@cython.final
@cython.no_gc_clear                      # the arena must outlive what is freed into it
cdef class StateCore:
    """The arena, versions, marks and snapshots that all tables of one backend share.

    >>> core = StateCore()
    >>> table = StateTable(core, key="int", value="long", max_parallelism=4)
    >>> table.put(1, 10)
    >>> mark = core.mark()
    >>> table.put(1, 11); table.put(2, 20)
    >>> core.rollback(mark)
    >>> table.get(1), table.get(2)
    (10, None)
    """

    def __cinit__(self, max_bytes=0, seed=None):
        memset(&self.core, 0, sizeof(Core))
        self.arena = Arena()
        self.arena.set_limit(max_bytes)
        self.core.arena = &self.arena.core
        self.core.blobs = &self.arena.blobs
        self.core.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.open_marks = []

    def __dealloc__(self):
        teardown(&self.core)

    def close(self):
        """Drop all state; every later call raises. Live snapshots stay readable until they are released."""
        cdef Mark mark
        if self.closed:
            return
        self.enter()
        self.closed = True
        for mark in self.open_marks:
            mark.is_open = False
        self.open_marks = []
        self.core.journal_version = 0
        if self.core.newest == NULL:
            teardown(&self.core)
        self.leave()

    cdef int enter(self) except -1:
        if unlikely(self.closed):
            raise ClosedError("the backend is closed", hint="create a new backend and restore into it")
        if CHECKED:
            if self.inside:
                raise UsageError("another call is inside this backend", code="OVERLAPPING_CALL",
                                 hint="use a backend from one thread at a time")
            self.inside = 1
        if unlikely(self.core.pending):
            drain(&self.core, RECLAIM_PER_OPERATION)
        return 0

    cdef void leave(self) noexcept:
        self.inside = 0

    cdef int out_of_memory(self) except -1:
        """Raise what fits after an operation answered that there was no memory."""
        if self.arena.budget.refused:
            self.arena.budget.refused = 0
            raise MemoryLimitError(
                "the state would pass its memory limit", detail=f"max_bytes={self.arena.budget.limit}",
                hint="raise max_bytes, expire or clear state, or use the rocksdb backend")
        raise MemoryError("no memory for state; nothing has changed")

    # --- marks ---

    def mark(self):
        """Open a mark. O(1)."""
        cdef Mark mark
        self.enter()
        try:
            self.bump_version()
            self.core.journal_version = self.core.state_version
            mark = Mark.__new__(Mark)
            mark.owner = self
            mark.version = self.core.state_version
            mark.is_open = True
            self.open_marks.append(mark)
            return mark
        finally:
            self.leave()

    def rollback(self, Mark mark not None):
        """Return every table to its contents at `mark`; newer marks become invalid. O(changes since).

        Should memory run out midway, which takes a snapshot in progress, the call can be repeated.
        """
        cdef Journal *journal
        cdef Mark other
        self.enter()
        try:
            self._require_open(mark)
            while self.open_marks[len(self.open_marks) - 1] is not mark:
                other = self.open_marks.pop()
                other.is_open = False
            journal = self.core.journals
            while journal != NULL:
                self.undo_to(journal, mark.version)
                journal = journal.next
            self.bump_version()
            self.core.journal_version = self.core.state_version
            journal = self.core.journals
            while journal != NULL:
                if not self.keep_carried(journal):
                    self.out_of_memory()
                journal = journal.next
        finally:
            self.leave()

    cdef int undo_to(self, Journal *journal, uint32_t version) except -1:
        cdef dict moved = {}
        absorb_moves(&journal.carried, 0, moved)
        while journal.n_segments and journal.segments[journal.n_segments - 1].version >= version:
            if not undo_log(journal, &journal.segments[journal.n_segments - 1].log, 0, &journal.carried, moved):
                self.out_of_memory()
            journal.n_segments -= 1
        return 0

    cdef bint keep_carried(self, Journal *journal) noexcept:
        cdef Log *log
        if journal.carried.records == 0:
            return True
        if not segment_for_writing(&self.core, journal, &log):
            return False
        log_append(self.core.arena, log, &journal.carried)
        return True

    def release(self, Mark mark not None):
        """Give up the possibility to roll back to `mark`. Idempotent. O(1), reclaiming goes on step by step."""
        cdef Journal *journal
        cdef uint32_t keep_from, i, dropped
        if not mark.is_open or mark.owner is not self or self.closed:
            return
        self.enter()
        try:
            mark.is_open = False
            self.open_marks.remove(mark)
            if self.open_marks:
                keep_from = (<Mark>self.open_marks[0]).version
            else:
                keep_from = FREE_SLOT
                self.core.journal_version = 0
            journal = self.core.journals
            while journal != NULL:
                dropped = 0
                while dropped < journal.n_segments and journal.segments[dropped].version < keep_from:
                    discard_log(&self.core, journal, &journal.segments[dropped].log)
                    dropped += 1
                for i in range(dropped, journal.n_segments):
                    journal.segments[i - dropped] = journal.segments[i]
                journal.n_segments -= dropped
                journal = journal.next
        finally:
            self.leave()

    def _require_open(self, Mark mark not None):
        if mark.owner is not self:
            raise UsageError("the mark belongs to another backend")
        if not mark.is_open:
            raise UsageError("the mark is no longer valid", code="STALE_MARK",
                             hint="it was released, or an older mark was rolled back to")

    # --- snapshots ---

    def snapshot(self):
        """A consistent view of all tables at this moment. O(tables); maps are shared, not copied."""
        cdef SnapshotView view
        cdef Snapshot *snapshot
        self.enter()
        try:
            view = SnapshotView.__new__(SnapshotView)
            snapshot = <Snapshot *>raw_alloc(&self.arena.budget, sizeof(Snapshot))
            if snapshot == NULL:
                self.out_of_memory()
            memset(snapshot, 0, sizeof(Snapshot))
            self.bump_version()
            snapshot.version = self.core.state_version
            spin_lock(&self.core.directory_lock)
            snapshot.older = self.core.newest
            if self.core.newest != NULL:
                self.core.newest.newer = snapshot
            else:
                self.core.oldest = snapshot
            self.core.newest = snapshot
            self.core.highest_required_snapshot_version = snapshot.version
            spin_unlock(&self.core.directory_lock)
            if self.core.journal_version:
                # A new segment, so that the journal's version stays above every snapshot's.
                self.bump_version()
                self.core.journal_version = self.core.state_version
            view.owner = self
            view.snapshot = snapshot
            count(self.arena.budget.probe, LIVE_SNAPSHOTS, 1)
            return view
        finally:
            self.leave()

    def advance(self, budget=1000):
        """Reclaim up to about `budget` entries, pages and records that nobody needs; says whether more are left."""
        self.enter()
        try:
            drain(&self.core, budget)
            return bool(self.core.pending)
        finally:
            self.leave()

    # --- versions ---

    cdef int bump_version(self) except -1:
        if unlikely(self.core.state_version >= LAST_VERSION):
            self.renumber()
        self.core.state_version += 1
        return 0

    cdef int renumber(self) except -1:
        """Begin counting versions anew, keeping every comparison that matters. O(entries), once in 2^32 marks."""
        cdef Snapshot *snapshot = self.core.oldest
        cdef Journal *journal = self.core.journals
        cdef Table *table = self.core.tables
        cdef Mark mark
        cdef uint32_t i
        cdef object thresholds = {self.core.journal_version} if self.core.journal_version else set()
        while snapshot != NULL:
            thresholds.add(snapshot.version)
            snapshot = snapshot.newer
        for mark in self.open_marks:
            thresholds.add(mark.version)
        while journal != NULL:
            for i in range(journal.n_segments):
                thresholds.add(journal.segments[i].version)
            journal = journal.next
        old = np.array(sorted(thresholds), dtype=np.uint32)
        cdef uint32_t[::1] view = old if len(old) else np.zeros(1, np.uint32)
        cdef uint32_t n = len(old)
        spin_lock(&self.core.directory_lock)
        while table != NULL:
            renumber_table(table, &view[0], n)
            table = table.next
        snapshot = self.core.oldest
        while snapshot != NULL:
            snapshot.version = renumbered(snapshot.version, &view[0], n)
            snapshot = snapshot.newer
        if self.core.newest != NULL:
            self.core.highest_required_snapshot_version = self.core.newest.version
        spin_unlock(&self.core.directory_lock)
        journal = self.core.journals
        while journal != NULL:
            for i in range(journal.n_segments):
                journal.segments[i].version = renumbered(journal.segments[i].version, &view[0], n)
            journal = journal.next
        for mark in self.open_marks:
            mark.version = renumbered(mark.version, &view[0], n)
        if self.core.journal_version:
            self.core.journal_version = renumbered(self.core.journal_version, &view[0], n)
        self.core.state_version = n
        return 0

    # --- inspection ---

    def metrics(self):
        """Versions, marks, snapshots, memory and copies so far, as a dict."""
        cdef Snapshot *snapshot = self.core.oldest
        cdef Table *table = self.core.tables
        cdef uint64_t entries = 0, pages = 0, moved = 0
        live = []
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

    def _set_state_version(self, version):
        """Let the version counter stand at `version`; for tests of renumbering."""
        if version < self.core.state_version:
            raise UsageError("versions only grow")
        self.core.state_version = version

    def _check(self):
        """Verify the arena; tables have `_check` of their own."""
        self.arena._check()


cdef inline uint32_t renumbered(uint32_t version, uint32_t *old, uint32_t n) noexcept nogil:
    """How many of the sorted thresholds are at or below `version`."""
    cdef uint32_t i = 0
    while i < n and old[i] <= version:
        i += 1
    return i


cdef void renumber_table(Table *table, uint32_t *old, uint32_t n) noexcept nogil:
    cdef uint32_t g, i, units = table.layout.stride >> 3, slot, end
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
            slot = <uint32_t>(map.runs[r] >> 8)
            end = slot + <uint32_t>((<uint64_t>1 << (map.runs[r] & 0xFF)) // table.layout.stride) * units
            if map.fresh_end == end:
                end = map.fresh
            while slot < end:
                entry = entry_at(table.core, slot)
                if entry.version != FREE_SLOT:
                    entry.version = renumbered(entry.version, old, n)
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


cdef void discard_log(Core *core, Journal *journal, Log *log) noexcept nogil:
    """Leave records that no rollback can reach to `drain`; those that hold nothing go at once."""
    if log.held == 0:
        log_clear(core.arena, log)
    elif log.records:
        log_append(core.arena, &journal.dead, log)
        core.pending = 1


cdef void teardown(Core *core) noexcept nogil:
    """Free everything that the tables of a backend own. No snapshot is read any more."""
    cdef Snapshot *snapshot = core.oldest
    cdef Journal *journal = core.journals
    cdef Journal *next_journal
    cdef Table *table = core.tables
    cdef Table *next_table
    cdef int64_t all_of_it
    cdef uint32_t i
    while snapshot != NULL:
        snapshot.released = 1
        snapshot = snapshot.newer
    while journal != NULL:
        for i in range(journal.n_segments):
            log_append(core.arena, &journal.dead, &journal.segments[i].log)
        journal.n_segments = 0
        log_append(core.arena, &journal.dead, &journal.carried)
        journal = journal.next
    core.pending = 1
    while core.pending:
        drain(core, 1 << 40)
        if core.pending and core.garbage.records == 0 and core.dead_directories == NULL:
            break
    while table != NULL:
        next_table = table.next
        teardown_table(table)
        while core.garbage.records:
            drain(core, 1 << 40)
        raw_free(core.arena.budget, table, sizeof(Table))
        core.tables = table = next_table
    journal = core.journals
    while journal != NULL:
        next_journal = journal.next
        raw_free(core.arena.budget, journal.segments, journal.capacity * sizeof(Segment))
        raw_free(core.arena.budget, journal, sizeof(Journal))
        journal = next_journal
    core.journals = NULL


cdef void teardown_table(Table *table) noexcept nogil:
    cdef uint32_t g, slot, end, units = table.layout.stride >> 3
    cdef uint64_t r
    cdef CowMap *map
    cdef Entry *entry
    # Entries that own nothing vanish with their runs; the checked build frees them one by one all the same.
    cdef bint walk = CHECKED or table.layout.key_is_blob or table.layout.value_kind != VALUE_FIXED
    for g in range(table.n_maps):
        map = table.maps[g]
        if map == NULL:
            continue
        if walk:
            for r in range(map.n_runs):
                slot = <uint32_t>(map.runs[r] >> 8)
                end = slot + <uint32_t>((<uint64_t>1 << (map.runs[r] & 0xFF)) // table.layout.stride) * units
                if map.fresh_end == end:
                    end = map.fresh
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


@cython.final
cdef class StateTable:
    """One state: keys to values, a copy-on-write map per key group.

    `key` is "int" (64 bits) or "bytes"; `value` one of "long int short byte double float bool bytes object",
    a number of raw bytes, or ("list", one of these). `plan` tells how key groups are computed from keys.

    >>> table = StateTable(StateCore(), key="bytes", value=("list", "int"))
    >>> table.append(b"a", 1); table.append(b"a", 2)
    >>> table.get(b"a"), table.get(b"b")
    ([1, 2], None)
    """

    def __cinit__(self, StateCore owner not None, *, key="int", value="long", max_parallelism=128,
                  key_group_range=None, namespaces=False, timestamps=False, HashPlan plan=None,
                  initial_capacity=64, hash_mask=0xFFFFFFFF, copy_value=None, StateTable anchors=None,
                  bint is_anchor_table=False):
        cdef Table *table
        first, last = (0, max_parallelism - 1) if key_group_range is None else key_group_range
        if not 1 <= max_parallelism <= 32768:
            raise UsageError("max_parallelism must be from 1 to 32768", detail=f"{max_parallelism}")
        if not 0 <= first <= last < max_parallelism:
            raise KeyGroupError("the key-group range does not lie in max_parallelism",
                                detail=f"{first}..{last} of {max_parallelism}")
        if key not in ("int", "bytes"):
            raise UsageError("unknown key layout", detail=repr(key), hint="use 'int' or 'bytes'")
        if (initial_capacity & (initial_capacity - 1)
                or not MINIMUM_CAPACITY <= initial_capacity <= MAXIMUM_CAPACITY):
            raise UsageError("initial_capacity must be a power of two", detail=f"{initial_capacity}")
        if owner.closed:
            raise ClosedError("the backend is closed")
        self.owner = owner
        self.max_parallelism = max_parallelism
        self.copy_value = copy_value
        self.anchors = anchors
        self.plan = plan if plan is not None else HashPlan("int64" if key == "int" else "bytes")
        if self.plan.is_int != (key == "int"):
            raise UsageError("the hash plan does not fit the key layout", detail=f"key={key!r}")
        table = <Table *>raw_alloc(&owner.arena.budget, sizeof(Table))
        if table == NULL:
            owner.out_of_memory()
        memset(table, 0, sizeof(Table))
        try:
            self._lay_out(table, key, value, namespaces or anchors is not None, timestamps, is_anchor_table)
            table.core = &owner.core
            table.lane.core = &owner.core
            table.seed = owner.core.seed
            table.hash_mask = hash_mask
            table.initial_capacity = initial_capacity
            table.journal_every_write = copy_value is not None
            table.first_group = first
            table.n_maps = last - first + 1
            table.maps = <CowMap **>raw_alloc(&owner.arena.budget, table.n_maps * sizeof(CowMap *))
            if table.maps == NULL:
                owner.out_of_memory()
            memset(table.maps, 0, table.n_maps * sizeof(CowMap *))
            if anchors is not None:
                table.anchors = anchors.table
                table.journal = anchors.table.journal
                table.journal_index = 1
            else:
                table.journal = <Journal *>raw_alloc(&owner.arena.budget, sizeof(Journal))
                if table.journal == NULL:
                    raw_free(&owner.arena.budget, table.maps, table.n_maps * sizeof(CowMap *))
                    owner.out_of_memory()
                memset(table.journal, 0, sizeof(Journal))
                table.journal.next = owner.core.journals
                owner.core.journals = table.journal
        except BaseException:
            raw_free(&owner.arena.budget, table, sizeof(Table))
            raise
        table.journal.tables[table.journal_index] = table
        table.next = owner.core.tables
        owner.core.tables = table
        self.table = table

    cdef int _lay_out(self, Table *table, key, value, namespaces, timestamps, bint is_anchor_table) except -1:
        """Offsets of an entry's parts; see `Layout`."""
        cdef uint32_t at = 16, width, align
        if is_anchor_table:
            self.value_code, kind, width = CODE_ANCHOR, VALUE_ANCHOR, 4
        elif isinstance(value, tuple):
            if len(value) != 2 or value[0] != "list":
                raise UsageError("unknown value layout", detail=repr(value))
            self.value_code, kind, width = CODE_LIST, VALUE_LIST, sizeof(ListHead)
            self.element_code, element_kind, element_width = _code_and_width(value[1])
            table.element_kind = element_kind
            table.element_value_width = element_width
            table.element_width = element_width + (8 if timestamps else 0)
        else:
            self.value_code, kind, width = _code_and_width(value)
        table.layout.value_kind = kind
        table.layout.value_width = width
        table.layout.key_is_blob = key == "bytes"
        table.layout.has_timestamp = bool(timestamps) and kind != VALUE_LIST
        table.element_has_timestamp = bool(timestamps) and kind == VALUE_LIST
        if key == "bytes":
            at += 4
        if namespaces:
            table.layout.off_namespace = at
            at += 4
        if self.anchors is not None:
            at = (at + 7) & ~7u
            table.layout.off_thread = at
            at += sizeof(Thread)
        align = 8 if timestamps or width >= 8 else 4 if width >= 4 else 1
        at = (at + align - 1) & ~(align - 1)
        table.layout.off_payload = at
        if table.layout.has_timestamp:
            at += 8
        table.layout.off_value = at
        at += width
        table.layout.payload_width = at - table.layout.off_payload
        table.layout.stride = (at + 7) & ~7u
        return 0

    # --- keys and values ---

    cdef int split_key(self, object key, uint32_t ns, CoreKey *out) except -1:
        """Convert and hash a key. Raises before anything changes."""
        cdef Table *table = self.table
        cdef int32_t spark
        out.namespace = ns
        out.data = NULL
        out.length = 0
        out.number = 0
        if table.layout.key_is_blob:
            if not PyBytes_CheckExact(key):
                raise SerializationTypeError("a key of this table is bytes", detail=f"got {type(key).__name__}")
            out.data = PyBytes_AS_STRING(key)
            out.length = PyBytes_GET_SIZE(key)
            out.hash = hash_blob_key(table, out.data, out.length, ns)
            spark = hash_canonical_bytes(&self.plan.program, <const uint8_t *>out.data, out.length)
        else:
            if not PyLong_CheckExact(key):
                raise SerializationTypeError("a key of this table is an int", detail=f"got {type(key).__name__}")
            out.number = PyLong_AsLongLong(key)
            out.hash = hash_int_key(table, out.number, ns)
            spark = hash_canonical_int(&self.plan.program, out.number)
        out.group = pmod_group(spark, self.max_parallelism)
        if unlikely(out.group - table.first_group >= table.n_maps):
            raise KeyGroupError(
                "the key belongs to a key group that this backend does not own",
                detail=f"key group {out.group}, own {table.first_group}..{table.first_group + table.n_maps - 1}")
        return 0

    cdef CowMap *map_for(self, uint32_t group) except NULL:
        cdef CowMap *map = self.table.maps[group - self.table.first_group]
        if unlikely(map == NULL):
            map = map_new(self.table, group)
            if map == NULL:
                self.owner.out_of_memory()
        return map

    cdef CowMap *map_or_null(self, uint32_t group) noexcept:
        return self.table.maps[group - self.table.first_group]

    cdef uint32_t find(self, CowMap *map, CoreKey *key) noexcept:
        if self.table.layout.key_is_blob:
            return find_blob(self.table, map, key.data, key.length, key.namespace, key.hash)
        return find_int(self.table, map, key.number, key.namespace, key.hash)

    cdef object load_value(self, char *value, int code, uint32_t width):
        """A Python object for a stored value. Lists and anchors are not values."""
        cdef Blob *blob
        if code == CODE_INT64:
            return (<int64_t *>value)[0]
        if code == CODE_DOUBLE:
            return (<double *>value)[0]
        if code == CODE_INT32:
            return (<int32_t *>value)[0]
        if code == CODE_BLOB:
            blob = (<Blob **>value)[0]
            return PyBytes_FromStringAndSize(blob_data(blob), blob.length)
        if code == CODE_OBJECT:
            return <object>(<PyObject **>value)[0]
        if code == CODE_INT16:
            return (<int16_t *>value)[0]
        if code == CODE_INT8:
            return (<int8_t *>value)[0]
        if code == CODE_FLOAT:
            return (<float *>value)[0]
        if code == CODE_BOOL:
            return value[0] != 0
        return PyBytes_FromStringAndSize(value, width)

    cdef int store_value(self, object value, char *out, int code, uint32_t width) except -1:
        """Write a value's stored form to `out`; a blob or a reference in it is new and the caller's."""
        cdef int64_t number
        cdef Blob *blob
        if code == CODE_DOUBLE or code == CODE_FLOAT:
            if type(value) is not float:
                raise SerializationTypeError("a value of this table is a float",
                                             detail=f"got {type(value).__name__}")
            if code == CODE_DOUBLE:
                (<double *>out)[0] = PyFloat_AsDouble(value)
            else:
                (<float *>out)[0] = <float>PyFloat_AsDouble(value)
        elif code == CODE_BLOB:
            if not PyBytes_CheckExact(value):
                raise SerializationTypeError("a value of this table is bytes",
                                             detail=f"got {type(value).__name__}")
            if PyBytes_GET_SIZE(value) > 0x7FFFFFFF:
                raise OverflowError("a value is larger than 2 GB")
            blob = blob_new(&self.owner.arena.blobs, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
            if blob == NULL:
                self.owner.out_of_memory()
            (<Blob **>out)[0] = blob
        elif code == CODE_OBJECT:
            Py_INCREF(<PyObject *>value)
            (<PyObject **>out)[0] = <PyObject *>value
        elif code == CODE_BOOL:
            if type(value) is not bool:
                raise SerializationTypeError("a value of this table is a bool",
                                             detail=f"got {type(value).__name__}")
            out[0] = value is True
        elif code == CODE_RAW:
            if not PyBytes_CheckExact(value) or PyBytes_GET_SIZE(value) != width:
                raise SerializationTypeError(f"a value of this table is {width} bytes",
                                             detail=f"got {type(value).__name__}")
            memcpy(out, PyBytes_AS_STRING(value), width)
        else:
            if not PyLong_CheckExact(value):
                raise SerializationTypeError("a value of this table is an int",
                                             detail=f"got {type(value).__name__}")
            number = PyLong_AsLongLong(value)
            if code == CODE_INT64:
                (<int64_t *>out)[0] = number
            elif code == CODE_INT32:
                if number != <int32_t>number:
                    raise OverflowError("the value does not fit in 32 bits")
                (<int32_t *>out)[0] = <int32_t>number
            elif code == CODE_INT16:
                if number != <int16_t>number:
                    raise OverflowError("the value does not fit in 16 bits")
                (<int16_t *>out)[0] = <int16_t>number
            else:
                if number != <int8_t>number:
                    raise OverflowError("the value does not fit in 8 bits")
                (<int8_t *>out)[0] = <int8_t>number
        return 0

    cdef void drop_stored(self, char *value, int code) noexcept:
        """Drop what `store_value` made when it could not be put in."""
        if code == CODE_BLOB:
            blob_drop(&self.owner.arena.blobs, (<Blob **>value)[0])
        elif code == CODE_OBJECT:
            Py_DECREF((<PyObject **>value)[0])

    # --- one key at a time ---

    def put(self, key, value, uint32_t namespace=0, int64_t timestamp=0):
        """Set the value of a key. O(1) expected."""
        self._put(key, value, namespace, timestamp, False)

    def put_and_get_old(self, key, value, uint32_t namespace=0, int64_t timestamp=0):
        """Set the value of a key and return what was there, or None. O(1) expected."""
        return self._put(key, value, namespace, timestamp, True)

    cdef object _put(self, key, value, uint32_t namespace, int64_t timestamp, bint want_old):
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        cdef char stored[16]
        cdef char *source = stored
        cdef Table *table
        cdef bint kept = False
        cdef bytes raw = None
        cdef object old = None
        self.owner.enter()
        try:
            table = self.table
            if self.value_code >= CODE_LIST:
                raise UsageError("this table holds lists or anchors", hint="use append")
            self.split_key(key, namespace, &k)
            if self.value_code == CODE_RAW:
                raw = value if PyBytes_CheckExact(value) else None
                if raw is None or len(raw) != table.layout.value_width:
                    raise SerializationTypeError(f"a value of this table is {table.layout.value_width} bytes",
                                                 detail=f"got {type(value).__name__}")
                source = PyBytes_AS_STRING(raw)
            else:
                self.store_value(value, stored, self.value_code, table.layout.value_width)
            slot = 0
            try:
                map = self.map_for(k.group)
                if before_operation(&table.lane, table, map):
                    slot = self.find(map, &k)
                    if slot:
                        if want_old:
                            old = self.load_value(value_of(table, entry_at(table.core, slot)), self.value_code,
                                                  table.layout.value_width)
                        slot = slot_for_write(&table.lane, table, map, slot, k.hash, &kept)
                        if slot and not kept:
                            payload_drop(table, payload_of(table, entry_at(table.core, slot)))
                    else:
                        slot = insert(&table.lane, table, map, k.number, k.data, k.length, k.namespace, k.hash)
                if slot == 0:
                    self.owner.out_of_memory()
            except BaseException:
                self.drop_stored(stored, self.value_code)
                raise
            self._fill(slot, source, timestamp)
            return old
        finally:
            self.owner.leave()

    cdef void _fill(self, uint32_t slot, char *value, int64_t timestamp) noexcept:
        cdef char *payload = payload_of(self.table, entry_at(self.table.core, slot))
        if self.table.layout.has_timestamp:
            (<int64_t *>payload)[0] = timestamp
            payload += 8
        memcpy(payload, value, self.table.layout.value_width)

    def get(self, key, uint32_t namespace=0):
        """The value of a key, or None. A list comes as a list of its elements. O(1) expected.

        An object of a table with `copy_value` is copied at its first read since the newest mark or snapshot,
        because its reader may change it in place.
        """
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        self.owner.enter()
        try:
            slot = self._locate(key, namespace, &k, &map)
            if slot == 0:
                return None
            if self.value_code == CODE_OBJECT and self.copy_value is not None:
                slot = self._unshare(map, slot, k.hash)
            return self._load(slot)
        finally:
            self.owner.leave()

    cdef uint32_t _locate(self, key, uint32_t namespace, CoreKey *k, CowMap **map) except? 0:
        """The slot of a key, 0 if it is absent; does its share of a rehash."""
        self.split_key(key, namespace, k)
        map[0] = self.map_or_null(k.group)
        if map[0] == NULL:
            return 0
        if not before_operation(&self.table.lane, self.table, map[0]):
            self.owner.out_of_memory()
        return self.find(map[0], k)

    cdef object _load(self, uint32_t slot):
        return self._load_at(entry_at(self.table.core, slot))

    cdef object _load_at(self, Entry *entry):
        cdef char *value = value_of(self.table, entry)
        if self.value_code == CODE_LIST:
            return self._list_elements(<ListHead *>value)
        if self.value_code == CODE_ANCHOR:
            return (<uint32_t *>value)[0]
        return self.load_value(value, self.value_code, self.table.layout.value_width)

    cdef uint32_t _unshare(self, CowMap *map, uint32_t slot, uint32_t hash) except 0:
        """Give the live map its own copy of an object that a snapshot or a mark still needs as it is."""
        cdef Table *table = self.table
        cdef Entry *entry = entry_at(table.core, slot)
        cdef bint kept = False
        cdef object fresh
        if (entry.version >= table.core.highest_required_snapshot_version
                and entry.version >= table.core.journal_version):
            return slot
        fresh = self.copy_value(<object>(<PyObject **>value_of(table, entry))[0])
        # The copy may have run any code; the entry is looked at anew, under its own slot.
        if entry.version < table.core.highest_required_snapshot_version:
            slot = own_entry(&table.lane, table, map, slot, hash)
            if slot == 0:
                self.owner.out_of_memory()
            entry = entry_at(table.core, slot)
        if entry.version < table.core.journal_version:
            if not keep_payload(&table.lane, table, map, slot, RECORD_COPIED, &kept):
                self.owner.out_of_memory()
        if not kept:
            payload_drop(table, payload_of(table, entry))
        Py_INCREF(<PyObject *>fresh)
        (<PyObject **>value_of(table, entry))[0] = <PyObject *>fresh
        entry.version = table.core.state_version
        return slot

    def contains(self, key, uint32_t namespace=0):
        """Whether a key is present. Copies nothing. O(1) expected."""
        cdef CoreKey k
        cdef CowMap *map
        self.owner.enter()
        try:
            return self._locate(key, namespace, &k, &map) != 0
        finally:
            self.owner.leave()

    def timestamp(self, key, uint32_t namespace=0):
        """The timestamp stored with a key, or None."""
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        self.owner.enter()
        try:
            slot = self._locate(key, namespace, &k, &map)
            if slot == 0 or not self.table.layout.has_timestamp:
                return None
            return (<int64_t *>payload_of(self.table, entry_at(self.table.core, slot)))[0]
        finally:
            self.owner.leave()

    def remove(self, key, uint32_t namespace=0):
        """Remove a key; says whether it was there. O(1) expected."""
        return self._remove(key, namespace, False)[0]

    def remove_and_get_old(self, key, uint32_t namespace=0):
        """Remove a key and return its value, or None. O(1) expected."""
        return self._remove(key, namespace, True)[1]

    cdef tuple _remove(self, key, uint32_t namespace, bint want_old):
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        cdef object old = None
        self.owner.enter()
        try:
            slot = self._locate(key, namespace, &k, &map)
            if slot == 0:
                return False, None
            if want_old:
                if self.value_code == CODE_OBJECT and self.copy_value is not None:
                    slot = self._unshare(map, slot, k.hash)
                old = self._load(slot)
            if not remove(&self.table.lane, self.table, map, slot, k.hash):
                self.owner.out_of_memory()
            return True, old
        finally:
            self.owner.leave()

    def transform(self, key, argument, function, uint32_t namespace=0, int64_t timestamp=0):
        """Set the value to `function(old or None, argument)`: one look-up for old and new. O(1) expected."""
        old = self.get(key, namespace)
        new = function(old, argument)
        self.put(key, new, namespace, timestamp)
        return new

    # --- lists ---

    def append(self, key, element, uint32_t namespace=0, int64_t timestamp=0):
        """Append an element to the list of a key. O(1) amortised, whatever the length, under a mark or snapshot too."""
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        cdef char[:] raw
        cdef char stored[16]
        cdef char *source = stored
        cdef Table *table
        self.owner.enter()
        try:
            table = self.table
            if self.value_code != CODE_LIST:
                raise UsageError("this table does not hold lists", hint="use put")
            self.split_key(key, namespace, &k)
            if self.element_code == CODE_RAW:
                if not PyBytes_CheckExact(element) or len(element) != table.element_value_width:
                    raise SerializationTypeError(f"an element of this table is {table.element_value_width} bytes",
                                                 detail=f"got {type(element).__name__}")
                source = PyBytes_AS_STRING(element)
            else:
                self.store_value(element, stored, self.element_code, table.element_value_width)
            try:
                map = self.map_for(k.group)
                if not before_operation(&table.lane, table, map):
                    self.owner.out_of_memory()
                slot = self.find(map, &k)
                if not list_append(&table.lane, table, map, slot, &k, source, timestamp):
                    self.owner.out_of_memory()
            except BaseException:
                self.drop_stored(stored, self.element_code)
                raise
        finally:
            self.owner.leave()

    def length(self, key, uint32_t namespace=0):
        """The number of elements of a key's list; 0 when absent. O(1) expected."""
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        self.owner.enter()
        try:
            slot = self._locate(key, namespace, &k, &map)
            if slot == 0:
                return 0
            return (<ListHead *>value_of(self.table, entry_at(self.table.core, slot))).length
        finally:
            self.owner.leave()

    cdef list _list_elements(self, ListHead *head):
        cdef list out = []
        cdef ListCursor cursor
        cdef char *element
        cdef uint32_t skip = 8 if self.table.element_has_timestamp else 0
        if not cursor_open(&self.owner.arena.budget, head, &cursor):
            self.owner.out_of_memory()
        try:
            while True:
                element = cursor_next(self.table, &cursor)
                if element == NULL:
                    return out
                out.append(self.load_value(element + skip, self.element_code, self.table.element_value_width))
        finally:
            cursor_close(&self.owner.arena.budget, &cursor)

    # --- iteration and inspection ---

    def __len__(self):
        return self.table.lane.entries

    def __iter__(self):
        """All live entries as StateEntry, in no order; fails at the next step after a structural change."""
        return StateEntryIterator(self)

    def visitor(self, slots_per_step=1024):
        """An incremental visitor: an iterator over lists of entries that tolerates changes in between.

        Each step looks at no more than `slots_per_step` entry slots. Entries added or moved meanwhile may
        be skipped or come twice.
        """
        return IncrementalVisitor(self, slots_per_step)

    def group_of(self, key):
        """The key group of a key."""
        cdef CoreKey k
        self.split_key(key, 0, &k)
        return k.group

    def entry(self, key, uint32_t namespace=0):
        """The live StateEntry of a key, or None; changes nothing, not even a rehash in progress."""
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        self.split_key(key, namespace, &k)
        map = self.map_or_null(k.group)
        slot = self.find(map, &k) if map != NULL else 0
        return new_entry(self, slot) if slot else None

    def chain(self, key, uint32_t namespace=0):
        """The live entries in the bucket of a key, head first. For tests."""
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        self.split_key(key, namespace, &k)
        map = self.map_or_null(k.group)
        out = []
        slot = chain_head(self.table.core, map, k.hash) if map != NULL else 0
        while slot:
            out.append(new_entry(self, slot))
            slot = entry_at(self.table.core, slot).next
        return out

    def map_info(self, uint32_t group):
        """Sizes, capacities and rehash progress of the map of a key group; None if it was never used."""
        cdef CowMap *map = self.map_or_null(group)
        cdef Directory *directory
        cdef uint32_t directories = 0
        if map == NULL:
            return None
        directory = map.directories
        while directory != NULL:
            directories += 1
            directory = directory.older
        return {
            "size": map.primary.size + map.secondary.size,
            "primary_size": map.primary.size, "secondary_size": map.secondary.size,
            "primary_capacity": map.primary.capacity, "secondary_capacity": map.secondary.capacity,
            "rehash_index": map.rehash_index, "threshold": map.threshold, "used_slots": map.used,
            "run_bytes": map.run_bytes, "seen_version": map.seen_version, "directories": directories,
            "modifications": map.modifications,
        }

    def metrics(self):
        """Entries, copies made for snapshots and rehash progress of this state, summed over its key groups."""
        cdef uint32_t g
        cdef uint64_t rehashing = 0, maps = 0, used = 0, run_bytes = 0, buckets = 0
        cdef CowMap *map
        for g in range(self.table.n_maps):
            map = self.table.maps[g]
            if map != NULL:
                maps += 1
                used += map.used
                run_bytes += map.run_bytes
                rehashing += map.secondary.capacity != 0
                buckets += map.primary.capacity + map.secondary.capacity
        return {
            "entries": self.table.lane.entries, "maps": maps, "used_slots": used, "entry_bytes": run_bytes,
            "buckets": buckets, "rehashing_maps": rehashing, "stride": self.table.layout.stride,
            "copied_entries": self.table.lane.copied_entries, "copied_pages": self.table.lane.copied_pages,
            "rehashed_entries": self.table.lane.moved_entries,
        }

    def _check(self):
        """Verify every invariant of every map; AssertionError names what is broken. O(entries)."""
        cdef uint32_t g
        cdef CowMap *map
        total = 0
        for g in range(self.table.n_maps):
            map = self.table.maps[g]
            if map != NULL:
                total += check_map(self.table, map)
        assert total == self.table.lane.entries, f"{total} entries, counted {self.table.lane.entries}"

    def dirty(self, Mark mark not None):
        """What was inserted, written or removed since `mark`: a set of (key, namespace). O(changes)."""
        self.owner._require_open(mark)
        found = set()
        self.owner.enter()
        try:
            collect_dirty(self.table, mark.version, found)
        finally:
            self.owner.leave()
        return found


cdef int collect_dirty(Table *table, uint32_t version, set found) except -1:
    cdef Journal *journal = table.journal
    cdef uint32_t i, at, width
    cdef LogChunk *chunk
    cdef uint64_t last
    cdef int op
    cdef Table *owner
    cdef Entry *entry
    for i in range(journal.n_segments):
        if journal.segments[i].version < version:
            continue
        chunk = journal.segments[i].log.last
        while chunk != NULL:
            at = chunk.used
            while at:
                last = (<uint64_t *>(chunk_data(chunk) + at - 8))[0]
                op = <int>(last >> 56)
                owner = journal.tables[(last >> 48) & 0xFF]
                width = 8
                if op == RECORD_WRITE or op == RECORD_COPIED:
                    width += (owner.layout.payload_width + 7) & ~7u
                elif op == RECORD_MOVED:
                    width = 16
                if owner == table and op != RECORD_MOVED and op != RECORD_COPIED:
                    # Also a slot that a clone replaced or that was removed still holds its key.
                    entry = entry_at(table.core, <uint32_t>last)
                    found.add((key_object(table, entry), namespace_of(table, entry)))
                at -= width
            chunk = chunk.prev
    return 0


# --- list chunks ---------------------------------------------------------------------------------------

cdef uint32_t chunk_capacity(Table *table, ListChunk *previous) noexcept nogil:
    """Chunks double until they are as large as the largest slab block."""
    cdef uint64_t bytes = LIST_FIRST_BYTES
    if previous != NULL:
        bytes = 2 * (sizeof(ListChunk) + <uint64_t>previous.capacity * table.element_width)
    if bytes > LARGEST_CLASS:
        bytes = LARGEST_CLASS
    if bytes < sizeof(ListChunk) + table.element_width:
        return 1
    return <uint32_t>((bytes - sizeof(ListChunk)) // table.element_width)


cdef bint list_append(Lane *lane, Table *table, CowMap *map, uint32_t slot, CoreKey *k, char *value,
                      int64_t timestamp) noexcept nogil:
    """Append to the list at `slot`, or make one if `slot` is 0; False without memory.

    A chunk is filled in place only by the list that reached its end; a list that was rolled back to before
    that begins a new chunk, so that snapshots of what came after stay what they were.
    """
    cdef ListHead *head = NULL
    cdef ListChunk *tail = NULL
    cdef ListChunk *fresh = NULL
    cdef uint32_t capacity, tail_used = 0
    cdef char *element
    cdef bint kept = False
    if slot:
        head = <ListHead *>value_of(table, entry_at(lane.core, slot))
        tail = head.tail
        tail_used = head.tail_used
    if tail == NULL or tail.used != tail_used or tail.used == tail.capacity:
        capacity = chunk_capacity(table, tail)
        fresh = <ListChunk *>block_alloc(lane.core.blobs,
                                         sizeof(ListChunk) + <uint64_t>capacity * table.element_width)
        if fresh == NULL:
            return False
        fresh.prev = tail
        fresh.prev_used = tail_used
        fresh.refs = 1
        fresh.used = 0
        fresh.capacity = capacity
    if slot:
        slot = slot_for_write(lane, table, map, slot, k.hash, &kept)
    else:
        slot = insert(lane, table, map, k.number, k.data, k.length, k.namespace, k.hash)
    if slot == 0:
        if fresh != NULL:
            block_free(lane.core.blobs, fresh,
                       sizeof(ListChunk) + <uint64_t>fresh.capacity * table.element_width)
        return False
    head = <ListHead *>value_of(table, entry_at(lane.core, slot))
    if kept and tail != NULL:
        tail.refs += 1                   # the journal's payload names it as well
    if fresh != NULL:
        head.tail = fresh                # and `fresh.prev` takes over the head's reference
        head.tail_used = 0
        tail = fresh
    element = <char *>tail + sizeof(ListChunk) + <uint64_t>tail.used * table.element_width
    if table.element_has_timestamp:
        (<int64_t *>element)[0] = timestamp
        element += 8
    memcpy(element, value, table.element_value_width)
    tail.used += 1
    head.tail_used += 1
    head.length += 1
    return True


cdef struct ListCursor:
    # Walks a list from its first element: the chain of chunks leads backwards, so it is noted down first.
    ListChunk **chunks
    uint32_t *used
    uint64_t n
    uint64_t at
    uint32_t element


cdef bint cursor_open(Budget *budget, ListHead *head, ListCursor *cursor) noexcept nogil:
    cdef ListChunk *chunk = head.tail
    cdef uint32_t used = head.tail_used
    cdef uint64_t i
    cursor.n = 0
    cursor.at = 0
    cursor.element = 0
    while chunk != NULL:
        cursor.n += 1
        chunk = chunk.prev
    cursor.chunks = <ListChunk **>raw_alloc(budget, cursor.n * 12)
    if cursor.chunks == NULL:
        return False
    cursor.used = <uint32_t *>(cursor.chunks + cursor.n)
    chunk = head.tail
    i = cursor.n
    while chunk != NULL:
        i -= 1
        cursor.chunks[i] = chunk
        cursor.used[i] = used
        used = chunk.prev_used
        chunk = chunk.prev
    return True


cdef char *cursor_next(Table *table, ListCursor *cursor) noexcept nogil:
    cdef char *element
    while cursor.at < cursor.n:
        if cursor.element < cursor.used[cursor.at]:
            element = (<char *>cursor.chunks[cursor.at] + sizeof(ListChunk)
                       + <uint64_t>cursor.element * table.element_width)
            cursor.element += 1
            return element
        cursor.at += 1
        cursor.element = 0
    return NULL


cdef void cursor_close(Budget *budget, ListCursor *cursor) noexcept nogil:
    raw_free(budget, cursor.chunks, cursor.n * 12)


# --- views of entries ------------------------------------------------------------------------------------

@cython.final
cdef class StateEntry:
    """One entry slot, seen from Python: for iteration, inspection and tests. Valid until the next change."""
    cdef StateTable owner
    cdef readonly uint32_t slot

    def __init__(self):
        raise UsageError("a StateEntry comes from a table", hint="use table.entry(key) or iterate over it")

    @property
    def key(self):
        """The key, as int or bytes."""
        return key_object(self.owner.table, entry_at(self.owner.table.core, self.slot))

    @property
    def namespace(self):
        """The number of the namespace."""
        return namespace_of(self.owner.table, entry_at(self.owner.table.core, self.slot))

    @property
    def value(self):
        """The value as it is stored; an object is not copied."""
        return self.owner._load(self.slot)

    @property
    def version(self):
        """The version at which the entry was made or last written."""
        return entry_at(self.owner.table.core, self.slot).version

    def __repr__(self):
        return f"StateEntry(slot={self.slot}, version={self.version})"


cdef StateEntry new_entry(StateTable owner, uint32_t slot):
    cdef StateEntry entry = StateEntry.__new__(StateEntry)
    entry.owner = owner
    entry.slot = slot
    return entry


@cython.final
cdef class StateEntryIterator:
    """Walks all maps bucket by bucket; a structural change of the map being walked ends it with an error."""
    cdef StateTable owner
    cdef uint32_t group
    cdef uint32_t bucket
    cdef uint32_t slot
    cdef uint64_t modifications

    def __init__(self, StateTable owner not None):
        self.owner = owner

    def __iter__(self):
        return self

    def __next__(self):
        cdef Table *table = self.owner.table
        cdef CowMap *map
        cdef uint32_t *head
        cdef uint32_t slot, total, index
        cdef BucketTable *buckets
        if self.owner.owner.closed:
            raise ClosedError("the backend is closed")
        while True:
            if self.group >= table.n_maps:
                raise StopIteration
            map = table.maps[self.group]
            if map == NULL:
                self.group += 1
                continue
            if self.bucket == 0 and self.slot == 0:
                self.modifications = map.modifications
            elif self.modifications != map.modifications:
                raise RuntimeError("the state changed during iteration")
            if self.slot:
                slot = self.slot
                self.slot = entry_at(table.core, slot).next
                return new_entry(self.owner, slot)
            total = map.primary.capacity + map.secondary.capacity
            if self.bucket >= total:
                self.group += 1
                self.bucket = 0
                continue
            index = self.bucket
            self.bucket += 1
            if index < map.primary.capacity:
                if index < map.rehash_index:
                    continue
                head = bucket(table.core, &map.primary, index)
            else:
                head = bucket(table.core, &map.secondary, index - map.primary.capacity)
            self.slot = head[0] if head != NULL else 0


@cython.final
cdef class IncrementalVisitor:
    """Walks entry slots run by run, a bounded number a step; see `StateTable.visitor`."""
    cdef StateTable owner
    cdef uint32_t slots_per_step
    cdef uint32_t group
    cdef uint32_t run
    cdef uint32_t index

    def __init__(self, StateTable owner not None, slots_per_step):
        self.owner = owner
        self.slots_per_step = slots_per_step

    def __iter__(self):
        return self

    def __next__(self):
        """The live entries among the next slots; StopIteration after the last run of the last map."""
        cdef Table *table = self.owner.table
        cdef CowMap *map
        cdef uint32_t slot, units = table.layout.stride >> 3, end, looked = 0
        cdef list out = []
        if self.owner.owner.closed:
            raise ClosedError("the backend is closed")
        while looked < self.slots_per_step:
            if self.group >= table.n_maps:
                if looked == 0:
                    raise StopIteration
                break
            map = table.maps[self.group]
            if map == NULL or self.run >= map.n_runs:
                self.group += 1
                self.run = self.index = 0
                looked += 1
                continue
            slot = <uint32_t>(map.runs[self.run] >> 8)
            end = slot + <uint32_t>((<uint64_t>1 << (map.runs[self.run] & 0xFF)) // table.layout.stride) * units
            if map.fresh_end == end:
                end = map.fresh
            slot += self.index * units
            if slot >= end:
                self.run += 1
                self.index = 0
                continue
            self.index += 1
            looked += 1
            if is_live(table, map, slot):
                out.append(new_entry(self.owner, slot))
        return out


cdef bint is_live(Table *table, CowMap *map, uint32_t slot) noexcept:
    """Whether a slot is the one that a look-up of its key finds: not free, retired or held by a journal."""
    cdef Entry *entry = entry_at(table.core, slot)
    cdef Blob *blob
    cdef uint32_t ns
    if entry.version == FREE_SLOT:
        return False
    ns = namespace_of(table, entry)
    if table.layout.key_is_blob:
        blob = <Blob *>entry.key
        return find_blob(table, map, blob_data(blob), blob.length, ns, blob_hash(entry)[0]) == slot
    return find_int(table, map, entry.key, ns, hash_of(table, entry)) == slot


# --- snapshots -------------------------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear                      # its end is told to the owner
cdef class SnapshotView:
    """The tables as they were at one moment; read and released on any thread, once released it is gone.

    Reading takes the page directories of maps that were not touched since, and copies rows out; it never
    blocks the mutating thread for longer than a directory takes to copy.
    """

    def __dealloc__(self):
        self._release()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._release()

    @property
    def version(self):
        """The version of the snapshot, 0 once it is released."""
        return self.snapshot.version if self.snapshot != NULL else 0

    def release(self):
        """Let go. Idempotent, on any thread; the mutating side reclaims step by step."""
        self._release()

    cdef void _release(self) noexcept:
        if self.snapshot == NULL:
            return
        store_u32(&self.snapshot.released, 1)
        store_u32(&self.owner.core.pending, 1)
        self.snapshot = NULL

    def group_size(self, StateTable table not None, uint32_t group):
        """How many entries the table had in a key group at the time of the snapshot."""
        cdef Directory *directory = self._directory(table, group)
        return directory.size if directory != NULL else 0

    cdef Directory *_directory(self, StateTable table, uint32_t group) except? NULL:
        cdef CowMap *map
        cdef Directory *directory
        cdef uint32_t version
        if self.snapshot == NULL:
            raise ClosedError("the snapshot was released")
        if table.owner is not self.owner:
            raise UsageError("the table belongs to another backend")
        if group - table.table.first_group >= table.table.n_maps:
            raise KeyGroupError("the key group is not part of the table", detail=f"key group {group}")
        map = <CowMap *>load_ptr(&table.table.maps[group - table.table.first_group])
        if map == NULL:
            return NULL
        version = self.snapshot.version
        if load_u32(&map.seen_version) < version and not see_snapshots(&self.owner.core, map):
            self.owner.out_of_memory()
        spin_lock(&self.owner.core.directory_lock)
        directory = map.directories
        while directory != NULL and not (directory.low <= version <= directory.high):
            directory = directory.older
        spin_unlock(&self.owner.core.directory_lock)
        return directory

    def read_group(self, StateTable table not None, uint32_t group):
        """The rows of a key group as columns: a dict of numpy arrays (object arrays for objects).

        `key` is int64, or (`key_offsets`, `key`) for byte keys; likewise `value`; `namespace`, `timestamp` and
        `sequence` where the table has them. Lists give `list_offsets` and one row an element. Rows are in no order.
        """
        cdef Directory *directory = self._directory(table, group)
        cdef uint64_t n = directory.size if directory != NULL else 0
        cdef uint64_t[::1] rows
        slots = np.empty(max(n, 1), dtype=np.uint64)
        rows = slots
        if n:
            with nogil:
                collect_entries(&self.owner.core, directory, &rows[0])
        return read_columns(table, rows[:n])

    def items(self, StateTable table not None):
        """All rows as {(key, namespace): value}; lists as lists. For tests and small states."""
        cdef Directory *directory
        cdef uint64_t i
        cdef uint64_t[::1] rows
        cdef Entry *entry
        out = {}
        for group in range(table.table.first_group, table.table.first_group + table.table.n_maps):
            directory = self._directory(table, group)
            if directory == NULL:
                continue
            rows = np.empty(max(directory.size, 1), dtype=np.uint64)
            collect_entries(&self.owner.core, directory, &rows[0])
            for i in range(directory.size):
                entry = <Entry *><uintptr_t>rows[i]
                out[key_object(table.table, entry), namespace_of(table.table, entry)] = table._load_at(entry)
        return out


cdef void collect_entries(Core *core, Directory *directory, uint64_t *rows) noexcept nogil:
    """Addresses of all entries that a directory's pages name. Touches nothing that the live map changes."""
    cdef uint32_t *refs = <uint32_t *>(<char *>directory + sizeof(Directory))
    cdef uint64_t n = 0
    n = collect_pages(core, refs, directory.primary_capacity, directory.rehash_index, rows, n)
    if directory.secondary_capacity:
        collect_pages(core, refs + directory.primary_pages, directory.secondary_capacity, 0, rows, n)


cdef uint64_t collect_pages(Core *core, uint32_t *refs, uint32_t capacity, uint32_t begin, uint64_t *rows,
                            uint64_t n) noexcept nogil:
    cdef uint32_t index = begin, slot, ahead
    cdef uint32_t *page
    cdef Entry *entry
    while index < capacity:
        if refs[index >> PAGE_SHIFT] == 0:
            index = (index | (PAGE_BUCKETS - 1)) + 1
            continue
        page = <uint32_t *>address(core.arena, refs[index >> PAGE_SHIFT])
        while True:
            ahead = (index & (PAGE_BUCKETS - 1)) + 16
            if ahead < PAGE_BUCKETS and index + 16 < capacity and page[ahead]:
                prefetch(address(core.arena, page[ahead]))
            slot = page[index & (PAGE_BUCKETS - 1)]
            while slot:
                entry = entry_at(core, slot)
                rows[n] = <uint64_t><uintptr_t>entry
                n += 1
                slot = entry.next
            index += 1
            if index >= capacity or index & (PAGE_BUCKETS - 1) == 0:
                break
    return n


cdef object read_columns(StateTable table, uint64_t[::1] rows):
    """Gather the columns of entries by address."""
    cdef Table *t = table.table
    cdef uint64_t n = rows.shape[0], i
    cdef uint32_t[::1] numbers
    cdef int64_t[::1] longs
    cdef char *value
    columns = {}
    cdef uint32_t skip = t.layout.off_value - t.layout.off_payload
    if t.layout.key_is_blob:
        columns["key_offsets"], columns["key"] = gather_blobs(rows, 8)
    else:
        columns["key"] = gather_fixed(rows, 8, 8).view(np.int64).ravel()
    if t.layout.off_namespace:
        columns["namespace"] = gather_fixed(rows, t.layout.off_namespace, 4).view(np.uint32).ravel()
    if t.layout.off_thread:
        columns["sequence"] = gather_fixed(rows, t.layout.off_thread, 8).view(np.uint64).ravel()
    if t.layout.has_timestamp:
        columns["timestamp"] = gather_fixed(rows, t.layout.off_payload, 8).view(np.int64).ravel()
    if table.value_code == CODE_LIST:
        gather_lists(table, rows, columns)
    elif table.value_code == CODE_ANCHOR:
        columns["value"] = gather_fixed(rows, t.layout.off_value, 4).view(np.uint32).ravel()
    else:
        gather_values(rows, t.layout.off_value, table.value_code, t.layout.value_width, columns)
    return columns


cdef object gather_values(uint64_t[::1] rows, uint32_t offset, int code, uint32_t width, dict columns):
    if code == CODE_BLOB:
        columns["value_offsets"], columns["value"] = gather_blobs(rows, offset)
    elif code == CODE_OBJECT:
        columns["value"] = gather_objects(rows, offset)
    else:
        raw = gather_fixed(rows, offset, width)
        columns["value"] = raw if code == CODE_RAW else raw.view(_DTYPES[code]).ravel()


cdef object gather_fixed(uint64_t[::1] rows, uint32_t offset, uint32_t width):
    cdef uint64_t n = rows.shape[0], i
    out = np.empty((n, width), dtype=np.uint8)
    if n == 0:
        return out
    cdef uint8_t[:, ::1] view = out
    cdef char *target = <char *>&view[0, 0]
    with nogil:
        if width == 8:
            for i in range(n):
                (<uint64_t *>target)[i] = (<uint64_t *>(<uintptr_t>rows[i] + offset))[0]
        else:
            for i in range(n):
                memcpy(target + i * width, <char *><uintptr_t>rows[i] + offset, width)
    return out


cdef tuple gather_blobs(uint64_t[::1] rows, uint32_t offset):
    cdef uint64_t n = rows.shape[0], i, total = 0
    cdef Blob *blob
    offsets = np.empty(n + 1, dtype=np.int64)
    cdef int64_t[::1] ends = offsets
    ends[0] = 0
    with nogil:
        for i in range(n):
            blob = (<Blob **>(<char *><uintptr_t>rows[i] + offset))[0]
            total += blob.length if blob != NULL else 0
            ends[i + 1] = total
    data = np.empty(max(total, 1), dtype=np.uint8)
    cdef uint8_t[::1] bytes_view = data
    with nogil:
        for i in range(n):
            blob = (<Blob **>(<char *><uintptr_t>rows[i] + offset))[0]
            if blob != NULL:
                memcpy(&bytes_view[0] + ends[i], blob_data(blob), blob.length)
    return offsets, data[:total]


cdef object gather_objects(uint64_t[::1] rows, uint32_t offset):
    cdef uint64_t n = rows.shape[0], i
    out = np.empty(n, dtype=object)
    for i in range(n):
        out[i] = <object>(<PyObject **>(<char *><uintptr_t>rows[i] + offset))[0]
    return out


cdef object gather_lists(StateTable table, uint64_t[::1] rows, dict columns):
    """Elements of all lists one after another, by the addresses of the elements."""
    cdef Table *t = table.table
    cdef uint64_t n = rows.shape[0], i, total = 0
    cdef ListCursor cursor
    cdef ListHead *head
    cdef char *element
    offsets = np.zeros(n + 1, dtype=np.int64)
    cdef int64_t[::1] ends = offsets
    for i in range(n):
        head = <ListHead *>(<char *><uintptr_t>rows[i] + t.layout.off_value)
        total += head.length
        ends[i + 1] = total
    addresses = np.empty(total, dtype=np.uint64)
    cdef uint64_t[::1] elements = addresses
    total = 0
    for i in range(n):
        head = <ListHead *>(<char *><uintptr_t>rows[i] + t.layout.off_value)
        if not cursor_open(&table.owner.arena.budget, head, &cursor):
            table.owner.out_of_memory()
        while True:
            element = cursor_next(t, &cursor)
            if element == NULL:
                break
            elements[total] = <uint64_t><uintptr_t>element
            total += 1
        cursor_close(&table.owner.arena.budget, &cursor)
    columns["list_offsets"] = offsets
    if t.element_has_timestamp:
        columns["timestamp"] = gather_fixed(elements, 0, 8).view(np.int64).ravel()
    gather_values(elements, 8 if t.element_has_timestamp else 0, table.element_code, t.element_value_width,
                  columns)
