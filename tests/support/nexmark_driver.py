"""A program: some of the six jobs of ``examples/nexmark`` at once in one driver, a file a batch.

    python nexmark_driver.py FOLDER FILES_A_BATCH NAME-FORM ...

Started again after it was killed, it goes on. It ends when no file is left.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.nexmark.query import Run


def main() -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    folder, files_a_batch = Path(sys.argv[1]), int(sys.argv[2])
    runs = [Run(folder, *each.split("-"), files_a_batch) for each in sys.argv[3:]]
    for query in [run.start(spark) for run in runs]:
        query.awaitTermination()


if __name__ == "__main__":
    main()
