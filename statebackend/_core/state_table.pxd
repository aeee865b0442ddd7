"""State tables: key groups of one state, each a copy-on-write map, and what all tables of a backend share."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from statebackend._core.arena cimport Arena
from statebackend._core.cow_map cimport Core, CowMap, Directory, Entry, Journal, Lane, ListHead, Snapshot, Table
from statebackend._core.journal cimport Log
from statebackend._core.key_groups cimport HashPlan

cdef enum ValueCode:
    # How a value of a table looks from Python; the layout knows its ValueKind only.
    CODE_RAW = 0
    CODE_INT64 = 1
    CODE_INT32 = 2
    CODE_INT16 = 3
    CODE_INT8 = 4
    CODE_DOUBLE = 5
    CODE_FLOAT = 6
    CODE_BOOL = 7
    CODE_BLOB = 8
    CODE_OBJECT = 9
    CODE_LIST = 10
    CODE_ANCHOR = 11

cdef struct CoreKey:
    # A key, split and hashed: what every operation on a table begins with.
    int64_t number
    const char *data
    uint64_t length
    uint32_t namespace
    uint32_t hash
    uint32_t group

cdef class StateCore:
    cdef Core core
    cdef readonly Arena arena
    cdef list open_marks                 # Mark, oldest first
    cdef readonly bint closed
    cdef uint32_t inside                 # checked build: whether a call is inside
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
    cdef int out_of_memory(self) except -1
    cdef int undo_to(self, Journal *journal, uint32_t version) except -1
    cdef bint keep_carried(self, Journal *journal) noexcept
    cdef int bump_version(self) except -1
    cdef int renumber(self) except -1

cdef class Mark:
    cdef readonly StateCore owner
    cdef uint32_t version
    cdef readonly bint is_open

cdef class SnapshotView:
    cdef StateCore owner
    cdef Snapshot *snapshot              # NULL once released
    cdef void _release(self) noexcept
    cdef Directory *_directory(self, StateTable table, uint32_t group) except? NULL

cdef class StateTable:
    cdef Table *table                    # owned by the core, which outlives the handle
    cdef readonly StateCore owner
    cdef readonly HashPlan plan
    cdef readonly StateTable anchors     # of a table of map entries: the table of their keys
    cdef readonly int value_code
    cdef readonly int element_code
    cdef object copy_value               # of CODE_OBJECT: callable, or None when values are immutable
    cdef readonly uint32_t max_parallelism
    cdef int split_key(self, object key, uint32_t ns, CoreKey *out) except -1
    cdef CowMap *map_for(self, uint32_t group) except NULL
    cdef CowMap *map_or_null(self, uint32_t group) noexcept
    cdef uint32_t find(self, CowMap *map, CoreKey *key) noexcept
    cdef object load_value(self, char *value, int code, uint32_t width)
    cdef int store_value(self, object value, char *out, int code, uint32_t width) except -1
    cdef void drop_stored(self, char *value, int code) noexcept
    cdef int _lay_out(self, Table *table, key, value, namespaces, timestamps, bint is_anchor_table) except -1
    cdef object _put(self, key, value, uint32_t namespace, int64_t timestamp, bint want_old)
    cdef void _fill(self, uint32_t slot, char *value, int64_t timestamp) noexcept
    cdef uint32_t _locate(self, key, uint32_t namespace, CoreKey *k, CowMap **map) except? 0
    cdef object _load(self, uint32_t slot)
    cdef object _load_at(self, Entry *entry)
    cdef uint32_t _unshare(self, CowMap *map, uint32_t slot, uint32_t hash) except 0
    cdef tuple _remove(self, key, uint32_t namespace, bint want_old)
    cdef list _list_elements(self, ListHead *head)

cdef bint list_append(Lane *lane, Table *table, CowMap *map, uint32_t slot, CoreKey *k, char *value,
                      int64_t timestamp) noexcept nogil
cdef void discard_log(Core *core, Journal *journal, Log *log) noexcept nogil
