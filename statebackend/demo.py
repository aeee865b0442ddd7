"""``python -m statebackend.demo`` kills a query between commit and sink, starts it again, and checks state and output.

Each micro-batch is a file of orders. For each customer, the query keeps the number of orders, their sum and the
largest order. It emits the new values of the customers in the batch. In the middle, SIGKILL ends the process and its
JVM. At the end, pyarrow computes the same over the input, and the program exits with 1 if a row differs. Without
PySpark or Java, the function runs in the `Harness`. All files are in a temporary folder, which the program removes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import statebackend as sb

SCHEMA = "customer bigint, orders bigint, spent bigint, largest bigint"
STATES = ("orders", "spent", "largest")
#: The child prints it in the sink of the batch at which it is killed.
COMMITTED = "committed with its state; its sink has not written yet"


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


# --- input and check


def generate(batches: int, rows: int, customers: int) -> Iterable[pa.Table]:
    """Yield the orders of each batch, from one seed. A few customers order most."""
    rng = np.random.default_rng(7)
    for _ in range(batches):
        who = (rng.pareto(1.0, rows) * customers / 20).astype(np.int64) % customers
        yield pa.table({"customer": who, "cents": rng.integers(100, 100_000, rows)})


def check(
    orders: Iterable[pa.Table], outputs: Iterable[pa.Table], state: Callable[[str], pa.Table]
) -> list[str]:
    """Compute each output, and the state at the end, from the orders; return a line for each difference."""
    total = pa.schema([(name, pa.int64()) for name in ("customer", *STATES)]).empty_table()
    differences = []
    for batch, (ordered, output) in enumerate(zip(orders, outputs, strict=True)):
        cents = [("cents", "count"), ("cents", "sum"), ("cents", "max")]
        added = ordered.group_by("customer").aggregate(cents).rename_columns(total.column_names)
        total = pa.concat_tables([total, added]).group_by("customer")
        total = total.aggregate([("orders", "sum"), ("spent", "sum"), ("largest", "max")])
        total = total.rename_columns(added.column_names)
        expected = total.filter(pc.is_in(total["customer"], added["customer"]))
        if not output.sort_by("customer").equals(expected.sort_by("customer")):
            differences.append(f"the output of batch {batch} differs from the computation of pyarrow")
    total = total.sort_by("customer")
    for name in STATES:
        stored = state(name).sort_by("key")
        if stored["key"] != total["customer"] or stored["value"] != total[name]:
            differences.append(f"the state {name!r} differs from the computation of pyarrow")
    return differences


# --- under Spark


def run_query(folder: Path, backend: str, mode: str, stop_at: int) -> None:
    """Run the query in this process, which the parent kills in the sink of batch ``stop_at``."""
    from pyspark.sql import SparkSession

    # Two executors of two slots each: two for the hosts of the state, two for the batches.
    master = "local[2]" if mode == "driver" else "local-cluster[2,2,1024]"
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName("statebackend demo")
    builder = builder.config("spark.driver.extraJavaOptions", f"-Djava.io.tmpdir={folder / 'tmp'}")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

    def sink(frame: Any, batch_id: int) -> None:
        if batch_id == stop_at:
            print(f"{batch_id:>5}  {COMMITTED}", flush=True)
            sys.stdin.read()  # until the kill
            os._exit(1)
        frame.write.mode("overwrite").parquet(f"{folder}/out/{batch_id:05}")

    apply = sb.spark.stateful(
        Spending(),
        key="customer",
        schema=SCHEMA,
        backend=backend,
        run_on=sb.spark.Executors(2) if mode == "executors" else sb.spark.Driver(),
        state=f"file://{folder}/state",
        sink=sink,
    )

    def call(frame: Any, batch_id: int) -> None:
        apply(frame, batch_id)
        progress = apply.last_progress or {}
        if progress["isReplay"]:
            print(f"{batch_id:>5}  was committed: only its sink is called again", flush=True)
        else:
            print(
                f"{batch_id:>5} {progress['processedRowsPerSecond']:>12,.0f} {progress['states']['orders']:>12,} "
                f"{progress['memoryUsedBytes'] / 1e6:>10.1f} {progress['commitTimeMs']:>11.1f}",
                flush=True,
            )

    orders = spark.readStream.schema("customer bigint, cents bigint").option("maxFilesPerTrigger", 1)
    query = orders.parquet(str(folder / "in")).writeStream.foreachBatch(call)
    query = query.option("checkpointLocation", str(folder / "stream")).trigger(availableNow=True)
    query.start().awaitTermination()
    spark.stop()


def start_query(folder: Path, backend: str, mode: str, stop_at: int) -> bool:
    """Run the query in a child process; return False if this function killed it."""
    package = str(Path(sb.__file__).parents[1])
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TMPDIR": str(folder / "tmp"),
        "SPARK_LOCAL_DIRS": str(folder / "tmp"),
    }
    arguments = [f"--query={folder}", f"--backend={backend}", f"--mode={mode}", f"--stop-at={stop_at}"]
    with (
        open(folder / "spark.log", "a") as log,
        subprocess.Popen(
            [sys.executable, "-m", "statebackend.demo", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
            env=variables,
            start_new_session=True,
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                if COMMITTED in line:
                    print(f"       kill -9 of process {child.pid} and its JVM; starting the query again")
                    os.killpg(child.pid, signal.SIGKILL)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{(folder / 'spark.log').read_text()[-3000:]}\nthe query failed")
    return child.returncode == 0


def run_under_spark(folder: Path, options: argparse.Namespace) -> list[str]:
    for name in ("in", "out", "tmp"):
        (folder / name).mkdir()
    for batch, table in enumerate(generate(options.batches, options.rows, options.customers)):
        pq.write_table(table, path := folder / "in" / f"{batch:05}.parquet")
        os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))  # Spark takes the oldest first
    print("batch       rows/s         keys   state MB   commit ms", flush=True)
    if start_query(folder, options.backend, options.mode, options.batches // 2):
        return ["the query ended before it could be killed"]
    start_query(folder, options.backend, options.mode, -1)
    orders, outputs = (map(pq.read_table, sorted((folder / name).glob("[0-9]*"))) for name in ("in", "out"))
    return check(orders, outputs, lambda name: sb.tools.state(folder / "state", name).to_table())


# --- without Spark


def missing() -> str:
    """Name the programs that the query needs and this machine lacks, or return nothing."""
    if importlib.util.find_spec("pyspark") is None:
        return "PySpark 4.0 or newer: pip install 'pyspark>=4'"
    java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    try:
        found = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    except OSError:
        found = ""
    version = re.search(r'version "(\d+)', found)
    if version and int(version[1]) >= 17:
        return ""
    return f"Java 17 or newer, in JAVA_HOME or on the PATH (found: {f'Java {version[1]}' if version else 'none'})"


def run_in_harness(options: argparse.Namespace) -> list[str]:
    tables = list(generate(options.batches, options.rows // 100, options.customers // 100))
    outputs = []
    with sb.testing.Harness(Spending(), "customer", schema=SCHEMA, backend=options.backend) as harness:
        for batch, table in enumerate(tables):
            if batch == options.batches // 2:
                harness.fail_after("commit")
                try:
                    harness.process_batch(table)
                except sb.testing.InjectedFault:
                    print(f"batch {batch} is committed, and its output is lost; starting the function again")
                harness.restart()
            rows = harness.process_batch(table)
            outputs.append(pa.table(dict(zip(("customer", *STATES), zip(*rows, strict=True), strict=True))))
            print(f"batch {batch}: {len(table):,} orders of {len(rows):,} customers", flush=True)
        return check(tables, outputs, lambda name: sb.tools.state(harness, name).to_table())


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="python -m statebackend.demo", description=__doc__.partition("\n\n")[2]
    )
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--rows", type=int, default=250_000, help="orders of a batch")
    parser.add_argument("--customers", type=int, default=1_000_000)
    parser.add_argument("--backend", choices=("heap", "rocksdb"), default="heap", help="the state backend")
    parser.add_argument(
        "--mode", choices=("driver", "executors"), default="driver", help="processes with state"
    )
    parser.add_argument("--query", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stop-at", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.query:
        run_query(options.query, options.backend, options.mode, options.stop_at)
        return 0
    began, lacks = time.perf_counter(), missing()
    if lacks:
        print(
            f"A query under Spark needs {lacks}.\nThe function runs in the Harness instead, on fewer orders.\n"
        )
        differences = run_in_harness(options)
    else:
        print(f"{options.batches} batches of {options.rows:,} orders, {options.customers:,} customers")
        print(f"backend {options.backend}, state on the {options.mode}; Spark starts\n", flush=True)
        with tempfile.TemporaryDirectory(prefix="statebackend-demo-") as name:
            differences = run_under_spark(Path(name), options)
    print(
        "", *(differences or ["State and output equal the computation of pyarrow over all orders."]), sep="\n"
    )
    print(f"{time.perf_counter() - began:.0f} s")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
