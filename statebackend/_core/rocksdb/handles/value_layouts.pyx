"""What is in front of stored values, and how lists hold their elements; one or many at a time.

    value            [timestamp]  value
    map entry        [timestamp]  01 for None, else 00 and the value
    list             elements, each [timestamp] value; where values vary in length, four bytes of length in front, which
                     count timestamp and value

Timestamps are eight bytes, little-endian, of states with a time to live only. `callbacks` reads the same.
"""

import numpy as np

from libc.stddef cimport size_t
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy, memset

from statebackend._core.memory.byte_rows cimport check_rows, start_of
from statebackend._core.rocksdb.binding.buffers cimport Bytes, append, drop
from statebackend._core.tables.expiry cimport is_expired, written_at

from statebackend.errors import StoreError


cdef object _damaged():
    return StoreError("a value of the database cannot be read", code="STORE.DATABASE_CORRUPT",
                      hint="restore the state from a checkpoint")


cdef object _array_of(Bytes *data, bint is_done, bint is_whole=True):
    """Take the bytes as an array; raises unless all were appended, and the values that they are of are whole."""
    try:
        if not is_done:
            raise MemoryError
        if not is_whole:
            raise _damaged()
        return np.frombuffer(data.data[:data.size] if data.size else b"", np.uint8)
    finally:
        drop(data)


def join_elements(list values not None, int width, stamp=None):
    """Return the elements of a list, stored, as one run of bytes; `width` is theirs, or 0.

    >>> join_elements([b"a", b"bc"], 0)
    b'\\x01\\x00\\x00\\x00a\\x02\\x00\\x00\\x00bc'
    """
    cdef bytes front = b"" if stamp is None else int(stamp).to_bytes(8, "little", signed=True)
    if width:
        return b"".join([front + value for value in values]) if front else b"".join(values)
    return b"".join([(len(front) + len(value)).to_bytes(4, "little") + front + value for value in values])


def split_elements(bytes data not None, int width, bint is_stamped):
    """Return the values of a list's elements, and their timestamps (an empty list without).

    >>> split_elements(join_elements([b"a", b"bc"], 0, 7), 0, True)
    ([b'a', b'bc'], [7, 7])
    """
    cdef const char *start = data
    cdef size_t at = 0, n = len(data), size, front = 8 if is_stamped else 0
    cdef uint32_t length
    cdef int64_t stamp
    cdef list values = [], stamps = []
    while at < n:
        if width:
            size = front + width
        else:
            if n - at < 4:
                raise _damaged()
            memcpy(&length, start + at, 4)
            size = length
            at += 4
        if n - at < size or size < front:
            raise _damaged()
        if is_stamped:
            memcpy(&stamp, start + at, 8)
            stamps.append(stamp)
        values.append(start[at + front:at + size])
        at += size
    return values, stamps


def split_values(const int64_t[::1] offsets not None, const uint8_t[::1] data not None, bint is_stamped,
                 bint is_map_entry, int width=0):
    """Return timestamps, which are None, and the values as offsets and bytes, of many values or map entries.

    The first two are None where there are none. A null gets `width` zeros.

    >>> stamps, nulls, offsets, data = split_values(np.array([0, 2, 3]), np.array([0, 7, 1], np.uint8), False, True)
    >>> nulls.tolist(), offsets.tolist(), data.tolist()
    ([False, True], [0, 1, 1], [7])
    """
    cdef Py_ssize_t i, n = check_rows(offsets, data, "values")
    cdef const char *start = start_of(data)
    cdef const char *value
    cdef size_t size, front = (8 if is_stamped else 0) + (1 if is_map_entry else 0)
    cdef bint is_done = True, is_whole = True
    cdef bytes zeros = bytes(width)
    cdef const char *zero = zeros
    cdef Bytes made
    cdef int64_t[::1] stamp, end
    cdef uint8_t[::1] null
    stamps, nulls = np.zeros(n if is_stamped else 0, np.int64), np.zeros(n if is_map_entry else 0, np.bool_)
    ends = np.zeros(n + 1, np.int64)
    stamp, null, end = stamps, nulls.view(np.uint8), ends
    memset(&made, 0, sizeof(made))
    with nogil:
        for i in range(n):
            value, size = start + offsets[i], offsets[i + 1] - offsets[i]
            if size < front:
                is_whole = False
                break
            if is_stamped:
                memcpy(&stamp[i], value, 8)
            if is_map_entry and value[front - 1]:
                null[i] = 1
                is_done = append(&made, zero, width)
            else:
                is_done = append(&made, value + front, size - front)
            if not is_done:
                break
            end[i + 1] = made.size
    values = _array_of(&made, is_done, is_whole)
    return stamps if is_stamped else None, nulls if is_map_entry else None, ends, values


