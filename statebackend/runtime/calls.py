"""The calls of a function in one batch: what the kinds of functions have in common.

A `Calls` object is made for each batch. `run` brings the rows of the batch to the function, then `fire_all` its timers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

from statebackend.functions import FunctionContext
from statebackend.keys import VOID
from statebackend.runtime.batches import Batch
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.given import Given
from statebackend.runtime.job import Job
from statebackend.runtime.pieces import BatchInPieces
from statebackend.state import DOMAINS, KeyedStateBackend

__all__ = ["EVENT", "PROCESSING", "Calls", "Pair"]

EVENT, PROCESSING = DOMAINS
#: A key and its row.
Pair: TypeAlias = tuple[object, object]


class Calls(ABC):
    """The calls of a function in one batch; ``after`` is the watermark after it."""

    def __init__(
        self, job: Job, keyed: KeyedStateBackend, context: FunctionContext, given: Given, after: int | None
    ) -> None:
        self.job = job
        self.keyed = keyed
        self.context = context
        self.given = given
        self.after = after

    def run(self, batch: Batch | BatchInPieces) -> None:
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
        timers, before = self.keyed.timers, -1
        until = self.after if self.job.event_time is not None else now
        while timers.fired != before:  # a timer of one domain may register one in the other
            before = timers.fired
            if until is not None:
                self.fire(EVENT, until)
            self.fire(PROCESSING, now)

    def leave_rows(self) -> None:
        """No row is at hand any more."""
        self.context._at = self.context._nowhere
        if self.job.event_time is not None:
            self.keyed.set_event_time(self.after)

    def forget_key(self) -> None:
        """No current key, and no namespace: neither may depend on the batch before, which a restart forgets."""
        self.keyed.clear_current_key()
        self.keyed.set_current_namespace(VOID)
