"""The base of all handles; see `family_handle.pyx`."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from statebackend._core.handles.state_handle cimport StateHandle
from statebackend._core.rocksdb.binding.write_batch cimport Write
from statebackend._core.rocksdb.binding.database cimport Database, PinnedValue
from statebackend._core.rocksdb.handles.current_key cimport CurrentKey
from statebackend._core.rocksdb.overlay.keyed_store cimport KeyedStore, Table
from statebackend._core.codecs.type_codec cimport Room
from statebackend._core.codecs.value_bytes cimport ValueBytes

cdef enum:
    STAMP_BYTES = 8
    FEW = 512                         # bytes of a value that are held without an object

cdef struct ValueCopy:
    # A copy of a value that was read. Decoding may run the user's code, which may write or close the backend.
    const char *data
    size_t size
    char few[512]


cdef class FamilyHandle(StateHandle):
    cdef CurrentKey context
    cdef readonly KeyedStore store
    cdef readonly Table table
    cdef readonly ValueBytes codec    # of values, elements or accumulators
    cdef size_t front                 # bytes of the timestamp in front of a value
    cdef bint may_be_watched          # a collection was iterated over, and may still be

    cdef bint has_gone(self, const char *stored, size_t n) except -1
    cdef int change(self, Write what, const char *key, size_t n, const char *value, size_t size) except -1
    cdef bint watched(self) except -1
    cdef object loaded(self, ValueBytes codec, const char *stored, size_t n)
    cdef int put_in(self, ValueBytes codec, object value, Room *room) except -1


cdef object damaged()
cdef object hold(Database database, PinnedValue *found, ValueCopy *held)

cdef inline int64_t stamp_at(const char *stored) noexcept nogil:
    cdef int64_t stamp
    memcpy(&stamp, stored, STAMP_BYTES)
    return stamp
