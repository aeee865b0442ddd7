"""A job on its store: opens and restores, runs a batch, commits state and output together.

`Runner` decides which batch may come and publishes it, `BatchTime` at what times it runs, and an execution runs it.
With S the newest committed id, batch S+1 may run. Batch S was committed: it is delivered again, and not run, if its
rows are those that were committed. Anything else is a gap. An empty store takes batch 0, or the batch that
``start`` or a reset has named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import pyarrow as pa

from statebackend.checkpoint import Checkpoint, CheckpointStore
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import BatchGapError, UsageError, usage
from statebackend.keys import KeyGroupRange
from statebackend.runtime.batch_identity import BatchRecord, BatchSource, Identity
from statebackend.runtime.batch_progress import GrowthWatch, Json, Stopwatch
from statebackend.runtime.batch_rows import Batch
from statebackend.runtime.execution import BatchResult, BatchTime, CheckpointTimes, Execution, LocalExecution
from statebackend.runtime.job import Job
from statebackend.runtime.live_view import StateView, no_view
from statebackend.runtime.output import CommittedBatch, check_deliverable
from statebackend.runtime.start_checks import (
    StartFrom,
    beginning_of,
    check_fixed,
    check_key_columns,
    other_query,
)
from statebackend.runtime.task import Task
from statebackend.state import clocks
from statebackend.types import Type

_log = logging.getLogger(__name__)


def gap(batch_id: int, last: int | None, uri: str, first_batch: int | None = None) -> BatchGapError:
    """The error for a batch that does not follow what is committed: nothing, or batch ``last``.

    ``first_batch`` is the batch that an empty store is to begin with, unless that is the first of the stream.
    """
    without_state = f"sb.tools.reset(store, first_batch={batch_id}) goes on without the old state"
    if last is None:
        wanted = f"the job is to begin with batch {first_batch}" if first_batch else "no state found"
        return BatchGapError(
            f"the stream is at batch {batch_id}, and {wanted}",
            code="BATCH_GAP.NO_STATE",
            detail=uri,
            hint="state was removed, or its path changed: give the right state=; or begin the query again with a new "
            f"checkpointLocation; or begin a new store with the state of all rows before batch {batch_id}: "
            f"start=sb.spark.StartFrom(source, first_batch={batch_id}); {without_state}",
        )
    if batch_id > last:
        return BatchGapError(
            f"state is behind the stream: it holds batch {last}, and batch {batch_id} is to come",
            code="BATCH_GAP.STATE_BEHIND",
            detail=uri,
            hint="state was restored from an older copy: restore the stream's checkpointLocation of the same "
            f"moment; {without_state}",
        )
    return BatchGapError(
        f"the stream is behind state: batch {batch_id} is to come, and batch {last} is committed",
        code="BATCH_GAP.STREAM_BEHIND",
        detail=uri,
        hint="the stream's checkpointLocation was restored from an older copy, or removed: restore the state of the "
        f"same moment, or sb.tools.rewind to batch {batch_id - 1} if it is retained; {without_state}",
    )


def other_rows(
    batch_id: int, uri: str, then: Identity, now: Identity | None, previous: int | None
) -> BatchGapError:
    """The error for a batch with the number of the newest committed one, and other rows.

    ``previous`` is the checkpoint to go back to; None if it is not retained or there is none. The message shows no
    offsets, because a user's own source may put anything into them.
    """
    if previous is not None or batch_id == 0:
        back = f"take the batch back with sb.tools.rewind(store, to={previous}, checkpoint_location=None); "
        back += "it then runs with the new rows"
    else:
        back = (
            f"bring checkpoint {batch_id - 1}, which is not retained, back from a copy of the store; or begin again, "
            "with a new state= and a new checkpointLocation"
        )
    if now is None:
        hint = "Spark's plan of a batch cannot be read here, as through Spark Connect: run this batch once the way the "
        hint += f"query ran before; or {back}"
    else:
        hint = "Spark has planned the batch again: its offset log was lost or changed, or its checkpointLocation is "
        hint += "another, or the frame gives other rows each time. Bring the checkpointLocation back as it was; or "
        hint += back
    return BatchGapError(
        f"batch {batch_id} is committed, and Spark now gives other rows under this number",
        code="BATCH_GAP.OTHER_ROWS",
        detail=f"{uri}, batch {batch_id}; committed: {_identity_text(then)}; to come: {_identity_text(now)}",
        hint=f"{hint}. Its sink may have been called already with the old ones",
    )


def other_stream(batch_id: int, uri: str, then: str | None, now: str | None) -> BatchGapError:
    """The error for a batch with the right number that another stream planned, at another checkpointLocation."""
    return BatchGapError(
        f"batch {batch_id} is of another stream than the committed batch",
        code="BATCH_GAP.OTHER_ROWS",
        detail=f"{uri}; checkpointLocation of the committed batch: {then}; of this batch: {now}",
        hint="the query has the uid= of another one, and its own id and checkpointLocation: bring its "
        "checkpointLocation back; or give it a uid and its own store (start=sb.spark.StartFrom(...) lets it "
        "begin with the state of this one); or begin with no state: "
        "sb.tools.rewind(store, to=None, checkpoint_location=None)",
    )


def _identity_text(identity: Identity | None) -> str:
    if identity is None:
        return "not known"
    if identity.get("kind") == "plan":
        return f"planned at {identity['time']}"
    return f"{identity.get('rows')} rows, digest {identity.get('digest')}"


def newest_of(job: Job, store: CheckpointStore) -> Checkpoint | None:
    """The newest checkpoint; `StateMigrationError` if a job with another key or other fixed settings made it."""
    newest = store.latest()
    if newest is None:
        return None
    checkpoint = store.open(newest)
    check_key_columns(checkpoint, job.columns, store.uri)
    check_fixed(checkpoint, job.fixed, store.uri)
    return checkpoint


def check_start(
    job: Job,
    schema: pa.Schema,
    key_type: Type,
    store: CheckpointStore,
    start: StartFrom | None,
    query: str | None,
) -> None:
    """Raise if a job cannot run on batches with these columns, or on the state of the store, which stays as it is.

    It calls `open` of the function on the state of one key group.
    """
    Batch(job, schema.empty_table(), clock=0)
    store.check_use(query=query, key_type=key_type, max_parallelism=job.max_parallelism)
    source: Checkpoint | Savepoint | None = newest_of(job, store)
    if source is None:
        source, _ = beginning_of(store.log_state(), start, store.uri)
    with closing(
        Task(
            job,
            key_type,
            restore=() if source is None else source,
            restored_id=getattr(source, "id", None),
            refuses_unrequested=True,
            key_group_range=KeyGroupRange(0, 0),
        )
    ) as task:
        task.check()


class Runner:
    """Runs the batches of one query, and is the only one to write into its store.

    ``query`` names the query that owns the store; ``stream`` is the engine's id of the stream, and
    ``location`` where it keeps its place in that. Manifests have the ``name`` that the engine shows for it.
    ``delivered`` names the outputs that have a sink, with the columns that cut each into files; None: all have, whole.
    ``target_of`` is given the name of an output, the batch and the incarnation, and says what the batch becomes in the
    sink of that: the manifest keeps it. ``log_of`` reads the engine's log of a batch, for the manifest.
    ``execution`` makes the execution from the value that `LocalExecution` takes.
    ``start`` says how a new store begins; by default with no state, at batch 0.
    Any error of a commit closes it, because memory may then differ from the committed state.
    """

    def __init__(
        self,
        job: Job,
        store: CheckpointStore,
        key_type: Type,
        *,
        query: str | None = None,
        clock: clocks.Clock | None = None,
        start: StartFrom | None = None,
        delivered: Mapping[str, Sequence[str]] | None = None,
        target_of: Callable[[str, int, str], str] | None = None,
        stream: str | None = None,
        location: str | None = None,
        name: str | None = None,
        log_of: Callable[[int], dict[str, Json] | None] | None = None,
        execution: Callable[..., Execution] = LocalExecution,
    ) -> None:
        self._job = job
        self._store = store
        self._key_type = key_type
        self._delivered = dict.fromkeys(job.outputs, ()) if delivered is None else delivered
        self._target_of = target_of
        self._stream = stream
        self._location = location
        self._name = name
        self._log_of = log_of
        self._execution: Execution | None = None
        self._time = BatchTime(job, clock, store)
        self._newest: Checkpoint | None = None
        self._growth = GrowthWatch()
        #: The newest checkpoint's record of its batch.
        self._origin = BatchRecord()
        self._open_store(query)
        try:
            self._newest = newest_of(job, store)
            if self._newest is not None:
                self._origin = BatchRecord.of(self._newest.manifest)
            source: Checkpoint | Savepoint | None = self._newest
            #: The batches that may come while the store is empty.
            self._first_ids = {0}
            if source is None:
                source, self._first_ids = beginning_of(store.done, start, store.uri)
            self._time.begin_with(source)
            self._execution = execution(job, key_type, store, source=source, delivered=self._delivered)
        except BaseException:
            self.close()
            raise

    def _open_store(self, query: str | None) -> None:
        """Open the store for this query alone."""
        try:
            self._store.open_for_writing(
                query=query,
                key_type=self._key_type,
                max_parallelism=self._job.max_parallelism,
                refuse_live=True,
            )
        except UsageError as error:
            if error.code == "USAGE.OTHER_QUERY":
                raise other_query(error, self._store, self._location) from error
            raise

    @property
    def is_open(self) -> bool:
        """True if it can run a batch."""
        return self._execution is not None

    @property
    def last_id(self) -> int | None:
        """The newest committed batch; None in an empty store."""
        return None if self._newest is None else self._newest.id

    def run(self, batch_id: int, incoming: BatchSource, watch: Stopwatch) -> CommittedBatch:
        """Run a batch and commit it; or find that it is committed, and let the engine compute it for itself.

        If anything raises before the commit, memory is at the end of the batch before.
        """
        if self._execution is None:
            raise usage.no_batch("the job is closed")
        if batch_id == self.last_id:
            return self._replayed(incoming, watch)
        self._check_follows(batch_id)
        planned_at = None if incoming.planned is None else incoming.planned.get("time")
        assert planned_at is None or isinstance(planned_at, int)
        begun = self._time.begin(self.last_id, planned_at, incoming.times)
        outcome = self._execution.run(batch_id, incoming, begun, watch)
        times = self._time.after(begun, outcome.times)
        try:
            if incoming.synced is not None:
                with watch.part("plan"):
                    incoming.synced()
            committed = self._commit(batch_id, outcome.ran, times, outcome.identity, watch)
        except BaseException:
            # Whether it is there may not be known: the next batch looks, and begins from the checkpoint found.
            self.close()
            raise
        self._time.committed = times
        self._execution.committed(batch_id)
        return committed

    def view(self) -> StateView:
        """The state after the newest committed batch; called between two batches."""
        if self._execution is None or self._newest is None:
            raise no_view("no batch is committed", self._store.uri, "call view() after the first batch")
        return self._execution.view(self._newest)

    def still_held(self) -> int:
        """The epoch of this writer; `CommitConflictError` if a newer one has opened the store."""
        self._store.check_held()
        return self._store.epoch

    # --- the batch that may come ---

    def _check_follows(self, batch_id: int) -> None:
        last = self.last_id
        if batch_id not in (self._first_ids if last is None else {last + 1}):
            raise gap(batch_id, last, self._store.uri, max(self._first_ids, default=0))
        self._check_stream(batch_id)

    def _check_stream(self, batch_id: int) -> None:
        """Raise if the batch before is of another stream: its number then follows by chance."""
        if self._newest is None or self._stream is None:
            return
        before = self._origin.stream
        if before is not None and before != self._stream:
            raise other_stream(batch_id, self._store.uri, self._origin.location, self._location)

    # --- the batch that was committed ---

    def _replayed(self, incoming: BatchSource, watch: Stopwatch) -> CommittedBatch:
        """The newest checkpoint again, if it was made of these rows. Meanwhile the engine computes them for itself."""
        checkpoint = self._newest
        assert checkpoint is not None
        origin = self._origin
        progress = checkpoint.manifest.progress
        incarnation = origin.incarnation or checkpoint.manifest.store
        committed = CommittedBatch(checkpoint, progress, True, incarnation)
        then, found = origin.identity, incoming.planned
        if then is not None and then["kind"] != "rows" and found != then:
            self._check_stream(checkpoint.id)  # to go back would not help a stream that is another one
            raise self._other_rows(then, found)
        check_deliverable(committed, self._job.outputs, self._delivered)
        with watch.part("read"):
            if then is not None and then["kind"] == "rows":
                found = incoming.identity_by_rows()
                if found != then:
                    raise self._other_rows(then, found)
            elif incoming.execute is not None:
                incoming.execute()
        if then is None:
            _log.warning(
                "batch %d was committed by a version that did not note its rows: it is taken for the same by its "
                "number",
                checkpoint.id,
            )
        return committed

    def _other_rows(self, then: Identity, found: Identity | None) -> Exception:
        assert self._newest is not None
        batch_id = self._newest.id
        previous = max((each for each in self._store.checkpoints() if each < batch_id), default=None)
        return other_rows(
            batch_id, self._store.uri, then, found, previous if previous == batch_id - 1 else None
        )

    # --- the commit ---

    def _commit(
        self, batch_id: int, ran: BatchResult, times: CheckpointTimes, identity: Identity, watch: Stopwatch
    ) -> CommittedBatch:
        """Publish what a batch gave. If this raises, the store must be opened again to learn what is committed."""
        incarnation = self._store.incarnation
        if self._name is not None:
            ran.figures["name"] = self._name
        told_by = "clock" if self._job.event_time is None else "rows"
        targets = None
        if self._target_of is not None and ran.outputs:
            targets = {name: self._target_of(name, batch_id, incarnation) for name in ran.outputs}
        origin = BatchRecord(
            identity,
            self._job.columns,
            incarnation,
            self._stream,
            self._location,
            told_by,
            targets,
            times.rows_at,
            None if self._log_of is None else self._log_of(batch_id),
            self._job.fixed or None,
        )
        with watch.part("commit"):
            self._newest = self._store.commit(
                batch_id,
                ran.snapshots,
                outputs=ran.outputs,
                now=times.now,
                watermark=times.watermark,
                batch=origin.to_json(),
                progress=ran.figures,
            )
        self._origin = origin
        self._growth.committed(ran.figures.get("states", {}), self._has_ttl)
        durations = watch.durations()
        parts = ("snapshot", "output", "state", "commit")
        took = round(sum([durations.get(part, 0.0) for part in parts]), 1)
        return CommittedBatch(self._newest, {**ran.figures, "commitTimeMs": took}, False, incarnation)

    def _has_ttl(self, name: str) -> bool:
        assert self._newest is not None
        states = (state for snapshot in self._newest.snapshots for state in snapshot.states)
        return any(state["name"] == name and state.get("ttl") for state in states)

    # --- the end ---

    def close(self) -> None:
        """Close the function, drop state from memory, and give the store up. Idempotent."""
        execution, self._execution = self._execution, None
        try:
            if execution is not None:
                execution.close()
        finally:
            self._store.close()
