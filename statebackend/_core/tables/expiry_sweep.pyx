"""Finds what has expired in a table: by a walk over a few slots at a time, and by an index of when it is due.

Accesses of a state pay for the walk (`sweep`). It visits the slots of the entries run by run, in the order of memory,
and looks up only expired ones, to learn if the slot is live. A step is bounded by a number of entries and, where
slots are free or retired, by eight times as many slots. Entries that are cloned meanwhile may be skipped or come
twice.

A round over all entries knows the oldest timestamp that it has left. Until that expires there is nothing to find, for
the same reason that makes the bounds of the index hold, and the walk rests. It does not rest after a round that may
have missed cloned entries, or that left entries although they had something expired.

`advance` asks the index (`ExpiryIndex`), for states that leave memory without being accessed:

    table: oldest        maps: oldest          stretches of 32 buckets
    +-----------+        +----+----+----+      +----+----+----+----+----+
    | 100       |------->|100 |180 |160 |----->|100 |140 |inf |...      |
    +-----------+        +----+----+----+      +----+----+----+----+----+

A bound says that nothing below it is older. A write stamps the present time, and time goes forward, so no write can
make a bound wrong: writes do not know about the index and cost nothing extra. A stretch is looked at when its bound
has expired. Then its bound rises to the oldest timestamp that it holds, but not beyond the present, because of later
writes. So a stretch is looked at when something in it expires, and at least once in a time to live.

Bounds are kept for buckets and not for slots, because an entry stays in its bucket when it is cloned for a snapshot.
A map that grows splits each bucket, and the parts keep the bound; of a map that shrank, nothing is known. Events that
bring old timestamps back (a rollback, a clock that is set back, entries moved with their timestamps) make the bounds
unknown too. The next pass then looks at everything, once.
"""

cimport cython
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from statebackend._core.memory.arena cimport UNIT_SHIFT, raw_alloc, raw_free
from statebackend._core.tables.cow_map cimport (
    FREE_SLOT, VALUE_LIST, BucketTable, CowMap, Entry, ExpiringHead, Table, before_operation, bucket, entry_at,
    is_live, live_elements, map_size, payload_of, slots_of_run, value_of)
from statebackend._core.tables.expiry cimport is_expired
from statebackend._core.memory.platform cimport likely, prefetch, unlikely
from statebackend._core.tables.state_table cimport StateTable

cdef enum:
    ELEMENTS_PER_SLOT = 8                # elements of a list that cost as much as a slot


cdef int64_t oldest_in(Table *table, Entry *entry, int64_t *elements) noexcept nogil:
    """The oldest timestamp of an entry; of a list, its oldest element's.

    Counts the elements of a list that is in no order: to remove one of them costs as much as the list.
    """
    cdef ExpiringHead *head
    if likely(table.layout.value_kind != VALUE_LIST):
        return (<int64_t *>payload_of(table, entry))[0]
    head = <ExpiringHead *>value_of(table, entry)
    if not head.is_ordered:
        elements[0] += live_elements(table, &head.list)
    return head.oldest


# --- the walk ------------------------------------------------------------------------------------------------------

