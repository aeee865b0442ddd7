"""The calls of a function in one batch: with rows one by one, or with all rows of a key at once.

A `FunctionCalls` object is made for each batch. `run` brings the rows of the batch to the function, then `fire_all` its
timers.

In a job with ``on_error="route"``, the changes of a failed call are undone, and its row goes to an output. An exit,
such as `SystemExit`, `KeyboardInterrupt` or `asyncio.CancelledError`, is no `Exception` and ends the batch.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from statebackend._core.handles.row_loop import RowTimes as TimesOfRows, run_rows
from statebackend.columns.nested_columns import encoded_keys
from statebackend.errors import (
    ClosedError,
    CommitConflictError,
    CorruptCheckpointError,
    MemoryLimitError,
    MutationError,
    StateBackendError,
    StoreError,
)
from statebackend.functions import (
    BatchProcessFunction,
    FunctionContext,
    KeyedProcessFunction,
    KeyRowsFunction,
    WholeKeysFunction,
)
from statebackend.functions.context import BatchPosition
from statebackend.keys import VOID, canonical_column, key_encoder
from statebackend.operator_state import OperatorStateBackend
from statebackend.runtime.arrow_rows import row_maker, rows_of
from statebackend.runtime.batch_rows import Batch, ChunkedBatch, keys_of
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.job import ERROR_COLUMNS, Job
from statebackend.runtime.output import BatchOutput
from statebackend.state import DOMAINS, BackendMark, KeyedStateBackend

_log = logging.getLogger(__name__)


def is_interrupt(error: BaseException) -> bool:
    """Return True if the user may have interrupted the program: Python raises that in the main thread alone.

    >>> is_interrupt(KeyboardInterrupt()), is_interrupt(SystemExit())
    (True, False)
    """
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def summary(error: BaseException) -> str:
    """The class of an error and its text, in one line if the text is one."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(error: object) -> str:
    """The text of an error, whose class is the user's and may fail at that too."""
    try:
        # PySpark sends it to the JVM in UTF-8, which excludes lone surrogates.
        return str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    except BaseException as other:  # noqa: BLE001 - any: another error is to be told
        return f"its text cannot be had: {type(other).__name__}"


#: Errors that are not a row's fault: these fail the batch.
_NOT_OF_A_ROW = (
    MemoryError,
    MemoryLimitError,
    StoreError,
    CorruptCheckpointError,
    CommitConflictError,
    ClosedError,
    MutationError,
)


def described(error: Exception) -> tuple[str, str | None]:
    """The class of an error, and its code if it has one."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return name, error.code if isinstance(error, StateBackendError) else None


class FailedRows:
    """A mark for each row: `begin` before its call, then `passed` or `failed`.

    What a failed call has changed in keyed and operator state, returned or registered is undone.
    """

    def __init__(
        self,
        keyed: KeyedStateBackend,
        operator: OperatorStateBackend,
        given: BatchOutput,
        output: str | None,
    ) -> None:
        self._keyed = keyed
        self._operator = operator
        self._given = given
        #: The output that takes them; None: they are dropped.
        self._output = output
        self._marks: tuple[BackendMark, BackendMark] | None = None
        self._namespace: object = None
        self._kept: list[int] = []
        #: Numbers of rows of the piece, with their errors.
        self._failures: list[tuple[int, str, str | None]] = []
        #: How many rows have failed, by the class of the error.
        self.counts: Counter[str] = Counter()

    def begin(self) -> None:
        """A call begins."""
        self._namespace = self._keyed.current_namespace
        self._marks = (self._keyed.mark(), self._operator.mark())
        self._kept = [output.count for output in self._given.outputs.values()]

    def passed(self) -> None:
        """It has returned, and its rows have been taken."""
        self._release()

    def failed(self, at: int, error: Exception) -> None:
        """It has raised, for row ``at`` of the piece. Raises the error again if it is not that row's fault."""
        if isinstance(error, _NOT_OF_A_ROW):
            raise error
        self.take_back()
        name, code = described(error)
        self._failures.append((at, name, code))
        self.counts[name] += 1

    def take_back(self) -> None:
        """Return state, timers and outputs to their state at `begin`."""
        assert self._marks is not None
        keyed, operator = self._marks
        self._keyed.rollback(keyed)
        self._operator.rollback(operator)
        self._release()
        for output, count in zip(self._given.outputs.values(), self._kept, strict=True):
            output.cut(count)
        self._keyed.set_current_namespace(self._namespace)

    def _release(self) -> None:
        if self._marks is not None:
            (keyed, operator), self._marks = self._marks, None
            self._keyed.release(keyed)
            self._operator.release(operator)

    def settle(self, rows: pa.RecordBatch) -> None:
        """Give the rows of this piece that have failed to their output."""
        if not self._failures:
            return
        at, names, codes = zip(*self._failures, strict=True)
        self._failures = []
        if self._output is None:
            return
        taken = pa.Table.from_batches([rows]).take(pa.array(at))
        for name, values in zip(ERROR_COLUMNS, (names, codes), strict=True):
            taken = taken.append_column(name, pa.array(values, pa.string()))
        self._given.add_rows_as_they_are(self._output, taken)

    def tell(self, batch_id: int) -> None:
        """Say in the log how many rows have failed."""
        if self.counts:
            told = ", ".join(f"{name} {count:,}" for name, count in self.counts.most_common(5))
            _log.warning(
                "batch %d: %d rows failed, and %s: %s",
                batch_id,
                self.counts.total(),
                "were dropped" if self._output is None else f"went to the output {self._output!r}",
                told,
            )


