"""The calls of a Spark ``StatefulProcessor`` in a batch, as a function of the library.

A fresh copy of the processor is made for each batch. In a batch come ``init``, the rows of each key, the timers that
are due, and ``close``. The function opens a copy before the first batch too, whose ``init`` declares the variables.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import pyarrow as pa
from pyspark.cloudpickle import dumps
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues

from statebackend.errors import UsageError, usage
from statebackend.functions import EngineFrame, EventTime, FunctionContext, WholeKeysFunction
from statebackend.keys import key_encoder
from statebackend.runtime.arrow_rows import OutputSchema
from statebackend.spark_functions.batch_clock import (
    NO_TIME,
    BatchClock,
    checked_event_time,
    event_time_on,
    without_late,
)
from statebackend.spark_functions.processor_handle import DOMAINS, ProcessorHandle, Step
from statebackend.spark_functions.spark_rows import MOST_ROWS, ZONE, KeyRows, RowsOut, most_rows, rows_by_key
from statebackend.spark_functions.state_variables import shown

TIME_MODES = ("None", *DOMAINS)


def time_mode_of(given: Any) -> str:
    """A time mode as Spark takes it, in any case.

    >>> time_mode_of("processingtime")
    'ProcessingTime'
    """
    modes = {mode.lower(): mode for mode in TIME_MODES}
    if not isinstance(given, str) or given.lower() not in modes:
        raise UsageError(
            f"[STATEFUL_PROCESSOR_UNKNOWN_TIME_MODE] Unknown time mode {given}. Accepted timeMode modes are 'none', "
            "'processingTime', 'eventTime'",
            code="USAGE.TIME_MODE",
        )
    return modes[given.lower()]


class ProcessorFunction(WholeKeysFunction):
    """A function that calls a processor with rows."""

    settings: tuple[str, ...] = (ZONE, MOST_ROWS)

    def __init__(
        self,
        processor: StatefulProcessor,
        *,
        key: tuple[str, ...],
        output_schema: OutputSchema,
        time_mode: str,
        output_mode: str = "Append",
        event_time: str | EventTime | None = None,
        initial_state: pa.Table | None = None,
    ) -> None:
        if not isinstance(processor, StatefulProcessor):
            raise usage.function(
                f"a {type(processor).__name__} is no StatefulProcessor",
                hint="pass an object of a class that derives from pyspark.sql.streaming.StatefulProcessor",
            )
        self._pickled: bytes = dumps(processor)  # type: ignore[no-untyped-call]
        self.name = type(processor).__name__
        self._key = key
        self._schema = output_schema
        self._time_mode = time_mode
        self.fixed = {"timeMode": time_mode, "outputMode": output_mode.capitalize()}
        self._given = checked_event_time(event_time)
        self._event_time: EventTime | None = None
        #: The rows of the initial state, whose columns of the key have the same names.
        self._initial = initial_state
        self._timezone = "UTC"
        self._settings: Mapping[str, str] = {}
        self._processor: Any = None
        self._handle: ProcessorHandle | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name}>"

    # --- the frame and the life of the function ---

    def on_frame(self, frame: EngineFrame) -> EventTime | None:
        self._settings = frame.settings
        self._timezone = frame.settings.get(ZONE, "UTC")
        if self._time_mode == "EventTime":
            self._event_time = event_time_on(frame, self._given)
        return self._event_time

    def open(self, ctx: FunctionContext) -> None:
        processor = pickle.loads(self._pickled)
        processor.init(ProcessorHandle(ctx, self._time_mode, Step.PRE_INIT))
        processor.close()

    def _begun(self, ctx: FunctionContext) -> tuple[Any, ProcessorHandle]:
        """The processor of the running batch, and its handle."""
        if self._handle is None:
            handle = ProcessorHandle(ctx, self._time_mode)
            self._processor = pickle.loads(self._pickled)
            self._handle = handle
            self._processor.init(handle)
            handle.step = Step.INITIALIZED
        return self._processor, self._handle

    def close(self) -> None:
        self._processor = self._handle = None

    def _timer_values(self, clock: BatchClock) -> TimerValues:
        if self._time_mode == "None":
            return TimerValues(NO_TIME, NO_TIME)
        return TimerValues(clock.now, clock.watermark)

    # --- the batch ---

    def process_batch(self, batch: pa.RecordBatch, ctx: FunctionContext) -> Iterator[pa.RecordBatch]:
        clock = BatchClock.of(ctx)
        batch = without_late(batch, self._event_time, clock, ctx)
        processor, handle = self._begun(ctx)
        handle_rows, values = processor.handleInputRows, self._timer_values(clock)
        if self._initial is not None and ctx.batch_id == 0 and not handle.has_initial_state:
            handle.has_initial_state = True
            began = perf_counter()
            self._take_initial(processor, ctx, values)
            handle.counts["initialStateProcessingTimeMs"] += round((perf_counter() - began) * 1000)
        if not batch.num_rows:
            return
        out = self._out()
        take, pending, few, set_key = out.take, out.pending, out.few, ctx.keyed_backend.set_current_key
        for stored, key, rows in self._groups(batch):
            set_key(stored)
            take(handle_rows(key, rows, values))
            if len(pending) >= few:
                yield from out.settled()
        yield from out.taken()

    def _take_initial(self, processor: Any, ctx: FunctionContext, values: TimerValues) -> None:
        """Give the initial state to the processor, of the keys that belong to this instance."""
        assert self._initial is not None
        encoder, backend = key_encoder(ctx.keyed_backend.key_type), ctx.keyed_backend
        own = backend.key_group_range
        for batch in self._initial.combine_chunks().to_batches():
            for stored, key, rows in self._groups(batch):
                if own.start <= encoder.key_group(stored, backend.max_parallelism) <= own.end:
                    backend.set_current_key(stored)
                    for row in rows:
                        processor.handleInitialState(key, row, values)

    def _groups(self, batch: pa.RecordBatch) -> Iterator[KeyRows]:
        """Each key of a batch, as state has it and as the processor gets it, with its rows or frames."""
        # Spark calls a processor with an initial state once for each piece of a key.
        most = None if self._initial is None else most_rows(self._settings)
        return rows_by_key(batch, self._key, self._timezone, most)

    def end_batch(self, ctx: FunctionContext, after: int | None) -> Iterator[pa.RecordBatch]:
        for clock in BatchClock.of(ctx).rounds(ctx, after):
            yield from self._fired(ctx, clock)

    def _fired(self, ctx: FunctionContext, clock: BatchClock) -> Iterator[pa.RecordBatch]:
        """A round of timers, and the end of the processor."""
        processor, handle = self._begun(ctx)
        handle.step = Step.DATA_PROCESSED
        out, values, began = self._out(), self._timer_values(clock), perf_counter()
        until = clock.now if self._time_mode == "ProcessingTime" else clock.watermark
        made: Any = shown(ctx.keyed_backend.key_type)
        for key, time in handle.due(until):
            out.take(
                processor.handleExpiredTimer(
                    key=made(key), timerValues=values, expiredTimerInfo=ExpiredTimerInfo(time)
                )
            )
            handle.counts["numExpiredTimers"] += 1
            if len(out.pending) >= out.few:
                yield from out.settled()
        handle.counts["timerProcessingTimeMs"] += round((perf_counter() - began) * 1000)
        handle.step = Step.TIMER_PROCESSED
        ctx.keyed_backend.clear_current_key()
        processor.close()
        handle.step = Step.CLOSED
        yield from out.taken()
        handle.tell(ctx.metrics)
        self._processor = self._handle = None

    def _out(self) -> Any:
        return RowsOut(self._schema)
