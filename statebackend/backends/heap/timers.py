"""Timers over the compiled index: the Python half.

>>> from statebackend.backends.heap import HeapBackend
>>> keyed = HeapBackend().create_keyed_backend(int)
>>> keyed.set_current_key(1)
>>> keyed.timers.register(30); keyed.timers.register(10)
>>> keyed.timers.pending()
[10, 30]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from statebackend._core.handles.map_handle import MapHandle
from statebackend._core.handles.time_index import TIMER_BYTES, TimerHandle, TimerIndex
from statebackend._core.tables.state_table import StateTable
from statebackend.backends.heap.codec_choice import value_codec
from statebackend.backends.heap.states import make_handle, table_shape
from statebackend.state import DOMAINS, TimerRow, Timers, checked_domain, checked_time, timer_state

if TYPE_CHECKING:
    from statebackend.backends.heap.keyed import HeapKeyedBackend

__all__ = ["HeapTimers"]


class HeapTimers(TimerIndex, Timers):
    """The timers of a heap backend. A domain costs nothing before its first timer."""

    def __init__(self, backend: HeapKeyedBackend) -> None:
        TimerIndex.__init__(self, backend, self._make, checked_time, checked_domain)
        Timers.__init__(self, backend)

    def _make(self, domain: str) -> TimerHandle:
        # Not one of the backend's states: those belong to the user.
        backend, descriptor = self._backend, timer_state(domain)
        codec = value_codec(descriptor.stored_types()["value"], f"state {descriptor.name!r}")

        def make_table(namespaces: bool) -> StateTable:
            backend.shape_changes += 1
            return StateTable(backend.core, namespaces=namespaces, value=TIMER_BYTES, **table_shape(backend))

        def make_more() -> MapHandle:
            made: MapHandle = make_handle(MapHandle, backend, descriptor)
            return made

        return TimerHandle(backend, descriptor, codec, make_table, make_more=make_more)

    def _register(self, timestamp: int, domain: str) -> None:
        self.register(timestamp, domain)

    def _handles(self) -> dict[str, TimerHandle]:
        """What holds the timers, by domain; only of domains that have had a timer."""
        found = {domain: self._made(domain) for domain in DOMAINS}
        return {domain: handle for domain, handle in found.items() if handle is not None}

    def next_due(self, domain: str = "event") -> int | None:
        self._backend._check_open()
        handle = self._made(checked_domain(domain))
        return None if handle is None else handle.next_time()

    def count(self, domain: str = "event") -> int:
        self._backend._check_open()
        handle = self._made(checked_domain(domain))
        return 0 if handle is None else handle._pending_count()

    @property
    def fired(self) -> int:
        return sum(handle.fired for handle in self._handles().values())

    def _all_rows(self, first_group: int, last_group: int) -> Iterable[TimerRow]:
        for domain, handle in self._handles().items():
            for row in handle._rows(first_group, last_group):
                yield TimerRow(domain, *row)

    def _follow_rollback(self) -> None:
        """Let the rollback itself pay for what it means to the queues."""
        for handle in self._handles().values():
            handle._settle()

    def _close(self) -> None:
        """Release the core before the backend closes it."""
        for handle in self._handles().values():
            handle._close()

    def _metrics(self) -> dict[str, Any]:
        return {domain: handle._metrics() for domain, handle in self._handles().items()}
