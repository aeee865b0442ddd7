"""Hosts that are killed at any step, hang, come twice or come back cost a try of a batch, and nothing else."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import pyarrow as pa
import pytest
from host_worlds import PARALLELISM, PARTITIONS, ROWS, World, ticks
from raw_links import LONG, wait_until
from thread_cluster import Killed, ThreadCluster

import statebackend as sb
from statebackend.cluster.host import Host, environment
from statebackend.cluster.hosts import Hosts, Question
from statebackend.cluster.streams import Stream
from statebackend.cluster.wire import Link, LinkError, Listener, connect

pytestmark = pytest.mark.usefixtures("nothing_left_open")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["_restore", "_expect", "_run", "_committed", "_undo", "_serve_task"])
def test_a_host_may_be_killed_at_every_step(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    handle = getattr(Host, step)
    armed: list[int] = []

    def killed(host: Host, *arguments: Any) -> Any:
        mine = host._plan.number in armed
        if mine:
            armed.remove(host._plan.number)
        if mine and when == "before":
            die(host)
        answer = handle(host, *arguments)
        if mine:
            die(host)
        return answer

    def die(host: Host) -> None:
        host._link.close()
        raise Killed(step)

    monkeypatch.setattr(Host, step, killed)
    world.open()
    world.batch()
    for number in range(PARALLELISM):
        armed.append(number)
        if step == "_restore":
            world.cluster.lose(number)
        lost = [1 - number] if step == "_undo" else []

        def lose(part: int, attempt: int, lost: list[int] = lost) -> None:
            if lost:
                world.cluster.lose(lost.pop())

        world.cluster.before_task = lose
        world.batch()
        world.batch()
        assert not armed


def test_a_host_may_be_killed_at_every_row(world: World) -> None:
    world.open()
    for nth in range(0, 20, 3):
        left = [nth]

        def die(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                world.cluster.die()

        ticks[:] = [die]
        world.batch()


def test_an_error_of_the_function_takes_the_rows_of_all_hosts_back(world: World) -> None:
    world.open()
    world.batch()
    bad = pa.table({"user": ["a"], "n": pa.array([None], pa.int64()), "rule": [False]})
    with pytest.raises(sb.HostError, match="ValueError: no number"):
        world.query.run(world.next, pa.concat_tables([ROWS, bad]))
    world.batch(ROWS)


class Speechless(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ZeroDivisionError


class Untold(sb.StateBackendError):
    """An error of the user's own, made without what those of the library have."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "arguments", "match"),
    [
        (Speechless, (), "^Speechless: its text cannot be had: ZeroDivisionError"),
        (Untold, (), "^Untold: "),
        (ValueError, ("long " * 2_000_000,), "^ValueError: long long"),
        (SystemExit, (3,), "^SystemExit: 3"),
    ],
    ids=["speechless", "untold", "long", "exit"],
)
def test_error_of_a_function_is_raised_once_and_loses_no_host(
    world: World, kind: type[BaseException], arguments: tuple[Any, ...], match: str
) -> None:
    world.open()
    world.batch()
    calls = []

    def fail() -> None:
        calls.append(1)
        raise kind(*arguments)

    ticks[:] = [fail]
    table = pa.table({"user": ["a"], "n": [1], "rule": [False]})
    with pytest.raises(sb.HostError, match=match) as caught:
        world.query.run(world.next, table)
    assert caught.value.code == "HOST.FUNCTION"
    assert len(calls) == 1
    assert not world.cluster.ended
    ticks.clear()
    world.batch()


class Impatient(ThreadCluster):
    """Begins another host at once where one hangs: threads cannot be ended."""

    def end_host(self, number: int) -> None:
        self.keep_host(pickle.loads(self.plans[number]), lambda error: None, lambda *how: True)


def test_a_function_that_takes_longer_than_the_limit_costs_a_try(world: World) -> None:
    """The host that hangs is given up, and goes on later, when all is done without it: that changes nothing."""
    world.open(batch_timeout=500, max_attempts=50, cluster=Impatient)  # any batch may take so long
    world.batch()
    goes_on, hangs = threading.Event(), [True]

    def hang() -> None:
        if hangs:
            hangs.clear()
            assert goes_on.wait(LONG)

    ticks[:] = [hang]
    world.batch()
    world.batch()
    goes_on.set()
    wait_until(lambda: "the driver has gone" in world.cluster.ended)
    world.batch()


