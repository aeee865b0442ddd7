"""The number of calls of the user's function that have returned: a pulse tells it; see `pulse.pyx`."""

from libc.stdint cimport int64_t

cdef extern from *:
    """
    #include <stdint.h>

    /* One thread writes, others read: one that reads a new value finds what was stored before it. */
    static inline int64_t sb_load(const int64_t *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
    static inline void sb_store(int64_t *to, int64_t value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
    """
    int64_t load "sb_load"(const int64_t *place) noexcept nogil
    void store "sb_store"(int64_t *place, int64_t value) noexcept nogil

cdef int64_t calls_returned              # in this process


cdef inline void call_returned() noexcept:
    store(&calls_returned, calls_returned + 1)
