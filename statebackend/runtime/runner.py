"""A job on its store: opens and restores, runs a batch, commits state and output together.

`Commits` decides which batch may come and publishes it, `BatchTime` at what times it runs, and an execution runs it.
This file joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from statebackend.checkpoint import Checkpoint, CheckpointStore
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import UsageError
from statebackend.runtime.batch_time import BatchTime
from statebackend.runtime.commits import Commits
from statebackend.runtime.execution import Execution
from statebackend.runtime.job import Job
from statebackend.runtime.local_execution import LocalExecution
from statebackend.runtime.origin import Incoming
from statebackend.runtime.output import Committed
from statebackend.runtime.progress import Stopwatch
from statebackend.runtime.start import Beginning, check_beginning, source_of, without_dropped
from statebackend.state import clocks
from statebackend.types import Type

__all__ = ["Runner"]


class Runner:
    """Runs the batches of one query, and is the only one to write into its store.

    ``query`` names the query that owns the store; ``stream`` is the engine's own id of what is streamed, and
    ``location`` where it keeps its place in that.
    ``delivered`` names the outputs that have a sink, with the columns that cut each into files; None: all have, whole.
    ``target_of`` is given the name of an output, the batch and the incarnation, and says what the batch becomes in the
    sink of that: the manifest keeps it.
    ``execution`` makes what runs batches, from what `LocalExecution` takes.
    ``restore_from`` is a store, a checkpoint or a savepoint that an empty store begins with, at batch ``first_batch``.
    Any error of a commit closes it, because memory may then differ from what is committed.
    """

    def __init__(
        self,
        job: Job,
        store: CheckpointStore,
        key_type: Type,
        *,
        query: str | None = None,
        clock: clocks.Clock | None = None,
        restore_from: Beginning | None = None,
        first_batch: int | None = None,
        on_gap: str = "fail",
        delivered: Mapping[str, Sequence[str]] | None = None,
        target_of: Callable[[str, int, str], str] | None = None,
        stream: str | None = None,
        location: str | None = None,
        execution: Callable[..., Execution] = LocalExecution,
    ) -> None:
        check_beginning(restore_from, first_batch, on_gap)
        self._job = job
        self._store = store
        self._key_type = key_type
        self._delivered = dict.fromkeys(job.outputs, ()) if delivered is None else delivered
        self._made_execution = execution
        self._execution: Execution | None = None
        self._time = BatchTime(job, clock, store)
        self._commits = Commits(
            job,
            store,
            first_batch=first_batch,
            on_gap=on_gap,
            delivered=self._delivered,
            target_of=target_of,
            stream=stream,
            location=location,
        )
        source: Checkpoint | Savepoint | None = self._commits.open(query, key_type)
        try:
            if source is None and restore_from is not None:
                source = source_of(restore_from)
            self._execution = self._begun(source)
        except BaseException:
            self.close()
            raise

    def _begun(self, source: Checkpoint | Savepoint | None) -> Execution:
        if self.last_id is None:
            source = without_dropped(source, self._store.done.dropped_states_of(None), self._store.uri)
        self._time.begin_with(source)
        return self._made_execution(
            self._job,
            self._key_type,
            self._store,
            source=source,
            delivered=self._delivered,
        )

    @property
    def is_open(self) -> bool:
        """True if it can run a batch."""
        return self._execution is not None

    @property
    def last_id(self) -> int | None:
        """The newest committed batch; None in an empty store."""
        return self._commits.last_id

    def run(self, batch_id: int, incoming: Incoming, watch: Stopwatch) -> Committed:
        """Run a batch and commit it; or find that it is committed, and let the engine compute it for itself.

        If anything raises before the commit, memory is at the end of the batch before.
        """
        if self._execution is None:
            raise UsageError("the job is closed")
        if batch_id == self.last_id:
            return self._commits.replayed(incoming, watch)
        if not self._commits.follows(batch_id):
            self._begin_anew(batch_id)
        planned_at = None if incoming.planned is None else incoming.planned.get("time")
        assert planned_at is None or isinstance(planned_at, int)
        begun = self._time.begin(self.last_id, planned_at)
        outcome = self._execution.run(batch_id, incoming, begun, watch)
        times = self._time.after(begun, outcome.times)
        try:
            committed = self._commits.commit(batch_id, outcome.ran, times, outcome.identity, watch)
        except BaseException:
            # Whether it is there may not be known: the next batch looks, and begins from what it finds.
            self.close()
            raise
        self._time.committed = times
        self._execution.committed(batch_id)
        return committed

    def still_held(self) -> int:
        """The epoch of this writer; `CommitConflictError` if a newer one has opened the store."""
        return self._commits.check_held()

    def _begin_anew(self, batch_id: int) -> None:
        assert self._execution is not None
        self._execution.close()
        try:
            self._commits.begin_anew(batch_id)
            self._execution = self._begun(None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the function, drop state from memory, and give the store up. Idempotent."""
        execution, self._execution = self._execution, None
        try:
            if execution is not None:
                execution.close()
        finally:
            self._commits.close()
