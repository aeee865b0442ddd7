"""Hosts without state, many in one process: they say what hosts say, and write files of a fixed size.

So the driver's side can be measured with more hosts than a machine could run.
"""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

from statebackend.checkpoint import StateSnapshot
from statebackend.cluster.host import DRIVERS_LINK, HostPlan, connect_pulse, environment
from statebackend.cluster.host_files import leave_token
from statebackend.cluster.wire import Link, LinkError, connect
from statebackend.keys import range_for

#: Files that a range has in a checkpoint: a base, and deltas since.
FILES = 4
_CONTENT = bytes(1000)


def count_rows(row: Any, number: int | None) -> Any:
    """The function of the job, which no host here calls."""
    return (row.user, (number or 0) + 1), (number or 0) + 1


class Hosts:
    """Runs hosts in a process of its own."""

    def __init__(self) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._plans: Any = spawned.Queue()
        #: Gets the number of each host that has written its file for the batch that is expected.
        self.written: Any = spawned.Queue()
        self._process = spawned.Process(target=_run, args=(self._plans, self.written), daemon=True)
        self._process.start()

    def start(self, plan: HostPlan) -> None:
        """Run a host; at its end, nobody runs another."""
        self._plans.put(plan)

    def close(self) -> None:
        """Wait for the end of all."""
        self._plans.put(None)
        self._process.join(60)
        if self._process.is_alive():
            self._process.terminate()


def _run(plans: Any, written: Any) -> None:
    threading.stack_size(256 << 10)
    threads = []
    while (plan := plans.get()) is not None:
        threads.append(threading.Thread(target=_Host(plan, written).serve, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(30)


class _Host:
    def __init__(self, plan: HostPlan, written: Any) -> None:
        self._plan, self._written = plan, written
        self._snapshot = StateSnapshot(
            0,
            plan.writer.epoch,
            plan.number,
            plan.parallelism,
            range_for(plan.job.max_parallelism, plan.parallelism, plan.number),
            states=tuple({"name": f"state {number}", "kind": "value"} for number in range(3)),
        )
        self._files: tuple[Any, ...] = ()

    def serve(self) -> None:
        plan = self._plan
        try:
            with connect(plan.driver, plan.secret, role=DRIVERS_LINK, timeout=120) as link:
                link.send(
                    "register",
                    number=plan.number,
                    parallelism=plan.parallelism,
                    epoch=plan.writer.epoch,
                    attempt=0,
                    executor="simulated",
                    place="",
                    address=["127.0.0.1", 1],
                    environment=environment(),
                    address_space=None,
                )
                said = link.receive(plan.lease).header
                if said["op"] == "refuse":
                    return
                pulse = connect_pulse(plan, said["generation"], ends_process=False)
                try:
                    while self._answered(link):
                        pass
                finally:
                    pulse.stop()
        except LinkError:
            pass

    def _answered(self, link: Link) -> bool:
        header = link.receive().header
        op = header["op"]
        if op == "stop":
            return False
        answer: dict[str, Any] = {}
        if op == "restore":
            answer = {"token": leave_token(self._plan.writer)}
        elif op == "run":
            snapshot = self._snapshot.to_json() | {
                "id": header["batch"],
                "now": header["now"],
                "files": [each.to_json() for each in self._files],
            }
            figures = {"batchId": header["batch"], "numOutputRows": 100, "numRowsTotal": 1000}
            answer = {
                "snapshots": [snapshot],
                "outputs": {},
                "figures": figures,
                "rows": 100,
                "durations": {"function": 1.0},
            }
        elif op == "committed":
            answer = {"at": header["batch"]}
        link.send("answer", question=header["question"], **answer)
        if op == "expect":
            self._write(header["batch"])
        return True

    def _write(self, batch_id: int) -> None:
        """Write the file of a batch, outside of what is measured."""
        plan = self._plan
        writer = plan.writer.for_checkpoint(batch_id, frozenset(each.name for each in self._files))
        with writer.create("delta", subtask=plan.number, key_groups=self._snapshot.key_groups) as file:
            file.write(_CONTENT)
            self._files = (*self._files, file.finish())[-FILES:]
        self._written.put(plan.number)
