"""Driver mode: batches come to the driver as Arrow, and one process holds all state.

The object that `stateful` returns is what Spark calls. Where it is called it opens the state, keeps it from batch
to batch, and lets go of it when the query ends.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from statebackend.checkpoint import CheckpointStore
from statebackend.errors import UsageError
from statebackend.runtime import Committed, Job, Runner
from statebackend.runtime.progress import Stopwatch, describe
from statebackend.spark.session import (
    Query,
    active_execution,
    arrow_of,
    check_output_names,
    check_reachable,
    column_types,
    output_frame,
)

__all__ = ["StatefulBatches"]

_log = logging.getLogger("statebackend.spark")

#: Who has a store open in this process, by its uri.
_open: weakref.WeakValueDictionary[str, StatefulBatches] = weakref.WeakValueDictionary()
#: Seconds between two looks whether the query still runs.
_LOOK = 0.5


class StatefulBatches:
    """Called by Spark with every batch; made by `stateful`. Picklable: it opens its state where it is called."""

    def __init__(
        self,
        job: Job,
        *,
        checkpoint: str | os.PathLike[str],
        sink: Callable[[Any, int], Any] | None,
        retain: int,
        single_writer: bool,
        restore_from: Any,
        name: str | None,
        on_gap: str,
        clock: Any,
    ) -> None:
        if sink is not None and not callable(sink):
            raise UsageError("sink is a function (DataFrame, batch id)")
        if sink is not None and job.output is None:
            raise UsageError("a sink needs to know the schema", hint='write for example schema="user bigint"')
        self._job = job
        self._checkpoint = os.fspath(checkpoint)
        self._sink = sink
        self._retain = retain
        self._single_writer = single_writer
        self._restore_from = restore_from
        self._name = name
        self._on_gap = on_gap
        self._clock = clock
        self._store()  # says now what is wrong with the address
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._runner: Runner | None = None
        self._query: Query | None = None
        self._execution: Any = None
        #: What the newest batch did, in Spark's words; None before the first.
        self.last_progress: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        left_here = ("_lock", "_runner", "_query", "_execution", "last_progress")
        return {name: value for name, value in self.__dict__.items() if name not in left_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        function = type(self._job.function).__name__.strip("_")
        return f"<stateful {function}, key {self._job.key!r}, state at {self._checkpoint}>"

    def _store(self) -> CheckpointStore:
        return CheckpointStore(self._checkpoint, retain=self._retain, single_writer=self._single_writer)

    # --- a batch ---

    def __call__(self, frame: Any, batch_id: int) -> None:
        """Run a batch and hand its output to the sink."""
        try:
            with self._lock:
                self._run(frame, batch_id)
        except BaseException as error:
            # Spark keeps the error for as long as the query's object lives; its frames would keep the state.
            traceback.clear_frames(error.__traceback__)
            raise

    def _run(self, frame: Any, batch_id: int) -> None:
        watch = Stopwatch()
        with watch.part("open"):
            runner = self._opened(frame)
        committed = runner.run(batch_id, lambda: arrow_of(frame), watch)
        self._deliver(frame, batch_id, committed, watch)
        self._report(committed, watch)

    def _deliver(self, frame: Any, batch_id: int, committed: Committed, watch: Stopwatch) -> None:
        if self._sink is None:
            return
        assert self._job.output is not None
        paths = [committed.checkpoint.address(file) for file in committed.output]
        with watch.part("sink"):
            self._sink(output_frame(frame, self._job.output.ddl(), paths), batch_id)

    def _report(self, committed: Committed, watch: Stopwatch) -> None:
        seconds = watch.total()
        progress = {"commitTimeMs": 0.0, **committed.progress}
        progress["isReplay"] = committed.is_replay
        progress["processedRowsPerSecond"] = round(progress["numInputRows"] / seconds, 1)
        progress["durationMs"] = {**watch.durations(), "batch": round(seconds * 1000, 1)}
        self.last_progress = progress
        _log.info("%s", describe(progress))

    # --- opening and closing ---

    def _opened(self, frame: Any) -> Runner:
        query = Query.of(frame, self._name)
        if self._runner is not None and self._runner.is_open and query == self._query:
            return self._runner
        # Another run of the query: what is committed may have changed meanwhile.
        self.close()
        check_reachable(frame, self._checkpoint)
        self._job.check_columns(frame.columns)
        if self._sink is not None and self._job.output is not None:
            check_output_names(frame, self._job.output.arrow.names)
        key_type = self._job.key_type(column_types(frame))
        store = self._store()
        other = _open.get(store.uri)
        if other is not None and other is not self and not other.is_running():
            other.close()
        self._runner = Runner(
            self._job,
            store,
            key_type,
            query=query.name,
            clock=self._clock,
            restore_from=self._restore_from,
            on_gap=self._on_gap,
            keeps_output=self._sink is not None,
        )
        self._query = query
        self._execution = active_execution(frame, query)
        _open[store.uri] = self
        if self._execution is not None:
            _watch(self)
        return self._runner

    def is_running(self) -> bool:
        """Whether the query that it works for still runs, as far as can be told."""
        execution = self._execution
        if execution is None:
            return self._runner is not None
        try:
            return bool(execution.isActive())
        except Exception:  # noqa: BLE001 - Spark is gone
            return False

    def close(self) -> None:
        """Let go of state and store; the next batch opens them again. Happens by itself when the query ends."""
        with self._lock:
            runner, self._runner = self._runner, None
            self._execution = self._query = None
            if runner is not None:
                runner.close()


def _close_after(batches: StatefulBatches, execution: Any) -> None:
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
