"""One contender on one input, in a process and JVM of its own: ``python -m bench.spark.job NAME FOLDER``.

Prints one JSON object: rows and milliseconds of each micro-batch, as Spark reports them, and where ours spent its
time. FOLDER/in holds the input, a file a micro-batch. Every contender has the same sink: each batch is written as
Parquet; but ``published`` publishes its committed files, and ``delta`` appends to a Delta table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import statebackend as sb
from bench.spark.parts import KERNELS

SCHEMA = "k bigint, total bigint, n bigint"
STATE = "total bigint, n bigint"
#: Slots that hosts take beside those of the batches.
SLOTS = {"one host": 1, "two hosts": 2, "four hosts": 4}
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class Batches(sb.BatchProcessFunction):
    """Vectorised."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        self.n = ctx.get_aggregating_state(sb.AggregatingStateDescriptor("n", "count", int))
        self.kernels = ctx.metrics.counter(KERNELS)

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
        keys, values = ctx.keys, batch["v"]
        began = time.perf_counter()
        touched, totals, _ = self.total.add_many(keys, values, return_changed=True)
        counts = self.n.add_many(keys, values, return_changed=True).values
        self.kernels.inc(round((time.perf_counter() - began) * 1e6))
        return pa.record_batch({"k": touched, "total": totals, "n": counts})


class Rows(sb.KeyedProcessFunction):
    """Row by row."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        self.n = ctx.get_aggregating_state(sb.AggregatingStateDescriptor("n", "count", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        total, n = self.total, self.n
        total.add(row.v)
        n.add(row.v)
        yield row.k, total.get(), n.get()


class OneStruct(sb.KeyedProcessFunction):
    """Row by row, with sum and count in one value that is read and written."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.state = ctx.get_value_state(sb.ValueStateDescriptor("state", "struct<sum:bigint,n:bigint>"))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        state = self.state
        total, n = state.value() or (0, 0)
        total, n = total + row.v, n + 1
        state.update((total, n))
        yield row.k, total, n


