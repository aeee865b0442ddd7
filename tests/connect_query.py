"""A program: a query through Spark Connect over the files in a folder: ``python connect_query.py FOLDER [NAME]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["PYSPARK_PYTHON"] = sys.executable

import statebackend as sb


def main() -> None:
    from pyspark.sql import SparkSession

    folder = sys.argv[1]
    name = sys.argv[2] if len(sys.argv) > 2 else None

    class Total(sb.KeyedProcessFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            self.total.add(row.n)
            yield row.user, self.total.get()

    def sink(frame: Any, batch_id: int) -> None:
        frame.write.mode("overwrite").parquet(f"{folder}/out/batch={batch_id}")

    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    batches = sb.spark.stateful(
        Total(),
        key="user",
        schema="user string, total bigint",
        checkpoint=f"{folder}/state",
        sink=sink,
        name=name,
    )
    rows = spark.readStream.schema("user string, n bigint").option("maxFilesPerTrigger", 1)
    query = (
        rows.parquet(f"{folder}/in")
        .writeStream.foreachBatch(batches)
        .option("checkpointLocation", f"{folder}/stream")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
