"""Rows of a record batch as Python objects, one at a time; see `row_maker.pyx`."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t

from statebackend._core.codecs.type_codec cimport TypeCodec

cdef struct ColumnOfRows

cdef class RowMaker:
    cdef readonly int64_t rows
    cdef Py_ssize_t n_columns
    cdef ColumnOfRows *columns
    cdef tuple codecs                    # of the other columns
    cdef tuple lists                     # of columns that are given as Python objects
    cdef list kept                       # the buffers
    cdef object row_class
    cdef object unreadable               # callable(index of a column) -> the error for a value that Python has not
    cdef object row                      # the last one made
    cdef int open_column(self, ColumnOfRows *column, TypeCodec codec, int64_t offset, valid, ends, data) except -1
    cdef const uint8_t *pointer(self, buffer, int64_t *size) except? NULL
    cdef PyObject *next_row(self, int64_t at) except NULL
    cdef object value_at(self, Py_ssize_t column, int64_t at)
    cdef bint integer_at(self, Py_ssize_t column, int64_t at, int64_t *number) noexcept
    cdef int64_t run_at(self, Py_ssize_t column, int64_t at, const char **data) noexcept
    cdef bint is_null_at(self, Py_ssize_t column, int64_t at) noexcept
