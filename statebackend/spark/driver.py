"""What Spark calls with each batch: which query it is of, its state, its sinks, its end.

Spark calls the object that `stateful` returns. In the process where it is called, the object opens the state, keeps it
from batch to batch, and lets go of it when the query ends.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from statebackend.checkpoint import CheckpointStore
from statebackend.checkpoint.files import local_path, without_secrets
from statebackend.checkpoint.files.layout import CHECKPOINTS, DATA
from statebackend.errors import StateBackendError, UsageError, usage
from statebackend.functions import WholeKeysFunction
from statebackend.runtime import CommittedBatch, Job, Runner
from statebackend.runtime.batch_identity import Identity
from statebackend.runtime.batch_progress import Figures, Json, Stopwatch, describe
from statebackend.runtime.function_calls import is_interrupt, summary
from statebackend.runtime.live_view import StateView, no_view
from statebackend.runtime.runner import check_start
from statebackend.runtime.start_checks import StartFrom, source_uri
from statebackend.spark import display
from statebackend.spark.display import shortened
from statebackend.spark.driver_mode import RunMode
from statebackend.spark.session import (
    SPARKS_FOLDERS,
    Query,
    QueryRun,
    SparkLog,
    arrow_schema,
    check_output_names,
    check_reachable,
    check_readable_by_executors,
    column_types,
    engine_frame,
    execute,
    is_connect,
    local_folder,
    parsed_plan,
    planned_times,
    shown_location,
    times_without_stream,
)
from statebackend.spark.sink_delivery import OutputFrames, SinkDeliveries
from statebackend.spark.sinks.committed_sink import Sink, SinkContext
from statebackend.state import Duration, clocks, milliseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("statebackend.spark")

#: Who has a store open in this process, by its uri.
_open: weakref.WeakValueDictionary[str, StatefulBatches] = weakref.WeakValueDictionary()
#: Seconds between two looks whether the query still runs.
_LOOK = 0.5
#: Seconds between two looks of `view` whether the batch thread has answered.
_TURN = 0.05


class SparkBatch(NamedTuple):
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
        state: str | os.PathLike[str] | CheckpointStore,
        sink: Sink | Mapping[str, Sink] | None,
        start: StartFrom | None,
        uid: str | None,
        on_batch: Callable[[Figures], object] | None,
        way: RunMode,
    ) -> None:
        _check_options(on_batch, uid)
        if start is not None and not isinstance(start, StartFrom):
            raise usage.option(
                f"unknown start: a {type(start).__name__}; expected a StartFrom",
                hint="write start=sb.spark.StartFrom(source, first_batch=...)",
            )
        self._job = job
        #: Never opened: each run opens a copy of it.
        self._unopened = state.unopened() if isinstance(state, CheckpointStore) else CheckpointStore(state)
        self._unopened_way = way
        self._deliveries = SinkDeliveries.of(sink, job.outputs, self._unopened_way.most_files)
        check_not_a_sinks(self._unopened, self._deliveries.addresses())
        self._unopened_way.check(self._unopened)
        if start is not None and source_uri(start.source) == self._unopened.uri:
            raise usage.option(
                "start= and state= name the same store",
                detail=self._unopened.uri,
                hint="give state= a new path",
            )
        self._start = start
        self._uid = uid
        self._on_batch = on_batch
        #: None: the machine's; a test may set another.
        self._clock: clocks.Clock | None = None
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        #: True while a batch runs, for the thread that has the lock.
        self._is_inside = False
        self._runner: Runner | None = None
        self._query: Query | None = None
        self._query_run: QueryRun | None = None
        self._spark_log: SparkLog | None = None
        self._way = self._unopened_way.unopened()
        #: The way of outputs to the sinks; None if there are none.
        self._outputs: OutputFrames | None = None
        self._spark_batch: SparkBatch | None = None
        #: The progress of the newest batch, in Spark's words; None before the first.
        self.last_progress: Figures | None = None
        #: Calls of `view` that wait for the end of a batch, and the views that are open.
        self._waiting: deque[Future[StateView]] = deque()
        self._views: weakref.WeakSet[StateView] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, object]:
        left_here = (
            "_lock",
            "_runner",
            "_query",
            "_query_run",
            "_spark_log",
            "_way",
            "_outputs",
            "_spark_batch",
            "last_progress",
            "_waiting",
            "_views",
        )
        return {name: value for name, value in self.__dict__.items() if name not in left_here}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"<stateful {self._function}, key {self._job.key!r}, state at {self._unopened.address}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        sinks = [(f"sink of {name}", self._deliveries.describe(name)) for name in self._deliveries]
        lines = [("key", ", ".join(self._job.columns)), ("state", self._unopened.address), *sinks]
        return display.table(
            [*lines, *display.shown_progress(self.last_progress)], f"stateful {self._function}"
        )

    @property
    def _function(self) -> str:
        function = self._job.function
        return (
            function.name if isinstance(function, WholeKeysFunction) else type(function).__name__.strip("_")
        )

    # --- a batch ---

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Run a batch and hand its output to the sink."""
        try:
            with self._lock:
                was_inside, self._is_inside = self._is_inside, True
                try:
                    self._run(frame, batch_id)
                finally:
                    self._is_inside = was_inside
                if not was_inside:
                    self._serve_views()
        except BaseException as error:
            # Spark keeps the error for as long as the query's object lives; its frames would keep the state.
            traceback.clear_frames(error.__traceback__)
            _log.debug("batch %d of %r failed", batch_id, self, exc_info=error)
            if isinstance(error, Exception):
                self._name_batch(error, batch_id)
                raise shortened(error)  # noqa: B904 - the same error
            if is_interrupt(error) and not is_connect(frame):
                raise
            # PySpark answers the JVM for an Exception alone; after any other it would wait forever.
            exited = _exited(error)
            self._name_batch(exited, batch_id)
            raise shortened(exited) from shortened(error)

    def _name_batch(self, error: Exception, batch_id: int) -> None:
        """Say in the last line of the traceback that Spark shows which batch of which function it was."""
        if isinstance(error, StateBackendError):
            where = f"batch {batch_id} of {self._function}"
            error.detail = f"{error.detail}, {where}" if error.detail else where
        else:
            # A note comes after the error, whose text may have many lines: py4j has the reason in the second. Python
            # 3.10 shows none.
            note = f"In batch {batch_id} of {self!r}: {' '.join(summary(error).splitlines()[:2])}"
            with suppress(Exception):  # the class of a user's error may refuse any attribute
                error.__notes__ = [*getattr(error, "__notes__", ()), note]

    def _run(self, frame: DataFrame, batch_id: int) -> None:
        watch = Stopwatch()
        with watch.part("open"):
            runner = self._opened(frame)
        rows = self._way.rows_of(frame, self._job)
        incoming = rows.incoming(self._planned(batch_id, watch), partial(execute, frame))
        if self._job.is_planned:
            now = None if self._clock is None else clocks.read(self._clock)
            times = planned_times(frame, batch_id, self._plan, now)
            if not is_connect(frame) and self._query is not None and self._query.id is None:
                times = times_without_stream(now)
            incoming = incoming._replace(times=times)
        self._check_given_once(frame, batch_id)
        with ThreadPoolExecutor(1) as meanwhile:
            if self._spark_log is not None:
                # Spark's plan must not be lost while the batch is kept.
                incoming = incoming._replace(synced=meanwhile.submit(self._spark_log.sync).result)
            try:
                committed = runner.run(batch_id, incoming, watch)
            finally:
                rows.discard()
        self._spark_batch = SparkBatch(batch_id, frame, False)
        delivered = self._deliver(frame, batch_id, runner, committed, watch)
        self._spark_batch = SparkBatch(batch_id, frame, True)
        committed.progress.update(rows.figures())
        self._report(committed, delivered, watch)

    def _check_given_once(self, frame: DataFrame, batch_id: int) -> None:
        """Raise if this run of the query has given the batch before: as other rows, or although it was delivered.

        Its plan is the same then, and it would be taken for a replay. To call again after a sink that failed is right.
        """
        given = self._spark_batch
        if given is None or given.batch_id != batch_id or self._query_run is None:
            return
        if given.is_delivered or not frame.sameSemantics(given.frame):
            raise UsageError(
                "the object was called twice for one batch",
                code="USAGE.CALLED_TWICE",
                detail=f"batch {batch_id}, {self!r}",
                hint="give it the whole batch in one call; for two parts of it make two objects with stateful(...), "
                "each with its own checkpoint",
            )

    def _planned(self, batch_id: int, watch: Stopwatch) -> Identity | None:
        """Spark's plan for the batch: from its file where that can be read, which is faster than to ask Spark."""
        if self._query_run is None:
            return None
        with watch.part("plan"):
            text = self._plan(batch_id)
            return None if text is None else parsed_plan(text)

    def _plan(self, batch_id: int) -> str | None:
        """The entry of a batch in Spark's offset log."""
        found = None if self._spark_log is None else self._spark_log.plan(batch_id)
        if found is None and self._query_run is not None:
            found = self._query_run.plan(batch_id)
        return found

    def _log_of(self, batch_id: int) -> dict[str, Json] | None:
        """The entries of Spark's log that the manifest of a batch keeps."""
        return None if self._spark_log is None else self._spark_log.entries(batch_id)

    def _deliver(
        self, frame: DataFrame, batch_id: int, runner: Runner, committed: CommittedBatch, watch: Stopwatch
    ) -> list[Figures]:
        """Hand the outputs on to their sinks; return what each did."""
        if not self._deliveries:
            return []
        with watch.part("verify"):
            committed.verify_output()
            # Another driver may have gone on while this one stood still: its sink is ahead of ours then.
            epoch = runner.still_held()
        context = SinkContext(batch_id, epoch, committed.incarnation, committed.is_replay)
        with watch.part("sink"):
            return self._deliveries.deliver(committed, context, partial(self._frame, frame, committed))

    def _frame(self, frame: DataFrame, committed: CommittedBatch, name: str) -> DataFrame:
        assert self._outputs is not None
        return self._outputs.frame(frame, self._deliveries.schema(name).row_type, committed, name)

    def _report(self, committed: CommittedBatch, delivered: list[Figures], watch: Stopwatch) -> None:
        seconds = watch.total()
        progress = {"commitTimeMs": 0.0, **committed.progress}
        progress["isReplay"] = committed.is_replay
        progress["sinks"] = delivered
        progress["processedRowsPerSecond"] = round(progress["numInputRows"] / seconds, 1)
        progress["durationMs"] = {**watch.durations(), "batch": round(seconds * 1000, 1)}
        self.last_progress = progress
        _log.info("%s", describe(progress))
        self._observed(progress)

    def _observed(self, progress: Figures) -> None:
        if self._on_batch is None:
            return
        try:
            self._on_batch(dict(progress))
        except Exception:  # noqa: BLE001 - the batch has happened, and an observer cannot change that
            _log.warning("on_batch failed for batch %d", progress["batchId"], exc_info=True)

    # --- opening and closing ---

    def _opened(self, frame: DataFrame) -> Runner:
        """The runner of the query that this frame is of, opened again if this is another run of it."""
        query = Query.of(frame, self._uid)
        if self._runner is not None and self._runner.is_open and query == self._query and self.is_running():
            return self._runner
        self._check_free_for(query)
        # Another run of the query: the committed state may have changed meanwhile.
        self._close()
        return self._open(frame, query)

    def _check_free_for(self, query: Query) -> None:
        if query != self._query and self._query_run is not None and self._query_run.is_active():
            raise UsageError(
                "this object serves another query, which is running",
                code="USAGE.STORE_IN_USE",
                detail=f"{self!r}",
                hint="make one with stateful(...) for each query, with its own checkpoint",
            )

    def _open(self, frame: DataFrame, query: Query) -> Runner:
        self._check_frame(frame)
        query_run = QueryRun.of(frame.sparkSession, query.id)
        location = None if query_run is None else query_run.location()
        store = self._unopened.unopened()
        check_not_sparks_own(store, location)
        other = _open.get(store.uri)
        if other is not None and other is not self and not other.is_running():
            other.close()  # its query has ended, and it does not know yet
        runner = self._runner = self._made_runner(frame, store, query, query_run)
        try:
            check_readable_by_executors(frame, store.address, store.address_of_metadata())
            self._way.open(store, frame)
            self._outputs = OutputFrames.of(store, frame) if self._deliveries.reads_frames else None
            self._deliveries.prepare()
        except BaseException:
            self._close()
            raise
        self._query, self._query_run, self._spark_log = query, query_run, SparkLog.at(location)
        _open[store.uri] = self
        if query_run is not None:
            _watch(self)
        return runner

    def _check_frame(self, frame: DataFrame) -> None:
        if self._job.is_planned:
            self._job = self._job.on_frame(engine_frame(frame, self._job.settings))
        check_reachable(frame, self._unopened.address)
        self._job.check_columns(frame.columns)
        for name in self._deliveries:
            check_output_names(frame, self._deliveries.schema(name).arrow)

    def check(self, frame: DataFrame) -> None:
        """Raise if a query over this frame, streaming or not, could not start; nothing runs, and no state changes.

        It looks at the columns, their types and event time, at the stored state or ``start=``'s, and in Spark
        Connect also at the pickled function. It calls the function's method `open`. O(state of one key group)
        """
        self._check_frame(frame)
        if is_connect(frame):
            from pyspark.cloudpickle import dumps

            Query.of(frame, self._uid)
            self._job.check_pickled(dumps)
        key_type = self._job.key_type(column_types(frame))
        check_start(
            self._job, arrow_schema(frame), key_type, self._unopened.unopened(), self._start, self._uid
        )

    def _made_runner(
        self, frame: DataFrame, store: CheckpointStore, query: Query, query_run: QueryRun | None
    ) -> Runner:
        return Runner(
            self._job,
            store,
            self._job.key_type(column_types(frame)),
            query=query.uid,
            clock=self._clock,
            start=self._start,
            delivered=self._deliveries.partitions(),
            target_of=self._deliveries.target,
            stream=query.id,
            location=None if query_run is None else shown_location(query_run.location()),
            name=None if query_run is None else query_run.name,
            log_of=self._log_of,
            execution=self._way.execution(frame, self._job),
        )

    def _use_clock(self, clock: clocks.Clock) -> None:
        """Run by this clock from the first batch on: for `statebackend.testing.use_clock`."""
        with self._lock:
            if self._runner is not None:
                raise usage.option("cannot set a clock while the query runs", detail=f"{self!r}")
            self._clock = clocks.checked_clock(clock)

    # --- the state, for other threads ---

    def view(self, timeout: Duration = "1 minute") -> StateView:
        """The state after the newest committed batch, for reads on any thread while the query runs. O(states)

        Between two batches the call returns at once. During a batch it waits for the end of it, at most ``timeout``.
        Close the view, best by a ``with`` block; the end of the query closes it too. A function or a sink of the query
        cannot call it. `UsageError` (``USAGE.NO_VIEW``) if the state is not in this process.
        """
        until = time.monotonic() + milliseconds("timeout", timeout, least=0) / 1000
        request: Future[StateView] = Future()
        self._waiting.append(request)
        while not request.done():
            left = until - time.monotonic()
            if self._lock.acquire(timeout=min(max(left, 0), _TURN)):
                try:
                    if self._is_inside:
                        self._waiting.remove(request)
                        raise UsageError(
                            "a batch cannot open a view of the state that it changes",
                            code="USAGE.OVERLAPPING_CALL",
                            detail=f"{self!r}",
                            hint="read state with its handles; call view() from another thread",
                        )
                    self._serve_views()
                finally:
                    self._lock.release()
            elif left <= 0 and request.cancel():
                raise no_view("the batch has not ended in time", f"{self!r}", "give a longer timeout=")
        return request.result()

    def _serve_views(self) -> None:
        """Answer the waiting calls of `view`; called with the lock, between two batches."""
        while self._waiting:
            request = self._waiting.popleft()
            if not request.set_running_or_notify_cancel():
                continue
            try:
                if self._runner is None:
                    raise no_view(
                        "the query has not run a batch in this process",
                        f"{self!r}",
                        "call view() while the query runs; under Spark Connect, which runs it in another process, read "
                        "the newest checkpoint with sb.tools.state(store, name)",
                    )
                made = self._runner.view()
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                request.set_exception(error)
            else:
                self._views.add(made)
                request.set_result(made)

    def _state_source(self) -> CheckpointStore:
        """The store, for `sb.tools`."""
        return self._unopened.unopened()

    def is_running(self) -> bool:
        """True if the query that it works for still runs, as far as can be told."""
        query_run = self._query_run
        return self._runner is not None if query_run is None else query_run.is_active()

    def close(self) -> None:
        """Let go of state and store; the next batch opens them again. Happens by itself when the query ends.

        On another thread, `close()` waits for the batch. A function or a sink of the batch cannot call it.
        """
        with self._lock:
            if self._is_inside:
                raise UsageError(
                    "a batch cannot close the object that runs it",
                    code="USAGE.OVERLAPPING_CALL",
                    detail=f"{self!r}",
                    hint="stop the query: then state and store are let go by themselves",
                )
            self._close()

    def _close(self) -> None:
        with self._lock:
            runner, self._runner = self._runner, None
            self._query_run = self._query = self._spark_log = self._outputs = self._spark_batch = None
            way, self._way = self._way, self._unopened_way.unopened()
            for view in list(self._views):
                view.close()
            try:
                way.close()  # while the store is held: the next writer's files are in the same folder
            finally:
                if runner is not None:
                    runner.close()


