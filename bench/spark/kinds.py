"""What the four kinds of function cost: a running total of each key, without Spark.

    python -m bench.spark.kinds

A batch of Arrow rows goes in, and one of Arrow rows comes out, as in a job: what is left out is Spark, and the commit.
Each kind gives out what is natural for it: row by row a row for each row, otherwise one for each key of the batch.
Totals are compared at the end. The time is that of the processor, summed over threads, so that other programs do not
count;
the median of the batches after the first is shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa

import statebackend as sb
from statebackend.runtime import Batch, Job, Task
from statebackend.types import LONG

SCHEMA = "user bigint, total bigint"
TOTAL = sb.ReducingStateDescriptor("state", "sum", LONG)


class ByRow(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(TOTAL)

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterable[Any]:
        self.total.add(row.n)
        return [(row.user, self.total.get())]


class ByKey(sb.KeyRowsFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(TOTAL)

    def process_rows(self, key: int, rows: list[Any], ctx: sb.FunctionContext) -> Iterable[Any]:
        self.total.add(sum(row.n for row in rows))
        return [(key, self.total.get())]


class OverColumns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(TOTAL)

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
        users, totals, _ = self.total.add_many(ctx.keys, batch["n"], return_changed=True)
        return pa.record_batch({"user": users, "total": totals})


def running(row: Any, total: int | None) -> tuple[Any, int]:
    total = (total or 0) + row.n
    return (row.user, total), total


KINDS: dict[str, Callable[[], Any]] = {
    "map_with_state": lambda: sb.map_with_state(running, LONG),
    "KeyedProcessFunction": ByRow,
    "KeyRowsFunction": ByKey,
    "BatchProcessFunction": OverColumns,
}


def speed(make: Callable[[], Any], batches: list[pa.Table]) -> float:
    """Rows a second and core of one kind."""
    job = Job(make(), key="user", schema=SCHEMA)
    task = Task(job, LONG)
    times = []
    for number, table in enumerate(batches):
        begin = time.process_time()
        task.run(number, Batch(job, table), now=number)
        task.committed(number)
        times.append(time.process_time() - begin)
    descriptor = TOTAL if isinstance(task.job.function, (ByRow, ByKey, OverColumns)) else None
    state = task.keyed.get_state(descriptor or sb.ValueStateDescriptor("state", LONG))
    check(state, batches)
    task.close()
    return batches[0].num_rows / statistics.median(times[1:])


def check(state: Any, batches: list[pa.Table]) -> None:
    """Raise unless the state has the sums of all rows."""
    sums = pa.concat_tables(batches).group_by("user").aggregate([("n", "sum")])
    found = state.get_many(sums["user"])
    if not found.equals(sums["n_sum"].combine_chunks()):
        raise SystemExit(f"{state!r} has other totals than the input")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.spark.kinds", description="four kinds of function")
    parser.add_argument("--rows", type=int, default=400_000, help="rows of a batch (%(default)s)")
    parser.add_argument("--keys", type=int, default=100_000, help="keys (%(default)s)")
    parser.add_argument("--batches", type=int, default=4, help="batches, one to warm up (%(default)s)")
    given = parser.parse_args()
    rng = np.random.default_rng(3)
    batches = [
        pa.table({"user": rng.integers(0, given.keys, given.rows), "n": rng.integers(0, 100, given.rows)})
        for _ in range(given.batches)
    ]
    for name, make in KINDS.items():
        print(f"| `{name}` | {speed(make, batches):,.0f} |", flush=True)


if __name__ == "__main__":
    main()
