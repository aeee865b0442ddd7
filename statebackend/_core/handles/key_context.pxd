"""The current key, namespace and time of one keyed backend; see `key_context.pyx`."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.tables.cow_map cimport CoreKey
from statebackend._core.handles.key_shape cimport KeyShape
from statebackend._core.handles.look_ahead cimport Coming, LookAhead
from statebackend._core.handles.time_and_namespace cimport TimeAndNamespace
from statebackend._core.tables.state_core cimport StateCore

cdef enum:
    NEAR_SETS = 32                       # a namespace is looked for in one of them, by its address
    NEAR_WAYS = 8
    NEAR_SHIFT = 59                      # leaves as many bits as there are sets
    NEAR_LONGEST = 128                   # bytes; longer names are not kept

cdef class KeyContext(TimeAndNamespace):
    cdef readonly StateCore core
    cdef object key_room                 # of bytes that were written here, the owner; used again without other owners
    cdef KeyShape shape
    cdef object key_object               # the current key, if the turn is of `key_turn`; or None
    cdef uint64_t key_turn
    # Namespaces as they were given, of frozen types, with their names and numbers. A number counts only while the table
    # of namespaces has this very name for it: it may have been given to another namespace meanwhile.
    cdef list near_objects
    cdef list near_names
    cdef uint32_t near_numbers[256]
    cdef uint32_t near_turn              # the way to be replaced next
    cdef int64_t event_latest            # that was asked for
    cdef uint64_t event_setbacks         # how often it went back between two of them
    cdef list on_record                  # states that clean up whenever a key is set; None: none does
    cdef LookAhead ahead
    cdef int set_number(self, int64_t number) except -1
    cdef int set_key_of_run(self, object key, int64_t number, const int64_t *later) except -1
    cdef void expect(self, Coming *coming) noexcept
    cdef void look_ahead(self) noexcept
    cdef Coming *begin_turn(self) noexcept
    cdef void ask_for_buckets(self) noexcept
    cdef int clean_on_record(self) except -1
    cdef int set_other_key(self, object key) except -1
    cdef int set_bytes_of_run(self, object key, const char *later, int64_t length) except -1
    cdef int take_key(self, object key, Coming *expected) except -1
    cdef object room_for_key(self)
    cdef int adopt(self, CoreKey *key, object owner) except -1
    cdef void hash_key(self) noexcept
    cdef bint to_near_namespace(self, object namespace) except -1
    cdef int keep_near(self, object namespace) except -1
    cdef int number_namespace(self, uint32_t number) except -1
    cdef int return_to(self, CoreKey *key, object owner) except -1
