"""Measures jobs end to end under Structured Streaming, beside Spark's own ways to keep state.

The job is a running sum and count per key, in large micro-batches and in small ones, one file each. Contenders:

  batches                 ours, a BatchProcessFunction
  rocksdb                 the same, with its state on the backend `rocksdb`
  one host, two, four     the same in executors mode, with so many hosts
  published               the same, whose sink publishes the committed files
  delta                   the same, whose sink appends to a Delta table
  rows                    ours, a KeyedProcessFunction, called for each row
  struct                  the same, with one ValueState of struct<sum:bigint,n:bigint>, read and written
  spark                   Spark's own aggregation, in the JVM
  processor               ours, running the unchanged processor of transformWithState
  processor in pandas     the same with data frames
  group states            ours, running the unchanged function of applyInPandasWithState
  transformWithState      Spark's state API in Python (Row); InPandas, with data frames
  applyInPandasWithState  Spark's older one

P24 is two hosts against batches, which is driver mode, and what each hop of a row costs with one, two and four hosts.
P12 is batches, published and delta against spark, P13 batches against the two Python ones, each side at the size of
batch that favours it and then both at the small one, P14 rows, and struct, against transformWithState; P22
unchanged processors and functions through ours and Spark's operators, the first in tiny batches, too; RocksDB is
rocksdb against spark, whose state is in RocksDB, too, and against batches. Each contender runs alone, in a process
and JVM of its own, over the same files; state and output are durable after every batch, and the result is checked.
All have the same sink, which writes with Spark, but for published and delta. A figure is the median of the batches
after the first ones. Then comes where a batch of ours spends its time.

It needs Java 17 and the packages of the extra: pip install '.[bench]'. All of it takes about a quarter of an hour;
nothing else should run on the machine meanwhile. Writes build/bench/spark.json, from which `python -m bench.spark.page`
renews docs/performance/spark.md; with --renew-page this command does so itself, unless a contender has failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import statebackend as sb
from bench.common.report import Report
from bench.spark import page
from bench.spark.parts import LABELS, batch_parts

LARGE, SMALL, TINY = "large", "small", "tiny"
#: Contenders of each figure: ours, peer, what the ratio has to be.
FIGURES: dict[str, list[tuple[str, str, float | None]]] = {
    "P12": [
        ("batches", "spark", 5.0),
        ("published", "spark", 8.0),
        ("delta", "spark", None),
        ("rows", "spark", None),
    ],
    "P13": [("batches", "transformWithState", 90.0), ("batches", "applyInPandasWithState", 90.0)],
    "P14": [("rows", "transformWithState", 50.0), ("struct", "transformWithState", 30.0)],
    "P22": [
        ("processor", "transformWithState", 15.0),
        ("processor in pandas", "transformWithStateInPandas", 8.0),
        ("group states", "applyInPandasWithState", 8.0),
    ],
    "P24": [("two hosts", "batches", 0.5), ("one host", "batches", None), ("four hosts", "batches", None)],
    "RocksDB": [("rocksdb", "spark", 2.0), ("rocksdb", "batches", None)],
}
#: The size of batch that favours each. The Python ones of Spark gain little from large ones, which take minutes each.
FAVOURED = {
    "batches": LARGE,
    "rocksdb": LARGE,
    "one host": LARGE,
    "two hosts": LARGE,
    "four hosts": LARGE,
    "published": LARGE,
    "delta": LARGE,
    "rows": LARGE,
    "struct": LARGE,
    "spark": LARGE,
    "processor": SMALL,
    "processor in pandas": SMALL,
    "group states": SMALL,
    "transformWithState": SMALL,
    "transformWithStateInPandas": SMALL,
    "applyInPandasWithState": SMALL,
}
#: What the Python ones of Spark import, which PySpark does not bring.
NEEDED = ("pyspark", "pandas", "google.protobuf", "grpc", "grpc_status")


class Bench:
    """Inputs, made once, and runs, each done once."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.runs: dict[tuple[str, str], dict[str, Any] | None] = {}

    def input(self, size: str) -> Path:
        folder = self.folder / size
        if not (folder / "in").exists():
            (folder / "in").mkdir(parents=True)
            args = self.args
            rows, keys = {
                LARGE: (args.rows, args.keys),
                SMALL: (args.small_rows, args.small_keys),
                TINY: (args.tiny_rows, args.tiny_rows),
            }[size]
            rng = np.random.default_rng(args.seed)
            for batch in range(args.warmup + args.batches):
                table = pa.table({"k": rng.integers(0, keys, rows), "v": rng.integers(-100, 100, rows)})
                pq.write_table(table, folder / "in" / f"{batch:04}.parquet")
        return folder

    def run(self, name: str, size: str) -> dict[str, Any] | None:
        """What the contender said, or None if it failed."""
        if (name, size) not in self.runs:
            folder = self.input(size)
            command = [sys.executable, "-m", "bench.spark.job", name, str(folder)]
            command += ["--memory", self.args.memory]
            print(f"running {name}, {size} batches", file=sys.stderr, flush=True)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.runs[name, size] = None
            if done.returncode == 0:
                self.runs[name, size] = json.loads(done.stdout.splitlines()[-1])
            else:
                print(f"{name} has failed: {reason(done.stderr)}", flush=True)
            for written in ("out", "state", "stream"):
                shutil.rmtree(folder / written, ignore_errors=True)
        return self.runs[name, size]

    def rate(self, name: str, size: str) -> float | None:
        """Thousands of rows a second, the median of the batches after warm-up."""
        said = self.run(name, size)
        if said is None:
            return None
        return statistics.median(each["rows"] / each["ms"] for each in said["batches"][self.args.warmup :])

    def figure(self, report: Report, figure: str) -> None:
        for ours, peer, target in FIGURES[figure]:
            sizes: list[tuple[str, str, float | None]] = [(FAVOURED[ours], FAVOURED[peer], target)]
            if FAVOURED[ours] != FAVOURED[peer]:
                sizes.append((SMALL, SMALL, None))
            if ours == "processor":
                sizes.append((TINY, TINY, 2.0))
            for our_size, peer_size, wanted in sizes:
                mine, theirs = self.rate(ours, our_size), self.rate(peer, peer_size)
                if mine is None or theirs is None:
                    print(f"{figure:11} {ours} and {peer}: not measured", flush=True)
                    continue
                what = f"{ours} ({our_size} batches), {peer} ({peer_size})"
                report.row(
                    figure,
                    what,
                    mine,
                    "k rows/s",
                    theirs,
                    peer_name=peer,
                    target=wanted,
                    contender=ours,
                    sizes=[our_size, peer_size],
                )

    def breakdown(self, name: str, size: str) -> None:
        """Print where the median batch of ours spends its time."""
        said = self.runs.get((name, size))
        if not said:
            return
        whole, parts = batch_parts(said, self.args.warmup)
        print(f"\n{name}, {size} batches: {whole:.0f} ms each")
        for part in parts:
            print(f"  {'  ' * part.is_within + part.name:12} {part.ms:8.1f} ms  {LABELS[part.name]}")


