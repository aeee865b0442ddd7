"""Cuts the rows of a batch by the key groups of its hosts, and surveys facts that only all tasks together know.

A batch that is cut means the same as one that is not. So each task tells what it has seen of it, and the driver merges
that: times for the watermark, null keys, and the digest by which a batch is known again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend._core.key_groups import HashPlan
from statebackend.checkpoint.store.sealed import MAX_INTEGER
from statebackend.columns.nested_columns import encoded_keys
from statebackend.errors import UsageError
from statebackend.functions import EventTime
from statebackend.keys import key_encoder, range_for
from statebackend.runtime.batch_identity import Identity, merged_digest, rows_digest
from statebackend.runtime.batch_rows import Survey, check_null_keys, keys_of, split_broadcast
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.job import Job
from statebackend.types import Type

_DIGEST = re.compile("[0-9a-f]{32}")


class PartitionedRows(NamedTuple):
    """The rows of a record batch by where they go. They share memory."""

    #: The rows of each host, in the order in which they came; None for a host without any.
    by_host: list[pa.RecordBatch | None]
    #: The rows for every host; None if there are none.
    broadcast: pa.RecordBatch | None


class BatchSurvey(NamedTuple):
    """What a task has seen of a batch, or all of them together: all that is to be known of it as a whole."""

    #: All rows but the ticks of a heartbeat.
    num_rows: int = 0
    num_broadcast: int = 0
    #: Rows that have a null for a key: they go to no host, or to the first one if an output takes them.
    num_nulls: int = 0
    #: The greatest event time that counts, in milliseconds; None if no row has told one.
    newest: int | None = None
    #: The digest of all rows, as `rows_digest` gives it; None if it is not needed.
    digest: str | None = None
    heartbeats: int = 0

    def to_json(self) -> dict[str, object]:
        return self._asdict()

    @classmethod
    def from_json(cls, found: object) -> BatchSurvey:
        """Read the JSON form."""
        if not isinstance(found, Mapping) or not _is_survey(found):
            raise UsageError(
                "the report of a task cannot be read",
                hint="the driver and all executors need the same version of the library",
            )
        return cls(**found)

    @classmethod
    def of(cls, surveys: Iterable[BatchSurvey]) -> BatchSurvey:
        """Merge what tasks have seen, in any order. A batch without tasks is one without rows."""
        told = list(surveys)
        digests = [each.digest for each in told if each.digest is not None]
        return cls(
            sum(each.num_rows for each in told),
            sum(each.num_broadcast for each in told),
            sum(each.num_nulls for each in told),
            max((each.newest for each in told if each.newest is not None), default=None),
            merged_digest(digests) if len(digests) == len(told) else None,
            sum(each.heartbeats for each in told),
        )

    def check(self, job: Job) -> None:
        """Raise if a key is null, unless the job says where such rows go."""
        check_null_keys(job, self.num_nulls, self.num_rows - self.num_broadcast)

    def times(self, event_time: EventTime, watermark: int | None, idle: int | None = None) -> Survey:
        """The watermark after the batch, and whether a row has told a time, by the rules of `RowTimes.of`."""
        # The newest row represents all: where it leaves the watermark, all of them leave it.
        newest = pa.table({event_time.column: pa.array([self.newest], pa.int64())})
        times = RowTimes.of(event_time, newest, watermark=watermark, idle=idle)
        return Survey(times.after, times.told)

    def identity(self) -> Identity:
        """The identity of the batch by its rows, as `rows_identity` gives it."""
        if self.digest is None:
            raise UsageError("the rows of this batch have no digest", hint="pass digests=True to each Cutter")
        return {"kind": "rows", "rows": self.num_rows, "digest": self.digest}


def _is_survey(found: Mapping[Any, Any]) -> bool:
    if found.keys() != set(BatchSurvey._fields):
        return False
    newest, digest = found["newest"], found["digest"]
    counts = [found[name] for name in ("num_rows", "num_broadcast", "num_nulls", "heartbeats")]
    return (
        all(type(each) is int and each >= 0 for each in counts)
        and type(newest) in (int, type(None))
        and (digest is None or (isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None))
    )


class RowPartitioner:
    """Cuts the rows of a batch by the ranges of its hosts, and notes what is to be known of the batch as a whole.

    Host ``i`` of ``parallelism`` gets the rows whose keys belong to its `range_for`. A broadcast row goes to all hosts,
    and one with a null key to none. ``clock`` is the whole batch's; ``max_ahead`` counts from it.
    ``heartbeat_column``, if record batches have it, marks the rows that are ticks: rows and column are left out.

    Columns are such as Spark makes: not of dictionaries or views. For one thread.
    """

    def __init__(
        self,
        job: Job,
        key_type: Type,
        parallelism: int,
        *,
        clock: int | None = None,
        digests: bool = False,
        heartbeat_column: str | None = None,
    ) -> None:
        self._job = job
        self._clock = clock
        self._heartbeat_column = heartbeat_column
        self._parallelism = parallelism
        self._encoder = key_encoder(key_type)
        self._plan = HashPlan(self._encoder.hash_plan)
        #: The host of each key group. Behind the hosts, as if they were two more: all of them, and none of them.
        self._host_of: NDArray[np.uint16] = np.empty(job.max_parallelism, np.uint16)
        for host in range(parallelism):
            groups = range_for(job.max_parallelism, parallelism, host)
            self._host_of[groups.start : groups.end + 1] = host
        self._all, self._none = parallelism, parallelism + 1
        self.survey = BatchSurvey(digest=merged_digest([]) if digests else None)
        #: The names of the columns that have been found right.
        self._names: list[str] = []

    def cut(self, rows: pa.RecordBatch) -> PartitionedRows:
        """Cut a record batch. O(bytes): rows are copied once, or not at all if they are in the order of hosts."""
        rows, heartbeats = self._without_heartbeats(rows)
        if rows.schema.names != self._names:
            self._job.check_columns(rows.schema.names)
            self._names = rows.schema.names
        hosts = np.full(rows.num_rows, self._none, np.uint16)
        keyed = self._split_broadcast(rows, hosts)
        steering = rows.select(self._steering_columns())
        if len(keyed) < len(hosts):
            steering = steering.take(pa.array(keyed))
        newest = self._newest(steering)
        keyed, steering, nulls = self._without_null_keys(keyed, steering)
        if self._job.null_key_output is not None:
            hosts[nulls] = 0  # any host can give them to the output
        if len(keyed):
            canonical = encoded_keys(self._encoder, keys_of(self._job, steering))
            hosts[keyed] = self._host_of[self._plan.key_groups(canonical, self._job.max_parallelism)]
        counts = np.bincount(hosts, minlength=self._none + 1).tolist()
        survey = BatchSurvey(
            rows.num_rows,
            counts[self._all],
            len(nulls),
            newest,
            None if self.survey.digest is None else rows_digest(pa.Table.from_batches([rows])),
            heartbeats,
        )
        # Only now: rows of which one cannot be cut count for nothing.
        self.survey = BatchSurvey.of([self.survey, survey])
        return self._by_host(rows, hosts, counts)

    def _without_heartbeats(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        if self._heartbeat_column is None or self._heartbeat_column not in rows.schema.names:
            return rows, 0
        at = rows.schema.names.index(self._heartbeat_column)
        marks, rows = rows.column(at), rows.remove_column(at)
        ticks = len(marks) - marks.null_count
        return (rows.filter(pc.is_null(marks)) if ticks else rows), ticks

    def _split_broadcast(self, rows: pa.RecordBatch, hosts: NDArray[np.uint16]) -> NDArray[np.int64]:
        """Send broadcast rows to all hosts; return the numbers of the others."""
        numbers = np.arange(rows.num_rows)
        name = self._job.broadcast
        if name is None:
            return numbers
        numbered = pa.record_batch([rows.column(name), pa.array(numbers)], [name, f"number of {name}"])
        broadcast, others = split_broadcast(numbered, name)
        hosts[broadcast.column(1).to_numpy()] = self._all
        left: NDArray[np.int64] = others.column(1).to_numpy()
        return left

    def _steering_columns(self) -> list[str]:
        """The columns that say where a row goes and when it is."""
        event_time = self._job.event_time
        return list(dict.fromkeys([*self._job.columns, *([] if event_time is None else [event_time.column])]))

    def _newest(self, rows: pa.RecordBatch) -> int | None:
        if self._job.event_time is None:
            return None
        # With this watermark, a time only raises here if it does so in any batch: the rest is for the driver to say.
        times = RowTimes.of(self._job.event_time, rows, watermark=MAX_INTEGER, clock=self._clock)
        telling = times.own[~(times.is_null | times.is_ahead)]
        return int(telling.max()) if len(telling) else None

    def _without_null_keys(
        self, numbers: NDArray[np.int64], rows: pa.RecordBatch
    ) -> tuple[NDArray[np.int64], pa.RecordBatch, NDArray[np.int64]]:
        key = self._job.key
        if not isinstance(key, str) or not rows.column(key).null_count:
            return numbers, rows, numbers[:0]
        valid = pc.is_valid(rows.column(key))
        is_valid = valid.to_numpy(zero_copy_only=False)
        return numbers[is_valid], rows.filter(valid), numbers[~is_valid]

    def _by_host(self, rows: pa.RecordBatch, hosts: NDArray[np.uint16], counts: list[int]) -> PartitionedRows:
        if not (hosts[1:] >= hosts[:-1]).all():
            order = np.argsort(hosts, kind="stable")
            rows = rows.take(pa.array(order[: len(order) - counts[self._none]]))
        parts: list[pa.RecordBatch | None] = []
        start = 0
        for count in counts[: self._none]:
            parts.append(rows.slice(start, count) if count else None)
            start += count
        return PartitionedRows(parts[: self._parallelism], parts[self._all])
