"""The execution of batches in this process: one task, the files of its state, and those of its output."""

from __future__ import annotations

import logging
from typing import NamedTuple

from statebackend.checkpoint import Checkpoint, CheckpointStore, PendingSnapshot, StateSnapshot, StoredFile
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import UsageError
from statebackend.runtime.batches import Batch
from statebackend.runtime.job import Job
from statebackend.runtime.output import write_output
from statebackend.runtime.progress import Figures, Stopwatch, sizes, storable
from statebackend.runtime.task import Task
from statebackend.types import Type

__all__ = ["LocalExecution", "Ran"]

_log = logging.getLogger(__name__)


class Ran(NamedTuple):
    """A batch that has run: its files are written, and no checkpoint names them yet."""

    snapshots: list[StateSnapshot]
    #: The files of its output.
    files: list[StoredFile]
    #: Its progress, in Spark's words.
    figures: Figures


class LocalExecution:
    """Runs the batches of a job in this process, on the state of ``source``, or on none.

    After `run`, `committed` or `undo` ends the batch.
    """

    def __init__(
        self,
        job: Job,
        key_type: Type,
        store: CheckpointStore,
        *,
        source: Checkpoint | Savepoint | None = None,
        keeps_output: bool = True,
    ) -> None:
        self._store = store
        self._keeps_output = keeps_output
        #: True until the log has said which restored states nobody asked for.
        self._tells_unused = source is not None
        self.task = Task(
            job,
            key_type,
            restore=() if source is None else source,
            restored_id=getattr(source, "id", None),
        )

    def run(self, batch_id: int, batch: Batch, now: int, watch: Stopwatch) -> Ran:
        """Run the function over a batch and write its files. If anything raises, memory is as it was before."""
        with watch.part("function"):
            given = self.task.run(batch_id, batch, now)
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
                pending = self.task.snapshot(batch_id, self._store)
                # Meanwhile files are being written.
                changed = self.task.rows_changed
            files: list[StoredFile] = []
            if rows:
                with watch.part("output"):
                    files = [write_output(self._store.begin_snapshot(batch_id), given)]
            with watch.part("state"):
                snapshots = [each.result() for each in pending]
            return Ran(snapshots, files, self._figures(batch_id, batch, rows, changed))
        except BaseException:
            self.task.undo()
            for each in pending:
                each.abort()  # waits, so that what is still being written is gone when the error leaves
            self._store.abort(batch_id)
            raise

    def committed(self, batch_id: int) -> None:
        """Note that the batch is committed: it can no longer be undone."""
        if self._tells_unused:
            self._tells_unused = False
            names = self._unused()
            if names:
                _log.warning(
                    "restored, kept, and not asked for by the function: %s. Is a name misspelt? sb.tools.drop_state "
                    "makes a copy without a state",
                    ", ".join(map(repr, names)),
                )
        self.task.committed(batch_id)

    def _figures(
        self, batch_id: int, batch: Batch, rows: int, changed: tuple[int | None, int | None]
    ) -> Figures:
        metrics = self.task.keyed.metrics()
        figures = {
            "batchId": batch_id,
            "numInputRows": batch.num_input_rows,
            "numOutputRows": rows,
            "numRowsDroppedByNullKey": batch.dropped_rows,
            **sizes(metrics),
            "numRowsUpdated": changed[0],
            "numRowsRemoved": changed[1],
            "numTimersFired": self.task.timers_fired,
            "numTimersPending": sum(metrics.get("timers", {}).values()),
            "states": {name: state["entries"] for name, state in metrics["states"].items()},
            "statesNotAskedFor": self._unused(),
            "customMetrics": self.task.metrics.values(),
        }
        return storable(figures)

    def _unused(self) -> list[str]:
        """The states that were restored and that the function has not asked for."""
        return sorted({*self.task.keyed.undeclared_states(), *self.task.operator.undeclared_states()})

    def close(self) -> None:
        """Close the function and drop state from memory. Idempotent."""
        self.task.close()
