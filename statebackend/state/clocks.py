"""Clocks: a backend reads the time for TTL and timers from one.

A clock is any object with ``now() -> int``, in milliseconds. `statebackend.testing.ManualClock` is one that stands
still until it is told.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from typing import Any, Protocol, runtime_checkable

from statebackend.errors import UsageError, usage

_FIRST, _LAST = -(2**63), 2**63 - 1


@runtime_checkable
class Clock(Protocol):
    """Anything that tells the time in milliseconds."""

    def now(self) -> int:
        """The time, in milliseconds."""


@dataclasses.dataclass(frozen=True)
class SystemClock:
    """Processing time: the machine's clock, in milliseconds since 1970-01-01 UTC."""

    __slots__ = ()

    def now(self) -> int:
        return time.time_ns() // 1_000_000


def checked_clock(clock: Any) -> Clock:
    """The clock itself, or the machine's for None; refuses anything without ``now()``."""
    if clock is None:
        return SystemClock()
    if isinstance(clock, type) or not callable(getattr(clock, "now", None)):
        raise usage.clock(
            f"a {type(clock).__name__} is not a clock",
            hint="give an object with a method now() that answers milliseconds as an int",
        )
    checked: Clock = clock
    return checked


def read(clock: Clock) -> int:
    """The time that ``clock`` tells, checked to be a whole number of milliseconds."""
    now = clock.now()
    if type(now) is int and _FIRST <= now <= _LAST:
        return now
    try:
        if isinstance(now, bool):
            raise TypeError
        checked = operator.index(now)
    except TypeError:
        raise _not_a_time(clock, f"a {type(now).__name__}") from None
    if not _FIRST <= checked <= _LAST:
        raise _not_a_time(clock, "more than 64 bits")
    return checked


def checked_now(now: Any) -> int:
    """A time that a caller gives, checked to be a whole number of milliseconds."""
    if type(now) is not int or not _FIRST <= now <= _LAST:
        raise usage.time("the time is an int of milliseconds, of 64 bits", detail=f"a {type(now).__name__}")
    return now


def _not_a_time(clock: Clock, answer: str) -> UsageError:
    return usage.clock(
        f"the clock's now() answered {answer}",
        detail=f"class {type(clock).__qualname__}",
        hint="it answers milliseconds as an int, for example time.time_ns() // 1_000_000",
    )
