"""A program: a real query over the files in a folder, which kills itself, JVM and all, where it is told.

    python killed_query.py FOLDER STEP BATCH [dedup]

STEP is one of `STEPS`, or a number: the milliseconds after which it dies, from the first batch on. With ``none`` it
runs to the end. Its sink is that of `stream_process`. With ``dedup`` the frame drops rows that have come before: Spark
keeps state above the function then, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from stream_process import Numbered

import statebackend as sb
from statebackend.checkpoint.store.data_files import DataFile
from statebackend.runtime import Task
from statebackend.spark import driver

#: Where it can die, in the order of a batch. "returned": while Spark commits the batch for itself.
STEPS = (
    "read",
    "in the function",
    "after the function",
    "snapshot taken",
    "in the output",
    "before the manifest",
    "after the manifest",
    "before the sink",
    "in the sink",
    "after the sink",
    "returned",
)


def die() -> None:
    os.killpg(0, signal.SIGKILL)


class Steps:
    """Dies at one step of one batch."""

    def __init__(self, step: str, batch: int) -> None:
        self.step, self.batch = step, batch
        self.current = -1

    def reached(self, step: str) -> None:
        if step == self.step and self.current == self.batch:
            die()

    def wrap(self, owner: Any, name: str, before: str | None, after: str | None) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.reached(before or "")
            result = original(*arguments, **options)
            self.reached(after or "")
            return result

        setattr(owner, name, wrapped)


def main() -> None:
    folder, step, batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    steps = Steps(step, batch)
    steps.wrap(driver, "arrow_of", None, "read")
    steps.wrap(Task, "run", None, "after the function")
    steps.wrap(Task, "snapshot", None, "snapshot taken")

    steps.wrap(DataFile, "finish", "in the output", None)
    steps.wrap(sb.CheckpointStore, "commit", "before the manifest", "after the manifest")

    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")

    def sink(frame: Any, batch_id: int) -> None:
        steps.reached("before the sink")
        rows = frame.toArrow().to_pylist()
        steps.reached("in the sink")
        with open(folder / "sink", "ab", buffering=0) as file:
            file.write(json.dumps({"batch": batch_id, "rows": rows}).encode() + b"\n")
        steps.reached("after the sink")

    batches = sb.spark.stateful(
        Numbered(lambda: steps.reached("in the function")),
        key="user",
        schema="user string, total bigint, number bigint, token string",
        checkpoint=folder / "state",
        sink=sink,
    )

    def called(frame: Any, batch_id: int) -> None:
        if step.isdigit() and steps.current < 0:
            after(int(step) / 1000, die)
        steps.current = batch_id
        batches(frame, batch_id)
        if (step, batch) == ("returned", batch_id):
            after(0.05, die)

    rows = spark.readStream.schema(spark.read.parquet(str(folder / "in")).schema)
    frame = rows.option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    if "dedup" in sys.argv[4:]:
        frame = frame.dropDuplicates(["id"])
    query = (
        frame.writeStream.foreachBatch(called)
        .option("checkpointLocation", str(folder / "stream"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def after(seconds: float, action: Callable[[], None]) -> None:
    def wait() -> None:
        time.sleep(seconds)
        action()

    threading.Thread(target=wait, daemon=True).start()


__all__ = ["STEPS"]

if __name__ == "__main__":
    main()
