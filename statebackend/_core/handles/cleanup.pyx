"""Removal of expired entries: a little with each access, or everything that is due.

Incremental cleanup walks over all entries, a few with each access, and begins a new round after the last one. A round
that has seen everything knows a bound: no entry has an older timestamp. Until the bound expires, an access compares one
number. `_expire` asks an index of expiry times instead, and so looks only at what is due.
"""

cimport cython
from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t

from statebackend._core.tables.cow_map cimport (
    VALUE_LIST, CowMap, Entry, Table, entry_at, hash_of, is_live, key_object, namespace_of, remove)
from statebackend._core.tables.expiry cimport is_expired
from statebackend._core.handles.table_handle cimport WANT_EXPIRED, TableHandle, look_up
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.state_core cimport begin_call, end_call
from statebackend._core.tables.state_table cimport StateTable
from statebackend._core.tables.expiry_sweep cimport (
    MAX_FOUND, SLOTS_PER_ENTRY, ExpiryIndex, Sweep, oldest_in, sweep)


cdef inline uint64_t moved_in(StateTable of) noexcept:
    return of.table.lane.copied_entries + of.table.lane.relocated_entries


@cython.no_gc_clear                      # C pointers into the core must not outlive it
cdef class CleanupHandle(TableHandle):
    """Removes what has expired of its state; `cleanup_size` is the number of entries that each access looks at."""

    def __init__(self, *arguments, **options):
        TableHandle.__init__(self, *arguments, **options)
        cleanup = None if self.descriptor.ttl_config is None else self.descriptor.ttl_config.incremental_cleanup
        self.cleanup_size = 0 if cleanup is None else cleanup.cleanup_size
        self.walk.bound = INT64_MIN
        self.oldest = INT64_MAX

    # --- one entry ---

    cdef bint clean_here(self) except -1:
        """Remove what has expired of the current key's entry, and return whether anything has."""
        look_up(self)
        if self.slot == 0 or self.ttl == 0 or not self.has_any(
                self.table, entry_at(self.table.core, self.slot), WANT_EXPIRED):
            return False
        self.remove_here()
        return True

    cdef bint clean_slot(self, bint spaced, CowMap *map, uint32_t slot) except -1:
        """Remove what has expired of a live entry that has something expired. False if that cannot be done now."""
        cdef StateTable of = self.swept(spaced)
        cdef Table *table = of.table
        cdef Entry *entry = entry_at(table.core, slot)
        cdef bint done
        if self.watcher is not None:     # which has to know which key it is
            return self.clean_key(key_object(table, entry), namespace_of(table, entry))
        done = remove(&table.lane, table, map, slot, hash_of(table, entry))
        self.core.calls += 1
        return done

    cdef bint clean_key(self, object canonical, uint32_t number) except -1:
        """Remove what has expired of a key in a namespace, with that key current meanwhile."""
        cdef object saved = self.context._save_key()
        try:
            self.context.number_namespace(number)
            self.context._key = canonical
            if self.watcher is not None:
                self.watcher.forget(self)
            return self.clean_here()
        except MemoryError:
            return False
        finally:
            if not self.core.closed:
                self.context._restore_key(saved)

    # --- a little with each access ---

    cdef StateTable swept(self, bint spaced):
        return self.spaced if spaced else self.plain

    cdef int clean_some(self, int64_t entries) except -1:
        """Remove some expired entries, if any may have expired."""
        cdef int64_t now
        if self.core.closed or self.core.inside or self.ttl == 0:
            return 0
        now = self.cleanup_time()
        if likely(not is_expired(self.walk.bound, self.ttl, now) and self.walk.undone == self.core.core.undone
                  and self.walk.setbacks == self.setbacks()):
            return 0
        self.is_cleaning = True
        begin_call(self.core)
        try:
            return self.walk_on(entries, now)
        finally:
            self.is_cleaning = False
            end_call(self.core)

    cdef int walk_on(self, int64_t entries, int64_t now) except -1:
        """Go on with the walk, over about so many entries, and remove what has expired.

        This looks at no more than eight times as many slots, and at no slot twice. A list counts by its length: after
        a long one, accesses look at nothing until it is paid for. Entries that cannot be removed for want of memory
        stay.
        """
        cdef int64_t slots = SLOTS_PER_ENTRY * entries
        cdef StateTable of
        cdef CowMap *map = NULL
        cdef uint32_t slot
        cdef int ends = 0
        cdef bint cleaned
        if unlikely(self.debt > 0):
            self.debt -= slots
            return 0
        while entries > 0 and slots > 0 and ends < 2:
            if not self.walk.is_under_way:
                self.begin_round(now)
            of = self.swept(self.walks_spaced)
            slot = sweep(of.table, &self.walk, self.ttl, now, &entries, &slots, &map)
            if self.walk.has_moved:
                self.walk.has_moved = False
                self.core.calls += 1     # whoever remembers a slot looks again
            if slot:
                cleaned = self.clean_slot(self.walks_spaced, map, slot)
                self.expired_by_cleanup += cleaned
                if not cleaned or of.table.layout.value_kind == VALUE_LIST:
                    self.walk.is_sure = False    # something is left, or other elements of the list are
            elif self.walk.map >= of.table.n_maps:
                self.walk.map = self.walk.run = 0
                self.walk.run_word = 0
                self.walks_spaced = not self.walks_spaced and self.spaced is not None
                if not self.walks_spaced:
                    ends += 1
                    self.end_round()
                    if not is_expired(self.walk.bound, self.ttl, now):
                        break            # there is nothing to find
        self.debt = -slots
        self.core.arena.budget.refused = 0
        return 0

    cdef int begin_round(self, int64_t now) except -1:
        cdef Sweep *walk = &self.walk
        walk.map = walk.run = 0
        walk.run_word = 0
        walk.is_under_way = walk.is_sure = True
        walk.began = self.rest_from(now)
        walk.oldest = INT64_MAX
        walk.bound = INT64_MIN
        walk.copies = self.copies()
        walk.undone = self.core.core.undone
        walk.setbacks = self.setbacks()
        return 0

    cdef int end_round(self) except -1:
        """Note what the walk knows, now that it has seen all entries."""
        cdef Sweep *walk = &self.walk
        walk.is_under_way = False
        self.oldest = walk.oldest
        if walk.is_sure and walk.copies == self.copies():
            walk.bound = min(walk.oldest, walk.began)    # what was written behind the walk is not older
        else:
            walk.bound = INT64_MIN
        return 0

    cdef uint64_t copies(self) except? 0:
        """A number that grows whenever an entry of the state comes to another slot."""
        # A batch on a map state counts the clones of its entries in the table of their keys.
        cdef uint64_t n = moved_in(self.plain) + moved_in(self.swept(False))
        if self.spaced is not None:
            n += moved_in(self.spaced) + moved_in(self.swept(True))
        return n

    def _clean_some(self, int64_t rows=1, now=None):
        """Clean up as much as this many accesses do, at time `now` of the clock if given. Looks at no entry twice."""
        cdef int64_t saved = self.context.now
        cdef bint was_known = self.context.now_known
        if self.cleanup_size == 0 or rows == 0:
            return
        if now is None:
            self.clean_some(self.cleanup_size * rows)
            return
        self.context.now, self.context.now_known = now, True
        try:
            self.clean_some(self.cleanup_size * rows)
        finally:
            self.context.now, self.context.now_known = saved, was_known

    # --- everything that is due ---

    def _expire(self, int64_t budget):
        """Remove up to `budget` things that have expired, wherever they are, and return how many. O(what expires)."""
        self.core.enter()
        self.core.leave()
        self.core.core.iterators += 1    # no map shrinks while slots are remembered
        self.is_cleaning = True
        begin_call(self.core)
        try:
            return self.expire_some(budget)
        finally:
            self.is_cleaning = False
            self.core.core.iterators -= 1
            if self.core.core.sparse != NULL:
                self.core.core.pending = 1
            end_call(self.core)

    cdef int64_t expire_some(self, int64_t budget) except -1:
        cdef int64_t done = 0, now, elements = 0
        cdef ExpiryIndex index
        cdef Table *table
        cdef CowMap *map = NULL
        cdef uint32_t[MAX_FOUND] slots
        cdef int n, i, cleaned
        cdef bint spaced
        if self.ttl == 0:
            return 0
        now = self.cleanup_time()
        for spaced in range(2):
            if spaced and self.spaced is None:
                break
            index = self.spaced_index if spaced else self.plain_index
            if index is None:
                index = ExpiryIndex(self.swept(spaced))
                if spaced:
                    self.spaced_index = index
                else:
                    self.plain_index = index
            table = index.table
            index.begin(self.setbacks(), self.rest_from(now))
            while done < budget:
                n = index.found(self.ttl, now, slots, &map)
                self.core.calls += 1     # looking may have moved entries
                if n < 0:
                    self.core.out_of_memory()
                cleaned = 0
                for i in range(n):
                    # What was cleaned before may have moved it.
                    if is_live(table, map, slots[i]) and is_expired(
                            oldest_in(table, entry_at(table.core, slots[i]), &elements), self.ttl, now):
                        cleaned += self.clean_slot(spaced, map, slots[i])
                    if done + cleaned == budget:
                        break
                if cleaned == 0:
                    break
                done += cleaned
        self.expired_by_cleanup += done
        self.core.arena.budget.refused = 0
        return done

    cdef int forget_bounds(self) except -1:
        """Forget what is known of the oldest timestamps: something with an old one was put in."""
        self.walk.bound = INT64_MIN
        self.walk.is_sure = False
        if self.plain_index is not None:
            self.plain_index.forget()
        if self.spaced_index is not None:
            self.spaced_index.forget()
        return 0

    def _close(self):
        """Free what belongs to the handle and not to its tables."""
        if self.plain_index is not None:
            self.plain_index.free()
        if self.spaced_index is not None:
            self.spaced_index.free()

    def _count_expired(self, int64_t entries):
        """Count expired entries that a read of many keys has removed."""
        self.expired_on_read += entries

    def _expiry_metrics(self):
        """Return how much has expired so far, by the cause of removal, and the oldest timestamp of the last full
        round."""
        return {"expired_on_read": self.expired_on_read, "expired_by_cleanup": self.expired_by_cleanup,
                "oldest_timestamp": None if self.oldest == INT64_MAX else self.oldest}
