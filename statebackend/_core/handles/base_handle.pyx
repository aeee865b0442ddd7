"""The base of all handles: the tables of one state, and the place of the current key's entry in them.

A handle looks its key up once and remembers the slot. Whatever could move or free an entry increments
`StateCore.calls`: another key or namespace, marks, snapshots, batches, reads that move entries of a growing map. Plain
reads and writes in place do not. So `value()` and then `update()` search once, whatever other states do in between.

Entries of the namespace VOID are in a table without namespace numbers. The first write to another namespace makes a
second table, for all others.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t

from statebackend._core.memory.arena cimport CHECKED
from statebackend._core.codecs.codecs cimport FORM_OBJECT, ValueCodec
from statebackend._core.tables.cow_map cimport (
    VALUE_OBJECT, CoreKey, CowMap, Entry, Table, before_operation, entry_at, find, map_new, payload_of, remove,
    value_of)
from statebackend._core.tables.expiry cimport is_expired
from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.handles.look_ahead cimport REACH_BLOB, REACH_ENTRY, note_visit
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.state_table cimport StateTable


@cython.no_gc_clear                      # C pointers into the core must not outlive it
cdef class BaseHandle:
    """Finds, makes room for and removes the entry of the current key."""

    def __init__(self, KeyContext context not None, ValueCodec codec not None, make_table, int64_t ttl, watcher):
        self.context = context
        self.core = context.core
        self.codec = codec
        self.make_table = make_table
        self.watcher = watcher
        self.ttl = ttl
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
        """Begin a call: check that the backend is open and a key is set, and reclaim a little of what waits for it."""
        self.core.enter()
        self.core.leave()
        if self.core.closed:             # a finaliser closed it
            self.core.enter()
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
                    or (CHECKED and self.core.inside)):
            self.begin()
        table = self.plain_table if key.namespace == 0 else self.spaced_table
        note_visit(&self.context.ahead, table, self.reach)
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
        """Make the table and the map for the current key if need be. May run Python; remembers the map anew."""
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

    # --- removing ---

    cdef int remove_here(self) except -1:
        """Remove the entry that was found."""
        cdef object _dropped = None      # an object ends with this call, when the table is whole again
        cdef uint32_t slot = self.slot
        if self.codec.form == FORM_OBJECT:
            self.core.inside += 1        # whatever a finaliser does, the core stays
            try:
                if self.table.layout.value_kind == VALUE_OBJECT:
                    _dropped = <object>(<PyObject **>value_of(self.table, entry_at(self.table.core, slot)))[0]
                if not remove(&self.table.lane, self.table, self.map, slot,
                              self.context.key.hash):
                    self.no_memory()
                self.stamp = NEVER
            finally:
                self.core.leave()
            return 0
        if not remove(&self.table.lane, self.table, self.map, slot, self.context.key.hash):
            self.no_memory()
        self.core.calls += 1
        self.slot = 0
        self.stamp = self.core.calls
        return 0

    cdef int clear_here(self) except -1:
        """Remove what is stored for the current key and namespace, if anything is."""
        if self.stamp != self.core.calls:
            self.find_here()
        if self.slot:
            if self.watcher is not None:
                self.watcher.forget(self)
                if self.stamp != self.core.calls:
                    self.find_here()
                    if self.slot == 0:
                        return 0
            self.remove_here()
        return 0

    cdef bint has_any(self, Table *table, Entry *entry, int wanted) except -1:
        """Return True if an entry holds something that has, or has not, expired."""
        cdef bint gone = self.ttl != 0 and is_expired((<int64_t *>payload_of(table, entry))[0], self.ttl,
                                                      self.context.time())
        return gone == (wanted == WANT_EXPIRED)
