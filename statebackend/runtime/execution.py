"""The execution of batches: where a job's function and its state are, and how rows get there.

`LocalExecution` has them in this process: one task, the files of its state, and its output files. `BatchTime` tells
the times of a batch: the clock's, and the watermark of its rows. Neither is ever before the previous batch's.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, CheckpointStore, Snapshot, StateSnapshot, StoredFile
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import UsageError
from statebackend.functions import PlannedTimes
from statebackend.keys import KeyGroupRange
from statebackend.runtime.batch_identity import BatchRecord, BatchSource, Identity, rows_identity
from statebackend.runtime.batch_progress import Figures, Stopwatch, sizes, storable
from statebackend.runtime.batch_rows import Batch, ChunkedBatch
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.job import Job
from statebackend.runtime.live_view import StateView, no_view
from statebackend.runtime.output import OutputFiles
from statebackend.runtime.task import SnapshotTargets, Task
from statebackend.state import clocks
from statebackend.types import Type

_log = logging.getLogger(__name__)


class CheckpointTimes(NamedTuple):
    """The times of a committed batch; None for one that it does not have."""

    now: int | None = None
    watermark: int | None = None
    #: When rows with a time last came, by the clock; None if it is not needed.
    rows_at: int | None = None


class BatchTimes(NamedTuple):
    """The times of a batch that begins."""

    now: int
    #: The clock's reading, which may have been set back.
    clock: int
    #: The watermark before it; None before any row that told a time.
    watermark: int | None
    #: The watermark by the clock, which counts if no row comes with a time; None unless rows have stayed away for long.
    idle: int | None = None
    #: The times that the engine has planned, if the function uses them.
    planned: PlannedTimes | None = None


class BatchTime:
    """Decides the times of each batch of a job, whose ``store`` says how far the clock may jump."""

    def __init__(self, job: Job, clock: clocks.Clock | None, store: CheckpointStore | None = None) -> None:
        self._job = job
        self._store = store
        self._clock = clocks.checked_clock(clock)
        self._told_behind = False
        #: The times of the newest committed batch, or of the start of the job.
        self.committed = CheckpointTimes()

    def begin_with(self, source: Checkpoint | Savepoint | None) -> None:
        """Go on from the times of a checkpoint or savepoint; None: of nothing."""
        if source is None:
            self.committed = CheckpointTimes()
            return
        origin = BatchRecord.of(source.manifest) if isinstance(source, Checkpoint) else BatchRecord()
        self.committed = CheckpointTimes(source.now, source.watermark, origin.rows_at)
        if self._job.event_time is not None and origin.time == "clock":
            _log.warning(
                "event_time= is turned on for a job with processing time: its states and timers in processing time "
                "go on by the clock. A state whose time to live is changed to event time keeps its timestamps, which "
                "are the clock's: if the rows are of another time, give it another name, so that it begins again"
            )

    def begin(
        self,
        last_id: int | None = None,
        planned_at: int | None = None,
        planned: PlannedTimes | None = None,
    ) -> BatchTimes:
        """The times of the batch after ``last_id``. Raises if the clock cannot be believed.

        A stream is idle up to the time at which the batch was planned: later rows come with the next one, and the plan
        of a batch that is run again may be old. With ``planned``, the time of the batch is the one in there.
        """
        clock = clocks.read(self._clock) if planned is None else planned.now
        self._check_jump(clock, last_id)
        before, watermark, _ = self.committed
        now = clock if before is None else max(clock, before)
        looked = now if planned_at is None else min(now, planned_at)
        planned = None if planned is None else planned._replace(now=now)
        return BatchTimes(now, clock, watermark, self._idle_watermark(looked), planned)

    def after(self, begun: BatchTimes, times: RowTimes | None) -> CheckpointTimes:
        """The times to commit with a batch whose rows had these times."""
        if times is None:
            # A job that uses the clock alone keeps the watermark, should it get event time again.
            return CheckpointTimes(begun.now, begun.watermark)
        rows_at = None
        if self._job.event_time is not None and self._job.event_time.idle_after is not None:
            # What was not noted before begins now.
            is_known = not times.told and self.committed.rows_at is not None
            rows_at = self.committed.rows_at if is_known else begun.now
        return CheckpointTimes(begun.now, times.after, rows_at)

    def _idle_watermark(self, now: int) -> int | None:
        event_time, since = self._job.event_time, self.committed.rows_at
        if event_time is None or event_time.idle_after is None or since is None:
            return None
        idle_after, delay = event_time.idle_after, event_time.watermark_delay
        assert isinstance(idle_after, int)
        assert isinstance(delay, int)
        return now - idle_after - delay if now - since >= idle_after else None

    def _check_jump(self, now: int, last_id: int | None) -> None:
        """Raise if the clock is further ahead of the newest checkpoint than can be believed."""
        store, committed = self._store, self.committed.now
        furthest = None if store is None else store.max_clock_jump
        if last_id is None or committed is None or store is None or furthest is None:
            return
        if now - committed > furthest:
            raise UsageError(
                f"the clock is {_days(now - committed)} days ahead of the last committed batch",
                code="USAGE.CLOCK_JUMP",
                detail=f"the clock says {now}, batch {last_id} was at {committed}, {store.uri}",
                hint="if the clock is wrong, set it right: nothing has expired yet. If the query really paused so "
                f"long, let the store go on from there with sb.tools.set_time(store, now={now}), or allow more "
                "with state=CheckpointStore(..., max_clock_jump=...)",
            )
        if committed - now > furthest and not self._told_behind:
            self._told_behind = True
            _log.warning(
                "the clock is %s days behind the last committed batch: time stands still until it has caught up; "
                "sb.tools.set_time sets the time of the store back",
                _days(committed - now),
            )


def _days(milliseconds: int) -> str:
    return f"{milliseconds / 86_400_000:,.0f}"


class BatchResult(NamedTuple):
    """A batch that has run: its files are written, and no checkpoint names them yet."""

    snapshots: list[StateSnapshot]
    #: The files of each output that has rows.
    outputs: dict[str, list[StoredFile]]
    figures: Figures


class CommitRequest(NamedTuple):
    """The result of a batch, to be committed."""

    ran: BatchResult
    #: The identity of its rows.
    identity: Identity
    #: The watermarks before and after it; None in a job without event time.
    times: RowTimes | None


class Execution(ABC):
    """Runs the batches of a job. After `run`, `committed` ends the batch, or `close` does if the commit has failed."""

    @abstractmethod
    def run(self, batch_id: int, incoming: BatchSource, begun: BatchTimes, watch: Stopwatch) -> CommitRequest:
        """Run the function over a batch and write its files. If anything raises, state is as it was before."""

    @abstractmethod
    def committed(self, batch_id: int) -> None:
        """Note that the batch is committed: it can no longer be undone."""

    def view(self, checkpoint: Checkpoint) -> StateView:
        """The state after the newest batch, whose checkpoint is given; called between two batches."""
        raise no_view(
            "it is in other processes",
            f"batch {checkpoint.id}",
            "read the newest checkpoint with sb.tools.state(store, name)",
        )

    @abstractmethod
    def close(self) -> None:
        """Close the function and drop state from memory. Idempotent."""


class LocalExecution(Execution):
    """Runs the batches of a job in this process, on the state of ``source``, or on none.

    ``delivered`` names the outputs that have a sink, with the columns that cut each into files.
    The task is instance ``subtask_index`` of ``parallelism``, which has the keys of ``key_group_range``.
    """

    def __init__(
        self,
        job: Job,
        key_type: Type,
        store: SnapshotTargets,
        *,
        source: Checkpoint | Savepoint | None = None,
        delivered: Mapping[str, Sequence[str]],
        subtask_index: int = 0,
        parallelism: int = 1,
        key_group_range: KeyGroupRange | None = None,
    ) -> None:
        self._job = job
        self._store = store
        self._delivered = delivered
        self.task = Task(
            job,
            key_type,
            restore=() if source is None else source,
            restored_id=getattr(source, "id", None),
            refuses_unrequested=True,
            subtask_index=subtask_index,
            parallelism=parallelism,
            key_group_range=key_group_range,
        )

    def run(self, batch_id: int, incoming: BatchSource, begun: BatchTimes, watch: Stopwatch) -> CommitRequest:
        with watch.part("read"):
            rows = incoming.read()
        with watch.part("prepare"):
            identity = incoming.planned or rows_identity(rows)
            made = Batch if isinstance(rows, pa.Table) else ChunkedBatch
            batch = made(self._job, rows, watermark=begun.watermark, clock=begun.clock, idle=begun.idle)
            del rows
        ran = self.run_rows(batch_id, batch, begun.now, watch, begun.planned)
        return CommitRequest(ran, identity, batch.times)

    def run_rows(
        self,
        batch_id: int,
        batch: Batch | ChunkedBatch,
        now: int,
        watch: Stopwatch,
        planned: PlannedTimes | None = None,
    ) -> BatchResult:
        """The same for rows that are here. After it, `undo` may end the batch too."""
        pending: list[Snapshot] = []
        files = OutputFiles(lambda: self._store.begin_snapshot(batch_id), self._delivered)
        try:
            with watch.part("function"):
                # Rows out of a batch in memory wait there: they are written while the state is.
                into = None if isinstance(batch, Batch) else files
                given = self.task.run(batch_id, batch, now, into, planned)
            rows = {name: files.count(name) + len(each) for name, each in given.items()}
            self._check_delivered(batch_id, rows)
            with watch.part("snapshot"):
                pending = self.task.snapshot(batch_id, self._store)
                # Meanwhile files are being written.
                changed = self.task.rows_changed
            outputs: dict[str, list[StoredFile]] = {}
            if any(rows.values()):
                with watch.part("output"):
                    for name, each in given.items():
                        if len(each):
                            assert isinstance(each, pa.Table)
                            files.write(name, [each])
                    outputs = files.finish()
            with watch.part("state"):
                snapshots = [each.result() for each in pending]
            return BatchResult(snapshots, outputs, self._figures(batch_id, batch, rows, changed))
        except BaseException:
            self.task.undo()
            files.abandon()
            for each in pending:
                each.abort()  # waits, so that unfinished files are gone when the error leaves
            self._store.abort(batch_id)
            raise

    def undo(self, batch_id: int) -> None:
        """Take a batch back that has run and will not be committed: state is as before, and its files are removed."""
        self.task.undo()
        self._store.abort(batch_id)

    def committed(self, batch_id: int) -> None:
        self.task.committed(batch_id)

    def view(self, checkpoint: Checkpoint) -> StateView:
        return StateView(self.task.keyed, checkpoint)

    def _check_delivered(self, batch_id: int, rows: dict[str, int]) -> None:
        for name, count in rows.items():
            if count and name not in self._delivered:
                raise UsageError(
                    "the function emitted rows to an output without a sink",
                    code="USAGE.NO_SINK",
                    detail=f"batch {batch_id}, {count} rows, output {name!r}",
                    hint="pass sink=, with one for each output, or emit no rows",
                )

    def _figures(
        self,
        batch_id: int,
        batch: Batch | ChunkedBatch,
        rows: dict[str, int],
        changed: tuple[int | None, int | None],
    ) -> Figures:
        counts = self.task.keyed.counts()
        figures = {
            "batchId": batch_id,
            "numInputRows": batch.num_input_rows,
            "numOutputRows": sum(rows.values()),
            "outputs": rows,
            "numRowsDroppedByNullKey": batch.dropped_rows,
            **sizes(counts),
            "numRowsUpdated": changed[0],
            "numRowsRemoved": changed[1],
            "numTimersFired": self.task.timers_fired,
            "numTimersPending": sum(counts.get("timers", {}).values()),
            "states": counts["states"],
            **_time_figures(batch),
            "customMetrics": self.task.metrics.values(),
        }
        if self.task.rows_failed is not None:
            figures["numRowsFailed"] = self.task.rows_failed
        return storable(figures)

    def close(self) -> None:
        self.task.close()


def _time_figures(batch: Batch | ChunkedBatch) -> Figures:
    """What became of the rows by their time; nothing in a job without event time."""
    if batch.times is None:
        return {}
    return {
        "watermark": batch.times.after,
        "numRowsLate": batch.num_late,
        "numRowsAhead": batch.num_ahead,
        "numRowsDroppedByWatermark": batch.num_dropped_by_time,
    }
