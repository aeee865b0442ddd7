"""Handles of states that call the user's function; see `function_handles.pyx`."""

from statebackend._core.codecs.codecs cimport ValueCodec
from statebackend._core.handles.single_handle cimport SingleHandle

cdef class AddingHandle(SingleHandle):
    cdef int add_one(self, object value, bint is_copy) except -1
    cdef int add_by_function(self, object value, bint is_copy) except -1
    cdef object copied(self, object value)
    cdef object combined(self, object old, object value)

cdef class ReducingHandle(AddingHandle):
    pass

cdef class AggregatingHandle(AddingHandle):
    cdef readonly ValueCodec inputs      # of values; None if they may be anything
