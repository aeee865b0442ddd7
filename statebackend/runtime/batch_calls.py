"""The calls of functions that take whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from statebackend.functions import BatchProcessFunction
from statebackend.runtime.batches import Batch, keys_of
from statebackend.runtime.calls import EVENT, Calls, Pair
from statebackend.runtime.event_time import RowTimes

__all__ = ["BatchCalls"]

#: Timers come in pieces of at most this many.
_TIMERS = 1_000_000


class BatchCalls(Calls):
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
        for each in piece.rows.to_batches() or [_empty_batch(piece.rows.schema)]:
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


def _empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
