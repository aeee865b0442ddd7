"""Values that were read, held apart from RocksDB; see `held.pyx`."""

from libc.stddef cimport size_t

from statebackend._core.rocksdb.binding.database cimport Database, Pinned

cdef enum:
    FEW = 512                         # bytes of a value that are held without an object

cdef struct Held:
    # The bytes of a value that was read: nothing of the database, so that whatever decodes them may do anything.
    const char *data
    size_t size
    char few[512]


cdef object hold(Database database, Pinned *found, Held *held)
