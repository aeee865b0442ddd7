"""Measures end to end under Structured Streaming: ``python -m bench.spark`` prints P12, P13 and P14.

The job is a running sum and count per key. Each contender runs alone, in a process and JVM of its own, over the same
files, one file a micro-batch; state and output are durable after every batch, and all have the same sink. The first
batches warm up; the figure is the median of the others. Then comes where a batch of ours spends its time. Writes
``build/bench/spark.json``. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
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

from bench.common.report import Report

LARGE, SMALL = "large", "small"
#: Contenders of each figure: ours, peer, target; and the batch size that favours each.
FIGURES: dict[str, list[tuple[str, str, float]]] = {
    "P12": [("batches", "spark", 4.0)],
    "P13": [("batches", "transformWithState", 60.0), ("batches", "applyInPandasWithState", 60.0)],
    "P14": [("rows", "transformWithState", 15.0)],
}
FAVOURED = {
    "batches": LARGE,
    "rows": LARGE,
    "spark": LARGE,
    "transformWithState": SMALL,
    "applyInPandasWithState": SMALL,
}


class Bench:
    """Inputs, made once, and runs, each done once."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.runs: dict[tuple[str, str], dict[str, Any] | None] = {}

    def input(self, size: str) -> Path:
        folder = self.folder / size
        if not (folder / "in").exists():
            (folder / "in").mkdir(parents=True)
            rows, keys = (
                (self.args.rows, self.args.keys)
                if size == LARGE
                else (self.args.small_rows, self.args.small_keys)
            )
            rng = np.random.default_rng(self.args.seed)
            for batch in range(self.args.warmup + self.args.batches):
                table = pa.table({"k": rng.integers(0, keys, rows), "v": rng.integers(-100, 100, rows)})
                pq.write_table(table, folder / "in" / f"{batch:04}.parquet")
        return folder

    def run(self, name: str, size: str) -> dict[str, Any] | None:
        """What the contender said, or None if it cannot run here."""
        if (name, size) not in self.runs:
            folder = self.input(size)
            command = [sys.executable, "-m", "bench.spark.job", name, str(folder)]
            command += ["--driver-memory", self.args.driver_memory]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = None
            if done.returncode == 0:
                said = json.loads(done.stdout.splitlines()[-1])
            else:
                print(
                    f"{name} cannot run here: {(done.stderr.strip().splitlines() or ['?'])[-1]}", flush=True
                )
            self.runs[name, size] = said
            for written in ("out", "state", "stream"):
                shutil.rmtree(folder / written, ignore_errors=True)
        return self.runs[name, size]

    def rate(self, name: str, size: str) -> float | None:
        """Thousands of rows a second, the median of the batches after warm-up."""
        said = self.run(name, size)
        if said is None:
            return None
        rates = [each["rows"] / each["ms"] for each in said["batches"][self.args.warmup :]]
        return statistics.median(rates)

    def figure(self, report: Report, figure: str) -> None:
        for ours, peer, target in FIGURES[figure]:
            sizes = [(FAVOURED[ours], FAVOURED[peer], target)]
            if FAVOURED[ours] != FAVOURED[peer]:
                sizes.append((SMALL, SMALL, None))  # type: ignore[arg-type]
            for our_size, peer_size, wanted in sizes:
                mine, theirs = self.rate(ours, our_size), self.rate(peer, peer_size)
                if mine is None:
                    continue
                what = f"{ours} ({our_size} batches), {peer} ({peer_size})"
                report.row(figure, what, mine, "k rows/s", theirs, peer_name=peer, target=wanted)

    def breakdown(self, name: str, size: str) -> None:
        """Where the median batch of ours spends its time."""
        said = self.runs.get((name, size))
        if not said or not said["parts"]:
            return
        parts = said["parts"][self.args.warmup :]
        whole = statistics.median(each["ms"] for each in said["batches"][self.args.warmup :])
        print(f"\n{name}, {size} batches: {whole:.0f} ms each, of which")
        seen = 0.0
        for part in parts[0]["durationMs"]:
            took = statistics.median(each["durationMs"].get(part, 0.0) for each in parts)
            if part == "batch":
                continue
            seen += took
            print(f"  {part:12} {took:8.1f} ms")
        print(f"  {'Spark':12} {whole - seen:8.1f} ms (offsets, planning, its own commit)")


def reason(stderr: str) -> str:
    """The last line of a traceback that says what it was, without Spark's description of the query."""
    lines = [line for line in stderr.splitlines() if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return lines[-1] if lines else stderr.strip()[-300:]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], help="P12, P13, P14; default: all")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--small-rows", type=int, default=200_000)
    parser.add_argument("--small-keys", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=6, help="measured ones")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--driver-memory", default="4g")
    parser.add_argument("--out", type=Path, default=Path("build/bench/spark.json"))
    args = parser.parse_args(argv)
    report = Report()
    with tempfile.TemporaryDirectory(prefix="statebackend-bench-") as folder:
        bench = Bench(args, Path(folder))
        for figure in args.figures or FIGURES:
            bench.figure(report, figure)
        for name, size in [("batches", LARGE), ("batches", SMALL), ("rows", LARGE)]:
            bench.breakdown(name, size)
        versions = {said["spark"] for said in bench.runs.values() if said}
        args.out = str(args.out)
        report.write(
            Path(args.out), args, spark=sorted(versions), runs={"/".join(k): v for k, v in bench.runs.items()}
        )


if __name__ == "__main__":
    main()
