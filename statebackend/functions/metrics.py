"""Counters that a function keeps for itself, by name.

>>> metrics = Metrics()
>>> metrics.counter("late").inc()
>>> metrics.values()
{'late': 1}
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from statebackend.errors import UsageError

__all__ = ["Counter", "Metrics"]

_LEAST, _MOST = -(2**63), 2**63 - 1


class Counter:
    """A 64-bit integer that a function increments and decrements. Undoing a batch does not undo its counts.

    Every checkpoint stores the counters, so a count that it could not hold is refused at once.

    >>> counter = Counter()
    >>> counter.inc(3)
    >>> counter.dec()
    >>> counter.get_count()
    2
    """

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def inc(self, n: int = 1) -> None:
        """Increment by ``n``, an int or a numpy integer."""
        if type(n) is not int:
            n = _whole(n)
        self._set(self._count + n)

    def dec(self, n: int = 1) -> None:
        """Decrement by ``n``, an int or a numpy integer."""
        if type(n) is not int:
            n = _whole(n)
        self._set(self._count - n)

    def _set(self, count: int) -> None:
        if not _LEAST <= count <= _MOST:
            raise UsageError("a counter holds 64 bits", hint="count in larger units")
        self._count = count

    def get_count(self) -> int:
        """The number.

        >>> Counter().get_count()
        0
        """
        return self._count

    def __repr__(self) -> str:
        return f"<Counter {self._count:,}>"


class Metrics:
    """The counters of a function. They outlive its copies and appear in the progress of every batch.

    >>> metrics = Metrics()
    >>> metrics.counter("late") is metrics.counter("late")
    True
    """

    __slots__ = ("_counters",)

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}

    def counter(self, name: str) -> Counter:
        """The counter of this name, a non-empty str that UTF-8 can encode; the first call makes it.

        >>> Metrics().counter("late").get_count()
        0
        """
        if type(name) is not str or not name:
            raise UsageError("the name of a counter is a non-empty str")
        counter = self._counters.get(name)
        if counter is None:
            try:
                name.encode("utf-8")
            except UnicodeEncodeError:
                raise UsageError(
                    "the name of a counter has a lone surrogate, which no file can hold"
                ) from None
            counter = self._counters[name] = Counter()
        return counter

    def values(self) -> dict[str, int]:
        """All counters by name.

        >>> Metrics().values()
        {}
        """
        return {name: counter.get_count() for name, counter in self._counters.items()}

    def __repr__(self) -> str:
        return f"<Metrics {self.values()}>"


def _whole(n: Any) -> int:
    try:
        if isinstance(n, (bool, np.bool_)):
            raise TypeError
        return operator.index(n)
    except TypeError:
        raise UsageError(
            f"a counter counts in whole numbers, not by a {type(n).__name__}",
            hint="write an int; for a sum of other numbers use state, or int(...)",
        ) from None
