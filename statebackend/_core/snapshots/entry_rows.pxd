"""Entries as rows."""

from libc.stdint cimport uint32_t, uint64_t

from statebackend._core.tables.cow_map cimport Anchor, Table
from statebackend._core.tables.state_core cimport StateCore
from statebackend._core.tables.state_table cimport StateTable

cdef class Moment:
    cdef int begin_reading(self) except -1
    cdef void end_reading(self) noexcept

cdef class LiveMoment(Moment):
    cdef StateCore owner
    cdef uint64_t calls                  # of the backend, when the moment began

cdef class EntryRows:
    cdef StateTable table
    cdef Moment moment
    cdef readonly object addresses       # of the entries: uint64, only compared
    cdef readonly object groups
    cdef readonly object is_live
    cdef readonly object kept            # of lists: how many elements at the beginning are left out
    cdef readonly object was_removed

cdef uint32_t find_owner(Table *heads, Anchor *anchor) noexcept nogil
cdef EntryRows new_rows(StateTable table, Moment moment, addresses, groups, is_live, kept=*, was_removed=*)
cdef dict read_keys(StateTable table, uint64_t[::1] rows)
cdef dict read_columns(StateTable table, uint64_t[::1] rows, kept)
