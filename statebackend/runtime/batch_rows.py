"""Prepares a batch for the function: splits off broadcast rows, finds the time of each row, sorts, extracts the keys.

A batch whose rows are not in memory at once comes a piece at a time, and means the same as in one piece. Facts
about the whole batch are found before: the watermark after it, and keys that are null. The rest is done
for each piece as for a whole batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from statebackend.columns.nested_columns import encoded_keys
from statebackend.errors import SerializationTypeError, UsageError, usage
from statebackend.keys import as_columnar, key_encoder
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.job import Job


class Survey(NamedTuple):
    """What a batch is as a whole, where only a piece of it is at hand."""

    #: The watermark after the batch; None while no row has had a time.
    after: int | None = None
    #: True if a row of the batch had a time that counts.
    told: bool = False


class Batch:
    """The rows of one batch of a job. Finds everything that can be wrong with them before any state is touched.

    ``watermark`` is that before the batch, ``clock`` what the clock tells, and ``idle`` the watermark if no row tells.
    ``survey`` belongs to a larger batch, of which the table is a piece. Rows that are ``in_order`` are not sorted.
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
        #: Rows that do not fit, with the output that takes them.
        self.aside: list[tuple[str, pa.Table]] = []
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
            table = self._on_time(job, self.times, table)
        if job.sorted_by and table.num_rows > 1 and not in_order:
            order = _order(table, job.sorted_by)
            table = table.take(order)
            if self.times is not None:
                self.times = self.times.take(order.to_numpy())
        self.rows: pa.Table = table.combine_chunks() if job.is_batch else table
        self._job = job

    @property
    def keys(self) -> pa.Array:
        """The column of keys; structs for a composite key."""
        return keys_of(self._job, self.rows)

    @property
    def num_rows(self) -> int:
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
        if job.null_key_output is not None:
            self.aside.append((job.null_key_output, table.filter(pc.invert(is_valid))))
        if self.times is not None:
            self.times = self.times.take(is_valid.to_numpy())
        return table.filter(is_valid)

    def _on_time(self, job: Job, times: RowTimes, table: pa.Table) -> pa.Table:
        """Count the rows that are not on time, and drop them or put them aside if the job does."""
        self.num_late, self.num_ahead = times.num_late, times.num_ahead
        outside = self.num_late + self.num_ahead
        late = "keep" if job.event_time is None else job.event_time.late
        if not outside or late == "keep":
            return table
        if late == "fail":
            raise late_rows(self.num_late, self.num_ahead)
        if job.late_output is None:
            self.num_dropped_by_time = outside
        else:
            self.aside.append((job.late_output, table.filter(pa.array(~times.is_on_time))))
        self.times = times.take(times.is_on_time)
        return table.filter(pa.array(times.is_on_time))


def late_rows(late: int, ahead: int) -> UsageError:
    """The error of a batch with rows that are not on time, where the job allows none."""
    return UsageError(
        "rows of the batch are late",
        code="USAGE.LATE_ROWS",
        detail=f"{late:,} rows are late, {ahead:,} are too far ahead of the clock, late='fail'",
        hint="EventTime(..., late=) also takes 'keep', 'drop' or sb.to_output(name)",
    )


def check_null_keys(job: Job, nulls: int, rows: int, where: str = "") -> None:
    """Raise if keys of these rows are null, unless the job says where such rows go; `where` is the first of them."""
    if nulls and job.null_keys == "fail":
        raise SerializationTypeError(
            "a key is null",
            code="SERIALIZATION.NULL_KEY",
            detail=f"column {job.key!r}, {where}{nulls} of {rows} rows",
            hint="filter such rows out before foreachBatch, or pass null_keys='drop' or sb.to_output(name)",
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
        raise usage.column("the broadcast column is not boolean", detail=f"column {column!r} is {flags.type}")
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
        raise usage.column(
            "rows cannot be sorted by these columns", detail=f"columns {', '.join(names)}"
        ) from error


class ChunkedRows(ABC):
    """The rows of a batch, in the order in which the function is to get them.

    They are sorted by ``Job.sorted_by``, if the job has that, and before that by key if the function takes all rows of
    a key at once. Rows that are equal in these, and broadcast rows, come as they came.
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


class ChunkedBatch:
    """The rows of a batch of a job, as `Batch` has them, a piece at a time. Counts are complete once all are read.

    Reads the columns of key, time and broadcast rows once before, and all columns once more if rows are broadcast; not
    so if ``survey`` and ``num_broadcast`` say what they hold.
    """

    def __init__(
        self,
        job: Job,
        rows: ChunkedRows,
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