def seen_values(const uint8_t[::1] found not None, const int64_t[::1] offsets not None,
                const uint8_t[::1] data not None, int64_t lifetime, int64_t now, bint shows_expired,
                bint is_map_entry, int width=0, dead_at=None):
    """Return what reads of many values, or map entries, see at a time; a `lifetime` of 0 is none.

    That is: which are values that may be seen and are not None; which are dead; which have not expired, and get another
    timestamp if reads renew; and the values as offsets and bytes, with `width` zeros in place of hidden values.

    Expired values are dead. In event time, only if it has expired by the time `dead_at` too.

    >>> found, offsets, data = np.array([1, 0], np.uint8), np.array([0, 2, 2]), np.array([0, 7], np.uint8)
    >>> seen_values(found, offsets, data, 0, 0, False, True, 1)[0].tolist()
    [True, False]
    """
    cdef Py_ssize_t i, n = check_rows(offsets, data, "values")
    cdef const char *start = start_of(data)
    cdef const char *value
    cdef size_t size, front = (8 if lifetime else 0) + (1 if is_map_entry else 0)
    cdef bint is_done = True, is_whole = True, is_gone
    cdef bytes zeros = bytes(width)
    cdef const char *zero = zeros
    cdef bint in_event_time = dead_at is not None
    cdef int64_t stamp, removed_at = dead_at if in_event_time else INT64_MAX
    cdef Bytes made
    cdef uint8_t[::1] valid, old, other
    cdef int64_t[::1] end
    is_valid, is_old, is_other, ends = (np.zeros(n, np.bool_), np.zeros(n, np.bool_), np.zeros(n, np.bool_),
                                        np.zeros(n + 1, np.int64))
    valid, old, other, end = is_valid.view(np.uint8), is_old.view(np.uint8), is_other.view(np.uint8), ends
    if found.shape[0] != n:
        raise _damaged()
    memset(&made, 0, sizeof(made))
    with nogil:
        for i in range(n):
            value, size = start + offsets[i], offsets[i + 1] - offsets[i]
            if found[i]:
                if size < front:
                    is_whole = False
                    break
                is_gone = False
                if lifetime:
                    memcpy(&stamp, value, 8)
                    is_gone = is_expired(stamp, lifetime, now)
                    old[i] = is_gone and is_expired(stamp, lifetime, removed_at)
                    other[i] = not is_gone and stamp != written_at(stamp, now, in_event_time)
                valid[i] = (not is_gone or shows_expired) and not (is_map_entry and value[front - 1])
            if valid[i]:
                is_done = append(&made, value + front, size - front)
            else:
                is_done = append(&made, zero, width)
            if not is_done:
                break
            end[i + 1] = made.size
    return is_valid, is_old, is_other, ends, _array_of(&made, is_done, is_whole)


def set_stamps(const int64_t[::1] offsets not None, uint8_t[::1] data not None, int64_t now):
    """Write a timestamp in front of each of many stored values, in place."""
    cdef Py_ssize_t i, n = check_rows(offsets, data, "values")
    for i in range(n):
        if offsets[i + 1] - offsets[i] < 8:
            raise _damaged()
        memcpy(&data[offsets[i]], &now, 8)


def are_expired(const int64_t[::1] stamps not None, int64_t lifetime, int64_t now):
    """Return which of many timestamps have expired.

    >>> are_expired(np.array([5, 6]), 10, 15).tolist()
    [True, False]
    """
    cdef Py_ssize_t i
    cdef uint8_t[::1] old
    is_old = np.zeros(stamps.shape[0], np.bool_)
    old = is_old.view(np.uint8)
    for i in range(stamps.shape[0]):
        old[i] = is_expired(stamps[i], lifetime, now)
    return is_old


