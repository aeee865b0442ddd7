"""Enumeration of a state; see `enumeration.pyx`."""

from libc.stdint cimport uint32_t

from statebackend._core.handles.table_handle cimport TableHandle

cdef tuple entries_of(TableHandle handle, bint all_namespaces, uint32_t number)
cdef list numbers_of_key(TableHandle handle)
