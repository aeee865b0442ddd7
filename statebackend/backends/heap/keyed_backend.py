"""The keyed backend: the Python half, on top of the compiled key context and handles."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from statebackend._core.handles.key_context import KeyContext
from statebackend._core.handles.row_loop import Iteration, clear_key_in
from statebackend._core.snapshots.changes import count_changes
from statebackend._core.tables.state_core import StateCore
from statebackend.backends.heap.row_loader import load, unload
from statebackend.backends.heap.snapshot_source import HeapChanges, HeapPoints, HeapView
from statebackend.backends.heap.state_handles import make_state
from statebackend.backends.heap.table_reader import TableReader, row_tables
from statebackend.backends.heap.timer_service import HeapTimers, TimerReader
from statebackend.checkpoint import CheckpointStore, DataWriter, Snapshot
from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed import ExpiredAt
from statebackend.checkpoint.keyed.compiled_backend import CompiledKeyedBackend
from statebackend.checkpoint.keyed.state_restore import RestoredState
from statebackend.errors import MutationError
from statebackend.state import StateDescriptor, Watermarks, checked_budget, clocks


def default_threads() -> int:
    """The threads of vectorised calls: 1 in a Spark worker, which shares its machine; else one for each core."""
    if "SPARK_ENV_LOADED" in os.environ and "PYTHON_WORKER_FACTORY_PORT" in os.environ:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class HeapKeyedBackend(KeyContext, CompiledKeyedBackend):
    """Keyed state in the compiled core."""

    _timers: HeapTimers

    def __init__(
        self,
        key_type: Any,
        *,
        max_bytes: int = 0,
        check_mutations: bool = False,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        CompiledKeyedBackend.__init__(self, key_type, **options)
        self.threads = default_threads() if threads is None else threads
        #: Finds objects that were changed in place; set with ``check_mutations``.
        self.mutation_watcher = MutationWatcher() if check_mutations else None
        #: The time of the newest vectorised call.
        self.called_at = 0
        #: Increments whenever a state gets a table or another descriptor.
        self.shape_changes = 0
        self._max_bytes = max_bytes
        self._written: list[TableReader] = []
        #: The place of a state in that list, by its journals.
        self._written_by: dict[int, int] = {}
        self._written_made_of = (0, 0)
        self._open_context(StateCore(max_bytes=max_bytes))
        self._timers = HeapTimers(self)
        self._restore()

    def free_threads(self) -> int:
        """The threads that are left for a vectorised call: one that writes has a core too, and both go faster so."""
        return max(1, self.threads - self._threads.at_work())

    # --- states ---

    def _create_state(self, descriptor: StateDescriptor) -> Any:
        return make_state(self, descriptor)

    def _new_state(self, descriptor: StateDescriptor) -> Any:
        state = super()._new_state(descriptor)
        config = descriptor.ttl_config
        cleanup = None if config is None else config.incremental_cleanup
        if cleanup is not None and cleanup.run_cleanup_for_every_record:
            self._clean_on_record(state)  # only now: the state has been restored whole
        return state

    def _redeclare_state(self, state: Any, descriptor: StateDescriptor) -> None:
        state._redeclare(descriptor)
        self.shape_changes += 1

    def _canonical_keys(self, state: Any, namespace: bytes | None) -> Iterable[Any]:
        if namespace is None:
            return state._entries()[0]
        number = self.core.namespaces.find(namespace)
        return [] if number is None else state._entries(number, False)[0]

    def _canonical_entries(self, state: Any) -> Iterable[tuple[Any, bytes]]:
        keys, numbers = state._entries()
        return zip(keys, map(self.core.namespaces.name, numbers), strict=True)

    def _entry_count(self, state: Any) -> int:
        return state._count()

    def _clear_key_in(self, states: list[Any]) -> None:
        clear_key_in(self, states)

    def _merge(self, state: Any, target: bytes, sources: list[bytes]) -> None:
        saved = self._save_key()
        try:
            if state.descriptor.kind == "list":
                self._merge_lists(state, target, sources)
            else:
                self._merge_values(state, target, sources)
        finally:
            self._restore_key(saved)

    def _merge_lists(self, state: Any, target: bytes, sources: list[bytes]) -> None:
        parts = None
        for namespace in sources:
            if self.core.namespaces.find(namespace) is not None:
                self._namespace = namespace
                parts = state._take(parts)
        if parts is not None:
            self._namespace = target
            state._put(parts)

    def _merge_values(self, state: Any, target: bytes, sources: list[bytes]) -> None:
        merged = None
        for namespace in sources:
            if self.core.namespaces.find(namespace) is None:
                continue
            self._namespace = namespace
            stored = state._take()
            stored = None if stored is None else state._moved(stored)
            if stored is not None:
                merged = stored if merged is None else state._merge_stored(merged, stored)
        if merged is None:
            return
        self._namespace = target
        old = state._take()
        old = None if old is None else state._moved(old)
        if old is not None:
            merged = state._merge_stored(old, merged)
        if merged is not None:
            state._put_stored(*merged)

    # --- time ---

    def begin(self, now: int | None = None, watermarks: Watermarks | None = None) -> None:
        super().begin(now, watermarks)
        if self._fixed_now is not None:  # a key that is current sees the time of the batch too
            self._now = self._fixed_now

    def _time(self) -> int:
        return self._saw(super()._time())

    def begin_call(self, state: Any) -> int:
        """Read the clock for a vectorised call, the machine's only if something expires; return the state's time.

        States in event time use the watermark after the batch, if rows tell their time. 0 if nothing expires.
        """
        config = state.descriptor.ttl_config if state.ttl else None
        by_watermark = self._by_watermark() if config is not None and config.is_in_event_time else None
        if by_watermark is not None:
            self.read_clock_once()
            self.called_at = by_watermark
            state._note_times(by_watermark, by_watermark)
        elif config is not None or type(self._clock) is not clocks.SystemClock:
            self.called_at = self._work_time()
        return 0 if config is None else self.called_at

    def read_clock_once(self) -> None:
        """Read a clock that was given for a vectorised call that uses other times; checkpoints have what it says."""
        if type(self._clock) is not clocks.SystemClock:
            self._work_time()

    def advance(self, budget: int = 1000) -> int:
        """Remove what has expired from states with ``cleanup_idle``, and reclaim memory; return how much expired.

        O(what has expired): an index finds it.
        """
        done = super().advance(budget)
        self.core.advance(checked_budget(budget) - done)
        return done

    def _clean_idle(self, state: Any, budget: int) -> int:
        expired: int = state._expire(budget)
        return expired

    def _open_iteration(self, steps: Any) -> Iterator[Any]:
        iteration: Iterator[Any] = Iteration(self._check_call, steps)
        return iteration

    # --- marks ---

    def _mark_point(self) -> Any:
        if not len(self._marks):  # an older mark holds all changes that the point does
            self._log.drop_outgrown_point()
        if self.mutation_watcher is not None:
            self.mutation_watcher.check()
        return self.core.mark()

    def _return_to(self, point: Any) -> None:
        self.core.rollback(point)
        if self.mutation_watcher is not None:
            self.mutation_watcher.start_over()
        self._timers._settle()
        self._log.rolled_back()

    def _forget_point(self, point: Any) -> None:
        self.core.release(point)

    def count_changes(self, mark: Any) -> tuple[int, int]:
        self._check_open()
        point = self._marks.point_of(mark)
        written = removed = 0
        for state in self.written_since(point):
            for table in state.tables if state.name in self._states else ():
                more, gone = count_changes(table, point)
                written, removed = written + more, removed + gone
        return written, removed

    # --- checkpoints ---

    def snapshot(
        self, checkpoint_id: int, store: CheckpointStore | DataWriter, *, incremental: bool = True
    ) -> Snapshot:
        if self.mutation_watcher is not None:
            self.mutation_watcher.check()
        return super().snapshot(checkpoint_id, store, incremental=incremental)

    def _open_view(self, expired_at: ExpiredAt) -> HeapView:
        return HeapView(self, expired_at)

    def _read_changes(self, point: Any) -> HeapChanges:
        return HeapChanges(self, point)

    def _make_points(self) -> HeapPoints:
        return HeapPoints(self)

    def _state_readers(self) -> list[TableReader]:
        """All states, and the timers, which the core keeps as states. Do not change the list: snapshots keep it."""
        made_of = (self.shape_changes, len(self._states))
        if self._written_made_of != made_of:
            self._written = [TableReader(self, state) for state in self._states.values()]
            self._written += [TimerReader(self, handle) for handle in self._timers._handles().values()]
            self._written_by = {
                journal: at for at, state in enumerate(self._written) for journal in state.journals
            }
            self._written_made_of = made_of
        return self._written

    def written_since(self, point: Any) -> list[TableReader]:
        """The states in which anything has changed since a point."""
        states, known = self._state_readers(), self._written_by
        return [states[at] for at in sorted({known[each] for each in self.core.written_since(point)})]

    @contextmanager
    def _loading(self) -> Iterator[None]:
        self.core.begin_load()
        try:
            yield
        finally:
            self.core.end_load()

    def _load(self, state: Any, rows: Iterator[tuple[Op, pa.RecordBatch]]) -> None:
        for op, batch in rows:
            load(self, state, op, batch)

    def _load_timers_of(self, domain: str, restored: RestoredState) -> None:
        self._timers.load_rows(domain, restored.rows)

    def _unload(self, state: Any) -> None:
        # Giving memory back may need a little memory first, and there may be none left.
        self.core.arena.set_limit(0)
        try:
            unload(state, self.key_group_range)
            self.core.advance(1 << 30)
            self.core.arena.trim()
        finally:
            self.core.arena.set_limit(self._max_bytes)

    def _drop_all(self) -> None:
        self._timers._close()
        for state in self._states.values():
            state._close()
        self._written = []
        self.core.close()
        if self.mutation_watcher is not None:
            self.mutation_watcher.start_over()

    # --- figures ---

    def _row_count(self, state: Any) -> int:
        return state._count() if state.descriptor.kind != "map" else sum(map(len, row_tables(state)))

    def _expiry_metrics(self, state: Any) -> dict[str, Any]:
        return state._expiry_metrics()

    def metrics(self) -> dict[str, Any]:
        metrics = super().metrics()
        for name, state in self._states.items():
            metrics["states"][name].update(state._metrics())
        return metrics

    def counts(self) -> dict[str, Any]:
        core = self.core.metrics()
        return {**super().counts(), **{each: core[each] for each in _OF_CORE}}


_OF_CORE = (
    "marks",
    "snapshots",
    "copied_entries",
    "copied_pages",
    "rehashed_entries",
    "used_bytes",
    "run_bytes",
    "extent_bytes",
    "blob_bytes",
)


class _WatchedObject(NamedTuple):
    value: Any
    data: bytes
    group: int
    #: The number of checks made before the object was noted.
    checks: int


class MutationWatcher:
    """The debug mode ``check_mutations``: finds objects that were changed in place, without an `update`.

    The backend keeps objects of PICKLE and of a user's serializer by reference. Changing one in place also changes
    the object that a mark or a snapshot still needs. So this mode notes every object that goes in or out with its
    serialised form, and compares the two at the next mark or snapshot. Every access costs a serialisation and keeps
    the object alive, so use it in tests only.
    """

    def __init__(self) -> None:
        self._noted: dict[Any, list[_WatchedObject]] = {}
        self._serialize: dict[str, Any] = {}
        self._checks = 0
        self._found: MutationError | None = None

    def note(self, state: Any, value: Any, map_key: Any = None, written: bool = True) -> None:
        """Note an object that was stored at, or read from, the current key.

        A read does not excuse a change: the object stays noted as it was, until it is written.
        """
        place = self._place(state, map_key)
        noted = self._noted.setdefault(place, [])
        serialize = partial(state.backend._run, state.codec.serializer.serialize)
        data = b"" if value is None else serialize(value)
        for at, each in enumerate(noted):
            if each.value is value:
                if each.data != data and each.checks < self._checks and self._found is None:
                    # The same object, but changed: it has also changed what the last mark or snapshot relies on.
                    self._found = self._error(place, each)
                if written or each.data == data:
                    noted[at] = each._replace(data=data, checks=self._checks)
                return
        self._serialize[place[0]] = serialize
        noted.append(_WatchedObject(value, data, state.backend._key_group, self._checks))

    def note_all(self, state: Any, values: list[Any]) -> None:
        for value in values:
            self.note(state, value)

    def forget(self, state: Any, map_key: Any = None) -> None:
        """Forget the objects of the current key, or of one of its map keys: the user removes them."""
        place = self._place(state, map_key)
        if map_key is not None or state.descriptor.kind != "map":
            self._noted.pop(place, None)
            return
        for other in [each for each in self._noted if each[:3] == place[:3]]:
            del self._noted[other]

    def check(self) -> None:
        """Raise `MutationError` for the first object that has changed. O(all of them)."""
        found, self._found = self._found, None
        if found is not None:
            raise found
        for place, noted in self._noted.items():
            for each in noted:
                if each.value is not None and self._serialize[place[0]](each.value) != each.data:
                    raise self._error(place, each)
            if place[4]:
                del noted[:-1]
        self._checks += 1

    def start_over(self) -> None:
        self._noted.clear()
        self._found = None

    def _place(self, state: Any, map_key: Any) -> Any:
        backend = state.backend
        is_single = state.descriptor.kind != "list"
        return state.descriptor.name, backend._key, backend._namespace, map_key, is_single

    def _error(self, place: Any, noted: _WatchedObject) -> MutationError:
        return MutationError(
            f"an object of type {type(noted.value).__name__} was changed in place",
            detail=f"state {place[0]!r}, key group {noted.group}",
            hint="change it and update(...) in the batch in which it was read",
        )