def _check_options(on_batch: object, uid: object) -> None:
    if on_batch is not None and (not callable(on_batch) or inspect.iscoroutinefunction(on_batch)):
        raise usage.function("on_batch is a function (progress), and not async")
    if uid is not None and not (isinstance(uid, str) and uid):
        raise usage.option(f"unknown uid={uid!r}; expected a text that is not empty")


def _exited(error: BaseException) -> UsageError:
    """The error for an exit that code of the job has raised."""
    return UsageError(
        summary(error),
        code="USAGE.EXIT",
        hint="raise an Exception to fail the query: code of a job cannot end the process or thread that calls it",
    )


def _close_after(batches: StatefulBatches, query_run: QueryRun | None) -> None:
    # A last batch may still be on its way here, though Spark no longer waits for it.
    with batches._lock:
        if batches._query_run is not query_run:
            return
        try:
            batches.close()
        except Exception:  # noqa: BLE001 - no caller is left to tell
            _log.warning("letting go of %r after its query failed", batches, exc_info=True)


def _watch(batches: StatefulBatches) -> None:
    """Close it when its query has ended. Holds no reference that would keep it alive."""
    reference, ended = weakref.ref(batches), threading.Event()
    weakref.finalize(batches, ended.set)
    watched = batches._query_run

    def look() -> None:
        while not ended.wait(_LOOK):
            found = reference()
            if found is None or found._query_run is not watched:
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
            hint="give state= its own folder, next to Spark's checkpointLocation",
        )


def check_not_a_sinks(store: CheckpointStore, addresses: Mapping[str, str]) -> None:
    """Raise if a sink would write into the store's folder: readers of one would take the files of both."""
    mine = _real(store.uri)
    for output, address in addresses.items():
        if is_within(_real(address), [mine]):
            raise UsageError(
                "a sink would write into the folder of the checkpoint",
                code="USAGE.SINKS_LOCATION",
                detail=f"{store.uri}; output {output!r}",
                hint="give the sink its own folder, next to state=",
            )


def _real(address: str) -> str:
    path = local_path(address)
    return without_secrets(address).rstrip("/") if path is None else os.path.realpath(path)


def is_within(path: str, folders: list[str]) -> bool:
    """Return True if a path is one of these folders, or is in one.

    >>> is_within("/a/b/c", ["/a/b"]), is_within("/a/bc", ["/a/b"])
    (True, False)
    """
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)
