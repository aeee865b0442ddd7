"""What a cluster has to do for executors mode: keep hosts running, and let tasks send the rows of a batch to them.

>>> len(Engine.__abstractmethods__)
11
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import pyarrow as pa

from statebackend.cluster.host import HostPlan
from statebackend.cluster.sending import ScatterPlan, TaskReport
from statebackend.runtime.origin import Incoming

__all__ = ["Engine"]


class Engine(ABC):
    """Runs the hosts of one query, and the tasks of its batches."""

    @abstractmethod
    def keep_host(
        self, plan: HostPlan, failed: Callable[[Exception], None], died: Callable[[int, str], bool]
    ) -> None:
        """Run a host, and another one whenever it ends, until `close`; ``failed`` is told if that cannot go on.

        ``died`` is told the number of a host whose process has ended by itself, and how. It returns True if the host
        had started.
        """

    @abstractmethod
    def is_job(self, number: int, job: int) -> bool:
        """True while this job runs the host of a range. The process of a job may go on after it, and come late."""

    @abstractmethod
    def num_executors(self) -> int | None:
        """How many processes there are for hosts to be in; None if that cannot be told, or changes."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Begin no host for so long; those that wait for a slot wait no longer."""

    @abstractmethod
    def probe(self, addresses: Sequence[tuple[str, int]], secret: bytes, limit: float) -> None:
        """Let a task reach every host within so many seconds: `UsageError` if there is no slot for one, `HostError` if
        it does not reach them.
        """

    @abstractmethod
    def schema(self, incoming: Incoming) -> pa.Schema:
        """The columns of a batch, without that of heartbeats."""

    @abstractmethod
    def scatter(self, incoming: Incoming, plan: ScatterPlan) -> list[TaskReport]:
        """Let tasks compute a batch and send its rows; the reports of the attempts that count.

        `LinkError` if tasks have failed because they could not reach a host, or hosts did not take their rows.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Let the tasks of a batch fail, if there are any: a host was lost, and they keep its successor from a slot."""

    @abstractmethod
    def end_host(self, number: int) -> None:
        """End the process of a host that hangs, as far as possible, so that another can take its place."""

    @abstractmethod
    def has_ended(self) -> bool:
        """True if the query or its cluster is known to have ended: hosts end then, and are not lost."""

    @abstractmethod
    def close(self) -> None:
        """Run no hosts any more. Idempotent."""
