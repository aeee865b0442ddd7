"""Rows of a record batch as Python objects, one at a time, from Arrow's buffers.

A row is a tuple of a class for the names of the columns. Nothing is made ahead of it: its values are still in the
processor's cache when the function reads them. If the function has not kept the row, the next one takes its place in
memory, as in Python's own `zip`.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from statebackend._core.codecs.decimals cimport decimal_from_int, int128
from statebackend._core.codecs.type_codec cimport DAMAGED, TypeCodec
from statebackend._core.memory.interpreter cimport PyUnicode_DecodeUTF8, Py_INCREF
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.values cimport (
    TYPE_BOOL, TYPE_BYTES, TYPE_DECIMAL, TYPE_DOUBLE, TYPE_FLOAT, TYPE_LONG, TYPE_LONG_DECIMAL, TYPE_RECORD,
    TYPE_STRING, is_integer)

from statebackend.errors import UsageError

cdef extern from "Python.h":
    object PyLong_FromLongLong(long long number)
    object PyFloat_FromDouble(double number)

cdef extern from *:
    """
    static inline PyObject *sb_new_row(PyObject *cls, Py_ssize_t n) {
        return ((PyTypeObject *)cls)->tp_alloc((PyTypeObject *)cls, n);
    }
    /* Whether a row that one reference is left of can become the next one. */
    static inline int sb_is_free(PyObject *row) {
    #ifdef Py_GIL_DISABLED
        return 0;
    #else
        return Py_REFCNT(row) == 1;
    #endif
    }
    static inline void sb_forget_hash(PyObject *row) {
    #if PY_VERSION_HEX >= 0x030E0000
        ((PyTupleObject *)row)->ob_hash = -1;
    #endif
    }
    /* Puts a new reference in, and drops the one that was there when all is consistent. */
    static inline void sb_put_field(PyObject *row, Py_ssize_t i, PyObject *value) {
        PyObject *old = ((PyTupleObject *)row)->ob_item[i];
        ((PyTupleObject *)row)->ob_item[i] = value;
        Py_XDECREF(old);
    }
    """
    object new_row "sb_new_row"(object cls, Py_ssize_t n)
    bint is_free "sb_is_free"(PyObject *row) noexcept
    void forget_hash "sb_forget_hash"(PyObject *row) noexcept
    void put_field "sb_put_field"(PyObject *row, Py_ssize_t i, PyObject *value) noexcept

cdef struct ColumnOfRows:
    int kind                             # of its codec; 0: a Python list
    int scale                            # of a DECIMAL, which has 128 bits here
    int64_t width                        # bytes of one value, where it has some
    const uint8_t *valid                 # NULL: all are
    int64_t first                        # the bit of row 0 in `valid`, and in `data` of BOOL
    const int32_t *ends                  # offsets of row 0
    const uint8_t *data                  # of row 0; BOOL, STRING, BYTES: of the buffer
    int64_t size                         # bytes of `data`

cdef const uint8_t *EMPTY = <const uint8_t *> b""


cdef inline bint is_set(const uint8_t *bits, int64_t at) noexcept:
    return bits[at >> 3] >> (at & 7) & 1


@cython.final
cdef class RowMaker:
    """Makes the rows of a record batch of `rows` rows, of `row_class`.

    A column is a list of its values, or a tuple `(codec, offset, validity, offsets, data)` with Arrow's buffers, or
    None where there is none. `unreadable(i)` gives the error for a value of column `i` that Python does not have.
    """

    def __init__(self, int64_t rows, row_class not None, columns, unreadable):
        cdef Py_ssize_t i, n = len(columns)
        if self.columns != NULL or rows < 0 or not issubclass(row_class, tuple):
            raise UsageError("rows are made once, as tuples")
        self.rows, self.row_class, self.unreadable = rows, row_class, unreadable
        self.kept = []
        self.columns = <ColumnOfRows *>calloc(n + 1, sizeof(ColumnOfRows))
        if self.columns == NULL:
            raise MemoryError("the columns of rows")
        self.n_columns = n
        codecs, lists = [], []
        for i in range(n):
            is_list = isinstance(columns[i], list)
            lists.append(columns[i] if is_list else None)
            codecs.append(None if is_list else columns[i][0])
            if not is_list:
                codec, offset, valid, ends, data = columns[i]
                self.open_column(&self.columns[i], codec, offset, valid, ends, data)
            elif len(columns[i]) < rows:
                raise UsageError("a column is shorter than its rows are many")
        self.codecs, self.lists = tuple(codecs), tuple(lists)

    def __dealloc__(self):
        free(self.columns)

    cdef int open_column(self, ColumnOfRows *column, TypeCodec codec, int64_t offset, valid, ends, data) except -1:
        cdef int64_t size
        if codec is None or codec.kind >= TYPE_RECORD or codec.kind == TYPE_DECIMAL:
            raise UsageError("rows cannot be made from a column of this kind")
        column.kind, column.scale, column.first = codec.kind, codec.scale, offset
        column.width = 0 if codec.kind == TYPE_BOOL else codec.width
        if valid is not None:
            column.valid = self.pointer(valid, &size)
            check_size(size, (offset + self.rows + 7) >> 3)
        if ends is not None and self.rows:
            column.ends = <const int32_t *>self.pointer(ends, &size) + offset
            check_size(size, (offset + self.rows + 1) * 4)
        elif column.kind == TYPE_STRING or column.kind == TYPE_BYTES:
            check_size(0, self.rows)
        column.data = EMPTY
        if data is not None:
            column.data = self.pointer(data, &column.size)
        if column.kind == TYPE_BOOL:
            check_size(column.size, (offset + self.rows + 7) >> 3)
        elif column.width:
            check_size(column.size, (offset + self.rows) * column.width)
            column.data += offset * column.width
        return 0

    cdef const uint8_t *pointer(self, buffer, int64_t *size) except? NULL:
        cdef const uint8_t[::1] view = memoryview(buffer).cast("B")
        self.kept.append(buffer)
        size[0] = view.shape[0]
        return &view[0] if size[0] else EMPTY

    def __iter__(self):
        return RowsOf(self)

    cdef PyObject *next_row(self, int64_t at) except NULL:
        """The row; the reference is this object's, and gone when the next one is made."""
        cdef Py_ssize_t i
        cdef object value
        cdef PyObject *row
        if self.row is None or not is_free(<PyObject *>self.row):
            self.row = None
            self.row = new_row(self.row_class, self.n_columns)
        row = <PyObject *>self.row
        forget_hash(row)
        for i in range(self.n_columns):
            value = self.value_at(i, at)
            Py_INCREF(<PyObject *>value)
            put_field(row, i, <PyObject *>value)
        return row

    cdef object value_at(self, Py_ssize_t column, int64_t at):
        cdef ColumnOfRows *c = &self.columns[column]
        cdef int kind = c.kind
        cdef int32_t start, end, days
        cdef int64_t ticks
        cdef double real
        cdef float single
        cdef int128 whole
        cdef object value
        if c.valid != NULL and not is_set(c.valid, c.first + at):
            return None
        if kind == TYPE_LONG:
            memcpy(&ticks, c.data + 8 * at, 8)
            return PyLong_FromLongLong(ticks)
        if kind == TYPE_STRING or kind == TYPE_BYTES:
            start, end = c.ends[at], c.ends[at + 1]
            if unlikely(not 0 <= start <= end <= c.size):
                raise self.unreadable(column)
            if kind == TYPE_BYTES:
                return PyBytes_FromStringAndSize(<const char *>c.data + start, end - start)
            try:
                return PyUnicode_DecodeUTF8(<const char *>c.data + start, end - start, NULL)
            except UnicodeDecodeError:
                raise self.unreadable(column) from None
        if kind == 0:
            values = <list>PyTuple_GET_ITEM(self.lists, column)
            if at >= PyList_GET_SIZE(values):
                raise self.unreadable(column)
            return <object>PyList_GET_ITEM(values, at)
        if kind == TYPE_DOUBLE:
            memcpy(&real, c.data + 8 * at, 8)
            return PyFloat_FromDouble(real)
        if kind == TYPE_FLOAT:
            memcpy(&single, c.data + 4 * at, 4)
            return PyFloat_FromDouble(single)
        if kind == TYPE_BOOL:
            return is_set(c.data, c.first + at)
        if kind == TYPE_LONG_DECIMAL:
            memcpy(&whole, c.data + 16 * at, 16)
            value = decimal_from_int(whole, c.scale)
            if unlikely(value is None):
                raise self.unreadable(column)
            return value
        if is_integer(kind):
            self.integer_at(column, at, &ticks)
            return PyLong_FromLongLong(ticks)
        if c.width == 8:
            memcpy(&ticks, c.data + 8 * at, 8)
        else:
            memcpy(&days, c.data + 4 * at, 4)
            ticks = days
        value = (<TypeCodec>PyTuple_GET_ITEM(self.codecs, column)).from_integer(ticks)
        if unlikely(value is DAMAGED):
            raise self.unreadable(column)
        return value

    cdef bint integer_at(self, Py_ssize_t column, int64_t at, int64_t *number) noexcept:
        """The integer there; False if it is null, or the column is none of integers."""
        cdef ColumnOfRows *c = &self.columns[column]
        cdef int32_t four
        cdef int16_t two
        if not is_integer(c.kind) or (c.valid != NULL and not is_set(c.valid, c.first + at)):
            return False
        if likely(c.kind == TYPE_LONG):
            memcpy(number, c.data + 8 * at, 8)
        elif c.width == 4:
            memcpy(&four, c.data + 4 * at, 4)
            number[0] = four
        elif c.width == 2:
            memcpy(&two, c.data + 2 * at, 2)
            number[0] = two
        else:
            number[0] = <int8_t>c.data[at]
        return True

    cdef int64_t run_at(self, Py_ssize_t column, int64_t at, const char **data) noexcept:
        """The length of the text or bytes there; -1 if they are null, or damaged, or the column has none."""
        cdef ColumnOfRows *c = &self.columns[column]
        if (c.kind != TYPE_STRING and c.kind != TYPE_BYTES) or self.is_null_at(column, at):
            return -1
        if not 0 <= c.ends[at] <= c.ends[at + 1] <= c.size:
            return -1
        data[0] = <const char *>c.data + c.ends[at]
        return c.ends[at + 1] - c.ends[at]

    cdef bint is_null_at(self, Py_ssize_t column, int64_t at) noexcept:
        """Whether the value is null, of a column that comes in Arrow's buffers."""
        cdef ColumnOfRows *c = &self.columns[column]
        return c.valid != NULL and not is_set(c.valid, c.first + at)


@cython.final
cdef class RowsOf:
    """The iterator over the rows of a maker."""
    cdef RowMaker maker
    cdef int64_t at

    def __init__(self, RowMaker maker not None):
        self.maker = maker

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= self.maker.rows:
            raise StopIteration
        self.at += 1
        return <object>self.maker.next_row(self.at - 1)


cdef int check_size(int64_t size, int64_t needed) except -1:
    if size < needed:
        raise UsageError("a buffer of a column is shorter than its values", detail=f"{size} of {needed} bytes")
    return 0
