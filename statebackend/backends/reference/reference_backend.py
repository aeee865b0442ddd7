"""The factory of the reference backend, its keyed backend and its timers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from statebackend.backends.reference.base_state import EntryKey, Journal, NestedTable, ReferenceState
from statebackend.backends.reference.checkpoint_rows import ReferencePoints, ReferenceRows, StateCopies, load
from statebackend.backends.reference.state_handles import (
    ReferenceAggregatingState,
    ReferenceFoldingState,
    ReferenceListState,
    ReferenceMapState,
    ReferenceReducingState,
    ReferenceValueState,
)
from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed import CheckpointedKeyedBackend, ExpiredAt
from statebackend.operator_state import OperatorStateBackend
from statebackend.state import (
    DOMAINS,
    StateBackend,
    StateDescriptor,
    TimerRow,
    Timers,
    checked_budget,
    checked_domain,
)

_HANDLES: dict[str, type[ReferenceState[Any]]] = {
    "value": ReferenceValueState,
    "list": ReferenceListState,
    "map": ReferenceMapState,
    "reducing": ReferenceReducingState,
    "aggregating": ReferenceAggregatingState,
    "folding": ReferenceFoldingState,
}


class ReferenceBackend(StateBackend):
    """Makes reference backends; without options.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(ReferenceBackend()))
    ReferenceBackend()
    """

    name = "reference"

    def create_keyed_backend(self, key_type: Any, **options: Any) -> ReferenceKeyedBackend:
        return ReferenceKeyedBackend(key_type, **options)

    def create_operator_backend(
        self, *, subtask_index: int = 0, parallelism: int = 1, restore: Any = ()
    ) -> OperatorStateBackend:
        return OperatorStateBackend(subtask_index=subtask_index, parallelism=parallelism, restore=restore)

    def __repr__(self) -> str:
        return "ReferenceBackend()"


class ReferenceKeyedBackend(CheckpointedKeyedBackend):
    _states: dict[str, ReferenceState[Any]]  # type: ignore[assignment]

    def __init__(self, key_type: Any, **options: Any) -> None:
        super().__init__(key_type, **options)
        self.journal = Journal()
        self._points = ReferencePoints(self)
        self._timers = ReferenceTimers(self)
        self._restore()

    def set_current_key(self, key: Any) -> None:
        super().set_current_key(key)
        for state in self._states.values():
            config = state.descriptor.ttl_config
            cleanup = None if config is None else config.incremental_cleanup
            if cleanup is not None and cleanup.run_cleanup_for_every_record:
                state.accessed()

    # --- for the handles ---

    @property
    def event_now(self) -> int:
        """The time of states in event time: the time of the row or timer at hand, if rows tell theirs."""
        return self._now if self._event_now is None else self._event_now

    @property
    def event_cleaned(self) -> int:
        """The time by which states in event time are cleaned up."""
        return self._now if self._event_now is None else self._event_cleaned

    def place(self) -> EntryKey:
        """The place of the current key's entries; raises without a current key."""
        return EntryKey(self._key_group, self._namespace, self._require_key())

    def enter(self, key: Any, namespace: bytes) -> None:
        """Make a canonical key and an encoded namespace current, and read the clock."""
        self._key, self._key_group, self._namespace = key, self._group_of(key), namespace
        self._now = self._work_time()

    # --- states ---

    def _create_state(self, descriptor: StateDescriptor) -> ReferenceState[Any]:
        return _HANDLES[descriptor.kind](self, descriptor)

    def _redeclare_state(self, state: Any, descriptor: StateDescriptor) -> None:
        state._descriptor = descriptor

    def _canonical_keys(self, state: Any, namespace: bytes | None) -> Iterable[Any]:
        return [key for key, found in self._canonical_entries(state) if namespace in (None, found)]

    def _canonical_entries(self, state: Any) -> list[tuple[Any, bytes]]:
        return [(at.key, at.namespace) for at, stored in state.table if state.is_alive(stored)]

    def _entry_count(self, state: Any) -> int:
        return len(state.table)

    def _clear_key_in(self, states: list[Any]) -> None:
        group, key = self._key_group, self._key
        for state in states:
            for at in state.table.places_of_key(group, key):
                state.drop(at)

    def _merge(self, state: Any, target: bytes, sources: list[bytes]) -> None:
        merged = None
        for namespace in sources:
            at = EntryKey(self._key_group, namespace, self._key)
            stored = state.table.get(at)
            if stored is not None:
                state.drop(at)
                stored = state.moved(stored)
            if stored is not None:
                merged = stored if merged is None else state.merged(merged, stored)
        if merged is None:
            return
        at = EntryKey(self._key_group, target, self._key)
        old = state.table.get(at)
        old = None if old is None else state.moved(old)
        if old is not None:
            merged = state.merged(old, merged)
        if merged is None:
            state.table.remove(at)
        else:
            state.table.put(at, merged)
        state.changed(at)

    # --- time ---

    def advance(self, budget: int = 1000) -> int:
        """Remove what has expired from states with ``cleanup_idle``: up to ``budget`` values, map entries and lists."""
        self._check_open()
        budget = checked_budget(budget)
        done = 0
        saved = self._save_key()
        self._now = self._work_time()
        for state in self._states.values():
            config = state.descriptor.ttl_config
            if config is None or not config.cleanup_idle:
                continue
            for at, stored in list(state.table):
                removed = state.clean(at, stored, budget - done) if done < budget else 0
                state.expired_by_cleanup += removed
                done += removed
        self._restore_key(saved)
        return done

    def _expiry_metrics(self, state: Any) -> dict[str, Any]:
        saved = self._save_key()
        self._now = self._time()
        oldest = state.oldest_timestamp()
        self._restore_key(saved)
        return {
            "expired_on_read": state.expired_on_read,
            "expired_by_cleanup": state.expired_by_cleanup,
            "oldest_timestamp": oldest,
        }

    # --- marks ---

    def _mark_point(self) -> tuple[int, int]:
        if not len(self._marks):  # an older mark holds all changes that the point does
            self._log.drop_outgrown_point()
        return self.journal.open(), self._points.next_number()

    def _return_to(self, point: tuple[int, int]) -> None:
        position, number = point
        self.journal.undo_to(position)
        self._points.held = [each for each in self._points.held if each.number < number]
        for state in self._states.values():
            state.changed(None)
        self._log.rolled_back()

    def _forget_point(self, point: tuple[int, int]) -> None:
        if not len(self._marks):
            self.journal.forget()

    def count_changes(self, mark: Any) -> tuple[int, int]:
        self._check_open()
        position, _ = self._marks.point_of(mark)
        before = self.journal.before(position)
        written = removed = 0
        for state in self._states.values():
            for at, stored in before.get(state.table, {}).items():
                old, new = state.rows_of(stored), state.rows_of(state.table.get(at))
                written += sum(old.get(row) is not what for row, what in new.items())
                removed += sum(row not in new for row in old)
        return written, removed

    def _row_count(self, state: Any) -> int:
        return sum(len(state.rows_of(stored)) for _, stored in state.table)

    # --- checkpoints ---

    def _open_view(self, expired_at: ExpiredAt) -> ReferenceRows:
        return ReferenceRows(self, expired_at=expired_at)

    def _read_changes(self, point: StateCopies) -> ReferenceRows:
        return ReferenceRows(self, since=point)

    def _make_points(self) -> ReferencePoints:
        return self._points

    @contextmanager
    def _loading(self) -> Iterator[None]:
        yield

    def _load(self, state: Any, rows: Iterator[tuple[Op, pa.RecordBatch]]) -> None:
        for op, batch in rows:
            for at, stored in load(self, state, op, batch):
                state.table.load(at, stored)
                for point in self._points.held:
                    point.put(state, at, stored)

    def _unload(self, state: Any) -> None:
        for at, _ in list(state.table):
            state.table.load(at, None)
            for point in self._points.held:
                point.put(state, at, None)

    def _drop_all(self) -> None:
        self.journal.forget()
        self._timers = ReferenceTimers(self)
        for state in self._states.values():
            state.table = type(state.table)(self.journal)


class ReferenceTimers(Timers):
    """One table per domain; it stores a frozenset of times, never empty, for a key and namespace.

    Every search scans them all.
    """

    def __init__(self, backend: ReferenceKeyedBackend) -> None:
        super().__init__(backend)
        self._tables = {domain: NestedTable(backend.journal) for domain in DOMAINS}
        self._fired = 0

    def _register(self, timestamp: int, domain: str) -> None:
        at, table = self._backend.place(), self._tables[domain]
        table.put(at, (table.get(at) or frozenset()) | {timestamp})

    def _delete(self, timestamp: int, domain: str) -> None:
        at, table = self._backend.place(), self._tables[domain]
        left = (table.get(at) or frozenset()) - {timestamp}
        if left:
            table.put(at, left)
        else:
            table.remove(at)

    def _pending(self, domain: str) -> list[int]:
        return sorted(self._tables[domain].get(self._backend.place()) or ())

    def tables(self) -> dict[str, NestedTable]:
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
        self._delete(timestamp, domain)
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
