"""A job on its store: opens and restores, runs a batch, commits state and output together, rolls back.

With S the newest committed id: batch S+1 runs; batch S was committed, and is not run again, if its rows are those
that were committed; anything else is a gap. An empty store takes batch 0, or the first batch that it is told.
"""

from __future__ import annotations

import logging

from statebackend.checkpoint import Checkpoint, CheckpointStore, PendingSnapshot, StoredFile
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import UsageError
from statebackend.runtime.batches import Batch
from statebackend.runtime.gaps import gap, other_rows, other_stream
from statebackend.runtime.job import Job
from statebackend.runtime.origin import Identity, Incoming, Origin, rows_identity, without_origin
from statebackend.runtime.output import Committed, check_deliverable, write_output
from statebackend.runtime.progress import Figures, Stopwatch, sizes, storable
from statebackend.runtime.start import Beginning, check_beginning, check_key_columns, other_query, source_of
from statebackend.runtime.task import Task
from statebackend.state import clocks
from statebackend.types import Type

__all__ = ["Runner"]

_log = logging.getLogger(__name__)


class Runner:
    """Runs the batches of one query, and is the only one to write into its store.

    ``query`` is who the store belongs to; ``stream`` the engine's own id of what is streamed, and ``location`` where it
    keeps its place in that.
    ``restore_from`` is a store, a checkpoint or a savepoint that an empty store begins with, at batch ``first_batch``.
    Closed by any error of a commit: what is in memory may then not be what is committed.
    """

    def __init__(
        self,
        job: Job,
        store: CheckpointStore,
        key_type: Type,
        *,
        query: str | None = None,
        clock: clocks.Clock | None = None,
        restore_from: Beginning | None = None,
        first_batch: int | None = None,
        on_gap: str = "fail",
        keeps_output: bool = True,
        stream: str | None = None,
        location: str | None = None,
    ) -> None:
        check_beginning(restore_from, first_batch, on_gap)
        self._job = job
        self._store = store
        self._key_type = key_type
        self._clock = clocks.checked_clock(clock)
        self._restores_on_gap = on_gap == "restart_from_empty"
        self._first_batch = first_batch
        self._keeps_output = keeps_output
        self._stream = stream
        self._location = location
        #: Whether it has yet to be told which restored states nobody asked for.
        self._tells_unused = False
        self._told_behind = False
        self._checkpoint: Checkpoint | None = None
        self._now: int | None = None
        self._task: Task | None = None
        try:
            store.open_for_writing(
                query=query, key_type=key_type, max_parallelism=job.max_parallelism, refuse_live=True
            )
        except UsageError as error:
            if error.code == "USAGE.OTHER_QUERY":
                raise other_query(error, store, location) from error
            raise
        try:
            newest = store.latest()
            if newest is not None:
                checkpoint = store.open(newest)
                check_key_columns(checkpoint, job.columns, store.uri)
                self._checkpoint = checkpoint
                self._begin_from(checkpoint)
            elif restore_from is None:
                self._begin_empty()
            else:
                self._begin_from(source_of(restore_from))
        except BaseException:
            self.close()
            raise

    def _begin_empty(self) -> None:
        self._task = Task(self._job, self._key_type)

    def _begin_from(self, source: Checkpoint | Savepoint) -> None:
        restored_id = getattr(source, "id", None)
        self._now = getattr(source, "now", None)
        self._tells_unused = True
        self._task = Task(self._job, self._key_type, restore=source, restored_id=restored_id)

    @property
    def is_open(self) -> bool:
        """True if it can run a batch."""
        return self._task is not None

    @property
    def last_id(self) -> int | None:
        """The newest committed batch; None in an empty store."""
        return None if self._checkpoint is None else self._checkpoint.id

    # --- a batch ---

    def run(self, batch_id: int, incoming: Incoming, watch: Stopwatch) -> Committed:
        """Run a batch and commit it; or find that it is committed, and let the engine compute it for itself.

        If anything raises before the commit, memory is at the end of the batch before.
        """
        if self._task is None:
            raise UsageError("the job is closed")
        last = self.last_id
        if last is not None and batch_id == last:
            return self._replayed(incoming, watch)
        if batch_id not in self._next_ids():
            self._gap(batch_id, last)
        self._check_stream(batch_id)
        with watch.part("read"):
            table = incoming.read()
        with watch.part("prepare"):
            identity = incoming.planned or rows_identity(table)
            batch = Batch(self._job, table)
            del table
            now = self._time(batch.max_event_time)
        return self._run(batch_id, batch, now, identity, watch)

    def still_held(self) -> int:
        """The epoch of this writer; `CommitConflictError` if a newer one has opened the store."""
        self._store.check_held()
        return self._store.epoch

    def _replayed(self, incoming: Incoming, watch: Stopwatch) -> Committed:
        """The newest checkpoint again, after making sure that it is of the rows that are to come."""
        checkpoint = self._checkpoint
        assert checkpoint is not None
        origin = Origin.of(checkpoint.manifest.progress)
        progress = without_origin(checkpoint.manifest.progress)
        incarnation = origin.incarnation or checkpoint.manifest.store
        committed = Committed(checkpoint, progress, True, incarnation)
        then, found = origin.identity, incoming.planned
        if then is not None and then["kind"] != "rows" and found != then:
            self._check_stream(checkpoint.id)  # to go back would not help a stream that is another one
            raise self._other_rows(then, found)
        check_deliverable(committed, self._job.output, self._keeps_output)
        with watch.part("read"):
            if then is not None and then["kind"] == "rows":
                found = rows_identity(incoming.read())
                if found != then:
                    raise self._other_rows(then, found)
            elif incoming.execute is not None:
                incoming.execute()
        if then is None:
            _log.warning(
                "batch %d was committed by a version that did not note its rows: it is taken for the same by its "
                "number",
                checkpoint.id,
            )
        return committed

    def _check_stream(self, batch_id: int) -> None:
        """Raise if the batch before is of another stream: its number then follows by chance."""
        if self._checkpoint is None or self._stream is None:
            return
        before = Origin.of(self._checkpoint.manifest.progress)
        if before.stream is not None and before.stream != self._stream:
            raise other_stream(batch_id, self._store.uri, before.location, self._location)

    def _other_rows(self, then: Identity, found: Identity | None) -> Exception:
        assert self._checkpoint is not None
        batch_id = self._checkpoint.id
        previous = max((each for each in self._store.checkpoints() if each < batch_id), default=None)
        return other_rows(
            batch_id, self._store.uri, then, found, previous if previous == batch_id - 1 else None
        )

    def _run(self, batch_id: int, batch: Batch, now: int, identity: Identity, watch: Stopwatch) -> Committed:
        task = self._task
        assert task is not None
        with watch.part("function"):
            given = task.run(batch_id, batch, now)
        pending: list[PendingSnapshot] = []
        try:
            rows = len(given)
            if rows and not self._keeps_output:
                raise UsageError(
                    "the function gave rows, and there is no sink for them",
                    code="USAGE.NO_SINK",
                    detail=f"batch {batch_id}, {rows} rows",
                    hint="pass sink=, or give out no rows",
                )
            with watch.part("snapshot"):
                pending = task.snapshot(batch_id, self._store)
                # Meanwhile files are being written.
                changed = task.rows_changed
            files: list[StoredFile] = []
            if rows:
                with watch.part("output"):
                    files = [write_output(self._store.begin_snapshot(batch_id), given)]
            with watch.part("state"):
                snapshots = [each.result() for each in pending]
            progress = self._progress(batch_id, batch, rows, changed)
        except BaseException:
            task.undo()
            for each in pending:
                each.abort()  # waits, so that what is still being written is gone when the error leaves
            self._store.abort(batch_id)
            raise
        incarnation = self._store.incarnation
        origin = Origin(identity, self._job.columns, incarnation, self._stream, self._location)
        try:
            with watch.part("commit"):
                self._checkpoint = self._store.commit(
                    batch_id, snapshots, files=files, now=now, progress=origin.in_progress(progress)
                )
        except BaseException:
            # Whether it is there may not be known: the next batch looks, and begins from what it finds.
            self.close()
            raise
        self._now = now
        self._tell_unused(progress["statesNotAskedFor"])
        task.committed(batch_id)
        durations = watch.durations()
        parts = ("snapshot", "output", "state", "commit")
        progress = {**progress, "commitTimeMs": round(sum(durations.get(part, 0.0) for part in parts), 1)}
        return Committed(self._checkpoint, progress, False, incarnation)

    def _time(self, event_time: int | None) -> int:
        if self._job.event_time is None:
            clock = clocks.read(self._clock)
            self._check_jump(clock)
            now: int | None = clock
        else:
            now = None if event_time is None else event_time - self._job.delay
        return max((each for each in (now, self._now) if each is not None), default=0)

    def _check_jump(self, now: int) -> None:
        """Raise if the clock is further ahead of the last committed time than can be believed."""
        furthest = self._store.max_clock_jump
        if self._checkpoint is None or self._now is None or furthest is None:
            return
        if now - self._now > furthest:
            raise UsageError(
                f"the clock is {_days(now - self._now)} days ahead of the last committed batch",
                code="USAGE.CLOCK_JUMP",
                detail=f"the clock says {now}, batch {self._checkpoint.id} was at {self._now}, {self._store.uri}",
                hint="if the clock is wrong, set it right: nothing has expired yet. If the query really paused so "
                f"long, let the store go on from there with sb.tools.set_time(store, now={now}), or allow more "
                "with checkpoint=CheckpointStore(..., max_clock_jump=...)",
            )
        if self._now - now > furthest and not self._told_behind:
            self._told_behind = True
            _log.warning(
                "the clock is %s days behind the last committed batch: time stands still until it has caught up; "
                "sb.tools.set_time sets the time of the store back",
                _days(self._now - now),
            )

    def _progress(
        self, batch_id: int, batch: Batch, rows: int, changed: tuple[int | None, int | None]
    ) -> Figures:
        assert self._task is not None
        metrics = self._task.keyed.metrics()
        figures = {
            "batchId": batch_id,
            "numInputRows": batch.num_input_rows,
            "numOutputRows": rows,
            "numRowsDroppedByNullKey": batch.dropped_rows,
            **sizes(metrics),
            "numRowsUpdated": changed[0],
            "numRowsRemoved": changed[1],
            "numTimersFired": self._task.timers_fired,
            "numTimersPending": sum(metrics.get("timers", {}).values()),
            "states": {name: state["entries"] for name, state in metrics["states"].items()},
            "statesNotAskedFor": self._unused(),
            "customMetrics": self._task.metrics.values(),
        }
        return storable(figures)

    def _unused(self) -> list[str]:
        """The states that were restored and that the function has not asked for."""
        assert self._task is not None
        return sorted({*self._task.keyed.undeclared_states(), *self._task.operator.undeclared_states()})

    def _tell_unused(self, names: list[str]) -> None:
        if self._tells_unused and names:
            _log.warning(
                "restored, kept, and not asked for by the function: %s. Is a name misspelt? sb.tools.drop_state makes "
                "a copy without a state",
                ", ".join(map(repr, names)),
            )
        self._tells_unused = False

    # --- gaps ---

    def _next_ids(self) -> set[int]:
        """The ids that the next batch may have."""
        if self.last_id is not None:
            return {self.last_id + 1}
        if self._first_batch is not None:
            return {self._first_batch}
        begins_at = self._store.done.begins_at
        return {0} if begins_at is None else {0, begins_at}

    def _gap(self, batch_id: int, last: int | None) -> None:
        has_acted = self._restores_on_gap and not self._may_begin_anew(batch_id)
        if not self._restores_on_gap or has_acted:
            first = self._first_batch if last is None else None
            raise gap(batch_id, last, self._store.uri, first_batch=first, has_acted=has_acted)
        _log.warning("beginning anew with batch %d, after %s: on_gap='restart_from_empty'", batch_id, last)
        assert self._task is not None
        self._task.close()
        try:
            self._store.restart(begins_at=batch_id, first_batch=self._first_batch)
            self._checkpoint = self._now = None
            self._begin_empty()
        except BaseException:
            self.close()
            raise

    def _may_begin_anew(self, batch_id: int) -> bool:
        """Return True if ``on_gap`` may act: once for each value of ``first_batch``, or to finish what it has begun."""
        if self._first_batch not in (None, batch_id):
            return False
        done = self._store.done
        if not done.has_restarted_for(self._first_batch):
            return True
        restart = done.newest_restart
        if restart is None or self._checkpoint is None:
            return False
        is_unfinished = Origin.of(self._checkpoint.manifest.progress).incarnation != restart.incarnation
        return is_unfinished and (restart.begins_at, restart.first_batch) == (batch_id, self._first_batch)

    # --- the end ---

    def close(self) -> None:
        """Close the function, drop state from memory, and give the store up. Idempotent."""
        task, self._task = self._task, None
        try:
            if task is not None:
                task.close()
        finally:
            self._store.close()


def _days(milliseconds: int) -> str:
    return f"{milliseconds / 86_400_000:,.0f}"