def totals(in_pandas: bool) -> Any:
    """Spark's `StatefulProcessor` for the same job."""
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Totals(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.state = handle.getValueState("state", "total bigint, n bigint")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            total, n = self.state.get() if self.state.exists() else (0, 0)
            for row in rows:
                total, n = total + row.v, n + 1
            self.state.update((total, n))
            yield Row(k=key[0], total=total, n=n)

    class TotalsOfFrames(Totals):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            import pandas as pd

            total, n = self.state.get() if self.state.exists() else (0, 0)
            for frame in rows:
                total, n = total + int(frame["v"].sum()), n + len(frame)
            self.state.update((total, n))
            yield pd.DataFrame({"k": [key[0]], "total": [total], "n": [n]})

    return TotalsOfFrames() if in_pandas else Totals()


def totals_of_group(key: Any, frames: Any, state: Any) -> Iterator[Any]:
    """The function for ``applyInPandasWithState`` for the same job."""
    import pandas as pd

    total, n = state.get if state.exists else (0, 0)
    for frame in frames:
        total, n = total + int(frame["v"].sum()), n + len(frame)
    state.update((total, n))
    yield pd.DataFrame({"k": [key[0]], "total": [total], "n": [n]})


class Run:
    """The stream, the sink, and what the run is to be told of."""

    def __init__(self, spark: Any, folder: Path, name: str) -> None:
        self.spark = spark
        self.folder = folder
        self.name = name
        self.out = folder / "out" / name
        self.parts: list[dict[str, Any]] = []

    def rows(self) -> Any:
        path = str(self.folder / "in")
        stream = self.spark.readStream.schema("k bigint, v bigint").option("maxFilesPerTrigger", 1)
        return stream.parquet(path)

    def sink(self, frame: Any, batch_id: int) -> None:
        frame.write.mode("overwrite").parquet(str(self.out / f"{batch_id:05}"))

    def start(self, frame: Any, call: Callable[[Any, int], Any], mode: str = "update") -> Any:
        return (
            frame.writeStream.foreachBatch(call)
            .outputMode(mode)
            .option("checkpointLocation", str(self.folder / "stream" / self.name))
            .trigger(availableNow=True)
            .start()
        )

    def _started(self, batches: Any) -> Any:
        """The query of one of our callables; the progress of each batch is noted."""

        def call(frame: Any, batch_id: int) -> None:
            batches(frame, batch_id)
            self.parts.append(batches.last_progress)

        return self.start(self.rows(), call)

    def ours(self, function: Any, backend: str = "heap", sink: Any = None, hosts: int = 0) -> Any:
        batches = sb.spark.stateful(
            function,
            key="k",
            schema=SCHEMA,
            backend=backend,
            run_on=sb.spark.Executors(hosts) if hosts else sb.spark.Driver(),
            state=f"file://{self.folder}/state/{self.name}",
            sink=self.sink if sink is None else sink,
        )

        return self._started(batches)

    def spark_aggregation(self) -> Any:
        frame = self.rows().groupBy("k").agg({"v": "sum", "*": "count"}).toDF("k", "total", "n")
        return self.start(frame, self.sink)

    def processor(self, in_pandas: bool = False) -> Any:
        """Ours, with the processor of Spark's own contender."""
        made = sb.spark.transform_with_state_in_pandas if in_pandas else sb.spark.transform_with_state
        batches = made(
            totals(in_pandas),
            key="k",
            output_schema=SCHEMA,
            output_mode="Update",
            state=f"file://{self.folder}/state/{self.name}",
            sink=self.sink,
        )

        return self._started(batches)

    def transform_with_state(self, in_pandas: bool = False) -> Any:
        grouped = self.rows().groupBy("k")
        transform = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
        return self.start(transform(totals(in_pandas), SCHEMA, "Update", "None"), self.sink)

    def group_states(self) -> Any:
        """Ours, with the function of Spark's own contender."""
        batches = sb.spark.apply_in_pandas_with_state(
            totals_of_group,
            key="k",
            output_schema=SCHEMA,
            state_schema=STATE,
            output_mode="update",
            timeout_conf="NoTimeout",
            state=f"file://{self.folder}/state/{self.name}",
            sink=self.sink,
        )
        return self._started(batches)

    def apply_in_pandas(self) -> Any:
        frame = self.rows().groupBy("k")
        frame = frame.applyInPandasWithState(totals_of_group, SCHEMA, STATE, "update", "NoTimeout")
        return self.start(frame, self.sink)


CONTENDERS: dict[str, Callable[[Run], Any]] = {
    "batches": lambda run: run.ours(Batches()),
    "rocksdb": lambda run: run.ours(Batches(), "rocksdb"),
    "published": lambda run: run.ours(Batches(), sink=sb.spark.sinks.parquet(run.out)),
    "delta": lambda run: run.ours(Batches(), sink=sb.spark.sinks.delta(run.out)),
    "one host": lambda run: run.ours(Batches(), hosts=1),
    "two hosts": lambda run: run.ours(Batches(), hosts=2),
    "four hosts": lambda run: run.ours(Batches(), hosts=4),
    "rows": lambda run: run.ours(Rows()),
    "struct": lambda run: run.ours(OneStruct()),
    "spark": Run.spark_aggregation,
    "processor": Run.processor,
    "processor in pandas": lambda run: run.processor(True),
    "group states": Run.group_states,
    "transformWithState": Run.transform_with_state,
    "transformWithStateInPandas": lambda run: run.transform_with_state(True),
    "applyInPandasWithState": Run.apply_in_pandas,
}


def written(run: Run) -> pa.Table:
    """What a run has written, batch by batch."""
    if run.name != "delta":
        return pa.concat_tables([pq.read_table(path) for path in sorted(run.out.iterdir())])
    from deltalake import DeltaTable

    # Each version has the rows of one more batch; a key's count grows with every one that it is in.
    table = DeltaTable(str(run.out)).to_pyarrow_table()
    return table.take(pc.sort_indices(table, sort_keys=[("n", "ascending")]))


def check(folder: Path, given: pa.Table) -> None:
    """The last row of each key, over all batches, is the sum and count of its input."""
    columns = [given.column(name).to_numpy()[::-1] for name in ("k", "total", "n")]
    # The newest of ours comes last; Spark gives each key once a batch.
    keys, last = np.unique(columns[0], return_index=True)
    rows = pa.concat_tables([pq.read_table(path) for path in sorted((folder / "in").iterdir())])
    wanted_keys, inverse, counts = np.unique(rows["k"].to_numpy(), return_inverse=True, return_counts=True)
    totals = np.zeros(len(wanted_keys), dtype=np.int64)
    np.add.at(totals, inverse, rows["v"].to_numpy())
    same = (
        np.array_equal(keys, wanted_keys)
        and np.array_equal(columns[1][last], totals)
        and np.array_equal(columns[2][last], counts)
    )
    if not same:
        raise SystemExit("the result is not that of a batch computation")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.spark.job", description=__doc__)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--memory", default="4g", help="-Xms and -Xmx of the JVM")
    args = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's workers are not always what runs this
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(f"local[{args.cores + SLOTS.get(args.name, 0)}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", args.memory)
        .config("spark.driver.extraJavaOptions", f"-Xms{args.memory} -XX:+UseG1GC -XX:+AlwaysPreTouch")
        .config("spark.driver.maxResultSize", "0")
        .config("spark.sql.shuffle.partitions", str(args.cores))
        .config("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    run = Run(spark, args.folder, args.name)
    query = CONTENDERS[args.name](run)
    query.awaitTermination()
    batches = [
        {"rows": each["numInputRows"], "ms": each["durationMs"]["triggerExecution"]}
        for each in map(dict, query.recentProgress)
        if each["numInputRows"]
    ]
    check(args.folder, written(run))
    java = spark.sparkContext._jvm.java.lang.System.getProperty("java.version")
    session = {
        "spark": spark.version,
        "java": java,
        "collector": "G1",
        "cores": args.cores,
        "heap": args.memory,
    }
    said = {"batches": batches, "parts": run.parts, "session": session}
    sys.stdout.write("\n" + json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
