"""Many of something: states of one job, and namespaces of one state."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa

import statebackend as sb
from bench.checkpoint.costs import filled, store_in
from statebackend.functions import BatchProcessFunction
from statebackend.runtime.batch_identity import BatchSource
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.runtime.job import Job
from statebackend.runtime.runner import Runner


class OneOfMany(BatchProcessFunction):
    """Has so many value states; the first batch fills all of them, and the others change one."""

    def __init__(self, states: int) -> None:
        self.count = states

    def open(self, ctx: Any) -> None:
        self.states = [
            ctx.get_state(sb.ValueStateDescriptor(f"state {number}", "bigint"))
            for number in range(self.count)
        ]

    def process_batch(self, batch: Any, ctx: Any) -> Any:
        for state in self.states if ctx.batch_id == 0 else self.states[:1]:
            state.update_many(ctx.keys, batch["value"])


def states(count: int, samples: int, folder: str | None) -> dict[str, float]:
    """What a job with so many states costs.

    Milliseconds of a batch that changes one state and is committed, by the clock (``one``) and of the processor
    (``processor``), and microseconds a state of a full checkpoint (``base``).
    """
    taken: dict[str, list[float]] = {"one": [], "processor": [], "base": []}
    with tempfile.TemporaryDirectory(dir=folder) as root:
        job = Job(OneOfMany(count), key="key", schema="value bigint")
        runner = Runner(job, sb.CheckpointStore(root, retain=1), sb.types.LONG)
        try:
            for batch_id in range(1 + 10 * samples):
                table = pa.table({"key": [1], "value": [batch_id]})
                start, processor = time.perf_counter(), time.process_time()
                runner.run(batch_id, BatchSource(lambda table=table: table), Stopwatch())
                if batch_id:
                    taken["one"].append(1e3 * (time.perf_counter() - start))
                    taken["processor"].append(1e3 * (time.process_time() - processor))
        finally:
            runner.close()
    keyed, _ = filled(count, states=count)
    with store_in(folder) as store, keyed:
        for number in range(samples):
            start = time.perf_counter()
            store.commit(number, [keyed.snapshot(number, store, incremental=False).result()])
            taken["base"].append(1e6 * (time.perf_counter() - start) / count)
    return {name: statistics.median(each) for name, each in taken.items()}


KINDS = {
    "value": (lambda: sb.ValueStateDescriptor("state", "bigint"), "update_many"),
    "list": (lambda: sb.ListStateDescriptor("state", "bigint"), "add_many"),
    "map": (lambda: sb.MapStateDescriptor("state", "bigint", "bigint"), "put_many"),
}


def namespaces(n: int, kind: str, samples: int, folder: str | None) -> float:
    """Million namespaces a second of a restore; each is a window with one entry."""
    make, call = KINDS[kind]
    keyed = sb.create_backend("heap").create_keyed_backend("bigint")
    state = keyed.get_state(make())
    numbers = np.arange(n)
    spaces = [sb.TimeWindow(int(start), int(start) + 10) for start in numbers]
    columns = [numbers] if kind != "map" else [numbers % 10, numbers]
    getattr(state, call)(numbers, *columns, namespaces=spaces)
    with store_in(folder) as store, keyed:
        store.commit(0, [keyed.snapshot(0, store).result()])
        checkpoint = store.open(0)
        taken = []
        for _ in range(samples):
            start = time.perf_counter()
            again = sb.create_backend("heap").create_keyed_backend("bigint", restore=checkpoint)
            again.get_state(make())
            taken.append(time.perf_counter() - start)
            assert again.num_entries() == n
            again.close()
    return n / statistics.median(taken) / 1e6
