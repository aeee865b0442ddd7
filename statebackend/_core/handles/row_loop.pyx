"""Loops over rows, compiled, so that no handler of a signal runs between the key of a row and the call for it."""

cimport cython
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int64_t, uint8_t

from statebackend._core.codecs.key_value_codecs cimport KEY_NUMBER
from statebackend._core.codecs.row_maker cimport RowMaker
from statebackend._core.codecs.row_writer cimport RowWriter
from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.handles.key_shape cimport MOST_PARTS, SHAPE_NONE, SHAPE_TUPLE, bytes_in_row
from statebackend._core.handles.look_ahead cimport BUCKETS_AHEAD, COMING_BYTES
from statebackend._core.pulse cimport call_returned
from statebackend._core.memory.interpreter cimport PyList_CheckExact
from statebackend._core.tables.state_core cimport end_objects_of_row

from statebackend.errors import UsageError

cdef extern from "Python.h":
    object PyObject_Vectorcall(object callable, PyObject **arguments, size_t n, PyObject *names)
    const size_t VECTORCALL_OFFSET "PY_VECTORCALL_ARGUMENTS_OFFSET"


def call_each(backend, list keys not None, list namespaces, list times, action, columns, rows):
    cdef list results = []
    cdef KeyContext context = backend if isinstance(backend, KeyContext) else None
    for row in range(len(keys)) if rows is None else rows:
        if context is not None:
            end_objects_of_row(context.core)
        if times is not None:
            backend._event_now = times[row]
        backend.set_current_key(keys[row])
        if namespaces is not None:
            backend._namespace = namespaces[row]
        results.append(action(*[column[row] for column in columns]))
    return results


def clear_key_in(KeyContext context not None, list states not None):
    """Remove the current key's entries in these states. Finalisers of the objects may make another key current."""
    cdef object saved = context._save_key()
    try:
        for state in states:
            context._restore_key(saved)
            for number in [0, *state._numbers_of_key()]:
                context._restore_key(saved)
                state._enter_namespace(number)
                state.clear()
    finally:
        context._restore_key(saved)


@cython.final
cdef class Iteration:
    """An iterator over a generator. `check_call()` raises where a step may not begin, which leaves it open."""
    cdef object check_call
    cdef object steps

    def __init__(self, check_call, steps):
        self.check_call, self.steps = check_call, steps

    def __iter__(self):
        return self

    def __next__(self):
        self.check_call()
        return next(self.steps)

    def close(self):
        self.steps.close()


@cython.final
cdef class Output:
    """Where the rows go that a function gives: to `writer`, or as they are to the list `rows`.

    `refused(given)` is called for objects that cannot be iterated over, and raises.
    """
    cdef readonly RowWriter writer
    cdef readonly list rows
    cdef object refused

    def __init__(self, RowWriter writer, refused):
        self.writer, self.refused = writer, refused
        self.rows = []

    def take(self, given):
        """Take the rows of one call, or None; a generator runs to its end here. Counts the call for the pulse."""
        self.take_all(given)

    @property
    def count(self):
        """The rows since they were last taken to Arrow; of a job without a schema, all of the batch."""
        return len(self.rows) if self.writer is None else self.writer.count

    def cut(self, count):
        if self.writer is None:
            del self.rows[count:]
        else:
            self.writer.cut(count)

    def add(self, row):
        self.take_row(row)

    cdef int take_all(self, object given) except -1:
        cdef Py_ssize_t i = 0
        call_returned()
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


@cython.final
cdef class RowTimes:
    """The event times of rows, in columns. `timestamp` is the row's at hand, None for a null.

    State uses the times `by`: each row's own time, or the watermark if it has none.
    """
    cdef const int64_t[::1] own
    cdef const int64_t[::1] by
    cdef const uint8_t[::1] is_null
    cdef int64_t at

    def __init__(self, own not None, by not None, is_null not None):
        self.own, self.by, self.is_null = own, by, is_null
        if not len(own) == len(by) == len(is_null):
            raise UsageError("columns of times have different lengths")

    @property
    def timestamp(self):
        return self.own[self.at] if self.at < self.own.shape[0] and not self.is_null[self.at] else None


cdef inline object key_of_row(PyObject *row, tuple columns, bint is_composite):
    if is_composite:
        return tuple([<object>PyTuple_GET_ITEM(<object>row, i) for i in columns])
    return <object>PyTuple_GET_ITEM(<object>row, columns[0])


def run_rows(RowMaker rows not None, tuple key_columns not None, bint is_composite, backend, process, context,
             Output output not None, RowTimes times=None, before_row=None, guard=None):
    """Call `process(row, context)` for each row with its key current, and write what it gives.

    The key is in the columns of these numbers: one, or several for a composite key. With `times`, states in event time
    use the row's; `before_row()` is called when it is the row's turn. With `guard` each call stands between
    `begin()` and `passed()`, or `failed(at, error)`, and goes on if that does not raise. O(rows), and the function.
    """
    cdef KeyContext keys = backend if isinstance(backend, KeyContext) else None
    cdef PyObject *arguments[3]
    cdef Py_ssize_t column, i
    cdef Py_ssize_t columns[MOST_PARTS]
    cdef int64_t at, number, later, length
    cdef bint is_number, is_bytes
    cdef char bytes_later[COMING_BYTES]
    cdef PyObject *row
    arguments[0] = NULL
    for column in key_columns:
        if not 0 <= column < rows.n_columns:
            raise UsageError("a row has no such column for its key", detail=f"column {column}")
    column = key_columns[0]
    is_number = keys is not None and not is_composite and keys.codec.form == KEY_NUMBER
    is_bytes = (keys is not None and keys.shape.form != SHAPE_NONE and is_composite == (keys.shape.form == SHAPE_TUPLE)
                and len(key_columns) == (keys.shape.n if is_composite else 1))
    for i in range(len(key_columns) if is_bytes else 0):
        columns[i] = key_columns[i]
    set_key = backend.set_current_key
    if times is not None and times.own.shape[0] != rows.rows:
        raise UsageError("there is not one time for each row")
    for at in range(rows.rows):
        if times is not None:
            times.at = at
            if before_row is not None:
                before_row()
            if keys is not None:
                keys.event_now = times.by[at]
            else:
                backend.set_event_time(times.by[at])
        row = rows.next_row(at)
        if is_bytes and not keys.core.closed:
            length = 0
            if at + BUCKETS_AHEAD < rows.rows:
                length = bytes_in_row(rows, &keys.shape, columns, at + BUCKETS_AHEAD, bytes_later)
            keys.set_bytes_of_run(key_of_row(row, key_columns, is_composite), bytes_later, length)
        elif is_composite:
            set_key(key_of_row(row, key_columns, True))
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
        if guard is None:
            output.take_all(PyObject_Vectorcall(process, &arguments[1], 2 | VECTORCALL_OFFSET, NULL))
            continue
        guard.begin()
        try:
            output.take_all(PyObject_Vectorcall(process, &arguments[1], 2 | VECTORCALL_OFFSET, NULL))
        except Exception as error:
            guard.failed(at, error)
        else:
            guard.passed()
