"""Keys, and the change of each; see `key_changes.pyx`.

    entries   key (place in `keys`), hash, its change,       in the order in which they came
    slots     the number of an entry + 1, or 0                         found by hash, probed one after the other
    keys      the bytes of all of them
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t

from statebackend._core.rocksdb.binding.buffers cimport Bytes

cdef struct Noted:
    uint64_t at
    int64_t became
    uint32_t size
    uint32_t hash


cdef class KeyChanges:
    cdef Noted *entries
    cdef size_t n
    cdef size_t room
    cdef uint32_t *slots
    cdef size_t n_slots               # a power of two, or 0
    cdef Bytes keys
    cdef bint is_busy                 # a thread reads or writes it without the GIL

    cdef int go_in(self, KeyChanges other=*) except -1
    cdef void go_out(self, KeyChanges other=*) noexcept
    cdef bint note(self, const char *key, size_t n, int64_t became) noexcept nogil
    cdef bint note_hashed(self, const char *key, size_t n, uint32_t hash, int64_t became) noexcept nogil
    cdef uint32_t *slot_of(self, const char *key, size_t n, uint32_t hash) noexcept nogil
    cdef bint make_room(self, size_t more) noexcept nogil
