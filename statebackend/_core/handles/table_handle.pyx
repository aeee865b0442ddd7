"""The base of all handles: the tables of one state, and the place of the current key's entry in them.

A handle looks its key up once and remembers the slot. Every event that could move or free an entry increments
`StateCore.calls`: another key or namespace, marks, snapshots, batches, reads that move entries of a growing map. Plain
reads and writes in place do not. So `value()` and then `update()` search once, also if other states work in between.

Entries of the namespace VOID are in a table without namespace numbers. The first write to another namespace makes a
second table, for all others.
"""

cimport cython
from libc.stdint cimport INT64_MIN, int64_t, uint32_t, uint64_t

from statebackend._core.codecs.key_value_codecs cimport ValueCodec
from statebackend._core.tables.cow_map cimport (
    CoreKey, CowMap, Entry, Table, before_operation, find, map_new, payload_of, remove)
from statebackend._core.tables.expiry cimport is_expired
from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.handles.look_ahead cimport REACH_BLOB, REACH_ENTRY, note_visit
from statebackend._core.handles.state_handle cimport StateHandle, time_of
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.state_core cimport come_out, end_objects, go_in
from statebackend._core.tables.state_table cimport StateTable


@cython.no_gc_clear                      # C pointers into the core must not outlive it
cdef class TableHandle(StateHandle):
    """Finds, makes room for and removes the entry of the current key."""

    def __init__(self, KeyContext context not None, descriptor, ValueCodec codec not None, make_table, watcher=None):
        self.belong(context, descriptor)
        self.context = context
        self.core = context.core
        self.codec = codec
        self.make_table = make_table
        self.watcher = watcher
        self.floor = INT64_MIN
        self.stamp = NEVER
        self.reach = REACH_BLOB if codec.layout == "bytes" else REACH_ENTRY
        self.adopt_table(make_table(False), False)

    cdef int adopt_table(self, object made, bint is_spaced) except -1:
        cdef StateTable table = made
        if is_spaced:
            self.spaced = table
            self.spaced_table = table.table
        else:
            self.plain = table
            self.plain_table = table.table
        return 0

    # --- finding ---

    cdef int begin(self) except -1:
        """Begin a call: check that the backend is open and a key is set, and reclaim a few waiting slots."""
        self.core.enter()
        self.core.leave()
        if not self.context.has_key:
            self.context.no_key()
        return 0

    cdef int find_here(self) except -1:
        """Find the current key's entry and remember where it is; does its share of a rehash."""
        cdef Table *table
        cdef CowMap *map = NULL
        cdef uint32_t slot = 0
        cdef CoreKey *key = &self.context.key
        if unlikely(self.core.closed or self.core.core.pending or not self.context.has_key
                    or self.core.inside):
            self.begin()
        table = self.plain_table if key.namespace == 0 else self.spaced_table
        self.followed = note_visit(&self.context.ahead, table, self.reach)
        if likely(table != NULL):
            map = table.maps[key.group - table.first_group]
            if likely(map != NULL):
                if unlikely(map.secondary.capacity != 0
                            or map.seen_version < self.core.core.highest_required_snapshot_version):
                    self.core.calls += 1     # entries may move
                    if not before_operation(&table.lane, table, map):
                        self.no_memory()
                slot = find(table, map, key)
        self.table = table
        self.map = map
        self.slot = slot
        self.stamp = self.core.calls
        return 0

    cdef StateTable here(self):
        return self.plain if self.context.key.namespace == 0 else self.spaced

    cdef int make_room(self) except -1:
        """Make the table and the map for the current key if need be. May run Python; remembers the map again."""
        cdef CowMap *map
        if self.table == NULL:
            self.make_spaced()
            self.find_here()
        if self.map == NULL:
            map = map_new(self.table, self.context.key.group)
            if map == NULL:
                self.no_memory()
            self.map = map
        return 0

    cdef int make_spaced(self) except -1:
        """Make the table for namespaces if need be. That runs Python, and so perhaps this method."""
        cdef object made = self.make_table(True)
        if self.spaced_table == NULL:
            self.adopt_table(made, True)
        return 0

    cdef int no_memory(self) except -1:
        self.stamp = NEVER
        self.codec.no_memory(self.core)

    # --- conversions, which may run the user's code: inside the call, in which others are refused ---

    cdef object prepared(self, object value):
        cdef uint64_t entered = go_in(self.core)
        try:
            return self.codec.prepared(value)
        finally:
            come_out(self.core, entered)

    cdef object loaded(self, char *stored):
        cdef uint64_t entered
        if likely(self.codec.is_native):
            return self.codec.load(stored)
        entered = go_in(self.core)
        try:
            return self.codec.load(stored)
        finally:
            come_out(self.core, entered)
            self.core.settle()

    cdef object finished(self, object raw):
        cdef uint64_t entered
        if self.codec.is_native:
            return raw
        entered = go_in(self.core)
        try:
            return self.codec.finished(raw)
        finally:
            come_out(self.core, entered)
            self.core.settle()

    # --- removing ---

    cdef int remove_here(self) except -1:
        if not remove(&self.table.lane, self.table, self.map, self.slot, self.context.key.hash):
            self.no_memory()
        self.core.calls += 1
        self.slot = 0
        self.stamp = self.core.calls
        return 0

    cdef int clear_here(self) except -1:
        look_up(self)
        if self.slot:
            if self.watcher is not None:
                self.watcher.forget(self)
                look_up(self)
                if self.slot == 0:
                    return 0
            self.remove_here()
            end_objects(self.core)
        return 0

    cdef bint has_any(self, Table *table, Entry *entry, int wanted) except -1:
        """Return True if an entry holds something that has, or has not, expired."""
        cdef bint gone = self.ttl != 0 and is_expired((<int64_t *>payload_of(table, entry))[0], self.ttl,
                                                      time_of(self))
        return gone == (wanted == WANT_EXPIRED)

    # --- time ---

    cdef int64_t event_time(self) noexcept:
        if not self.context.has_event_time:
            return self.context.time()
        if self.is_cleaning:
            return self.context.event_cleaned
        now = self.context.event_now
        if now < self.context.event_latest:
            self.context.event_setbacks += 1
        self.context.event_latest = now
        if unlikely(now < self.floor):
            self.belated += 1
        return now

    def _note_times(self, int64_t latest, int64_t earliest):
        """A vectorised call uses times between these, in any order: as so many scalar calls would, note them."""
        cdef int64_t of_row = self.context.event_now
        if not self.in_event_time or not self.context.has_event_time:
            return
        try:
            self.context.event_now = latest
            self.event_time()
            self.context.event_now = earliest
            self.event_time()
        finally:
            self.context.event_now = of_row

    cdef int64_t rest_from(self, int64_t now) noexcept:
        """The oldest timestamp that writes after a cleanup at `now` are taken to have.

        It is `now`, as time goes on, but in event time late rows write older ones. Half a time to live is allowed for
        them: so few are later that it costs little to forget then what was known of the oldest timestamps.
        """
        cdef int64_t allowed = self.ttl // 2
        if not self.in_event_time or not self.context.has_event_time:
            return now
        now = INT64_MIN if now < INT64_MIN + allowed else now - allowed
        self.floor = max(self.floor, now)
        return now

    cdef uint64_t setbacks(self) noexcept:
        """A number that grows whenever a timestamp may be older than time has been before."""
        return self.context.setbacks + self.belated
