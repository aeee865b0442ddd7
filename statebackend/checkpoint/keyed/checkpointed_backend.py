"""The shared part of keyed backends that write checkpoints in this format, and restore from them."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from operator import is_
from typing import Any

import pyarrow as pa

from statebackend.checkpoint.format import Op
from statebackend.checkpoint.keyed.chain import ChangePoints, Point
from statebackend.checkpoint.keyed.description import StateDescriptions
from statebackend.checkpoint.keyed.row_source import ExpiredAt, NativeRows, Source, open_native_rows, phases
from statebackend.checkpoint.keyed.savepoint_rows import read_savepoint, write_savepoint
from statebackend.checkpoint.keyed.snapshot_log import SnapshotLog, write_snapshot
from statebackend.checkpoint.keyed.state_restore import (
    RestoredState,
    RestoredStates,
    keyed_snapshots,
    migration,
    read_checkpoint,
    timer_rows,
)
from statebackend.checkpoint.store.checkpoint_reader import Checkpoint, CheckpointReader
from statebackend.checkpoint.store.data_files import DataWriter
from statebackend.checkpoint.store.manifest import StateSnapshot
from statebackend.checkpoint.store.pending import Snapshot, WritingThreads
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.checkpoint.store.sealed import MAX_INTEGER
from statebackend.checkpoint.store.store import CheckpointStore, target_for
from statebackend.errors import MemoryLimitError, usage
from statebackend.keys import KeyGroupRange
from statebackend.state import (
    DOMAINS,
    RESERVED,
    BaseKeyedStateBackend,
    KeyedState,
    StateDescriptor,
    timer_state,
)
from statebackend.types import Compatibility, Type

_TIMER_STATES = [timer_state(domain) for domain in DOMAINS]


class CheckpointedKeyedBackend(BaseKeyedStateBackend):
    """The shared part. A backend writes the methods under "to be written", and the methods of the base class."""

    def __init__(self, key_type: object, *, restore: object = (), **options: Any) -> None:
        super().__init__(key_type, **options)
        self._restored = RestoredStates({}, None)
        self._checkpoint_to_restore = restore
        self._threads = WritingThreads()
        self._descriptions = StateDescriptions(())
        #: The restored states whose values were converted, or that were renamed; and how.
        self.migrated_states: dict[str, str | None] = {}
        self._expired_in_snapshots: Counter[str] = Counter()
        self._counting = threading.Lock()  # several threads may end their writing at once

    # --- to be written ---

    @abstractmethod
    def _open_view(self, expired_at: ExpiredAt) -> Source:
        """All rows of this moment. O(states).

        States that are cleaned up in full snapshots leave out values that have expired at these times.
        """

    @abstractmethod
    def _read_changes(self, point: Point) -> Source:
        """The rows inserted, written or removed since a point. O(changes)."""

    @abstractmethod
    def _make_points(self) -> ChangePoints:
        """The moments that this backend can remember; asked once, when it is ready."""

    @abstractmethod
    def _loading(self) -> AbstractContextManager[None]:
        """Load rows as if they had always been there: no change, and no rollback takes them away."""

    @abstractmethod
    def _load(self, state: KeyedState, rows: Iterator[tuple[Op, pa.RecordBatch]]) -> None:
        """Apply rows in order: batches, each of one operation. They have the state's own types."""

    @abstractmethod
    def _unload(self, state: KeyedState) -> None:
        """Remove the loaded rows: the state could not be loaded whole, and will not be used."""

    # --- restoring ---

    def _restore(self) -> None:
        """Read the checkpoint or savepoint to restore; called once, when the backend is ready."""
        given, self._checkpoint_to_restore = self._checkpoint_to_restore, None
        #: Its points need what the backend makes after its part of `__init__`.
        self._log = SnapshotLog(self._make_points(), None)
        if given is None or given == () or given == []:
            return
        if isinstance(given, (str, os.PathLike)):
            given = Savepoint(given)
        read: Callable[..., RestoredStates] = (
            read_savepoint
            if isinstance(given, Savepoint)
            else partial(read_checkpoint, open_native=self._open_native)
        )
        self._restored = read(given, self.key_type, self.max_parallelism, self.key_group_range)
        self._log.committed_now = self._restored.now
        self._log.committed_watermark = self._restored.watermark
        if self._restored.watermark is not None:
            # By the clock, states in event time would have expired long ago for calls that read or write them now.
            self.begin(watermarks=(self._restored.watermark, self._restored.watermark))
        self._take_in_changes()
        self._load_timers()
        # The files of a checkpoint with dropped states have rows that must go.
        if isinstance(given, Checkpoint) and not given.dropped_states:
            own = [each for each in keyed_snapshots(given) if each.key_groups == self.key_group_range]
            if len(own) == 1:
                self._log.restored(own[0].files)

    def _open_native(
        self, checkpoint: Checkpoint, snapshot: StateSnapshot, key_type: Type, key_groups: KeyGroupRange
    ) -> Mapping[str, NativeRows]:
        """The rows that a snapshot has in a database's own files; a backend that has such a database overrides it."""
        return open_native_rows(checkpoint, snapshot, key_type, key_groups)

    def _take_in_changes(self) -> None:
        """Apply changes to restored rows that the backend holds already."""

    def _adopt(self, descriptor: StateDescriptor) -> KeyedState | None:
        """The handle of a restored state whose rows the backend holds as they are to be; None if it does not."""
        return None

    def _load_timers(self) -> None:
        if not self.has_timers:
            return
        for domain in DOMAINS:
            restored = self._restored.pop(timer_state(domain).name, None)
            if restored is not None:
                self._load_timers_of(domain, restored)

    def _load_timers_of(self, domain: str, restored: RestoredState) -> None:
        """Register the timers of a domain, of which there is none yet; a backend that knows better overrides it."""
        self.timers.load(timer_rows(restored, domain, self._encoder))

    def _new_state(self, descriptor: StateDescriptor) -> KeyedState:
        name = descriptor.name
        if descriptor.renamed_from is not None and name not in self._restored:
            name = descriptor.renamed_from
        restored = self._restored.get(name)
        if restored is None:
            return super()._new_state(descriptor)
        answer = restored.description.check(descriptor)
        config = descriptor.ttl_config
        in_event_time = config is not None and config.is_in_event_time
        by_watermark = self._by_watermark() if in_event_time else None
        now = self._time() if by_watermark is None else by_watermark
        if answer is Compatibility.AS_IS and (adopted := self._adopt(descriptor)) is not None:
            self._restored.pop(descriptor.name, None)
            return adopted
        state = super()._new_state(descriptor)
        migrate = migration(restored.description, descriptor, now)
        with self._loading():
            try:
                parts = (part for rows in restored.rows for part in phases(rows))
                self._load(
                    state, ((op, migrate(rows) if op in (Op.PUT, Op.APPEND) else rows) for op, rows in parts)
                )
            except BaseException as error:
                self._unload(state)
                if isinstance(error, MemoryLimitError):
                    raise MemoryLimitError(
                        f"state {descriptor.name!r} cannot be restored within the memory limit",
                        detail=error.detail,
                        hint="raise max_bytes, or restore into more instances; nothing of the state was loaded",
                    ) from error
                raise
        self._restored.pop(name, None)
        pa.default_memory_pool().release_unused()  # what the batches took goes back to the system
        if answer is not Compatibility.AS_IS:
            self._log.forget()  # what the files hold is of other types: none may be built on
            self.migrated_states[descriptor.name] = restored.description.how(descriptor)
        return state

    def undeclared_states(self) -> list[str]:
        self._check_open()
        return [name for name in self._restored if not name.startswith(RESERVED)]

    def _restored_descriptor(self, name: str) -> StateDescriptor | None:
        restored = self._restored.get(name)
        return None if restored is None else restored.description.descriptor()

    # --- taking ---

    def snapshot(
        self, checkpoint_id: int, store: CheckpointStore | DataWriter, *, incremental: bool = True
    ) -> Snapshot:
        self._check_open()
        return self._run_alone(lambda: self._take_snapshot(checkpoint_id, store, incremental))

    def _take_snapshot(
        self, checkpoint_id: int, store: CheckpointStore | DataWriter, incremental: bool
    ) -> Snapshot:
        """The snapshot of one moment: a write between its rows and the point of the next delta would be in neither."""
        log = self._log
        now = _stored_time(self._work_time())
        for restored in self._restored.values():
            restored.rows.keep()  # a commit may let their files go
        target = target_for(store, checkpoint_id)
        source = snapshot = None
        try:
            chain = log.chain_for(target)
            if not incremental:
                chain = None
            if chain is None:
                source = self._take_base(target.builds_on if incremental else frozenset())
            else:
                source = self._read_changes(chain.point)
            snapshot = log.taken(target, now, self._watermark, chain)
            write = partial(
                write_snapshot, snapshot, source, self._described(), self.key_type, self.max_parallelism
            )
            target.listen(self._settle_log_soon)
            snapshot.begin(write, self._threads)
        except BaseException:
            if snapshot is not None:
                log.withdraw(snapshot)
            if source is not None:
                source.release()
            target.abort()
            raise
        if chain is not None:
            another = store.begin_snapshot if isinstance(store, CheckpointStore) else store.beside
            take = partial(self._take_base, frozenset(file.name for file in chain.files))
            log.rewrite(snapshot, chain, another, take, self._kinds, self._threads)
        return snapshot

    def _kinds(self) -> dict[str, str]:
        return {each.name: each.kind for each in self._described().by_name}

    def _take_base(self, may_name: frozenset[str]) -> Source:
        """All that there is at this moment, for files that need no others but, perhaps, some of ``may_name``."""
        return self._take_rows()

    def _take_rows(self) -> Source:
        log = self._log
        by_watermark = log.committed_now if self._event_now is None else log.committed_watermark
        source = self._run_alone(lambda: self._open_view(ExpiredAt(log.committed_now, by_watermark)))
        source.undeclared, source.wrote = tuple(self._restored.values()), self._count_expired
        return source

    def _described(self) -> StateDescriptions:
        """All states, the timers, and the restored states that are not declared."""
        states = (
            *[state.descriptor for state in self._states.values()],
            *(_TIMER_STATES if self.has_timers else ()),
            *[restored.description for restored in self._restored.values()],
        )
        known = self._descriptions.states
        if len(known) != len(states) or not all(map(is_, known, states)):
            self._descriptions = StateDescriptions(states)
        return self._descriptions

    def open_view(self) -> Source:
        """All rows of this moment, expired ones included, for reads on any thread. Release it. O(states)"""
        self._check_open()
        return self._run_alone(lambda: self._open_view(ExpiredAt()))

    def savepoint(self, store_or_uri: Savepoint | CheckpointReader | str | os.PathLike[str]) -> Savepoint:
        """Write everything in it, as it is now, as Parquet files that any backend restores from. O(entries).

        Given is the path or uri of a new folder, which the instances of a job share, or a store, which keeps it below
        ``savepoints``. Waits until all is durable.

        Its time is the clock's time at the last operation that may have changed something, if this backend has a clock
        and has worked. Otherwise it is the time of the checkpoint that was restored or committed last, or None.
        """
        self._check_open()
        now = self._log.committed_now if self._worked_at is None else _stored_time(self._worked_at)
        times = {"now": now, "watermark": self._watermark}
        savepoint = Savepoint.at(store_or_uri)
        source = self._take_rows()
        try:
            sections = {each.name: each for each in source.all_sections()}
            write_savepoint(
                savepoint,
                self.key_type,
                self.max_parallelism,
                self.key_group_range,
                times,
                [(each, sections.get(each.name)) for each in self._described().by_name],
            )
            self._count_expired(source)
        finally:
            source.release()
        return savepoint

    def _settle_log_soon(self) -> None:
        """A snapshot is committed or aborted; called on any thread, also inside a call.

        In a job the next call is the release of the batch's mark.
        """
        self._do_later(self._log.settle)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._log.committed(checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._log.aborted(checkpoint_id)

    # --- figures ---

    def _count_expired(self, source: Source) -> None:
        """Note what a full snapshot has left out; it is written."""
        with self._counting:
            self._expired_in_snapshots.update(source.expired)

    def metrics(self) -> dict[str, Any]:
        metrics = super().metrics()
        for name, state in self._states.items():
            if state.descriptor.ttl_config is not None:
                metrics["states"][name]["expired_in_snapshots"] = self._expired_in_snapshots[name]
        return metrics

    # --- the end ---

    def _let_go(self) -> None:
        self._log.close()
        self._threads.close()
        self._restored = RestoredStates({}, None)


def _stored_time(now: int) -> int:
    """The time itself, if manifests can hold it."""
    if -MAX_INTEGER <= now <= MAX_INTEGER:
        return now
    raise usage.time(
        "the clock is further from 1970 than checkpoints can tell",
        detail=f"now() answered {now}",
        hint="it answers milliseconds, for example time.time_ns() // 1_000_000",
    )
