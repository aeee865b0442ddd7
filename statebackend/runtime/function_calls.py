"""The calls of a function in one batch: with rows one by one, or with all rows of a key at once.

A `FunctionCalls` object is made for each batch. `run` brings the rows of the batch to the function, then `fire_all` its
timers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from statebackend._core.handles.row_loop import RowTimes as TimesOfRows
from statebackend._core.handles.row_loop import run_rows
from statebackend.columns.nested_columns import encoded_keys
from statebackend.functions import (
    BatchProcessFunction,
    FunctionContext,
    KeyedProcessFunction,
    KeyRowsFunction,
)
from statebackend.functions.context import BatchPosition
from statebackend.keys import VOID, canonical_column, key_encoder
from statebackend.runtime.arrow_rows import row_maker, rows_of
from statebackend.runtime.batch_rows import Batch, ChunkedBatch, keys_of
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.failed_rows import FailedRows
from statebackend.runtime.job import Job
from statebackend.runtime.output import BatchOutput
from statebackend.state import DOMAINS, KeyedStateBackend

EVENT, PROCESSING = DOMAINS
Pair: TypeAlias = tuple[object, object]


class FunctionCalls(ABC):
    """The calls of a function in one batch; ``after`` is the watermark after it."""

    def __init__(
        self,
        job: Job,
        keyed: KeyedStateBackend,
        context: FunctionContext,
        given: BatchOutput,
        after: int | None,
    ) -> None:
        self.job = job
        self.keyed = keyed
        self.context = context
        self.given = given
        self.after = after

    def run(self, batch: Batch | ChunkedBatch) -> None:
        """Bring the rows of a batch to the function: those that are broadcast first, then the others in their order."""
        for rows, times in batch.broadcasts():
            self.run_broadcast(rows, times)
        has_run, empty = False, None
        for piece in batch.pieces():
            if piece.late is not None and self.job.late_output is not None:
                self.given.add_rows_as_they_are(self.job.late_output, piece.late)
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
    def run_pairs(self, pairs: Sequence[Pair], times: RowTimes | None) -> None:
        """Bring rows that a harness gives to the function."""

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

    def run_pairs(self, pairs: Sequence[Pair], times: RowTimes | None) -> None:
        """Only time goes on: a harness gives whole batches to such a function."""

    def fire(self, domain: str, until: int) -> None:
        context = self.context
        before = context.watermark
        if self.job.event_time is not None and domain == EVENT:
            context.watermark = until if before is None else max(before, until)
        while True:
            self.forget_key()
            due = self.keyed.timers.take_due(until, domain, most=_TIMERS)
            if not len(due.timestamps):
                break
            self.given.add_batches(
                self._function.on_timers(due.keys, due.timestamps, due.namespaces, context)
            )
        context.watermark = before


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

        In event time, states go by the time of the timer meanwhile, and the watermark is the one that fires it: a timer
        that is registered for later than that is not due yet.
        """
        context = self.context
        has_event_time, before = self.job.event_time is not None and domain == EVENT, context.watermark
        if has_event_time:
            context.watermark = until if before is None else max(before, until)
        for timestamp in self.keyed.timers.due(until, domain):
            if has_event_time:
                context._at = BatchPosition(timestamp)
                self.keyed.set_event_time(timestamp)
            self.given.add(self._on_timer(timestamp, context))
        if has_event_time:
            context.watermark = before
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

    def run_pairs(self, pairs: Sequence[Pair], times: RowTimes | None) -> None:
        by = None if times is None else times.by.tolist()
        for at, (key, row) in enumerate(pairs):
            if times is not None and by is not None:
                before_row = self._before_each(
                    BatchPosition(None if times.is_null[at] else int(times.own[at]))
                )
                if before_row is not None:
                    before_row()
                self.keyed.set_event_time(by[at])
            self.keyed.set_current_key(key)
            self._run_row(row)
        self.leave_rows()

    def _run_row(self, row: object) -> None:
        guard, output = self._guard, self.given.output
        if guard is None:
            output.take(self._process(row, self.context))
            return
        guard.begin()
        try:
            output.take(self._process(row, self.context))
        except Exception as error:  # noqa: BLE001 - any that the user's code raises
            guard.failed(0, error)
        else:
            guard.passed()
        guard.settle_row(row)

    def _before_each(self, here: _HasTime) -> Callable[[], None] | None:
        """Make ``here`` the row at hand; return what fires the timers that are due before it, if they come in order.

        All rows are in the order of their times, so that the timers of other keys that are due by this row's time are
        due before all their rows to come, too.
        """
        self.context._at = here
        event_time = self.job.event_time
        if event_time is None or not event_time.is_in_order or not self.keyed.has_timers:
            return None
        delay, next_due, after = event_time.delay, self.keyed.timers.next_due, self.after
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

    def run_pairs(self, pairs: Sequence[Pair], times: RowTimes | None) -> None:
        for key, row in pairs:
            self._run_key(key, [row])

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
    """The numbers of the rows, those of each key together, keys in the order of their first rows; where each key ends.

    >>> order, ends = _by_key(np.array([7, 3, 7]))
    >>> order.tolist(), ends
    ([0, 2, 1], [2, 3])
    """
    numbers = canonical_column(canonical).dictionary_encode().indices.to_numpy()
    ends: list[int] = np.cumsum(np.bincount(numbers)).tolist()
    return np.argsort(numbers, kind="stable"), ends
