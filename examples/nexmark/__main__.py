"""Run the six jobs over generated events, check them against batch SQL, and print their speed.

    python -m examples.nexmark                          all six, row by row and over columns
    python -m examples.nexmark join top --rows 200000   two of them, over larger files
    python -m examples.nexmark --page                   renew the table of docs/performance/nexmark.md, too

The speed is of the query: rows of a batch by the time from one trigger to the next, as Spark reports it. The first two
batches warm up; the median of the others counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

from examples.nexmark.events import generate
from examples.nexmark.job import COLUMNS, FORMS, ROWS
from examples.nexmark.query import JOBS, Run, differences

PAGE = Path(__file__).parents[2] / "docs" / "performance" / "nexmark.md"
WARM_UP = 2


def speed(spark: Any, folder: Path, name: str, form: str) -> float:
    """Run a job and compare its outputs; its rows a second."""
    run = Run(folder, name, form)
    query = run.start(spark)
    query.awaitTermination()
    run.batches.close()
    for output in run.job.outputs:
        wrong = differences(run.found(output), run.expected(spark, output))
        if wrong:
            raise SystemExit(f"{name}, {form}: output {output} is not what batch SQL gives: {wrong}")
    batches = [each for each in query.recentProgress if each["numInputRows"]]
    rates = [1000 * each["numInputRows"] / each["durationMs"]["triggerExecution"] for each in batches]
    return float(statistics.median(rates[WARM_UP:]))


def line(name: str, rates: dict[str, float]) -> str:
    """A row of the table."""
    shown = {form: f"{rate:,.0f}" for form, rate in rates.items()}
    return f"| `{name}` | {JOBS[name].title} | {shown.get(ROWS, '')} | {shown.get(COLUMNS, '')} |"


def write_page(text: str) -> None:
    """Put the figures between the marks of the page."""
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split("<!-- figures -->\n")
    _, tail = rest.split("<!-- end figures -->")
    PAGE.write_text(f"{head}<!-- figures -->\n\n{text}\n\n<!-- end figures -->{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.nexmark", description="six jobs of the Nexmark benchmark"
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}; all if none is given")
    parser.add_argument("--files", type=int, default=8, help="files, one for each batch (%(default)s)")
    parser.add_argument("--rows", type=int, default=500_000, help="events in a file (%(default)s)")
    parser.add_argument("--page", action="store_true", help="renew the page of figures, too")
    given = parser.parse_args()
    unknown = [name for name in given.jobs if name not in JOBS]
    if unknown:
        parser.error(f"no job {', '.join(unknown)}; there are {', '.join(JOBS)}")
    if given.files <= WARM_UP:
        parser.error(f"--files: more than {WARM_UP}, which warm up")

    import pyspark
    from pyspark.sql import SparkSession

    cores = os.cpu_count()
    spark = (
        SparkSession.builder.master(f"local[{cores}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.maxResultSize", "0")
        .config("spark.sql.shuffle.partitions", str(cores))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    lines = ["| job | | row by row, rows/s | over columns, rows/s |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="statebackend-nexmark-") as scratch:
        folder = Path(scratch)
        generate(folder, files=given.files, rows=given.rows)
        for name in given.jobs or JOBS:
            rates = {form: speed(spark, folder, name, form) for form in FORMS}
            lines.append(line(name, rates))
            print(lines[-1], flush=True)
    spark.stop()
    about = (
        f"{cores} cores, Spark {pyspark.__version__}, Python {platform.python_version()}. {given.files} batches of "
        f"{given.rows:,} events each; medians after the first {WARM_UP}. All outputs equal batch SQL's."
    )
    print(f"\n{about}")
    if given.page:
        write_page("\n".join([about, "", *lines]))


if __name__ == "__main__":
    main()
