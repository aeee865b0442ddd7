from libc.stdint cimport int64_t

from statebackend._core.rocksdb.binding.library cimport rocksdb_filters_t, rocksdb_merger_t

cdef struct Clock:
    int64_t refs                      # of the Python object and of rules; atomic
    int64_t now                       # atomic

cdef struct Rules

cdef class CommittedClock:
    cdef Clock *clock


cdef class ExpiryRules:
    cdef Rules *rules
    cdef CommittedClock clock

    cdef rocksdb_filters_t *make_filters(self) except NULL
    cdef rocksdb_merger_t *make_merger(self) except NULL
