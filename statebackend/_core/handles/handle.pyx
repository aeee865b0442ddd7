"""`Handle`: the shared part of the handles of all states.

    KeyContext  key, hash, group, namespace, now          StateCore.calls
        |                                                        |
    Handle  --- plain, spaced: the tables --- map --- slot, valid while `stamp` == calls
      StateHandle       `state_handle`: the descriptor and the rules of expiry
      TableHandle       `table_handle`: finds the current key's entry
      CleanupHandle     `cleanup`: removes what has expired

Order of work. Serializers, functions and copies of the user's run inside the call (`go_in`, `come_out`): calls that
they make are refused. They and finalisers run before anything of the core has changed, or after all of it has.
Afterwards the handle finds its slot again if the count of calls has changed.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp

from statebackend._core.handles.cleanup cimport CleanupHandle, clean_up
from statebackend._core.handles.table_handle cimport WANT_ALIVE, look_up
from statebackend._core.memory.arena cimport Blob, blob_data
from statebackend._core.tables.cow_map cimport (
    CoreKey, CowMap, Entry, Table, Walk, begin_walk, entry_at, find, hash_key, key_object, map_size, namespace_of,
    next_entry)


@cython.no_gc_clear                      # C pointers into the core must not outlive it
cdef class Handle(CleanupHandle):
    """The base of the handles that states have; each kind of state derives its own."""

    def __init__(self, *arguments, **options):
        CleanupHandle.__init__(self, *arguments, **options)
        self.declared()

    # --- for users ---

    def clear(self):
        clean_up(self)
        self.clear_here()

    def exists(self):
        """Return True if a read would return something stored. Copies and changes nothing. O(1) expected."""
        look_up(self)
        if self.slot == 0:
            return False
        if self.ttl == 0 or self.shows_expired:
            return True
        return self.has_any(self.table, entry_at(self.table.core, self.slot), WANT_ALIVE)

    # --- for the backend ---

    def _entries(self, uint32_t number=0, bint all_namespaces=True):
        """Two lists: the canonical keys and namespace numbers of entries with something unexpired. O(entries)."""
        cdef list keys = []
        cdef list namespaces = []
        self.core.enter()
        try:
            if all_namespaces or number == 0:
                gather(self, self.plain.table, True, 0, keys, namespaces)
            if self.spaced is not None and (all_namespaces or number != 0):
                gather(self, self.spaced.table, all_namespaces, number, keys, namespaces)
        finally:
            self.core.leave()
        return keys, namespaces

    def _count(self):
        """Count the keys and namespaces that have the state, expired ones included. O(1)."""
        return self.plain_table.lane.entries + (self.spaced_table.lane.entries if self.spaced_table != NULL else 0)

    def _numbers_of_key(self):
        """Return the numbers of the namespaces other than VOID in which the current key has an entry.

        O(namespaces of the backend) or O(entries of the key group), whichever is less.
        """
        cdef list found = []
        cdef CowMap *map
        cdef Table *table = self.spaced_table
        cdef CoreKey *key = &self.context.key
        cdef CoreKey at
        cdef list names = self.core.namespaces.names
        cdef uint32_t ns
        if table == NULL:
            return found
        map = table.maps[key.group - table.first_group]
        if map == NULL:
            return found
        if <uint64_t>len(names) > map_size(map):
            collect_namespaces(table, map, key, found)
            return found
        at = key[0]
        for ns in range(1, <uint32_t>len(names)):
            at.namespace = ns
            at.hash = hash_key(table, &at, ns)
            if find(table, map, &at):
                found.append(ns)
        return found

    def _metrics(self):
        """Return bytes, copies made for snapshots, and rehash progress of this state."""
        total = {}
        for table in self._tables():
            for name, figure in table.metrics().items():
                total[name] = total.get(name, 0) + figure
        return {name: total[name] for name in (
            "entry_bytes", "used_slots", "buckets", "rehashing_maps", "rehashed_entries", "copied_entries",
            "copied_pages")}

    def _tables(self):
        return [self.plain] if self.spaced is None else [self.plain, self.spaced]

    def _current_number(self):
        return self.context.key.namespace

    def _table_of(self, bint spaced, bint makes):
        """Return the table of VOID, or of all other namespaces; None if it was never made and is not made now."""
        if spaced and makes and self.spaced_table == NULL:
            self.make_spaced()
        return self.spaced if spaced else self.plain

    def _enter_namespace(self, uint32_t number):
        self.context.number_namespace(number)


# --- enumeration ---

cdef int gather(Handle handle, Table *table, bint all_namespaces, uint32_t number, list keys,
                list namespaces) except -1:
    # Keys are ints and bytes, which start no garbage collection: nothing else runs during the walk.
    cdef uint32_t g, slot, ns
    cdef Entry *entry
    cdef Walk walk
    for g in range(table.n_maps):
        begin_walk(table.maps[g], &walk)
        slot = next_entry(table.core, &walk)
        while slot:
            entry = entry_at(table.core, slot)
            ns = namespace_of(table, entry)
            if (all_namespaces or ns == number) and (handle.ttl == 0 or handle.has_any(table, entry, WANT_ALIVE)):
                keys.append(key_object(table, entry))
                namespaces.append(ns)
            slot = next_entry(table.core, &walk)
    return 0


cdef int collect_namespaces(Table *table, CowMap *map, CoreKey *key, list found) except -1:
    """Collect the namespaces of a key from the entries of its key group."""
    cdef uint32_t slot
    cdef Entry *entry
    cdef Blob *blob
    cdef Walk walk
    begin_walk(map, &walk)
    slot = next_entry(table.core, &walk)
    while slot:
        entry = entry_at(table.core, slot)
        if table.layout.key_is_blob:
            blob = <Blob *>entry.key
            if blob.length == key.length and memcmp(blob_data(blob), key.data, key.length) == 0:
                found.append(namespace_of(table, entry))
        elif entry.key == key.number:
            found.append(namespace_of(table, entry))
        slot = next_entry(table.core, &walk)
    return 0
