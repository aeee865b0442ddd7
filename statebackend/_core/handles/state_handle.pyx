"""`StateHandle`: the shared part of the handles of both compiled backends.

    StateHandle         descriptor, rules of expiry, time
      TableHandle       `_core.handles.table_handle`, heap: finds the current key's entry
      FamilyHandle      `_core.rocksdb.handles.family_handle`: finds what is stored at the current key

Time. `time_of(handle)` is the time by which a state is read and stamped, `cleanup_time` that by which it is cleaned up.
They differ in event time, where each row uses its own: a value that has expired for this row may be live for another
key's, or for a row that comes later with an earlier time. So cleanup uses the watermark, below which only late rows
come, and a read removes only what it does not see and `is_dead` by the watermark.
"""

from libc.stdint cimport int64_t

from statebackend._core.codecs.key_value_codecs cimport KeyCodec
from statebackend._core.handles.time_and_namespace cimport TimeAndNamespace
from statebackend._core.tables.cow_map cimport CoreKey

from statebackend.errors import SerializationError


cdef class StateHandle:
    """The handle of one state of one backend."""

    cdef int belong(self, TimeAndNamespace backend, object descriptor) except -1:
        """Be the handle of a state; its descriptor says whether and how entries expire."""
        cdef object config = descriptor.ttl_config
        self.backend, self.descriptor = backend, descriptor
        if config is not None:
            self.ttl, self.in_event_time = config.ttl, config.is_in_event_time
            self.refreshes, self.shows_expired = config.renews_on_read, config.shows_expired
        return 0

    cdef int declared(self) except -1:
        """Take from the descriptor what calls need: the handle is whole, or the descriptor is another one now."""
        return 0

    def _redeclare(self, descriptor):
        """Let a newer descriptor of the same state take effect."""
        self.descriptor = descriptor
        self.declared()

    cdef int64_t event_time(self) noexcept:
        """The time of a state in event time: the time of the row or the timer at hand, if any."""
        return self.backend.event_now if self.backend.has_event_time else self.backend.time()

    cdef int64_t cleanup_time(self) noexcept:
        if self.in_event_time and self.backend.has_event_time:
            return self.backend.event_cleaned
        return self.backend.time()


cdef object default_of(object descriptor):
    """The function that makes copies of a value state's default; None if it has none."""
    return None if descriptor.default_copy() is None else descriptor.default_copy


cdef object encoded_map_key(KeyCodec codec, object key, CoreKey *inner, str where):
    """The canonical form of a map key of the state `where`; returns what keeps its bytes."""
    try:
        return codec.split(key, inner)
    except SerializationError as error:
        raise error.at(f"map key of {where}") from None


cdef int adding_kind(object descriptor) except -1:
    return REDUCES if descriptor.kind == "reducing" else AGGREGATES if descriptor.kind == "aggregating" else FOLDS


cdef object combined(int kind, object descriptor, object old, object value):
    """Combine what is stored, or None, with an added value. Runs the user's function."""
    cdef object function
    if kind == REDUCES:
        return value if old is None else descriptor.reduce(old, value)
    if kind == FOLDS:
        return descriptor.fold(descriptor.initial_copy() if old is None else old, value)
    function = descriptor.aggregate
    return function.add(value, function.create_accumulator() if old is None else old)
