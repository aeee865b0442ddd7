"""One contender at one rate, in a process and JVM of its own: ``python -m bench.latency.job NAME FOLDER``.

Prints one JSON object with the percentiles. It stops by itself when all rows have results, or a while after the last
was sent. Then it counts the rows in the output.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import statebackend as sb
from bench.latency.rows import Stream, batches, latencies, percentiles, serve
from bench.spark.job import ROCKSDB, Batches, Run

#: Slots that hosts take beside those of the batches.
HOSTS = 2
#: Seconds after the last row for a job that has fallen behind.
PATIENCE = 20.0


class LatencyRun(Run):
    """A run over rows from a socket, batch after batch, that notes when the result of each is visible."""

    def __init__(self, spark: Any, folder: Path, name: str, port: int) -> None:
        super().__init__(spark, folder, name)
        self.port = port
        self.visible: dict[int, float] = {}

    def rows(self) -> Any:
        lines = self.spark.readStream.format("socket").option("host", "127.0.0.1").option("port", self.port)
        return lines.load().selectExpr(
            "cast(split_part(value, ',', 1) as bigint) AS k", "cast(split_part(value, ',', 2) as bigint) AS v"
        )

    def start(self, frame: Any, call: Callable[[Any, int], Any], mode: str = "update") -> Any:
        def noted(frame: Any, batch_id: int) -> None:
            call(frame, batch_id)
            self.visible[batch_id] = time.time()

        writer = frame.writeStream.foreachBatch(noted).outputMode(mode)
        return writer.option("checkpointLocation", str(self.folder / "stream")).start()

    def published(self, hosts: int = 0) -> Any:
        return self.ours(Batches(), sink=sb.spark.sinks.parquet(self.out), hosts=hosts)

    def stateless(self) -> Any:
        return self.start(self.rows().selectExpr("k", "v AS total", "1L AS n"), self.sink)


CONTENDERS: dict[str, Callable[[LatencyRun], Any]] = {
    "published": LatencyRun.published,
    "published, executors": lambda run: run.published(HOSTS),
    "written": lambda run: run.ours(Batches()),
    "written, executors": lambda run: run.ours(Batches(), hosts=HOSTS),
    "spark": LatencyRun.spark_aggregation,
    "transformWithState": LatencyRun.transform_with_state,
    "stateless": LatencyRun.stateless,
    "empty": lambda run: run.start(run.rows(), lambda frame, batch_id: None),
}


def session(name: str, cores: int, memory: str) -> Any:
    """Spark for a contender, as `bench.spark` has it."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(f"local[{cores + (HOSTS if 'executors' in name else 0)}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", memory)
        .config("spark.driver.extraJavaOptions", f"-Xms{memory} -XX:+UseG1GC -XX:+AlwaysPreTouch")
        .config("spark.sql.shuffle.partitions", str(cores))
        .config("spark.sql.streaming.numRecentProgressUpdates", "100000")
        .config("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def check(run: LatencyRun, num_rows: int) -> None:
    """The counts of all keys, as the output has them in the end, add up to the rows that went in."""
    if run.name == "empty":
        return
    table = pa.concat_tables([pq.read_table(path, columns=["k", "n"]) for path in run.out.rglob("*.parquet")])
    count = "sum" if run.name == "stateless" else "max"
    counted = sum(table.group_by("k").aggregate([("n", count)])[f"n_{count}"].to_pylist())
    if counted != num_rows:
        raise SystemExit(f"{num_rows} rows have gone in, and the output counts {counted}")


def measured(run: LatencyRun, stream: Stream, pipe: Any) -> dict[str, Any]:
    """Run the query until every row has a result, or for as long as there is patience."""
    query = CONTENDERS[run.name](run)
    begin = pipe.recv()
    last = begin + stream.warmup + stream.seconds + PATIENCE
    done: list[Any] = []
    while (
        query.isActive
        and time.time() < last
        and sum(batch.end - batch.start for batch in done) < stream.num_rows
    ):
        time.sleep(0.5)
        progress = [json.loads(each.json) for each in query.recentProgress]
        done = batches(progress, run.visible)
    query.stop()
    if query.exception() is not None:
        raise SystemExit(str(query.exception()))
    until = time.time()
    progress = [json.loads(each.json) for each in query.recentProgress]
    done = batches(progress, run.visible)
    if time.time() < last:
        check(run, sum(batch.end - batch.start for batch in done))
    late = [each for each in done if each.start >= stream.first]
    ms = [each["durationMs"]["triggerExecution"] for each in progress if each["numInputRows"]]
    return {
        **percentiles(latencies(stream, begin, done, until)),
        "missing": stream.num_rows - sum(batch.end - batch.start for batch in done),
        "batches": len(late),
        "rows a batch": statistics.median(each.end - each.start for each in late) if late else None,
        "ms a batch": statistics.median(ms[len(done) - len(late) :]) if late else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.latency.job", description=__doc__)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=int, default=1_000, help="rows a second (%(default)s)")
    parser.add_argument("--keys", type=int, default=50_000, help="keys (%(default)s)")
    parser.add_argument(
        "--warmup", type=float, default=15, help="seconds before the measured ones (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=30, help="measured seconds (%(default)s)")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--memory", default="2g", help="-Xms and -Xmx of the JVM (%(default)s)")
    args = parser.parse_args()
    stream = Stream(args.rate, args.keys, args.warmup, args.seconds)
    spark = session(args.name, args.cores, args.memory)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(stream, theirs), daemon=True)
    server.start()
    said = measured(LatencyRun(spark, args.folder, args.name, ours.recv()), stream, ours)
    ours.send(None)
    java = spark.sparkContext._jvm.java.lang.System.getProperty("java.version")
    said["session"] = {"spark": spark.version, "java": java, "cores": args.cores, "heap": args.memory}
    sys.stdout.write("\n" + json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
