"""Converts Python values to the plain numbers and bytes that are stored and hashed, and back, with all checks.

Each converter takes a user's value and returns an int, float or bytes, or raises: `SerializationTypeError` for a
Python type that the declared type does not take, `OverflowError` for a number out of range, and `SerializationError`
for a value that cannot be stored exactly. No message contains the value.

>>> integer_converter("INT", 32)(7)
7
>>> microseconds(datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.timezone.utc))
1000000
>>> unscaled_converter(10, 2)(decimal.Decimal("1.5"))
150
"""

from __future__ import annotations

import datetime
import decimal
import operator
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from statebackend.errors import SerializationError, SerializationRangeError, SerializationTypeError

_EPOCH_ORDINAL = datetime.date(1970, 1, 1).toordinal()
_EPOCH_NAIVE = datetime.datetime(1970, 1, 1)  # noqa: DTZ001
_EPOCH_UTC = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_SINGLE = struct.Struct("<f")
#: The days that Python has.
_FIRST_DAY, _LAST_DAY = np.datetime64("0001-01-01"), np.datetime64("9999-12-31")


def refuse(type_name: str, value: object, hint: str | None = None) -> NoReturn:
    """Raise the error for a value whose Python type ``type_name`` does not take."""
    if value is None:
        raise SerializationTypeError(
            f"{type_name} does not take None here", hint=hint or "None is allowed in fields and elements only"
        )
    raise SerializationTypeError(
        f"{type_name} does not take a value of type {type(value).__name__}", hint=hint
    )


