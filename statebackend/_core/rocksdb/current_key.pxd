"""The current key, namespace and time of one keyed backend; see `current_key.pyx`."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.codecs.codecs cimport KeyCodec
from statebackend._core.rocksdb.overlay cimport PyThread_get_thread_ident
from statebackend._core.rocksdb.store cimport Store
from statebackend._core.tables.cow_map cimport CoreKey
from statebackend._core.wall_clock cimport WallClock

cdef enum TimeSource:
    TIME_OF_SYSTEM = 0                # read when first asked for after the key was set
    TIME_OF_CLOCK = 1                 # read when the key is set
    TIME_FIXED = 2                    # of a batch or a vectorised call


cdef class CurrentKey:
    cdef readonly Store store
    cdef readonly KeyCodec codec
    cdef bint closed
    cdef CoreKey key                  # number or bytes, and key group
    cdef object key_owner             # keeps `key.data` valid
    cdef bint has_key
    cdef uint64_t turn                # counts changes of key and namespace
    cdef uint32_t first_group
    cdef uint32_t n_groups
    cdef uint32_t max_parallelism
    cdef bytes namespace_name
    cdef object namespace_object      # as it was given, if it can never change; else None
    cdef object encode_namespace      # callable(namespace) -> bytes
    cdef object frozen_types          # of namespaces that can never change
    cdef WallClock wall_clock         # of the machine
    cdef object clock
    cdef object read_clock            # callable(clock) -> int
    cdef int time_source
    cdef int clock_source             # what `time_source` is outside batches and vectorised calls
    cdef int64_t fixed_now            # of TIME_FIXED
    cdef bint now_known
    cdef int64_t now                  # at which the key was set
    cdef bint has_event_time
    cdef int64_t event_now            # of the row or the timer at hand
    cdef int64_t event_cleaned        # the watermark: cleanup removes what has expired by then
    cdef bint has_worked
    cdef int64_t worked_at            # time of `clock` at the last operation that may have changed something
    cdef bint cleans                  # some state expires: compactions have to be told the time
    cdef bint is_told                 # they know what there is to know at `told_at`
    cdef int64_t told_at
    cdef bint has_later               # callables wait for the end of the outermost call

    cdef int64_t time(self) noexcept
    cdef int64_t time_in(self, bint in_event_time) noexcept
    cdef int begin_time(self) except -1
    cdef int visit(self, object canonical) except -1
    cdef int take(self, CoreKey *key, object owner) except -1
    cdef int tell_time(self) except -1
    cdef int check(self) except -1
    cdef int settle(self) except -1
    cdef int no_key(self) except -1


cdef inline void begin_call(CurrentKey context) noexcept:
    # A call begins that may run the user's code: deferred callables wait until `end_call`.
    context.store.overlay.under_way += 1
    context.store.overlay.inside_thread = PyThread_get_thread_ident()

cdef inline int end_call(CurrentKey context) except -1:
    context.store.overlay.under_way -= 1
    context.settle()
    return 0
