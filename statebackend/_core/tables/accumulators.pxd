"""Adds a value to a stored one: reductions and aggregates, over the bytes that entries hold.

Accumulators have the layout of their serializers: a byte for nulls, then the fields, unaligned.

    average    sum DOUBLE, count LONG            17 bytes
    moments    n DOUBLE, avg DOUBLE, m2 DOUBLE   25 bytes
"""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcmp, memcpy

from statebackend._core.memory.arena cimport Blob, blob_data
from statebackend._core.tables.reductions cimport OP_FIRST, OP_LAST, OP_MAX, OP_MIN, OP_SUM, reduce_into

cdef extern from *:
    """
    #include <string.h>
    typedef __int128 sb_int128;
    static inline sb_int128 sb_load128(const char *at) { sb_int128 x; memcpy(&x, at, 16); return x; }
    /* -1, 0 or 1. */
    static inline int sb_compare128(const char *a, const char *b) {
        sb_int128 x = sb_load128(a), y = sb_load128(b);
        return (x > y) - (x < y);
    }
    /* Whether the sum has at most `digits` digits. */
    static inline int sb_sum128(const char *a, const char *b, int digits, char *out) {
        sb_int128 limit = 1, x = sb_load128(a), y = sb_load128(b);
        for (int i = 0; i < digits; i++) limit *= 10;
        /* Two numbers of 38 digits sum up to more than an int128 holds. */
        if (__builtin_add_overflow(x, y, &x) || x >= limit || x <= -limit) return 0;
        memcpy(out, &x, 16);
        return 1;
    }
    """
    int compare_wide "sb_compare128"(const char *a, const char *b) noexcept nogil
    bint sum_wide "sb_sum128"(const char *a, const char *b, int digits, char *out) noexcept nogil

cdef enum:
    AVERAGE_WIDTH = 17
    MOMENTS_WIDTH = 25
    WIDEST_COMPUTED = 32                 # room for the result that `add_fixed` computes

cdef enum AddKind:
    ADD_NUMBER = 0                       # `op` over `code`: see reductions.pxd
    ADD_DECIMAL = 1                      # `op` over unscaled 64-bit integers of at most `digits` digits
    ADD_WIDE_DECIMAL = 2                 # likewise, of 128 bits
    ADD_AVERAGE = 3                      # the value is a double
    ADD_MOMENTS = 4
    ADD_BYTES = 5                        # OP_MIN, OP_MAX, OP_FIRST, OP_LAST of blobs
    ADD_WHOLE = 6                        # OP_FIRST, OP_LAST of a fixed width

cdef struct Adding:
    AddKind kind
    int op
    int code
    int digits
    uint64_t limit                       # 10 to the power of `digits`, of ADD_DECIMAL
    uint64_t width                       # of the stored value

cdef inline bint add_fixed(const Adding *adding, const char *old, const char *value, char *out) noexcept nogil:
    """Set `out` to old (NULL: nothing) with `value` added. False on overflow."""
    cdef int64_t count, total
    cdef double x, mean, m2, n, delta, delta_n
    if adding.kind == ADD_NUMBER:
        return reduce_into(adding.op, adding.code, old, value, out)
    if adding.kind == ADD_DECIMAL:
        if not reduce_into(adding.op, adding.code, old, value, out):
            return False
        total = (<int64_t *>out)[0]
        return -<int64_t>adding.limit < total < <int64_t>adding.limit
    if adding.kind == ADD_WIDE_DECIMAL:
        if old != NULL:
            if adding.op == OP_SUM:
                return sum_wide(old, value, adding.digits, out)
            if (adding.op == OP_FIRST or (adding.op == OP_MIN and compare_wide(value, old) >= 0)
                    or (adding.op == OP_MAX and compare_wide(value, old) <= 0)):
                value = old
        memcpy(out, value, 16)
        return True
    memcpy(&x, value, 8)
    out[0] = 0                           # no field is null
    if adding.kind == ADD_AVERAGE:
        mean = 0.0
        count = 0
        if old != NULL:
            memcpy(&mean, old + 1, 8)
            memcpy(&count, old + 9, 8)
        mean += x
        count += 1
        memcpy(out + 1, &mean, 8)
        memcpy(out + 9, &count, 8)
        return True
    n = mean = m2 = 0.0
    if old != NULL:
        memcpy(&n, old + 1, 8)
        memcpy(&mean, old + 9, 8)
        memcpy(&m2, old + 17, 8)
    n += 1.0
    delta = x - mean
    delta_n = delta / n
    mean += delta_n
    m2 += delta * (delta - delta_n)
    memcpy(out + 1, &n, 8)
    memcpy(out + 9, &mean, 8)
    memcpy(out + 17, &m2, 8)
    return True

cdef inline bint keeps_old_bytes(int op, Blob *old, const char *data, uint64_t length) noexcept nogil:
    """Return True if the stored bytes stay, for OP_MIN, OP_MAX, OP_FIRST and OP_LAST. UTF-8 sorts like its text."""
    cdef int order
    if op == OP_FIRST:
        return True
    if op == OP_LAST:
        return False
    order = memcmp(data, blob_data(old), min(length, <uint64_t>old.length))
    if order == 0:
        order = (length > old.length) - (length < old.length)
    return order >= 0 if op == OP_MIN else order <= 0

cdef class AddPlan:
    cdef Adding adding
    cdef readonly str operation
    cdef readonly str number
    cdef readonly int value_width        # of one added value; 0 for byte strings
    cdef int fits(self, int value_code, uint64_t width) except -1
    cdef object refuse(self)
