"""Map states: two tables with one journal."""

from libc.stdint cimport int64_t, uint32_t

from statebackend._core.cow_map cimport Anchor, CoreKey, CowMap
from statebackend._core.state_core cimport StateCore
from statebackend._core.state_table cimport StateTable

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
    cdef int unlink_all(self, CoreKey *head) except -1
    cdef Anchor *anchor_of(self, uint32_t head_slot) noexcept
    cdef int unlink(self, CoreKey *head, uint32_t head_slot, CoreKey *inner, uint32_t slot) except -1
