"""A query with Spark's ``transformWithState`` that goes on through statebackend, with its history.

    python examples/spark/from_transform_with_state.py

Spark's operator counts what users have spent, and forgets its list of purchases after a day. Then the query is stopped
and moved: `from_spark_state` makes a savepoint of its state and a checkpointLocation to go on with. The processor stays
as it is. The totals at the end are those of all purchases, before the move and after it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import statebackend as sb

DAY = 86_400_000
OUTPUT = "user string, total bigint, purchases bigint"
#: Two batches before the move, and one after it.
BEFORE = [[("ann", 30), ("bob", 9)], [("ann", 5)]]
AFTER = [("ann", 7), ("cy", 5)]
SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
    "RocksDBStateStoreProvider",
    # Spark would run batches without rows for ever: a processor with timers may always have something to do.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}


class Spending(StatefulProcessor):
    """The total of each user, and the purchases of a day."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "total bigint")
        self.purchases = handle.getListState("purchases", "amount bigint", DAY)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.total.update(((self.total.get() or (0,))[0] + row.amount,))
            self.purchases.appendValue((row.amount,))
        yield Row(user=key[0], total=self.total.get()[0], purchases=len(list(self.purchases.get())))


def write(folder: Path, number: int, purchases: list[tuple[str, int]]) -> None:
    users, amounts = zip(*purchases, strict=True)
    pq.write_table(pa.table({"user": users, "amount": amounts}), folder / f"in/{number}.parquet")


def stream(spark: SparkSession, folder: Path) -> Any:
    reader = spark.readStream.schema("user string, amount bigint").option("maxFilesPerTrigger", 1)
    return reader.parquet(str(folder / "in"))


def run(spark: SparkSession, folder: Path) -> None:
    """Run the query in Spark, move it, and let it go on."""
    (folder / "in").mkdir()
    totals: dict[str, int] = {}

    def sink(frame: Any, batch_id: int) -> None:
        totals.update({row.user: row.total for row in frame.collect()})

    def start(frame: Any, call: Any, location: str, mode: str) -> None:
        writer = frame.writeStream.foreachBatch(call).outputMode(mode).trigger(availableNow=True)
        writer.option("checkpointLocation", str(folder / location)).start().awaitTermination()

    # Spark's query.
    for number, purchases in enumerate(BEFORE):
        write(folder, number, purchases)
    grouped = stream(spark, folder).groupBy("user")
    frame = grouped.transformWithState(Spending(), OUTPUT, "Update", "ProcessingTime")
    start(frame, sink, "spark", "update")

    # It has stopped: move it.
    moved = sb.tools.from_spark_state(
        spark,
        folder / "spark",
        savepoint=folder / "savepoint",
        new_checkpoint_location=folder / "checkpoint",
        ttl={"purchases": "1 day"},
    )
    print(f"moved {len(moved.states) - 1} states and timers, next batch {moved.first_batch}")

    # The same processor goes on.
    write(folder, len(BEFORE), AFTER)
    batches = sb.spark.transform_with_state(
        Spending(),
        key="user",
        output_schema=OUTPUT,
        time_mode="ProcessingTime",
        output_mode="Update",
        state=folder / "state",
        sink=sink,
        start=sb.spark.StartFrom(moved.savepoint, first_batch=moved.first_batch),
    )
    start(stream(spark, folder), batches, "checkpoint", "append")
    batches.close()
    print(json.dumps(dict(sorted(totals.items()))))


def main() -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").appName("moved")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    with tempfile.TemporaryDirectory() as folder:
        run(builder.getOrCreate(), Path(folder))


if __name__ == "__main__":
    main()
