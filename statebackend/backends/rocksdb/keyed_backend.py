"""The keyed backend: registration, the current key, marks, cleanup and figures, on a compiled store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pyarrow as pa

from statebackend._core.rocksdb.binding.callbacks import CommittedClock, ExpiryRules
from statebackend._core.rocksdb.handles.current_key import CurrentKey
from statebackend._core.rocksdb.overlay.composite_keys import composite_key, parts_of, place_of
from statebackend._core.rocksdb.overlay.key_changes import CLEARED, NOT_NOTED
from statebackend._core.rocksdb.overlay.keyed_store import KeyedStore, Table
from statebackend._core.rocksdb.overlay.ordered_reads import read_many
from statebackend.backends.rocksdb.family_states import RocksDbListState, RocksDbMapState, chosen_rows
from statebackend.backends.rocksdb.native_base import (
    NativeBase,
    NativeStates,
    can_be_native,
    open_native_rows,
)
from statebackend.backends.rocksdb.native_snapshot import BY_TIME, NativeSnapshot, snapshot_to_adopt
from statebackend.backends.rocksdb.row_loader import load
from statebackend.backends.rocksdb.scratch import Scratch, figures_of_database, figures_of_state
from statebackend.backends.rocksdb.settings import Settings
from statebackend.backends.rocksdb.single_state import (
    RocksDbAggregatingState,
    RocksDbFoldingState,
    RocksDbReducingState,
    RocksDbValueState,
)
from statebackend.backends.rocksdb.snapshot_source import (
    ChangeLog,
    FamilyReader,
    RocksDbChanges,
    RocksDbPoints,
    RocksDbView,
    Segment,
)
from statebackend.backends.rocksdb.timer_service import RocksDbTimers
from statebackend.checkpoint import Checkpoint, CheckpointStore, DataWriter, Snapshot, StateSnapshot
from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed import ExpiredAt, Source
from statebackend.checkpoint.keyed.compiled_backend import CompiledKeyedBackend
from statebackend.checkpoint.keyed.row_source import NativeRows, has_native
from statebackend.checkpoint.keyed.state_restore import RestoredState
from statebackend.keys import KeyGroupRange
from statebackend.state import NO_TIME, StateDescriptor, StateTtlConfig, clocks, expired, timer_state
from statebackend.types import Type

_HANDLES: dict[str, Callable[..., Any]] = {
    "value": RocksDbValueState,
    "list": RocksDbListState,
    "map": RocksDbMapState,
    "reducing": RocksDbReducingState,
    "aggregating": RocksDbAggregatingState,
    "folding": RocksDbFoldingState,
}

#: Up to so many rows are counted; of more there is an estimate.
COUNTED = 10_000
#: `advance` looks at so many rows for each that it may remove, and at least at so many.
_LOOKS, _LEAST_LOOKS = 8, 1_000
#: Behind a key, in composite keys: the namespace `VOID`.
_VOID_END = b"\0"
#: The counters of drops by compactions and merges.
_DROPPED = ("dropped_values", "dropped_elements", "dropped_in_merges")


class _BatchMark(NamedTuple):
    """A point to roll back to: one of the batch, the changes since, and the timers at that moment."""

    number: int
    segment: Segment
    timers: Any


class _EntryKey(NamedTuple):
    """Key group, key and namespace, taken apart."""

    key: Any
    namespace: bytes


class RocksDbKeyedBackend(CurrentKey, CompiledKeyedBackend):
    """Keyed state in its own database."""

    _timers: RocksDbTimers

    def __init__(self, key_type: Any, *, settings: Settings, **options: Any) -> None:
        CompiledKeyedBackend.__init__(self, key_type, **options)
        self.has_int_keys = self._encoder.kind == "int"
        self._settings = settings
        adopted = self._snapshot_to_adopt()
        self.scratch = Scratch(settings, adopted)
        try:
            self._open_context(KeyedStore(self.scratch.database, self._refuse))
            self.changes = ChangeLog(self.store.set_changes)
            #: The changes since the batch began, while there is a mark.
            self.batch_segment: Segment | None = None
            #: The times by which compactions drop what has expired: of the clock, and of events.
            self._committed = (CommittedClock(), CommittedClock())
            #: The time that a given clock told the vectorised call that begins.
            self._called_at: int | None = None
            self._timers = RocksDbTimers(self)
            #: The undeclared states of the database.
            self.native = NativeStates(self, adopted)
            self._restore()
        except BaseException:
            self._closed = True
            self._drop_all()
            raise

    # --- for handles and timers ---

    @property
    def encoder(self) -> Any:
        return self._encoder

    def begin_call(self) -> None:
        """Ask a given clock for the time of the call that begins; the machine's is asked when it is needed."""
        self._called_at = None if type(self._clock) is clocks.SystemClock else self._work_time()

    def call_time(self, in_event_time: bool) -> int:
        assert self._fixed_now is not None
        return self._event_now if in_event_time and self._event_now is not None else self._fixed_now

    def dead_at(self, in_event_time: bool) -> int | None:
        """The time by which the running vectorised call removes what it does not see; None: all of it goes."""
        if not in_event_time:
            return None
        return self._fixed_now if self._event_now is None else self._event_cleaned

    def column_call(self) -> AbstractContextManager[None]:
        """A vectorised call, at one time; an error undoes it. The caller looks at key groups."""
        now, self._called_at = self._called_at, None
        return self._vectorised_call((), now)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Writes within go in together, or not at all."""
        if len(self._marks):
            yield
            return
        with self._undone_on_error():
            yield

    def make_rules(
        self, name: str, in_event_time: bool, layout: str, element_bytes: int, options: dict[str, int]
    ) -> ExpiryRules:
        """The rules of a column family, by the clock of its time."""
        if options:
            self._cleans_up()
        clock, element_bytes = self._committed[in_event_time], max(element_bytes, 1)
        rules = self.native.rules_of(name)
        if rules is None:
            return ExpiryRules(clock, layout, element_bytes=element_bytes, **options)
        rules.follow(clock)
        rules.configure(layout, element_bytes=element_bytes, **options)
        return rules

    def create_table(
        self,
        name: str,
        rules: ExpiryRules,
        layout: str,
        config: StateTtlConfig | None,
        *,
        is_noted: bool = True,
    ) -> Table:
        """Make the column family of a state; its changes are noted for snapshots if `is_noted`."""
        cleanup = None if config is None else config.rocksdb_cleanup
        # Merging drops what has expired: only without a time to live is a list the old list and its appended elements.
        grows = layout.endswith("list") and config is None
        number = self.changes.add_table()
        periodic = None if cleanup is None else -(-cleanup.periodic_compaction_time // 1000)
        held = self.native.table_of(name)
        if held is not None:
            if periodic is not None:
                self.scratch.database.set_option(held.family, "periodic_compaction_seconds", periodic)
            table = self.store.add_table(held.family, number if is_noted else -1, grows=grows)
            if held.has_namespaces:
                table.note_namespaces()
            return table
        readable = name.encode("ascii", "replace").decode().replace("\0", "?")
        family = self.scratch.create_family(
            f"{number} {readable}", rules, is_list=layout.endswith("list"), periodic_seconds=periodic
        )
        return self.store.add_table(family, number if is_noted else -1, grows=grows)

    # --- states ---

    def _create_state(self, descriptor: StateDescriptor) -> Any:
        return _HANDLES[descriptor.kind](self, descriptor)

    def _redeclare_state(self, state: Any, descriptor: StateDescriptor) -> None:
        state._redeclare(descriptor)
        state.plan_calls()

    def _alive_places(self, state: Any) -> Iterator[_EntryKey]:
        """The places that have something unexpired. O(rows)."""
        place = None
        with self.store.walk(state.table, b"") as walk:
            for key, stored in walk:
                is_known = place is not None and key.startswith(place)
                if not is_known and state.is_alive(stored):
                    place = key[: place_of(key, self.has_int_keys)]
                    _, canonical, namespace, _ = parts_of(place, self.has_int_keys)
                    yield _EntryKey(canonical, namespace)

    def _canonical_keys(self, state: Any, namespace: bytes | None) -> Iterable[Any]:
        return [each.key for each in self._alive_places(state) if namespace in (None, each.namespace)]

    def _canonical_entries(self, state: Any) -> list[tuple[Any, bytes]]:
        return list(self._alive_places(state))

    def _entry_count(self, state: Any) -> int:
        return self._count(state.table, state.descriptor)

    def _row_count(self, state: Any) -> int:
        return self._count(state.table, state.descriptor, of_rows=True)

    def _count(self, table: Table, descriptor: StateDescriptor, *, of_rows: bool = False) -> int:
        """Count rows, or places; beyond `COUNTED`, an estimate of rows."""
        by_place = descriptor.kind == "map" and not of_rows
        found = self.store.count(table, self.has_int_keys, by_place, descriptor.kind == "list", COUNTED)
        if found <= COUNTED:
            return found
        estimate = self.scratch.database.int_property("rocksdb.estimate-num-keys", table.family)
        return max(found, (estimate or 0) + len(table.layer))  # of the database, and of the open batch

    def row_counts(self) -> Iterator[int]:
        """About how many rows there are, state by state, timers included."""
        states = self.state_readers()
        return (self._count(each.table, each.descriptor, of_rows=True) for each in states)

    def _clear_key_in(self, states: list[Any]) -> None:
        prefix = self.store.key_prefix
        with self.together():
            for state in states:
                if self.store.delete_all(state.table, prefix):
                    state.changed(prefix)
                if state.has_drops:
                    self._note_key_cleared(state, prefix)

    def _note_key_cleared(self, state: Any, prefix: bytes) -> None:
        """Have the next snapshot remove what compactions have dropped of a key too, in all namespaces."""
        if state.table.has_namespaces:
            # The namespaces that had entries are no longer known. Counts do not include them.
            self._forget_dropped(state)
        elif state.descriptor.kind == "map":
            self.store.note_cleared(state.table, prefix + _VOID_END)
        else:
            self.store.delete_at(state.table, prefix + _VOID_END)

    def _clear_state(self, descriptor: StateDescriptor) -> None:
        super()._clear_state(descriptor)
        self._forget_dropped(self._states[descriptor.name])

    def _forget_dropped(self, state: Any) -> None:
        """Have the next snapshot write a base if compactions have dropped something that was cleared now.

        They note nothing: dropped rows are in the files that a delta would build on, and a longer time to live
        would bring it back.
        """
        dropped = sum(state.rules.counters()[each] for each in _DROPPED)
        if dropped > state.dropped_at_clearing:
            state.dropped_at_clearing = dropped
            self._log.forget()

    def _merge(self, state: Any, target: bytes, sources: list[bytes]) -> None:
        table, store = state.table, self.store
        merged = None
        for namespace in sources:
            at = composite_key(self._key_group, self._key, namespace)
            stored = store.get_at(table, at)
            if state.is_there(stored) or (state.has_drops and state.may_have(namespace)):
                store.delete_at(table, at)
                state.changed(at)
            stored = state.moved(stored) if state.is_there(stored) else None
            if stored is not None:
                merged = stored if merged is None else state.merged(merged, stored)
        if merged is None:
            return
        at = composite_key(self._key_group, self._key, target)
        old = store.get_at(table, at)
        old = state.moved(old) if state.is_there(old) else None
        if old is not None:
            merged = state.merged(old, merged)
        if merged is None:
            store.delete_at(table, at)
        else:
            store.put_at(table, at, merged)
            if target:
                table.note_namespaces()
        state.changed(at)

    # --- time ---

    def _let_expire(self) -> bool:
        """Tell the filters of compactions by which time values may go: never by one that could be undone.

        That is the time of the last commit; before the first, the last time that was worked at without a mark, and
        without a snapshot that is being written: merges of its lists at reads use this time too.
        Return False if there is more to tell as soon as that one is written.
        """
        log = self._log
        by_clock, by_event = self._committed
        if log.committed_now is not None:
            by_clock.now = log.committed_now
            watermark = log.committed_now if self._event_now is None else log.committed_watermark
            # Without a watermark nothing expires, also if the clock's time was told before event time began.
            by_event.now = NO_TIME if watermark is None else watermark
        elif len(self._marks) or self.scratch.has_readers:
            return False
        else:
            by_clock.now = self._now
            by_event.now = self.event_cleaned_now
        return True

    def _clean_idle(self, state: Any, budget: int) -> int:
        """Walk on from where the last call has stopped, once around at most."""
        looks = max(_LEAST_LOOKS, _LOOKS * budget)
        now = state.cleaned_at()
        start: bytes = state.cursor
        rows = self.store.rows(state.table, b"", start, looks)
        if len(rows) < looks and start:
            more = self.store.rows(state.table, b"", None, looks - len(rows))
            rows += [row for row in more if row[0] < start]
        done = 0
        state.cursor = b""
        with self.together():
            for key, stored in rows:
                if done == budget:
                    state.cursor = key
                    break
                left = state.without_expired(stored, now)
                if left == stored:
                    continue
                done += 1
                if left is None:
                    self.store.delete_at(state.table, key)
                else:
                    self.store.put_at(state.table, key, left)
            else:
                if len(rows) == looks:
                    state.cursor = rows[-1][0] + b"\0"
        state.expired_by_cleanup += done
        return done

    def _expiry_metrics(self, state: Any) -> dict[str, Any]:
        saved = self._save_key()
        self._now = self._time()
        try:
            rows = self.store.rows(state.table, b"", None, COUNTED)
            alive = [
                stamp
                for _, stored in rows
                for stamp in (state.stamps_of(stored) if stored else [])
                if not expired(stamp, state.ttl, state.now())
            ]
        finally:
            self._restore_key(saved)
        dropped = state.rules.counters()
        return {
            "expired_on_read": state.expired_on_read,
            "expired_by_cleanup": state.expired_by_cleanup,
            "expired_in_compactions": dropped["dropped_values"] + dropped["dropped_elements"],
            "oldest_timestamp": min(alive, default=None),
        }

    # --- marks ---

    def _mark_point(self) -> _BatchMark:
        if not len(self._marks):  # an older mark holds all changes that the point does
            self._log.drop_outgrown_point()
        self._let_expire()
        if not len(self._marks):
            self._drop_lost_marks()
            self._end_batch()  # what was written without a mark, or could not be written after the last one
        if self.batch_segment is None:
            self.batch_segment = self.changes.open(is_of_mark=True)
        return _BatchMark(self.store.mark(), self.changes.open(is_of_mark=True), self._timers.mark())

    def _return_to(self, point: _BatchMark) -> None:
        self.store.roll_back(point.number)
        self.changes.back_to(point.segment)
        self._timers.return_to(point.timers)
        for state in self._states.values():
            state.changed(None)
        self._log.rolled_back()

    def _forget_point(self, point: _BatchMark) -> None:
        self.changes.drop(point.segment)
        self.store.release(point.number)
        if not len(self._marks):
            self._end_batch()
            self._let_expire()

    def _drop_lost_marks(self) -> None:
        points = self._marks.points()
        for number in {*self.store.overlay.numbers()} - {point.number for point in points}:
            self.store.release(number)
        if not points:
            self.batch_segment = None
        if self.changes.drop_lost([self.batch_segment, *(point.segment for point in points)]):
            self._log.forget()

    def _end_batch(self) -> None:
        """Write the batch into the database. If that fails it stays, and the next mark or write tries again."""
        self.store.flush()
        if self.batch_segment is not None:
            self.changes.drop(self.batch_segment)
            self.batch_segment = None

    def count_changes(self, mark: Any) -> tuple[int, int]:
        self._check_open()
        point = self._marks.point_of(mark)
        assert self.batch_segment is not None
        written = removed = 0
        for state in self._states.values():
            number = state.table.number
            before = self.changes.between(self.batch_segment, point.segment, number)
            keys, became = self.changes.since(point.segment, number).in_order()
            written += int(((became != 0) & (became != CLEARED)).sum())
            gone = chosen_rows(keys, became == 0)
            had_become = before.became_of(*gone)
            removed += int(((had_become != 0) & (had_become != NOT_NOTED)).sum())
            # What the batch had not changed before is in the database as it was.
            found, _, _ = read_many(state.table.family, *chosen_rows(gone, had_become == NOT_NOTED))
            removed += int(found.sum())
        return written, removed

    # --- checkpoints ---

    def snapshot(
        self, checkpoint_id: int, store: CheckpointStore | DataWriter, *, incremental: bool = True
    ) -> Snapshot:
        pending = super().snapshot(checkpoint_id, store, incremental=incremental)
        self._let_expire()
        return pending

    def state_readers(self) -> list[FamilyReader]:
        """All states, and the timers, as snapshots write them."""
        states = [FamilyReader(self, each.descriptor, each.table) for each in self._states.values()]
        timers = self._timers.queues.items()
        return states + [FamilyReader(self, timer_state(domain), queue.by_key) for domain, queue in timers]

    def _open_view(self, expired_at: ExpiredAt) -> RocksDbView:
        return RocksDbView(self, expired_at)

    def _read_changes(self, point: Segment) -> RocksDbChanges:
        return RocksDbChanges(self, point)

    def _make_points(self) -> RocksDbPoints:
        return RocksDbPoints(self)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        yield

    def _load(self, state: Any, rows: Iterator[tuple[Op, pa.RecordBatch]]) -> None:
        load(self, state, rows)

    def _load_timers_of(self, domain: str, restored: RestoredState) -> None:
        name = restored.description.name
        if self.native.has_all_key_groups:  # else the order of firing also has timers of other groups
            with self.native.adopting(name, name + BY_TIME) as are_held:
                if are_held:
                    self._timers.adopt_rows(domain, restored.rows.take_changes())
                    return
        self._timers.load_rows(domain, restored.rows)
        self.native.forget(name)

    # --- files of the database ---

    def _snapshot_to_adopt(self) -> NativeSnapshot | None:
        if self._settings.checkpoints != "native":
            return None
        return snapshot_to_adopt(
            self._checkpoint_to_restore, self.key_type, self.max_parallelism, self.key_group_range
        )

    def _open_native(
        self, checkpoint: Checkpoint, snapshot: StateSnapshot, key_type: Type, key_groups: KeyGroupRange
    ) -> Mapping[str, NativeRows]:
        held = self.native.rows(snapshot)
        if held is not None or not has_native(snapshot):
            return held or {}
        return open_native_rows(checkpoint, snapshot, key_type, key_groups, self._settings)

    def _take_in_changes(self) -> None:
        self.native.take_in_changes(self._restored)

    def _adopt(self, descriptor: StateDescriptor) -> Any:
        with self.native.adopting(descriptor.name) as is_held:
            return self._create_state(descriptor) if is_held else None

    def _new_state(self, descriptor: StateDescriptor) -> Any:
        state = super()._new_state(descriptor)
        self.native.forget(descriptor.name)
        if descriptor.renamed_from is not None and descriptor.renamed_from not in self._restored:
            self.native.forget(descriptor.renamed_from)
        return state

    def _take_base(self, may_name: frozenset[str]) -> Source:
        if self._settings.checkpoints != "native" or not can_be_native(self, self._described()):
            return super()._take_base(may_name)
        if self.batch_segment is None:
            self.store.flush()  # values that single writes, or a batch that could not be written, have left in front
        source = NativeBase(self, may_name)
        source.undeclared = tuple(self._restored[name] for name in self._restored if name not in self.native)
        return source

    def _unload(self, state: Any) -> None:
        family = state.table.family
        self.scratch.database.delete_range(family, b"", b"\xff\xff\xff", wal=False)

    def _drop_all(self) -> None:
        if hasattr(self, "changes"):
            self.changes.close()
            self.store.close()
        self.scratch.release()

    # --- figures ---

    def metrics(self) -> dict[str, Any]:
        """Entries and timers, and the content of the database: memory, files and levels, in all and by state."""
        metrics = super().metrics()
        database = self.scratch.database
        for name, state in self._states.items():
            metrics["states"][name].update(figures_of_state(database, state.table.family))
            metrics["states"][name]["filter"] = state.rules.counters()
        metrics["marks"] = len(self.changes) - (self.batch_segment is not None)
        metrics["batch_bytes"] = self.store.overlay.nbytes
        return metrics

    def counts(self) -> dict[str, Any]:
        return {**super().counts(), **figures_of_database(self.scratch.database, self.scratch.budget)}
