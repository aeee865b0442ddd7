"""The handle of map states; see `map_table_handle.pyx`."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t

from statebackend._core.codecs.key_value_codecs cimport KeyCodec
from statebackend._core.tables.cow_map cimport CoreKey, Table
from statebackend._core.handles.handle cimport Handle
from statebackend._core.tables.map_table cimport MapTable
from statebackend._core.tables.state_table cimport StateTable

cdef class MapTableHandle(Handle):
    cdef readonly KeyCodec keys_codec
    cdef readonly MapTable plain_map
    cdef readonly MapTable spaced_map
    cdef Table *plain_entries
    cdef Table *spaced_entries
    cdef PyObject *iterators             # open MapIterators of a state with a time to live, newest first; borrowed
    cdef object split_map_key(self, object key, CoreKey *inner)
    cdef MapTable map_here(self)
    cdef uint32_t anchor_here(self) noexcept
    cdef uint32_t find_entry(self, CoreKey *inner) except? 0
    cdef bint entry_expired(self, Table *table, uint32_t slot) except -1
    cdef object load_entry(self, StateTable entries, CoreKey *inner, uint32_t slot)
    cdef int renew_entry(self, CoreKey *inner, uint32_t *slot) except -1
    cdef int unlink_entry(self, MapTable map, CoreKey *at, uint32_t head_slot, CoreKey *inner, uint32_t slot,
                          bint is_cleanup) except -1
    cdef int remove_entry(self, CoreKey *inner, uint32_t slot, bint is_cleanup) except -1
    cdef int put_any(self, object key, object value) except -1
    cdef int prepare_entries(self, object entries, list keys, list values) except -1
    cdef int put_all_prepared(self, list keys, list values) except -1
    cdef int put_prepared(self, CoreKey *inner, object value) except -1
    cdef int put_stored(self, CoreKey *inner, uint32_t slot, char *source, int64_t now) except -1
    cdef uint32_t slot_to_put(self, CoreKey *inner, int64_t now) except? 0
    cdef int make_map(self) except -1
    cdef object named(self, error)
    cdef object read_entry(self, object key, bint only_look)
