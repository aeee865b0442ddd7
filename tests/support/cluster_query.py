"""A program: queries on a cluster, classic or through Connect.

    python cluster_query.py MASTER MODE FOLDER CHECKPOINT...

For each checkpoint it prints "exact" when the query has come to its end, or what it failed with.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["PYSPARK_PYTHON"] = sys.executable

from connect_query import started
from connect_session import connect_session
from crash_table import SCHEMA, Sink, Total

import statebackend as sb


def main() -> None:
    from pyspark.sql import SparkSession

    master, mode, folder, *checkpoints = sys.argv[1:]
    conf = {"spark.ui.enabled": "false", "spark.cores.max": "1"}
    conf |= dict.fromkeys(("spark.driver.host", "spark.driver.bindAddress"), "127.0.0.1")
    if mode == "connect":
        spark = connect_session(master, conf)
    else:
        builder = SparkSession.builder.master(master)
        for name, value in conf.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
    for number, checkpoint in enumerate(checkpoints):
        batches = sb.spark.stateful(
            Total(),
            key="user",
            schema=SCHEMA,
            checkpoint=checkpoint,
            sink=Sink(Path(folder) / "sink"),
            name="mine",
        )
        rows = spark.readStream.schema("user string, n bigint").parquet(f"{folder}/in")
        query = started(
            rows.writeStream.foreachBatch(batches)
            .option("checkpointLocation", f"{folder}/stream-{mode}-{number}")
            .trigger(availableNow=True)
        )
        try:
            query.awaitTermination()
        except Exception as error:  # noqa: BLE001 - Spark's, of several classes
            print("failed:", str(error).replace("\n", " "), flush=True)
        else:
            print("exact", flush=True)


if __name__ == "__main__":
    main()
