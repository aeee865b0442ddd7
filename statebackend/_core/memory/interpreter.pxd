"""The interpreter's own functions that several modules call, and its demands on a compiled loop.

The loop calls the user's functions, which may run no bytecode.
"""

from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject

cdef extern from "Python.h":
    bint PyBytes_CheckExact(object o)
    bint PyDict_CheckExact(object o)
    PyObject *PyDict_GetItemWithError(object dict, object key) except? NULL
    void PyErr_Clear()
    bint PyFloat_CheckExact(object o)
    bint PyList_CheckExact(object o)
    bint PyLong_CheckExact(object o)
    unsigned long PyThread_get_thread_ident() nogil
    bint PyTuple_Check(object o)
    bint PyTuple_CheckExact(object o)
    const char *PyUnicode_AsUTF8AndSize(object o, Py_ssize_t *size) noexcept
    bint PyUnicode_CheckExact(object o)
    object PyUnicode_DecodeUTF8(const char *data, Py_ssize_t size, const char *errors)
    void Py_DECREF(PyObject *o)
    PyObject *Py_False
    void Py_INCREF(PyObject *o)
    PyObject *Py_True

cdef enum:
    ROWS_IN_TURN = 1024                  # after so many, it gives way


cdef inline int give_way() except -1:
    """Let signals be handled, which may raise, and other threads have the GIL."""
    PyErr_CheckSignals()
    with nogil:
        pass
    return 0
