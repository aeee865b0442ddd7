"""Python's view of a table's entries: one slot, iteration over all, the incremental visitor."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.tables.cow_map cimport (
    CoreKey, CowMap, Entry, Table, bucket, complete_rehash, entry_at, find, first_of_run, is_live, key_object,
    namespace_of, see_snapshots)
from statebackend._core.memory.platform cimport store_u32
from statebackend._core.tables.state_table cimport StateTable

from statebackend.errors import UsageError


@cython.final
cdef class StateEntry:
    """One entry slot, seen from Python: for iteration, inspection and tests.

    Its value and version can be read as long as the slot is the live entry of its key.
    """
    cdef StateTable owner
    cdef readonly uint32_t slot
    cdef readonly object key
    cdef readonly uint32_t namespace
    cdef uint32_t group
    cdef uint64_t calls
    cdef uint64_t relocated              # entries of the table, when this one was found

    def __init__(self):
        raise UsageError("a StateEntry comes from a table", hint="use table.entry(key) or iterate over it")

    cdef Entry *entry(self) except NULL:
        """The entry, after checking that it still is in the slot."""
        cdef CoreKey k
        cdef CowMap *map
        cdef uint32_t slot
        self.owner.usable()
        if self.calls != self.owner.owner.calls:
            map = self.owner.map_or_null(self.group)
            if self.owner.anchors is not None:
                self.owner.split_map_key(self.key, self.namespace, self.group, &k)
            else:
                self.owner.split_key(self.key, self.namespace, &k)
            slot = find(self.owner.table, map, &k) if map != NULL else 0
            if slot == 0 or (slot != self.slot and self.relocated == self.owner.table.lane.relocated_entries):
                raise RuntimeError("the entry was removed or replaced since it was looked up")
            self.slot, self.relocated = slot, self.owner.table.lane.relocated_entries
            self.calls = self.owner.owner.calls
        return entry_at(self.owner.table.core, self.slot)

    @property
    def value(self):
        """The value as it is stored; an object is not copied."""
        cdef list elements = self.owner._room()
        return self.owner._load_at(self.entry(), elements)

    @property
    def version(self):
        """The version at which the entry was made or last written."""
        return self.entry().version

    def __repr__(self):
        return f"StateEntry(slot={self.slot})"


cpdef StateEntry new_entry(StateTable owner, uint32_t slot, uint32_t group):
    """A StateEntry for a live slot of a key group; the caller guarantees both."""
    # Read everything from the slot before making an object, which may run finalisers.
    cdef object key = key_object(owner.table, entry_at(owner.table.core, slot))
    cdef uint32_t namespace = namespace_of(owner.table, entry_at(owner.table.core, slot))
    cdef uint64_t calls = owner.owner.calls
    cdef StateEntry entry = StateEntry.__new__(StateEntry)
    entry.owner = owner
    entry.slot = slot
    entry.key = key
    entry.namespace = namespace
    entry.group = group
    entry.calls = calls
    entry.relocated = owner.table.lane.relocated_entries
    return entry


@cython.final
@cython.no_gc_clear                      # it is counted in the core of `owner`
cdef class StateEntryIterator:
    """Walks all maps bucket by bucket; a structural change of the map being walked ends it with an error.

    When the walk comes to a map, it completes a rehash in progress, because reads would continue it. Calls in between
    may move entries into clones; then the walk finds its place again by the key returned last. As long as there is an
    iterator, no map begins or goes on to shrink.
    """
    cdef StateTable owner
    cdef uint32_t group
    cdef uint32_t bucket
    cdef uint32_t slot                   # the slot to return next
    cdef uint64_t modifications
    cdef uint64_t calls
    cdef uint64_t rollbacks
    cdef object last                     # the key and namespace returned last, of this map

    def __cinit__(self, StateTable owner not None):
        self.owner = owner
        self.rollbacks = owner.owner.rollbacks
        owner.owner.core.iterators += 1

    def __dealloc__(self):
        if self.owner is not None:
            self.owner.owner.core.iterators -= 1
            store_u32(&self.owner.owner.core.pending, 1)

    def __iter__(self):
        return self

    def __next__(self):
        cdef Table *table = self.owner.table
        cdef CowMap *map
        cdef StateEntry found
        cdef uint32_t *head
        cdef uint32_t slot
        self.owner.usable()
        if self.rollbacks != self.owner.owner.rollbacks:
            raise RuntimeError("the state changed during iteration: it was rolled back")
        while True:
            if self.group >= table.n_maps:
                raise StopIteration
            map = table.maps[self.group]
            if map == NULL:
                self.group += 1
                continue
            if self.bucket == 0:
                self.begin(table, map)
            elif self.modifications != map.modifications:
                raise RuntimeError("the state changed during iteration")
            elif self.calls != self.owner.owner.calls:
                self.find_place(table, map)
            if self.slot:
                slot = self.slot
                self.slot = entry_at(table.core, slot).next
                found = new_entry(self.owner, slot, map.group)
                self.last = found.key, found.namespace
                return found
            if self.bucket >= map.primary.capacity:
                self.group += 1
                self.bucket = 0
                continue
            head = bucket(table.core, &map.primary, self.bucket)
            self.bucket += 1
            self.slot = head[0] if head != NULL else 0
            self.last = None

    cdef int begin(self, Table *table, CowMap *map) except -1:
        cdef int64_t limit = table.core.arena.budget.limit
        cdef bint done
        if map.secondary.capacity:
            self.owner.owner.calls += 1  # entries move: other iterators find their place again
            table.core.arena.budget.limit = 0    # `max_bytes` does not refuse a reader
            done = see_snapshots(table.core, map) and complete_rehash(&table.lane, table, map)
            table.core.arena.budget.limit = limit
            if not done:
                self.owner.owner.out_of_memory()
        self.modifications = map.modifications
        self.calls = self.owner.owner.calls
        self.slot = 0
        self.last = None

    cdef int find_place(self, Table *table, CowMap *map) except -1:
        cdef uint32_t *head
        cdef uint32_t slot
        self.calls = self.owner.owner.calls
        head = bucket(table.core, &map.primary, self.bucket - 1)
        self.slot = slot = head[0] if head != NULL else 0
        while self.last is not None:
            # Chains keep their order when entries are replaced.
            if slot == 0:
                raise RuntimeError("the state changed during iteration")
            self.slot = entry_at(table.core, slot).next
            if (key_object(table, entry_at(table.core, slot)),
                    namespace_of(table, entry_at(table.core, slot))) == self.last:
                break
            slot = self.slot


@cython.final
cdef class IncrementalVisitor:
    """Walks entry slots run by run, a bounded number per step; see `StateTable.visitor`."""
    cdef StateTable owner
    cdef uint32_t slots_per_step
    cdef uint32_t group
    cdef uint32_t run
    cdef uint32_t index

    def __init__(self, StateTable owner not None, slots_per_step):
        if slots_per_step < 1:
            raise UsageError("a visitor looks at one slot a step or more", detail=f"{slots_per_step}")
        self.owner = owner
        self.slots_per_step = slots_per_step

    def __iter__(self):
        return self

    def __next__(self):
        """The live entries among the next slots; StopIteration after the last run of the last map."""
        cdef Table *table = self.owner.table
        cdef CowMap *map
        cdef uint32_t slot, units, end, looked = 0
        cdef list out = []
        self.owner.usable()
        units = table.layout.stride >> 3
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
            slot = first_of_run(table, map, self.run, &end)
            slot += self.index * units
            if slot >= end:
                self.run += 1
                self.index = 0
                continue
            self.index += 1
            looked += 1
            if is_live(table, map, slot):
                out.append(new_entry(self.owner, slot, map.group))
                self.owner.usable()      # making an object may run finalisers
        return out
