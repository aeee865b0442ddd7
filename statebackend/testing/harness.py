"""Running a function without Spark, on the real backends, and a clock that tests set.

>>> from statebackend.functions import map_with_state
>>> def total(row, before):
...     after = (before or 0) + row.n
...     return (row.user, after), after
>>> harness = Harness(map_with_state(total, int), key="user")
>>> harness.process_batch([{"user": "ann", "n": 1}, {"user": "bob", "n": 5}, {"user": "ann", "n": 2}])
[('ann', 1), ('bob', 5), ('ann', 3)]
>>> harness.close()
"""

from __future__ import annotations

import dataclasses
import operator
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, CheckpointStore
from statebackend.errors import UsageError, usage
from statebackend.functions import EventTime, Metrics, ProcessFunction, Rule
from statebackend.operator_state import OperatorStateBackend
from statebackend.runtime import Batch, Job, Task
from statebackend.runtime.arrow_rows import rows_of
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.execution import BatchTime, BatchTimes
from statebackend.runtime.output import Result
from statebackend.state import Duration, KeyedStateBackend, StateBackend, clocks, milliseconds
from statebackend.types import ROW, from_config, is_not_a_time, of


class ManualClock:
    """A clock that stands still until told: pass it as ``clock=`` to test expiry and timers exactly.

    >>> clock = ManualClock(now=10)
    >>> clock.set(5)
    >>> clock.now()
    5
    """

    __slots__ = ("_now",)

    def __init__(self, now: int = 0) -> None:
        self._now = _milliseconds(now)

    def now(self) -> int:
        """The time it was set to, in milliseconds.

        >>> ManualClock(7).now()
        7
        """
        return self._now

    def set(self, now: int) -> None:
        """Set the time, in milliseconds; it may go backwards.

        >>> clock = ManualClock()
        >>> clock.set(60_000)
        """
        self._now = _milliseconds(now)

    def advance(self, by: Duration) -> None:
        """Move the time on by a duration; a negative one moves it back.

        >>> clock = ManualClock()
        >>> clock.advance("2 seconds")
        >>> clock.now()
        2000
        """
        self._now += milliseconds("by", by, least=-(2**63))

    def __repr__(self) -> str:
        return f"ManualClock(now={self._now})"


