"""Running a function without Spark, on the real backends, and a clock that tests set.

>>> from statebackend.functions import map_with_state
>>> def total(row, before):
...     after = (before or 0) + row.n
...     return (row.user, after), after
>>> harness = Harness(map_with_state(total, int), str, key="user")
>>> harness.process_batch([{"user": "ann", "n": 1}, {"user": "bob", "n": 5}, {"user": "ann", "n": 2}])
[('ann', 1), ('bob', 5), ('ann', 3)]
>>> harness.close()
"""

from __future__ import annotations

import dataclasses
import operator
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, CheckpointStore
from statebackend.errors import UsageError
from statebackend.functions import EventTime, Metrics, ProcessFunction, Rule
from statebackend.operator_state import OperatorStateBackend
from statebackend.runtime import Batch, Job, Task
from statebackend.runtime.arrow_rows import rows_of
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.runtime.batch_rows import late_rows
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.execution import BatchTime, BatchTimes
from statebackend.runtime.output import Result
from statebackend.state import Duration, KeyedStateBackend, StateBackend, clocks, milliseconds
from statebackend.types import is_not_a_time, of, row_class


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
        raise UsageError(
            f"a {type(value).__name__} is not a number of milliseconds", hint="write an int"
        ) from None


class Harness:
    """Runs a function as a job does: on copies of it, with its state, and with time that stands still within a batch.

    Every call of ``process_...`` is a batch of its own: if it raises, state is as before, and the next call gets a
    fresh copy of the function. Each returns the rows of the main output: as the function gave them or, with a
    ``schema``, as they come back from Arrow. `outputs` has those of all.

    ``key`` names the column or columns of the key; `process_batch` needs it. The other options are those of
    ``sb.spark.stateful``. If you pass no clock, it uses a `ManualClock`.

    >>> from statebackend.functions import map_with_state
    >>> with Harness(map_with_state(lambda row, n: (None, (n or 0) + row.n), int), str) as harness:
    ...     harness.process_element("ann", {"n": 3})
    ...     list(harness.keyed.keys("state"))
    []
    ['ann']
    """

    def __init__(
        self,
        function: ProcessFunction,
        key_type: Any,
        *,
        key: str | Sequence[str] | None = None,
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
        self._has_key = key is not None
        self._job = Job(
            function,
            key="key" if key is None else key,
            schema=schema,
            backend=backend,
            max_parallelism=max_parallelism,
            event_time=event_time,
            order_by=order_by,
            broadcast_when=broadcast_when,
            null_keys=null_keys,
            errors=errors,
        )
        self._key_type = of(key_type)
        #: The clock: set it, or advance it, between two steps.
        self.clock = ManualClock() if clock is None else clocks.checked_clock(clock)
        self._time = BatchTime(self._job, self.clock)
        self._batch_id = -1
        self._task = Task(self._job, self._key_type)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: CheckpointStore | None = None
        self._checkpoint_id = -1
        #: The rows that the last batch gave to each output; those of the main one are what the call returned.
        self.outputs: dict[str, list[Any]] = {name: [] for name in self._job.outputs}

    def __repr__(self) -> str:
        name = type(self._job.function).__name__.strip("_")
        return f"<Harness of {name}, key {self._key_type!r}, batch {self._batch_id}, {self._job.backend!r}>"

    # --- steps ---

    def process_element(self, key: Any, row: Any) -> list[Any]:
        """Run the function over one row of a key. The row is a dict, or a tuple, which is passed on as it is.

        In a job with event time, the time of a row is its value of that name; a plain tuple has none.

        >>> from statebackend.functions import map_with_state
        >>> with Harness(map_with_state(lambda row, n: ((row.n,), None), int), str) as harness:
        ...     harness.process_element("ann", {"n": 3})
        [(3,)]
        """
        if self._job.is_batch:
            raise UsageError("a BatchProcessFunction takes batches", hint="call process_batch")
        if isinstance(row, dict):
            row = row_class(tuple(row))(*row.values())
        begun, event_time, pairs = self._time.begin(), self._job.event_time, [(key, row)]
        if event_time is None:
            return self._run(pairs, begun, None)
        time = getattr(row, event_time.column, None)
        times = RowTimes.of_one(
            event_time, time, watermark=begun.watermark, clock=begun.clock, idle=begun.idle
        )
        if times.is_on_time[0] or event_time.late == "keep":
            return self._run(pairs, begun, times)
        if event_time.late == "fail":
            raise late_rows(times.num_late, times.num_ahead)
        late = [] if self._job.late_output is None else [row]
        return self._run([], begun, times.take(times.is_on_time), late)

    def process_batch(self, rows: Any) -> list[Any]:
        """Run the function over a batch: an Arrow table or record batch, or a list of rows with names.

        These are dicts, named tuples, dataclasses or Spark rows. What a row has no name for is null.

        >>> from statebackend.functions import map_with_state
        >>> with Harness(map_with_state(lambda row, n: ((row.n,), None), int), str, key="user") as harness:
        ...     harness.process_batch(pa.table({"user": ["ann"], "n": [3]}))
        [(3,)]
        """
        if not self._has_key:
            raise UsageError(
                "a batch needs to know its key", hint="name the column: Harness(..., key='user')"
            )
        if isinstance(rows, pa.RecordBatch):
            rows = pa.Table.from_batches([rows])
        elif not isinstance(rows, pa.Table):
            rows = _as_table([_as_dict(row, at) for at, row in enumerate(rows)])
        begun = self._time.begin()
        batch = Batch(self._job, rows, watermark=begun.watermark, clock=begun.clock, idle=begun.idle)
        given = self._task.run(self._batch_id + 1, batch, begun.now)
        return self._results(given, begun, batch.times)

    def advance_time(self, to: int) -> list[Any]:
        """Advance time to ``to`` milliseconds, without rows: timers that are due fire. Never goes back.

        In a job with event time, the watermark goes there, too.

        >>> from statebackend.functions import map_with_state
        >>> with Harness(map_with_state(lambda row, n: ((row.n,), None), int), str) as harness:
        ...     harness.advance_time(60_000)
        []
        """
        if isinstance(self.clock, ManualClock):
            self.clock.set(max(to, self.clock.now()))
        now, watermark, _ = self._time.committed
        return self._passed(max(to, now or 0), to if watermark is None else max(to, watermark))

    def advance_watermark(self, to: int) -> list[Any]:
        """Advance the watermark to ``to`` milliseconds, as rows of other keys would: timers that are due fire.

        The clock stays. Never goes back.

        >>> from statebackend.functions import map_with_state
        >>> function = map_with_state(lambda row, n: ((row.n,), None), int)
        >>> with Harness(function, int, event_time="at") as harness:
        ...     harness.advance_watermark(60_000)
        ...     harness.watermark
        []
        60000
        """
        if self._job.event_time is None:
            raise UsageError(
                "a watermark needs rows that tell the time",
                hint="name their column: Harness(..., event_time='at')",
            )
        watermark = self._time.committed.watermark
        return self._passed(self._time.begin().now, to if watermark is None else max(to, watermark))

    def _passed(self, now: int, watermark: int) -> list[Any]:
        times, before = None, self._time.committed.watermark
        if self._job.event_time is not None:
            times = RowTimes.of_none(before, watermark)
        return self._run([], BatchTimes(now, now, before), times)

    @property
    def watermark(self) -> int | None:
        """The watermark after the last batch; None before any row that told a time."""
        return self._time.committed.watermark

    # --- checkpoints ---

    def snapshot(self) -> Checkpoint:
        """Take a checkpoint of all state, as a job would write it, and return it for `restore`."""
        if self._store is None:
            self._folder = tempfile.TemporaryDirectory(prefix="statebackend-harness-")
            # Every checkpoint stays as long as the harness does.
            self._store = CheckpointStore(self._folder.name, retain=1_000_000)
            self._store.open_for_writing(key_type=self._key_type, max_parallelism=self._job.max_parallelism)
        self._checkpoint_id += 1
        pending = self._task.snapshot(self._checkpoint_id, self._store)
        now, watermark, rows_at = self._time.committed
        told_by = "clock" if self._job.event_time is None else "rows"
        return self._store.commit(
            self._checkpoint_id,
            [each.result() for each in pending],
            now=now or 0,
            watermark=watermark,
            batch=BatchRecord(time=told_by, rows_at=rows_at).to_json(),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, with a fresh copy of the function and nothing else from memory."""
        self._task.close()
        self._time.begin_with(checkpoint)
        self._task = Task(self._job, self._key_type, restore=checkpoint, restored_id=checkpoint.id)

    def restart(self) -> None:
        """Stop and start the job: `snapshot`, then `restore` from it."""
        self.restore(self.snapshot())

    def _run(
        self, pairs: list[Any], begun: BatchTimes, times: RowTimes | None, late: Sequence[object] = ()
    ) -> list[Any]:
        given = self._task.run_pairs(self._batch_id + 1, pairs, begun.now, times, late)
        return self._results(given, begun, times)

    def _results(self, given: Result, begun: BatchTimes, times: RowTimes | None) -> list[Any]:
        self._time.committed = self._time.after(begun, times)
        self._batch_id += 1
        self._task.committed(self._batch_id)
        self.outputs = {
            name: list(rows_of(rows)) if isinstance(rows, pa.Table) else rows for name, rows in given.items()
        }
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
        self._task.close()
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
        raise UsageError(
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
        raise UsageError(
            f"row {at} of the batch is a {type(row).__name__}, which has no names",
            hint="give dicts, named tuples, dataclasses or Spark rows, or an Arrow table",
        )
    return dict(zip(names, row, strict=True))
