"""The rules of expiry, as `statebackend.state.ttl` defines them, in C."""

from libc.stdint cimport INT64_MAX, int64_t

cdef inline bint is_expired(int64_t timestamp, int64_t ttl, int64_t now) noexcept nogil:
    if timestamp > 0 and ttl > INT64_MAX - timestamp:
        return now == INT64_MAX
    return timestamp + ttl <= now

cdef inline int64_t written_at(int64_t timestamp, int64_t time, bint in_event_time) noexcept nogil:
    # The timestamp of a value that builds on one with a timestamp, and is written at `time`.
    return timestamp if in_event_time and timestamp > time else time
