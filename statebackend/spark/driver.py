"""Driver mode: batches come to the driver as Arrow, and one process holds all state.

Spark calls the object that `stateful` returns. In the process where it is called, the object opens the state, keeps it
from batch to batch, and lets go of it when the query ends.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from statebackend.checkpoint import CheckpointStore
from statebackend.checkpoint.files.layout import CHECKPOINTS, DATA
from statebackend.errors import UsageError
from statebackend.runtime import Committed, Incoming, Job, Runner
from statebackend.runtime.origin import Identity
from statebackend.runtime.progress import Figures, Stopwatch, describe
from statebackend.runtime.start import Beginning, check_beginning
from statebackend.spark import sinks
from statebackend.spark.execution import SPARKS_FOLDERS, Execution, SparkLog, local_folder, shown_location
from statebackend.spark.outputs import Outputs
from statebackend.spark.session import (
    Query,
    arrow_of,
    check_output_names,
    check_reachable,
    check_readable_by_executors,
    column_types,
    execute,
)
from statebackend.spark.sinks import SinkContext
from statebackend.state import clocks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["StatefulBatches"]

_log = logging.getLogger("statebackend.spark")

#: Who has a store open in this process, by its uri.
_open: weakref.WeakValueDictionary[str, StatefulBatches] = weakref.WeakValueDictionary()
#: Seconds between two looks whether the query still runs.
_LOOK = 0.5


class Given(NamedTuple):
    """A batch that Spark has given, and whether its sink has returned."""

    batch_id: int
    frame: DataFrame
    is_delivered: bool


class StatefulBatches:
    """Called by Spark with every batch; made by `stateful`. Picklable: it opens its state where it is called."""

    def __init__(
        self,
        job: Job,
        *,
        checkpoint: str | os.PathLike[str] | CheckpointStore,
        sink: Callable[..., object] | None,
        retain: int | datetime.timedelta,
        single_writer: bool,
        restore_from: Beginning | None,
        first_batch: int | None,
        name: str | None,
        on_gap: str,
        clock: clocks.Clock | None,
    ) -> None:
        if sink is not None:
            sinks.check(sink)
        if sink is not None and job.output is None:
            raise UsageError("a sink needs to know the schema", hint='write for example schema="user bigint"')
        check_beginning(restore_from, first_batch, on_gap)
        self._job = job
        if not isinstance(checkpoint, CheckpointStore):
            checkpoint = CheckpointStore(checkpoint, retain=retain, single_writer=single_writer)
        elif retain != 2 or single_writer:
            raise UsageError("retain and single_writer are options of the store that is given")
        #: Never opened: each run opens a copy of it.
        self._unopened = checkpoint.unopened()
        self._sink = sink
        self._restore_from = restore_from
        self._first_batch = first_batch
        self._name = name
        self._on_gap = on_gap
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._runner: Runner | None = None
        self._query: Query | None = None
        self._execution: Execution | None = None
        self._spark_log: SparkLog | None = None
        #: The way of outputs to the sink; None without a sink.
        self._outputs: Outputs | None = None
        #: The newest batch of this run of the query.
        self._given: Given | None = None
        #: What the newest batch did, in Spark's words; None before the first.
        self.last_progress: Figures | None = None

    def __getstate__(self) -> dict[str, object]:
        left_here = (
            "_lock",
            "_runner",
            "_query",
            "_execution",
            "_spark_log",
            "_outputs",
            "_given",
            "last_progress",
        )
        return {name: value for name, value in self.__dict__.items() if name not in left_here}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        function = type(self._job.function).__name__.strip("_")
        return f"<stateful {function}, key {self._job.key!r}, state at {self._unopened.address}>"

    # --- a batch ---

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Run a batch and hand its output to the sink."""
        try:
            with self._lock:
                self._run(frame, batch_id)
        except BaseException as error:
            # Spark keeps the error for as long as the query's object lives; its frames would keep the state.
            traceback.clear_frames(error.__traceback__)
            raise

    def _run(self, frame: DataFrame, batch_id: int) -> None:
        watch = Stopwatch()
        with watch.part("open"):
            runner = self._opened(frame)
        incoming = Incoming(partial(arrow_of, frame), self._planned(batch_id, watch), partial(execute, frame))
        self._check_given_once(frame, batch_id)
        committed = runner.run(batch_id, incoming, watch)
        self._given = Given(batch_id, frame, False)
        self._deliver(frame, batch_id, runner, committed, watch)
        self._given = Given(batch_id, frame, True)
        self._report(committed, watch)

    def _check_given_once(self, frame: DataFrame, batch_id: int) -> None:
        """Raise if this run of the query has given the batch before: as other rows, or although it was delivered.

        Its plan is the same then, and it would be taken for a replay. To call again after a sink that failed is right.
        """
        given = self._given
        if given is None or given.batch_id != batch_id or self._execution is None:
            return
        if given.is_delivered or not frame.sameSemantics(given.frame):
            raise UsageError(
                "the object was called twice for one batch",
                code="USAGE.CALLED_TWICE",
                detail=f"batch {batch_id}, {self!r}",
                hint="give it the whole batch in one call; for two parts of it make two objects with stateful(...), "
                "with a checkpoint of its own each",
            )

    def _planned(self, batch_id: int, watch: Stopwatch) -> Identity | None:
        """Spark's plan for the batch, made durable: it must not be lost while the batch is kept."""
        if self._execution is None:
            return None
        with watch.part("plan"):
            if self._spark_log is not None:
                self._spark_log.sync()
            return self._execution.planned(batch_id)

    def _deliver(
        self, frame: DataFrame, batch_id: int, runner: Runner, committed: Committed, watch: Stopwatch
    ) -> None:
        if self._sink is None:
            return
        assert self._job.output is not None
        assert self._outputs is not None
        with watch.part("verify"):
            committed.verify_output()
            output = self._outputs.frame(frame, self._job.output.ddl(), committed)
            # Another driver may have gone on while this one stood still: its sink is ahead of ours then.
            epoch = runner.still_held()
        context = SinkContext(batch_id, epoch, committed.incarnation, committed.is_replay)
        with watch.part("sink"):
            sinks.call(self._sink, output, batch_id, context)

    def _report(self, committed: Committed, watch: Stopwatch) -> None:
        seconds = watch.total()
        progress = {"commitTimeMs": 0.0, **committed.progress}
        progress["isReplay"] = committed.is_replay
        progress["processedRowsPerSecond"] = round(progress["numInputRows"] / seconds, 1)
        progress["durationMs"] = {**watch.durations(), "batch": round(seconds * 1000, 1)}
        self.last_progress = progress
        _log.info("%s", describe(progress))

    # --- opening and closing ---

    def _opened(self, frame: DataFrame) -> Runner:
        """The runner of the query that this frame is of, opened anew if this is another run of it."""
        query = Query.of(frame, self._name)
        if self._runner is not None and self._runner.is_open and query == self._query and self.is_running():
            return self._runner
        self._check_free_for(query)
        # Another run of the query: what is committed may have changed meanwhile.
        self.close()
        return self._open(frame, query)

    def _check_free_for(self, query: Query) -> None:
        if query != self._query and self._execution is not None and self._execution.is_active():
            raise UsageError(
                "this object serves another query, which is running",
                code="USAGE.STORE_IN_USE",
                detail=f"{self!r}",
                hint="make one with stateful(...) for each query, with a checkpoint of its own",
            )

    def _open(self, frame: DataFrame, query: Query) -> Runner:
        self._check_frame(frame)
        execution = Execution.of(frame.sparkSession, query.id)
        location = None if execution is None else execution.location()
        store = self._store_beside(location)
        runner = self._runner = self._made_runner(frame, store, query, shown_location(location))
        try:
            check_readable_by_executors(frame, store.address, store.address_of_metadata())
            self._outputs = None if self._sink is None else Outputs.of(store, frame)
        except BaseException:
            self.close()
            raise
        self._query, self._execution, self._spark_log = query, execution, SparkLog.at(location)
        _open[store.uri] = self
        if execution is not None:
            _watch(self)
        return runner

    def _store_beside(self, location: str | None) -> CheckpointStore:
        """The store, not yet open: not Spark's own folder, and held by no object whose query has ended."""
        store = self._unopened.unopened()
        check_not_sparks_own(store, location)
        self._close_ended(store)
        return store

    def _check_frame(self, frame: DataFrame) -> None:
        check_reachable(frame, self._unopened.address)
        self._job.check_columns(frame.columns)
        if self._sink is not None and self._job.output is not None:
            check_output_names(frame, self._job.output.arrow.names)

    def _close_ended(self, store: CheckpointStore) -> None:
        """Let another object of this process let go of the store, if its query has ended and it does not know yet."""
        other = _open.get(store.uri)
        if other is not None and other is not self and not other.is_running():
            other.close()

    def _made_runner(
        self, frame: DataFrame, store: CheckpointStore, query: Query, location: str | None
    ) -> Runner:
        return Runner(
            self._job,
            store,
            self._job.key_type(column_types(frame)),
            query=query.name,
            clock=self._clock,
            restore_from=self._restore_from,
            first_batch=self._first_batch,
            on_gap=self._on_gap,
            keeps_output=self._sink is not None,
            stream=query.id,
            location=location,
        )

    def is_running(self) -> bool:
        """True if the query that it works for still runs, as far as can be told."""
        execution = self._execution
        return self._runner is not None if execution is None else execution.is_active()

    def close(self) -> None:
        """Let go of state and store; the next batch opens them again. Happens by itself when the query ends."""
        with self._lock:
            runner, self._runner = self._runner, None
            self._execution = self._query = self._spark_log = self._outputs = self._given = None
            if runner is not None:
                runner.close()


