"""Enumeration of a state; see `enumeration.pyx`."""

from libc.stdint cimport uint32_t

from statebackend._core.handles.base_handle cimport BaseHandle

cdef tuple entries_of(BaseHandle handle, bint all_namespaces, uint32_t number)
cdef list numbers_of_key(BaseHandle handle)
