"""What writing and reading columns of nested types share: forms, numbers and text, the keys of a map, blocks."""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <stdint.h>
    #include <sys/mman.h>

    /* Ask for large pages where the system gives them on demand: in small ones, fresh memory costs 0.5 ns a byte. */
    static inline void sb_use_large_pages(void *p, uint64_t n) {
    #ifdef MADV_HUGEPAGE
        uintptr_t skipped = -(uintptr_t)p & 4095;
        if (n >= 1 << 21)
            (void)madvise((char *)p + skipped, n - skipped, MADV_HUGEPAGE);
    #endif
    }
    """
    void use_large_pages "sb_use_large_pages"(void *p, uint64_t n) noexcept nogil

cdef enum Form:
    NOTHING = 0                          # Arrow's null type: no value is present
    BOOL = 1                             # bits in Arrow, bytes in stored values
    NUMBER = 2                           # of any bits
    RANGED = 3                           # an integer between `low` and `high`
    FLOAT = 4
    DOUBLE = 5                           # for map keys and keys: one zero and one NaN; other doubles are NUMBERs
    DECIMAL = 6                          # of up to 18 digits: 16 bytes in Arrow, 8 in stored values
    WIDE_DECIMAL = 7                     # 16 bytes
    STRING = 8
    BYTES = 9
    RECORD = 10
    LIST = 11
    MAP = 12

cdef enum Outcome:
    DONE = 0
    IRREGULAR = 1                        # Python must look at each value
    NO_MEMORY = 2

cdef struct Spans:                       # a stack of [start, end, first equal] of map keys
    int64_t *at
    int64_t size
    int64_t room


# --- numbers and text ---

cdef inline bint is_set(const uint8_t *bits, int64_t at) noexcept nogil:
    return bits[at >> 3] >> (at & 7) & 1

cdef inline void copy_number(uint8_t *to, const uint8_t *p, int64_t width) noexcept nogil:
    if width == 8:
        memcpy(to, p, 8)
    elif width == 4:
        memcpy(to, p, 4)
    elif width == 16:
        memcpy(to, p, 16)
    elif width == 2:
        memcpy(to, p, 2)
    else:
        to[0] = p[0]

cdef inline int64_t int_at(const uint8_t *p, int64_t width) noexcept nogil:
    cdef int64_t eight
    cdef int32_t four
    cdef int16_t two
    if width == 8:
        memcpy(&eight, p, 8)
        return eight
    if width == 4:
        memcpy(&four, p, 4)
        return four
    if width == 2:
        memcpy(&two, p, 2)
        return two
    return <int8_t> p[0]

cdef inline bint is_below(const uint8_t *p, const uint64_t *limit) noexcept nogil:
    """Whether the magnitude of an integer of 16 bytes lies below a limit."""
    cdef uint64_t low, high
    memcpy(&low, p, 8)
    memcpy(&high, p + 8, 8)
    if high >> 63:
        low = ~low + 1
        high = ~high + (low == 0)
    return high < limit[1] or (high == limit[1] and low < limit[0])

cdef inline uint64_t canonical_double(uint64_t bits) noexcept nogil:
    if bits == <uint64_t> 1 << 63:
        return 0
    if bits & <uint64_t> 0x7FFFFFFFFFFFFFFF > <uint64_t> 0x7FF0000000000000:
        return <uint64_t> 0x7FF8000000000000
    return bits

cdef inline uint32_t canonical_float(uint32_t bits) noexcept nogil:
    if bits == <uint32_t> 0x80000000:
        return 0
    return <uint32_t> 0x7FC00000 if bits & 0x7FFFFFFF > 0x7F800000 else bits

cdef inline bint is_signalling(uint32_t bits) noexcept nogil:
    """Python's floats are doubles, and the way there makes such a NaN a quiet one."""
    return bits & 0x7FFFFFFF > 0x7F800000 and not bits & 0x00400000

cdef inline bint is_ascii(const uint8_t *p, int64_t n) noexcept nogil:
    cdef uint64_t word, all_bits = 0
    cdef uint32_t low, high
    cdef int64_t i = 0
    if n >= 8:
        while i + 8 <= n:
            memcpy(&word, p + i, 8)
            all_bits |= word
            i += 8
        memcpy(&word, p + n - 8, 8)
        all_bits |= word
    elif n >= 4:
        memcpy(&low, p, 4)
        memcpy(&high, p + n - 4, 4)
        all_bits = low | high
    elif n > 0:
        all_bits = p[0] | p[n >> 1] | p[n - 1]
    return not all_bits & <uint64_t> 0x8080808080808080

cdef bint is_long_text(const uint8_t *p, int64_t n) noexcept nogil

cdef inline bint is_text(const uint8_t *p, int64_t n) noexcept nogil:
    return is_ascii(p, n) or is_long_text(p, n)


# --- the keys of a map ---

cdef int open_spans(Spans *spans, int64_t count) noexcept nogil
cdef int64_t find_equal(const uint8_t *data, Spans *spans, int64_t base, int64_t count) noexcept nogil


# --- parts ---

cdef class Block:
    cdef uint8_t *data
    cdef Py_ssize_t size

cdef Block block_of(void *data, Py_ssize_t size)
cdef int set_limits(str form, low, high, int64_t *lowest, int64_t *highest, uint64_t *limit) except -1