def test_a_host_that_registers_twice_is_refused(world: World) -> None:
    world.open()
    world.batch()
    plan = pickle.loads(world.cluster.plans[0])
    assert "has a host" in Host(plan, attempt=99, executor="there").serve()
    other = plan._replace(writer=plan.writer.for_checkpoint(7, frozenset()))
    other.writer.epoch -= 1
    assert "is over" in Host(other, attempt=99, executor="there").serve()
    assert "is outside of" in Host(plan._replace(number=9), attempt=99, executor="there").serve()
    world.batch()
    assert not world.cluster.ended


def test_a_host_that_was_replaced_takes_no_part(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has given it up, and it does not know yet: what it says comes to nobody."""
    world.open()
    world.batch()
    old = world.cluster.hosts[0]
    held = threading.Event()
    close = Stream.close

    def closes(stream: Stream) -> None:
        close(stream)
        held.set()

    monkeypatch.setattr(Stream, "close", closes)
    hosts = world.query.execution._hosts
    hosts._hosts[0].lose()
    assert held.wait(LONG)
    world.batch()
    assert world.cluster.hosts[0] is not old
    with pytest.raises(LinkError):
        old._link.send("answer", question=1)
    world.batch()


class Silent:
    """A host that registers, begins a pulse and never answers it, and takes nothing any more."""

    def __init__(self, hosts: Hosts, secret: bytes, *, begins_pulse: bool = True) -> None:
        self.link = connect(hosts.address, secret, role="host")
        self.pulse = connect(hosts.address, secret, role="pulse")
        self.link.send(
            "register",
            number=0,
            parallelism=1,
            epoch=1,
            attempt=1,
            executor="here",
            address=["127.0.0.1", 1],
            place="here",
            environment=environment(),
            address_space=None,
        )
        self.generation = self.link.receive(LONG).header["generation"]
        if begins_pulse:
            self.pulse.send("pulse", number=0, generation=self.generation)

    def __enter__(self) -> Link:
        return self.link

    def __exit__(self, *_: object) -> None:
        self.link.close()
        self.pulse.close()


@pytest.mark.parametrize(("number", "after"), [(0, 0), (0, 1), (0, -1), (1, 0)])
def test_connection_that_is_not_the_pulse_of_a_registered_host_is_closed(number: int, after: int) -> None:
    """The second one of its own registration, one of another registration, and one of another range."""
    is_second = number == after == 0
    with closing(Hosts(1, b"secret", 1, lambda: Question("restore"), silence=LONG)) as hosts:
        silent = Silent(hosts, b"secret", begins_pulse=is_second)
        with silent, connect(hosts.address, b"secret", role="pulse") as other:
            if is_second:
                wait_until(lambda: hosts._hosts[0]._pulse is not None)
            other.send("pulse", number=number, generation=silent.generation + after)
            with pytest.raises(LinkError, match="the peer has closed the link"):
                other.receive(LONG)
            assert hosts._living()


def test_host_ends_when_the_driver_is_silent_although_its_connections_live(world: World) -> None:
    world.open()
    world.batch()
    is_over = threading.Event()

    def serve(link: Link, role: str) -> None:
        if role == "host":
            link.receive(LONG)
            link.send("registered", generation=1)
        is_over.wait(LONG)

    with Listener(b"secret", serve) as listener:
        plan = pickle.loads(world.cluster.plans[0])
        plan = plan._replace(driver=listener.address, secret=b"secret", lease=0.4)
        assert Host(plan, attempt=1, executor="here").serve() == "no word from the driver"
        is_over.set()


def test_host_that_begins_no_pulse_is_lost() -> None:
    with (
        closing(Hosts(1, b"secret", 1, lambda: Question("restore"), silence=0.3)) as hosts,
        Silent(hosts, b"secret", begins_pulse=False),
    ):
        wait_until(lambda: not hosts._living())


def silent_and_ready(hosts: Hosts) -> Silent:
    """One that has restored. On a busy machine, it may have been lost before it has said so: then another one."""
    for _ in range(100):
        with suppress(LinkError), ExitStack() as opened:
            silent = Silent(hosts, b"secret")
            opened.enter_context(silent)
            assert silent.link.receive(LONG).header["op"] == "restore"
            silent.link.send("answer", question=1)
            wait_until(lambda: hosts.are_ready or not hosts._living())
            if hosts.are_ready:
                opened.pop_all()
                return silent
    raise AssertionError("none was in time")


def test_a_host_that_takes_no_question_is_lost_after_its_silence() -> None:
    """A question larger than what the system holds for a peer that does not read: the pulse goes on beside it."""
    with (
        closing(Hosts(1, b"secret", 1, lambda: Question("restore"), silence=0.3)) as hosts,
        silent_and_ready(hosts) as link,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(hosts.ask_all, [Question("run", {}, bytes(64 << 20))])
        try:
            with pytest.raises(sb.HostError, match="a host was lost"):
                asked.result(LONG)
        finally:
            link.close()


def test_a_host_restores_what_is_committed_meanwhile_last() -> None:
    """The driver has decided what a new host restores, and commits the next batch before it says so."""
    newest, decided, goes_on = [1], threading.Event(), threading.Event()

    def restore() -> Question:
        question = Question("restore", {"checkpoint": newest[0]})
        if not decided.is_set():
            decided.set()
            assert goes_on.wait(LONG)
        return question

    with (
        closing(Hosts(1, b"secret", 1, restore, silence=LONG)) as hosts,
        Silent(hosts, b"secret") as link,
        ThreadPoolExecutor(1) as pool,
    ):
        assert decided.wait(LONG)
        newest[0] = 2
        told = pool.submit(hosts.tell_committed, 2)
        restored = []
        while not (told.done() and hosts.are_ready and goes_on.is_set()) or not restored:
            try:
                said = link.receive(0.2).header
            except TimeoutError:
                goes_on.set()
                continue
            restored += [said["checkpoint"]] if said["op"] == "restore" else []
            link.send("answer", question=said["question"], at=None)
        assert restored == [1, 2]


@pytest.mark.parametrize("is_known", [True, False], ids=["after the commit", "within the commit"])
def test_a_host_that_comes_during_a_commit_may_not_find_the_checkpoint_before(
    world: World, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """It was told to restore one that the commit does not retain. That fails nothing."""
    world.open()
    world.query.store._retain = 1
    world.batch()
    world.batch()
    asked, goes_on, failed = threading.Event(), threading.Event(), threading.Event()
    restore, commit, begin = Host._restore, sb.CheckpointStore.commit, Hosts._begin

    def restores(host: Host, message: Any) -> Any:
        asked.set()
        assert goes_on.wait(LONG)
        return restore(host, message)

    def begins(hosts: Hosts, host: Any) -> None:
        begin(hosts, host)
        failed.set()

    def commits(store: sb.CheckpointStore, *arguments: Any, **options: Any) -> Any:
        if failed.is_set() or asked.is_set():
            return commit(store, *arguments, **options)
        with monkeypatch.context() as patched:
            patched.setattr(Host, "_restore", restores)
            patched.setattr(Hosts, "_begin", begins)
            world.cluster.lose(0)
            assert asked.wait(LONG)
            committed = commit(store, *arguments, **options)
        goes_on.set()
        if not is_known:
            assert failed.wait(LONG)
        return committed

    monkeypatch.setattr(sb.CheckpointStore, "commit", commits)
    world.batch()
    world.batch()


def test_a_restore_that_fails_is_raised_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.open()
    world.batch()
    restore, fails = Host._restore, [True, True]

    def failing(host: Host, message: Any) -> Any:
        if fails:
            fails.pop()
            raise sb.StoreError("the store is away")
        return restore(host, message)

    monkeypatch.setattr(Host, "_restore", failing)
    for number in range(PARALLELISM):
        world.cluster.lose(number)
    table = world.table()
    for _ in range(3):
        try:
            world.check(world.query.run(world.next, table, PARTITIONS), table)
        except sb.StoreError as error:
            assert "the store is away" in str(error)  # noqa: PT017 - of some tries
        else:
            break
    world.batch()
