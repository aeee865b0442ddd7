"""What the handles of all states have in common; see `handle.pyx`."""

from statebackend._core.handles.cleanup cimport CleanupHandle

cdef class Handle(CleanupHandle):
    cdef object _descriptor
    cdef bint refreshes                  # a read renews the timestamp
    cdef bint shows_expired              # a read returns what has expired until it is removed
