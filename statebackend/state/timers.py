"""Timers: a key asks to be called at a time.

A timer consists of a key, a namespace and a time in one of two domains, ``"event"`` and ``"processing"``. Registering
it twice has the effect of once. It is due when ``timestamp <= now``. Timers fire in the order of their times; at one
time in the order of their keys in canonical form (integers by value, all other keys by their bytes); for one key in
the order of their encoded namespaces.

>>> from statebackend.backends import create_backend
>>> keyed = create_backend("reference").create_keyed_backend(str)
>>> for user, at in (("bob", 20), ("ann", 20), ("ann", 10), ("ann", 30)):
...     keyed.set_current_key(user)
...     keyed.timers.register(at)
>>> [(at, keyed.current_key) for at in keyed.timers.due(20)]
[(10, 'ann'), (20, 'ann'), (20, 'bob')]
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from statebackend.errors import UsageError
from statebackend.state.descriptors import MapStateDescriptor

__all__ = ["DOMAINS", "RESERVED", "TimerRow", "Timers", "checked_domain", "checked_time", "timer_state"]

#: The time that the rows tell, and the time that the clock tells.
DOMAINS = ("event", "processing")

#: The reserved prefix: names of users' states do not begin with it.
RESERVED = "statebackend."


def checked_domain(domain: Any) -> str:
    """The domain itself; refuses anything else.

    >>> checked_domain("event")
    'event'
    """
    if domain in DOMAINS:
        return str(domain)
    raise UsageError("the domain of a timer is 'event' or 'processing'", hint="register(ts, 'processing')")


def checked_time(timestamp: Any) -> int:
    """The time of a timer; it must be a whole number of milliseconds that fits 64 bits.

    >>> checked_time(5)
    5
    """
    try:
        if isinstance(timestamp, bool):
            raise TypeError
        checked = operator.index(timestamp)
    except TypeError:
        raise UsageError(
            f"the time of a timer is not a {type(timestamp).__name__}",
            hint="write milliseconds as an int, for example ctx.now + 60_000",
        ) from None
    if not -(2**63) <= checked < 2**63:
        raise OverflowError("the time of a timer is longer than 64 bits of milliseconds")
    return checked


def timer_state(domain: str) -> MapStateDescriptor:
    """The state that holds the timers of a domain in checkpoints: a map whose keys are times.

    No user's state has such a name.

    >>> timer_state("event").name
    'statebackend.timers.event'
    """
    return MapStateDescriptor(f"{RESERVED}timers.{domain}", "bigint", "boolean")


class TimerRow(NamedTuple):
    """One timer as checkpoints hold it: the key in canonical form, the namespace encoded.

    >>> TimerRow("event", 3, 7, b"", 1000).timestamp
    1000
    """

    domain: str
    key_group: int
    key: Any
    namespace: bytes
    timestamp: int


class Timers(ABC):
    """The timers of a keyed backend: ``keyed.timers``.

    Marks journal them, and they belong to key groups, like state. `clear_key` leaves them alone.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    # --- to be written ---

    @abstractmethod
    def _register(self, timestamp: int, domain: str) -> None:
        """Register a timer of the current key and namespace."""

    @abstractmethod
    def _firing(self, now: int, domain: str) -> Iterator[int]:
        """Do what `due` does; the arguments have been checked."""

    @abstractmethod
    def _all_rows(self, first_group: int, last_group: int) -> Iterable[TimerRow]:
        """All timers of a range of key groups, read at once."""

    # --- the current key and namespace ---

    @abstractmethod
    def register(self, timestamp: int, domain: str = "event") -> None:
        """Register a timer of the current key and namespace, in milliseconds. O(log timers).

        An existing timer stays as it is. A time that has passed is due at once: the timer fires with the next timers
        that do.
        """

    @abstractmethod
    def delete(self, timestamp: int, domain: str = "event") -> None:
        """Delete a timer of the current key and namespace; do nothing if there is none. O(log timers)."""

    @abstractmethod
    def pending(self, domain: str = "event") -> list[int]:
        """The times at which the current key has timers in the current namespace, in order."""

    # --- all keys ---

    def due(self, now: int, domain: str = "event") -> Iterator[int]:
        """Take the timers that are due at ``now``, one by one: removes each, and makes its key and namespace current.

        A timer that is registered meanwhile and is due too comes in its turn. Afterwards key and namespace are what
        they were before. O(log timers) each.

        >>> from statebackend.backends import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(str)
        >>> keyed.set_current_key("ann")
        >>> keyed.timers.register(10)
        >>> list(keyed.timers.due(9)), list(keyed.timers.due(10)), list(keyed.timers.due(11))
        ([], [10], [])
        """
        self._backend._check_open()
        return self._firing(checked_time(now), checked_domain(domain))

    @abstractmethod
    def next_due(self, domain: str = "event") -> int | None:
        """The time of the first timer of any key; None if there is none."""

    @abstractmethod
    def count(self, domain: str = "event") -> int:
        """The number of timers, of all keys."""

    @property
    @abstractmethod
    def fired(self) -> int:
        """The number of timers that have fired since the backend was made. Marks do not cover it."""

    # --- for checkpoints ---

    def rows(self, key_group_range: Any = None) -> list[TimerRow]:
        """The timers of a range of key groups (default: all), as they are now, in a fixed order. O(n log n)."""
        self._backend._check_open()
        own = self._backend.key_group_range if key_group_range is None else key_group_range
        return sorted(self._all_rows(own.start, own.end))

    def load(self, rows: Iterable[TimerRow]) -> None:
        """Register the timers that `rows` returned, of this backend or another one. All or nothing. O(n log n)."""
        backend = self._backend
        backend._check_open()
        saved = backend._save_key()
        try:
            with backend._undone_on_error():
                for row in rows:
                    group = backend._group_of(row.key)
                    backend._key, backend._key_group, backend._namespace = row.key, group, row.namespace
                    self._register(row.timestamp, checked_domain(row.domain))
        finally:
            backend._restore_key(saved)
