"""A program: one batch of 20 million rows through a query whose JVM and Python have little memory.

    python large_batch.py FOLDER plain | ordered | broadcast [ROWS]

Python has an address space of 2 GiB more than it has when Spark is up; the heap of the JVM is 1 GiB. Checks the result
against numpy, and prints the peaks of both.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[2]))

import statebackend as sb

KINDS = ["plain", "ordered", "broadcast"]
ROWS, KEYS, FILES = 20_000_000, 200_000, 8
LIMIT = 2 << 30


class Running(sb.BatchProcessFunction):
    """The sum of each key after each piece; times what the broadcast rows say."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        self.factor, self.last = 1, -1

    def process_broadcast(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> None:
        self.factor *= pc.product(batch["v"]).as_py()

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Any:
        if "at" in batch.schema.names:
            times = batch["at"].to_numpy()
            assert times[0] >= self.last, "pieces come in order"
            assert (np.diff(times) >= 0).all(), "rows come in order"
            self.last = times[-1]
        keys, totals = self.total.add_many(
            ctx.keys, pc.multiply(batch["v"], self.factor), return_changed=True
        )
        return pa.record_batch({"k": keys, "total": totals})


def written(folder: Path, kind: str, rows: int) -> np.ndarray[Any, Any]:
    """Write the input, and return the sum of each key."""
    rng, sums = np.random.default_rng(1), np.zeros(KEYS, np.int64)
    (folder / "in").mkdir(parents=True)
    for number in range(FILES):
        keys, values = rng.integers(0, KEYS, rows // FILES), rng.integers(-100, 100, rows // FILES)
        columns = {"k": keys, "v": values}
        if kind == "ordered":
            columns["at"] = rng.permutation(len(keys)) * FILES + number
        if kind == "broadcast":
            columns["all"] = np.zeros(len(keys), np.bool_)
            columns["all"][-1] = True
            values[-1] = 2
            sums += np.bincount(keys[:-1], weights=values[:-1], minlength=KEYS).astype(np.int64)
        else:
            sums += np.bincount(keys, weights=values, minlength=KEYS).astype(np.int64)
        pq.write_table(pa.table(columns), folder / "in" / f"{number}.parquet")
    return sums * (2**FILES if kind == "broadcast" else 1)


def of_process(pid: int, what: str) -> int:
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    rows = int(sys.argv[3]) if len(sys.argv) > 3 else ROWS
    if not (folder / "sums.npy").exists():
        # In a process of its own, whose memory does not count.
        if os.environ.get("STATEBACKEND_WRITES"):
            np.save(folder / "sums.npy", written(folder, kind, rows))
            return
        subprocess.run(
            [sys.executable, *sys.argv], env={**os.environ, "STATEBACKEND_WRITES": "1"}, check=True
        )
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = session.config("spark.driver.memory", "1g").config("spark.local.dir", str(folder)).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    java = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    before = of_process(os.getpid(), "VmRSS")
    address = of_process(os.getpid(), "VmSize") + LIMIT - before
    resource.setrlimit(resource.RLIMIT_AS, (address, address))
    options = {"plain": {}, "ordered": {"order_by": "at"}, "broadcast": {"broadcast_when": "all"}}[kind]
    batches = sb.spark.stateful(
        Running(),
        key="k",
        schema="k bigint, total bigint",
        state=folder / "state",
        sink=sb.spark.sinks.parquet(folder / "out"),
        run_on=sb.spark.Driver(input="files"),
        **options,
    )
    frame = spark.readStream.schema(spark.read.parquet(str(folder / "in")).schema).parquet(str(folder / "in"))
    began = time.perf_counter()
    query = frame.writeStream.foreachBatch(batches).trigger(availableNow=True)
    query.option("checkpointLocation", str(folder / "stream")).start().awaitTermination()
    seconds = time.perf_counter() - began
    progress = batches.last_progress
    assert (progress["batchId"], progress["numInputRows"], progress["input"]) == (0, rows, "files")
    state = sb.tools.state(folder / "state", "total").to_table()
    found = np.zeros(KEYS, np.int64)
    found[state["key"].to_numpy()] = state["value"].to_numpy()
    assert (found == np.load(folder / "sums.npy")).all()
    peaks = {
        "kind": kind,
        "rows": rows,
        "seconds": round(seconds, 1),
        "outputRows": progress["numOutputRows"],
        "pythonPeakMiB": of_process(os.getpid(), "VmHWM") >> 20,
        "jvmPeakMiB": of_process(java, "VmHWM") >> 20,
        "durationMs": progress["durationMs"],
    }
    assert peaks["pythonPeakMiB"] << 20 < LIMIT
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
