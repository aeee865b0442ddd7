from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t

from statebackend._core.rocksdb.binding.database cimport ColumnFamily, Database
from statebackend._core.rocksdb.binding.library cimport rocksdb_batch_t, rocksdb_family_t

cdef enum Write:
    WRITE_PUT
    WRITE_MERGE
    WRITE_DELETE


cdef class WriteBatch:
    cdef readonly Database database
    cdef rocksdb_batch_t *batch
    cdef bint is_busy                 # a thread is inside without the GIL

    cdef int begin(self) except -1
    cdef rocksdb_family_t *begin_with(self, ColumnFamily family) except NULL
    cdef int add(self, ColumnFamily family, Write what, const int64_t[::1] key_offsets, const uint8_t[::1] keys,
                 const int64_t[::1] value_offsets, const uint8_t[::1] values) except -1
