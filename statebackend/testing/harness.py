"""Running a function without Spark, on the real backends.

>>> from statebackend.functions import map_with_state
>>> def total(row, before):
...     after = (before or 0) + row.n
...     return (row.user, after), after
>>> harness = Harness(map_with_state(total, int), str, key="user")
>>> harness.process_batch([{"user": "ann", "n": 1}, {"user": "bob", "n": 5}, {"user": "ann", "n": 2}])
[('ann', 1), ('bob', 5), ('ann', 3)]
>>> harness.close()
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, CheckpointStore
from statebackend.errors import UsageError
from statebackend.functions import Metrics, ProcessFunction
from statebackend.operator_state import OperatorStateBackend
from statebackend.runtime import Batch, Job, Task
from statebackend.runtime.row_reader import rows_of
from statebackend.state import KeyedStateBackend, StateBackend, clocks
from statebackend.testing.clock import ManualClock
from statebackend.types import of, row_class

__all__ = ["Harness"]


class Harness:
    """Runs a function as a job does: on copies of it, with its state, and with time that stands still within a batch.

    Every call of ``process_...`` is a batch of its own: if it raises, state is as before, and the next call gets a
    fresh copy of the function. Each returns the output rows: as the function gave them or, with a ``schema``, as they
    come back from Arrow.

    ``key`` names the column or columns of the key; `process_batch` needs it. The other options are those of
    ``sb.spark.stateful``. If you pass no clock, it uses a `ManualClock`.

    >>> from statebackend.functions import map_with_state
    >>> with Harness(map_with_state(lambda row, n: (None, (n or 0) + row.n), int), str) as harness:
    ...     harness.process_element("ann", {"n": 3})
    ...     list(harness.keyed.keys("state"))
    []
    ['ann']
    """

    def __init__(
        self,
        function: ProcessFunction,
        key_type: Any,
        *,
        key: str | Sequence[str] | None = None,
        schema: Any = None,
        backend: str | StateBackend = "heap",
        clock: Any = None,
        max_parallelism: int = 128,
        event_time: str | None = None,
        delay: int | datetime.timedelta = 0,
        order_by: str | Sequence[str] | None = None,
        broadcast: str | None = None,
        null_keys: str = "fail",
    ) -> None:
        self._has_key = key is not None
        self._job = Job(
            function,
            key="key" if key is None else key,
            schema=schema,
            backend=backend,
            max_parallelism=max_parallelism,
            event_time=event_time,
            delay=delay,
            order_by=order_by,
            broadcast=broadcast,
            null_keys=null_keys,
        )
        self._key_type = of(key_type)
        #: The clock: set it, or advance it, between two steps.
        self.clock = ManualClock() if clock is None else clocks.checked_clock(clock)
        self._now: int | None = None
        self._batch_id = -1
        self._task = Task(self._job, self._key_type)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: CheckpointStore | None = None
        self._checkpoint_id = -1

    # --- steps ---

    def process_element(self, key: Any, row: Any) -> list[Any]:
        """Run the function over one row of a key. The row is a dict, or a tuple, which is passed on as it is.

        >>> from statebackend.functions import map_with_state
        >>> with Harness(map_with_state(lambda row, n: ((row.n,), None), int), str) as harness:
        ...     harness.process_element("ann", {"n": 3})
        [(3,)]
        """
        if self._job.is_batch:
            raise UsageError("a BatchProcessFunction takes batches", hint="call process_batch")
        if isinstance(row, dict):
            row = row_class(tuple(row))(*row.values())
        return self._given(
            self._task.run_pairs(self._batch_id + 1, [(key, row)], self._advanced(None)),
        )

    def process_batch(self, rows: Any) -> list[Any]:
        """Run the function over a batch: an Arrow table or record batch, or a list of dicts.

        >>> from statebackend.functions import map_with_state
        >>> with Harness(map_with_state(lambda row, n: ((row.n,), None), int), str, key="user") as harness:
        ...     harness.process_batch(pa.table({"user": ["ann"], "n": [3]}))
        [(3,)]
        """
        if not self._has_key:
            raise UsageError(
                "a batch needs to know its key", hint="name the column: Harness(..., key='user')"
            )
        if isinstance(rows, pa.RecordBatch):
            rows = pa.Table.from_batches([rows])
        elif not isinstance(rows, pa.Table):
            rows = pa.Table.from_pylist(list(rows))
        batch = Batch(self._job, rows)
        return self._given(self._task.run(self._batch_id + 1, batch, self._advanced(batch.max_event_time)))

    def advance_time(self, to: int) -> list[Any]:
        """Advance time to ``to`` milliseconds, without rows: timers that are due fire. Never goes back.

        >>> from statebackend.functions import map_with_state
        >>> with Harness(map_with_state(lambda row, n: ((row.n,), None), int), str) as harness:
        ...     harness.advance_time(60_000)
        []
        """
        if isinstance(self.clock, ManualClock):
            self.clock.set(max(to, self.clock.now()))
        self._now = max(to, self._now or 0)
        return self._given(self._task.run_pairs(self._batch_id + 1, [], self._now))

    # --- checkpoints ---

    def snapshot(self) -> Checkpoint:
        """Take a checkpoint of all state, as a job would write it, and return it for `restore`."""
        if self._store is None:
            self._folder = tempfile.TemporaryDirectory(prefix="statebackend-harness-")
            # Every checkpoint stays as long as the harness does.
            self._store = CheckpointStore(self._folder.name, retain=1_000_000)
            self._store.open_for_writing(key_type=self._key_type, max_parallelism=self._job.max_parallelism)
        self._checkpoint_id += 1
        pending = self._task.snapshot(self._checkpoint_id, self._store)
        return self._store.commit(
            self._checkpoint_id, [each.result() for each in pending], now=self._now or 0
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, with a fresh copy of the function and nothing else from memory."""
        self._task.close()
        self._now = checkpoint.now
        self._task = Task(self._job, self._key_type, restore=checkpoint, restored_id=checkpoint.id)

    def restart(self) -> None:
        """Stop and start the job: `snapshot`, then `restore` from it."""
        self.restore(self.snapshot())

    def _advanced(self, event_time: int | None) -> int:
        if self._job.event_time is None:
            now = clocks.read(self.clock)
        else:
            now = None if event_time is None else event_time - self._job.delay  # type: ignore[assignment]
        times = [each for each in (now, self._now) if each is not None]
        self._now = max(times, default=0)
        return self._now

    def _given(self, given: Any) -> list[Any]:
        self._batch_id += 1
        self._task.committed(self._batch_id)
        return list(rows_of(given)) if isinstance(given, pa.Table) else given

    # --- looking inside ---

    @property
    def keyed(self) -> KeyedStateBackend:
        """The keyed backend that the function works on."""
        return self._task.keyed

    @property
    def operator(self) -> OperatorStateBackend:
        """The operator state backend that the function works on."""
        operator: OperatorStateBackend = self._task.operator
        return operator

    @property
    def metrics(self) -> Metrics:
        """The function's counters."""
        return self._task.metrics

    # --- the end ---

    def close(self) -> None:
        """Close the function and drop its state. Idempotent."""
        self._task.close()
        if self._store is not None and self._folder is not None:
            self._store.close()
            self._folder.cleanup()
            self._store = self._folder = None

    def __enter__(self) -> Harness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
