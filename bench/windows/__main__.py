"""Measures counting in windows over columns: ``python -m bench.windows``.

``--n`` rows of random keys at random times are added to a sum for each key and window, with a column of windows as
``namespaces``. Beside it the same rows without namespaces: once under their keys alone, as if there were no windows,
and once under a key for each pair, which makes as many sums. Every round adds the same rows again, so all sums are
there but in the first. Every sum is checked. Prints a table and writes ``build/bench/windows.json``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import statebackend as sb
from bench.common.report import Report
from bench.flink.keys import Int64Array
from bench.timers.ours import timed

SIZE = 60_000


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(prog="python -m bench.windows", description=__doc__)
    made.add_argument("--n", type=int, default=1_000_000, help="rows")
    made.add_argument("--keys", type=int, default=100_000)
    made.add_argument("--windows", type=int, default=10)
    made.add_argument("--samples", type=int, default=7)
    made.add_argument("--warmup", type=int, default=2, help="rounds before the samples; the first inserts")
    made.add_argument("--backend", default="heap", help="any registered backend")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--out", type=Path, default=Path("build/bench/windows.json"))
    return made


def measure(
    args: argparse.Namespace, call: Callable[[Any], Any], asked: tuple[Any, ...], expected: Int64Array
) -> list[float]:
    """The seconds of each round; afterwards each row's sum is what it has to be."""
    with sb.create_backend(args.backend).create_keyed_backend(sb.types.LONG) as keyed:
        total = keyed.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))
        rounds = args.warmup + args.samples
        seconds = [timed(lambda: call(total)) for _ in range(rounds)]
        keys, options = asked
        found = total.get_many(keys, **options).to_numpy()
        if not np.array_equal(found, rounds * expected):
            raise AssertionError("the sums are not what was added")
    return seconds[args.warmup :]


def sums(places: Int64Array, values: Int64Array) -> Int64Array:
    """For each row the sum of the values of all rows at its place."""
    of_places = np.zeros(int(places.max()) + 1, dtype=np.int64)
    np.add.at(of_places, places, values)
    return of_places[places]


def main(argv: list[str] | None = None) -> int:
    """Measure; 0."""
    args = parser().parse_args(argv)
    rng = np.random.default_rng(args.seed)
    keys = rng.integers(0, args.keys, args.n)
    values = rng.integers(0, 100, args.n)
    times = rng.integers(0, args.windows * SIZE, args.n)
    pairs = keys * args.windows + times // SIZE
    _, windows = sb.TimeWindow.assign_many(times, SIZE)

    def assigned(total: Any) -> None:
        total.add_many(keys, values, namespaces=sb.TimeWindow.assign_many(times, SIZE).windows)

    def changed(total: Any) -> None:
        total.add_many(keys, values, return_changed=True, namespaces=windows)

    within, alone = ((keys, {"namespaces": windows}), sums(pairs, values)), ((keys, {}), sums(keys, values))
    contenders: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "keys alone": (lambda total: total.add_many(keys, values), alone),
        "a key for each pair": (
            lambda total: total.add_many(pairs, values),
            ((pairs, {}), sums(pairs, values)),
        ),
        "namespaces": (lambda total: total.add_many(keys, values, namespaces=windows), within),
        "namespaces, windows assigned within": (assigned, within),
        "keys alone, return_changed": (
            lambda total: total.add_many(keys, values, return_changed=True),
            alone,
        ),
        "namespaces, return_changed": (changed, within),
    }
    report = Report()
    for name, (call, check) in contenders.items():
        seconds = measure(args, call, *check)
        report.row(
            "windows",
            f"add_many, {name}",
            args.n / statistics.median(seconds) / 1e6,
            "M rows/s",
            samples_ns=[each / args.n * 1e9 for each in seconds],
        )
    report.write(
        args.out,
        argparse.Namespace(**{**vars(args), "out": str(args.out)}),
        versions={"statebackend": sb.__version__},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
