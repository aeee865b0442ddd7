"""The check of rows of bytes that come as offsets and data."""

from libc.stdint cimport int64_t, uint8_t

from statebackend.errors import UsageError


cdef int check_rows(const int64_t[::1] offsets, const uint8_t[::1] data, str what) except -1:
    """How many rows there are; raises if the offsets do not cut the data."""
    cdef Py_ssize_t n = offsets.shape[0] - 1
    if n < 0:
        raise UsageError("offsets are one more than rows", detail=f"of {what}")
    if n >= 1 << 31:
        raise UsageError("too many rows for one call", detail=f"of {what}")
    if not are_rows(&offsets[0], n, data.shape[0]):
        raise UsageError("the offsets do not fit the data", detail=f"of {what}",
                         hint="offsets rise from 0 to the length of the data; a row is shorter than 4 GB")
    return n
