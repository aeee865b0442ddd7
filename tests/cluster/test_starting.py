"""How the hosts of a query start: what is not fit is told at once, slots are shared, executors have equal numbers."""

from __future__ import annotations

import itertools
import logging
import resource
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from host_queries import HostQuery, LocalQuery, data_files, executors
from host_worlds import JOB, PARALLELISM, ROWS, World
from raw_links import HOST, wait_until
from refusing_disks import fill
from thread_cluster import ThreadCluster

import statebackend as sb
from statebackend.backends.heap import HeapBackend
from statebackend.cluster import host, hosts as cluster_hosts
from statebackend.cluster.cluster_execution import Executors
from statebackend.cluster.host import Host
from statebackend.cluster.hosts import _MOST_REFUSALS, Hosts, Question
from statebackend.cluster.wire import LinkError
from statebackend.runtime import Job

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def cluster_with(**attributes: Any) -> Any:
    """Makes clusters with these attributes."""

    def make() -> ThreadCluster:
        made = ThreadCluster()
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    return make


def tokens(folder: Path) -> list[Path]:
    return list(folder.rglob("*.token"))


@pytest.mark.parametrize("what", ["library", "python", "platform"])
def test_hosts_of_another_kind_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    here = host.environment()
    monkeypatch.setattr(host, "environment", lambda: {**here, what: "another"})
    with closing(HostQuery(tmp_path, JOB, PARALLELISM)) as query:
        with pytest.raises(sb.HostError, match=f"{what} 'another' instead of .* on executor here") as raised:
            query.run(0, ROWS)
        assert raised.value.code == "HOST.VERSION"
        monkeypatch.undo()  # the executors have been mended; one of before may still come
        with suppress(sb.HostError):
            query.run(0, ROWS)
        query.run(1 if query.store.latest() == 0 else 0, ROWS)


@pytest.mark.parametrize("limit", [999, 1000, None])
def test_a_host_that_may_not_have_its_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.setattr(host, "address_space", lambda: limit and limit + (1 << 30))
    backend = HeapBackend(max_bytes=1 << 30)
    job = Job(
        JOB.function, key="user", schema="user string, total bigint", broadcast_when="rule", backend=backend
    )
    with closing(HostQuery(tmp_path, job, executors(PARALLELISM, batch_memory=1000))) as query:
        if limit == 999:
            with pytest.raises(sb.HostError, match="1073742823 bytes, and .* come to 1073742824") as raised:
                query.run(0, ROWS)
            assert raised.value.code == "HOST.MEMORY"
        else:
            query.run(0, ROWS)


def test_the_address_space_is_what_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert host.address_space() == (None if before[0] == resource.RLIM_INFINITY else before[0])
    limit = 1 << 45
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        assert host.address_space() == limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_host_that_sees_another_folder_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = sb.CheckpointStore(tmp_path / "other").open_for_writing(
        key_type=sb.types.of("string"), max_parallelism=128
    )

    def elsewhere(plan: Any) -> Any:
        return plan._replace(store=other.unopened(), writer=other.data_writer())

    with closing(HostQuery(tmp_path / "store", JOB, 1, cluster=cluster_with(ship=elsewhere))) as query:
        with pytest.raises(
            sb.UsageError, match="a file of the driver in the checkpoint cannot be read here"
        ) as raised:
            query.run(0, ROWS)
        assert raised.value.code == "USAGE.LOCAL_CHECKPOINT"
        assert "host 0" in str(raised.value)
        assert query.store.latest() is None
    other.close()


def test_a_host_whose_files_the_driver_does_not_see_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = host.host_files.leave_token

    def lost(writer: Any) -> Any:
        token = leave(writer)
        for each in tokens(tmp_path):
            if token["file"]["name"].endswith(each.name):
                each.unlink()
        return token

    monkeypatch.setattr(host.host_files, "leave_token", lost)
    # The driver's own is one that hosts do not find.
    unseen = pytest.raises(sb.UsageError, match="cannot be read here")
    with closing(HostQuery(tmp_path, JOB, 1)) as query, unseen:
        query.run(0, ROWS)


def test_full_disk_is_named_when_hosts_start(small_disk: Path) -> None:
    with sb.CheckpointStore(small_disk / "state").open_for_writing(key_type=int, max_parallelism=4) as store:
        fill(small_disk / "ballast")
        with pytest.raises(sb.StoreError, match="No space left"):
            host.host_files.leave_token(store.data_writer())
        (small_disk / "ballast").unlink()


