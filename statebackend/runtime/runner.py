"""A job on its store: opens and restores, runs a batch, commits state and output together, rolls back.

With S the newest committed id: batch S+1 runs; batch S was committed, and is not run again; anything else is a
gap. An empty store takes batch 0 only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from statebackend import clocks
from statebackend.checkpoint import Checkpoint, CheckpointStore, StoredFile
from statebackend.checkpoint.savepoints import Savepoint
from statebackend.errors import BatchGapError, UsageError
from statebackend.runtime.batches import Batch
from statebackend.runtime.job import Job
from statebackend.runtime.progress import Stopwatch, sizes, storable
from statebackend.runtime.task import Task
from statebackend.types.model import Type

__all__ = ["Committed", "Runner"]

_log = logging.getLogger(__name__)

ON_GAP = ("fail", "restart_from_empty")
#: Rows in a row group of the output: what the tasks of Spark share.
_ROW_GROUP = 262_144


class Committed(NamedTuple):
    """A batch that is committed: its checkpoint, which names its output, and what is to be told of it."""

    checkpoint: Checkpoint
    progress: dict[str, Any]
    #: Whether it had been committed before, and was not run now.
    is_replay: bool

    @property
    def output(self) -> list[StoredFile]:
        """The files of its output, in order."""
        return [file for file in self.checkpoint.manifest.files if file.kind == "output"]


class Runner:
    """Runs the batches of one query, and is the only one to write into its store.

    ``query`` is who the store belongs to. ``restore_from`` is a store, a checkpoint or a savepoint that a new store
    begins with. Closed by any error of a commit: what is in memory may then not be what is committed.
    """

    def __init__(
        self,
        job: Job,
        store: CheckpointStore,
        key_type: Type,
        *,
        query: str | None = None,
        clock: Any = None,
        restore_from: Any = None,
        on_gap: str = "fail",
        keeps_output: bool = True,
    ) -> None:
        if on_gap not in ON_GAP:
            raise UsageError("on_gap is 'fail' or 'restart_from_empty'")
        self._job = job
        self._store = store
        self._key_type = key_type
        self._clock = clocks.checked_clock(clock)
        self._restores_on_gap = on_gap == "restart_from_empty"
        self._keeps_output = keeps_output
        self._checkpoint: Checkpoint | None = None
        self._now: int | None = None
        self._task: Task | None = None
        store.open_for_writing(
            query=query, key_type=key_type, max_parallelism=job.max_parallelism, refuse_live=True
        )
        try:
            newest = store.latest()
            if newest is not None:
                self._begin_from(store.open(newest), is_own=True)
            elif restore_from is None:
                self._begin_empty()
            else:
                self._begin_from(_source(restore_from), is_own=False)
        except BaseException:
            self.close()
            raise

    def _begin_empty(self) -> None:
        self._task = Task(self._job, self._key_type)

    def _begin_from(self, source: Any, *, is_own: bool) -> None:
        restored_id = getattr(source, "id", None)
        self._now = getattr(source, "now", None)
        self._checkpoint = source if is_own else None
        self._task = Task(self._job, self._key_type, restore=source, restored_id=restored_id)

    @property
    def is_open(self) -> bool:
        """Whether it can run a batch."""
        return self._task is not None

    @property
    def last_id(self) -> int | None:
        """The newest committed batch; None in an empty store."""
        return None if self._checkpoint is None else self._checkpoint.id

    # --- a batch ---

    def run(self, batch_id: int, read: Callable[[], pa.Table], watch: Stopwatch) -> Committed:
        """Run batch ``batch_id`` over what ``read`` gives, and commit it; or find that it is committed.

        If anything raises before the commit, memory is at the end of the batch before.
        """
        if self._task is None:
            raise UsageError("the job is closed")
        last = self.last_id
        if last is not None and batch_id == last:
            assert self._checkpoint is not None
            return Committed(self._checkpoint, dict(self._checkpoint.manifest.progress), True)
        if batch_id != (0 if last is None else last + 1):
            self._gap(batch_id, last)
        with watch.part("read"):
            table = read()
        with watch.part("prepare"):
            batch = Batch(self._job, table)
            del table
            now = self._time(batch.max_event_time)
        return self._run(batch_id, batch, now, watch)

    def _run(self, batch_id: int, batch: Batch, now: int, watch: Stopwatch) -> Committed:
        task = self._task
        assert task is not None
        with watch.part("function"):
            given = task.run(batch_id, batch, now)
        pending: list[Any] = []
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
                    files = self._write_output(batch_id, given)
            with watch.part("state"):
                snapshots = [each.result() for each in pending]
            progress = self._progress(batch_id, batch, rows, changed)
        except BaseException:
            task.undo()
            for each in pending:
                each.abort()  # waits, so that what is still being written is gone when the error leaves
            self._store.abort(batch_id)
            raise
        try:
            with watch.part("commit"):
                self._checkpoint = self._store.commit(
                    batch_id, snapshots, files=files, now=now, progress=progress
                )
        except BaseException:
            # Whether it is there may not be known: the next batch looks, and begins from what it finds.
            self.close()
            raise
        self._now = now
        task.committed(batch_id)
        durations = watch.durations()
        parts = ("snapshot", "output", "state", "commit")
        progress = {**progress, "commitTimeMs": round(sum(durations.get(part, 0.0) for part in parts), 1)}
        return Committed(self._checkpoint, progress, False)

    def _time(self, event_time: int | None) -> int:
        if self._job.event_time is None:
            now: int | None = clocks.read(self._clock)
        else:
            now = None if event_time is None else event_time - self._job.delay
        return max((each for each in (now, self._now) if each is not None), default=0)

    def _write_output(self, batch_id: int, table: pa.Table) -> list[StoredFile]:
        writer = self._store.begin_snapshot(batch_id)
        numbers, others = _encodings(table.schema)
        with writer.create("output", suffix=".parquet") as file:
            pq.write_table(
                table,
                file,
                row_group_size=_ROW_GROUP,
                compression="snappy",
                use_dictionary=others,
                column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
            )
            return [file.finish()]

    def _progress(
        self, batch_id: int, batch: Batch, rows: int, changed: tuple[int | None, int | None]
    ) -> dict[str, Any]:
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
            "customMetrics": self._task.metrics.values(),
        }
        return storable(figures)

    # --- gaps ---

    def _gap(self, batch_id: int, last: int | None) -> None:
        if not self._restores_on_gap:
            raise _gap_error(batch_id, last, self._store.uri)
        _log.warning("beginning anew with batch %d, after %s: on_gap='restart_from_empty'", batch_id, last)
        assert self._task is not None
        self._task.close()
        try:
            self._store.restart()
            self._checkpoint = None
            self._begin_empty()
        except BaseException:
            self.close()
            raise

    # --- the end ---

    def close(self) -> None:
        """Close the function, drop state from memory, and give the store up. Idempotent."""
        task, self._task = self._task, None
        try:
            if task is not None:
                task.close()
        finally:
            self._store.close()


def _encodings(schema: pa.Schema) -> tuple[list[str], list[str]]:
    """The columns that are written in differences, and those with a dictionary, nested ones as Parquet names them.

    Whole numbers in differences are half as large as in a dictionary, where most of them occur once.

    >>> _encodings(pa.schema([("n", pa.int64()), ("s", pa.struct({"x": pa.int64()})), ("s.x", pa.int64())]))
    (['n'], ['s.x'])
    """
    numbers = [field.name for field in schema if pa.types.is_integer(field.type)]
    nested = [
        leaf for field in schema if field.name not in numbers for leaf in _leaves(field.name, field.type)
    ]
    return [name for name in numbers if name not in nested], nested


def _leaves(path: str, kind: pa.DataType) -> list[str]:
    """What Parquet makes of a column: columns of its own for what a struct, list or map holds.

    >>> _leaves("a", pa.list_(pa.struct({"x": pa.string(), "y": pa.map_(pa.string(), pa.int64())})))
    ['a.list.element.x', 'a.list.element.y.key_value.key', 'a.list.element.y.key_value.value']
    """
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaves(f"{path}.{field.name}", field.type)]
    if pa.types.is_map(kind):
        within = {"key_value.key": kind.key_type, "key_value.value": kind.item_type}
    elif pa.types.is_list(kind):
        within = {"list.element": kind.value_type}
    else:
        return [path]
    return [leaf for name, each in within.items() for leaf in _leaves(f"{path}.{name}", each)]


def _gap_error(batch_id: int, last: int | None, uri: str) -> BatchGapError:
    if last is None:
        return BatchGapError(
            f"the stream is at batch {batch_id}, and there is no state",
            code="BATCH_GAP.NO_STATE",
            detail=uri,
            hint="state was removed, or its path changed: give the right checkpoint=, or begin the query anew "
            "with a new checkpointLocation; on_gap='restart_from_empty' goes on without the old state",
        )
    if batch_id > last:
        return BatchGapError(
            f"state is behind the stream: it holds batch {last}, and batch {batch_id} is to come",
            code="BATCH_GAP.STATE_BEHIND",
            detail=uri,
            hint="state was restored from an older copy: restore the stream's checkpointLocation of the same "
            "moment; on_gap='restart_from_empty' goes on without the old state",
        )
    return BatchGapError(
        f"the stream is behind state: batch {batch_id} is to come, and batch {last} is committed",
        code="BATCH_GAP.STREAM_BEHIND",
        detail=uri,
        hint="the stream's checkpointLocation was restored from an older copy, or removed: restore the state of the "
        "same moment; on_gap='restart_from_empty' begins anew with this batch",
    )


def _source(restore_from: Any) -> Any:
    """What backends restore from: the newest checkpoint of a store, a savepoint, or what was given."""
    if not isinstance(restore_from, (str, os.PathLike)):
        return restore_from
    store = CheckpointStore(restore_from, single_writer=True)
    newest = store.latest()
    return Savepoint(restore_from) if newest is None else store.open(newest)
