"""What keyed backends share that write checkpoints in this format, and restore from them.

>>> from statebackend.registry import create_backend
>>> isinstance(create_backend("reference").create_keyed_backend(int), CheckpointedKeyedBackend)
True
"""

from __future__ import annotations

import logging
import os
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pyarrow as pa

from statebackend.backend import BaseKeyedStateBackend
from statebackend.checkpoint.data_files import DataWriter
from statebackend.checkpoint.format import Op, write_data_file
from statebackend.checkpoint.json_checks import MAX_INTEGER
from statebackend.checkpoint.keyed.chain import Chain, Flight, Rewriting
from statebackend.checkpoint.keyed.description import StateDescription
from statebackend.checkpoint.keyed.restoring import (
    PART,
    RestoredState,
    RestoredStates,
    keyed_snapshots,
    migration,
    read_checkpoint,
    timer_rows,
)
from statebackend.checkpoint.keyed.rows import RowSource, phases
from statebackend.checkpoint.keyed.savepoints import read_savepoint, write_savepoint
from statebackend.checkpoint.manifest import StateSnapshot, StoredFile
from statebackend.checkpoint.pending import PendingSnapshot
from statebackend.checkpoint.savepoints import Savepoint
from statebackend.checkpoint.store import CheckpointStore
from statebackend.descriptors import StateDescriptor
from statebackend.errors import UsageError
from statebackend.serializers import Compatibility
from statebackend.state import KeyedState
from statebackend.timers import DOMAINS, timer_state

__all__ = ["CheckpointedKeyedBackend"]

_log = logging.getLogger(__name__)


