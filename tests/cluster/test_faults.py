"""Whatever is delayed, doubled or cut between any two steps, a job over hosts gives what it gives undisturbed.

Hosts and tasks are threads over real sockets. After every scenario outputs and state are those of the batch
computation, and nothing is left: no threads, descriptors, staged bytes, temporary files, or files that nobody names.
"""

from __future__ import annotations

import collections
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from host_worlds import PARALLELISM, PARTITIONS, World, ticks
from refusing_disks import fill
from thread_cluster import batch_of

import statebackend as sb
from statebackend.cluster.wire import Link
from statebackend.runtime.batch_identity import rows_identity
from statebackend.runtime.batch_progress import Stopwatch

pytestmark = pytest.mark.usefixtures("nothing_left_open")


class Faults:
    """Counts the messages of all links, heartbeats apart, and does something to some of them."""

    ACTIONS = ("cut before", "cut after", "cut within", "delay", "double")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._at: set[tuple[str, int]] = set()
        self._action = ""
        #: The messages to which it has been done.
        self.struck: set[tuple[str, int]] = set()
        self._send = Link.send
        send = self._send

        def faulty(link: Link, op: str, body: Any = (), /, **header: Any) -> None:
            with self._lock:
                step = (op, self._counts[op])
                strikes = step in self._at
                self._counts[op] += 1
            if strikes:
                self.struck.add(step)
                self._strike(link, op, body, header)
            else:
                send(link, op, body, **header)

        monkeypatch.setattr(Link, "send", faulty)

    def arm(self, at: set[tuple[str, int]], action: str) -> None:
        """Do it to these messages: by what they are about, the first of them is 0."""
        with self._lock:
            self._counts.clear()
            self._at, self._action, self.struck = at, action, set()

    def _strike(self, link: Link, op: str, body: Any, header: dict[str, Any]) -> None:
        if self._action == "cut before":
            link.close()
        elif self._action == "cut within":
            with link._sending:
                link._is_cut = True
                link._stream.write([b"SBF\x01\0\0"])
                link.close()
        elif self._action == "delay":
            time.sleep(0.02)
        self._send(link, op, body, **header)  # raises if the link is closed
        if self._action == "cut after":
            link.close()
        elif self._action == "double" and op != "piece":
            self._send(link, op, body, **header)


#: How many messages of each kind a batch takes, if nothing goes wrong.
MESSAGES = {
    **dict.fromkeys(("expect", "run", "committed"), PARALLELISM),
    "answer": 3 * PARALLELISM,
    **dict.fromkeys(("piece", "rows", "broadcast", "end", "staged"), PARALLELISM * PARTITIONS),
}
STEPS = [(op, nth) for op, count in MESSAGES.items() for nth in range(count)]


@pytest.mark.parametrize("memory", [1, 1 << 20], ids=["on disk", "in memory"])
@pytest.mark.parametrize("action", Faults.ACTIONS)
def test_a_fault_at_any_message_costs_at_most_a_try(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    day_rng: random.Random,
    is_stress: bool,
    action: str,
    memory: int,
) -> None:
    """Between any two steps of a batch; in the long run, between all, and at any message of what follows."""
    faults = Faults(monkeypatch)
    world.open(batch_memory=memory)
    world.batch()
    every = 1 if is_stress else 2 if memory > 1 else 6
    for step in STEPS[day_rng.randrange(every) :: every]:
        for op in MESSAGES if is_stress else ["none"]:
            faults.arm({step, (op, MESSAGES.get(op, 0))}, action)
            world.batch()
            assert step in faults.struck or step[0] == "broadcast"
            world.nothing_is_staged()


@pytest.mark.parametrize("action", ["cut after", "cut within", "double"])
def test_a_fault_at_any_message_of_the_start_costs_a_start(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    faults = Faults(monkeypatch)
    for step in [("register", 1), ("restore", 0), ("answer", 0), ("answer", 1)]:
        folder = tmp_path / f"{step}"
        folder.mkdir()
        world = World(folder, rng, monkeypatch)
        faults.arm({step}, action)
        try:
            world.open()
            world.batch()
            assert step in faults.struck
            world.batch()
        finally:
            world.close()


def test_faults_at_random(world: World, monkeypatch: pytest.MonkeyPatch, is_stress: bool) -> None:
    """Faults of all kinds, as chance has it, on batches that are tried until they come through."""
    batches = 1500 if is_stress else 40
    rng, lock, count = world.rng, threading.Lock(), [0]
    send, commit = Link.send, sb.CheckpointStore.commit

    def strikes(one_in: int) -> bool:
        with lock:
            if rng.randrange(one_in):
                return False
            count[0] += 1
            return True

    def faulty(link: Link, op: str, body: Any = (), /, **header: Any) -> None:
        if strikes(120):
            link.close()
        if strikes(200):
            time.sleep(0.005)
        send(link, op, body, **header)
        if strikes(120):
            link.close()

    def commits(store: sb.CheckpointStore, *arguments: Any, **options: Any) -> Any:
        if strikes(40):
            raise OSError("as told")
        committed = commit(store, *arguments, **options)
        if strikes(40):
            raise OSError("as told, after the commit")
        return committed

    def tick() -> None:
        if strikes(1500):
            world.cluster.die()
        if strikes(1500):
            raise ValueError("as told")

    monkeypatch.setattr(Link, "send", faulty)
    monkeypatch.setattr(sb.CheckpointStore, "commit", commits)
    ticks[:] = [tick]
    for _ in range(batches):
        table = world.table()
        digest = rows_identity(table)
        while True:
            try:
                if world.query is None or not world.query.runner.is_open:
                    world.open(batch_memory=rng.choice([1, 500, 1 << 20]))
                incoming = batch_of(table, PARTITIONS)._replace(identify=lambda digest=digest: digest)
                committed = world.query.runner.run(world.next, incoming, Stopwatch())
            except (OSError, sb.HostError):
                if world.query is not None and not rng.randrange(3):
                    world.query.close()  # the query is started again
                continue
            world.check(committed, table)
            break
    ticks.clear()
    monkeypatch.setattr(Link, "send", send)
    monkeypatch.setattr(sb.CheckpointStore, "commit", commit)
    if world.query is None or not world.query.runner.is_open:
        world.open()
    world.batch()
    world.nothing_is_staged()
    assert count[0] > batches // 5


@pytest.mark.parametrize("memory", [1, 1 << 20], ids=["of waiting rows", "of the store"])
def test_full_disk_fails_the_batch_and_costs_no_host(
    small_disk: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    world = World(small_disk, rng, monkeypatch)
    query = world.open(batch_memory=memory)
    world.batch()
    fill(small_disk / "ballast")
    for _ in range(2):
        with pytest.raises(sb.StoreError, match="No space left on device"):
            query.run(world.next, world.table(), PARTITIONS)
    assert not world.cluster.ended
    (small_disk / "ballast").unlink()
    world.batch()
    world.batch()
    world.nothing_is_staged()
    world.close()
