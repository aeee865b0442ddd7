"""The loop of a job that goes row by row: the key is set, the function is called, and what it gave is written."""

cimport cython
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int64_t

from statebackend._core.codecs.codecs cimport KEY_NUMBER
from statebackend._core.codecs.row_maker cimport RowMaker
from statebackend._core.codecs.row_writer cimport RowWriter
from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.handles.look_ahead cimport BUCKETS_AHEAD

from statebackend.errors import UsageError

cdef extern from "Python.h":
    object PyObject_Vectorcall(object callable, PyObject **arguments, size_t n, PyObject *names)
    bint PyList_CheckExact(object o)
    const size_t VECTORCALL_OFFSET "PY_VECTORCALL_ARGUMENTS_OFFSET"


@cython.final
cdef class Output:
    """Where the rows go that a function gives: to `writer`, or as they are to the list `rows`.

    `refused(given)` is called for what cannot be iterated over, and raises.
    """
    cdef readonly RowWriter writer
    cdef readonly list rows
    cdef object refused

    def __init__(self, RowWriter writer, refused):
        self.writer, self.refused = writer, refused
        self.rows = []

    def take(self, given):
        """Take the rows of one call; a generator runs to its end here."""
        self.take_all(given)

    cdef int take_all(self, object given) except -1:
        cdef Py_ssize_t i = 0
        if given is None:
            return 0
        if PyList_CheckExact(given):
            while i < PyList_GET_SIZE(given):
                self.take_row(<object>PyList_GET_ITEM(given, i))
                i += 1
            return 0
        try:
            rows = iter(given)
        except TypeError:
            self.refused(given)
            raise
        for row in rows:
            self.take_row(row)
        return 0

    cdef int take_row(self, object row) except -1:
        if self.writer is None:
            self.rows.append(row)
        else:
            self.writer.add(row)
        return 0


def run_rows(RowMaker rows not None, tuple key_columns not None, bint is_composite, backend, process, context,
             Output output not None):
    """Call `process(row, context)` for each row with its key current, and write what it gives.

    The key is in the columns of these numbers: one, or those of a composite key. O(rows), and the function.
    """
    cdef KeyContext keys = backend if isinstance(backend, KeyContext) else None
    cdef PyObject *arguments[3]
    cdef Py_ssize_t column
    cdef int64_t at, number, later
    cdef bint is_number
    cdef PyObject *row
    arguments[0] = NULL
    for column in key_columns:
        if not 0 <= column < rows.n_columns:
            raise UsageError("a row has no such column for its key", detail=f"column {column}")
    column = key_columns[0]
    is_number = keys is not None and not is_composite and keys.codec.form == KEY_NUMBER
    set_key = backend.set_current_key
    for at in range(rows.rows):
        row = rows.next_row(at)
        if is_composite:
            set_key(tuple([<object>PyTuple_GET_ITEM(<object>row, i) for i in key_columns]))
        elif is_number and rows.integer_at(column, at, &number):
            keys.set_key_of_run(
                <object>PyTuple_GET_ITEM(<object>row, column), number,
                &later if at + BUCKETS_AHEAD < rows.rows and rows.integer_at(column, at + BUCKETS_AHEAD, &later)
                else NULL)
        elif keys is not None and not keys.core.closed:
            keys.set_other_key(<object>PyTuple_GET_ITEM(<object>row, column))
        else:
            set_key(<object>PyTuple_GET_ITEM(<object>row, column))
        arguments[1], arguments[2] = row, <PyObject *>context
        output.take_all(PyObject_Vectorcall(process, &arguments[1], 2 | VECTORCALL_OFFSET, NULL))