def join_values(const int64_t[::1] offsets not None, const uint8_t[::1] data not None,
                const int64_t[::1] stamps=None, const uint8_t[::1] nulls=None, bint is_map_entry=False):
    """Return stored values, as offsets and bytes, of values; the opposite of `split_values`.

    >>> join_values(np.array([0, 1, 1]), np.array([7], np.uint8), None, np.array([0, 1], np.uint8), True)[1].tolist()
    [0, 7, 1]
    """
    cdef Py_ssize_t i, n = check_rows(offsets, data, "values")
    cdef const char *start = start_of(data)
    cdef char flag
    cdef bint is_done = True, is_stamped = stamps is not None, has_nulls = nulls is not None
    cdef Bytes made
    cdef int64_t[::1] end
    ends = np.zeros(n + 1, np.int64)
    end = ends
    memset(&made, 0, sizeof(made))
    with nogil:
        for i in range(n):
            if is_stamped:
                is_done = append(&made, <const char *>&stamps[i], 8)
            flag = nulls[i] if has_nulls else 0
            if is_map_entry:
                is_done = is_done and append(&made, &flag, 1)
            if not flag:
                is_done = is_done and append(&made, start + offsets[i], offsets[i + 1] - offsets[i])
            if not is_done:
                break
            end[i + 1] = made.size
    return ends, _array_of(&made, is_done)


def split_lists(const int64_t[::1] offsets not None, const uint8_t[::1] data not None, int width, bint is_stamped):
    """Return of many lists: offsets of their elements, timestamps or None, and the elements as offsets and bytes.

    >>> split_lists(np.array([0, 3]), np.array([7, 8, 9], np.uint8), 1, False)[0].tolist()
    [0, 3]
    """
    cdef Py_ssize_t i, n = check_rows(offsets, data, "lists")
    cdef const char *start = start_of(data)
    cdef size_t at, size, end, front = 8 if is_stamped else 0
    cdef uint32_t length
    cdef int64_t elements = 0, place
    cdef bint is_done = True, is_whole = True
    cdef Bytes made, stamps, ends
    cdef int64_t[::1] list_end
    list_ends = np.zeros(n + 1, np.int64)
    list_end = list_ends
    memset(&made, 0, sizeof(made))
    memset(&stamps, 0, sizeof(stamps))
    memset(&ends, 0, sizeof(ends))
    place = 0
    with nogil:
        is_done = append(&ends, <const char *>&place, 8)
        for i in range(n):
            at, end = offsets[i], offsets[i + 1]
            while at < end:
                size = front + width
                if not width:
                    if end - at < 4:
                        is_whole = False
                        break
                    memcpy(&length, start + at, 4)
                    size = length
                    at += 4
                if end - at < size or size < front:
                    is_whole = False
                    break
                if is_stamped:
                    is_done = is_done and append(&stamps, start + at, 8)
                is_done = is_done and append(&made, start + at + front, size - front)
                place = made.size
                is_done = is_done and append(&ends, <const char *>&place, 8)
                elements += 1
                at += size
            if not is_done or not is_whole:
                break
            list_end[i + 1] = elements
    all_stamps, all_ends = _array_of(&stamps, True), _array_of(&ends, True)
    values = _array_of(&made, is_done, is_whole)
    return list_ends, all_stamps.view(np.int64) if is_stamped else None, all_ends.view(np.int64), values


def join_lists(const int64_t[::1] list_offsets not None, const int64_t[::1] offsets not None,
               const uint8_t[::1] data not None, int width, const int64_t[::1] stamps=None):
    """Return many stored lists as offsets and bytes; the opposite of `split_lists`.

    >>> ends, data = join_lists(np.array([0, 2]), np.array([0, 1, 3]), np.array([7, 8, 9], np.uint8), 0)
    >>> ends.tolist(), data.tolist()
    ([0, 11], [1, 0, 0, 0, 7, 2, 0, 0, 0, 8, 9])
    """
    cdef Py_ssize_t i, n = list_offsets.shape[0] - 1
    cdef Py_ssize_t elements = check_rows(offsets, data, "elements")
    cdef const char *start = start_of(data)
    cdef int64_t j
    cdef uint32_t length
    cdef bint is_done = True, is_stamped = stamps is not None
    cdef Bytes made
    cdef int64_t[::1] end
    if n < 0 or list_offsets[n] > elements or list_offsets[0] < 0:
        raise _damaged()
    ends = np.zeros(n + 1, np.int64)
    end = ends
    memset(&made, 0, sizeof(made))
    with nogil:
        for i in range(n):
            for j in range(list_offsets[i], list_offsets[i + 1]):
                length = <uint32_t>(offsets[j + 1] - offsets[j] + (8 if is_stamped else 0))
                if not width:
                    is_done = is_done and append(&made, <const char *>&length, 4)
                if is_stamped:
                    is_done = is_done and append(&made, <const char *>&stamps[j], 8)
                is_done = is_done and append(&made, start + offsets[j], offsets[j + 1] - offsets[j])
            if not is_done:
                break
            end[i + 1] = made.size
    return ends, _array_of(&made, is_done)
