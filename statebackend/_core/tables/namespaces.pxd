"""Namespaces by number."""

from libc.stdint cimport uint32_t

from statebackend._core.tables.cow_map cimport Core

cdef class NamespaceTable:
    cdef Core *core                      # whose entries count references; NULL once that is gone
    cdef dict numbers                    # encoded namespace -> number
    cdef list names                      # number -> encoded namespace, None where the number is free
    cdef list free_numbers
    cdef Py_ssize_t sweep_at
    cdef int grow(self, uint32_t capacity) except -1
    cdef uint32_t intern(self, bytes name) except? 0xFFFFFFFF
    cdef int sweep(self) except -1
    cdef int usable(self) except -1
cdef NamespaceTable new_namespaces(Core *core)
