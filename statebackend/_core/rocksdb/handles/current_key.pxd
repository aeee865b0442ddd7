"""The current key, namespace and time of one keyed backend; see `current_key.pyx`."""

from libc.stdint cimport int64_t

from statebackend._core.handles.time_and_namespace cimport TimeAndNamespace
from statebackend._core.rocksdb.overlay.overlay cimport PyThread_get_thread_ident
from statebackend._core.rocksdb.overlay.keyed_store cimport KeyedStore

cdef class CurrentKey(TimeAndNamespace):
    cdef readonly KeyedStore store
    cdef bint closed
    cdef bint cleans                  # some state expires: compactions have to be told the time
    cdef int64_t told_at
    cdef bint has_later               # callables wait for the end of the outermost call

    cdef int visit(self, object key, bint is_canonical) except -1
    cdef int tell_time(self) except -1
    cdef int settle(self) except -1


cdef inline void begin_call(CurrentKey context) noexcept:
    # A call begins that may run the user's code: deferred callables wait until `end_call`.
    context.store.overlay.under_way += 1
    context.store.overlay.inside_thread = PyThread_get_thread_ident()

cdef inline int end_call(CurrentKey context) except -1:
    context.store.overlay.under_way -= 1
    context.settle()
    return 0
