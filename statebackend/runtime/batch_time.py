"""The time of a batch: the clock's, or that of its newest row, and never before that of the batch before.

>>> from statebackend.functions import map_with_state
>>> job = Job(map_with_state(lambda row, n: (None, n), int), key="user", event_time="at", delay=1000)
>>> time = BatchTime(job, None, CheckpointStore("/nowhere"))
>>> time.of(5000), time.of(None)
(4000, 0)
>>> time.committed = 4500
>>> time.of(5000)
4500
"""

from __future__ import annotations

import logging

from statebackend.checkpoint import CheckpointStore
from statebackend.errors import UsageError
from statebackend.runtime.job import Job
from statebackend.state import clocks

__all__ = ["BatchTime"]

_log = logging.getLogger(__name__)


class BatchTime:
    """Decides the time of each batch of a job.

    >>> from statebackend.functions import map_with_state
    >>> job = Job(map_with_state(lambda row, n: (None, n), int), key="user")
    >>> BatchTime(job, None, CheckpointStore("/nowhere")).committed is None
    True
    """

    def __init__(self, job: Job, clock: clocks.Clock | None, store: CheckpointStore) -> None:
        self._job = job
        self._store = store
        self._clock = clocks.checked_clock(clock)
        self._told_behind = False
        #: The time of the newest committed batch, or of what the job began with; None before any.
        self.committed: int | None = None

    def of(self, newest_row: int | None, last_id: int | None = None) -> int:
        """The time of the batch after ``last_id``, whose newest row is of this event time."""
        if self._job.event_time is None:
            clock = clocks.read(self._clock)
            self._check_jump(clock, last_id)
            now: int | None = clock
        else:
            now = None if newest_row is None else newest_row - self._job.delay
        return max((each for each in (now, self.committed) if each is not None), default=0)

    def _check_jump(self, now: int, last_id: int | None) -> None:
        """Raise if the clock is further ahead of the newest checkpoint than can be believed."""
        furthest, committed = self._store.max_clock_jump, self.committed
        if last_id is None or committed is None or furthest is None:
            return
        if now - committed > furthest:
            raise UsageError(
                f"the clock is {_days(now - committed)} days ahead of the last committed batch",
                code="USAGE.CLOCK_JUMP",
                detail=f"the clock says {now}, batch {last_id} was at {committed}, {self._store.uri}",
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