def _close_after(batches: StatefulBatches, execution: Execution | None) -> None:
    # A last batch may still be on its way here, though Spark no longer waits for it.
    with batches._lock:
        if batches._execution is not execution:
            return
        try:
            batches.close()
        except Exception:  # noqa: BLE001 - nobody is there to be told
            _log.warning("letting go of %r after its query failed", batches, exc_info=True)


def _watch(batches: StatefulBatches) -> None:
    """Close it when its query has ended. Holds no reference that would keep it alive."""
    reference, ended = weakref.ref(batches), threading.Event()
    weakref.finalize(batches, ended.set)
    watched = batches._execution

    def look() -> None:
        while not ended.wait(_LOOK):
            found = reference()
            if found is None or found._execution is not watched:
                return
            if not found.is_running():
                _close_after(found, watched)
                return
            del found

    threading.Thread(target=look, name="statebackend: end of query", daemon=True).start()


def check_not_sparks_own(store: CheckpointStore, location: str | None) -> None:
    """Raise if the store and Spark's place in the stream are one folder, or one lies among the files of the other."""
    where = local_folder(location)
    is_among = False
    if where is not None:
        mine, sparks = os.path.realpath(store.uri), os.path.realpath(where)
        among_sparks = [os.path.join(sparks, name) for name in SPARKS_FOLDERS]
        among_mine = [os.path.join(mine, name) for name in (CHECKPOINTS, DATA)]
        is_among = mine == sparks or is_within(mine, among_sparks) or is_within(sparks, among_mine)
    if is_among or store.has_folder("offsets"):
        raise UsageError(
            "the checkpoint is Spark's own checkpointLocation",
            code="USAGE.SPARKS_LOCATION",
            detail=store.uri,
            hint="give checkpoint= a folder of its own, beside Spark's checkpointLocation",
        )


def is_within(path: str, folders: list[str]) -> bool:
    """Return True if a path is one of these folders, or lies in one.

    >>> is_within("/a/b/c", ["/a/b"]), is_within("/a/bc", ["/a/b"])
    (True, False)
    """
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)
