"""Durations and sizes, in the forms in which callers give them.

>>> from datetime import timedelta
>>> [milliseconds("delay", given) for given in (1500, timedelta(seconds=2), "10 minutes", "1 hour 30 min", "250ms")]
[1500, 2000, 600000, 5400000, 250]
>>> [number_of_bytes("memory", given) for given in (1024, "512m", "64 GB")]
[1024, 536870912, 68719476736]
>>> milliseconds("delay", "10 moments")
Traceback (most recent call last):
statebackend.errors.UsageError: '10 moments' is not a duration (delay). Hint: write milliseconds as an int, ...
"""

from __future__ import annotations

import datetime
import operator
import re
from decimal import Decimal
from typing import Any, TypeAlias

from statebackend.errors import UsageError

#: Milliseconds, a timedelta, or Spark's text: "10 minutes".
Duration: TypeAlias = int | datetime.timedelta | str
#: Bytes, or Spark's text: "512m".
Size: TypeAlias = int | str

_LARGEST = 2**63 - 1
_MILLISECOND = datetime.timedelta(milliseconds=1)
_LENGTHS = {
    1: ("ms", "millisecond", "milliseconds"),
    1000: ("s", "sec", "second", "seconds"),
    60_000: ("m", "min", "minute", "minutes"),
    3_600_000: ("h", "hour", "hours"),
    86_400_000: ("d", "day", "days"),
    604_800_000: ("w", "week", "weeks"),
}
_DURATIONS = {name: length for length, names in _LENGTHS.items() for name in names}
_SIZES = {
    name: 1024**power for power, letter in enumerate("bkmgtp") for name in (letter, letter.rstrip("b") + "b")
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.I)
_HINTS = {
    "duration": "write milliseconds as an int, a datetime.timedelta, or a text such as '10 minutes'; its units are "
    "milliseconds, seconds, minutes, hours, days and weeks",
    "size": "write bytes as an int, or a text such as '512m'; its units are b, k, m, g, t and p",
}


def milliseconds(option: str, value: Any, *, least: int = 1) -> int:
    """A duration in milliseconds, at least ``least`` and of 64 bits; ``option`` is its name for the error."""
    if isinstance(value, datetime.timedelta):
        whole, rest = divmod(value, _MILLISECOND)
        if rest:
            raise _refused("duration", option, "the duration is not a whole number of milliseconds")
    else:
        whole = _whole("duration", option, value, _DURATIONS)
    return _at_least(least, "duration", option, whole)


def number_of_bytes(option: str, value: Any, *, least: int = 0) -> int:
    """A size in bytes, at least ``least`` and of 64 bits; ``option`` is its name for the error."""
    return _at_least(least, "size", option, _whole("size", option, value, _SIZES))


def _whole(what: str, option: str, value: Any, units: dict[str, int]) -> int:
    if isinstance(value, str):
        parts = _PART.findall(value)
        amounts = [Decimal(number) * units.get(unit.lower(), 0) for number, unit in parts]
        if not parts or _PART.sub("", value) or any(unit.lower() not in units for _, unit in parts):
            raise _refused(what, option, f"{value!r} is not a {what}")
        total = sum(amounts)
        if total != int(total):
            unit = "milliseconds" if what == "duration" else "bytes"
            raise _refused(what, option, f"{value!r} is not a whole number of {unit}")
        return int(total)
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise _refused(what, option, f"a {type(value).__name__} is not a {what}") from None


def _at_least(least: int, what: str, option: str, whole: int) -> int:
    if not least <= whole <= _LARGEST:
        unit = "ms" if what == "duration" else "bytes"
        limit = f"is less than {least} {unit}" if whole < least else "has more than 64 bits"
        raise _refused(what, option, f"the {what} {limit}")
    return whole


def _refused(what: str, option: str, message: str) -> UsageError:
    if what == "size":
        return UsageError(message, code="USAGE.SIZE", detail=option, hint=_HINTS[what])
    return UsageError(message, code="USAGE.DURATION", detail=option, hint=_HINTS[what])
