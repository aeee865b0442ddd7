"""The canonical bytes of a key, made without an object.

STRING and BYTES keys, and composite ones of up to eight integers, truths, texts and byte strings, have a shape: they
are a `str`, a `bytes`, or a tuple of such objects. All others take the general way, by their codec.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from statebackend._core.codecs.key_value_codecs cimport KEY_BYTES, KEY_STRING, KeyCodec
from statebackend._core.codecs.row_maker cimport RowMaker
from statebackend._core.codecs.type_codec cimport TypeCodec
from statebackend._core.handles.look_ahead cimport COMING_BYTES
from statebackend._core.memory.interpreter cimport (
    PyBytes_CheckExact, PyErr_Clear, PyLong_CheckExact, PyTuple_Check, PyUnicode_AsUTF8AndSize,
    PyUnicode_CheckExact, Py_False, Py_True)
from statebackend._core.tables.values cimport (
    TYPE_BOOL, TYPE_BYTES, TYPE_RECORD, TYPE_STRING, goes_as_tuple, is_integer, long_as_int64)

cdef extern from "Python.h":
    Py_ssize_t PyTuple_GET_SIZE(object o)
    PyObject *PyTuple_GET_ITEM(PyObject *o, Py_ssize_t i)
    const char *PyBytes_AS_STRING(object o)
    Py_ssize_t PyBytes_GET_SIZE(object o)


cdef void shape_of(KeyCodec codec, KeyShape *shape):
    """Find the shape of the keys of a codec."""
    cdef TypeCodec part
    cdef Py_ssize_t i
    shape.form, shape.n = SHAPE_NONE, 0
    if codec.form == KEY_STRING:
        shape.form = SHAPE_TEXT
    elif codec.form == KEY_BYTES:
        shape.form = SHAPE_BYTES
    elif codec.typed is not None and codec.typed.kind == TYPE_RECORD and len(codec.typed.parts) <= MOST_PARTS:
        for i, part in enumerate(codec.typed.parts):
            if is_integer(part.kind):
                shape.parts[i].form = PART_INTEGER
                shape.parts[i].low, shape.parts[i].high = part.low, part.high
            elif part.kind == TYPE_BOOL:
                shape.parts[i].form = PART_TRUTH
            elif part.kind == TYPE_STRING:
                shape.parts[i].form = PART_TEXT
            elif part.kind == TYPE_BYTES:
                shape.parts[i].form = PART_BYTES
            else:
                return
        shape.form, shape.n = SHAPE_TUPLE, len(codec.typed.parts)


cdef inline bint put_part(const PartShape *part, object item, Writer *writer) noexcept:
    cdef int64_t number
    cdef Py_ssize_t length
    cdef const char *data
    if part.form == PART_INTEGER and PyLong_CheckExact(item):
        return (long_as_int64(item, &number) and part.low <= number <= part.high
                and put_number(writer, number))
    if item is None:
        return put_none(writer)
    if part.form == PART_TEXT and PyUnicode_CheckExact(item):
        data = PyUnicode_AsUTF8AndSize(item, &length)
        if data == NULL:
            PyErr_Clear()                # a lone surrogate: the encoder raises the proper error
            return False
        return put_run(writer, data, length)
    if part.form == PART_BYTES and PyBytes_CheckExact(item):
        return put_run(writer, PyBytes_AS_STRING(item), PyBytes_GET_SIZE(item))
    if part.form == PART_TRUTH and (<PyObject *>item == Py_True or <PyObject *>item == Py_False):
        return put_number(writer, <PyObject *>item == Py_True)
    return False


cdef int64_t bytes_of_tuple(const KeyShape *shape, PyObject *key, char *out) noexcept:
    """Write the canonical form of a composite key; returns how many bytes, 0 if it takes the general way."""
    cdef Writer writer
    cdef Py_ssize_t i
    if not PyTuple_Check(<object>key) or PyTuple_GET_SIZE(<object>key) != shape.n or not goes_as_tuple(<object>key):
        return 0
    writer.at, writer.end = out, out + COMING_BYTES
    for i in range(shape.n):
        if not put_part(&shape.parts[i], <object>PyTuple_GET_ITEM(key, i), &writer):
            return 0
    return writer.at - out


cdef int64_t bytes_of_key(const KeyShape *shape, PyObject *key, char *out) noexcept:
    """Write the canonical form of a key of any shape; returns how many bytes, 0 if it is long or has another form."""
    cdef Py_ssize_t length
    cdef const char *data
    if shape.form == SHAPE_TUPLE:
        return bytes_of_tuple(shape, key, out)
    if shape.form == SHAPE_TEXT and PyUnicode_CheckExact(<object>key):
        data = PyUnicode_AsUTF8AndSize(<object>key, &length)
        if data == NULL:
            PyErr_Clear()
            return 0
    elif shape.form == SHAPE_BYTES and PyBytes_CheckExact(<object>key):
        data, length = PyBytes_AS_STRING(<object>key), PyBytes_GET_SIZE(<object>key)
    else:
        return 0
    if length > COMING_BYTES:
        return 0
    memcpy(out, data, length)
    return length


cdef int64_t bytes_in_row(RowMaker rows, const KeyShape *shape, const Py_ssize_t *columns, int64_t at,
                          char *out) noexcept:
    """Write the canonical form of a row's key; returns how many bytes, 0 if that is better left to the codec."""
    cdef Writer writer
    cdef Py_ssize_t i
    cdef int64_t number, length
    cdef const char *data
    cdef bint is_put
    if shape.form != SHAPE_TUPLE:
        length = rows.run_at(columns[0], at, &data)
        if not 0 < length <= COMING_BYTES:
            return 0
        memcpy(out, data, length)
        return length
    writer.at, writer.end = out, out + COMING_BYTES
    for i in range(shape.n):
        is_put = False
        if shape.parts[i].form == PART_INTEGER and rows.integer_at(columns[i], at, &number):
            is_put = put_number(&writer, number)
        elif shape.parts[i].form == PART_TEXT or shape.parts[i].form == PART_BYTES:
            length = rows.run_at(columns[i], at, &data)
            is_put = length >= 0 and put_run(&writer, data, length)
        if not is_put and not (rows.is_null_at(columns[i], at) and put_none(&writer)):
            return 0
    return writer.at - out
