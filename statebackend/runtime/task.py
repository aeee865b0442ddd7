"""One instance of a job: its keyed and operator state, and the copy of the function that works on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from statebackend.checkpoint import DataWriter, Snapshot
from statebackend.errors import StateMigrationError, usage
from statebackend.functions import (
    BatchProcessFunction,
    CheckpointedFunction,
    CheckpointListener,
    FunctionContext,
    FunctionInitializationContext,
    FunctionSnapshotContext,
    KeyedProcessFunction,
    KeyRowsFunction,
    Metrics,
    PlannedTimes,
    ProcessFunction,
    WholeKeysFunction,
)
from statebackend.keys import KeyGroupRange
from statebackend.operator_state import OperatorStateBackend
from statebackend.operator_state.operator_snapshots import PART as OPERATOR
from statebackend.runtime.batch_rows import Batch, ChunkedBatch
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.function_calls import (
    BatchCalls,
    FailedRows,
    FunctionCalls,
    KeyRowsCalls,
    RowCalls,
    WholeKeysCalls,
    is_interrupt,
)
from statebackend.runtime.job import Job
from statebackend.runtime.output import BatchOutput, OutputFiles, Result
from statebackend.runtime.start_checks import (
    KEPT,
    MIGRATED,
    Beginning,
    PlannedState,
    planned,
    without_renamed,
)
from statebackend.state import RESERVED, BackendMark, StateDescriptor, Watermarks
from statebackend.types import Type

_log = logging.getLogger(__name__)


#: After each batch, remove up to this much expired state from states with ``cleanup_idle``, or four times the
#: batch's rows: more than can have been added.
_CLEANED = 10_000

#: The name of a state, and "keyed" or "operator".
_Named = tuple[str, str]


class SnapshotTargets(Protocol):
    """Where the files of snapshots and outputs go: a `CheckpointStore`, or another process's half of one."""

    def begin_snapshot(self, checkpoint_id: int) -> DataWriter:
        """Make the writer of the files of one snapshot."""

    def abort(self, checkpoint_id: int) -> None:
        """Remove the files that writers for this checkpoint have made."""


