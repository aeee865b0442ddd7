"""The test for expiry of a timestamp, as `statebackend.state.ttl.expired` defines it."""

from libc.stdint cimport INT64_MAX, int64_t

cdef inline bint is_expired(int64_t timestamp, int64_t ttl, int64_t now) noexcept nogil:
    if timestamp > 0 and ttl > INT64_MAX - timestamp:
        return now == INT64_MAX
    return timestamp + ttl <= now
