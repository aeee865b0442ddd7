"""The times of a batch: the clock's, and the watermark of its rows. Neither is ever before that of the batch before."""

from __future__ import annotations

import logging
from typing import NamedTuple

from statebackend.checkpoint import Checkpoint, CheckpointStore
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.errors import UsageError
from statebackend.runtime.batch_identity import BatchRecord
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.job import Job
from statebackend.state import clocks

_log = logging.getLogger(__name__)


class CheckpointTimes(NamedTuple):
    """The times of a committed batch; None for one that it does not have."""

    now: int | None = None
    watermark: int | None = None
    #: When rows with a time last came, by the clock; None where nobody asks for it.
    rows_at: int | None = None


class BatchTimes(NamedTuple):
    """The times of a batch that begins."""

    #: The time by which it runs.
    now: int
    #: What the clock says, which may have been set back.
    clock: int
    #: The watermark before it; None before any row that told a time.
    watermark: int | None
    #: The watermark by the clock, which counts if no row comes with a time; None unless rows have stayed away for long.
    idle: int | None = None


class BatchTime:
    """Decides the times of each batch of a job, whose ``store`` says how far the clock may jump."""

    def __init__(self, job: Job, clock: clocks.Clock | None, store: CheckpointStore | None = None) -> None:
        self._job = job
        self._store = store
        self._clock = clocks.checked_clock(clock)
        self._told_behind = False
        #: The times of the newest committed batch, or of what the job began with.
        self.committed = CheckpointTimes()

    def begin_with(self, source: Checkpoint | Savepoint | None) -> None:
        """Go on from the times of a checkpoint or savepoint; None: of nothing."""
        if source is None:
            self.committed = CheckpointTimes()
            return
        origin = BatchRecord.of(source.manifest) if isinstance(source, Checkpoint) else BatchRecord()
        self.committed = CheckpointTimes(source.now, source.watermark, origin.rows_at)
        if self._job.event_time is not None and origin.time == "clock":
            _log.warning(
                "event_time= is turned on for a job with processing time: its states and timers in processing time "
                "go on by the clock. A state whose time to live is changed to event time keeps its timestamps, which "
                "are the clock's: if the rows are of another time, give it another name, so that it begins anew"
            )

    def begin(self, last_id: int | None = None, planned_at: int | None = None) -> BatchTimes:
        """The times of the batch after ``last_id``. Raises if the clock cannot be believed.

        A stream is idle up to the time at which the batch was planned: later rows come with the next one, and the plan
        of a batch that is run again may be old.
        """
        clock = clocks.read(self._clock)
        self._check_jump(clock, last_id)
        before, watermark, _ = self.committed
        now = clock if before is None else max(clock, before)
        looked = now if planned_at is None else min(now, planned_at)
        return BatchTimes(now, clock, watermark, self._idle_watermark(looked))

    def after(self, begun: BatchTimes, times: RowTimes | None) -> CheckpointTimes:
        """The times to commit with a batch whose rows had these times."""
        if times is None:
            # A job that goes by the clock alone keeps the watermark, should it get event time again.
            return CheckpointTimes(begun.now, begun.watermark)
        rows_at = None
        if self._job.event_time is not None and self._job.event_time.idle_after is not None:
            # What was not noted before begins now.
            is_known = not times.told and self.committed.rows_at is not None
            rows_at = self.committed.rows_at if is_known else begun.now
        return CheckpointTimes(begun.now, times.after, rows_at)

    def _idle_watermark(self, now: int) -> int | None:
        event_time, since = self._job.event_time, self.committed.rows_at
        if event_time is None or event_time.idle_after is None or since is None:
            return None
        idle_after, delay = event_time.idle_after, event_time.delay
        assert isinstance(idle_after, int)
        assert isinstance(delay, int)
        return now - idle_after - delay if now - since >= idle_after else None

    def _check_jump(self, now: int, last_id: int | None) -> None:
        """Raise if the clock is further ahead of the newest checkpoint than can be believed."""
        store, committed = self._store, self.committed.now
        furthest = None if store is None else store.max_clock_jump
        if last_id is None or committed is None or store is None or furthest is None:
            return
        if now - committed > furthest:
            raise UsageError(
                f"the clock is {_days(now - committed)} days ahead of the last committed batch",
                code="USAGE.CLOCK_JUMP",
                detail=f"the clock says {now}, batch {last_id} was at {committed}, {store.uri}",
                hint="if the clock is wrong, set it right: nothing has expired yet. If the query really paused so "
                f"long, let the store go on from there with sb.tools.set_time(store, now={now}), or allow more "
                "with checkpoint=CheckpointStore(..., max_clock_jump=...)",
            )
        if committed - now > furthest and not self._told_behind:
            self._told_behind = True
            _log.warning(
                "the clock is %s days behind the last committed batch: time stands still until it has caught up; "
                "sb.tools.set_time sets the time of the store back",
                _days(committed - now),
            )


def _days(milliseconds: int) -> str:
    return f"{milliseconds / 86_400_000:,.0f}"
