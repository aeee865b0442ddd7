"""What the handles of all states have in common; see `handle.pyx`."""

from statebackend._core.handles.cleanup cimport CleanupHandle

cdef class Handle(CleanupHandle):
    pass
