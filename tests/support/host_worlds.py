"""A stream through a query over hosts that are threads: what it should give, and that nothing is left at its end."""

from __future__ import annotations

import collections
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from host_queries import HostQuery, LocalQuery, data_files, rows_out, state_of
from raw_links import LONG, wait_until
from thread_cluster import ThreadCluster

import statebackend as sb
from statebackend.cluster.cluster_execution import Executors
from statebackend.runtime import Job

PARALLELISM, PARTITIONS = 2, 2
#: Rows for all hosts.
ROWS = pa.table({"user": ["ann", "bob", "eve", "kim"], "n": [1, 2, 3, 4], "rule": [False] * 4})

#: Called by every instance of the function for each row, with the number of the host's range.
ticks: list[Callable[[], None]] = []


class Total(sb.KeyedProcessFunction, sb.CheckpointedFunction):
    """A running total of each user, the rows of an instance, and how often a rule came."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def initialize_state(self, ctx: Any) -> None:
        store = ctx.operator_state_store
        self.rows = store.get_list_state(sb.ListStateDescriptor("rows", int))
        self.rules = store.get_broadcast_state(sb.MapStateDescriptor("rules", str, int))

    def process_broadcast(self, row: Any, ctx: sb.FunctionContext) -> None:
        self.rules.put("rules", self.rules.get("rules", 0) + 1)

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        for tick in ticks:
            tick()
        if row.n is None:
            raise ValueError("no number")
        self.total.add(row.n)
        self.rows.add(row.n)
        yield row.user, self.total.get() + 1_000_000 * self.rules.get("rules", 0)

    def snapshot_state(self, ctx: Any) -> None:
        pass


def job(backend: str | sb.StateBackend = "heap") -> Job:
    """The job of a `World`."""
    return Job(
        Total(), key="user", schema="user string, total bigint", broadcast_when="rule", backend=backend
    )


JOB = job()


class World:
    """A stream through a query over hosts, and what it should give."""

    def __init__(self, folder: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.rng = folder / "store", rng
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        self.totals: collections.Counter[str] = collections.Counter()
        self.rules = 0
        self.numbers: list[int] = []
        self.next = 0
        self.query: Any = None

    def open(
        self,
        *,
        cluster: Any = ThreadCluster,
        backend: str | sb.StateBackend = "heap",
        **hosts: Any,
    ) -> HostQuery:
        long = f"{LONG} s"
        options = Executors(PARALLELISM, **{"start_timeout": long, "heartbeat_timeout": long, **hosts})
        self.query = HostQuery(self.folder, job(backend), options, cluster=cluster)
        return self.query

    @property
    def cluster(self) -> ThreadCluster:
        return self.query.cluster

    def table(self) -> pa.Table:
        rng = self.rng
        rows = [
            {"user": f"user {rng.randrange(9)}", "n": rng.randrange(100), "rule": not rng.randrange(8)}
            for _ in range(24)
        ]
        return pa.Table.from_pylist(rows)

    def batch(self, table: pa.Table | None = None) -> None:
        """One batch, which must come through."""
        table = self.table() if table is None else table
        self.check(self.query.run(self.next, table, PARTITIONS), table)

    def check(self, committed: Any, table: pa.Table) -> None:
        """What the batch gave is what the batch computation gives."""
        rows = table.to_pylist()
        self.rules += sum(row["rule"] for row in rows)
        wanted = collections.defaultdict(list)
        for row in rows:
            if not row["rule"]:
                self.totals[row["user"]] += row["n"]
                self.numbers.append(row["n"])
                wanted[row["user"]].append(self.totals[row["user"]] + 1_000_000 * self.rules)
        found = collections.defaultdict(list)
        for user, total in rows_out(committed):
            found[user].append(total)
        assert found == wanted
        assert committed.progress["numInputRows"] == table.num_rows
        self.next += 1

    def nothing_is_staged(self) -> None:
        """What fell behind is given back once the threads that served it have noticed."""
        wait_until(
            lambda: all(
                host._staging.bytes_in_memory == host._staging.bytes_on_disk == 0
                for host in self.cluster.hosts.values()
            )
        )

    def close(self) -> None:
        """End the query; then look at what is left."""
        self.query.close()
        self.query = None
        assert not list(self.temporary.iterdir())
        alone = LocalQuery(self.folder, JOB)
        try:
            alone.store.open_latest().verify()
            there, named = data_files(self.folder)
            assert there == named
            assert state_of(self.folder).get("total", []) == sorted(
                repr([("key", user), ("value", total)]) for user, total in self.totals.items()
            )
            assert state_of(self.folder).get("rows", []) == sorted(
                repr([("value", number)]) for number in self.numbers
            )
        finally:
            alone.close()
