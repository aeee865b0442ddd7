"""The root of all handles; see `state_handle.pyx`."""

from libc.stdint cimport int64_t, uint64_t

from statebackend._core.codecs.key_value_codecs cimport KeyCodec
from statebackend._core.handles.time_and_namespace cimport TimeAndNamespace
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.cow_map cimport CoreKey
from statebackend._core.tables.expiry cimport is_expired

cdef enum AddingKind:
    # The states that call a function of the user's for each added value.
    REDUCES = 0
    AGGREGATES = 1
    FOLDS = 2

cdef class StateHandle:
    cdef readonly TimeAndNamespace backend
    cdef readonly object descriptor      # the newest one of the state
    cdef readonly int64_t ttl            # 0: entries do not expire
    cdef readonly bint in_event_time     # use the time of rows, where they tell one
    cdef readonly bint refreshes         # a read renews the timestamp
    cdef readonly bint shows_expired     # a read returns what has expired until it is removed
    cdef public uint64_t expired_on_read
    cdef public uint64_t expired_by_cleanup
    cdef int belong(self, TimeAndNamespace backend, object descriptor) except -1
    cdef int declared(self) except -1
    cdef int64_t event_time(self) noexcept
    cdef int64_t cleanup_time(self) noexcept

cdef inline int64_t time_of(StateHandle handle) noexcept:
    # The time by which the row at hand sees a state, and stamps it.
    if unlikely(handle.in_event_time):
        return handle.event_time()
    return handle.backend.time()

cdef inline bint is_dead(StateHandle handle, int64_t timestamp) noexcept:
    # Whether something that has expired by the time of the call may be removed: in event time, only when the watermark
    # says so too. A row that comes later with an earlier time may still see it.
    if likely(not (handle.in_event_time and handle.backend.has_event_time)):
        return True
    return is_expired(timestamp, handle.ttl, handle.backend.event_cleaned)

cdef object default_of(object descriptor)
cdef object encoded_map_key(KeyCodec codec, object key, CoreKey *inner, str where)
cdef int adding_kind(object descriptor) except -1
cdef object combined(int kind, object descriptor, object old, object value)