EVENT, PROCESSING = DOMAINS


@dataclass(eq=False)
class FunctionCalls(ABC):
    """The calls of a function in one batch; ``after`` is the watermark after it."""

    job: Job
    keyed: KeyedStateBackend
    context: FunctionContext
    given: BatchOutput
    after: int | None

    def run(self, batch: Batch | ChunkedBatch) -> None:
        """Bring the rows of a batch to the function: those that are broadcast first, then the others in their order."""
        for rows, times in batch.broadcasts():
            self.run_broadcast(rows, times)
        has_run, empty = False, None
        for piece in batch.pieces():
            for output, rows in piece.aside:
                self.given.add_rows_as_they_are(output, rows)
            if piece.num_rows:
                self.run_rows(piece)
                has_run = True
            else:
                empty = piece
            self.given.settle()
        if empty is not None and not has_run:
            self.run_rows(empty)

    @abstractmethod
    def run_broadcast(self, rows: pa.Table, times: RowTimes | None) -> None:
        """Bring broadcast rows to the function."""

    @abstractmethod
    def run_rows(self, piece: Batch) -> None:
        """Bring the rows of a piece of a batch to the function; one without rows if the batch has none."""

    @abstractmethod
    def fire(self, domain: str, until: int) -> None:
        """Fire the timers of a domain that are due, all calls included that this leads to."""

    def fire_all(self, now: int) -> None:
        """Fire the timers that are due at the end of the batch, those in event time first."""
        if not self.keyed.has_timers:
            return
        next_due, has_fired = self.keyed.timers.next_due, True
        due = ((EVENT, self.after if self.job.event_time is not None else now), (PROCESSING, now))
        while has_fired:  # a timer of one domain may register one in the other
            has_fired = False
            for domain, until in due:
                first = next_due(domain)
                if first is not None and until is not None and first <= until:
                    self.fire(domain, until)
                    has_fired = True

    def leave_rows(self) -> None:
        """No row is at hand any more."""
        self.context._at = self.context._nowhere
        if self.job.event_time is not None:
            self.keyed.set_event_time(self.after)

    def forget_key(self) -> None:
        """No current key, and no namespace: neither may depend on the batch before, which a restart forgets."""
        self.keyed.clear_current_key()
        self.keyed.set_current_namespace(VOID)


#: Timers come in pieces of at most this many.
_TIMERS = 1_000_000


