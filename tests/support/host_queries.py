"""Queries over hosts that are threads, and the same in one process: what they give and leave, to be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from any_checkpoint import read_rows
from thread_cluster import ThreadCluster, batch_of

import statebackend as sb
from statebackend.cluster.cluster_execution import ClusterExecution, Executors
from statebackend.runtime import BatchSource, CommittedBatch, Job, Runner
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.types import of


def executors(n: int, **options: Any) -> Executors:
    """Hosts that wait no longer than a test may take."""
    return Executors(n, **{"start_timeout": "20 s", "heartbeat_timeout": "20 s", **options})


class LocalQuery:
    """A query in one process, on a store in a folder."""

    def __init__(self, folder: Path, job: Job, key_type: Any = "string", **options: Any) -> None:
        self.folder = folder
        self.store = sb.CheckpointStore(folder)
        self.runner = Runner(job, self.store, of(key_type), **options)

    def run(self, batch_id: int, table: pa.Table) -> CommittedBatch:
        return self.runner.run(batch_id, BatchSource(lambda: table), Stopwatch())

    def close(self) -> None:
        self.runner.close()


class HostQuery:
    """A query over hosts that are threads. ``cluster`` is the newest: a query that begins anew has others."""

    def __init__(
        self,
        folder: Path,
        job: Job,
        hosts: int | Executors,
        key_type: Any = "string",
        *,
        cluster: Any = ThreadCluster,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.store = sb.CheckpointStore(folder)
        self.clusters: list[ThreadCluster] = []
        run_on = executors(hosts) if isinstance(hosts, int) else hosts

        def execution(*arguments: Any, **named: Any) -> ClusterExecution:
            self.clusters.append(cluster())
            self.execution = ClusterExecution(*arguments, **named, engine=self.clusters[-1], options=run_on)
            return self.execution

        self.runner = Runner(job, self.store, of(key_type), execution=execution, **options)

    @property
    def cluster(self) -> ThreadCluster:
        return self.clusters[-1]

    def run(self, batch_id: int, table: pa.Table, partitions: int = 3) -> CommittedBatch:
        return self.runner.run(batch_id, batch_of(table, partitions), Stopwatch())

    def close(self) -> None:
        self.runner.close()


def rows_out(committed: CommittedBatch, output: str = "main") -> list[tuple[Any, ...]]:
    tables = [committed.read_output(file) for file in committed.outputs.get(output, ())]
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]


def state_of(folder: Path) -> dict[str, Any]:
    """All states in the newest checkpoint. How many instances had a copy of operator state does not count."""
    reader = sb.CheckpointStore(folder, single_writer=True)
    checkpoint = reader.open_latest()
    found: dict[str, Any] = {}
    for snapshot in checkpoint.snapshots:
        for state in snapshot.states:
            name, kind = state["name"], state["kind"]
            if name in found:
                continue
            rows = read_rows(folder, name).to_pylist()
            for row in rows:
                row.pop("subtask", None)
            told = [repr(sorted(row.items())) for row in rows]
            found[name] = sorted(set(told) if kind in ("broadcast", "union") else told)
    return found


def data_files(folder: Path) -> tuple[set[str], set[str]]:
    """The data files of a store, and those that its checkpoints name, without outputs that are gone."""
    reader = sb.CheckpointStore(folder, single_writer=True)
    named: set[str] = set()
    for checkpoint in map(reader.open, reader.checkpoints()):
        gone = set() if checkpoint.has_outputs else checkpoint.manifest.output_names
        named |= checkpoint.manifest.all_files.keys() - gone
    there = {path.relative_to(folder).as_posix() for path in (folder / "data").rglob("*") if path.is_file()}
    return there, named
