"""One instance of a job: its keyed and operator state, and the copy of the function that works on them.

>>> from statebackend.functions import map_with_state
>>> from statebackend.types import of
>>> job = Job(map_with_state(lambda row, n: ((row.user, (n or 0) + 1), (n or 0) + 1), int), key="user")
>>> task = Task(job, of("string"))
>>> task.run(0, Batch(job, pa.table({"user": ["a", "b", "a"]})), now=0)
[('a', 1), ('b', 1), ('a', 2)]
>>> task.committed(0)
>>> task.close()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

import pyarrow as pa

from statebackend._core.handles.row_loop import Output, run_rows
from statebackend.checkpoint import CheckpointStore, PendingSnapshot
from statebackend.errors import SerializationTypeError, UsageError
from statebackend.functions import (
    BatchProcessFunction,
    CheckpointedFunction,
    CheckpointListener,
    FunctionContext,
    FunctionInitializationContext,
    FunctionSnapshotContext,
    KeyedProcessFunction,
    Metrics,
)
from statebackend.keys import VOID, KeyGroupRange
from statebackend.operator_state import OperatorStateBackend
from statebackend.runtime.batches import Batch, keys_of
from statebackend.runtime.job import Job
from statebackend.runtime.row_reader import row_maker, rows_of
from statebackend.runtime.start import Beginning
from statebackend.state import DOMAINS, Mark
from statebackend.types import Type

__all__ = ["Task"]

_log = logging.getLogger(__name__)

#: A key and its row.
Pair: TypeAlias = tuple[object, object]
#: What a batch gave: a table if the job has a schema, else rows as the function gave them.
Result: TypeAlias = pa.Table | list[object]

#: After each batch, remove up to this much of what has expired from states with ``cleanup_idle``, or four times the
#: batch's rows: more than can have been added.
_CLEANED = 10_000
#: Rows come in pieces of this many, and go out in such of at least as many.
_PIECE = 65_536


class BatchClock:
    """The time of the batch that runs, for backends that know no `begin_batch`.

    >>> BatchClock().now()
    0
    """

    __slots__ = ("_now",)

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        """The time given to `set`, in milliseconds."""
        return self._now

    def set(self, now: int) -> None:
        """Set the time of another batch."""
        self._now = now


class Task:
    """A function with its state. Batches run one after the other, and `committed` or `undo` ends each.

    ``restore`` is the source that backends restore from; ``restored_id`` is the id of that checkpoint.

    >>> from statebackend.functions import map_with_state
    >>> from statebackend.types import STRING
    >>> Task(Job(map_with_state(lambda row, n: (None, n), int), key="user"), STRING).close()
    """

    def __init__(
        self,
        job: Job,
        key_type: Type,
        *,
        restore: Beginning | tuple[()] = (),
        restored_id: int | None = None,
        subtask_index: int = 0,
        parallelism: int = 1,
        key_group_range: KeyGroupRange | None = None,
    ) -> None:
        self.job = job
        self.metrics = Metrics()
        self._clock = BatchClock()
        self.keyed = job.backend.create_keyed_backend(
            key_type,
            max_parallelism=job.max_parallelism,
            key_group_range=key_group_range,
            clock=self._clock,
            restore=restore,
        )
        self.operator: OperatorStateBackend = job.backend.create_operator_backend(
            subtask_index=subtask_index, parallelism=parallelism, restore=restore
        )
        self._context = FunctionContext(
            self.keyed,
            self.operator,
            self.metrics,
            has_event_time=job.event_time is not None,
            has_timers=not job.is_batch,
        )
        self._function: KeyedProcessFunction | BatchProcessFunction | None = None
        self._last_id = restored_id
        #: Of the running batch: its rows, and the number of timers fired before it.
        self._rows = self._fired_before = 0
        self._marks: tuple[Mark, Mark] | None = None
        #: The checkpoint for which a snapshot of the batch has been taken.
        self._taken: int | None = None

    # --- a batch ---

    def run(self, batch_id: int, batch: Batch, now: int) -> Result:
        """Run the function over a batch and return its rows: a table if the job has a schema, otherwise a list.

        If anything raises, state is as before, and the next batch gets a fresh copy of the function.
        """
        run = self._run_batch if self.job.is_batch else self._run_rows
        return self._begun(batch_id, now, partial(run, batch))

    def run_pairs(self, batch_id: int, pairs: Iterable[Pair], now: int) -> Result:
        """The same for pairs of key and row."""
        return self._begun(batch_id, now, partial(self._run_pairs, pairs))

    def _begun(self, batch_id: int, now: int, run: Callable[[_Given], None]) -> Result:
        if self._marks is not None:
            raise UsageError("the batch before has not been ended")
        self._clock.set(now)
        self.keyed.begin_batch(now)
        self._rows = 0
        self._fired_before = self.keyed.timers.fired if self.keyed.has_timers else 0
        self._context.now, self._context.batch_id = now, batch_id
        of_operator = self.operator.mark()
        try:
            self._open()
            # Mark after open: a backend may empty a state that was first asked for after a mark, on a rollback to it.
            self._marks = (self.keyed.mark(), of_operator)
        except BaseException:
            self.operator.rollback(of_operator)
            self.operator.release(of_operator)
            self._discard_function()
            raise
        try:
            given = _Given(self.job)
            self._forget_key()
            run(given)
            self._fire(given, now)
            self.keyed.advance(max(_CLEANED, 4 * self._rows))
            if self._function is not None and isinstance(self._function, CheckpointedFunction):
                self._function.snapshot_state(
                    FunctionSnapshotContext(checkpoint_id=batch_id, checkpoint_timestamp=now)
                )
            return given.result()
        except BaseException:
            self.undo()
            raise

    @property
    def timers_fired(self) -> int:
        """The number of timers that the last batch fired."""
        return self.keyed.timers.fired - self._fired_before if self.keyed.has_timers else 0

    @property
    def rows_changed(self) -> tuple[int | None, int | None]:
        """The number of rows of state that the batch has written, and removed; None if the backend does not know."""
        if self._marks is None:
            raise UsageError("no batch has been run")
        return self.keyed.count_changes(self._marks[0]) or (None, None)

    def snapshot(self, checkpoint_id: int, store: CheckpointStore) -> list[PendingSnapshot]:
        """Open a view of all state, to be written in the background; each returned object has ``result()``."""
        self._taken = checkpoint_id
        return [
            self.keyed.snapshot(checkpoint_id, store),
            self.operator.snapshot(checkpoint_id, store),
        ]

    def committed(self, batch_id: int) -> None:
        """Note that the batch is committed: it can no longer be undone."""
        self._end()
        self._last_id = batch_id
        if self._function is not None and isinstance(self._function, CheckpointListener):
            self._function.notify_checkpoint_complete(batch_id)

    def undo(self) -> None:
        """Return all state to the end of the previous batch, and discard the function's copy."""
        if self._marks is not None:
            keyed, operator = self._marks
            self.keyed.rollback(keyed)
            self.operator.rollback(operator)
            taken = self._taken
            self._end()
            function = self._function
            if taken is not None and function is not None and isinstance(function, CheckpointListener):
                _told(function.notify_checkpoint_aborted, taken)
        self._discard_function()

    def _end(self) -> None:
        if self._marks is not None:
            (keyed, operator), self._marks = self._marks, None
            self._taken = None
            self.keyed.release(keyed)
            self.operator.release(operator)

    # --- rows ---

    def _run_rows(self, batch: Batch, given: _Given) -> None:
        if batch.broadcast is not None:
            process = self._keyed_function().process_broadcast
            for row in rows_of(batch.broadcast):
                given.add(process(row, self._context))
            self._forget_key()
        self._rows = batch.rows.num_rows
        process, is_composite = self._keyed_function().process_element, not isinstance(self.job.key, str)
        places = tuple(map(batch.rows.column_names.index, self.job.columns))
        for start in range(0, batch.rows.num_rows, _PIECE):
            for part in batch.rows.slice(start, _PIECE).to_batches():
                rows = row_maker(part)
                run_rows(rows, places, is_composite, self.keyed, process, self._context, given.output)
            given.settle()

    def _run_pairs(self, pairs: Iterable[Pair], given: _Given) -> None:
        if self.job.is_batch:  # only time goes on
            return
        process = self._keyed_function().process_element
        for key, row in pairs:
            self.keyed.set_current_key(key)
            given.output.take(process(row, self._context))

    def _run_batch(self, batch: Batch, given: _Given) -> None:
        assert isinstance(self._function, BatchProcessFunction)
        context, process = self._context, self._function.process_batch
        self._rows = batch.rows.num_rows
        for each in batch.rows.to_batches() or [_empty_batch(batch.rows.schema)]:
            context._keys = keys_of(self.job, each)
            try:
                given.add_batches(process(each, context))
            finally:
                context._keys = None

    def _fire(self, given: _Given, now: int) -> None:
        """Fire the timers that are due at the batch's time, those in event time first."""
        if self.job.is_batch or not self.keyed.has_timers:
            return
        timers, on_timer, context = self.keyed.timers, self._keyed_function().on_timer, self._context
        before = -1
        while timers.fired != before:  # a timer of one domain may register one in the other
            before = timers.fired
            for domain in DOMAINS:
                for timestamp in timers.due(now, domain):
                    given.add(on_timer(timestamp, context))

    def _forget_key(self) -> None:
        """No current key, and no namespace: neither may depend on the batch before, which a restart forgets."""
        self.keyed.clear_current_key()
        self.keyed.set_current_namespace(VOID)

    # --- the function ---

    def _open(self) -> None:
        if self._function is not None:
            return
        self._function = self.job.fresh_function()
        self._function.open(self._context)
        if isinstance(self._function, CheckpointedFunction):
            self._function.initialize_state(
                FunctionInitializationContext(self.operator, self.keyed, restored_checkpoint_id=self._last_id)
            )

    def _keyed_function(self) -> KeyedProcessFunction:
        """The function of a job that takes rows one by one."""
        assert self._function is not None
        assert not isinstance(self._function, BatchProcessFunction)
        return self._function

    def _discard_function(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            _told(function.close)

    def close(self) -> None:
        """Close the function and drop all state. Idempotent."""
        self._discard_function()
        self._marks = None
        self.keyed.close()
        self.operator.close()


def _told(method: Callable[..., None], *arguments: object) -> None:
    """Call a method whose failure must not hide the reason for discarding the function."""
    try:
        method(*arguments)
    except Exception:  # noqa: BLE001 - any that the user's code raises
        _log.warning("%s failed", method.__qualname__, exc_info=True)


class _Given:
    """Rows that a function returned; in Arrow as soon as there are many, if the job has a schema."""

    __slots__ = ("_parts", "_schema", "_writer", "output")

    def __init__(self, job: Job) -> None:
        self._schema = job.output
        self._writer = None if job.output is None else job.output.writer()
        #: Takes what a call gave.
        self.output = Output(self._writer, _checked_iterable)
        self._parts: list[pa.Table] = []

    def add(self, rows: Iterable[object] | None) -> None:
        if rows is not None:
            self.output.take(_checked_iterable(rows))
            self.settle()

    def settle(self) -> None:
        """Bring what has come to Arrow, if it is much."""
        if self._writer is not None and self._writer.count >= _PIECE:
            self._finish_part()

    def _finish_part(self) -> None:
        assert self._schema is not None
        assert self._writer is not None
        self._parts.append(self._schema.table_of_written(self._writer))

    def add_batches(self, batches: object) -> None:
        """Add the result of `process_batch`; a generator may still run to its end here."""
        if self._schema is not None:
            self._parts.append(self._schema.table_of_batches(batches))
            return
        for table in _tables(batches):
            self.output.take(rows_of(table))

    def result(self) -> Result:
        if self._writer is None:
            return self.output.rows
        if self._writer.count or not self._parts:
            self._finish_part()
        return pa.concat_tables(self._parts)


def _checked_iterable(produced: object) -> Iterable[object]:
    if isinstance(produced, (str, bytes, dict)) or not isinstance(produced, Iterable):
        raise SerializationTypeError(
            f"the function gave a {type(produced).__name__}",
            code="SERIALIZATION.OUTPUT",
            hint="yield rows, or return a list of them",
        )
    return produced


def _empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _tables(produced: object) -> Iterator[pa.Table]:
    if isinstance(produced, pa.RecordBatch):
        yield pa.Table.from_batches([produced])
    elif isinstance(produced, pa.Table):
        yield produced
    elif produced is not None:
        for each in _checked_iterable(produced):
            yield from _tables(each)
