"""Functions, sinks and disks that fail at random, and a thousand batches: nothing is lost, doubled or left behind."""

from __future__ import annotations

import errno
import gc
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stream_process import SCHEMA, Numbered, expected, input_of, table_of

import statebackend as sb
from statebackend.runtime import BatchSource, Job, Runner
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.types import STRING


class Outage(Exception):
    pass


class World:
    """A stream that goes on until a batch has come through, in one process; faults come from a generator."""

    def __init__(self, folder: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng, self.folder = rng, folder
        self.runner: Runner | None = None
        self.faults = 0
        self.given: dict[int, list[dict[str, Any]]] = {}
        write = pq.ParquetWriter.write_table

        def failing(*arguments: Any, **options: Any) -> None:
            if self.strikes(10):
                raise OSError(errno.ENOSPC, "as told")
            write(*arguments, **options)

        commit = sb.CheckpointStore.commit

        def commits(store: sb.CheckpointStore, *arguments: Any, **options: Any) -> Any:
            if self.strikes(20):
                raise OSError(errno.EIO, "as told")
            committed = commit(store, *arguments, **options)
            if self.strikes(20):
                raise OSError(errno.EIO, "as told, after the commit")
            return committed

        monkeypatch.setattr(pq.ParquetWriter, "write_table", failing)
        monkeypatch.setattr(sb.CheckpointStore, "commit", commits)

    def strikes(self, one_in: int) -> bool:
        if self.rng.randrange(one_in):
            return False
        self.faults += 1
        return True

    def tick(self) -> None:
        if self.strikes(60):
            raise Outage

    def attempt(self, batch_id: int) -> None:
        if self.runner is None or not self.runner.is_open:
            job = Job(Numbered(self.tick), key="user", schema=SCHEMA)
            self.runner = Runner(job, sb.CheckpointStore(self.folder, retain=2), STRING, query="q")
        table = table_of(input_of(batch_id))
        committed = self.runner.run(batch_id, BatchSource(lambda: table), Stopwatch())
        rows_out: list[dict[str, Any]] = []
        for file in committed.output:
            rows_out += pq.read_table(committed.checkpoint.address(file)).to_pylist()
        assert self.given.setdefault(batch_id, rows_out) == rows_out
        if self.strikes(8):  # the sink
            raise Outage

    def batch(self, batch_id: int) -> None:
        while True:
            try:
                self.attempt(batch_id)
            except (OSError, Outage):
                if self.runner is not None and not self.rng.randrange(3):
                    self.runner.close()  # Spark restarts the query
                continue
            return


def test_faults_at_random(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, is_stress: bool
) -> None:
    batches = 3000 if is_stress else 40
    world = World(tmp_path, rng, monkeypatch)
    try:
        for batch_id in range(batches):
            world.batch(batch_id)
        given = [world.given[batch_id] for batch_id in range(batches)]
        found = [[(row["user"], row["total"], row["number"]) for row in rows] for rows in given]
        assert found == expected(batches)
        assert world.faults > batches / 4
    finally:
        if world.runner is not None:
            world.runner.close()


class Counting(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.n = ctx.get_reducing_state(sb.ReducingStateDescriptor("n", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.n.add(1)
        yield row.user, self.n.get()


def test_memory_and_files_stay_flat(tmp_path: Path, is_stress: bool) -> None:
    batches = 1000 if is_stress else 42
    table = pa.table({"user": [f"u{n % 50}" for n in range(200)]})
    job = Job(Counting(), key="user", schema="user string, n bigint")
    runner = Runner(job, sb.CheckpointStore(tmp_path, retain=2), STRING, query="q")
    files, memory, objects = [], [], []
    for batch_id in range(batches):
        committed = runner.run(batch_id, BatchSource(lambda: table), Stopwatch())
        files.append(sum(1 for path in tmp_path.rglob("*") if path.is_file()))
        memory.append(committed.progress["memoryUsedBytes"])
        if batch_id % (batches // 6) == 0:
            gc.collect()
            objects.append(len(gc.get_objects()))
    runner.close()
    middle = batches // 2
    assert max(files[middle:]) <= max(files[:middle]) + 2
    assert max(memory[middle:]) <= max(memory[:middle]) * 1.1
    assert objects[-1] <= objects[2] + 500
