"""Handles of states with one value for a key; see `single_handle.pyx`."""

from libc.stdint cimport int64_t

from statebackend._core.codecs.key_value_codecs cimport ValueCodec
from statebackend._core.handles.handle cimport Handle

cdef class SingleHandle(Handle):
    cdef bint keeps_latest               # writes build on what is there, whose timestamp they keep if it is later
    cdef int64_t timestamp_here(self) noexcept
    cdef object read(self)
    cdef object unexpired(self)
    cdef object load_here(self)
    cdef object load_object_here(self)
    cdef int renew(self) except -1
    cdef bint expired_here(self) except -1
    cdef int write(self, object value) except -1
    cdef int write_by_serializer(self, object value) except -1
    cdef int64_t time_to_write(self) except? -1
    cdef int write_stored(self, char *stored) except -1
    cdef object merged(self, object a, object b)
    cdef object stored_copy(self, ValueCodec codec, object value)
