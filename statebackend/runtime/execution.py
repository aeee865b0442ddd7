"""The execution of batches: where a job's function and its state are, and how rows get there.

`LocalExecution` has them in this process.

>>> sorted(Execution.__abstractmethods__)
['close', 'committed', 'run']
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from statebackend.checkpoint import StateSnapshot, StoredFile
from statebackend.runtime.batch_time import BatchTimes
from statebackend.runtime.event_time import RowTimes
from statebackend.runtime.origin import Identity, Incoming
from statebackend.runtime.progress import Figures, Stopwatch

__all__ = ["Execution", "Outcome", "Ran"]


class Ran(NamedTuple):
    """A batch that has run: its files are written, and no checkpoint names them yet.

    >>> Ran([], {}, {"numInputRows": 0}).outputs
    {}
    """

    snapshots: list[StateSnapshot]
    #: The files of each output that has rows.
    outputs: dict[str, list[StoredFile]]
    #: Its progress, in Spark's words.
    figures: Figures


class Outcome(NamedTuple):
    """What there is to commit of a batch that has run.

    >>> Outcome(Ran([], {}, {}), {"kind": "rows"}, None).times is None
    True
    """

    ran: Ran
    #: What tells its rows from others.
    identity: Identity
    #: The watermarks before and after it; None in a job without event time.
    times: RowTimes | None


class Execution(ABC):
    """Runs the batches of a job. After `run`, `committed` ends the batch, or `close` does if the commit has failed.

    >>> Execution.run.__name__
    'run'
    """

    @abstractmethod
    def run(self, batch_id: int, incoming: Incoming, begun: BatchTimes, watch: Stopwatch) -> Outcome:
        """Run the function over a batch and write its files. If anything raises, state is as it was before."""

    @abstractmethod
    def committed(self, batch_id: int) -> None:
        """Note that the batch is committed: it can no longer be undone."""

    @abstractmethod
    def close(self) -> None:
        """Close the function and drop state from memory. Idempotent."""
