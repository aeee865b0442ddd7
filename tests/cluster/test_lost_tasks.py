"""Attempts of tasks that fail, come twice or come too late leave nothing, and tries of a batch come to an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from host_worlds import PARTITIONS, World
from raw_links import LONG
from thread_cluster import Killed, ThreadCluster

import statebackend as sb
from statebackend.cluster.shuffle_sender import ShufflePlan, TaskReport, send_rows
from statebackend.cluster.wire import LinkError
from statebackend.runtime import BatchSource

pytestmark = pytest.mark.usefixtures("nothing_left_open")


class Tasks(ThreadCluster):
    """Runs attempts of tasks as ``attempts_of`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.plan: ShufflePlan | None = None
        self.attempts_of: Callable[[ShufflePlan, int, Iterable[pa.RecordBatch]], TaskReport] | None = None

    def scatter(self, incoming: BatchSource, plan: ShufflePlan) -> list[TaskReport]:
        self.plan = plan
        if self.attempts_of is None:
            return super().scatter(incoming, plan)
        return [self.attempts_of(plan, part, rows.to_batches()) for part, rows in enumerate(incoming.source)]


_numbers = iter(range(1_000_000, 2_000_000))


def sent(plan: ShufflePlan, part: int, rows: Iterable[pa.RecordBatch]) -> TaskReport:
    return send_rows(plan, rows, task=next(_numbers), partition=part)


def some_then(rows: Iterable[pa.RecordBatch], then: Callable[[], None]) -> Iterator[pa.RecordBatch]:
    for each in rows:
        yield each.slice(0, each.num_rows // 2)
        then()


def dies() -> None:
    raise Killed


def test_of_two_attempts_of_a_task_the_one_that_is_reported_counts(world: World) -> None:
    """Speculation: both end, and the engine keeps one. And one that fails when it has sent half of its rows."""
    world.open(cluster=Tasks)

    def doubled(plan: ShufflePlan, part: int, rows: Iterable[pa.RecordBatch]) -> TaskReport:
        with pytest.raises(Killed):
            sent(plan, part, some_then(rows, dies))
        with ThreadPoolExecutor(2) as pool:
            ended = [pool.submit(sent, plan, part, rows) for _ in range(2)]
            return world.rng.choice([each.result() for each in ended])

    world.cluster.attempts_of = doubled
    for _ in range(4):
        world.batch()
        world.nothing_is_staged()


class Zombie:
    """The first attempt of a part: it stands still in the middle of its rows while another one does its work."""

    def __init__(self, rows_of: Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]) -> None:
        #: Its rows, given those of the part; it stands still before the second batch of them.
        self._rows_of = rows_of
        self._stands, self._goes_on = threading.Event(), threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._attempts: list[Any] = []

    def __call__(self, plan: ShufflePlan, part: int, rows: Iterable[pa.RecordBatch]) -> TaskReport:
        if part == 0:
            self._attempts.append(self._thread.submit(sent, plan, part, self._paused(self._rows_of(rows))))
            assert self._stands.wait(LONG)
        return sent(plan, part, rows)

    def _paused(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for at, each in enumerate(rows):
            if at == 1:
                self._stands.set()
                assert self._goes_on.wait(LONG)
            yield each

    def is_refused(self) -> bool:
        """Let it go on: its hosts take no more of it."""
        self._goes_on.set()
        with self._thread, pytest.raises(LinkError, match="does not take|closed|lost"):
            self._attempts[0].result(LONG)
        return True


def test_an_attempt_that_goes_on_when_the_batch_has_run_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is in the middle of its rows then, one begins only now, and one comes with those of the try before."""
    monkeypatch.setattr("statebackend.cluster.shuffle_sender._MESSAGE", 1)
    world.open(cluster=Tasks)
    table = world.table()
    zombie = Zombie(lambda rows: [each.slice(at) for each in rows for at in (0, each.num_rows // 2)])
    world.cluster.attempts_of = zombie
    world.batch(table)
    plan = world.cluster.plan
    assert plan is not None
    with pytest.raises(LinkError, match="does not take|closed|lost"):
        sent(plan, 0, table.to_batches())
    assert zombie.is_refused()
    world.cluster.attempts_of = None
    world.nothing_is_staged()
    world.batch()
    with pytest.raises(LinkError, match="does not take|closed|lost"):
        sent(plan, 0, table.to_batches())
    world.batch()
    world.nothing_is_staged()


def test_unnamed_attempt_is_refused_if_the_batch_has_only_its_rows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what it sends would wait at hosts until there is another batch."""
    monkeypatch.setattr("statebackend.cluster.shuffle_sender._MESSAGE", 1)
    world.open(cluster=Tasks)
    half = world.table().to_batches()
    zombie = world.cluster.attempts_of = Zombie(lambda rows: [*half, *half])
    world.batch(world.table().slice(0, 0))
    world.nothing_is_staged()
    assert zombie.is_refused()
    world.nothing_is_staged()
    world.cluster.attempts_of = None
    world.batch()


@pytest.mark.parametrize("is_read", [True, False], ids=["to the end", "no further"])
def test_rows_that_fit_nowhere_are_an_error_that_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """Not a lost host: another try would find the same. And also where the host closes while the task still sends."""
    if not is_read:
        monkeypatch.setattr("statebackend.cluster.wire._FINISH", 0.0)
        monkeypatch.setattr("statebackend.cluster.shuffle_sender._MESSAGE", 1 << 16)
    world.open(batch_memory=100, spill_disk=100)
    wide = pa.table({"user": ["a" * 1000] * 20_000, "n": [1] * 20_000, "rule": [False] * 20_000})
    with pytest.raises(sb.StoreError) as caught:
        world.query.run(0, wide)
    assert caught.value.code == "CLUSTER.STAGING_FULL"
    world.nothing_is_staged()
    empty = world.table().slice(0, 0)
    world.batch(empty)


def test_rows_of_a_batch_that_is_refused_before_it_runs_are_given_back(world: World) -> None:
    world.open()
    world.batch()
    table = pa.concat_tables(
        [world.table(), pa.table({"user": [None], "n": [1], "rule": [False]})], promote_options="default"
    )
    with pytest.raises(sb.SerializationTypeError, match="a key is null"):
        world.query.run(world.next, table)
    world.nothing_is_staged()
    world.batch()


def test_one_batch_of_the_engine_may_be_larger_than_a_frame(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark bounds its Arrow batches by rows, of which each may be long: broadcast ones, too, and of all lengths."""
    monkeypatch.setattr("statebackend.cluster.wire.MAX_BODY", 1 << 20)
    monkeypatch.setattr("statebackend.cluster.shuffle_sender._LARGEST", 1 << 19)
    world.open(cluster=Tasks)
    world.cluster.attempts_of = lambda plan, part, rows: sent(
        plan, part, pa.Table.from_batches(rows).combine_chunks().to_batches()
    )
    lengths = [world.rng.choice([3, 500, 2000, 400_000]) for _ in range(60)]
    users = [f"{number} {length * 'a'}" for number, length in enumerate(lengths)]
    numbers = [world.rng.randrange(100) for _ in users]
    world.batch(pa.table({"user": users, "n": numbers, "rule": [not number % 5 for number in numbers]}))
    world.batch()


def test_hosts_that_are_lost_in_every_try_fail_the_batch_and_the_next_call_works(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statebackend.cluster.cluster_execution._REPORT", 0.05)  # nobody reports its end
    world.open(max_attempts=2)
    world.batch()
    tries = [0, 0]

    def lose(part: int, attempt: int) -> None:
        if part == 0 and attempt == 0 and tries:
            tries.pop()
            world.cluster.lose(0)

    world.cluster.before_task = lose
    world.cluster.attempts = 1
    table = world.table()
    with pytest.raises(sb.HostError) as caught:
        world.query.run(world.next, table, PARTITIONS)
    assert caught.value.code == "HOST.LOST"
    world.nothing_is_staged()
    world.cluster.attempts = 4
    world.batch(table)
    world.batch()
