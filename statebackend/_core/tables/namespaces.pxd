"""Namespaces by number."""

from libc.stdint cimport uint32_t, uint64_t

from statebackend._core.tables.cow_map cimport Core

cdef class NamespaceTable:
    cdef Core *core                      # whose entries count references; NULL once that is gone
    cdef list shards                     # dicts, each of some encoded namespaces -> number; None where there are none
    cdef list largest                    # of each shard, how many it has had since it was made
    cdef Py_ssize_t used                 # numbers in use
    cdef list names                      # number -> encoded namespace, None where the number is free
    cdef uint64_t *free_numbers          # a bit for each number
    cdef uint64_t *free_words            # a bit for each word of `free_numbers`
    cdef uint32_t lowest                 # no word of `free_words` below it has a bit
    cdef uint32_t cursor                 # numbers above it have been looked at in this round
    cdef int grow(self, uint32_t capacity) except -1
    cdef void shrink(self, uint32_t capacity) noexcept
    cdef void free_storage(self) noexcept
    cdef void mark_free(self, uint32_t number) noexcept
    cdef void mark_used(self, uint32_t number) noexcept
    cdef uint32_t lowest_free(self) noexcept
    cdef uint32_t intern(self, bytes name) except? 0xFFFFFFFF
    cdef object number_of(self, bytes name)
    cdef dict shard_for(self, bytes name)
    cdef int free(self, uint32_t number) except -1
    cdef int look_at_some(self) except -1
    cdef int usable(self) except -1
cdef NamespaceTable new_namespaces(Core *core)
