"""Map states: two tables with one journal."""

from libc.stdint cimport int64_t, uint32_t

from statebackend._core.tables.cow_map cimport (
    Anchor, CoreKey, CowMap, Lane, Table, entry_at, hash_key, value_of)
from statebackend._core.tables.state_core cimport StateCore
from statebackend._core.tables.state_table cimport StateTable

cdef inline uint32_t anchor_ref(Table *heads, uint32_t head_slot) noexcept nogil:
    return (<uint32_t *>value_of(heads, entry_at(heads.core, head_slot)))[0]

cdef inline void hash_map_key(Table *table, CoreKey *key, uint32_t anchor) noexcept nogil:
    """Put a map key below an anchor."""
    key.namespace = anchor
    key.hash = hash_key(table, key, anchor)

cdef uint32_t insert_threaded(Lane *head_lane, Table *heads, CowMap *head_map, CoreKey *head, uint32_t head_slot,
                              Lane *lane, Table *table, CowMap *map, CoreKey *inner) noexcept nogil
cdef bint remove_threaded(Lane *head_lane, Table *heads, CowMap *head_map, CoreKey *head, uint32_t head_slot,
                          Lane *lane, Table *table, CowMap *map, CoreKey *inner, uint32_t slot) noexcept nogil

cdef class MapTable:
    cdef readonly StateCore owner
    cdef readonly StateTable heads       # key -> anchor
    cdef readonly StateTable entries     # (anchor, map key) -> value
    cdef uint32_t locate(self, object key, uint32_t namespace, CoreKey *head, CowMap **map) except? 0
    cdef uint32_t locate_entry(self, object key, object map_key, uint32_t namespace, CoreKey *head,
                               uint32_t *head_slot, CoreKey *inner, CowMap **inner_map) except? 0
    cdef int put_entry(self, object key, object map_key, object value, uint32_t namespace,
                       int64_t timestamp) except -1
    cdef int fill_entry(self, CoreKey *head, uint32_t head_slot, CoreKey *inner, char *value,
                        int64_t timestamp) except -1
    cdef bint remove_entry(self, object key, object map_key, uint32_t namespace) except -1
    cdef int clear_at(self, CoreKey *head) except -1
    cdef bint unlink_all(self, CoreKey *head) noexcept
    cdef Anchor *anchor_of(self, uint32_t head_slot) noexcept
    cdef int unlink(self, CoreKey *head, uint32_t head_slot, CoreKey *inner, uint32_t slot) except -1