class CheckpointedKeyedBackend(BaseKeyedStateBackend):
    """The shared part. A backend writes the methods under "to be written", beside those of the base class.

    A *point* is a moment since which the backend can tell what has changed.
    """

    def __init__(self, key_type: Any, *, restore: Any = (), **options: Any) -> None:
        super().__init__(key_type, **options)
        self._restored = RestoredStates({}, None)
        self._chain: Chain | None = None
        self._flights: list[Flight] = []
        self._rewriting: Rewriting | None = None
        #: What made bases that no manifest names yet.
        self._bases: list[DataWriter] = []
        self._checkpoint_to_restore = restore
        #: The time of the newest checkpoint that is known to be committed: what has expired is left out by it.
        self._committed_now: int | None = None
        self._expired_in_snapshots: Counter[str] = Counter()
        self._counting = threading.Lock()  # several threads may end their writing at once

    # --- to be written ---

    @abstractmethod
    def _open_view(self, expired_at: int | None) -> RowSource:
        """All rows of this moment. O(states).

        What has expired at that time is left out of states that are cleaned up in full snapshots.
        """

    @abstractmethod
    def _read_changes(self, point: Any) -> RowSource:
        """What was inserted, written or removed since a point. O(changes)."""

    @abstractmethod
    def _changes_since(self, point: Any) -> int:
        """About how many changes `_read_changes` would give."""

    @abstractmethod
    def _rows_held(self) -> int:
        """About how many rows `_open_view` would give."""

    @abstractmethod
    def _open_point(self) -> Any:
        """Remember this moment."""

    @abstractmethod
    def _is_valid(self, point: Any) -> bool:
        """Whether no rollback has gone behind the point."""

    @abstractmethod
    def _drop_point(self, point: Any) -> None:
        """Forget a point, valid or not. Idempotent."""

    @abstractmethod
    def _loading(self) -> AbstractContextManager[None]:
        """What is put in here was there all the time: no change, and no rollback takes it away."""

    @abstractmethod
    def _load(self, state: KeyedState, op: Op, rows: pa.RecordBatch) -> None:
        """Apply rows that all do the same, in order. They have the state's own types."""

    # --- restoring ---

    def _restore(self) -> None:
        """Read what was given to restore from; called once, when the backend is ready."""
        checkpoint, self._checkpoint_to_restore = self._checkpoint_to_restore, None
        if isinstance(checkpoint, (str, os.PathLike)):
            checkpoint = Savepoint(checkpoint)
        if isinstance(checkpoint, Savepoint):
            self._restored = read_savepoint(
                checkpoint, self.key_type, self.max_parallelism, self.key_group_range
            )
            self._committed_now = self._restored.now
            self._load_timers()
            return
        if checkpoint is None or checkpoint == () or checkpoint == []:
            return
        self._restored = read_checkpoint(
            checkpoint, self.key_type, self.max_parallelism, self.key_group_range
        )
        self._committed_now = self._restored.now
        self._load_timers()
        snapshots = keyed_snapshots(checkpoint)
        own = [each for each in snapshots if each.key_groups == self.key_group_range]
        if len(own) == 1:
            self._chain = Chain(own[0].files, self._open_point())

    def _load_timers(self) -> None:
        if not self.has_timers:
            return
        for domain in DOMAINS:
            restored = self._restored.take(timer_state(domain).name)
            if restored is not None:
                rows = timer_rows(restored, domain, self._encoder)
                self.timers.load(rows)

    def _new_state(self, descriptor: StateDescriptor) -> KeyedState:
        restored = self._restored.get(descriptor.name)
        if restored is None:
            return super()._new_state(descriptor)
        answer = restored.description.check(descriptor)
        state = super()._new_state(descriptor)
        migrate = migration(restored.description, descriptor, self._time())
        with self._loading():
            for rows in restored.batches:
                for op, batch in phases(rows):
                    self._load(state, op, migrate(batch) if op in (Op.PUT, Op.APPEND) else batch)
        self._restored.take(descriptor.name)
        if answer is not Compatibility.AS_IS:
            # What the files hold is of other types: none may be built on.
            self._forget_checkpoints()
        return state

    def undeclared_states(self) -> list[str]:
        self._check_open()
        return self._restored.names

    # --- taking ---

    def snapshot(
        self, checkpoint_id: int, store: CheckpointStore, *, incremental: bool = True
    ) -> PendingSnapshot:
        self._check_open()
        if not isinstance(store, CheckpointStore):
            raise UsageError(
                f"a {type(store).__name__} is not a store of checkpoints",
                hint='write sb.CheckpointStore("/path").open_for_writing(...)',
            )
        self._settle()
        now = _stored_time(self._time())
        with ExitStack() as undo:
            writer = store.begin_snapshot(checkpoint_id)
            undo.callback(writer.abort)
            chain = self._chain_to_build_on(writer) if incremental else None
            if chain is None:
                source = self._open_view(self._committed_now)
            else:
                source = self._read_changes(chain.point)
            undo.callback(source.release)
            flight = Flight(writer, self._open_point(), now, chain)
            undo.callback(self._drop_point, flight.point)
            written = self._writer_of(source, flight, self._describe(checkpoint_id, writer, now))
            pending = PendingSnapshot(checkpoint_id, written, writer.abort)
            undo.pop_all()
        self._flights.append(flight)
        if chain is not None and chain.needs_base and self._rewriting is None:
            self._rewrite_base(store)
        return pending

    def savepoint(self, store_or_uri: Any) -> Savepoint:
        """Write everything in it, as it is now, as Parquet files that any backend restores from. O(entries).

        Given is the path or uri of a new folder, which the instances of a job share, or a store, which keeps it below
        ``savepoints``. Waits until all is durable.

        >>> import tempfile
        >>> from statebackend.descriptors import ValueStateDescriptor
        >>> from statebackend.registry import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(int)
        >>> keyed.get_value_state(ValueStateDescriptor("name", str)).update_many([7], ["Ann"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = keyed.savepoint(folder + "/savepoint")
        ...     pa.parquet.read_table(folder + "/savepoint/keyed/name").to_pylist()
        [{'key': 7, 'value': 'Ann'}]
        """
        self._check_open()
        self._settle()
        now = _stored_time(self._time())
        savepoint = Savepoint.at(store_or_uri)
        source = self._open_view(self._committed_now)
        try:
            undeclared = [each.section() for each in self._undeclared()]
            sections = {each.name: each for each in (*source.sections(), *undeclared)}
            write_savepoint(
                savepoint,
                self.key_type,
                self.max_parallelism,
                self.key_group_range,
                now,
                [(each, sections.get(each.name)) for each in self._descriptions()],
            )
            self._count_expired(source)
        finally:
            source.release()
        return savepoint

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        for flight in self._flights:
            if flight.writer.checkpoint_id == checkpoint_id:
                flight.is_committed = True

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        for flight in self._flights:
            if flight.writer.checkpoint_id == checkpoint_id:
                flight.is_aborted = True

    def _describe(self, checkpoint_id: int, writer: DataWriter, now: int) -> dict[str, Any]:
        return {
            "checkpoint_id": checkpoint_id,
            "epoch": writer.epoch,
            "key_groups": self.key_group_range,
            "states": tuple(each.to_json() for each in self._descriptions()),
            "now": now,
            "extra": {
                "part": PART,
                "key_type": self.key_type.config(),
                "max_parallelism": self.max_parallelism,
            },
        }

    def _descriptions(self) -> list[StateDescription]:
        described = [StateDescription.of(state.descriptor) for state in self._states.values()]
        if self.has_timers:
            described += [StateDescription.of(timer_state(domain)) for domain in DOMAINS]
        described += [restored.description for restored in self._restored]
        return sorted(described, key=lambda each: each.name)

    def _undeclared(self) -> list[RestoredState]:
        return [restored for restored in self._restored if restored.batches]

    def _writer_of(
        self, source: RowSource, flight: Flight, described: dict[str, Any]
    ) -> Callable[[], StateSnapshot]:
        chain = flight.chain
        kind = "base" if chain is None else "delta"
        undeclared = self._undeclared() if chain is None else []
        groups = self.key_group_range

        def write() -> StateSnapshot:
            try:
                try:
                    made = _write(flight.writer, kind, source, undeclared, groups)
                    self._count_expired(source)
                finally:
                    source.release()
                flight.files = made if chain is None else (*chain.files, *made)
                return StateSnapshot(files=flight.files, **described)
            except BaseException:
                flight.writer.abort()
                raise

        return write

    # --- figures ---

    def _count_expired(self, source: RowSource) -> None:
        """Note what a full snapshot has left out; it is written."""
        with self._counting:
            self._expired_in_snapshots.update(source.expired)

    def metrics(self) -> dict[str, Any]:
        metrics = super().metrics()
        for name, state in self._states.items():
            if state.descriptor.ttl_config is not None:
                metrics["states"][name]["expired_in_snapshots"] = self._expired_in_snapshots[name]
        return metrics

    # --- which builds on which ---

    def _settle(self) -> None:
        """Let what has been committed since become what is built on, and forget what was given up."""
        landed = [at for at, flight in enumerate(self._flights) if flight.has_landed]
        if landed:
            newest = self._flights[landed[-1]]
            if self._chain is not None:
                self._drop_point(self._chain.point)
            assert newest.files is not None
            self._chain = Chain(newest.files, newest.point)
            self._committed_now = newest.now
            for flight in self._flights[: landed[-1]]:
                self._drop_point(flight.point)
            del self._flights[: landed[-1] + 1]
        for flight in [each for each in self._flights if each.is_lost]:
            self._drop_point(flight.point)
            self._flights.remove(flight)
        self._abort_bases([self._chain, *(flight.chain for flight in self._flights)])

    def _abort_bases(self, used: Iterable[Chain | None]) -> None:
        """Remove rewritten bases that no manifest names and none of the chains builds on."""
        self._bases = [each for each in self._bases if each.unsettled]
        kept = [chain.base_writer for chain in used if chain is not None]
        for base in self._bases:
            if base not in kept:
                base.abort()

    def _chain_to_build_on(self, writer: DataWriter) -> Chain | None:
        """The chain, with a rewritten base if there is one; None if the next file is to be a base."""
        self._adopt_rewritten()
        chain = self._chain
        if chain is None or not self._is_valid(chain.point) or not chain.is_kept_for(writer):
            return None  # rolled back behind it; or another store, or one whose checkpoints were dropped
        is_small = 2 * self._changes_since(chain.point) <= self._rows_held()
        return chain if is_small else None

    def _adopt_rewritten(self) -> None:
        rewriting = self._rewriting
        if rewriting is None or rewriting.is_running:
            return
        self._rewriting = None
        chain = rewriting.chain()
        if chain is None or self._chain is None or not self._is_valid(rewriting.point):
            self._drop_point(rewriting.point)
            rewriting.writer.abort()
            return
        self._drop_point(self._chain.point)
        self._chain = chain
        self._bases.append(rewriting.writer)

    def _rewrite_base(self, store: CheckpointStore) -> None:
        undeclared, groups = self._undeclared(), self.key_group_range

        def write(writer: DataWriter) -> tuple[StoredFile, ...]:
            try:
                made = _write(writer, "base", source, undeclared, groups)
                self._count_expired(source)
                return made
            finally:
                source.release()

        try:
            with ExitStack() as undo:
                writer = store.begin_snapshot(None)
                undo.callback(writer.abort)
                source = self._open_view(self._committed_now)
                undo.callback(source.release)
                rewriting = Rewriting(writer, self._open_point())
                undo.callback(self._drop_point, rewriting.point)
                rewriting.start(write)
                undo.pop_all()
        except Exception as error:  # noqa: BLE001 - the snapshot that was asked for has been taken
            _log.warning("a base could not be rewritten, deltas go on: %s", str(error))
            return
        self._rewriting = rewriting

    def mark(self) -> Any:
        self._drop_outgrown_point()
        return super().mark()

    def _drop_outgrown_point(self) -> None:
        """No delta will be written of so many changes: what they hold need not be kept. The next file is a base."""
        if self._flights:
            self._settle()
        if self._chain is not None and self._is_outgrown(self._chain.point):
            self._drop_point(self._chain.point)

    def _is_outgrown(self, point: Any) -> bool:
        """Whether keeping what has changed since a point costs more than it can be worth; asked often."""
        return False

    def _forget_checkpoints(self) -> None:
        """Build on nothing that was written so far."""
        if self._chain is not None:
            self._drop_point(self._chain.point)
            self._chain = None
        for flight in self._flights:
            self._drop_point(flight.point)
        if self._rewriting is not None:
            self._drop_point(self._rewriting.point)

    def close(self) -> None:
        if not self._closed:
            # What is in flight may still be committed.
            self._abort_bases(flight.chain for flight in self._flights if not flight.is_lost)
            self._chain, self._flights = None, []
            if self._rewriting is not None:
                self._rewriting.writer.abort()
                self._rewriting = None
        super().close()


def _stored_time(now: int) -> int:
    """The time itself, if manifests can hold it."""
    if -MAX_INTEGER <= now <= MAX_INTEGER:
        return now
    raise UsageError(
        "the clock is further from 1970 than checkpoints can tell",
        detail=f"now() answered {now}",
        hint="it answers milliseconds, for example time.time_ns() // 1_000_000",
    )


def _write(
    writer: DataWriter, kind: str, source: RowSource, undeclared: Sequence[RestoredState], groups: Any
) -> tuple[StoredFile, ...]:
    """One data file with all rows; none if there are no rows."""
    if source.is_empty and not undeclared:
        return ()
    with writer.create(kind, key_groups=groups) as file:
        sections = [*source.sections(), *(each.section() for each in undeclared)]
        write_data_file(file, sections, name=file.name, compression=writer.compression)
        return (file.finish(),)
