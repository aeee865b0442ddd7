"""Bytes that grow."""

from libc.stddef cimport size_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy

cdef enum:
    BESIDE_ROW = 64                   # RocksDB has a row, with less than so many bytes more, in a length of 32 bits

cdef struct Bytes:
    char *data
    size_t size
    size_t room


cdef inline bint append(Bytes *to, const char *data, size_t n) noexcept nogil:
    """False without memory: `to` is as it was."""
    cdef size_t room = to.room
    cdef char *grown
    if to.size + n > room:
        room = to.size + n + room // 2 + 64
        grown = <char *>realloc(to.data, room)
        if grown == NULL:
            return False
        to.data = grown
        to.room = room
    if n:
        memcpy(to.data + to.size, data, n)
    to.size += n
    return True


cdef inline void drop(Bytes *bytes) noexcept nogil:
    free(bytes.data)
    bytes.data = NULL
    bytes.size = bytes.room = 0


cdef inline int compare(const char *a, size_t n, const char *b, size_t m) noexcept nogil:
    """Below 0, 0 or above 0, in the order of RocksDB's keys."""
    cdef int order = memcmp(a, b, n if n < m else m)
    return order if order else (n > m) - (n < m)
