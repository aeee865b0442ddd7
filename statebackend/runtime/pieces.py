"""A batch whose rows are not in memory at once: it comes a piece at a time, and means the same as in one piece.

What a function may see of the whole batch is found before: the watermark after it, and keys that are null. The rest is
done for each piece as `Batch` does it for a whole batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa

from statebackend.columns.nested_columns import encoded_keys
from statebackend.keys import key_encoder
from statebackend.runtime.batches import Batch, Survey, check_null_keys, keys_of, split_broadcast
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.job import Job

__all__ = ["BatchInPieces", "RowsInPieces"]


class RowsInPieces(ABC):
    """The rows of a batch, in the order in which the function is to get them.

    They are sorted by ``Job.sorted_by``, if the job has that, and before that by key if the function takes all rows of
    a key at once. Rows that are equal in these, and broadcast rows, come as they came.

    >>> sorted(RowsInPieces.__abstractmethods__)
    ['pieces', 'schema']
    """

    #: True if instead each piece has all rows of its keys, in any order.
    in_whole_keys: ClassVar[bool] = False

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns."""

    @abstractmethod
    def pieces(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows from the first on, a piece at a time; all columns, or these. May be called several times."""


class BatchInPieces:
    """The rows of a batch of a job, as `Batch` has them, a piece at a time. Counts are complete once all are read.

    Reads the columns of key, time and broadcast rows once before, and all columns once more if rows are broadcast; not
    so if ``survey`` and ``num_broadcast`` say what they hold.
    """

    def __init__(
        self,
        job: Job,
        rows: RowsInPieces,
        *,
        watermark: int | None = None,
        clock: int | None = None,
        idle: int | None = None,
        survey: Survey | None = None,
        num_broadcast: int = 0,
    ) -> None:
        job.check_columns(rows.schema.names)
        self._job = job
        self._rows = rows
        self._clock = clock
        self.num_input_rows = 0
        #: The rows for the function; those that were dropped for a null key, and for their time; and, of the others,
        #: the late ones, and those whose time is too far ahead of the clock.
        self.num_rows = self.dropped_rows = self.num_dropped_by_time = self.num_late = self.num_ahead = 0
        self._num_broadcast = num_broadcast
        self._survey = self._surveyed(watermark, idle) if survey is None else survey
        #: The watermarks before and after the batch; None in a job without event time.
        self.times: RowTimes | None = None
        if job.event_time is not None:
            none = RowTimes.of_none(watermark, self._survey.after)
            self.times = replace(none, told=self._survey.told)

    def _surveyed(self, watermark: int | None, idle: int | None) -> Survey:
        job, after, told, nulls = self._job, watermark, False, 0
        wanted = [job.columns[0]]
        wanted += [] if job.event_time is None else [job.event_time.column]
        wanted += [] if job.broadcast is None else [job.broadcast]
        for table in self._rows.pieces(list(dict.fromkeys(wanted))):
            self.num_input_rows += table.num_rows
            if job.broadcast is not None:
                broadcast, table = split_broadcast(table, job.broadcast)
                self._num_broadcast += broadcast.num_rows
            if job.event_time is not None:
                times = RowTimes.of(job.event_time, table, watermark=after, clock=self._clock)
                after, told = times.after, told or times.told
            if isinstance(job.key, str):
                nulls += table.column(job.key).null_count
        check_null_keys(job, nulls, self.num_input_rows - self._num_broadcast)
        if not told and watermark is not None and idle is not None:
            after = max(watermark, idle)
        return Survey(after, told)

    def broadcasts(self) -> Iterator[tuple[pa.Table, RowTimes | None]]:
        """The broadcast rows with their times, a piece at a time."""
        job, left = self._job, self._num_broadcast
        if not left:
            return
        assert job.broadcast is not None
        for table in self._rows.pieces():
            rows, _ = split_broadcast(table, job.broadcast)
            if rows.num_rows:
                yield rows, None if job.event_time is None else RowTimes.of_broadcast(job.event_time, rows)
            left -= rows.num_rows
            if not left:
                return

    def pieces(self) -> Iterator[Batch]:
        """The rows for the function, a piece at a time; one without rows if there are none."""
        watermark = None if self.times is None else self.times.before
        in_order = not self._rows.in_whole_keys
        to_be_cut = self._job.takes_whole_keys and in_order
        for table in self._of_whole_keys() if to_be_cut else self._keyed():
            piece = Batch(
                self._job,
                table,
                watermark=watermark,
                clock=self._clock,
                survey=self._survey,
                in_order=in_order,
            )
            self.num_rows += piece.num_rows
            self.dropped_rows += piece.dropped_rows
            self.num_dropped_by_time += piece.num_dropped_by_time
            self.num_late += piece.num_late
            self.num_ahead += piece.num_ahead
            yield piece

    def _keyed(self) -> Iterator[pa.Table]:
        """The rows that have a key; a table without rows if there are none."""
        has_any = False
        for table in self._rows.pieces():
            if self._job.broadcast is not None:
                _, table = split_broadcast(table, self._job.broadcast)
            if table.num_rows:
                has_any = True
                yield table
        if not has_any:
            yield self._rows.schema.empty_table()

    def _of_whole_keys(self) -> Iterator[pa.Table]:
        """The same in pieces of which each has all rows of its keys."""
        held: pa.Table | None = None
        for table in self._keyed():
            rows = table if held is None else pa.concat_tables([held, table])
            at = self._last_key_begins(rows)
            if at:
                yield rows.slice(0, at)
            held = rows.slice(at)
        if held is not None:
            yield held

    def _last_key_begins(self, rows: pa.Table) -> int:
        """The number of the first row with the key of the last: rows are sorted by key, so those with it are together.

        O(log n). Rows with a null key are before all others, and may be cut anywhere.
        """
        if not rows.num_rows:
            return 0
        keys = keys_of(self._job, rows)
        last, first = len(keys) - 1, 0
        if not keys[last].is_valid:
            return last
        encoder = key_encoder(self._job.key_type({field.name: field.type for field in rows.schema}))

        def canonical(at: int) -> object:
            encoded: Any = encoded_keys(encoder, keys.slice(at, 1))
            if not isinstance(encoded, tuple):
                return encoded[0].item()
            ends, data = encoded
            return data[ends[0] : ends[-1]].tobytes()

        wanted = canonical(last)
        while first < last:
            middle = (first + last) // 2
            if keys[middle].is_valid and canonical(middle) == wanted:
                last = middle
            else:
                first = middle + 1
        return first
