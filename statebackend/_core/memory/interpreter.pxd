"""What the interpreter wants of a compiled loop that calls the user's functions: those may run no bytecode."""

from cpython.exc cimport PyErr_CheckSignals

cdef enum:
    ROWS_IN_TURN = 1024                  # after so many, it gives way


cdef inline int give_way() except -1:
    """Let signals be handled, which may raise, and other threads have the GIL."""
    PyErr_CheckSignals()
    with nogil:
        pass
    return 0
