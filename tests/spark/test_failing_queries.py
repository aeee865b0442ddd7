"""Real queries whose function and sink raise at random, and one that runs for long: nothing is lost or left behind."""

from __future__ import annotations

import gc
import hashlib
import os
import random
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pytest
from processes import run
from spark_streams import Outage, Stream, len_of
from stream_process import SCHEMA, Numbered, expected, input_of

import statebackend as sb
from statebackend.checkpoint.keyed.chain import FAN

pytestmark = [pytest.mark.spark, pytest.mark.slow]


class Faults:
    """Raises now and then, and remembers what the sink was given."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.struck = {"function": 0, "sink": 0}
        self.given: dict[int, list[Any]] = {}
        self.files: dict[int, list[str]] = {}

    def tick(self) -> None:
        if not self.rng.randrange(20):
            self.struck["function"] += 1
            raise Outage

    def sink(self, frame: Any, batch_id: int) -> None:
        rows = [tuple(row) for row in frame.collect()]
        # Byte for byte: also what the function drew at random.
        files = [digest(name) for name in frame.inputFiles()]
        assert self.given.setdefault(batch_id, rows) == rows
        assert self.files.setdefault(batch_id, files) == files
        if not self.rng.randrange(3):
            self.struck["sink"] += 1
            raise Outage


def digest(uri: str) -> str:
    return hashlib.sha256(Path(unquote(urlparse(uri).path)).read_bytes()).hexdigest()


def table_of(rows: list[tuple[str, int]]) -> pa.Table:
    columns = {"user": [user for user, _ in rows], "n": [n for _, n in rows], "amount": [n for _, n in rows]}
    kinds = [("user", pa.string()), ("n", pa.int64()), ("amount", pa.int64())]
    return pa.table(columns, pa.schema(kinds))


def ends(stream: Stream, job: Any) -> bool:
    """Run the query; whether it came to its end, or an outage came before."""
    from pyspark.errors import StreamingQueryException

    try:
        stream.run(job)
    except StreamingQueryException as error:
        if "Outage" not in str(error):
            raise
        return False
    return True


def test_the_function_and_the_sink_raise_at_random(
    stream: Stream, rng: random.Random, is_stress: bool
) -> None:
    """The next run of the query is given the same object, or another one, as after a restart."""
    batches = 60 if is_stress else 12
    for batch_id in range(batches):
        stream.add(table_of(input_of(batch_id)))
    faults = Faults(rng)

    def made() -> Any:
        return stream.batches(Numbered(faults.tick), faults.sink, schema=SCHEMA)

    job = made()
    while not ends(stream, job):
        job = made() if rng.random() < 0.5 else job
    assert min(faults.struck.values()) >= 1
    assert sorted(faults.given) == list(range(batches))
    assert [[row[:3] for row in faults.given[batch_id]] for batch_id in range(batches)] == expected(batches)


class Recent(sb.KeyedProcessFunction):
    """State that comes and goes, so that deltas, bases and removals all happen."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.n = ctx.get_reducing_state(sb.ReducingStateDescriptor("n", "sum", int))
        self.seen = ctx.get_list_state(sb.ListStateDescriptor("seen", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.n.add(row.n)
        self.seen.add(ctx.batch_id)
        if len(self.seen.get()) > 20:
            self.seen.clear()
        yield row.user, self.n.get()


def resident() -> int:
    """Bytes of this process, without Spark's, which has one of its own."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.sampled(1, of="long queries")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_and_files_of_the_driver_stay_flat(
    stream: Stream, request: pytest.FixtureRequest, is_stress: bool
) -> None:
    """Over a thousand batches in the long run, forty otherwise.

    In a process of its own: one that has run thousands of tests gives memory back, and takes it, as it likes.
    """
    if os.environ.get("PYTEST_XDIST_WORKER"):
        arguments = ["-q", "-p", "no:xdist", *["--stress"] * is_stress, request.node.nodeid]
        done = run(
            "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))",
            *arguments,
            variables={"PYTEST_XDIST_WORKER": ""},
            timeout=3000,
            cwd=request.config.rootpath,
        )
        assert "1 passed" in done.stdout
        return
    batches = 1000 if is_stress else 40
    rng = random.Random(3)
    for _ in range(batches):
        stream.add(table_of([(f"u{rng.randrange(200)}", 1) for _ in range(100)]))
    job = stream.batches(Recent(), len_of, state=sb.CheckpointStore(stream.state, retain=2))
    files, memory, objects = [], [], []

    def call(frame: Any, batch_id: int) -> None:
        job(frame, batch_id)
        files.append(sum(1 for path in stream.state.rglob("*") if path.is_file()))
        if batch_id % (batches // 20) == 0:
            gc.collect()
            memory.append(resident())
            objects.append(len(gc.get_objects()))

    try:
        stream.start(call).awaitTermination()
    finally:
        job.close()
    assert len(files) == batches
    # A base, few deltas of each size upon it, and what is being merged; outputs; manifests.
    assert max(files) <= 4 * FAN + 12
    assert max(memory[10:]) <= max(memory[:10]) + (8 << 20)
    assert objects[-1] <= objects[5] + 2_000
