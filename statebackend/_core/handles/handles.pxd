"""The handles of the heap backend; see `handles.pyx`."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.codecs.codecs cimport ValueCodec
from statebackend._core.tables.cow_map cimport CoreKey, CowMap, Entry, Table, find
from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.tables.state_core cimport StateCore
from statebackend._core.tables.state_table cimport StateTable
from statebackend._core.tables.sweeping cimport ExpiryIndex, Sweep

cdef enum:
    NEVER = 0xFFFFFFFFFFFFFFFF           # no count of calls

cdef enum Wanted:
    # The entries that an enumeration of a state looks for.
    WANT_ALIVE = 0                       # something that has not expired
    WANT_EXPIRED = 1                     # something that has

cdef inline uint32_t find_key(Table *table, CoreKey *key) noexcept nogil:
    """The entry of any key and namespace, 0 if there is none. Changes nothing."""
    cdef CowMap *map
    if table == NULL:
        return 0
    map = table.maps[key.group - table.first_group]
    if map == NULL:
        return 0
    return find(table, map, key)

cdef class Handle:
    cdef readonly KeyContext context
    cdef readonly StateCore core
    cdef readonly ValueCodec codec       # of values, elements or accumulators
    cdef object _descriptor
    cdef object make_table               # callable(namespaces) -> StateTable or MapTable
    cdef readonly object watcher         # of `check_mutations`, or None
    cdef readonly StateTable plain       # entries of VOID; of a map state the heads
    cdef readonly StateTable spaced      # those of other namespaces; None until there is one
    cdef Table *plain_table
    cdef Table *spaced_table
    cdef int reach                       # the next thing that a lookup reads, see `look_ahead.pxd`
    cdef int64_t ttl                     # 0: entries do not expire
    cdef bint refreshes
    cdef bint shows_expired
    cdef int64_t cleanup_size            # entries that each access looks at; 0: there is no incremental cleanup
    cdef Sweep walk                      # where the cleanup continues
    cdef bint walks_spaced
    cdef int64_t debt                    # slots' worth of long lists that later accesses must pay for
    cdef readonly ExpiryIndex plain_index    # index of what expires; None before `advance` first asks
    cdef readonly ExpiryIndex spaced_index
    cdef uint64_t expired_on_read
    cdef uint64_t expired_by_cleanup
    cdef int64_t oldest                  # the oldest timestamp that the last full round of cleanup has seen
    # The place of the current key's entry, found while `core.calls` was `stamp`.
    cdef uint64_t stamp
    cdef Table *table                    # NULL: nothing was ever put in a namespace other than VOID
    cdef CowMap *map
    cdef uint32_t slot                   # 0: there is no entry
    cdef int adopt_table(self, object made, bint is_spaced) except -1
    cdef int find_here(self) except -1
    cdef int begin(self) except -1
    cdef int make_room(self) except -1
    cdef int make_spaced(self) except -1
    cdef int no_memory(self) except -1
    cdef int remove_here(self) except -1
    cdef int clear_here(self) except -1
    cdef bint clean_here(self) except -1
    cdef int clean_some(self, int64_t entries) except -1
    cdef int walk_on(self, int64_t entries, int64_t now) except -1
    cdef int begin_round(self, int64_t now) except -1
    cdef int end_round(self) except -1
    cdef uint64_t copies(self) except? 0
    cdef StateTable swept(self, bint spaced)
    cdef bint clean_slot(self, bint spaced, CowMap *map, uint32_t slot) except -1
    cdef bint clean_key(self, object canonical, uint32_t number) except -1
    cdef int forget_bounds(self) except -1
    cdef bint has_any(self, Table *table, Entry *entry, int wanted) except -1
    cdef StateTable here(self)
    cdef int gather(self, StateTable of, int wanted, list keys, list namespaces, bint all, uint32_t number) except -1

cdef class SingleHandle(Handle):
    cdef object read(self)
    cdef object unexpired(self)
    cdef object load_here(self)
    cdef int renew(self) except -1
    cdef bint expired_here(self) except -1
    cdef int write(self, object value) except -1
    cdef int write_elsewhere(self, CoreKey *at, object owner, object value) except -1
    cdef int write_stored(self, char *stored) except -1
    cdef object stored_copy(self, ValueCodec codec, object value)

cdef class AddingHandle(SingleHandle):
    cdef object combined(self, object value)

cdef class ReducingHandle(AddingHandle):
    pass

cdef class AggregatingHandle(AddingHandle):
    cdef readonly ValueCodec inputs      # of values; None if they may be anything
