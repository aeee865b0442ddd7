"""Key, namespace and time of a keyed backend; see `time_and_namespace.pyx`."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.codecs.key_value_codecs cimport KeyCodec
from statebackend._core.tables.cow_map cimport CoreKey
from statebackend._core.wall_clock cimport WallClock

cdef enum TimeSource:
    TIME_OF_SYSTEM = 0                   # read when first asked for after the key was set
    TIME_OF_CLOCK = 1                    # read when the key is set
    TIME_FIXED = 2                       # of a batch or a vectorised call

cdef class TimeAndNamespace:
    cdef readonly KeyCodec codec         # None: `_open` was not called
    cdef CoreKey key                     # number or bytes, and key group
    cdef object key_owner                # keeps `key.data` valid
    cdef bint has_key
    cdef uint64_t turn                   # counts changes of key and namespace
    cdef uint32_t first_group
    cdef uint32_t n_groups
    cdef uint32_t max_parallelism
    cdef bytes namespace_name
    cdef object namespace_object         # the current one as the user set it, if its type is frozen; else None
    cdef object encode_namespace         # callable(namespace) -> bytes
    cdef object frozen_types             # of namespaces that can never change
    cdef WallClock wall_clock            # of the machine
    cdef object clock
    cdef object read_clock               # callable(clock) -> int
    cdef int time_source
    cdef int clock_source                # `time_source` outside batches and vectorised calls
    cdef int64_t fixed_now               # of TIME_FIXED
    cdef bint now_known
    cdef int64_t now                     # when the key was set
    cdef int64_t latest                  # that was asked for
    cdef uint64_t setbacks               # how often time went back between two of them
    # In a job with event time, states in event time use these.
    cdef bint has_event_time
    cdef int64_t event_now               # of the current row or timer
    cdef int64_t event_cleaned           # the watermark: cleanup removes entries that have expired by then
    cdef bint has_worked
    cdef int64_t worked_at               # time of `clock` at the last operation that may have changed something
    cdef bint is_told                    # RocksDB: compactions know the time
    cdef int opened(self, object store) except -1
    cdef int check(self) except -1
    cdef bint is_shut(self) noexcept
    cdef bint is_inside(self) noexcept
    cdef int find_group(self, CoreKey *key) except -1
    cdef int take(self, CoreKey *key, object owner) except -1
    cdef int drop_key(self) noexcept
    cdef int no_key(self) except -1
    cdef int name_namespace(self, bytes name) except -1
    cdef int group_outside(self, uint32_t group) except -1
    cdef int begin_other_time(self) except -1
    cdef int begin_at(self, int64_t now) noexcept
    cdef int64_t time(self) noexcept

cdef inline int begin_time(TimeAndNamespace context) except -1:
    # A key is set, or some other operation begins that may change something: it uses the time from here on.
    if context.time_source == TIME_OF_SYSTEM:
        context.now_known = False
        return 0
    return context.begin_other_time()
