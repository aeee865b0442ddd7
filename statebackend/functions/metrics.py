"""Figures that a function counts for itself, by name.

>>> metrics = Metrics()
>>> metrics.counter("late").inc()
>>> metrics.values()
{'late': 1}
"""

from __future__ import annotations

from statebackend.errors import UsageError

__all__ = ["Counter", "Metrics"]


class Counter:
    """A number that goes up and down. Counting is not undone when a batch is.

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
        """Count up.

        >>> Counter().inc()
        """
        self._count += n

    def dec(self, n: int = 1) -> None:
        """Count down.

        >>> Counter().dec()
        """
        self._count -= n

    def get_count(self) -> int:
        """The number.

        >>> Counter().get_count()
        0
        """
        return self._count


class Metrics:
    """The counters of a function. They outlive its copies and show in the progress of every batch.

    >>> metrics = Metrics()
    >>> metrics.counter("late") is metrics.counter("late")
    True
    """

    __slots__ = ("_counters",)

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}

    def counter(self, name: str) -> Counter:
        """The counter of a name, made at the first call.

        >>> Metrics().counter("late").get_count()
        0
        """
        if type(name) is not str or not name:
            raise UsageError("the name of a counter is a non-empty str")
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = Counter()
        return counter

    def values(self) -> dict[str, int]:
        """All counters by name.

        >>> Metrics().values()
        {}
        """
        return {name: counter.get_count() for name, counter in self._counters.items()}