def test_tokens_are_gone_when_they_have_been_seen(tmp_path: Path) -> None:
    with closing(HostQuery(tmp_path, JOB, PARALLELISM)) as query:
        query.run(0, ROWS)
        assert len(tokens(tmp_path)) == 1, "that of the driver, for hosts to come"
        query.cluster.lose(0)
        query.run(1, ROWS)
        assert len(tokens(tmp_path)) == 1
    assert tokens(tmp_path) == []


def test_query_that_has_ended_does_not_wait_for_hosts() -> None:
    hosts = Hosts(1, secrets.token_bytes(32), 1, lambda: Question("restore", {}))
    hosts.has_ended = lambda: True
    with pytest.raises(sb.HostError, match="0 of 1 registered"):
        hosts.wait_ready(3600.0)
    hosts.close()


@pytest.mark.parametrize("is_over", [True, False])
def test_host_that_ends_with_its_query_is_not_called_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_over: bool
) -> None:
    """Spark may be stopped before the driver knows that the query has ended."""
    with closing(HostQuery(tmp_path, JOB, 1)) as query:
        query.run(0, ROWS)
        query.cluster.is_over = is_over
        host = query.execution._hosts._hosts[0]
        query.cluster.lose(0)
        wait_until(lambda: host.is_lost)
    assert ("was lost" in caplog.text) is not is_over


def test_host_that_gives_its_slot_back_is_not_called_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(HostQuery(tmp_path, JOB, 1)) as query:
        query.run(0, ROWS)
        query.execution._hosts.release()
        wait_until(lambda: query.cluster.ended)
        query.run(1, ROWS)
    assert "was lost" not in caplog.text


def test_hosts_without_slots_are_told_and_all_others_end_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait_ready = Hosts.wait_ready

    def once_one_is_ready(hosts: Hosts, limit: float) -> Any:
        wait_until(lambda: bool(hosts._ready()))
        return wait_ready(hosts, limit)

    monkeypatch.setattr(Hosts, "wait_ready", once_one_is_ready)
    monkeypatch.setattr(cluster_hosts, "TELL", 0.1)
    clusters = cluster_with(has_slot=lambda number: number == 0)
    options = Executors(PARALLELISM, start_timeout=300)
    with closing(HostQuery(tmp_path, JOB, options, cluster=clusters)) as query:
        cluster = query.cluster
        with caplog.at_level(logging.INFO):
            with pytest.raises(sb.HostError, match="1 of 2 registered within 0.3 s") as raised:
                query.run(0, ROWS)
            wait_until(lambda: "host 0 on executor here is ready, 1 of 2" in caplog.text)
        assert "waiting for hosts: 1 of 2 have registered, 1 have their state" in caplog.text
        assert raised.value.code == "HOST.START"
        assert len(cluster.paused) == 2
        assert all(0 <= each <= 0.3 for each in cluster.paused)
        # Host 0 has given its slot back each time.
        wait_until(lambda: cluster.ended.count("the driver let it go") >= 2)


def test_host_that_comes_after_its_job_has_ended_is_refused(tmp_path: Path) -> None:
    """Else it would run without a slot, and each job that follows would find that its range has a host."""
    with closing(HostQuery(tmp_path, JOB, 1, cluster=cluster_with(has_no_job={0}))) as query:
        wait_until(lambda: query.cluster.ended)
        assert query.cluster.ended[0] == "refused: the job of the host has ended, of range 0"
        query.cluster.has_no_job.clear()
        query.run(0, ROWS)


def test_two_queries_that_each_have_half_of_the_slots_both_come_to_run(tmp_path: Path) -> None:
    slots = threading.Semaphore(PARALLELISM)
    both_have_one = threading.Barrier(2)

    class Shared(ThreadCluster):
        """Hosts take slots that others want, too; at first, each query has one."""

        def __init__(self) -> None:
            super().__init__()
            self.is_first = True
            self.has_slot = lambda number: slots.acquire(blocking=False)

        def serve(self, host: Host) -> str:
            try:
                if self.is_first:
                    self.is_first = False
                    both_have_one.wait(20)
                return super().serve(host)
            finally:
                slots.release()

    def run(name: str) -> tuple[int, Any]:
        options = Executors(PARALLELISM, start_timeout="1 s", max_attempts=50)
        made = HostQuery(tmp_path / name, JOB, options, cluster=Shared)
        with closing(made) as query:
            return query.run(0, ROWS).progress["numOutputRows"], query.cluster.paused

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, ("one", "other"), timeout=60))
    assert [rows for rows, _ in results] == [4, 4]
    assert any(paused for _, paused in results), "they have waited for each other"


