"""Rows of bytes as offsets and data: the input and output of calls for many keys or values."""

from libc.stdint cimport int64_t, uint8_t

cdef extern from *:
    const char *NO_BYTES "\"\""


cdef inline bint are_rows(const int64_t *offsets, Py_ssize_t n, Py_ssize_t size) noexcept nogil:
    """Whether these `n` + 1 offsets cut `size` bytes into rows that a key or value may be: each below 4 GB."""
    cdef Py_ssize_t i
    if offsets[0] < 0 or offsets[n] > size:
        return False
    for i in range(n):
        if offsets[i + 1] < offsets[i] or offsets[i + 1] - offsets[i] >= <int64_t>1 << 32:
            return False
    return True


cdef inline const char *start_of(const uint8_t[::1] data) noexcept nogil:
    """An address, even of no bytes: RocksDB wants one."""
    return <const char *>&data[0] if data.shape[0] else NO_BYTES


cdef int check_rows(const int64_t[::1] offsets, const uint8_t[::1] data, str what) except -1
