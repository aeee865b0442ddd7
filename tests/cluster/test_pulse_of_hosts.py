"""A host lives while its process does: neither the function nor the driver needs to let Python run for that."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import process_cluster
import pytest
from held_gil import hold_gil
from host_worlds import World, ticks
from process_cluster import Orders, ProcessCluster
from processes import started
from raw_links import LONG, told, wait_until

from statebackend.cluster import hosts

pytestmark = pytest.mark.usefixtures("nothing_left_open")

#: The timeout of all hosts here, and how long the GIL is held.
SILENCE = 1.5
HELD = 1.5 * SILENCE


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path / "orders")


@pytest.fixture
def begun(world: World, orders: Orders) -> Callable[..., ProcessCluster]:
    """Opens the world over hosts that are processes, and runs its first batch."""

    def begin(**options: Any) -> ProcessCluster:
        silence = f"{SILENCE} s"
        world.open(
            cluster=partial(ProcessCluster, orders.folder), **{"heartbeat_timeout": silence, **options}
        )
        world.batch()
        return world.cluster

    return begin


def test_hosts_are_kept_while_the_driver_or_a_function_holds_the_gil(
    world: World, orders: Orders, begun: Callable[..., ProcessCluster]
) -> None:
    cluster = begun()
    pids = cluster.pids
    hold_gil(HELD)
    world.batch()
    assert cluster.pids == pids
    before = orders.rows
    orders.give("hold", HELD)
    table = world.table()
    world.batch(table)
    assert len(orders.taken_by) == 1
    assert orders.rows - before == table["rule"].to_pylist().count(False), "each row was processed once"
    assert cluster.pids == pids


def test_stopped_host_is_replaced_and_ends_when_it_goes_on(
    world: World, begun: Callable[..., ProcessCluster], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = begun(max_attempts=10)
    (stopped,) = cluster.processes[0]
    stopped.send_signal(signal.SIGSTOP)
    try:
        world.batch()
        assert "its pulse is silent" in caplog.text
        assert stopped.poll() is None
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert stopped.wait(LONG) == 0, "it has ended by itself, in order"
    world.batch()


def test_function_that_holds_the_gil_longer_than_the_limit_costs_a_try_and_the_process(
    world: World, orders: Orders, begun: Callable[..., ProcessCluster]
) -> None:
    cluster = begun(batch_timeout=f"{HELD} s", max_attempts=10)
    orders.give("hold", 3600.0)
    world.batch()
    (pid,) = orders.taken_by
    (hung,) = (each for processes in cluster.processes.values() for each in processes if each.pid == pid)
    assert hung.wait(LONG) == 1
    world.batch()


@pytest.mark.parametrize(
    ("what", "happens"),
    [("hold", signal.SIGKILL), ("hold", signal.SIGSTOP), ("wait", signal.SIGKILL)],
    ids=["GIL held, driver killed", "GIL held, driver stopped", "GIL free, driver killed"],
)
def test_host_whose_function_does_not_return_ends_without_its_driver(
    tmp_path: Path, orders: Orders, what: str, happens: signal.Signals
) -> None:
    """All hosts of the driver have a descriptor: it is at its end when all have ended."""
    hosts_live, of_hosts = os.pipe()
    arguments = (orders.folder, tmp_path / "state", what, SILENCE, of_hosts)
    try:
        with started(process_cluster, *arguments, pass_fds=[of_hosts]) as process:
            os.close(of_hosts)
            wait_until(lambda: orders.taken_by or process.poll() is not None)
            assert process.poll() is None
            assert not select.select([hosts_live], [], [], 0)[0]
            process.send_signal(happens)
            assert select.select([hosts_live], [], [], LONG)[0], "a host lives"
    finally:
        if not select.select([hosts_live], [], [], 0)[0]:
            for pid in orders.taken_by:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os.close(hosts_live)


#: A host that is let go, and whose function's close() does not return.
STUCK = """
import os, secrets, time
from types import SimpleNamespace
from statebackend.cluster.host import Host
from statebackend.cluster.hosts import Hosts, Question

secret = secrets.token_bytes(32)
reads, writes = os.pipe()
pid = os.fork()  # before there are threads and sockets that the host would have, too
if pid == 0:
    name, port = os.read(reads, 100).decode().split()
    plan = SimpleNamespace(
        memory=1 << 20, quota=1 << 20, store=None, writer=SimpleNamespace(epoch=1), has_copies=False,
        driver=(name, int(port)), secret=secret, number=0, job_number=0, parallelism=1, lease=SILENCE, job=None,
    )
    host = Host(plan, attempt=1, executor="x", ends_process=True)
    host._execution = SimpleNamespace(close=lambda: time.sleep(3600))
    host.serve()
    os._exit(0)
restore = Question("restore", {"checkpoint": None, "token": ["a", "b"]})
hosts = Hosts(1, secret, 1, lambda: restore, silence=SILENCE)
os.write(writes, "{} {}".format(*hosts.address).encode())
ended, status = 0, 0
while not ended and not any(host._pulse for host in hosts._living()):
    time.sleep(0.01)
    ended, status = os.waitpid(pid, os.WNOHANG)  # on a busy machine, the host may be given up before it is seen
hosts.close()
print(os.waitstatus_to_exitcode(status if ended else os.waitpid(pid, 0)[1]))
"""


def test_host_ends_whose_function_does_not_return_from_close() -> None:
    with started(STUCK.replace("SILENCE", str(SILENCE)), start_new_session=True) as process:
        try:
            assert process.communicate(timeout=LONG)[0] == "1\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_function_that_stands_still_is_logged_once_for_each_minute(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert hosts._STANDSTILL == 60.0
    monkeypatch.setattr(hosts, "_STANDSTILL", 0.6)
    world.open()
    world.batch()

    def lines() -> list[str]:
        return [line for line in told(caplog) if "no call of the function has returned" in line]

    stands = [True]

    def stand() -> None:
        if stands:
            stands.clear()
            wait_until(lambda: len(lines()) >= before + 2)

    before = len(lines())
    ticks[:] = [stand]
    world.batch()
    # A late look misses a multiple; none is told twice.
    times = [float(line.split()[-2]) / 0.6 for line in lines()[before:]]
    assert times == pytest.approx(sorted({round(each) for each in times}))
    registered = world.query.execution._hosts._living()
    wait_until(lambda: not any(host.stands_for for host in registered))
