"""A cluster of threads: hosts and tasks in this process, over real sockets, with what Spark does to both."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from statebackend.cluster.cluster_execution import Engine
from statebackend.cluster.host import Host, HostPlan
from statebackend.cluster.shuffle_sender import ShufflePlan, TaskReport, send_rows
from statebackend.cluster.wire import LinkError, connect
from statebackend.errors import HostError, StateBackendError
from statebackend.runtime import BatchSource
from statebackend.runtime.batch_identity import Identity

_tasks = itertools.count(1)


class Killed(BaseException):
    """Raised in the thread of a host or of a task, it ends like a process that was killed."""


def batch_of(table: pa.Table, partitions: int = 3, identity: Identity | None = None) -> BatchSource:
    """A batch in so many parts, as Spark has them."""

    def read() -> pa.Table:
        raise AssertionError("the driver is not to have the rows")

    size = -(-table.num_rows // partitions) or 1
    parts = [table.slice(at * size, size) for at in range(partitions)]
    return BatchSource(read, identity, source=parts)


class ThreadCluster(Engine):
    """Each host in a thread, and as many threads for tasks as there are parts. What Spark ships is pickled here, too.

    ``before_task`` is called with the number of the part and of its attempt, and may raise; ``attempts`` is how often a
    task may fail.
    """

    def __init__(self, attempts: int = 4) -> None:
        self.attempts = attempts
        self.before_task: Callable[[int, int], None] = lambda part, attempt: None
        self.hosts: dict[int, Host] = {}
        #: The plans of hosts as they were shipped.
        self.plans: dict[int, bytes] = {}
        self.ended: list[str] = []
        self.cancelled = 0
        #: How many executors it says there are, and the one that a host is on by its number.
        self.executors: int | None = None
        self.place_of: Callable[[int], str] = lambda number: "here"
        #: What a plan is at the host, as where the same path is another folder.
        self.ship: Callable[[HostPlan], HostPlan] = lambda plan: plan
        #: Hosts that find a slot.
        self.has_slot: Callable[[int], bool] = lambda number: True
        self.paused: list[float] = []
        #: Whether the query has ended.
        self.is_over = False
        #: The hosts whose job was ended, though their process goes on.
        self.has_no_job: set[int] = set()
        self._resumes_at = 0.0
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def keep_host(
        self, plan: HostPlan, failed: Callable[[Exception], None], died: Callable[[int, str], bool]
    ) -> None:
        self.plans[plan.number] = shipped = pickle.dumps(self.ship(plan))

        def keep() -> None:
            while not self._is_closed.is_set():
                if time.monotonic() < self._resumes_at or not self.has_slot(plan.number):
                    time.sleep(0.01)
                    continue
                place = self.place_of(plan.number)
                host = Host(pickle.loads(shipped), attempt=next(_tasks), executor="here", place=place)
                self.hosts[plan.number] = host
                try:
                    self.ended.append(self.serve(host))
                except (LinkError, Killed) as error:
                    self.ended.append(str(error))
                    died(plan.number, "has ended as a thread does")
                    time.sleep(0.01)

        thread = threading.Thread(target=keep, name=f"host {plan.number}")
        self._threads.append(thread)
        thread.start()

    def serve(self, host: Host) -> str:
        """Run a host where it has a slot."""
        return host.serve()

    def num_executors(self) -> int | None:
        return self.executors

    def pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        self._resumes_at = time.monotonic() + seconds

    def probe(self, addresses: Sequence[tuple[str, int]], secret: bytes, limit: float) -> None:
        for address in addresses:
            try:
                connect(address, secret, role="probe").close()
            except LinkError as error:
                raise HostError("a task does not reach a host") from error

    def schema(self, incoming: BatchSource) -> pa.Schema:
        schema: pa.Schema = incoming.source[0].schema
        return schema

    def scatter(self, incoming: BatchSource, plan: ShufflePlan) -> list[TaskReport]:
        parts: Sequence[pa.Table] = incoming.source
        shipped = pickle.dumps(plan)

        def run(part: int) -> TaskReport:
            for attempt in range(self.attempts):
                try:
                    self.before_task(part, attempt)
                    rows = parts[part].to_batches(max_chunksize=100)
                    report = send_rows(pickle.loads(shipped), rows, task=next(_tasks), partition=part)
                    return TaskReport.from_json(report.to_json())
                except (Exception, Killed) as error:
                    if isinstance(error, StateBackendError) and not isinstance(error, LinkError):
                        raise  # another attempt would find the same
                    if attempt + 1 == self.attempts:
                        raise LinkError("a task has failed") from error
            raise AssertionError

        with ThreadPoolExecutor(len(parts)) as pool:
            return list(pool.map(run, range(len(parts))))

    def cancel(self) -> None:
        self.cancelled += 1

    def end_host(self, number: int) -> None:
        pass  # nobody can end a thread

    def has_ended(self) -> bool:
        return self.is_over

    def is_job(self, number: int, job: int) -> bool:
        return number not in self.has_no_job

    def close(self) -> None:
        self._is_closed.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a host has not ended"

    def die(self) -> None:
        """End the host that runs in this thread, as if its process were killed."""
        number = int(threading.current_thread().name.removeprefix("host "))
        self.lose(number)
        raise Killed

    def lose(self, number: int) -> None:
        """Cut the link of a host to the driver, as if its process were killed."""
        host: Any = self.hosts[number]
        host._link.close()
