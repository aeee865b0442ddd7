"""Decimals as integers, at a scale that the type declares, and back.

Python lacks a C interface to `decimal`. So this looks into the objects of its C implementation, libmpdec: sign,
exponent, and words of 19 decimal digits. When the module is loaded, decimals of every shape go both ways; `tried` is
true if they come out as by Python's own methods. Otherwise, on another implementation or layout, nothing here is used.
"""

from libc.stdint cimport int64_t

cdef extern from *:
    """
    typedef unsigned __int128 sb_uint128;
    typedef __int128 sb_int128;
    """
    ctypedef long long int128 "sb_int128"
    ctypedef unsigned long long uint128 "sb_uint128"

cdef bint tried

cdef bint decimal_to_int(object value, int precision, int scale, int128 *out) noexcept
cdef object decimal_from_int(int128 number, int scale)
