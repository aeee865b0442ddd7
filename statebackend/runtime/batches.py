"""Prepares a batch for the function: splits off broadcast rows, finds the time of each row, sorts, extracts the keys.

>>> from statebackend.functions import map_with_state
>>> job = Job(map_with_state(lambda row, n: (None, 1), int), key="user", order_by="at")
>>> batch = Batch(job, pa.table({"user": ["b", "a"], "at": [2, 1]}))
>>> batch.keys.to_pylist(), batch.num_input_rows
(['a', 'b'], 2)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from statebackend.errors import SerializationTypeError, UsageError
from statebackend.keys import as_columnar
from statebackend.runtime.event_time import EventTime, RowTimes
from statebackend.runtime.job import Job

__all__ = ["Batch", "Survey", "check_null_keys", "keys_of", "split_broadcast"]


class Survey(NamedTuple):
    """What a batch is as a whole, where only a piece of it is at hand.

    >>> Survey(after=7000).told
    False
    """

    #: The watermark after the batch; None while no row has had a time.
    after: int | None = None
    #: True if a row of the batch had a time that counts.
    told: bool = False


class Batch:
    """The rows of one batch of a job. Finds everything that can be wrong with them before any state is touched.

    ``watermark`` is that before the batch, ``clock`` what the clock tells, and ``idle`` the watermark if no row tells.
    ``survey`` is that of a larger batch which the table is a piece of. Rows that are ``in_order`` are not sorted.

    >>> from statebackend.functions import map_with_state
    >>> job = Job(map_with_state(lambda row, n: (None, 1), int), key="user")
    >>> Batch(job, pa.table({"user": ["a", None]}))
    Traceback (most recent call last):
    statebackend.errors.SerializationTypeError: a key is null (column 'user', position 1, 1 of 2 rows). Hint: ...
    """

    def __init__(
        self,
        job: Job,
        table: pa.Table,
        *,
        watermark: int | None = None,
        clock: int | None = None,
        idle: int | None = None,
        survey: Survey | None = None,
        in_order: bool = False,
    ) -> None:
        job.check_columns(table.column_names)
        self.num_input_rows = table.num_rows
        #: The rows that were dropped for a null key, and for their time.
        self.dropped_rows = self.num_dropped_by_time = 0
        #: The late rows, and those whose time is too far ahead of the clock.
        self.num_late = self.num_ahead = 0
        #: Rows that are not on time, for the output that takes them.
        self.late: pa.Table | None = None
        #: Rows for `process_broadcast`.
        self.broadcast: pa.Table | None = None
        if job.broadcast is not None:
            self.broadcast, table = split_broadcast(table, job.broadcast)
        #: The times of the rows for the function; None in a job without event time.
        self.times: RowTimes | None = None
        #: The times of the broadcast rows: no watermark comes from them, and none of them is late.
        self.broadcast_times: RowTimes | None = None
        if job.event_time is not None:
            self.times = RowTimes.of(job.event_time, table, watermark=watermark, clock=clock, idle=idle)
            if survey is not None:
                self.times = replace(self.times, after=survey.after, told=survey.told)
            if self.broadcast is not None:
                self.broadcast_times = RowTimes.of_broadcast(job.event_time, self.broadcast)
        if isinstance(job.key, str):
            table = self._without_null_keys(job, table, job.key)
        if self.times is not None and job.event_time is not None:
            table = self._on_time(job.event_time, self.times, table)
        if job.sorted_by and table.num_rows > 1 and not in_order:
            order = _order(table, job.sorted_by)
            table = table.take(order)
            if self.times is not None:
                self.times = self.times.take(order.to_numpy())
        #: Rows for the function.
        self.rows: pa.Table = table.combine_chunks() if job.is_batch else table
        self._job = job

    @property
    def keys(self) -> pa.Array:
        """The column of keys; structs for a composite key."""
        return keys_of(self._job, self.rows)

    @property
    def num_rows(self) -> int:
        """The number of rows for the function."""
        return int(self.rows.num_rows)

    def broadcasts(self) -> Iterator[tuple[pa.Table, RowTimes | None]]:
        """The broadcast rows with their times, a piece at a time."""
        if self.broadcast is not None:
            yield self.broadcast, self.broadcast_times

    def pieces(self) -> Iterator[Batch]:
        """The rows for the function, a piece at a time: here all of them."""
        yield self

    def _without_null_keys(self, job: Job, table: pa.Table, key: str) -> pa.Table:
        nulls = table.column(key).null_count
        if not nulls:
            return table
        first = pc.index(table.column(key).is_null(), True).as_py()
        check_null_keys(job, nulls, table.num_rows, f"position {first}, ")
        self.dropped_rows = nulls
        is_valid = pc.is_valid(table.column(key))
        if self.times is not None:
            self.times = self.times.take(is_valid.to_numpy())
        return table.filter(is_valid)

    def _on_time(self, event_time: EventTime, times: RowTimes, table: pa.Table) -> pa.Table:
        """Count the rows that are not on time, and drop them or put them aside if the job does."""
        self.num_late, self.num_ahead = times.num_late, times.num_ahead
        outside = self.num_late + self.num_ahead
        if not outside or (event_time.late_output is None and not event_time.drops_late):
            return table
        if event_time.drops_late:
            self.num_dropped_by_time = outside
        else:
            self.late = table.filter(pa.array(~times.is_on_time))
        self.times = times.take(times.is_on_time)
        return table.filter(pa.array(times.is_on_time))


def check_null_keys(job: Job, nulls: int, rows: int, where: str = "") -> None:
    """Raise if keys of these rows are null, unless the job drops such rows; `where` is the first of them."""
    if nulls and not job.drops_null_keys:
        raise SerializationTypeError(
            "a key is null",
            code="SERIALIZATION.NULL_KEY",
            detail=f"column {job.key!r}, {where}{nulls} of {rows} rows",
            hint="filter such rows out before foreachBatch, or pass null_keys='drop'",
        )


def keys_of(job: Job, rows: pa.Table | pa.RecordBatch) -> pa.Array:
    """The keys of rows as one array."""
    if isinstance(job.key, str):
        keys: pa.Array = as_columnar(rows.column(job.key))
        return keys
    parts = [as_columnar(rows.column(name)) for name in job.key]
    return pa.StructArray.from_arrays(parts, names=list(job.key))


def split_broadcast(table: pa.Table, column: str) -> tuple[pa.Table, pa.Table]:
    """The rows of a table that are broadcast, and the others."""
    flags = table.column(column)
    if not pa.types.is_boolean(flags.type):
        raise UsageError("the broadcast column is not boolean", detail=f"column {column!r} is {flags.type}")
    flags = flags.fill_null(False)
    return table.filter(flags), table.filter(pc.invert(flags))


def _order(table: pa.Table, names: tuple[str, ...]) -> pa.UInt64Array:
    """The rows in Spark's ascending order: nulls first, NaN last. Rows that are equal keep their order."""
    columns: dict[str, pa.ChunkedArray] = {}
    for at, name in enumerate(names):
        column = table.column(name)
        columns[f"valid{at}"] = pc.is_valid(column)
        if pa.types.is_floating(column.type):
            columns[f"nan{at}"] = pc.is_nan(column)
        columns[f"by{at}"] = column
    keys = pa.table(columns)
    try:
        return pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise UsageError(
            "rows cannot be sorted by these columns", detail=f"columns {', '.join(names)}"
        ) from error
