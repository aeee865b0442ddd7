"""The bytes of many blobs as one column that Arrow can share: offsets and data."""

import numpy as np

from libc.stdint cimport int64_t, uint64_t, uintptr_t

from statebackend._core.memory.arena cimport Blob, blob_data
from statebackend._core.memory.platform cimport copy_bytes, prefetch

cdef enum:
    AHEAD = 32                           # blobs are prefetched this many rows ahead, their ends half as many
    SAMPLE = 1024                        # rows that tell how many bytes all of them probably have


cdef int64_t copy_blobs(const uint64_t *blobs, int64_t at, int64_t n, int64_t *ends, char *data,
                        int64_t room) noexcept nogil:
    """Copy the blobs from row `at` on that fit the room. Returns the row after them."""
    cdef Blob *blob
    cdef int64_t i
    for i in range(at, n):
        if i + AHEAD < n:
            prefetch(<void *>blobs[i + AHEAD])
            blob = <Blob *>blobs[i + AHEAD // 2]
            if blob != NULL:
                prefetch(blob_data(blob) + blob.length - 1)
        blob = <Blob *>blobs[i]
        ends[i + 1] = ends[i] + (0 if blob == NULL else blob.length)
        if ends[i + 1] > room:
            return i
        if blob != NULL:
            copy_bytes(data + ends[i], blob_data(blob), blob.length)
    return n


def blobs_of(const uint64_t[::1] blobs):
    """The bytes of blobs as (offsets, data), given their addresses by row; 0 is nothing.

    Whoever calls this sees to it that the blobs stay meanwhile: it makes objects, and lets go of the GIL.
    """
    cdef int64_t n = blobs.shape[0], i, at = 0, sampled = min(n, <int64_t>SAMPLE), room = 0
    cdef uintptr_t place
    offsets, data = np.zeros(n + 1, dtype=np.int64), np.empty(0, dtype=np.uint8)
    cdef int64_t[::1] ends = offsets
    for i in range(sampled):
        room += (<Blob *>blobs[i]).length if blobs[i] else 0
    if sampled < n:
        room = (room + (room >> 4)) * n // sampled
    while at < n:
        data.resize(room, refcheck=False)
        place = data.__array_interface__["data"][0]
        with nogil:
            at = copy_blobs(&blobs[0], at, n, &ends[0], <char *>place, room)
        room = ends[n] if at == n else max(room + (room >> 1), ends[at + 1])
    data.resize(room, refcheck=False)
    return offsets, data
