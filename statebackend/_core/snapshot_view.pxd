"""The reader's side of a snapshot."""

from libc.stdint cimport uint32_t, uint64_t

from statebackend._core.cow_map cimport Directory, Snapshot
from statebackend._core.state_core cimport StateCore
from statebackend._core.state_table cimport StateTable

cdef class SnapshotView:
    cdef StateCore owner
    cdef Snapshot *snapshot              # NULL once released
    cdef uint32_t readers                # calls that read at this time
    cdef bint released
    cdef void _release(self) noexcept
    cdef int begin_reading(self) except -1
    cdef void end_reading(self) noexcept
    cdef Directory *_directory(self, StateTable table, uint32_t group) except? NULL

cdef dict read_keys(StateTable table, uint64_t[::1] rows)
cdef dict read_columns(StateTable table, uint64_t[::1] rows)
