"""The reader's side of a snapshot."""

from libc.stdint cimport uint32_t

from statebackend._core.tables.cow_map cimport Directory, Snapshot
from statebackend._core.snapshots.entry_rows cimport Moment
from statebackend._core.tables.state_core cimport StateCore
from statebackend._core.tables.state_table cimport StateTable

cdef class SnapshotView(Moment):
    cdef StateCore owner
    cdef Snapshot *snapshot              # NULL once released
    cdef uint32_t readers                # calls that read at this time
    cdef bint released
    cdef void _release(self) noexcept
    cdef Directory *_directory(self, StateTable table, uint32_t group) except? NULL
