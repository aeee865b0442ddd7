from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from statebackend._core.rocksdb.binding.library cimport rocksdb_cache_t, rocksdb_manager_t, rocksdb_options_t

cdef class MemoryBudget:
    cdef object __weakref__           # budgets of one limit are shared for as long as they are used
    cdef rocksdb_cache_t *cache
    cdef rocksdb_manager_t *manager
    cdef readonly uint64_t limit

    cdef size_t write_buffers(self) noexcept nogil
    cdef bint is_overdrawn(self) noexcept nogil


cdef class Options:
    cdef rocksdb_options_t *options
    cdef readonly MemoryBudget budget  # or None

    cdef int set_table(self, MemoryBudget budget, size_t block_size, double bloom_bits, bint partitioned) except -1
