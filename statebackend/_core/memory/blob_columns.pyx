"""The bytes of many blobs as one column that Arrow can share: offsets and data."""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

from statebackend._core.memory.arena cimport Blob, blob_data
from statebackend._core.memory.platform cimport prefetch

cdef enum:
    AHEAD = 24                           # blobs are prefetched this many rows ahead


def blobs_of(blobs):
    """The bytes of blobs as (offsets, data), given their addresses by row; 0 is nothing.

    Whoever calls this sees to it that the blobs stay meanwhile: it makes objects, and lets go of the GIL.
    """
    cdef const uint64_t[::1] pointers = blobs
    cdef int64_t n = len(blobs), i, total = 0
    cdef Blob *blob
    offsets = np.zeros(n + 1, dtype=np.int64)
    cdef int64_t[::1] ends = offsets
    with nogil:
        for i in range(n):
            if i + AHEAD < n:
                prefetch(<void *>pointers[i + AHEAD])
            blob = <Blob *>pointers[i]
            if blob != NULL:
                total += blob.length
            ends[i + 1] = total
    data = np.empty(total, dtype=np.uint8)
    if total == 0:
        return offsets, data
    cdef uint8_t[::1] target = data
    with nogil:
        for i in range(n):
            if i + AHEAD < n:
                prefetch(<void *>pointers[i + AHEAD])
            blob = <Blob *>pointers[i]
            if blob != NULL:
                memcpy(&target[0] + ends[i], blob_data(blob), blob.length)
    return offsets, data
