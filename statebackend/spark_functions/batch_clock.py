"""The times of a batch as Spark has them: its own time, the watermark that fires timers, and the one for late rows.

Spark's plan tells them (`PlannedTimes`). Where it cannot be read, they are the job's: its clock, and the
watermark of the rows before the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from statebackend.errors import UsageError, usage
from statebackend.functions import EngineFrame, EventTime, FunctionContext
from statebackend.keys import time_column

_log = logging.getLogger("statebackend.spark")

#: The time that a mode without it has.
NO_TIME = -1


class BatchClock(NamedTuple):
    """The times of one round of calls, in milliseconds."""

    #: The time of the batch; the watermark; the one through which rows are late.
    now: int
    watermark: int
    late: int

    @classmethod
    def of(cls, ctx: FunctionContext) -> BatchClock:
        """The times of the running batch."""
        if ctx._planned is not None:
            return cls(ctx._planned.now, ctx._planned.watermark, ctx._planned.late)
        watermark = ctx.watermark or 0
        return cls(ctx.now, watermark, watermark)

    def rounds(self, ctx: FunctionContext, after: int | None) -> Iterator[BatchClock]:
        """The rounds of timers of the batch: one, and one as in the batch without rows that Spark would run next.

        Spark runs such a batch when the watermark ``after`` the rows is past the batch's.
        """
        yield self
        if None not in (ctx._planned, ctx.watermark) and self.watermark != ctx.watermark:
            _log.warning(
                "the watermark of batch %d is %d, and its rows before lead to %d: timers of the round without rows may "
                "have fired at another time than in Spark",
                ctx.batch_id,
                self.watermark,
                ctx.watermark,
            )
        runs_on = ctx._planned is None or ctx._planned.runs_without_rows
        if runs_on and after is not None and after > self.watermark:
            yield self._replace(watermark=after, late=self.watermark)


def event_time_on(frame: EngineFrame, given: str | EventTime | None) -> EventTime:
    """The event time of a job: Spark's own watermark, or ``event_time=`` for frames without one."""
    named = EventTime(given) if isinstance(given, str) else given
    if frame.watermark is None:
        if named is None:
            raise UsageError(
                "time_mode='EventTime' needs a watermark",
                code="USAGE.NO_EVENT_TIME",
                hint="call withWatermark on the frame, or pass event_time=EventTime(column, watermark_delay=...)",
            )
        return named
    column, delay = frame.watermark
    if named is not None and named.column != column:
        raise usage.option(
            f"event_time= names {named.column!r}, and the watermark of the frame is on another column",
            detail=f"column {column!r}",
            hint="leave event_time= out",
        )
    if named is not None and named.watermark_delay:
        raise usage.option(
            "watermark_delay= was given, and the frame has a watermark", hint="leave event_time= out"
        )
    return EventTime(column, watermark_delay=delay)


def without_late(
    batch: pa.RecordBatch, event_time: EventTime | None, clock: BatchClock, ctx: FunctionContext
) -> pa.RecordBatch:
    """The rows whose time is after the watermark for late rows, or null. Counts the others."""
    if event_time is None:
        return batch
    own, is_null = time_column(batch.column(event_time.column), "the event-time column")
    kept = np.asarray(is_null | (own > clock.late))
    ctx.metrics.counter("numRowsDroppedByWatermark").inc(int(len(kept) - kept.sum()))
    return batch if bool(kept.all()) else batch.filter(pa.array(kept))


def checked_event_time(given: Any) -> str | EventTime | None:
    """``event_time=`` itself; refuses settings of `EventTime` that Spark's functions have no use for."""
    if given is None or (isinstance(given, str) and given):
        return given
    if not isinstance(given, EventTime):
        raise usage.option("event_time is the name of a column, or an EventTime of one")
    for name, default in (("late", "keep"), ("timers", None), ("idle_after", None), ("max_ahead", None)):
        if getattr(given, name) != default:
            raise usage.option(
                f"EventTime({name}=) has no effect on Spark's own functions; expected {name}={default!r}"
            )
    return given
