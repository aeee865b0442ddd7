"""The main job: a streaming query with keyed state, which is killed in the middle, restarts, and is checked.

    python examples/spark/demo.py [--backend rocksdb] [--mode executors]

Orders of many customers arrive, a file a micro-batch. For each customer the job keeps how many there were, their sum
and the largest; for the batch it gives out the customers that were touched. In the middle the process with all its
state is killed with SIGKILL, JVM and all, and started again. At the end its state is compared with what a batch
computation over all input gives. With ``--mode executors`` the state is in two processes on executors of a small
cluster on this machine, and all of them are killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import statebackend as sb

SCHEMA = "customer bigint, orders bigint, spent bigint, largest bigint"


class Spending(sb.BatchProcessFunction):
    """Count, sum and maximum per customer, whole columns at a time."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.orders = ctx.get_aggregating_state(sb.AggregatingStateDescriptor("orders", "count", int))
        self.spent = ctx.get_reducing_state(sb.ReducingStateDescriptor("spent", "sum", int))
        self.largest = ctx.get_reducing_state(sb.ReducingStateDescriptor("largest", "max", int))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
        cents = batch["cents"]
        customers, orders, _ = self.orders.add_many(ctx.keys, cents, return_changed=True)
        spent = self.spent.add_many(ctx.keys, cents, return_changed=True).values
        largest = self.largest.add_many(ctx.keys, cents, return_changed=True).values
        return pa.record_batch({"customer": customers, "orders": orders, "spent": spent, "largest": largest})


# ------------------------------------------------------------------------------------ the query


def start(spark: Any, folder: Path, report: Any, backend: str = "heap", mode: str = "driver") -> Any:
    """Start the query over the files in ``folder/in``; ``report(progress)`` is called after each batch."""
    batches = sb.spark.stateful(
        Spending(),
        key="customer",
        schema=SCHEMA,
        backend=backend,
        run_on=sb.spark.Executors(2) if mode == "executors" else sb.spark.Driver(),
        state=f"file://{folder}/state",
        sink=lambda frame, batch_id: frame.write.mode("overwrite").parquet(f"{folder}/out/batch={batch_id}"),
    )

    def call(frame: Any, batch_id: int) -> None:
        batches(frame, batch_id)
        report(batches.last_progress)

    orders = spark.readStream.schema("customer bigint, cents bigint").option("maxFilesPerTrigger", 1)
    return (
        orders.parquet(str(folder / "in"))
        .writeStream.foreachBatch(call)
        .option("checkpointLocation", str(folder / "stream"))
        .trigger(availableNow=True)
        .start()
    )


def generate(folder: Path, batches: int, rows: int, customers: int) -> None:
    """One file of orders for each micro-batch. A few customers order most."""
    rng = np.random.default_rng(7)
    (folder / "in").mkdir(parents=True)
    for batch in range(batches):
        who = (rng.pareto(1.0, rows) * customers / 20).astype(np.int64) % customers
        table = pa.table({"customer": who, "cents": rng.integers(100, 100_000, rows)})
        path = folder / "in" / f"{batch:05}.parquet"
        pq.write_table(table, path)
        os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))  # Spark takes the oldest first


def state_is_right(folder: Path) -> bool:
    """Whether the newest checkpoint holds what a batch computation over all input gives."""
    orders = pq.read_table(folder / "in")
    wanted = orders.group_by("customer").aggregate([("cents", "count"), ("cents", "sum"), ("cents", "max")])
    store = sb.CheckpointStore(folder / "state")
    newest = store.latest()
    assert newest is not None
    backend = sb.create_backend("heap")
    with backend.create_keyed_backend("bigint", restore=store.open(newest)) as keyed:
        count = keyed.get_aggregating_state(sb.AggregatingStateDescriptor("orders", "count", int))
        spent = keyed.get_reducing_state(sb.ReducingStateDescriptor("spent", "sum", int))
        largest = keyed.get_reducing_state(sb.ReducingStateDescriptor("largest", "max", int))
        customers = wanted["customer"]
        return (
            keyed.num_entries("orders") == len(wanted)
            and count.get_many(customers).to_pylist() == wanted["cents_count"].to_pylist()
            and spent.get_many(customers).to_pylist() == wanted["cents_sum"].to_pylist()
            and largest.get_many(customers).to_pylist() == wanted["cents_max"].to_pylist()
        )


# ------------------------------------------------------------------------------------ the processes


def report(progress: dict[str, Any]) -> None:
    if progress["isReplay"]:
        # Spark had not yet noted that it was done.
        print(
            f"{progress['batchId']:>5}  was committed with its state: only its sink is called again",
            flush=True,
        )
        return
    print(
        f"{progress['batchId']:>5} {progress['processedRowsPerSecond']:>12,.0f} "
        f"{progress['states']['orders']:>12,} {progress['memoryUsedBytes'] / 1e6:>10.1f} "
        f"{progress['commitTimeMs']:>11.1f}",
        flush=True,
    )


def run_query(folder: Path, backend: str, mode: str) -> None:
    """The process that is killed."""
    from pyspark.sql import SparkSession

    # Two executors of two slots each: two for the hosts of the state, two for the batches.
    master = "local[2]" if mode == "driver" else "local-cluster[2,2,1024]"
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName("statebackend demo")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    start(spark, folder, report, backend, mode).awaitTermination()
    spark.stop()


def supervise(folder: Path, kill_at: int, backend: str, mode: str) -> None:
    """Run the query in a process group of its own; kill it after a batch, once, and start it again."""
    print("batch       rows/s         keys   state MB   commit ms")
    while True:
        with (
            open(folder / "spark.log", "a") as log,
            subprocess.Popen(
                [sys.executable, __file__, "--query", str(folder), "--backend", backend, "--mode", mode],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            ) as process,
        ):
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    if kill_at >= 0 and line.split()[0] == str(kill_at):
                        print(f"      kill -9 of process {process.pid}, and of its JVM; starting it again")
                        os.killpg(process.pid, signal.SIGKILL)
                        kill_at = -1
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode == 0:
            return
        if process.returncode != -signal.SIGKILL:
            print((folder / "spark.log").read_text()[-3000:], file=sys.stderr)
            raise SystemExit("the query failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--rows", type=int, default=500_000, help="a batch")
    parser.add_argument("--customers", type=int, default=1_000_000)
    parser.add_argument("--backend", choices=("heap", "rocksdb"), default="heap", help="where the state is")
    parser.add_argument("--mode", choices=("driver", "executors"), default="driver", help="who has the state")
    parser.add_argument("--query", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.query:
        run_query(args.query, args.backend, args.mode)
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="statebackend-demo-") as name:
        folder = Path(name)
        where = "" if args.mode == "driver" else ", on two hosts"
        print(
            f"{args.batches} batches of {args.rows:,} orders, {args.customers:,} customers, "
            f"state on {args.backend}{where}\n"
        )
        generate(folder, args.batches, args.rows, args.customers)
        supervise(folder, args.batches // 2, args.backend, args.mode)
        right = state_is_right(folder)
    print(f"\nstate equals a batch computation over all input: {right}")
    print(f"{time.perf_counter() - began:.0f} s")
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
