"""The base of all handles; see `table_handle.pyx`."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.codecs.key_value_codecs cimport ValueCodec
from statebackend._core.tables.cow_map cimport CoreKey, CowMap, Entry, Table, find
from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.handles.look_ahead cimport Visit
from statebackend._core.handles.state_handle cimport StateHandle
from statebackend._core.tables.state_core cimport StateCore
from statebackend._core.tables.state_table cimport StateTable

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

cdef class TableHandle(StateHandle):
    cdef readonly KeyContext context
    cdef readonly StateCore core
    cdef readonly ValueCodec codec       # of values, elements or accumulators
    cdef object make_table               # callable(namespaces) -> StateTable or MapTable
    cdef readonly object watcher         # of `check_mutations`, or None
    cdef readonly StateTable plain       # entries of VOID; of a map state the heads
    cdef readonly StateTable spaced      # entries of other namespaces; None at first
    cdef Table *plain_table
    cdef Table *spaced_table
    cdef int reach                       # the next thing that a lookup reads, see `look_ahead.pxd`
    cdef bint is_cleaning                # they use the watermark, meanwhile
    cdef int64_t floor                   # what is known of the oldest timestamps holds as long as none is older
    cdef uint64_t belated                # how often the time of a row was
    # The place of the current key's entry, found while `core.calls` was `stamp`.
    cdef uint64_t stamp
    cdef Table *table                    # NULL: nothing was ever put in a namespace other than VOID
    cdef CowMap *map
    cdef uint32_t slot                   # 0: no entry
    cdef Visit *followed                 # the look-ahead's knowledge of this lookup; NULL: it does not follow it
    cdef int adopt_table(self, object made, bint is_spaced) except -1
    cdef int begin(self) except -1
    cdef int find_here(self) except -1
    cdef StateTable here(self)
    cdef int make_room(self) except -1
    cdef int make_spaced(self) except -1
    cdef int no_memory(self) except -1
    cdef object prepared(self, object value)
    cdef object loaded(self, char *stored)
    cdef object finished(self, object raw)
    cdef int remove_here(self) except -1
    cdef int clear_here(self) except -1
    cdef bint has_any(self, Table *table, Entry *entry, int wanted) except -1
    cdef int64_t rest_from(self, int64_t now) noexcept
    cdef uint64_t setbacks(self) noexcept

cdef inline int look_up(TableHandle handle) except -1:
    """Find the current key's entry, unless the handle has its place."""
    if handle.stamp != handle.core.calls:
        return handle.find_here()
    return 0