def _milliseconds(value: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise usage.time(
            f"a {type(value).__name__} is not a number of milliseconds", hint="write an int"
        ) from None


class InjectedFault(Exception):
    """The fault that `Harness.fail_after` asked for."""


class Harness:
    """Runs a function as a job does: on copies of it, with its state, and with time that stands still within a batch.

    Every call of ``process_...`` is its own batch: if it raises, state is as before, and the next call gets a
    fresh copy of the function. Each returns the rows of the main output: as the function gave them or, with a
    ``schema``, as they come back from Arrow. `outputs` has the rows of all.

    ``key`` names the column or columns of the key. The key has the type of the first batch, as Arrow infers it, unless
    ``key_type`` gives another. The other options are as for ``sb.spark.stateful``. Default clock: a `ManualClock`.

    >>> from statebackend.functions import map_with_state
    >>> with Harness(map_with_state(lambda row, n: (None, (n or 0) + row.n), int), "user") as harness:
    ...     harness.process_element({"user": "ann", "n": 3})
    ...     list(harness.keyed.keys("state"))
    []
    ['ann']
    """

    def __init__(
        self,
        function: ProcessFunction,
        key: str | Sequence[str],
        *,
        key_type: Any = None,
        schema: Any = None,
        backend: str | StateBackend = "heap",
        clock: Any = None,
        max_parallelism: int = 128,
        event_time: str | EventTime | None = None,
        order_by: str | Sequence[str] | None = None,
        broadcast_when: str | None = None,
        null_keys: Rule = "fail",
        errors: Rule = "fail",
    ) -> None:
        self._job = Job(
            function,
            key=key,
            schema=schema,
            backend=backend,
            max_parallelism=max_parallelism,
            event_time=event_time,
            order_by=order_by,
            broadcast_when=broadcast_when,
            null_keys=null_keys,
            errors=errors,
        )
        #: The clock: set it, or advance it, between two steps.
        self.clock = ManualClock() if clock is None else clocks.checked_clock(clock)
        self._time = BatchTime(self._job, self.clock)
        self._batch_id = -1
        self._is_inferred = key_type is None
        #: None until the first batch tells the type of the key.
        self._started = None if key_type is None else Task(self._job, of(key_type))
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: CheckpointStore | None = None
        self._checkpoint_id = -1
        #: The point at which the next batch is to fail.
        self._fails_after: str | None = None
        self._is_replay = False
        #: The rows that the last batch gave to each output; the main output's are the result of the call.
        self.outputs: dict[str, list[Any]] = {name: [] for name in self._job.outputs}

    def __repr__(self) -> str:
        name = type(self._job.function).__name__.strip("_")
        return f"<Harness of {name}, key {self._job.key!r}, batch {self._batch_id}, {self._job.backend!r}>"

    @property
    def _task(self) -> Task:
        if self._started is None:
            raise UsageError(
                "the type of the key is unknown before the first batch with a key",
                code="USAGE.HARNESS_KEY_TYPE",
                hint="pass key_type=, for example Harness(..., key_type=str)",
            )
        return self._started

    def _learn(self, types: Mapping[str, Any]) -> None:
        """Let the first batch tell the type of the key. Another type later is an error."""
        if any(pa.types.is_null(each) for each in types.values()):
            return
        kinds = {name: of(each) for name, each in types.items()}
        told = kinds[self._job.key] if isinstance(self._job.key, str) else ROW(**kinds)
        if self._started is None:
            self._started = Task(self._job, told)
        elif told != self._started.keyed.key_type:
            raise UsageError(
                f"the key is of type {told!r}; expected {self._started.keyed.key_type!r}, as in the first batch",
                code="USAGE.HARNESS_KEY_TYPE",
                detail=f"column {self._job.key!r}",
                hint="give all keys one type, or pass key_type=",
            )

    # --- steps ---

    def process_element(self, row: Any) -> list[Any]:
        """Run the function over a batch of one row: a dict, a named tuple, a dataclass or a Spark row.

        >>> from statebackend.functions import map_with_state
        >>> with Harness(map_with_state(lambda row, n: ((row.n,), None), int), key="user") as harness:
        ...     harness.process_element({"user": "ann", "n": 3})
        [(3,)]
        """
        if self._job.is_batch:
            raise usage.function("a BatchProcessFunction takes batches", hint="call process_batch")
        return self.process_batch([row])

    def process_batch(self, rows: Any) -> list[Any]:
        """Run the function over a batch: an Arrow table or record batch, or a list of rows with names.

        These are dicts, named tuples, dataclasses or Spark rows. A column without a value is null.

        >>> from statebackend.functions import map_with_state
        >>> with Harness(map_with_state(lambda row, n: ((row.n,), None), int), key="user") as harness:
        ...     harness.process_batch(pa.table({"user": ["ann"], "n": [3]}))
        [(3,)]
        """
        if self._replays():
            return self._main_output
        if isinstance(rows, pa.RecordBatch):
            rows = pa.Table.from_batches([rows])
        elif not isinstance(rows, pa.Table):
            rows = _as_table([_as_dict(row, at) for at, row in enumerate(rows)])
        begun = self._time.begin()
        batch = Batch(self._job, rows, watermark=begun.watermark, clock=begun.clock, idle=begun.idle)
        if self._is_inferred:
            self._learn({name: rows.column(name).type for name in self._job.columns})
        given = self._task.run(self._batch_id + 1, batch, begun.now)
        return self._results(given, begun, batch.times)

    def advance_processing_time(self, to: int) -> list[Any]:
        """Advance the clock to ``to`` milliseconds, without rows: timers that are due fire.

        The watermark stays. Never goes back.

        >>> from statebackend.functions import map_with_state
        >>> with Harness(map_with_state(lambda row, n: ((row.n,), None), int), key="user") as harness:
        ...     harness.advance_processing_time(60_000)
        []
        """
        if isinstance(self.clock, ManualClock):
            self.clock.set(max(to, self.clock.now()))
        now, watermark, _ = self._time.committed
        return self._passed(max(to, now or 0), watermark)

    def advance_watermark(self, to: int) -> list[Any]:
        """Advance the watermark to ``to`` milliseconds, as rows of other keys would: timers that are due fire.

        The clock stays. Never goes back.

        >>> from statebackend.functions import map_with_state
        >>> function = map_with_state(lambda row, n: ((row.n,), None), int)
        >>> with Harness(function, key="user", event_time="at") as harness:
        ...     harness.advance_watermark(60_000)
        ...     harness.watermark
        []
        60000
        """
        if self._job.event_time is None:
            raise usage.no_event_time(
                "a watermark needs rows that tell the time",
                hint="name their column: Harness(..., event_time='at')",
            )
        watermark = self._time.committed.watermark
        return self._passed(self._time.begin().now, to if watermark is None else max(to, watermark))

    def _passed(self, now: int, watermark: int | None) -> list[Any]:
        times, before = None, self._time.committed.watermark
        if self._job.event_time is not None:
            times = RowTimes.of_none(before, watermark)
        given: Result = {name: [] for name in self._job.outputs}
        if self._started is not None:
            given = self._started.pass_time(self._batch_id + 1, now, times)
        return self._results(given, BatchTimes(now, now, before), times)

    @property
    def watermark(self) -> int | None:
        """The watermark after the last batch; None before any row that told a time."""
        return self._time.committed.watermark

    # --- checkpoints ---

    def snapshot(self) -> Checkpoint:
        """Take a checkpoint of all state, as a job would write it, and return it for `restore`."""
        task = self._task
        if self._store is None:
            self._folder = tempfile.TemporaryDirectory(prefix="statebackend-harness-")
            # Every checkpoint stays as long as the harness does.
            self._store = CheckpointStore(self._folder.name, retain=1_000_000)
            self._store.open_for_writing(
                key_type=task.keyed.key_type, max_parallelism=self._job.max_parallelism
            )
        self._checkpoint_id += 1
        pending = task.snapshot(self._checkpoint_id, self._store)
        now, watermark, rows_at = self._time.committed
        told_by = "clock" if self._job.event_time is None else "rows"
        return self._store.commit(
            self._checkpoint_id,
            [each.result() for each in pending],
            now=now or 0,
            watermark=watermark,
            batch=BatchRecord(time=told_by, rows_at=rows_at).to_json(),
        )

    def _state_source(self) -> Checkpoint:
        """The state for `sb.tools`. O(what has changed since the last checkpoint)."""
        return self.snapshot()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, with a fresh copy of the function and nothing else from memory."""
        if self._started is None and checkpoint.metadata.key_type is not None:
            key_type = from_config(checkpoint.metadata.key_type)
        else:
            key_type = self._task.keyed.key_type
            self._task.close()
        self._is_replay = False
        self._time.begin_with(checkpoint)
        self._started = Task(self._job, key_type, restore=checkpoint, restored_id=checkpoint.id)

    def restart(self) -> None:
        """Stop and start the job: `snapshot`, then `restore` from it."""
        is_replay = self._is_replay
        self.restore(self.snapshot())
        self._is_replay = is_replay

    # --- faults ---

    def fail_after(self, point: str) -> None:
        """Let the next batch raise `InjectedFault` after ``"function"`` or after ``"commit"``.

        After ``"function"``, nothing is committed and state is as before. After ``"commit"``, the batch is committed.
        The next call of ``process_...`` is then its replay: it returns the committed rows, and no function runs.

        >>> from statebackend.functions import map_with_state
        >>> with Harness(map_with_state(lambda row, n: ((n or 0) + 1,) * 2, int), key="user") as harness:
        ...     for point in ("function", "commit"):
        ...         harness.fail_after(point)
        ...         try:
        ...             harness.process_element({"user": "ann"})
        ...         except InjectedFault as fault:
        ...             print(fault)
        ...     harness.process_element({"user": "ann"}), harness.process_element({"user": "ann"})
        the batch fails after the function, as asked for
        the batch fails after the commit, as asked for
        ([1], [2])
        """
        if point not in ("function", "commit"):
            raise usage.argument(f"unknown point {point!r}; expected 'function' or 'commit'")
        self._fails_after = point

    def _replays(self) -> bool:
        is_replay, self._is_replay = self._is_replay, False
        return is_replay

    def _fail(self, point: str) -> None:
        if self._fails_after == point:
            self._fails_after, self._is_replay = None, point == "commit"
            self._task.undo()  # after the commit, this only discards the copy of the function
            raise InjectedFault(f"the batch fails after the {point}, as asked for")

    def _results(self, given: Result, begun: BatchTimes, times: RowTimes | None) -> list[Any]:
        self._fail("function")
        self._time.committed = self._time.after(begun, times)
        self._batch_id += 1
        if self._started is not None:
            self._started.committed(self._batch_id)
        self.outputs = {
            name: list(rows_of(rows)) if isinstance(rows, pa.Table) else rows for name, rows in given.items()
        }
        self._fail("commit")
        return self._main_output

    @property
    def _main_output(self) -> list[Any]:
        return next(iter(self.outputs.values()))

    # --- looking inside ---

    @property
    def keyed(self) -> KeyedStateBackend:
        """The keyed backend that the function works on."""
        return self._task.keyed

    @property
    def operator(self) -> OperatorStateBackend:
        """The operator state backend that the function works on."""
        operator: OperatorStateBackend = self._task.operator
        return operator

    @property
    def metrics(self) -> Metrics:
        """The function's counters."""
        return self._task.metrics

    # --- the end ---

    def close(self) -> None:
        """Close the function and drop its state. Idempotent."""
        if self._started is not None:
            self._started.close()
        if self._store is not None and self._folder is not None:
            self._store.close()
            self._folder.cleanup()
            self._store = self._folder = None

    def __enter__(self) -> Harness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_table(rows: list[dict[str, Any]]) -> pa.Table:
    """The rows of dicts, with a column for each name that any of them has."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _as_column([row.get(name) for row in rows], name) for name in names})


def _as_column(values: list[Any], name: str) -> pa.Array:
    try:
        return pa.array([None if is_not_a_time(value) else value for value in values])
    except (pa.ArrowException, OverflowError) as error:
        raise usage.rows(
            "values of the rows are of several types, or of none that a batch can have",
            detail=f"column {name!r}",
            hint="give an Arrow table, which says the type of each column",
        ) from error


def _as_dict(row: Any, at: int) -> dict[str, Any]:
    """A row by its names."""
    if isinstance(row, dict):
        return row
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    names = getattr(row, "__fields__", None) or getattr(row, "_fields", None)
    if names is None:
        raise usage.rows(
            f"row {at} of the batch is a {type(row).__name__}, which lacks names",
            hint="give dicts, named tuples, dataclasses or Spark rows, or an Arrow table",
        )
    return dict(zip(names, row, strict=True))
