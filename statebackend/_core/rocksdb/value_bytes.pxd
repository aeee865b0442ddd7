"""Values of a declared type to stored bytes and back; see `value_bytes.pyx`."""

from libc.stddef cimport size_t

from statebackend._core.codecs.type_codec cimport Room, TypeCodec
from statebackend._core.rocksdb.database cimport Database, Pinned

cdef enum:
    FEW = 512                         # bytes of a value that are held without an object

cdef struct Held:
    # The bytes of a value that was read: nothing of the database, so that whatever decodes them may do anything.
    const char *data
    size_t size
    char few[512]


cdef class ValueBytes:
    cdef readonly TypeCodec codec
    cdef readonly object serializer
    cdef readonly object declared
    cdef readonly str where           # for messages: "state 'sum'"
    cdef readonly int width           # of all values; 0 if they vary

    cdef int write(self, object value, Room *room) except -1
    cdef object read(self, const char *data, size_t n)


cdef object hold(Database database, Pinned *found, Held *held)
