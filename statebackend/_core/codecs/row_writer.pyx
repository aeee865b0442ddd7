"""Rows of Python objects as columns that grow: each value goes to the end of its column, as its codec's bytes.

Where a codec does not take a value, the column goes on as a list of Python objects, the values before included, until
the rows are taken: their conversion then finds each wrong value, and words the error. So a row is written
as a whole, and an error is seen when the rows are taken, whichever way its column went.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from statebackend._core.codecs.type_codec cimport TypeCodec, close_room, open_room, take_room
from statebackend._core.memory.interpreter cimport (
    PyDict_CheckExact, PyDict_GetItemWithError, PyErr_Clear, PyFloat_CheckExact, PyLong_CheckExact,
    PyTuple_CheckExact, PyUnicode_AsUTF8AndSize, PyUnicode_CheckExact)
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.values cimport (
    TYPE_DOUBLE, TYPE_LONG, TYPE_LONG_DECIMAL, TYPE_STRING, long_as_int64)

cdef extern from "Python.h":
    Py_ssize_t PyDict_Size(object o) except -1

cdef enum:
    FIRST_ROWS = 256

cdef int64_t MOST_BYTES = 0x7FFF0000     # of one column, whose offsets in Arrow have 32 bits


@cython.final
cdef class ColumnWriter:
    """A column, with the codec of its type; without one it is a list of objects."""

    def __cinit__(self, TypeCodec codec):
        open_room(&self.room)
        self.codec = codec
        self.values = [] if codec is None else None
        self.kind = 0 if codec is None else codec.kind

    def __dealloc__(self):
        close_room(&self.room)
        free(self.ends)
        free(self.valid)

    cdef int make_room(self) except -1:
        """Memory for more rows: nothing but the bytes of values needs any until it is used up."""
        cdef int64_t rows = max(2 * self.rows, <int64_t>FIRST_ROWS)
        cdef uint8_t *valid = <uint8_t *>realloc(self.valid, rows)
        cdef int64_t *ends
        if valid == NULL:
            raise MemoryError(f"{rows} rows of output")
        self.valid = valid
        if not self.codec.is_fixed:
            ends = <int64_t *>realloc(self.ends, (rows + 1) * sizeof(int64_t))
            if ends == NULL:
                raise MemoryError(f"{rows} rows of output")
            ends[0] = 0
            self.ends = ends
        self.rows = rows
        return 0

    cdef bint add_number(self, object value) except -1:
        """Append a LONG or DOUBLE as most functions give it."""
        cdef int64_t number
        cdef double real
        if self.kind == TYPE_LONG:
            if not PyLong_CheckExact(value) or not long_as_int64(value, &number):
                return False
        elif PyFloat_CheckExact(value):
            real = PyFloat_AS_DOUBLE(value)
            memcpy(&number, &real, 8)
        else:
            return self.codec.write(value, &self.room, False)
        if unlikely(self.room.capacity - self.room.used < 8):
            memcpy(take_room(&self.room, 8), &number, 8)
        else:
            memcpy(self.room.data + self.room.used, &number, 8)
            self.room.used += 8
        return True

    cdef bint add(self, object value, int64_t at) except -1:
        """Append the value of row `at`; False, with nothing appended, if the codec does not take it."""
        cdef uint64_t used = self.room.used
        cdef Py_ssize_t length
        cdef const char *data
        cdef bint is_written
        if unlikely(at >= self.rows):
            self.make_room()
        self.valid[at] = value is not None
        if value is None:
            if self.codec.is_fixed:
                self.codec.write_null(&self.room)
            is_written = True
        elif self.kind == TYPE_LONG or self.kind == TYPE_DOUBLE:
            is_written = self.add_number(value)
        elif self.kind == TYPE_STRING and PyUnicode_CheckExact(value):
            data = PyUnicode_AsUTF8AndSize(value, &length)
            is_written = data != NULL
            if likely(is_written):
                memcpy(take_room(&self.room, length), data, length)
            else:
                PyErr_Clear()            # a lone surrogate
        else:
            is_written = self.codec.write(value, &self.room, False)
            if not is_written and self.kind > TYPE_LONG_DECIMAL:
                self.room.used = used
                is_written = self.codec.write(value, &self.room, True)
        if self.ends != NULL:
            is_written = is_written and <int64_t>self.room.used <= MOST_BYTES
            self.ends[at + 1] = self.room.used
        if unlikely(not is_written):
            self.room.used = used
        return is_written

    def take(self, int64_t count):
        """The first `count` values: which are there, where they end if their width varies, their bytes; or a list."""
        cdef list values = self.values
        if values is not None:
            self.values = [] if self.codec is None else None
            self.room.used = 0
            return values
        valid = PyBytes_FromStringAndSize(<char *>self.valid, count)
        ends = None
        if self.ends != NULL:
            ends = PyBytes_FromStringAndSize(<char *>self.ends, (count + 1) * sizeof(int64_t))
        data = PyBytes_FromStringAndSize(self.room.data, self.room.used)
        self.room.used = 0
        return valid, ends, data

    cdef int cut(self, int64_t count, int64_t before) except -1:
        """Drop the values behind the first `count`, of `before`."""
        if self.values is not None:
            del self.values[count:]
        elif count == 0:
            self.room.used = 0
        elif self.ends != NULL:
            self.room.used = self.ends[count]
        elif before > 0:
            self.room.used = self.room.used // before * count
        return 0


@cython.final
cdef class RowWriter:
    """Columns of rows: `codecs` has one codec, or None, for each of `names`.

    `fields_of(row)` gives the fields of a row that is not a plain tuple, or None if it is not a row; `values_of(i,
    taken)` gives back as a list what `take` would give for column `i`.

    >>> from statebackend._core.codecs.type_codec import TypeCodec
    >>> from statebackend.types.serializers import serializer_for
    >>> writer = RowWriter((TypeCodec("BYTE", serializer_for("tinyint")),), ("n",), lambda row: None, None)
    >>> writer.extend([(1,), {"n": 2}])
    >>> writer.count, writer.take()
    (2, [(b'\\x01\\x01', None, b'\\x01\\x02')])
    """

    def __init__(self, tuple codecs not None, tuple names not None, fields_of, values_of):
        self.columns = tuple(ColumnWriter(codec) for codec in codecs)
        self.names, self.fields_of, self.values_of = names, fields_of, values_of
        if len(codecs) != len(names):
            raise ValueError("there must be a codec for each name")

    def extend(self, rows):
        """Append rows. O(bytes)."""
        for row in rows:
            self.add(row)

    def take(self):
        cdef int64_t count = self.count
        self.count, self.misfit = 0, None
        return [(<ColumnWriter>column).take(count) for column in self.columns]

    def cut(self, int64_t count):
        """Drop the rows behind the first `count`. O(columns)."""
        cdef int64_t before = self.count if self.misfit is None else self.misfit[1]
        if not 0 <= count <= self.count:
            raise ValueError("there are fewer rows")
        self.count = count
        if count > before:
            return
        if self.misfit is not None and self.misfit[1] >= count:
            self.misfit = None
        for column in self.columns:
            (<ColumnWriter>column).cut(count, before)

    cdef object fields_here(self, object row):
        """The fields of a row as a tuple, in the order of the columns; None if it is none."""
        cdef Py_ssize_t i, n = PyTuple_GET_SIZE(self.names)
        cdef PyObject *value
        if PyDict_CheckExact(row) and PyDict_Size(row) == n:
            fields = []
            for i in range(n):
                value = PyDict_GetItemWithError(row, <object>PyTuple_GET_ITEM(self.names, i))
                if value == NULL:
                    break
                fields.append(<object>value)
            else:
                return tuple(fields)
        read = self.fields_of(row)
        return None if read is None else tuple([read[i] for i in range(n)])

    cdef int add(self, object row) except -1:
        cdef Py_ssize_t i, n = PyTuple_GET_SIZE(self.names)
        cdef ColumnWriter column
        cdef object value
        if unlikely(not PyTuple_CheckExact(row) or PyTuple_GET_SIZE(row) != n):
            fields = self.fields_here(row) if self.misfit is None else None
            if fields is None:
                if self.misfit is None:
                    self.misfit = (row, self.count)
                self.count += 1
                return 0
            row = fields
        if likely(self.misfit is None):
            for i in range(n):
                column = <ColumnWriter>PyTuple_GET_ITEM(self.columns, i)
                value = <object>PyTuple_GET_ITEM(row, i)
                if unlikely(column.values is not None):
                    column.values.append(value)
                elif unlikely(not column.add(value, self.count)):
                    column.values = self.values_of(i, column.take(self.count)) if self.count else []
                    column.values.append(value)
        self.count += 1
        return 0
