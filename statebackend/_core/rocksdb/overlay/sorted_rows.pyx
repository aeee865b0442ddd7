"""Rows as offsets and bytes, in the order of their keys: sorted, and picked out.

No function makes an object for a row, and all of them work without the GIL.
"""

import numpy as np
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memset

from statebackend._core.memory.byte_rows cimport check_rows, start_of
from statebackend._core.rocksdb.binding.buffers cimport Bytes, append, compare, drop
from statebackend._core.rocksdb.binding.database cimport array_of
from statebackend._core.rocksdb.overlay.key_order cimport RankedKey, put_ranked_in_order, rank

from statebackend.errors import UsageError

cdef struct Rows:
    const char *data
    const int64_t *ends               # of the rows before, and of each: n + 1 of them
    Py_ssize_t n


cdef inline int order_of(const Rows *a, Py_ssize_t i, const Rows *b, Py_ssize_t j) noexcept nogil:
    return compare(a.data + a.ends[i], a.ends[i + 1] - a.ends[i], b.data + b.ends[j], b.ends[j + 1] - b.ends[j])


cdef int look_at(Rows *rows, const int64_t[::1] offsets, const uint8_t[::1] data, str what) except -1:
    rows.n = check_rows(offsets, data, what)
    rows.ends = &offsets[0]
    rows.data = start_of(data)
    return 0


def sorted_order(const int64_t[::1] offsets not None, const uint8_t[::1] keys not None):
    """Say in which order to take the rows so that their keys ascend; of equal keys, the last row alone counts.

    O(n) if they are sorted, and O(n log n) at most.

    >>> import numpy as np
    >>> sorted_order(np.array([0, 1, 2, 3, 4]), np.frombuffer(b"caba", np.uint8)).tolist()
    [3, 2, 0]
    """
    return order_and_places(offsets, keys)[0]


def order_and_places(const int64_t[::1] offsets not None, const uint8_t[::1] keys not None):
    """As `sorted_order`, and at which place of that order each row has its key.

    >>> import numpy as np
    >>> order_and_places(np.array([0, 1, 2, 3, 4]), np.frombuffer(b"caba", np.uint8))[1].tolist()
    [2, 0, 1, 0]
    """
    cdef Rows rows
    cdef RankedKey *ranked
    cdef Py_ssize_t i, n, kept = 0
    cdef int64_t[::1] order, place
    look_at(&rows, offsets, keys, "keys")
    n = rows.n
    made, places = np.empty(n, np.int64), np.empty(n, np.int64)
    order, place = made, places
    ranked = <RankedKey *>malloc((n or 1) * sizeof(RankedKey))
    if ranked == NULL:
        raise MemoryError
    try:
        with nogil:
            for i in range(n):
                rank(&ranked[i], rows.data + rows.ends[i], rows.ends[i + 1] - rows.ends[i], i)
            put_ranked_in_order(ranked, n)
            for i in range(n):
                place[ranked[i].row] = kept
                if i + 1 == n or order_of(&rows, ranked[i].row, &rows, ranked[i + 1].row) < 0:
                    order[kept] = ranked[i].row
                    kept += 1
        return made[:kept], places
    finally:
        free(ranked)


def are_below(const int64_t[::1] offsets not None, const uint8_t[::1] keys not None,
              const int64_t[::1] place_offsets not None, const uint8_t[::1] places not None):
    """Say which keys begin with one of some places; both ascend, and no place begins with another. O(keys + places).

    >>> import numpy as np
    >>> keys, places = np.frombuffer(b"abbac", np.uint8), np.frombuffer(b"ab", np.uint8)
    >>> are_below(np.array([0, 1, 2, 4, 5]), keys, np.array([1, 2]), places).tolist()
    [False, True, True, False]
    """
    cdef Rows rows, above
    cdef Py_ssize_t i, at = 0
    cdef int64_t size
    cdef uint8_t[::1] is_one
    look_at(&rows, offsets, keys, "keys")
    look_at(&above, place_offsets, places, "places")
    made = np.zeros(rows.n, np.bool_)
    is_one = made.view(np.uint8)
    with nogil:
        for i in range(rows.n if above.n else 0):
            while at + 1 < above.n and order_of(&above, at + 1, &rows, i) <= 0:
                at += 1
            size = above.ends[at + 1] - above.ends[at]
            is_one[i] = size <= rows.ends[i + 1] - rows.ends[i] and not memcmp(
                rows.data + rows.ends[i], above.data + above.ends[at], size)
    return made


def picked(const int64_t[::1] offsets not None, const uint8_t[::1] data not None, const int64_t[::1] rows not None,
           const int64_t[::1] begin=None):
    """Copy some rows, by number, as offsets and bytes; each from its byte `begin` on, if given. O(bytes).

    >>> import numpy as np
    >>> picked(np.array([0, 1, 3, 6]), np.frombuffer(b"abbccc", np.uint8), np.array([2, 0]))[1].tobytes()
    b'ccca'
    >>> picked(np.array([0, 3]), np.frombuffer(b"abc", np.uint8), np.array([0]), np.array([2]))[1].tobytes()
    b'c'
    """
    cdef Rows source
    cdef Bytes made
    cdef Py_ssize_t i, n = rows.shape[0]
    cdef int64_t row, skipped, size
    cdef bint is_done = True, is_within = True
    cdef int64_t[::1] end
    look_at(&source, offsets, data, "rows")
    if begin is not None and begin.shape[0] != n:
        raise UsageError("there are not as many beginnings as rows")
    ends = np.zeros(n + 1, np.int64)
    end = ends
    memset(&made, 0, sizeof(made))
    try:
        with nogil:
            for i in range(n):
                row = rows[i]
                skipped = 0 if begin is None else begin[i]
                is_within = 0 <= row < source.n and 0 <= skipped <= source.ends[row + 1] - source.ends[row]
                if not is_within:
                    break
                size = source.ends[row + 1] - source.ends[row] - skipped
                is_done = append(&made, source.data + source.ends[row] + skipped, size)
                if not is_done:
                    break
                end[i + 1] = made.size
        if not is_within:
            raise UsageError("a row is asked for that is not there")
        if not is_done:
            raise MemoryError
        return ends, array_of(made.data, made.size)
    finally:
        drop(&made)