class Task:
    """A function with its state. Batches run one after the other, and `committed` or `undo` ends each.

    ``restore`` is the source that backends restore from; ``restored_id`` is the id of that checkpoint.
    With ``refuses_unrequested``, the function must request every restored state in `open`.
    """

    def __init__(
        self,
        job: Job,
        key_type: Type,
        *,
        restore: Beginning | tuple[()] = (),
        restored_id: int | None = None,
        refuses_unrequested: bool = False,
        subtask_index: int = 0,
        parallelism: int = 1,
        key_group_range: KeyGroupRange | None = None,
    ) -> None:
        self.job = job
        self.metrics = Metrics()
        self.keyed = job.backend.create_keyed_backend(
            key_type, max_parallelism=job.max_parallelism, key_group_range=key_group_range, restore=restore
        )
        self._timers = self.keyed.timers if self.keyed.has_timers else None
        self.operator: OperatorStateBackend = job.backend.create_operator_backend(
            subtask_index=subtask_index, parallelism=parallelism, restore=restore
        )
        #: All restored states, until it is certain that the function requests them.
        keeps = isinstance(job.function, WholeKeysFunction)
        self._restored = self._unrequested() if refuses_unrequested and not keeps else []
        self._context = FunctionContext(
            self.keyed, self.operator, self.metrics, has_event_time=job.event_time is not None
        )
        self._function: ProcessFunction | None = None
        self._last_id = restored_id
        #: Of the running batch: its rows, the number of timers fired before it, and the watermarks before and after it,
        #: which a job without event time does not have.
        self._rows = self._fired_before = 0
        self._failed: FailedRows | None = None
        self._watermarks: Watermarks | None = None
        self._marks: tuple[BackendMark, BackendMark] | None = None
        #: The checkpoint for which a snapshot of the batch has been taken.
        self._snapshot_id: int | None = None

    # --- a batch ---

    def run(
        self,
        batch_id: int,
        batch: Batch | ChunkedBatch,
        now: int,
        files: OutputFiles | None = None,
        planned: PlannedTimes | None = None,
    ) -> Result:
        """Run the function over a batch and return the rows of each output: a table if it has a schema, else a list.

        With ``files``, rows go there as they come, and the last few of each output are returned. ``planned`` has the
        engine's times of the batch.
        If anything raises, state is as before, and the next batch gets a fresh copy of the function.
        """

        def run(calls: FunctionCalls) -> None:
            calls.run(batch)
            self._rows = batch.num_rows

        return self._begun(batch_id, now, batch.times, run, files, planned)

    def pass_time(
        self, batch_id: int, now: int, times: RowTimes | None, planned: PlannedTimes | None = None
    ) -> Result:
        """The same without rows: timers that are due fire."""
        return self._begun(batch_id, now, times, lambda calls: None, planned=planned)

    def _begun(
        self,
        batch_id: int,
        now: int,
        times: RowTimes | None,
        run: Callable[[FunctionCalls], None],
        files: OutputFiles | None = None,
        planned: PlannedTimes | None = None,
    ) -> Result:
        if self._marks is not None:
            raise usage.no_batch("the batch before has not been ended")
        self._watermarks = None if times is None else (times.before, times.after)
        self.keyed.begin(now, self._watermarks)
        context = self._context
        context.now, context.batch_id, context._at = now, batch_id, context._nowhere
        context.time_domain, context.watermark = None, None if times is None else times.before
        context._planned = planned
        self._rows = 0
        self._failed = None
        self._fired_before = 0 if self._timers is None else self._timers.fired
        of_operator = self.operator.mark()
        try:
            self._open()
            self._check_requested()
            # Mark after open: a backend may empty a state that was first asked for after a mark, on a rollback to it.
            self._marks = (self.keyed.mark(), of_operator)
        except BaseException:
            self.operator.rollback(of_operator)
            self.operator.release(of_operator)
            self._take_watermark_back()
            self._discard_function()
            raise
        try:
            given = BatchOutput(self.job.outputs, files)
            self._context._outputs = given.outputs
            calls = self._calls(given)
            calls.forget_key()
            run(calls)
            calls.fire_all(now)
            if times is not None:
                self.keyed.begin(now, (times.after, times.after))
            self.keyed.advance(max(_CLEANED, 4 * self._rows))
            if self._function is not None and isinstance(self._function, CheckpointedFunction):
                self._function.snapshot_state(
                    FunctionSnapshotContext(checkpoint_id=batch_id, checkpoint_timestamp=now)
                )
            self._tell_failed(batch_id)
            return given.result()
        except BaseException:
            self.undo()
            raise
        finally:
            self._context._outputs = None

    @property
    def timers_fired(self) -> int:
        return 0 if self._timers is None else self._timers.fired - self._fired_before

    @property
    def rows_changed(self) -> tuple[int | None, int | None]:
        """The number of rows of state that the batch has written, and removed; None if the backend does not know."""
        if self._marks is None:
            raise usage.no_batch("no batch has been run")
        return self.keyed.count_changes(self._marks[0]) or (None, None)

    def snapshot(self, checkpoint_id: int, store: SnapshotTargets) -> list[Snapshot]:
        """Open a view of all state, to be written in the background; each returned object has ``result()``."""
        self._check_requested()
        self._snapshot_id = checkpoint_id
        return [
            self.keyed.snapshot(checkpoint_id, store.begin_snapshot(checkpoint_id)),
            self.operator.snapshot(checkpoint_id, store.begin_snapshot(checkpoint_id)),
        ]

    def committed(self, batch_id: int) -> None:
        """Note that the batch is committed: it can no longer be undone."""
        self._end()
        self._last_id = batch_id
        self._restored = []
        if self._function is not None and isinstance(self._function, CheckpointListener):
            self._function.notify_checkpoint_complete(batch_id)

    def undo(self) -> None:
        """Return all state to the end of the previous batch, and discard the function's copy."""
        if self._marks is not None:
            keyed, operator = self._marks
            self.keyed.rollback(keyed)
            self.operator.rollback(operator)
            self._take_watermark_back()
            taken = self._snapshot_id
            self._end()
            function = self._function
            if taken is not None and function is not None and isinstance(function, CheckpointListener):
                _call_or_log(function.notify_checkpoint_aborted, taken)
        self._discard_function()

    def _take_watermark_back(self) -> None:
        """The watermark is that before the batch again, for views and savepoints that are taken from here."""
        if self._watermarks is not None:
            before, _ = self._watermarks
            self.keyed.begin(self._context.now, (before, before))

    def _end(self) -> None:
        if self._marks is not None:
            (keyed, operator), self._marks = self._marks, None
            self._snapshot_id = None
            self.keyed.release(keyed)
            self.operator.release(operator)

    def _calls(self, given: BatchOutput) -> FunctionCalls:
        """What brings rows and timers of the running batch to the function."""
        function = self._function
        after = None if self._watermarks is None else self._watermarks[1]
        common = (self.job, self.keyed, self._context, given, after)
        if isinstance(function, WholeKeysFunction):
            return WholeKeysCalls(function, *common)
        if isinstance(function, BatchProcessFunction):
            return BatchCalls(function, *common)
        if isinstance(function, KeyRowsFunction):
            return KeyRowsCalls(function, *common)
        assert isinstance(function, KeyedProcessFunction)
        if self.job.survives_errors:
            self._failed = FailedRows(self.keyed, self.operator, given, self.job.error_output)
        return RowCalls(function, self._failed, *common)

    def _tell_failed(self, batch_id: int) -> None:
        if self._failed is not None:
            self._failed.tell(batch_id)

    @property
    def rows_failed(self) -> int | None:
        """The number of rows of the last batch that failed; None if such rows fail the batch."""
        if not self.job.survives_errors:
            return None
        return 0 if self._failed is None else self._failed.counts.total()

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

    def check(self) -> None:
        """Open the function; raise if that fails, or if it does not request a restored state."""
        self.keyed.begin(0, None if self.job.event_time is None else (None, None))
        self._open()
        self._check_requested()

    def declared(self) -> tuple[dict[str, StateDescriptor], list[str]]:
        """The keyed states that the function has requested, and the names of its operator states."""
        states = getattr(self.keyed, "_states", {})
        keyed = {name: state.descriptor for name, state in states.items() if not name.startswith(RESERVED)}
        return keyed, self.operator.registered_state_names()

    def _planned(self) -> list[PlannedState]:
        """What becomes of each state."""
        keyed, operators = self.declared()
        how = getattr(self.keyed, "migrated_states", {})
        actions = {name: (MIGRATED, how[name]) if name in how else (KEPT, None) for name in keyed}
        stored = {part: {name for name, own in self._restored if own == part} for part in ("keyed", OPERATOR)}
        return [
            *planned("keyed", without_renamed(stored["keyed"], keyed.values()), actions),
            *planned(OPERATOR, stored[OPERATOR], dict.fromkeys(operators, (KEPT, None))),
        ]

    def _unrequested(self) -> list[_Named]:
        return _named(self.keyed.undeclared_states(), self.operator.undeclared_states())

    def _check_requested(self) -> None:
        """Raise if the function has not requested a restored state: a misspelt name would begin with an empty state."""
        missing = self._unrequested() if self._restored else []
        if missing:
            shared = _shared([*self._restored, *_named(*self.declared())])
            raise StateMigrationError(
                f"the function does not request every stored state: {_listed(missing, shared)} missing",
                code="STATE_MIGRATION.NOT_REQUESTED",
                detail="; ".join(map(str, self._planned())),
                hint=f"correct the name, or request the state in open(). {_how_to_drop(missing, self._restored)}",
            )

    def _discard_function(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            _call_or_log(function.close)

    def close(self) -> None:
        """Close the function and drop all state. Idempotent."""
        try:
            self._discard_function()
        finally:
            self._marks = None
            self.keyed.close()
            self.operator.close()


def _named(keyed: Iterable[str], operator: Iterable[str]) -> list[_Named]:
    return sorted({*((name, "keyed") for name in keyed), *((name, "operator") for name in operator)})


def _shared(states: Iterable[_Named]) -> set[str]:
    """The names that a keyed and an operator state have."""
    names = [name for name, _ in set(states)]
    return {name for name in names if names.count(name) > 1}


def _listed(states: Iterable[_Named], shared: set[str]) -> str:
    return ", ".join(f"{part} {name!r}" if name in shared else repr(name) for name, part in states) or "none"


def _how_to_drop(missing: list[_Named], stored: list[_Named]) -> str:
    shared = _shared(stored)
    names = [name for name, _ in missing if name not in shared]
    if not names:
        return "sb.tools.drop_state cannot drop one of two stored states that share a name"
    return f"If the state is no longer needed, run sb.tools.drop_state(store, {names[0]!r}), or approve sb.tools.plan"


def _call_or_log(method: Callable[..., None], *arguments: object) -> None:
    """Call a method whose failure must not hide the reason for discarding the function."""
    try:
        method(*arguments)
    except BaseException as error:
        if is_interrupt(error):
            raise
        _log.warning("%s failed", method.__qualname__, exc_info=True)
