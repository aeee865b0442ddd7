"""Removal of expired entries; see `cleanup.pyx`."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.tables.cow_map cimport CowMap
from statebackend._core.handles.table_handle cimport TableHandle, look_up
from statebackend._core.tables.state_table cimport StateTable
from statebackend._core.tables.expiry_sweep cimport ExpiryIndex, Sweep

cdef class CleanupHandle(TableHandle):
    cdef int64_t cleanup_size            # entries that each access looks at; 0: incremental cleanup is off
    cdef Sweep walk                      # where the cleanup continues
    cdef bint walks_spaced
    cdef int64_t debt                    # slots' worth of long lists that later accesses must pay for
    cdef readonly ExpiryIndex plain_index    # index of expiring entries; None before `advance` first asks
    cdef readonly ExpiryIndex spaced_index
    cdef int64_t oldest                  # the oldest timestamp that the last full round of cleanup has seen
    cdef bint clean_here(self) except -1
    cdef bint clean_slot(self, bint spaced, CowMap *map, uint32_t slot) except -1
    cdef bint clean_key(self, object canonical, uint32_t number) except -1
    cdef StateTable swept(self, bint spaced)
    cdef int clean_some(self, int64_t entries) except -1
    cdef int walk_on(self, int64_t entries, int64_t now) except -1
    cdef int begin_round(self, int64_t now) except -1
    cdef int end_round(self) except -1
    cdef uint64_t copies(self) except? 0
    cdef int64_t expire_some(self, int64_t budget) except -1
    cdef int forget_bounds(self) except -1

cdef inline int clean_up(CleanupHandle handle) except -1:
    """Clean up as many entries as an access looks at."""
    if handle.cleanup_size:
        return handle.clean_some(handle.cleanup_size)
    return 0

cdef inline int begin_access(CleanupHandle handle) except -1:
    """Clean up, then find the current key's entry."""
    clean_up(handle)
    return look_up(handle)