cdef uint32_t sweep(Table *table, Sweep *at, int64_t ttl, int64_t now, int64_t *entries, int64_t *slots,
                    CowMap **map) noexcept nogil:
    """Continue until a live entry has something expired: return its slot. 0 if the counts are used up, or at the end.

    At the end `at.map` is the number of maps.
    """
    cdef CowMap *here
    cdef Entry *entry
    cdef uint32_t end, units = table.layout.stride >> UNIT_SHIFT, offset = table.layout.off_payload
    cdef bint is_list = table.layout.value_kind == VALUE_LIST
    cdef int64_t oldest, elements, entries_left = entries[0], slots_left = slots[0]
    cdef uint32_t found = 0
    while at.map < table.n_maps and entries_left > 0 and slots_left > 0:
        here = table.maps[at.map]
        if here == NULL or at.run >= here.n_runs:
            at.map += 1
            at.run = 0
            at.run_word = 0
            slots_left -= 1
            continue
        if unlikely(at.run_word != here.runs[at.run]):
            at.run_word = here.runs[at.run]
            at.slot = slots_of_run(table, at.run_word, &at.run_end)
        end = here.fresh if here.fresh_end == at.run_end else at.run_end
        entry = entry_at(table.core, at.slot)
        while at.slot < end and entries_left > 0 and slots_left > 0:
            slots_left -= 1
            if likely(entry.version != FREE_SLOT):
                entries_left -= 1
                if likely(not is_list):
                    oldest = (<int64_t *>(<char *>entry + offset))[0]
                else:
                    elements = 0
                    oldest = oldest_in(table, entry, &elements)
                    slots_left -= elements // ELEMENTS_PER_SLOT
                if unlikely(is_expired(oldest, ttl, now)):
                    found = at.slot
                elif oldest < at.oldest:
                    at.oldest = oldest
            at.slot += units
            entry = <Entry *>(<char *>entry + table.layout.stride)
            if unlikely(found):
                break
        if found:
            at.has_moved = True
            if not before_operation(&table.lane, table, here):
                at.is_sure = False
            elif is_live(table, here, found):
                map[0] = here
                break
            found = 0
        elif at.slot >= end:
            at.run += 1
            at.run_word = 0
        else:                            # what the next step looks at
            prefetch(entry)
            prefetch(<char *>entry + 64)
            prefetch(<char *>entry + 128)
    entries[0] = entries_left
    slots[0] = slots_left
    return found


