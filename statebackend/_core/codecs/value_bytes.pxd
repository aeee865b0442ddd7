"""Values of a declared type to stored bytes and back; see `value_bytes.pyx`."""

from libc.stddef cimport size_t

from statebackend._core.codecs.type_codec cimport Room, TypeCodec


cdef class ValueBytes:
    cdef readonly TypeCodec codec
    cdef readonly object serializer
    cdef readonly object declared
    cdef readonly str where           # for messages: "state 'sum'"
    cdef readonly int width           # of all values; 0 if they vary
    cdef bint reads_plain             # reading runs no code of the user's

    cdef int write(self, object value, Room *room) except -1
    cdef bint write_plain(self, object value, Room *room) except -1
    cdef object read(self, const char *data, size_t n)
