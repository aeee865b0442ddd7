"""A job over several hosts gives what it gives in one process, batch by batch, whatever is lost on the way."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from host_queries import HostQuery, LocalQuery
from thread_cluster import ThreadCluster, batch_of

import statebackend as sb
from statebackend.cluster.options import HostOptions
from statebackend.cluster.scattered_execution import ScatteredExecution
from statebackend.runtime import Job, Runner
from statebackend.runtime.progress import Stopwatch


class Total(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        if row.n is None:
            raise ValueError("no number")
        self.total.add(row.n)
        yield row.user, self.total.get()


JOB = Job(Total(), key="user", schema="user string, total bigint")


class Query:
    """A runner over hosts, on a store in a folder."""

    def __init__(self, folder: Path, parallelism: int, job: Job = JOB, **options: Any) -> None:
        self.cluster = ThreadCluster()
        self.store = sb.CheckpointStore(folder)
        settings = {"start_timeout": 20.0, "silence": 20.0, **options}
        self.runner = Runner(
            job,
            self.store,
            sb.types.of("string"),
            execution=partial(
                ScatteredExecution,
                engine=self.cluster,
                parallelism=parallelism,
                options=HostOptions(**settings),
                memory=256 << 20,
            ),
        )

    def run(self, batch_id: int, table: pa.Table, **options: Any) -> Any:
        return self.runner.run(batch_id, batch_of(table, **options), Stopwatch())

    def close(self) -> None:
        self.runner.close()


def rows_out(committed: Any, output: str = "main") -> list[tuple[Any, ...]]:
    tables = [committed.read_output(file) for file in committed.outputs.get(output, ())]
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]


def numbers(rng: random.Random, rows: int = 300) -> pa.Table:
    return pa.table(
        {
            "user": [f"user {rng.randrange(40)}" for _ in range(rows)],
            "n": [rng.randrange(100) for _ in range(rows)],
        }
    )


def expected(totals: collections.Counter[str], table: pa.Table) -> dict[str, int]:
    for row in table.to_pylist():
        totals[row["user"]] += row["n"]
    return {user: totals[user] for user in table.column("user").to_pylist()}


def last_of(rows: list[tuple[Any, ...]]) -> dict[str, int]:
    return dict(rows)


@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_a_job_over_hosts_gives_what_one_process_gives(
    tmp_path: Path, rng: random.Random, parallelism: int
) -> None:
    query, totals = Query(tmp_path, parallelism), collections.Counter[str]()
    try:
        for batch_id in range(4):
            table = numbers(rng)
            committed = query.run(batch_id, table)
            assert last_of(rows_out(committed)) == expected(totals, table)
            assert committed.progress["numInputRows"] == 300
            assert committed.progress["numRowsTotal"] == len(totals)
    finally:
        query.close()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5)])
def test_state_goes_on_with_another_number_of_hosts(
    tmp_path: Path, rng: random.Random, before: int, after: int
) -> None:
    totals = collections.Counter[str]()
    for first, parallelism in ((0, before), (2, after)):
        query = Query(tmp_path, parallelism)
        try:
            for batch_id in (first, first + 1):
                table = numbers(rng)
                assert last_of(rows_out(query.run(batch_id, table))) == expected(totals, table)
        finally:
            query.close()


def test_the_driver_mode_goes_on_with_what_hosts_have_written_and_the_other_way_round(
    tmp_path: Path, rng: random.Random
) -> None:
    totals = collections.Counter[str]()
    query = Query(tmp_path, 3)
    try:
        table = numbers(rng)
        assert last_of(rows_out(query.run(0, table))) == expected(totals, table)
    finally:
        query.close()
    alone = Runner(JOB, sb.CheckpointStore(tmp_path), sb.types.of("string"))
    table = numbers(rng)
    from statebackend.runtime import Incoming

    assert last_of(rows_out(alone.run(1, Incoming(lambda: table), Stopwatch()))) == expected(totals, table)
    alone.close()
    query = Query(tmp_path, 2)
    try:
        table = numbers(rng)
        assert last_of(rows_out(query.run(2, table))) == expected(totals, table)
    finally:
        query.close()


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Query]:
    query = Query(tmp_path, 3)
    yield query
    query.close()


def test_an_error_of_the_function_is_raised_once_and_takes_all_hosts_back(
    query: Query, rng: random.Random
) -> None:
    totals = collections.Counter[str]()
    table = numbers(rng)
    query.run(0, table)
    expected(totals, table)
    bad = pa.table({"user": ["user 1", "user 2", "user 3"], "n": [1, None, 3]})
    with pytest.raises(sb.HostError, match="ValueError: no number"):
        query.run(1, bad)
    table = numbers(rng)
    assert last_of(rows_out(query.run(1, table))) == expected(totals, table)


class Listening(sb.KeyedProcessFunction, sb.CheckpointListener):
    """Counts rows by user, and cannot hear of the first batch."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.count = ctx.get_reducing_state(sb.ReducingStateDescriptor("count", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.count.add(1)
        yield row.user, self.count.get()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        if checkpoint_id == 0:
            raise ValueError("it is not to be heard")


@pytest.mark.parametrize(
    "made", [LocalQuery, lambda *given: HostQuery(*given, 2)], ids=["driver", "executors"]
)
def test_a_listener_that_fails_is_raised_once_the_batch_is_committed(tmp_path: Path, made: Any) -> None:
    """In both modes, and no host is lost for it."""
    query = made(tmp_path, Job(Listening(), key="user", schema="user string, count bigint"))
    table = pa.table({"user": ["ann", "bob", "eve", "kim"]})
    try:
        with pytest.raises((ValueError, sb.HostError), match="it is not to be heard"):
            query.run(0, table)
        assert query.store.latest() == 0
        assert sorted(rows_out(query.run(1, table))) == [(user, 2) for user in ("ann", "bob", "eve", "kim")]
        assert getattr(query, "clusters", []) == [] or query.cluster.ended == []
    finally:
        query.close()


def test_a_host_that_is_lost_between_batches_is_replaced(query: Query, rng: random.Random) -> None:
    totals = collections.Counter[str]()
    for batch_id in range(4):
        table = numbers(rng)
        assert last_of(rows_out(query.run(batch_id, table))) == expected(totals, table)
        query.cluster.lose(batch_id % 3)


def test_a_host_that_is_lost_while_tasks_send_costs_a_try(query: Query, rng: random.Random) -> None:
    totals = collections.Counter[str]()
    to_lose: list[int] = []

    def lose(part: int, attempt: int) -> None:
        if part == 1 and to_lose:
            query.cluster.lose(to_lose.pop())

    query.cluster.before_task = lose
    for batch_id in range(3):
        to_lose.append(batch_id)
        table = numbers(rng)
        assert last_of(rows_out(query.run(batch_id, table))) == expected(totals, table)
        assert not to_lose


def test_attempts_of_tasks_that_fail_leave_nothing(query: Query, rng: random.Random) -> None:
    totals = collections.Counter[str]()

    def fail(part: int, attempt: int) -> None:
        if attempt < part:
            raise OSError("the disk of the executor is gone")

    query.cluster.before_task = fail
    for batch_id in range(3):
        table = numbers(rng)
        assert last_of(rows_out(query.run(batch_id, table))) == expected(totals, table)
        assert all(host._staging.bytes_in_memory == 0 for host in query.cluster.hosts.values())
