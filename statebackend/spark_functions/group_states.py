"""The calls of a function for ``applyInPandasWithState``, as a function of the library.

The states of all keys of a batch are read by one call and written by one. A group state is a value state with Spark's
fields, ``groupState`` and ``timeoutTimestamp``; a timer represents the timeout. The rules are Spark 4.3's:

* A call gets a ``GroupState`` without a timeout. A call that updates, removes or sets a timeout replaces the state and
  its timeout. A call that does none of it leaves both, and the key times out again in the next batch.
* A key times out before the time of the batch, or before the watermark. A key that had rows times out too.
* The frame of a timeout is empty.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.cloudpickle import dumps
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from statebackend.errors import SerializationError, UsageError, usage
from statebackend.functions import EngineFrame, EventTime, FunctionContext, WholeKeysFunction
from statebackend.runtime.arrow_rows import OutputSchema, column_values
from statebackend.spark_functions.batch_clock import (
    BatchClock,
    checked_event_time,
    event_time_on,
    without_late,
)
from statebackend.spark_functions.group_frames import (
    SETTINGS,
    GroupFrames,
    GroupFramesOut,
    empty_frame,
    scalars,
)
from statebackend.spark_functions.spark_rows import PART, ZONE
from statebackend.spark_functions.state_variables import converted, fields_shown, shown
from statebackend.state import ValueStateDescriptor
from statebackend.types import LONG, ROW, RowType

STATE = "groupState"
#: The domain of the timers of timeouts, under any timeout setting: as in Spark, another one may be chosen later.
TIMERS = "processing"
TIMEOUTS = (
    GroupStateTimeout.NoTimeout,
    GroupStateTimeout.ProcessingTimeTimeout,
    GroupStateTimeout.EventTimeTimeout,
)
_NONE = GroupState.NO_TIMESTAMP


def group_state(kind: RowType) -> ValueStateDescriptor:
    """The state of groups whose state has this type."""
    return ValueStateDescriptor(STATE, ROW(groupState=kind, timeoutTimestamp=LONG))


class GroupStateFunction(WholeKeysFunction):
    """A function that calls one for ``applyInPandasWithState`` with the frames of each key."""

    settings = SETTINGS

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        key: tuple[str, ...],
        output_schema: OutputSchema,
        state_type: RowType,
        timeout_conf: Any,
        event_time: str | EventTime | None = None,
    ) -> None:
        if not callable(function):
            raise usage.function(
                f"a {type(function).__name__} is not a function",
                hint="pass func(key, frames, state), as to applyInPandasWithState",
            )
        if timeout_conf not in TIMEOUTS:
            raise UsageError(
                f"unknown timeout_conf {timeout_conf!r}; expected one of {', '.join(TIMEOUTS)}",
                code="USAGE.TIMEOUT_CONF",
                hint="pass GroupStateTimeout.NoTimeout, or another member of GroupStateTimeout",
            )
        self._pickled: bytes = dumps(function)  # type: ignore[no-untyped-call]
        self.name = getattr(function, "__name__", type(function).__name__)
        self._key, self._schema, self._kind, self._timeout = key, output_schema, state_type, timeout_conf
        self._given = checked_event_time(event_time)
        self._event_time: EventTime | None = None
        self._has_watermark = False
        self._settings: Mapping[str, str] = {}
        self._function: Callable[..., Any] | None = None
        self._columns: list[str] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name}>"

    def on_frame(self, frame: EngineFrame) -> EventTime | None:
        self._settings = frame.settings
        self._has_watermark = frame.watermark is not None
        if self._timeout == GroupStateTimeout.EventTimeTimeout:
            self._event_time = event_time_on(frame, self._given)
            self._has_watermark = True
        return self._event_time

    def open(self, ctx: FunctionContext) -> None:
        self._state = ctx.get_value_state(group_state(self._kind))
        self._timers: Any = ctx.keyed_backend.timers
        self._shown = fields_shown(self._kind)
        self._has_times = any(shown(each) is not None for each in self._kind.types)

    def close(self) -> None:
        self._function = None

    # --- the batch ---

    def process_batch(self, batch: pa.RecordBatch, ctx: FunctionContext) -> Iterator[pa.RecordBatch]:
        self._columns = batch.schema.names
        clock = BatchClock.of(ctx)
        batch = without_late(batch, self._event_time, clock, ctx)
        if not batch.num_rows:
            return
        frames = GroupFrames(batch, self._key, self._settings)
        yield from self._called(frames.keys(), frames.frames(), clock)

    def end_batch(self, ctx: FunctionContext, after: int | None) -> Iterator[pa.RecordBatch]:
        if self._timeout != GroupStateTimeout.NoTimeout:
            for clock in BatchClock.of(ctx).rounds(ctx, after):
                yield from self._timed_out(clock)
        self._function = None

    def _timed_out(self, clock: BatchClock) -> Iterator[pa.RecordBatch]:
        is_by_clock = self._timeout == GroupStateTimeout.ProcessingTimeTimeout
        due = self._timers.take_due((clock.now if is_by_clock else clock.watermark) - 1, TIMERS)
        if len(due.timestamps):
            self._timers.register_processing_time_timers(due.keys, due.timestamps)
            frames = ([empty_frame(self._columns)] for _ in range(len(due.timestamps)))
            yield from self._called(due.keys, frames, clock, has_timed_out=True)

    def _called(
        self, keys: pa.StructArray, frames: Iterator[Any], clock: BatchClock, has_timed_out: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """The rows of calls with the frames of each key, whose states are then written."""
        function = self._function
        if function is None:
            function = self._function = pickle.loads(self._pickled)
        stored = self._state.get_many(keys)
        out = GroupFramesOut(self._schema, self._settings.get(ZONE, "UTC"), self._settings)
        fixed = (clock.now, clock.watermark, self._timeout, has_timed_out, self._has_watermark)
        changed: list[int] = []
        rows: list[Any] = []
        calls = zip(scalars(keys, self._settings), self._values(stored), frames, strict=True)
        for at, (key, value, of_key) in enumerate(calls):
            state = GroupState(value, *fixed, value is not None, False, False, _NONE, b"", None)  # type: ignore[arg-type]
            out.take(function(key, of_key, state))
            timeout = state._timeout_timestamp
            if state._updated or state._removed or timeout != _NONE:
                changed.append(at)
                if state._removed and timeout == _NONE:
                    rows.append(None)
                else:
                    rows.append((tuple(state._value) if state._defined else None, int(timeout)))
            if out.count >= PART:
                yield from out.taken()
        yield from out.taken()
        if changed:
            at_changed = pa.array(changed)
            self._write(keys.take(at_changed), stored.take(at_changed), rows)

    def _values(self, stored: pa.StructArray) -> list[tuple[Any, ...] | None]:
        """The state of each key as functions see it; None if there is none."""
        if stored.null_count == len(stored):
            return [None] * len(stored)
        states = pc.struct_field(stored, STATE)
        values: list[Any] = column_values(states)
        if self._has_times:
            return [None if value is None else self._shown(value) for value in values]
        return values

    def _write(self, keys: pa.StructArray, stored: pa.StructArray, rows: list[Any]) -> None:
        """Write states, each a pair of state and timeout, or None, and move their timers."""
        self._update(keys, rows)
        if self._timeout == GroupStateTimeout.NoTimeout:
            return
        before = pc.fill_null(pc.struct_field(stored, "timeoutTimestamp"), _NONE).to_numpy()
        now = np.array([_NONE if row is None else row[1] for row in rows], np.int64)
        for times, change in (
            (before, self._timers.delete_processing_time_timers),
            (now, self._timers.register_processing_time_timers),
        ):
            has_moved = (times != _NONE) & (before != now)
            if has_moved.any():
                mask = pa.array(has_moved)
                change(keys.filter(mask), times[has_moved])

    def _update(self, keys: pa.StructArray, rows: list[Any]) -> None:
        if not self._has_times:
            try:
                self._state.update_many(keys, rows)
            except SerializationError:
                pass
            else:
                return
        convert = converted(self._kind)
        made = [row and (row[0] and convert(row[0]), row[1]) for row in rows]
        self._state.update_many(keys, made)
