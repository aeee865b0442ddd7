"""A clock that tests set.

>>> clock = ManualClock()
>>> clock.advance(1500)
>>> clock.now()
1500
"""

from __future__ import annotations

import datetime
import operator

from statebackend.errors import UsageError

__all__ = ["ManualClock"]


class ManualClock:
    """A clock that stands still until told: pass it as ``clock=`` to test expiry and timers exactly.

    >>> clock = ManualClock(now=10)
    >>> clock.set(5)
    >>> clock.now()
    5
    """

    __slots__ = ("_now",)

    def __init__(self, now: int = 0) -> None:
        self._now = _milliseconds(now)

    def now(self) -> int:
        """The time it was set to, in milliseconds.

        >>> ManualClock(7).now()
        7
        """
        return self._now

    def set(self, now: int) -> None:
        """Set the time, in milliseconds; it may go backwards.

        >>> clock = ManualClock()
        >>> clock.set(60_000)
        """
        self._now = _milliseconds(now)

    def advance(self, by: int | datetime.timedelta) -> None:
        """Move the time on by milliseconds or a timedelta.

        >>> clock = ManualClock()
        >>> clock.advance(datetime.timedelta(seconds=2))
        >>> clock.now()
        2000
        """
        if isinstance(by, datetime.timedelta):
            by, rest = divmod(by, datetime.timedelta(milliseconds=1))
            if rest:
                raise UsageError("the clock moves by whole milliseconds")
        self._now += _milliseconds(by)

    def __repr__(self) -> str:
        return f"ManualClock(now={self._now})"


def _milliseconds(value: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise UsageError(
            f"a {type(value).__name__} is not a number of milliseconds", hint="write an int"
        ) from None
