"""Rows of Python objects as columns that grow; see `row_writer.pyx`."""

from libc.stdint cimport int64_t, uint8_t

from statebackend._core.codecs.type_codec cimport Room, TypeCodec

cdef class ColumnWriter:
    cdef TypeCodec codec                 # None: values are objects
    cdef int kind
    cdef Room room                       # the bytes of the values
    cdef int64_t *ends                   # of values that vary in width; NULL: they do not
    cdef uint8_t *valid
    cdef int64_t rows                    # that there is memory for
    cdef list values                     # objects, once there is one that the codec does not take
    cdef int make_room(self) except -1
    cdef bint add_number(self, object value) except -1
    cdef bint add(self, object value, int64_t at) except -1
    cdef int cut(self, int64_t count, int64_t before) except -1

cdef class RowWriter:
    cdef tuple columns
    cdef tuple names
    cdef object fields_of                # callable(row) -> its fields in order, or None
    cdef object values_of                # callable(index of a column, taken) -> the list of its values
    cdef readonly int64_t count          # rows since the last `take`
    cdef readonly object misfit          # the first row that is none, with its position
    cdef object fields_here(self, object row)
    cdef int add(self, object row) except -1