# --- the index -----------------------------------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear                      # the memory is counted to the arena of `owner`
cdef class ExpiryIndex:
    """The times at which something in a table may expire next, by map and by stretch of buckets."""

    def __cinit__(self, StateTable owner not None):
        self.owner = owner
        self.table = owner.table
        self.budget = &owner.owner.arena.budget
        self.oldest = INT64_MIN

    def __dealloc__(self):
        self.free()

    def free(self):
        """Give the memory back; then nothing is known."""
        cdef uint32_t g
        if self.maps != NULL:
            for g in range(self.n_maps):
                raw_free(self.budget, self.maps[g].bounds, self.maps[g].n * sizeof(int64_t))
            raw_free(self.budget, self.maps, self.n_maps * sizeof(Stretches))
            self.maps = NULL
        self.oldest = INT64_MIN

    cdef int begin(self, uint64_t setbacks, int64_t rest) except -1:
        """Begin a pass: forget the bounds if old timestamps may have come back. No bound rises beyond `rest`."""
        cdef StateTable owner = self.owner
        cdef uint32_t g
        if self.maps == NULL:
            self.n_maps = self.table.n_maps
            self.maps = <Stretches *>raw_alloc(self.budget, self.n_maps * sizeof(Stretches))
            if self.maps == NULL:
                owner.owner.out_of_memory()
            memset(self.maps, 0, self.n_maps * sizeof(Stretches))
            self.oldest = INT64_MIN
            for g in range(self.n_maps):
                self.maps[g].oldest = INT64_MIN
        elif self.undone != self.table.core.undone or self.setbacks != setbacks:
            self.oldest = INT64_MIN
            for g in range(self.n_maps):
                self.maps[g].oldest = INT64_MIN
                self.maps[g].capacity = 0
        self.undone = self.table.core.undone
        self.setbacks = setbacks
        self.rest = rest
        self.at = self.capacity = 0
        self.next_oldest = INT64_MAX
        return 0

    cdef int found(self, int64_t ttl, int64_t now, uint32_t *slots, CowMap **map) noexcept:
        """The slots of entries with something expired, in the next stretch that has any; 0 after the last.

        Clean them before the next call, or it finds them again. -1 without memory.
        """
        cdef Stretches *known
        cdef int n
        if not is_expired(self.oldest, ttl, now):
            return 0
        while self.at < self.n_maps:
            known = &self.maps[self.at]
            map[0] = self.table.maps[self.at]
            if map[0] == NULL or map_size(map[0]) == 0:
                known.oldest = self.rest
            elif is_expired(known.oldest, ttl, now):
                if not before_operation(&self.table.lane, self.table, map[0]) or not self.fit(known, map[0]):
                    return -1
                if self.capacity != known.capacity:      # it has just begun, or has grown meanwhile
                    self.capacity = known.capacity
                    self.stretch = 0
                    self.map_oldest = self.rest
                while self.stretch < known.n:
                    if is_expired(known.bounds[self.stretch], ttl, now):
                        n = self.look_at(known, map[0], self.stretch, ttl, now, slots)
                        if n:
                            return n
                    if known.bounds[self.stretch] < self.map_oldest:
                        self.map_oldest = known.bounds[self.stretch]
                    self.stretch += 1
                known.oldest = self.map_oldest
            if known.oldest < self.next_oldest:
                self.next_oldest = known.oldest
            self.at += 1
            self.capacity = 0
        self.oldest = self.next_oldest
        return 0

    cdef bint fit(self, Stretches *known, CowMap *map) noexcept:
        """Fit the bounds to the map's present buckets; False without memory."""
        cdef uint32_t capacity = map.primary.capacity, n = (capacity + (1 << STRETCH_SHIFT) - 1) >> STRETCH_SHIFT, i
        cdef int64_t *bounds
        if likely(known.capacity == capacity):
            return True
        if n != known.n:
            bounds = <int64_t *>raw_alloc(self.budget, n * sizeof(int64_t))
            if bounds == NULL:
                return False
            for i in range(n):
                # After a map has doubled, each bucket holds entries of the one at half its number.
                bounds[i] = known.bounds[i & (known.n - 1)] if known.capacity and n > known.n else INT64_MIN
            raw_free(self.budget, known.bounds, known.n * sizeof(int64_t))
            known.bounds = bounds
            known.n = n
        elif known.capacity == 0:
            for i in range(n):
                known.bounds[i] = INT64_MIN
        known.capacity = capacity
        return True

    cdef int look_at(self, Stretches *known, CowMap *map, uint32_t stretch, int64_t ttl, int64_t now,
                     uint32_t *slots) noexcept:
        """Collect the expired entries of a stretch, up to MAX_FOUND; if there are none, find its bound."""
        cdef Table *table = self.table
        cdef BucketTable *buckets
        cdef Entry *entry
        cdef uint32_t *head
        cdef uint32_t index, slot, first = stretch << STRETCH_SHIFT, last = first + (1 << STRETCH_SHIFT)
        cdef int64_t oldest, bound = self.rest, elements = 0
        cdef int n = 0, t
        self.looks += 1
        if last > map.primary.capacity:
            last = map.primary.capacity
        for index in range(first, last):
            # No walk over the map: a stretch is of buckets of the primary table, and of the secondary
            # table that its buckets have become: several if the map grows, one that others share if it shrinks.
            buckets = &map.primary if index >= map.rehash_index else &map.secondary
            for t in range(max(1, <int>(buckets.capacity // map.primary.capacity))):
                head = bucket(table.core, buckets, (index + t * map.primary.capacity) & (buckets.capacity - 1))
                slot = head[0] if head != NULL else 0
                while slot:
                    entry = entry_at(table.core, slot)
                    oldest = oldest_in(table, entry, &elements)
                    if is_expired(oldest, ttl, now):
                        slots[n] = slot
                        n += 1
                        if n == MAX_FOUND:
                            return n
                    elif oldest < bound:
                        bound = oldest
                    slot = entry.next
        if n == 0:
            known.bounds[stretch] = bound
        return n

    def forget(self):
        """Forget the bounds, because old timestamps have come back. O(1)."""
        self.undone = 0xFFFFFFFFFFFFFFFF
