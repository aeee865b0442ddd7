from libc.stddef cimport size_t

from statebackend._core.rocksdb.binding.database cimport Database, Link

cdef class Iterator:
    cdef readonly Database database
    cdef Link link
    cdef bytes lower                  # or None; RocksDB reads these two in place
    cdef bytes upper                  # or None
    cdef bytes prefix                 # or None
    cdef const char *low              # the bytes of the three; NULL and 0 if they are None
    cdef const char *high
    cdef const char *stem
    cdef size_t n_low
    cdef size_t n_high
    cdef size_t n_stem
    cdef bint is_busy                 # a thread is inside without the GIL
    cdef bint has_entry               # the iterator is on an entry within its bounds
    cdef const char *here             # its key
    cdef size_t n_here

    cdef int enter(self) except -1
    cdef int leave(self) except -1
    cdef void settle(self) noexcept nogil
    cdef const char *value_here(self, size_t *n) except NULL
