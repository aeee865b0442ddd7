"""The operations of batch kernels on a row, reductions among them: old value and new value to the next."""

from libc.math cimport isnan
from libc.stdint cimport int64_t

from statebackend._core.memory.platform cimport unlikely
from statebackend._core.tables.values cimport TYPE_DOUBLE, TYPE_FLOAT, load_integer, store_integer

cdef extern from *:
    """
    #define sb_add_overflow(a, b, r) __builtin_add_overflow((int64_t)(a), (int64_t)(b), (r))
    #define sb_mul_overflow(a, b, r) __builtin_mul_overflow((int64_t)(a), (int64_t)(b), (r))
    """
    bint add_overflow "sb_add_overflow"(int64_t a, int64_t b, int64_t *r) noexcept nogil
    bint mul_overflow "sb_mul_overflow"(int64_t a, int64_t b, int64_t *r) noexcept nogil

cdef enum Operation:
    OP_GET = 0
    OP_UPDATE = 1
    OP_REMOVE = 2
    OP_APPEND = 3
    OP_FIND = 4
    OP_SUM = 5
    OP_MIN = 6
    OP_MAX = 7
    OP_FIRST = 8
    OP_LAST = 9
    OP_PRODUCT = 10
    OP_ANY = 11
    OP_ALL = 12
    OP_COUNT = 13
    OP_BLOCK_READ = 14                   # the operation of another module's block function
    OP_BLOCK_WRITE = 15
    OP_REDUCE = 16                       # of a loop compiled for several reductions: the batch says which
    OP_READ = 17                         # of values that may expire; removes and may renew

cdef inline bint is_write(Operation op) noexcept nogil:
    return op != OP_GET and op != OP_FIND and op != OP_BLOCK_READ

cdef inline bint reduce_into(int op, int code, const char *old, const char *value, char *out) noexcept nogil:
    """Set `out` to old (NULL: nothing) reduced with value. False on overflow."""
    cdef int64_t a, b
    cdef double x, y
    if op == OP_COUNT:
        # Counts rows: the value of the row does not matter.
        a = 0 if old == NULL else load_integer(code, old)
        return not add_overflow(a, 1, &b) and store_integer(code, b, out)
    if code == TYPE_DOUBLE or code == TYPE_FLOAT:
        y = (<const double *>value)[0] if code == TYPE_DOUBLE else (<const float *>value)[0]
        if old == NULL:
            y = (y != 0) if op == OP_ANY or op == OP_ALL else y
        else:
            x = (<const double *>old)[0] if code == TYPE_DOUBLE else (<const float *>old)[0]
            y = reduce_double(op, x, y)
        if code == TYPE_DOUBLE:
            (<double *>out)[0] = y
        else:
            (<float *>out)[0] = <float>y
        return True
    b = load_integer(code, value)
    if old == NULL:
        return store_integer(code, b != 0 if op == OP_ANY or op == OP_ALL else b, out)
    a = load_integer(code, old)
    if op == OP_SUM:
        if unlikely(add_overflow(a, b, &a)):
            return False
    elif op == OP_PRODUCT:
        if unlikely(mul_overflow(a, b, &a)):
            return False
    elif op == OP_MIN:
        a = b if b < a else a
    elif op == OP_MAX:
        a = b if b > a else a
    elif op == OP_LAST:
        a = b
    elif op == OP_ANY:
        a = a != 0 or b != 0
    elif op == OP_ALL:
        a = a != 0 and b != 0
    return store_integer(code, a, out)

cdef inline double reduce_double(int op, double x, double y) noexcept nogil:
    """As in Spark, NaN is greater than every other number."""
    if op == OP_SUM:
        return x + y
    if op == OP_PRODUCT:
        return x * y
    if op == OP_MIN:
        return y if y < x or (isnan(x) and not isnan(y)) else x
    if op == OP_MAX:
        return x if isnan(x) else y if isnan(y) or y > x else x
    if op == OP_LAST:
        return y
    if op == OP_ANY:
        return x != 0 or y != 0
    if op == OP_ALL:
        return x != 0 and y != 0
    return x