class BatchCalls(FunctionCalls):
    """The calls of a `BatchProcessFunction`: rows, broadcast rows and timers as columns."""

    def __init__(self, function: BatchProcessFunction, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._function = function

    def run_broadcast(self, rows: pa.Table, times: RowTimes | None) -> None:
        for each in rows.combine_chunks().to_batches():
            self.given.add_batches(self._function.process_broadcast(each, self.context))
        self.forget_key()

    def run_rows(self, piece: Batch) -> None:
        context, function = self.context, self._function
        for each in piece.rows.to_batches() or [pa.RecordBatch.from_pylist([], piece.rows.schema)]:
            context._keys = keys_of(self.job, each)
            try:
                self.given.add_batches(function.process_batch(each, context))
            finally:
                context._keys = None

    def fire(self, domain: str, until: int) -> None:
        context, timers, before = self.context, self.keyed.timers, self.context.watermark
        context.time_domain = domain
        if self.job.event_time is not None and domain == EVENT:
            context.watermark = timers._watermark = until if before is None else max(before, until)
        while True:
            self.forget_key()
            due = timers.take_due(until, domain, most=_TIMERS)
            if not len(due.timestamps):
                break
            self.given.add_batches(
                self._function.on_timers(due.keys, due.timestamps, due.namespaces, context)
            )
        context.time_domain, context.watermark = None, before
        timers._watermark = before


class WholeKeysCalls(BatchCalls):
    """The calls of a `WholeKeysFunction`, which fires its timers itself."""

    def __init__(self, function: WholeKeysFunction, *arguments: Any) -> None:
        super().__init__(function, *arguments)
        self._end_batch = function.end_batch

    def fire_all(self, now: int) -> None:
        self.forget_key()
        self.given.add_batches(self._end_batch(self.context, self.after))
        self.forget_key()


#: Rows come in parts of this many.
_PART = 65_536


class _HasTime(Protocol):
    @property
    def timestamp(self) -> int | None: ...


class _KeyedCalls(FunctionCalls):
    """Timers one by one, with their key current, and broadcast rows."""

    def __init__(self, function: KeyedProcessFunction | KeyRowsFunction, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._on_timer, self._process_broadcast = function.on_timer, function.process_broadcast

    def run_broadcast(self, rows: pa.Table, times: RowTimes | None) -> None:
        context = self.context
        for at, row in enumerate(rows_of(rows)):
            if times is not None:
                context._at = BatchPosition(None if times.is_null[at] else int(times.own[at]))
            self.given.add(self._process_broadcast(row, context))
        self.leave_rows()
        self.forget_key()

    def fire(self, domain: str, until: int) -> None:
        """Fire the timers of a domain that are due.

        In event time, states use the time of the timer meanwhile, and the watermark is the one that fires it: a timer
        that is registered for later than that is not due yet.
        """
        context, timers, before = self.context, self.keyed.timers, self.context.watermark
        has_event_time = self.job.event_time is not None and domain == EVENT
        context.time_domain = domain
        if has_event_time:
            context.watermark = timers._watermark = until if before is None else max(before, until)
        for timestamp in timers.due(until, domain):
            if has_event_time:
                context._at = BatchPosition(timestamp)
                self.keyed.set_event_time(timestamp)
            self.given.add(self._on_timer(timestamp, context))
        context.time_domain = None
        if has_event_time:
            context.watermark = timers._watermark = before
            self.leave_rows()


class RowCalls(_KeyedCalls):
    """The calls of a `KeyedProcessFunction`; ``guard`` stands around each row of a job that routes rows that fail."""

    def __init__(self, function: KeyedProcessFunction, guard: FailedRows | None, *arguments: Any) -> None:
        super().__init__(function, *arguments)
        self._process, self._guard = function.process_element, guard

    def run_rows(self, piece: Batch) -> None:
        is_composite = not isinstance(self.job.key, str)
        places = tuple(map(piece.rows.column_names.index, self.job.columns))
        for part, times in _parts(piece):
            run_rows(
                row_maker(part),
                places,
                is_composite,
                self.keyed,
                self._process,
                self.context,
                self.given.output,
                times,
                None if times is None else self._before_each(times),
                self._guard,
            )
            if self._guard is not None:
                self._guard.settle(part)
            self.given.settle()
        self.leave_rows()

    def _before_each(self, here: _HasTime) -> Callable[[], None] | None:
        """Make ``here`` the row at hand; return what fires the timers that are due before it, if they come in order.

        All rows are in the order of their times, so that the timers of other keys that are due by this row's time are
        due before all their rows to come too.
        """
        self.context._at = here
        event_time = self.job.event_time
        if event_time is None or not self.job.is_in_order or not self.keyed.has_timers:
            return None
        delay, next_due, after = event_time.watermark_delay, self.keyed.timers.next_due, self.after
        assert isinstance(delay, int)

        def fire() -> None:
            first = next_due(EVENT)
            if first is None or here.timestamp is None or after is None:
                return
            until = min(here.timestamp - delay, after)
            if first <= until:
                self.fire(EVENT, until)
                self.context._at = here

        return fire


class KeyRowsCalls(_KeyedCalls):
    """The calls of a `KeyRowsFunction`: each key of the batch once, in the order of their first rows.

    A batch in pieces has its rows sorted by key, so that each key is in one piece.
    """

    def __init__(self, function: KeyRowsFunction, *arguments: Any) -> None:
        super().__init__(function, *arguments)
        self._process = function.process_rows

    def run_rows(self, piece: Batch) -> None:
        if not piece.num_rows:
            return
        places = list(map(piece.rows.column_names.index, self.job.columns))
        is_composite = not isinstance(self.job.key, str)
        order, ends = _by_key(encoded_keys(key_encoder(self.keyed.key_type), piece.keys))
        rows = rows_of(piece.rows.take(order))
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            of_key = [next(rows) for _ in range(end - begin)]
            first = of_key[0]
            self._run_key(tuple(first[at] for at in places) if is_composite else first[places[0]], of_key)
            if end // _PART != begin // _PART:
                self.given.settle()

    def _run_key(self, key: object, rows: list[Any]) -> None:
        self.keyed.set_current_key(key)
        self.given.output.take(self._process(self.keyed.current_key, rows, self.context))


def _parts(batch: Batch) -> Iterator[tuple[pa.RecordBatch, TimesOfRows | None]]:
    """The rows of a piece of a batch in small parts, with the times of each."""
    times, by = batch.times, None if batch.times is None else batch.times.by
    at = 0
    for start in range(0, batch.rows.num_rows, _PART):
        for part in batch.rows.slice(start, _PART).to_batches():
            end = at + part.num_rows
            if times is None or by is None:
                yield part, None
            else:
                yield (part, TimesOfRows(times.own[at:end], by[at:end], times.is_null[at:end].view(np.uint8)))
            at = end


def _by_key(canonical: Any) -> tuple[pa.Array, list[int]]:
    """The numbers of the rows, each key's together, keys in the order of their first rows; where each key ends.

    >>> order, ends = _by_key(np.array([7, 3, 7]))
    >>> order.tolist(), ends
    ([0, 2, 1], [2, 3])
    """
    numbers = canonical_column(canonical).dictionary_encode().indices.to_numpy()
    ends: list[int] = np.cumsum(np.bincount(numbers)).tolist()
    return np.argsort(numbers, kind="stable"), ends
