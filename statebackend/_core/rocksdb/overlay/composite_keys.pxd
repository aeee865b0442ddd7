"""How the keys of a keyed state are in a column family.

    key group   key                             namespace      map key
    2 bytes     8 bytes, or escaped, then 00    escaped, 00    8 bytes, or as it is, to the end

Numbers are big-endian, with the sign bit flipped in the 8 bytes of a key of kind "int", so that bytes sort as the
numbers do. In escaped bytes 00 is 01 01, and 01 is 01 02: the 00 behind them ends them, no key begins with another,
and they sort as they did. `VOID` is 00 alone. So a key group, a key, a key with its namespace and a map each lie
together, and a prefix names exactly one of them.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint16_t, uint64_t

from statebackend._core.rocksdb.binding.buffers cimport Bytes, append

cdef extern from *:
    uint64_t __builtin_bswap64(uint64_t number) noexcept nogil

cdef enum:
    GROUP_BYTES = 2
    INT_BYTES = 8


cdef inline bint append_group(Bytes *to, uint16_t group) noexcept nogil:
    cdef char data[2]
    data[0] = <char>(group >> 8)
    data[1] = <char>(group & 255)
    return append(to, data, 2)


cdef inline bint append_int(Bytes *to, int64_t number) noexcept nogil:
    cdef uint64_t ordered = __builtin_bswap64(<uint64_t>number ^ (<uint64_t>1 << 63))
    return append(to, <char *>&ordered, 8)


cdef bint append_escaped(Bytes *to, const char *data, size_t n) noexcept nogil
cdef size_t escaped_size(const char *data, size_t n) noexcept nogil
cdef size_t key_size(const char *data, size_t n, bint is_int) noexcept nogil
cdef int64_t int_at(const char *data) noexcept nogil
