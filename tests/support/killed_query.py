"""A program: a real query over the files in a folder, which kills itself, JVM and all, where it is told.

    python killed_query.py FOLDER STEP BATCH [dedup] [rocksdb] [parquet | delta | both | processor]

STEP is one of `STEPS` or `MORE_STEPS`, or a number: the milliseconds after which it dies, from the first batch on. With
``none`` it runs to the end. Its sink is that of `stream_process`, or one of `sb.spark.sinks`, which writes to
FOLDER/out; with ``both`` the job has event time, timers and two more outputs: the second one goes to a Delta table in
FOLDER/second, and late rows to files in FOLDER/late. With
``dedup`` the frame drops rows that have come before: Spark keeps state above the function then, too. With ``rocksdb``
the function's state is there, and Spark's in its own RocksDB, in the JVM of the same driver.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stream_process import SCHEMA, Numbered, backend_in

import statebackend as sb
from statebackend.checkpoint import Checkpoint
from statebackend.checkpoint.store.data_files import DataFile
from statebackend.runtime import Task
from statebackend.spark import driver_mode
from statebackend.spark.sinks.delta_table import DeltaSink

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


SPARKS_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
#: The steps of a second sink.
MORE_STEPS = ("before the second sink", "after the second sink")


#: With ``both``: which rows, of later files, come with a time long ago; how much later the timer of a row is due.
LATE = "id >= 3000 and id % 4 = 1"
DUE = 500


def is_late(row_id: int) -> bool:
    """The same as `LATE`."""
    return row_id >= 3000 and row_id % 4 == 1


class Twice(Numbered):
    """Gives the number of each row to a second output, too, and the time of each timer, as a negative number."""

    def __deepcopy__(self, memo: Any) -> Twice:
        return Twice(self.tick)

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        ctx.timer_service().register_event_time_timer(row.at + DUE)
        for given in super().process_element(row, ctx):
            ctx.output("second", (given[2],))
            yield given

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        ctx.output("second", (-timestamp,))
        return ()


#: How both sides run `processor`.
PROCESSOR = {"output_schema": "user string, text string", "time_mode": "ProcessingTime"}


def processor() -> Any:
    """A processor of Spark's whose last row of a user shows its state, which the cut of the batches does not change."""
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Story(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle, self.total = handle, handle.getValueState("total", "n bigint")
            self.ids = handle.getListState("ids", "id bigint")
            self.amounts = handle.getMapState("amounts", "amount bigint", "times bigint", 3_600_000)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            for row in rows:
                self.total.update(((self.total.get() or (0,))[0] + row.amount,))
                self.ids.appendValue((row.id,))
                times = self.amounts.getValue((row.amount,)) or (0,)
                self.amounts.updateValue((row.amount,), (times[0] + 1,))
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs())
            yield from ()

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
            state = self.total.get(), sorted(self.ids.get()), sorted(self.amounts.iterator())
            yield Row(user=key[0], text=repr((state, list(self.handle.listTimers()) != [])))

    return Story()


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
    steps.wrap(driver_mode, "arrow_of", None, "read")
    steps.wrap(Task, "run", None, "after the function")
    steps.wrap(Task, "snapshot", None, "snapshot taken")

    steps.wrap(DataFile, "finish", "in the output", None)
    steps.wrap(sb.CheckpointStore, "commit", "before the manifest", "after the manifest")

    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    if "rocksdb" in sys.argv[4:]:
        builder = builder.config("spark.sql.streaming.stateStore.providerClass", SPARKS_ROCKSDB)
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")

    def sink(frame: Any, batch_id: int) -> None:
        steps.reached("before the sink")
        rows = frame.toArrow().to_pylist()
        steps.reached("in the sink")
        with open(folder / "sink", "ab", buffering=0) as file:
            file.write(json.dumps({"batch": batch_id, "rows": rows}).encode() + b"\n")
        steps.reached("after the sink")

    kinds = {"parquet": sb.spark.sinks.parquet, "delta": sb.spark.sinks.delta, "both": sb.spark.sinks.parquet}
    chosen: Any = sink
    for kind, make in kinds.items():
        if kind in sys.argv[4:]:
            chosen = make(folder / "out")
            steps.wrap(type(chosen), "deliver", "before the sink", "after the sink")
    steps.wrap(Checkpoint, "publish", None, "in the sink")
    steps.wrap(DeltaSink, "_sync", "in the sink", None)
    function, schema = Numbered(lambda: steps.reached("in the function")), SCHEMA
    options: dict[str, Any] = {"schema": schema, "sink": chosen}
    if "both" in sys.argv[4:]:
        function = Twice(function.tick)
        second = sb.spark.sinks.delta(folder / "second")
        steps.wrap(DeltaSink, "deliver", "before the second sink", "after the second sink")
        options = {
            "schema": {"totals": schema, "second": "number bigint", "late": "id bigint"},
            "sink": {"totals": chosen, "second": second, "late": sb.spark.sinks.parquet(folder / "late")},
            "event_time": sb.EventTime("at", late=sb.to_output("late")),
        }
    backend = backend_in(
        folder, next((each for each in ("rocksdb", "native") if each in sys.argv[4:]), "heap")
    )
    batches = sb.spark.stateful(function, key="user", backend=backend, state=folder / "state", **options)

    if "processor" in sys.argv[4:]:
        batches = sb.spark.transform_with_state(
            processor(), key="user", state=folder / "state", sink=sink, **PROCESSOR
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
    if "both" in sys.argv[4:]:
        frame = frame.selectExpr("*", f"if({LATE}, id - 1000000, id) AS at")
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


if __name__ == "__main__":
    main()
