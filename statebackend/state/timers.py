"""Timers: a key asks to be called at a time.

A timer consists of a key, a namespace and a time in one of two domains, ``"event"`` and ``"processing"``. Registering
it twice has the effect of once. It is due when ``timestamp <= now``. Timers fire in the order of their times; at one
time in the order of their keys in canonical form (integers by value, all other keys by their bytes); for one key in
the order of their encoded namespaces.

>>> from statebackend.backends import create_backend
>>> keyed = create_backend("reference").create_keyed_backend(str)
>>> for user, at in (("bob", 20), ("ann", 20), ("ann", 10), ("ann", 30)):
...     keyed.set_current_key(user)
...     keyed.timers.register_event_time_timer(at)
>>> [(at, keyed.current_key) for at in keyed.timers.due(20)]
[(10, 'ann'), (20, 'ann'), (20, 'bob')]
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.errors import usage
from statebackend.keys import NamespaceColumn, as_columnar, canonical_batch, key_encoder, namespace_column
from statebackend.state.descriptors import MapStateDescriptor
from statebackend.state.scalar_fallback import CallKeys
from statebackend.state.value_columns import check_lengths

#: The time that the rows tell, and the time that the clock tells.
DOMAINS = ("event", "processing")

#: The reserved prefix: names of users' states do not begin with it.
RESERVED = "statebackend."


def checked_domain(domain: Any) -> str:
    """The domain itself; refuses anything else."""
    if domain in DOMAINS:
        return str(domain)
    raise usage.argument(
        "the domain of a timer is 'event' or 'processing'", hint="timers.due(now, 'processing')"
    )


def checked_time(timestamp: Any) -> int:
    """The time of a timer; it must be a whole number of milliseconds that fits 64 bits."""
    try:
        if isinstance(timestamp, bool):
            raise TypeError
        checked = operator.index(timestamp)
    except TypeError:
        raise usage.time(
            f"the time of a timer is not a {type(timestamp).__name__}",
            hint="write milliseconds as an int, for example ctx.now + 60_000",
        ) from None
    if not -(2**63) <= checked < 2**63:
        raise OverflowError("the time of a timer is longer than 64 bits of milliseconds")
    return checked


def timer_state(domain: str) -> MapStateDescriptor:
    """The state that holds the timers of a domain in checkpoints: a map whose keys are times.

    No user's state has such a name.
    """
    return MapStateDescriptor(f"{RESERVED}timers.{domain}", "bigint", "boolean")


class TimerRow(NamedTuple):
    """One timer as checkpoints hold it: the key in canonical form, the namespace encoded."""

    domain: str
    key_group: int
    key: Any
    namespace: bytes
    timestamp: int


class DueTimers(NamedTuple):
    """Timers that `Timers.take_due` has taken, as columns, in the order in which they fire."""

    keys: pa.Array
    #: Milliseconds.
    timestamps: pa.Array
    #: As vectorised calls take them.
    namespaces: pa.Array | list[Any]


def timestamp_column(timestamps: Any) -> NDArray[np.int64]:
    """The times of timers: a column of milliseconds, or of timestamps in whole ones; O(n)."""
    column = as_columnar(timestamps, "timestamps")
    if isinstance(column, pa.Array):
        if column.null_count:
            raise usage.time("the time of a timer is null")
        try:
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.timestamp("ms", column.type.tz))
            elif not pa.types.is_integer(column.type):
                raise usage.column(
                    f"the times of timers are not of type {column.type}",
                    hint="give milliseconds or timestamps",
                )
            return np.ascontiguousarray(column.cast(pa.int64()).to_numpy(), dtype=np.int64)
        except pa.ArrowInvalid:
            raise usage.time("the time of a timer is not a whole number of milliseconds of 64 bits") from None
    return np.array([checked_time(each) for each in column], dtype=np.int64)


class Timers(ABC):
    """The timers of a keyed backend: ``keyed.timers``.

    Marks journal them, and they belong to key groups, like state. `clear_key` leaves them alone.
    """

    #: The watermark that the batch began with, or that fires the timers of this moment.
    _watermark: int | None = None

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._backend!r}>"

    # --- to be written ---

    @abstractmethod
    def _register(self, timestamp: int, domain: str) -> None:
        """Register a timer of the current key and namespace."""

    @abstractmethod
    def _delete(self, timestamp: int, domain: str) -> None:
        """Delete a timer of the current key and namespace; do nothing if there is none."""

    @abstractmethod
    def _pending(self, domain: str) -> list[int]:
        """The times at which the current key has timers in the current namespace, in order."""

    def _take_due(self, now: int, domain: str) -> int | None:
        """Remove the first timer that is due and make its key and namespace current; return its time, or None.

        Not needed if `_firing` is overridden.
        """
        raise NotImplementedError

    def _firing(self, now: int, domain: str) -> Iterator[int]:
        """A generator that does what `due` does; the arguments have been checked."""
        backend = self._backend
        backend._check_open()
        saved = backend._save_key()
        try:
            while (timestamp := self._take_due(now, domain)) is not None:
                yield timestamp
        finally:
            if not backend._closed:
                backend._restore_key(saved)

    @abstractmethod
    def _all_rows(self, first_group: int, last_group: int) -> Iterable[TimerRow]:
        """All timers of a range of key groups, read at once."""

    # --- the current key and namespace ---

    def register_event_time_timer(self, timestamp: int) -> None:
        """Register a timer of the current key and namespace, in milliseconds. O(log timers).

        An existing timer stays as it is. A time that has passed is due at once: the timer fires with the next timers
        that do.
        """
        self._register(checked_time(timestamp), "event")

    def register_processing_time_timer(self, timestamp: int) -> None:
        """The same for a timer that is due by the clock. O(log timers)."""
        self._register(checked_time(timestamp), "processing")

    def delete_event_time_timer(self, timestamp: int) -> None:
        """Delete a timer of the current key and namespace; do nothing if there is none. O(log timers)."""
        self._delete(checked_time(timestamp), "event")

    def delete_processing_time_timer(self, timestamp: int) -> None:
        """The same for a timer that is due by the clock. O(log timers)."""
        self._delete(checked_time(timestamp), "processing")

    def pending_event_time_timers(self) -> list[int]:
        """The times at which the current key has timers in the current namespace, in order."""
        return self._pending("event")

    def pending_processing_time_timers(self) -> list[int]:
        """The same for timers that are due by the clock."""
        return self._pending("processing")

    # --- time ---

    def current_watermark(self) -> int | None:
        """The watermark: the one before the batch, or in ``on_timer`` the one that fires the timer. None before any."""
        return self._watermark

    def current_processing_time(self) -> int:
        """The time of the batch by the clock, in milliseconds; between batches, the clock's."""
        self._backend._check_open()
        now: int = self._backend._time()
        return now

    # --- all keys ---

    def due(self, now: int, domain: str = "event") -> Iterator[int]:
        """Take the timers that are due at ``now``, one by one: removes each, and makes its key and namespace current.

        A timer that is registered meanwhile and is due too comes in its turn. Afterwards key and namespace are what
        they were before. O(log timers) each.
        """
        self._backend._check_open()
        steps = self._firing(checked_time(now), checked_domain(domain))
        due: Iterator[int] = self._backend._open_iteration(steps)
        return due

    # --- columns ---

    def register_event_time_timers(self, keys: Any, timestamps: Any, namespaces: Any = None) -> None:
        """Register a timer for each row, in its namespace, else in the current one. Atomic. O(n log timers)."""
        self._change_many(keys, timestamps, "event", namespaces, True)

    def register_processing_time_timers(self, keys: Any, timestamps: Any, namespaces: Any = None) -> None:
        """The same for timers that are due by the clock. Atomic. O(n log timers)."""
        self._change_many(keys, timestamps, "processing", namespaces, True)

    def delete_event_time_timers(self, keys: Any, timestamps: Any, namespaces: Any = None) -> None:
        """Delete the timer of each row, in its namespace, else in the current one. Atomic. O(n log timers)."""
        self._change_many(keys, timestamps, "event", namespaces, False)

    def delete_processing_time_timers(self, keys: Any, timestamps: Any, namespaces: Any = None) -> None:
        """The same for timers that are due by the clock. Atomic. O(n log timers)."""
        self._change_many(keys, timestamps, "processing", namespaces, False)

    def _change_many(self, keys: Any, timestamps: Any, domain: str, namespaces: Any, registers: bool) -> None:
        backend = self._backend
        backend._check_open()
        column = CallKeys(keys, key_encoder(backend.key_type))
        times = timestamp_column(timestamps)
        spaces = None if namespaces is None else namespace_column(namespaces)
        check_lengths(column, times, *(() if spaces is None else (spaces.numbers,)))
        change = partial(self._register if registers else self._delete, domain=domain)
        names = None if spaces is None else [spaces.distinct[number] for number in spaces.numbers.tolist()]
        with backend._vectorised_call(column.canonical):
            backend._call_each(list(column), names, None, change, [times.tolist()], None)

    def take_due(self, now: int, domain: str = "event", *, most: int | None = None) -> DueTimers:
        """Take the timers that are due at ``now``, or the first ``most`` of them, as columns. O(log timers) each.

        Atomic; key and namespace stay what they are.
        """
        backend = self._backend
        backend._check_open()
        limit = 2**62 if most is None else checked_time(most)
        checked_domain(domain)
        with backend._undone_on_error():
            return self._take_columns(checked_time(now), domain, limit)

    def _take_columns(self, now: int, domain: str, most: int) -> DueTimers:
        """Do what `take_due` does; a backend that has columns overrides it."""
        backend = self._backend
        keys: list[Any] = []
        namespaces: list[bytes] = []
        times: list[int] = []
        firing = self._firing(now, domain)
        try:
            while len(times) < most:
                timestamp = next(firing, None)
                if timestamp is None:
                    break
                times.append(timestamp)
                keys.append(backend._key)
                namespaces.append(backend._namespace)
        finally:
            firing.close()  # type: ignore[attr-defined]
        encoder = key_encoder(backend.key_type)
        numbers: dict[bytes, int] = {}
        rows = [numbers.setdefault(each, len(numbers)) for each in namespaces]
        return DueTimers(
            encoder.decode_many(canonical_batch(keys, encoder.kind)),
            pa.array(times, pa.int64()),
            NamespaceColumn(np.array(rows, dtype=np.int64), list(numbers)).shown(),
        )

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