def reason(stderr: str) -> str:
    """The line of a failed run that says why: where a Python worker of Spark died, its error."""
    lines = [line.strip() for line in stderr.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    told = [line for line in errors if not line.startswith(("pyspark.", "py4j.", "org.apache."))]
    return (told or errors or [stderr.strip()[-300:]])[-1]


def missing() -> list[str]:
    """Which packages that Spark's own contenders import are not there."""

    def is_there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the package it lies in
            return False

    return [name for name in NEEDED if not is_there(name)]


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.spark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "figures",
        nargs="*",
        metavar="FIGURE",
        help="P12, P13, P14, P22, P24 or RocksDB; default: all of them",
    )
    parser.add_argument("--rows", type=int, default=2_000_000, help="of a large batch (%(default)s)")
    parser.add_argument("--keys", type=int, default=1_000_000, help="in large batches (%(default)s)")
    parser.add_argument("--small-rows", type=int, default=200_000, help="of a small batch (%(default)s)")
    parser.add_argument("--small-keys", type=int, default=100_000, help="in small batches (%(default)s)")
    parser.add_argument(
        "--tiny-rows", type=int, default=1_000, help="of a tiny batch, and keys (%(default)s)"
    )
    parser.add_argument("--batches", type=int, default=6, help="measured ones (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="batches before them (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of keys and values (%(default)s)")
    parser.add_argument("--memory", default="4g", help="-Xms and -Xmx of every JVM (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/bench/spark.json"))
    parser.add_argument("--renew-page", action="store_true", help="renew docs/performance/spark.md, too")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.figures) - set(FIGURES))
    if unknown:
        parser.error(f"no figure {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    lacking = missing()
    if lacking:
        parser.error(f"not installed: {', '.join(lacking)}; pip install '.[bench]' has what is needed")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON; 1 if a contender has failed."""
    args = parsed(argv)
    report = Report()
    with tempfile.TemporaryDirectory(prefix="statebackend-bench-") as folder:
        bench = Bench(args, Path(folder))
        for figure in args.figures or FIGURES:
            bench.figure(report, figure)
    for name in (
        "batches",
        "one host",
        "two hosts",
        "four hosts",
        "published",
        "delta",
        "rows",
        "struct",
        "processor",
    ):
        for size in (LARGE, SMALL, TINY):
            bench.breakdown(name, size)
    runs = {"/".join(which): said for which, said in bench.runs.items() if said}
    session = next(iter(runs.values()))["session"] if runs else {}
    args.out = str(args.out)
    report.write(Path(args.out), args, statebackend=sb.__version__, session=session, runs=runs)
    has_failed = None in bench.runs.values()
    if args.renew_page and not has_failed:
        page.main(["--run", args.out])
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
