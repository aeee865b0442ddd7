"""The execution of batches: where a job's function and its state are, and how rows get there.

`LocalExecution` has them in this process: one task, the files of its state, and those of its output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, Snapshot, StateSnapshot, StoredFile
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import UsageError
from statebackend.keys import KeyGroupRange
from statebackend.runtime.batch_identity import BatchSource, Identity, rows_identity
from statebackend.runtime.batch_progress import Figures, Stopwatch, sizes, storable
from statebackend.runtime.batch_rows import Batch, ChunkedBatch
from statebackend.runtime.batch_time import BatchTimes
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.job import Job
from statebackend.runtime.output import OutputFiles
from statebackend.runtime.task import SnapshotTargets, Task
from statebackend.types import Type


class BatchResult(NamedTuple):
    """A batch that has run: its files are written, and no checkpoint names them yet."""

    snapshots: list[StateSnapshot]
    #: The files of each output that has rows.
    outputs: dict[str, list[StoredFile]]
    #: Its progress, in Spark's words.
    figures: Figures


class CommitRequest(NamedTuple):
    """What there is to commit of a batch that has run."""

    ran: BatchResult
    #: What tells its rows from others.
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
        return CommitRequest(self.run_rows(batch_id, batch, begun.now, watch), identity, batch.times)

    def run_rows(self, batch_id: int, batch: Batch | ChunkedBatch, now: int, watch: Stopwatch) -> BatchResult:
        """The same for rows that are here. After it, `undo` may end the batch, too."""
        pending: list[Snapshot] = []
        files = OutputFiles(lambda: self._store.begin_snapshot(batch_id), self._delivered)
        try:
            with watch.part("function"):
                # Rows out of a batch in memory wait there: they are written while the state is.
                given = self.task.run(batch_id, batch, now, None if isinstance(batch, Batch) else files)
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
                each.abort()  # waits, so that what is still being written is gone when the error leaves
            self._store.abort(batch_id)
            raise

    def undo(self, batch_id: int) -> None:
        """Take a batch back that has run and will not be committed: state is as before, and its files are removed."""
        self.task.undo()
        self._store.abort(batch_id)

    def committed(self, batch_id: int) -> None:
        self.task.committed(batch_id)

    def _check_delivered(self, batch_id: int, rows: dict[str, int]) -> None:
        for name, count in rows.items():
            if count and name not in self._delivered:
                raise UsageError(
                    "the function gave rows, and there is no sink for them",
                    code="USAGE.NO_SINK",
                    detail=f"batch {batch_id}, {count} rows, output {name!r}",
                    hint="pass sink=, with one for each output, or give out no rows",
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
