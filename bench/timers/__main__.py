"""Measures timers beside Flink's ``HeapPriorityQueueSet``: ``python -m bench.timers``.

One timer for each of ``--n`` keys, at random times, through the API: ``timer_register`` sets the key and registers,
``timer_poll`` fires all in order with their key current, ``timer_move`` deletes a key's timer and registers a later one
(ours alone). Flink's side is the queue itself, which knows no current key. Prints a table and writes
``build/bench/timers.json``. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import statebackend as sb
from bench.common.report import Report
from bench.flink import FlinkPeer, random_keys
from bench.timers.ours import Rounds

OPERATIONS = ("timer_register", "timer_poll", "timer_move")
OF_FLINK = OPERATIONS[:2]


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(prog="python -m bench.timers", description=__doc__)
    made.add_argument("--n", type=int, nargs="+", default=[1_000_000], help="timers")
    made.add_argument("--samples", type=int, default=7)
    made.add_argument("--warmup", type=int, default=2, help="rounds of ours before the samples")
    made.add_argument("--backend", default="heap", help="any registered backend")
    made.add_argument("--max-parallelism", type=int, default=128, help="key groups, on both sides")
    made.add_argument("--no-flink", action="store_true")
    made.add_argument("--heap", default="4g", help="-Xms and -Xmx of the JVM")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--out", type=Path, default=Path("build/bench/timers.json"))
    return made


def main(argv: list[str] | None = None) -> int:
    """Measure; 0."""
    args = parser().parse_args(argv)
    flink = None if args.no_flink else FlinkPeer(seed=args.seed)
    if flink is not None:
        there, reason = flink.available()
        if not there:
            print(f"without Flink: {reason}")
            flink = None
    report = Report()
    for n in args.n:
        keys = random_keys(n, args.seed)
        peer = {}
        if flink is not None:
            measured = flink.run_timers(
                OF_FLINK, keys, key_groups=args.max_parallelism, samples=args.samples, heap=args.heap
            )
            peer = {each["name"]: each for each in measured}
        rounds = Rounds(keys, args.backend, args.max_parallelism, args.seed)
        for operation in OPERATIONS:
            seconds = [rounds.seconds(operation, number) for number in range(args.warmup + args.samples)]
            seconds = seconds[args.warmup :]
            theirs = peer.get(operation)
            report.row(
                "timers",
                f"{operation}, {n:,} timers",
                n / statistics.median(seconds) / 1e6,
                "M ops/s",
                theirs["median_mops"] if theirs else None,
                operation=operation,
                n=n,
                ours_samples_ns=[each / n * 1e9 for each in seconds],
                peer_details=theirs or {},
            )
    args.out = str(args.out)
    report.write(Path(args.out), args, versions={"statebackend": sb.__version__})
    return 0


if __name__ == "__main__":
    sys.exit(main())
