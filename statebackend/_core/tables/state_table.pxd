"""A state table: the key groups of one state, each a copy-on-write map."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from statebackend._core.memory.arena cimport Blob
from statebackend._core.tables.cow_map cimport VALUE_BLOB, CoreKey, CowMap, Entry, ListHead, Table, value_of
from statebackend._core.key_groups cimport HashPlan
from statebackend._core.tables.state_core cimport StateCore

cdef class StateTable:
    cdef Table *table                    # owned by the core, which outlives the handle
    cdef readonly StateCore owner
    cdef readonly HashPlan plan
    cdef readonly StateTable anchors     # of a table of map entries: the table of their keys
    cdef readonly int value_code
    cdef readonly int element_code
    cdef object copy_value               # of CODE_OBJECT: callable, or None when values are immutable
    cdef readonly bint takes_none        # values may be None
    cdef readonly uint32_t max_parallelism
    cdef int split_key(self, object key, uint32_t ns, CoreKey *out) except -1
    cdef int split_map_key(self, object map_key, uint32_t anchor, uint32_t group, CoreKey *out) except -1
    cdef void rehash_map_key(self, CoreKey *key, uint32_t anchor) noexcept
    cdef CowMap *map_for(self, uint32_t group) except NULL
    cdef CowMap *map_or_null(self, uint32_t group) noexcept
    cdef char *store(self, object value, int code, uint32_t width, char *room) except? NULL
    cdef char *store_own(self, object value, char *room) except? NULL
    cdef int _lay_out(self, Table *table, key, value, namespaces, timestamps, bint is_anchor_table) except -1
    cdef int _make_nullable(self, Table *table) except -1
    cdef uint32_t _locate(self, key, uint32_t namespace, CoreKey *k, CowMap **map) except? 0
    cdef uint32_t _unshare(self, CowMap *map, uint32_t slot, CoreKey *k) except 0
    cdef int usable(self) except -1

cdef inline bint is_null(Table *table, Entry *entry) noexcept nogil:
    """Return True if a value that is not an object is None."""
    if table.layout.off_null:
        return (<uint8_t *>entry + table.layout.off_null)[0] != 0
    return table.layout.value_kind == VALUE_BLOB and (<Blob **>value_of(table, entry))[0] == NULL