@lru_cache(maxsize=64)
def integer_converter(type_name: str, bits: int) -> Callable[[Any], int]:
    """A converter for signed integers of ``bits`` bits: ints and numpy integers, never bools."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def convert(value: Any) -> int:
        if type(value) is int:
            number = value
        elif isinstance(value, (bool, np.bool_)):
            refuse(type_name, value)
        else:
            try:
                number = int(operator.index(value))
            except TypeError:
                refuse(type_name, value)
        if not low <= number <= high:
            raise SerializationRangeError(f"integer out of range for {type_name} ({bits} bits)")
        return number

    return convert


def double(value: Any) -> float:
    """A float for DOUBLE: floats, numpy floats, and ints that a double holds exactly; never bools."""
    return _real("DOUBLE", value)


def single(value: Any) -> float:
    """A float for FLOAT, rounded to single precision; finite numbers beyond its range raise `OverflowError`."""
    number = _real("FLOAT", value)
    try:
        rounded: float = _SINGLE.unpack(_SINGLE.pack(number))[0]
    except OverflowError:
        raise SerializationRangeError("number out of range for FLOAT") from None
    if rounded != number and type(value) is int:
        raise SerializationError(
            "integer cannot be held exactly by FLOAT", hint="declare DOUBLE, LONG or DECIMAL"
        )
    return rounded


def _real(type_name: str, value: Any) -> float:
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        refuse(type_name, value)
    try:
        number = float(value)
    except OverflowError:
        raise SerializationRangeError(f"integer out of range for {type_name}") from None
    if int(number) != int(value):
        raise SerializationError(
            f"integer cannot be held exactly by {type_name}", hint="declare LONG or DECIMAL"
        )
    return number


def truth(value: Any) -> int:
    """0 or 1 for BOOL: bools and numpy bools only."""
    if isinstance(value, (bool, np.bool_)):
        return 1 if value else 0
    refuse("BOOL", value)


def from_truth(number: int) -> bool:
    """The bool of a stored 0 or 1."""
    if number not in (0, 1):
        raise SerializationError("a stored BOOL is neither 0 nor 1", code="SERIALIZATION.LENGTH")
    return bool(number)


def utf8(value: Any) -> bytes:
    """The UTF-8 bytes of a str, not normalised; lone surrogates are refused."""
    if not isinstance(value, str):
        refuse("STRING", value)
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SerializationError(
            "the string has a lone surrogate, without a UTF-8 form",
            code="SERIALIZATION.SURROGATE",
            detail=f"at character {error.start}",
            hint="declare BYTES and encode it yourself, for example with errors='surrogatepass'",
        ) from None


def text_from_utf8(data: bytes) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise SerializationError(
            "the bytes are not valid UTF-8", code="SERIALIZATION.UTF8", detail=f"at byte {error.start}"
        ) from None


def raw_bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    refuse("BYTES", value)


def is_not_a_time(value: Any) -> bool:
    """Return True for the "not a time" of numpy and pandas, which represents a missing one."""
    is_time = isinstance(value, (np.datetime64, datetime.date))
    return is_time and bool(value != value)


def _units(type_name: str, value: np.datetime64, unit: str) -> int:
    """A numpy time in whole days or microseconds since 1970-01-01, by UTC."""
    if is_not_a_time(value):
        _refuse_no_time(type_name)
    whole = value.astype(f"datetime64[{unit}]")
    if whole.astype(value.dtype) != value or not _FIRST_DAY <= whole.astype("datetime64[D]") <= _LAST_DAY:
        raise SerializationError(
            f"{type_name} cannot hold the value exactly", hint="round it first; years are 1 to 9999"
        )
    return int(whole.astype(np.int64))


def _refuse_no_time(type_name: str) -> NoReturn:
    raise SerializationTypeError(
        f"{type_name} does not take a value that is not a time", hint="use None for a missing time"
    )


def days(value: Any) -> int:
    """Days since 1970-01-01 of a date, or of a numpy time of a whole day; a datetime is not a date."""
    if isinstance(value, np.datetime64):
        return _units("DATE", value, "D")
    if is_not_a_time(value):
        _refuse_no_time("DATE")
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value.toordinal() - _EPOCH_ORDINAL
    refuse("DATE", value, "use value.date()" if isinstance(value, datetime.datetime) else None)


def from_days(number: int) -> datetime.date:
    try:
        return datetime.date.fromordinal(number + _EPOCH_ORDINAL)
    except (ValueError, OverflowError):
        raise _beyond_datetime("DATE") from None


def _microseconds(type_name: str, value: Any, epoch: datetime.datetime) -> int:
    if isinstance(value, np.datetime64):
        return _units(type_name, value, "us")
    if not isinstance(value, datetime.datetime):
        refuse(type_name, value)
    if is_not_a_time(value):
        _refuse_no_time(type_name)
    if epoch is _EPOCH_UTC and value.utcoffset() is None:
        raise SerializationTypeError(
            "TIMESTAMP takes datetimes with a time zone; the value has none",
            code="SERIALIZATION.NAIVE_DATETIME",
            hint="use value.replace(tzinfo=...), or declare TIMESTAMP_NTZ",
        )
    if epoch is _EPOCH_NAIVE and value.tzinfo is not None:
        raise SerializationTypeError(
            "TIMESTAMP_NTZ takes datetimes without a time zone; the value has one",
            code="SERIALIZATION.AWARE_DATETIME",
            hint="use value.replace(tzinfo=None), or declare TIMESTAMP",
        )
    if getattr(value, "nanosecond", 0):  # pandas
        raise SerializationError(
            f"{type_name} holds whole microseconds; the value has nanoseconds",
            hint="round it, or store it as LONG",
        )
    delta = value - epoch
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def microseconds(value: Any) -> int:
    """Microseconds since 1970-01-01 UTC of an aware datetime, or of a numpy time; naive datetimes are refused."""
    return _microseconds("TIMESTAMP", value, _EPOCH_UTC)


def naive_microseconds(value: Any) -> int:
    """Microseconds since 1970-01-01 of a naive datetime, or of a numpy time; aware ones are refused."""
    return _microseconds("TIMESTAMP_NTZ", value, _EPOCH_NAIVE)


def from_microseconds(number: int) -> datetime.datetime:
    """The aware datetime, in UTC, this many microseconds after 1970-01-01 UTC."""
    try:
        return _EPOCH_UTC + datetime.timedelta(microseconds=number)
    except OverflowError:
        raise _beyond_datetime("TIMESTAMP") from None


def from_naive_microseconds(number: int) -> datetime.datetime:
    """The naive datetime this many microseconds after 1970-01-01."""
    try:
        return _EPOCH_NAIVE + datetime.timedelta(microseconds=number)
    except OverflowError:
        raise _beyond_datetime("TIMESTAMP_NTZ") from None


def _beyond_datetime(type_name: str) -> SerializationError:
    return SerializationError(
        f"a stored {type_name} is outside the years 1 to 9999 that Python has",
        code="SERIALIZATION.DATETIME_RANGE",
        hint="read it as Arrow",
    )


@lru_cache(maxsize=1024)
def unscaled_converter(precision: int, scale: int) -> Callable[[Any], int]:
    """A converter from Decimals and ints to unscaled integers; it refuses what they cannot hold exactly."""
    type_name = f"DECIMAL({precision}, {scale})"
    limit = 10**precision

    def error(what: str, hint: str) -> SerializationError:
        return SerializationError(f"{what} {type_name}", code="SERIALIZATION.DECIMAL", hint=hint)

    def convert(value: Any) -> int:
        if isinstance(value, decimal.Decimal):
            if not value.is_finite():
                raise error("NaN and infinity are no", "use DOUBLE")
            if not value:
                return 0
            # Check the bounds first: 1E+999999999 must not be expanded.
            if value.adjusted() + scale >= precision:
                raise error("the number has too many digits for", "declare a larger precision")
            sign, digits, exponent = value.as_tuple()
            shift = int(exponent) + scale
            if shift < 0 and any(digits[shift:] if -shift < len(digits) else digits):
                raise error("the number has more decimals than", "quantize it first")
            kept = digits[:shift] if shift < 0 else digits
            number: int = int("".join(map(str, kept))) if kept else 0
            if shift > 0:
                number *= 10**shift
            return -number if sign else number
        if isinstance(value, (bool, np.bool_)):
            refuse(type_name, value)
        try:
            number = int(operator.index(value)) * 10**scale
        except TypeError:
            refuse(type_name, value, "use decimal.Decimal")
        if not -limit < number < limit:
            raise error("the number has too many digits for", "declare a larger precision")
        return number

    return convert


def decimal_from_unscaled(number: int, scale: int) -> decimal.Decimal:
    """The Decimal with this unscaled value and scale, exactly, under any precision of the context."""
    return decimal.Decimal(f"{number}E-{scale}")
