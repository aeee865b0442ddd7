"""Prepares a batch for the function: splits off broadcast rows, handles null keys, sorts rows, extracts the keys.

>>> from statebackend.functions import map_with_state
>>> job = Job(map_with_state(lambda row, n: (None, 1), int), key="user", order_by="at")
>>> batch = Batch(job, pa.table({"user": ["b", "a"], "at": [2, 1]}))
>>> batch.keys.to_pylist(), batch.num_input_rows
(['a', 'b'], 2)
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from statebackend.errors import SerializationTypeError, UsageError
from statebackend.keys import as_columnar
from statebackend.runtime.job import Job

__all__ = ["Batch"]


class Batch:
    """The rows of one batch of a job. Finds everything that can be wrong with them before any state is touched.

    >>> from statebackend.functions import map_with_state
    >>> job = Job(map_with_state(lambda row, n: (None, 1), int), key="user")
    >>> Batch(job, pa.table({"user": ["a", None]}))
    Traceback (most recent call last):
    statebackend.errors.SerializationTypeError: a key is null (column 'user', 1 of 2 rows). Hint: ...
    """

    def __init__(self, job: Job, table: pa.Table) -> None:
        job.check_columns(table.column_names)
        self.num_input_rows = table.num_rows
        self.dropped_rows = 0
        #: The newest time in the event-time column, in milliseconds.
        self.max_event_time = None if job.event_time is None else _newest(table, job.event_time)
        #: Rows for `process_broadcast`.
        self.broadcast: pa.Table | None = None
        if job.broadcast is not None:
            self.broadcast, table = _split(table, job.broadcast)
        if isinstance(job.key, str):
            table = self._without_null_keys(job, table, job.key)
        if job.order_by and table.num_rows > 1:
            table = _sorted(table, job.order_by)
        #: Rows for the function.
        self.rows: pa.Table = table.combine_chunks() if job.is_batch else table
        self._job = job

    @property
    def keys(self) -> pa.Array:
        """The column of keys; structs for a composite key."""
        return keys_of(self._job, self.rows)

    def _without_null_keys(self, job: Job, table: pa.Table, key: str) -> pa.Table:
        nulls = table.column(key).null_count
        if not nulls:
            return table
        if not job.drops_null_keys:
            raise SerializationTypeError(
                "a key is null",
                code="SERIALIZATION.NULL_KEY",
                detail=f"column {key!r}, {nulls} of {table.num_rows} rows",
                hint="filter such rows out before foreachBatch, or pass null_keys='drop'",
            )
        self.dropped_rows = nulls
        return table.filter(pc.is_valid(table.column(key)))


def keys_of(job: Job, rows: pa.Table | pa.RecordBatch) -> pa.Array:
    """The keys of rows as one array."""
    if isinstance(job.key, str):
        keys: pa.Array = as_columnar(rows.column(job.key))
        return keys
    parts = [as_columnar(rows.column(name)) for name in job.key]
    return pa.StructArray.from_arrays(parts, names=list(job.key))


def _split(table: pa.Table, column: str) -> tuple[pa.Table, pa.Table]:
    flags = table.column(column)
    if not pa.types.is_boolean(flags.type):
        raise UsageError("the broadcast column is not boolean", detail=f"column {column!r} is {flags.type}")
    flags = flags.fill_null(False)
    return table.filter(flags), table.filter(pc.invert(flags))


def _newest(table: pa.Table, column: str) -> int | None:
    times = table.column(column)
    if pa.types.is_timestamp(times.type):
        newest = pc.max(times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())).as_py()
        return None if newest is None else newest // 1000
    if pa.types.is_integer(times.type):
        return pc.max(times).as_py()  # type: ignore[no-any-return]
    raise UsageError(
        "the event-time column is neither a timestamp nor a number of milliseconds",
        detail=f"column {column!r} is {times.type}",
    )


def _sorted(table: pa.Table, names: tuple[str, ...]) -> pa.Table:
    """Sort in Spark's ascending order: nulls first, NaN last. Rows that are equal keep their order."""
    columns: dict[str, pa.ChunkedArray] = {}
    for at, name in enumerate(names):
        column = table.column(name)
        columns[f"valid{at}"] = pc.is_valid(column)
        if pa.types.is_floating(column.type):
            columns[f"nan{at}"] = pc.is_nan(column)
        columns[f"by{at}"] = column
    keys = pa.table(columns)
    try:
        order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise UsageError(
            "rows cannot be sorted by these columns", detail=f"columns {', '.join(names)}"
        ) from error
    return table.take(order)
