"""A program: cells of `crash_table` through Spark Connect, in one session: ``python connect_table.py FOLDER CELLS``.

CELLS is JSON, a list of pairs; what became of each is printed as JSON, one line a cell.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["PYSPARK_PYTHON"] = sys.executable

from connect_session import connect_session
from crash_table import cell


def main() -> None:
    spark = connect_session("local[2]", {})
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    for number, (before, then) in enumerate(json.loads(sys.argv[2])):
        outcome = cell(spark, Path(sys.argv[1]) / str(number), before, then, is_connect=True)
        print(json.dumps([before, then, outcome]), flush=True)


if __name__ == "__main__":
    main()
