"""Measures one entry of a map in ValueState and in MapState, as the map grows: ``python -m bench.rocksdb``.

For each size of map and each backend, the kinds of state take turns: read one entry of a random key, and write one
entry. Prints nanoseconds and writes ``build/bench/rocksdb.json``, from which ``python -m bench.rocksdb.page`` renews
docs/performance/rocksdb.md. Nothing else should run on the machine meanwhile. The jobs under Spark on that page are
measured by ``python -m bench.spark RocksDB --out build/bench/spark-rocksdb.json``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

import statebackend as sb
from bench.common.report import Report
from bench.rocksdb.maps import KINDS, OPERATIONS, Held

FIGURE = "maps"


def seconds(held: Held, operation: str, times: int) -> float:
    """What so many operations take, without the making of their keys and the check of what they found."""
    rows = held.prepared(times)
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        result = getattr(held, f"time_{operation}")(rows)
        took = time.perf_counter() - began
    finally:
        gc.enable()
    getattr(held, f"check_{operation}")(rows, result)
    return took


def enough(held: Held, operation: str, wanted: float) -> int:
    """How many operations take about so many seconds."""
    times = 8
    while (took := seconds(held, operation, times)) < wanted / 4 and times < 1 << 20:
        times *= 4
    return max(8, min(1 << 20, round(times * wanted / max(took, 1e-9))))


def measure(args: argparse.Namespace, report: Report) -> None:
    for entries in args.entries:
        keys = max(args.least_keys, args.total // entries)
        for backend in args.backends:
            every = {kind: Held(backend, kind, entries, keys, args.seed) for kind in KINDS}
            for operation in OPERATIONS:
                times = {kind: enough(held, operation, args.seconds) for kind, held in every.items()}
                took: dict[str, list[float]] = {kind: [] for kind in KINDS}
                for _ in range(args.samples):
                    for kind, held in every.items():
                        took[kind].append(seconds(held, operation, times[kind]) / times[kind] * 1e9)
                for kind in KINDS:
                    report.row(
                        FIGURE,
                        f"{operation} one entry of {entries:,}, {kind}, {backend}",
                        statistics.median(took[kind]),
                        "ns",
                        None if kind == "map" else statistics.median(took["map"]),
                        bigger_is_better=False,
                        peer_name="MapState",
                        operation=operation,
                        entries=entries,
                        keys=keys,
                        backend=backend,
                        kind=kind,
                        samples_ns=took[kind],
                    )
            for held in every.values():
                held.check()
                held.close()


def parsed(argv: list[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m bench.rocksdb", description=__doc__)
    made.add_argument("--entries", type=int, nargs="+", default=[1, 10, 100, 1_000, 10_000], help="of a map")
    made.add_argument("--total", type=int, default=200_000, help="entries of all keys (%(default)s)")
    made.add_argument("--least-keys", type=int, default=20, help="whatever the total (%(default)s)")
    made.add_argument("--backends", nargs="+", default=["heap", "rocksdb"])
    made.add_argument("--samples", type=int, default=5)
    made.add_argument("--seconds", type=float, default=0.2, help="of a sample, about (%(default)s)")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--out", type=Path, default=Path("build/bench/rocksdb.json"))
    return made.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure; 0."""
    args = parsed(argv)
    report = Report()
    measure(args, report)
    library = sb.available_backends()["rocksdb"].library or {}
    out, args.out = args.out, str(args.out)
    report.write(out, args, versions={"statebackend": sb.__version__, "rocksdb": library.get("version")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
