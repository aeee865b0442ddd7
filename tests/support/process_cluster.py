"""A cluster whose hosts are processes: a test holds the GIL of one, or stops it, and no other thread is concerned.

The function of a `World` obeys orders here: files of a folder. The first row after an order takes it, at one host.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from held_gil import hold_gil
from host_queries import HostQuery
from host_worlds import JOB, PARALLELISM, ROWS, ticks
from processes import environment
from thread_cluster import ThreadCluster

from statebackend.cluster.cluster_execution import Executors
from statebackend.cluster.host import Host, HostPlan


class Orders:
    """What the function of a `World` is to do at its next row, and what it has done, as files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def give(self, what: str, seconds: float) -> None:
        """Order to ``hold`` the GIL, or to ``wait`` without it."""
        (self.folder / f"order-{what}-{seconds}").touch()

    def obey(self) -> None:
        """Take an order if there is one; called for each row."""
        with open(self.folder / "rows", "ab", buffering=0) as rows:
            rows.write(b".")
        for order in self.folder.glob("order-*"):
            _, what, seconds = order.name.split("-")
            try:
                order.rename(self.folder / f"taken-{os.getpid()}")
            except FileNotFoundError:  # the other host has
                continue
            (hold_gil if what == "hold" else time.sleep)(float(seconds))

    @property
    def rows(self) -> int:
        """How many rows the function has been called for, at all hosts."""
        path = self.folder / "rows"
        return path.stat().st_size if path.exists() else 0

    @property
    def taken_by(self) -> list[int]:
        """The processes that have taken an order."""
        return [int(path.name.split("-")[1]) for path in self.folder.glob("taken-*")]


class ProcessCluster(ThreadCluster):
    """Each host in a process, which inherits ``descriptors`` and finds its orders in a folder.

    Where a host hangs, it begins another at once, and leaves the first to itself: nobody else ends it.
    """

    def __init__(self, orders: Path, descriptors: Sequence[int] = ()) -> None:
        super().__init__()
        self._orders, self._descriptors = orders, descriptors
        #: The processes of each host, the newest last.
        self.processes: dict[int, list[subprocess.Popen[bytes]]] = {}
        #: The thread that keeps each host running.
        self._keepers: dict[int, threading.Thread] = {}

    def keep_host(
        self, plan: HostPlan, failed: Callable[[Exception], None], died: Callable[[int, str], bool]
    ) -> None:
        self.plans[plan.number] = pickle.dumps(plan)
        self.processes[plan.number] = []
        self._keep(plan.number)

    def end_host(self, number: int) -> None:
        self._keep(number)

    def _keep(self, number: int) -> None:
        thread = threading.Thread(target=self._run, args=(number,), name=f"host {number}")
        self._threads.append(thread)
        self._keepers[number] = thread
        thread.start()

    def _run(self, number: int) -> None:
        processes = self.processes[number]
        while self._keepers[number] is threading.current_thread() and not self._is_closed.is_set():
            process = subprocess.Popen(
                [sys.executable, __file__, str(self._orders)],
                stdin=subprocess.PIPE,
                pass_fds=self._descriptors,
                env=environment(TMPDIR=tempfile.gettempdir()),
            )
            processes.append(process)
            process.communicate(self.plans[number])

    @property
    def pids(self) -> dict[int, list[int]]:
        """The processes of each host, the newest last."""
        return {number: [each.pid for each in processes] for number, processes in self.processes.items()}

    def close(self) -> None:
        try:
            super().close()
        finally:
            for processes in self.processes.values():
                for process in processes:
                    process.kill()  # nothing, once it has ended


def be_host(orders: Path) -> None:
    """Be a host: its plan comes by the standard input."""
    ticks.append(Orders(orders).obey)
    plan: HostPlan = pickle.load(sys.stdin.buffer)
    Host(plan, attempt=os.getpid(), executor=f"process {os.getpid()}", ends_process=True).serve()


def be_driver(orders: Path, folder: Path, what: str, silence: float, descriptor: int) -> None:
    """Be a driver: run two batches, the second of which never returns, because of an order to one of the hosts.

    All hosts inherit the descriptor, and the driver closes it when they are there.
    """
    query = HostQuery(
        folder,
        JOB,
        Executors(PARALLELISM, heartbeat_timeout=f"{silence} s"),
        cluster=partial(ProcessCluster, orders, [descriptor]),
    )
    query.run(0, ROWS)
    os.close(descriptor)
    Orders(orders).give(what, 3600.0)
    query.run(1, ROWS)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) == 1:
        be_host(Path(arguments[0]))
    else:
        be_driver(
            Path(arguments[0]), Path(arguments[1]), arguments[2], float(arguments[3]), int(arguments[4])
        )
