"""Measures the time from the creation of a row to its visible result: ``python -m bench.latency``.

A server on loopback sends rows at a steady rate to Spark's socket source. The job is a running sum and count per key,
one micro-batch after the other. Contenders:

  published, written      ours, whose sink publishes the committed files, or writes with Spark
  …, executors            the same with two hosts
  spark                   Spark's own aggregation, in the JVM; its sink writes with Spark, as the next two do
  transformWithState      Spark's state API in Python
  stateless               no state: a foreachBatch that writes the rows
  empty                   a foreachBatch that does nothing: what Spark takes itself

P25 is published and written against spark: p50 and p99 at 1,000 rows a second. Each contender runs alone, in a process
and JVM of its own, and counts the rows in its output at the end. Nothing else should run on the machine meanwhile.
Writes ``build/bench/latency.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import statebackend as sb
from bench.common.report import Report
from bench.latency.job import CONTENDERS
from bench.spark.__main__ import reason

PEER = "spark"
#: What ours takes at most of the peer's, of the rows of one rate.
TARGETS = {"p50": 0.28, "p99": 0.25}
TARGETS_AT = 1_000
SHOWN = ("p50", "p90", "p99", "ms a batch", "rows a batch", "missing")


def measured(name: str, rate: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """What a contender says of a rate, or None if it failed."""
    with tempfile.TemporaryDirectory(prefix="statebackend-bench-", dir=args.folder) as folder:
        command = [sys.executable, "-m", "bench.latency.job", name, folder, "--rate", str(rate)]
        for option in ("keys", "warmup", "seconds", "memory"):
            command += [f"--{option}", str(getattr(args, option))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name} has failed: {reason(done.stderr)}", flush=True)
        return None
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def print_line(name: str, rate: int, said: dict[str, Any] | None) -> None:
    cells = (
        ["failed"] if said is None else ["" if said[each] is None else f"{said[each]:,.0f}" for each in SHOWN]
    )
    print(f"| {name} | {rate:,} | {' | '.join(cells)} |", flush=True)


def compare(report: Report, rate: int, runs: dict[str, dict[str, Any] | None]) -> None:
    """Ours against Spark's aggregation."""
    peer = runs.get(PEER)
    for name in ("published", "written", "published, executors", "written, executors"):
        ours = runs.get(name)
        if ours is None or peer is None:
            continue
        for figure, target in TARGETS.items():
            report.row(
                "P25",
                f"{figure}, {name}, {rate:,} rows a second",
                ours[figure],
                "ms",
                peer[figure],
                peer_name=PEER,
                target=target if rate == TARGETS_AT and name == "published" else None,
                at_most=True,
                contender=name,
            )


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.latency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--rates", type=int, nargs="+", default=[1_000, 10_000], help="rows a second")
    parser.add_argument("--keys", type=int, default=50_000, help="keys (%(default)s)")
    parser.add_argument(
        "--warmup", type=float, default=15, help="seconds before the measured ones (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=30, help="measured seconds of a run (%(default)s)")
    parser.add_argument("--memory", default="2g", help="-Xms and -Xmx of every JVM (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where state and output lie; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=Path("build/bench/latency.json"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON; 1 if a contender has failed."""
    args = parsed(argv)
    report, every = Report(), {}
    print(f"| contender | rows a second | {' | '.join(SHOWN)} |\n|---|{'---|' * (len(SHOWN) + 1)}")
    for rate in args.rates:
        every[rate] = {}
        for name in args.only:
            every[rate][name] = measured(name, rate, args)
            print_line(name, rate, every[rate][name])
    for rate, runs in every.items():
        compare(report, rate, runs)
    args.folder, out = str(args.folder), args.out
    args.out = str(out)
    report.write(out, args, statebackend=sb.__version__, runs=every)
    return int(any(said is None for runs in every.values() for said in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
