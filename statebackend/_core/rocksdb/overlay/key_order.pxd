"""The order of many keys: each with its first bytes as numbers, so that few comparisons look at the key itself."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memcpy, memset

from statebackend._core.rocksdb.binding.buffers cimport compare

cdef extern from *:
    uint64_t __builtin_bswap64(uint64_t number) noexcept nogil

cdef struct RankedKey:
    uint64_t front[2]                 # the first bytes of the key, as numbers that sort as they do
    const char *key
    uint32_t size
    uint32_t row


cdef inline void rank(RankedKey *to, const char *key, size_t size, size_t row) noexcept nogil:
    memset(to.front, 0, sizeof(to.front))
    memcpy(to.front, key, size if size < sizeof(to.front) else sizeof(to.front))
    to.front[0] = __builtin_bswap64(to.front[0])
    to.front[1] = __builtin_bswap64(to.front[1])
    to.key, to.size, to.row = key, <uint32_t>size, <uint32_t>row


cdef inline int by_key(const void *a, const void *b) noexcept nogil:
    """In the order of keys; equal ones in the order of rows."""
    cdef const RankedKey *first = <const RankedKey *>a
    cdef const RankedKey *second = <const RankedKey *>b
    cdef int order
    if first.front[0] != second.front[0]:
        return 1 if first.front[0] > second.front[0] else -1
    if first.front[1] != second.front[1]:
        return 1 if first.front[1] > second.front[1] else -1
    order = compare(first.key, first.size, second.key, second.size)
    return order if order else (first.row > second.row) - (first.row < second.row)


cdef inline void put_ranked_in_order(RankedKey *ranked, size_t n) noexcept nogil:
    """O(n) if they are in order, else O(n log n)."""
    cdef size_t i
    for i in range(1, n):
        if by_key(&ranked[i - 1], &ranked[i]) > 0:
            qsort(ranked, n, sizeof(RankedKey), by_key)
            return
