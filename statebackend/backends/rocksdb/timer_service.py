"""Timers in two column families for each domain: by key, as a map of times, and by time, in the order of firing.

Checkpoints hold the rows by key. The rows by time follow from them: a time, a key and a namespace, with the key
group for a value, so that the first row of all is the next timer that fires, of any key group. Both change in
one batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from statebackend._core.rocksdb.binding.write_batch import WriteBatch
from statebackend._core.rocksdb.overlay.composite_keys import (
    by_time_many,
    composite_key,
    group_prefix,
    map_key_of,
    map_key_suffix,
    parts_of,
)
from statebackend._core.rocksdb.overlay.keyed_store import KeyedStore, Table
from statebackend.backends.rocksdb.family_states import PRESENT, Runs
from statebackend.backends.rocksdb.native_snapshot import BY_TIME
from statebackend.backends.rocksdb.row_loader import SortBuffer, apply, composed_keys
from statebackend.checkpoint.format import GroupedBatch, Op
from statebackend.checkpoint.keyed.row_source import phases
from statebackend.keys import canonical_list, runs_of_list
from statebackend.state import (
    DOMAINS,
    StateDescriptor,
    TimerRow,
    Timers,
    checked_domain,
    timer_state,
)
from statebackend.types.serializers import serializer_for

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed_backend import RocksDbKeyedBackend


class _Timers(NamedTuple):
    """The timers of a domain by key, as a state."""

    descriptor: StateDescriptor
    table: Table


def load_timers(
    backend: RocksDbKeyedBackend, domain: str, queue: Queue, rows: Iterable[GroupedBatch]
) -> None:
    """Apply rows in order to a domain without timers. O(timers), and a sort of them.

    If some rows are changes, timers are counted at the end: O(timers).
    """
    timers, may_repeat = _Timers(timer_state(domain), queue.by_key), False
    with SortBuffer(backend, queue.by_key) as by_key, SortBuffer(backend, queue.by_time) as by_time:
        for grouped in rows:
            may_repeat = may_repeat or "op" in grouped.batch.schema.names
            for op, batch in phases(grouped):
                keys = composed_keys(backend, timers, op, batch)
                if op is Op.PUT:
                    firing, groups = by_time_many(*keys)
                    by_key.add(keys, _same(_VALUE, batch.num_rows))
                    by_time.add(firing, groups)
                    queue.count += batch.num_rows
                    continue
                by_key.write()
                by_time.write()
                _remove_by_time(backend, queue, op, keys)
                apply(backend, timers, op, keys, batch)
        by_key.write()
        by_time.write()
    if may_repeat:
        queue.count = backend.store.count(queue.by_key, backend.has_int_keys, False, False, 2**62)


def _remove_by_time(backend: RocksDbKeyedBackend, queue: Queue, op: Op, keys: Runs) -> None:
    """Take timers out of the order of firing that are still there by key."""
    if op is Op.CLEAR:
        places = canonical_list(keys)
        keys = runs_of_list([key for place in places for key, _ in backend.store.rows(queue.by_key, place)])
    batch = WriteBatch(backend.scratch.database)
    batch.delete_many(queue.by_time.family, *by_time_many(*keys)[0])
    batch.write(wal=False)


def _same(value: bytes, rows: int) -> Runs:
    data = np.tile(np.frombuffer(value, np.uint8), rows)
    return np.arange(rows + 1, dtype=np.int64) * len(value), data


_VALUE = PRESENT + serializer_for(bool).serialize(False)
_GROUP = 2


class _TimerMark(NamedTuple):
    """What a rollback returns to, for each domain."""

    counts: dict[str, int]
    floors: dict[str, bytes]


class Queue:
    """The timers of a domain."""

    def __init__(self, by_key: Table, by_time: Table) -> None:
        self.by_key = by_key
        self.by_time = by_time
        self.count = 0
        #: Nothing in the order of firing lies before: a search does not walk over what was removed there.
        self.floor = b""


class RocksDbTimers(Timers):
    """The timers of a backend. A domain costs nothing before its first timer."""

    def __init__(self, backend: RocksDbKeyedBackend) -> None:
        super().__init__(backend)
        self._store: KeyedStore = backend.store
        self._is_int = backend.has_int_keys
        #: The domains that have had a timer.
        self.queues: dict[str, Queue] = {}
        self._fired = 0

    def _queue(self, domain: str) -> Queue:
        queue = self.queues.get(domain)
        if queue is None:
            name = timer_state(domain).name
            tables = [
                self._backend.create_table(
                    table,
                    self._backend.make_rules(table, False, "map_entry", 0, {}),
                    "map_entry",
                    None,
                    is_noted=table == name,
                )
                for table in (name, name + BY_TIME)
            ]
            queue = self.queues[domain] = Queue(*tables)
        return queue

    def adopt_rows(self, domain: str, changes: Iterable[GroupedBatch]) -> None:
        """Take over the tables of a domain that the database has, and apply changes to them. O(timers)."""
        queue = self._queue(domain)
        load_timers(self._backend, domain, queue, changes)
        queue.count = self._store.count(queue.by_key, self._is_int, False, False, 2**62)

    def load_rows(self, domain: str, rows: Iterable[GroupedBatch]) -> None:
        """Register what a checkpoint has, in a domain without timers; no change, and no rollback takes it back."""
        load_timers(self._backend, domain, self._queue(domain), rows)

    # --- one timer ---

    def _place(self) -> tuple[int, bytes, bytes]:
        """Key group, place, and the bytes after the time in the order of firing."""
        backend = self._backend
        key, group, namespace = backend._require_key(), backend._key_group, backend._namespace
        place = composite_key(group, key, namespace)
        return group, place, place[_GROUP:]

    def _register(self, timestamp: int, domain: str) -> None:
        group, place, behind = self._place()
        queue, time = self._queue(domain), map_key_suffix(timestamp)
        if self._store.get_at(queue.by_key, place + time) is not None:
            return
        if self._backend._namespace:
            queue.by_key.note_namespaces()
        with self._backend.together():
            self._store.put_at(queue.by_key, place + time, _VALUE)
            self._store.put_at(queue.by_time, time + behind, group_prefix(group))
            queue.count += 1
            queue.floor = min(queue.floor, time + behind)

    def _delete(self, timestamp: int, domain: str) -> None:
        queue = self.queues.get(domain)
        _, place, behind = self._place()
        time = map_key_suffix(timestamp)
        if queue is not None and self._store.get_at(queue.by_key, place + time) is not None:
            self._remove(queue, time, place, behind)

    def _remove(self, queue: Queue, time: bytes, place: bytes, behind: bytes) -> None:
        """Remove a timer that is there. A fired timer is gone from both, or it would fire forever."""
        with self._backend.together():
            self._store.delete_at(queue.by_key, place + time)
            self._store.delete_at(queue.by_time, time + behind)
            queue.count -= 1

    def _pending(self, domain: str) -> list[int]:
        queue = self.queues.get(domain)
        _, place, _ = self._place()
        if queue is None:
            return []
        return [map_key_of(key[len(place) :], True) for key, _ in self._store.rows(queue.by_key, place)]

    # --- all timers ---

    def _first(self, queue: Queue) -> tuple[bytes, bytes] | None:
        rows = self._store.rows(queue.by_time, b"", queue.floor, 1)
        if not rows:
            return None
        queue.floor = rows[0][0]
        return rows[0]

    def _take_due(self, now: int, domain: str) -> int | None:
        self._backend._check_open()
        queue = self.queues.get(domain)
        first = None if queue is None else self._first(queue)
        if queue is None or first is None:
            return None
        row, group = first
        time, behind = row[:8], row[8:]
        timestamp: int = map_key_of(time, True)
        if timestamp > now:
            return None
        _, key, namespace, _ = parts_of(group + behind, self._is_int)
        self._backend._enter(key, namespace)
        self._remove(queue, time, group + behind, behind)
        self._fired += 1
        return timestamp

    def next_due(self, domain: str = "event") -> int | None:
        self._backend._check_open()
        queue = self.queues.get(checked_domain(domain))
        first = None if queue is None else self._first(queue)
        return None if first is None else map_key_of(first[0][:8], True)

    def count(self, domain: str = "event") -> int:
        self._backend._check_open()
        queue = self.queues.get(checked_domain(domain))
        return 0 if queue is None else queue.count

    @property
    def fired(self) -> int:
        return self._fired

    def _all_rows(self, first_group: int, last_group: int) -> Iterable[TimerRow]:
        for domain in DOMAINS:
            queue = self.queues.get(domain)
            for key, _ in (
                [] if queue is None else self._store.rows(queue.by_key, b"", group_prefix(first_group))
            ):
                group, canonical, namespace, time = parts_of(key, self._is_int)
                if group > last_group:
                    break
                yield TimerRow(domain, group, canonical, namespace, map_key_of(time, True))

    # --- marks ---

    def mark(self) -> _TimerMark:
        queues = self.queues.items()
        return _TimerMark(
            {name: each.count for name, each in queues}, {name: each.floor for name, each in queues}
        )

    def return_to(self, mark: _TimerMark) -> None:
        for domain, queue in self.queues.items():
            queue.count = mark.counts.get(domain, 0)
            queue.floor = mark.floors.get(domain, b"")

    def close(self) -> None:
        self.queues.clear()
