"""Timers as sets of times per key; every search scans them all.

>>> from statebackend.backends.reference import ReferenceBackend
>>> keyed = ReferenceBackend().create_keyed_backend(int)
>>> keyed.set_current_key(1)
>>> keyed.timers.register(30); keyed.timers.register(10)
>>> keyed.timers.pending()
[10, 30]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from statebackend.backends.reference.table import NestedTable
from statebackend.state import DOMAINS, TimerRow, Timers, checked_domain, checked_time

if TYPE_CHECKING:
    from statebackend.backends.reference.backend import ReferenceKeyedBackend


class ReferenceTimers(Timers):
    """One table per domain; it stores a frozenset of times, never empty, for a key and namespace."""

    def __init__(self, backend: ReferenceKeyedBackend) -> None:
        super().__init__(backend)
        self._tables = {domain: NestedTable(backend.journal) for domain in DOMAINS}
        self._fired = 0

    def _register(self, timestamp: int, domain: str) -> None:
        at, table = self._backend.place(), self._tables[domain]
        table.put(at, (table.get(at) or frozenset()) | {timestamp})

    def delete(self, timestamp: int, domain: str = "event") -> None:
        timestamp, table = checked_time(timestamp), self._tables[checked_domain(domain)]
        at = self._backend.place()
        left = (table.get(at) or frozenset()) - {timestamp}
        if left:
            table.put(at, left)
        else:
            table.remove(at)

    def pending(self, domain: str = "event") -> list[int]:
        return sorted(self._tables[checked_domain(domain)].get(self._backend.place()) or ())

    def tables(self) -> dict[str, NestedTable]:
        """The table of each domain; it stores frozensets of times."""
        return self._tables

    def _take_due(self, now: int, domain: str) -> int | None:
        first = min(
            (
                (timestamp, at.key, at.namespace)
                for at, times in self._tables[domain]
                for timestamp in times
                if timestamp <= now
            ),
            default=None,
        )
        if first is None:
            return None
        timestamp, key, namespace = first
        self._backend.enter(key, namespace)
        self.delete(timestamp, domain)
        self._fired += 1
        return timestamp

    def next_due(self, domain: str = "event") -> int | None:
        self._backend._check_open()
        return min((min(times) for _, times in self._tables[checked_domain(domain)]), default=None)

    def count(self, domain: str = "event") -> int:
        self._backend._check_open()
        return sum(len(times) for _, times in self._tables[checked_domain(domain)])

    @property
    def fired(self) -> int:
        return self._fired

    def _all_rows(self, first_group: int, last_group: int) -> Iterable[TimerRow]:
        return [
            TimerRow(domain, at.group, at.key, at.namespace, timestamp)
            for domain, table in self._tables.items()
            for at, times in table
            for timestamp in times
            if first_group <= at.group <= last_group
        ]