def test_a_driver_that_cannot_listen_keeps_no_slots(tmp_path: Path) -> None:
    made: list[ThreadCluster] = []

    class Noted(ThreadCluster):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    with socket.create_server((HOST, 0)) as taken:
        options = Executors(PARALLELISM, ports=[taken.getsockname()[1]])
        with pytest.raises(LinkError, match="cannot listen"):
            HostQuery(tmp_path, JOB, options, cluster=Noted)
    assert made[0]._is_closed.is_set()


def test_no_executor_has_more_than_its_share_of_hosts(tmp_path: Path) -> None:
    places = {0: iter("aaaa"), 1: iter("aaab"), 2: iter("abbb"), 3: iter("aaab")}
    clusters = cluster_with(executors=2, place_of=lambda number: next(places[number], "b"))
    with closing(HostQuery(tmp_path, JOB, 4, cluster=clusters)) as query:
        query.run(0, ROWS)
        there = sorted(each._place for each in query.cluster.hosts.values())
        assert there == ["a", "a", "b", "b"]
        assert any("has its share of hosts, 2" in each for each in query.cluster.ended)


def test_hosts_that_find_no_other_executor_stay_where_they_are(tmp_path: Path) -> None:
    with closing(HostQuery(tmp_path, JOB, PARALLELISM, cluster=cluster_with(executors=2))) as query:
        query.run(0, ROWS)
        refused = [each for each in query.cluster.ended if "has its share of hosts, 1" in each]
        assert len(refused) == _MOST_REFUSALS


def test_hosts_are_shared_out_evenly_however_many_were_lost_before(tmp_path: Path) -> None:
    """Spark tries an executor that has its share first, each time."""
    places = {0: itertools.chain("a", itertools.cycle("bbba")), 1: itertools.cycle("b")}
    clusters = cluster_with(executors=2, place_of=lambda number: next(places[number]))
    with closing(HostQuery(tmp_path, JOB, PARALLELISM, cluster=clusters)) as query:
        query.run(0, ROWS)
        for batch_id in range(1, 8):
            query.cluster.lose(0)
            query.run(batch_id, ROWS)
            assert [query.cluster.hosts[number]._place for number in range(PARALLELISM)] == ["a", "b"]
        refused = [each for each in query.cluster.ended if "has its share of hosts, 1" in each]
        assert len(refused) > _MOST_REFUSALS * PARALLELISM


def test_tasks_that_do_not_reach_hosts_are_told_before_rows_are_sent(tmp_path: Path) -> None:
    class Unreachable(ThreadCluster):
        def probe(self, addresses: Any, secret: bytes, limit: float) -> None:
            super().probe([("127.0.0.1", 1)], secret, limit)

    with closing(HostQuery(tmp_path, JOB, PARALLELISM, cluster=Unreachable)) as query:
        with pytest.raises(sb.HostError, match="a task does not reach a host"):
            query.run(0, ROWS)
        assert query.store.latest() is None


def test_a_host_that_is_lost_while_tasks_look_for_it_costs_a_try(world: World) -> None:
    class Losing(ThreadCluster):
        def probe(self, addresses: Any, secret: bytes, limit: float) -> None:
            if not self.paused:
                self.paused.append(0.0)
                self.lose(1)
                wait_until(lambda: world.query is not None and not world.query.execution._hosts.are_ready)
                raise sb.HostError("a task does not reach a host")
            super().probe(addresses, secret, limit)

    query = world.open(cluster=Losing)
    world.batch()
    assert query.cluster.paused == [0.0]
    world.batch()


def test_progress_shows_the_host_that_has_half_of_all_rows(tmp_path: Path) -> None:
    """A key that has half of the rows is at one host, whatever the number of hosts."""
    users = [f"user {number}" if number % 2 else "hot" for number in range(400)]
    table = pa.table({"user": users, "n": [1] * 400, "rule": [False] * 400})
    with closing(HostQuery(tmp_path, JOB, 4)) as query:
        rows = [each["numRows"] for each in query.run(0, table).progress["hosts"]]
        assert sum(rows) == 400
        assert max(rows) >= 200
        assert sorted(rows)[-2] < 100
    alone = LocalQuery(tmp_path, JOB)
    alone.close()
    there, named = data_files(tmp_path)
    assert there == named
