"""Writes an archive of the classes that Spark loads for a query, with which JVMs start in half the time.

    .venv/bin/python tests/support/spark_classes.py build/spark-classes.jsa

A JVM with other options or another class path does not use it, nor does one of another version.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

#: For the JVMs of tests, which end after seconds: the quick compiler alone takes half the processor time to warm up.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
ARCHIVE = Path(__file__).parents[2] / "build" / "spark-classes.jsa"


def options() -> str:
    """The options of a JVM that ends after seconds."""
    return f"{SHORT_LIVED} -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else SHORT_LIVED


def run_query(spark: Any, folder: str) -> None:
    """A stateless query over files, with state of Spark's own in each batch, and a table."""
    spark.range(1000).selectExpr("id", "id % 7 AS k").write.parquet(f"{folder}/in")

    def write(frame: Any, _: int) -> None:
        frame.mapInArrow(lambda batches: batches, frame.schema).collect()
        frame.groupBy("k").count().write.mode("append").parquet(f"{folder}/out")

    rows = spark.readStream.schema("id long, k long").parquet(f"{folder}/in")
    writer = rows.dropDuplicates(["id"]).writeStream.foreachBatch(write)
    query = writer.option("checkpointLocation", f"{folder}/log").trigger(availableNow=True).start()
    query.awaitTermination()


def main(target: str) -> None:
    from pyspark.sql import SparkSession

    Path(target).parent.mkdir(parents=True, exist_ok=True)
    os.environ["SPARK_SUBMIT_OPTS"] = f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={target}.new"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as folder:
        run_query(spark, folder)
    jvm = spark.sparkContext._gateway.proc
    spark.stop()
    jvm.stdin.close()  # it ends then, and writes the archive
    jvm.wait()
    os.replace(f"{target}.new", target)


if __name__ == "__main__":
    main(sys.argv[1])
