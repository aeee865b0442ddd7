"""Decimals as integers; `decimals.pxd` explains how."""

import decimal as _decimal

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint64_t

cdef extern from *:
    """
    /* The objects of _decimal, with libmpdec's number inside; `tried` says whether they are like this. */
    typedef struct {
        PyObject_HEAD
        Py_hash_t hash;
        uint8_t flags;
        Py_ssize_t exponent, digits, length, allocated;
        uint64_t *words;
        uint64_t first[4];
    } sb_Decimal;
    """
    ctypedef struct DecimalObject "sb_Decimal":
        uint8_t flags
        Py_ssize_t exponent
        Py_ssize_t digits
        Py_ssize_t length
        Py_ssize_t allocated
        uint64_t *words

cdef enum:
    NEGATIVE = 1
    SPECIAL = 2 | 4 | 8                  # infinity, NaN, signalling NaN
    WORD_DIGITS = 19
    MAX_DIGITS = 38

cdef object Decimal = _decimal.Decimal
cdef uint64_t WORD = 10_000_000_000_000_000_000            # the radix of libmpdec on 64-bit machines
cdef uint64_t[20] powers
cdef int _power
powers[0] = 1
for _power in range(1, 20):
    powers[_power] = 10 * powers[_power - 1]


cdef inline uint128 power_of_ten(int exponent) noexcept nogil:
    """10 to the power of 0 to 38."""
    if exponent <= 19:
        return powers[exponent]
    return <uint128>powers[19] * powers[exponent - 19]


cdef inline int digits_of(uint128 number) noexcept nogil:
    """The decimal digits of a number below 10 to the power of 38; 1 for zero."""
    cdef int digits = 1
    if number >= powers[19]:
        digits = 20
        number = number // powers[19] // 10
    else:
        number = number // 10
    while number:
        digits += 1
        number = number // 10
    return digits


cdef bint decimal_to_int(object value, int precision, int scale, int128 *out) noexcept:
    """The unscaled value of a finite Decimal that the type holds exactly; False for any other. Runs no Python."""
    cdef DecimalObject *number = <DecimalObject *>(<PyObject *>value)
    cdef uint128 unscaled
    cdef Py_ssize_t shift = number.exponent + scale
    if number.flags & SPECIAL or number.length < 1 or number.length > 2:
        return False
    unscaled = number.words[0]
    if number.length == 2:
        unscaled += <uint128>number.words[1] * WORD
    if unscaled == 0:
        out[0] = 0
        return True
    # All digits before the decimals' end must fit, and those behind it be zeros.
    if number.digits + shift > precision or shift < -MAX_DIGITS:
        return False
    if shift >= 0:
        unscaled *= power_of_ten(<int>shift)
    else:
        if unscaled % power_of_ten(<int>-shift):
            return False
        unscaled //= power_of_ten(<int>-shift)
    out[0] = -<int128>unscaled if number.flags & NEGATIVE else <int128>unscaled
    return True


cdef object decimal_from_int(int128 number, int scale):
    """The Decimal with this unscaled value of at most 38 digits, in any context; None for a longer one."""
    cdef object value
    cdef DecimalObject *fields
    cdef uint128 unscaled = <uint128>-number if number < 0 else <uint128>number
    if unscaled >= power_of_ten(MAX_DIGITS):
        return None
    value = Decimal()
    fields = <DecimalObject *>(<PyObject *>value)
    fields.exponent = -scale
    fields.digits = digits_of(unscaled)
    fields.length = 1
    fields.words[0] = <uint64_t>unscaled
    if unscaled >= WORD:
        fields.length = 2
        fields.words[0] = <uint64_t>(unscaled % WORD)
        fields.words[1] = <uint64_t>(unscaled // WORD)
    if number < 0:
        fields.flags |= NEGATIVE
    return value


cdef bint _is_as_here(object value) noexcept:
    """Return True if a number's fields look as declared above; nothing outside the object is read for that."""
    cdef DecimalObject *number = <DecimalObject *>(<PyObject *>value)
    return number.allocated >= 4 and <char *>number.words == <char *>number + sizeof(DecimalObject) - 32


def _try():
    """Send decimals of every shape through both ways, and compare with the results of Python's methods."""
    cdef int128 found
    cdef int128 unscaled
    if (getattr(Decimal, "__module__", "") != "decimal" or Decimal.__basicsize__ != sizeof(DecimalObject)
            or "_decimal" not in __import__("sys").modules or getattr(_decimal, "MAX_PREC", 0) < 10 ** 17):
        return False
    if Decimal() is Decimal() or not _is_as_here(Decimal()) or not _is_as_here(Decimal(7)):
        return False
    for text in ("0", "1", "-1", "1.50", "-0.07", "9" * 18, "-" + "9" * 19, "1" + "0" * 19, "12345678901234567.89",
                 "-" + "9" * 36 + ".99", "1" * 38, "5E+3", "0E+9", "1" + "0" * 18, "18446744073709551616"):
        value = Decimal(text)
        scale = max(0, -value.as_tuple().exponent)
        exact = int("".join(map(str, value.as_tuple().digits))) * 10 ** (value.as_tuple().exponent + scale)
        exact = -exact if value.is_signed() else exact
        if not decimal_to_int(value, MAX_DIGITS, scale, &found):
            return False
        if (int(<int64_t>(found >> 64)) << 64) + int(<uint64_t>found) != exact:
            return False
        unscaled = (<int128><int64_t>(exact >> 64) << 64) + <uint64_t>(exact & 0xFFFFFFFFFFFFFFFF)
        back = decimal_from_int(unscaled, scale)
        wanted = Decimal(f"{exact}E-{scale}")
        if back.as_tuple() != wanted.as_tuple() or hash(back) != hash(wanted) or str(back + 1) != str(wanted + 1):
            return False
    for text in ("NaN", "sNaN", "Infinity", "-Infinity", "0.001", "1E+40", "1" * 39, "1E-60"):
        if decimal_to_int(Decimal(text), MAX_DIGITS, 2, &found):
            return False
    return not decimal_to_int(Decimal("12.3"), 2, 1, &found)


tried = _try()


def in_use():
    """Return True if decimals are looked into here; otherwise each goes through Python.

    >>> in_use()
    True
    """
    return tried
