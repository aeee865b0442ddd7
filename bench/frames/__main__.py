"""Compares whole batches with DuckDB and Polars: ``python -m bench.frames``.

P26: each batch is added to a sum and a count of each key, the new values of the keys that it touches are returned,
and in the durable half it is durable before the next batch begins. P27: `add_many` with changed keys against
`add_many` alone. A share of more keys than a batch has rows becomes a batch of distinct keys.

Each form runs in a process of its own, with as many processors as threads. The forms of a contender first run some
batches each; the ones within 1.5 times of the quickest run in full, and the best of these counts. numpy computes
every result again. A process with durable batches ends without closing anything, and another one restores the state.
Prints tables, and writes ``build/bench/frames.json``. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby, product
from pathlib import Path
from typing import Any

from bench.common.report import Report
from bench.frames.runs import CONTENDERS, OURS, Cell, apart, changed_against_without, forms, restored, run

RATE = "M rows/s"
#: Batches of the first run of a form, and how many times as fast as a form the quickest may be there.
FIRST, WITHIN = 3, 1.5
WARMUP = 1

#: Of a contender's best form, by its name.
Results = dict[str, dict[str, Any]]


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """What is measured, the shares of a size of batches in a row."""
    durable = [each == "yes" for each in args.durable]
    for place in product(durable, args.threads, args.keys, args.rows):
        _, _, keys, rows = place
        for touched in sorted({max(1, min(round(keys * share / 100), rows)) for share in args.shares}):
            yield Cell(*place, touched)


def target(cell: Cell) -> float:
    """How many times as fast as the best of the others ours has to be."""
    return 3.0 if not cell.durable else 1.5 if cell.share < 0.5 else 1.0


def best(contender: str, cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """The run of the best form of a contender."""
    names = list(forms(contender, cell.durable))
    if len(names) > 1:
        rates = {name: measured(contender, name, cell, FIRST, args)[RATE] for name in names}
        names = [name for name in names if rates[name] * WITHIN >= max(rates.values())]
    batches = args.durable_batches if cell.durable else args.batches
    runs = [measured(contender, name, cell, batches, args) for name in names]
    return max(runs, key=lambda each: float(each[RATE]))


def measured(contender: str, form: str, cell: Cell, batches: int, args: argparse.Namespace) -> dict[str, Any]:
    """A run, and of durable batches a restore."""
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        folder, count = root if cell.durable else None, batches + WARMUP
        found = apart(cell.threads, run, contender, form, cell, batches, WARMUP, args.seed, folder)
        if cell.durable:
            again = (count, found["added"], args.seed, folder)
            found |= apart(cell.threads, restored, contender, form, cell, *again)
    return {"contender": contender, "form": form, **found}


def rival_of(found: Results) -> str | None:
    """The quickest of the others, if ours was measured too."""
    others = [name for name in found if name != OURS]
    return max(others, key=lambda name: found[name][RATE]) if others and OURS in found else None


def p26(args: argparse.Namespace, report: Report) -> dict[Cell, Results]:
    """The best run of each contender."""
    every: dict[Cell, Results] = {}
    for cell in cells(args):
        found = every[cell] = {each: best(each, cell, args) for each in CONTENDERS if each in args.only}
        for name, each in found.items():
            report.row("P26", f"{cell}: {name}, {each['form']}", each[RATE], RATE, **cell._asdict(), **each)
        if rival := rival_of(found):
            ours, theirs = found[OURS][RATE], found[rival][RATE]
            report.row("P26", str(cell), ours, RATE, theirs, peer_name=rival, target=target(cell))
    return every


def p27(args: argparse.Namespace, report: Report) -> None:
    """Changed keys against without."""
    for threads, keys in product(args.threads, args.keys):
        asked = (keys, args.rows, threads, args.batches, args.seed)
        for rows, (changed, without) in apart(threads, changed_against_without, *asked).items():
            what = f"changed keys, {threads} threads, {keys:,} keys, {rows:,} rows"
            of = {"peer_name": "without", "target": 1.5, "at_most": True}
            report.row("P27", what, changed, "ns a row", without, **of)


def print_tables(every: dict[Cell, Results]) -> None:
    """A table of each figure, and at which shares of the keys others are faster."""
    names = list(next(iter(every.values())))
    figures = {key for found in every.values() for each in found.values() for key in each}
    for figure in sorted(figures - {"contender", "form", "added", "seconds"}):
        print(f"\n| {figure} | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
        for cell, found in every.items():
            if any(figure in found[name] for name in names):
                shown = [f"{found[name][figure]:.4g}" if figure in found[name] else "" for name in names]
                print(f"| {cell} | {' | '.join(shown)} |")
    if rival_of(next(iter(every.values()))) is None:
        return
    print("\nWhere another one is faster:")
    for place, group in groupby(every.items(), lambda item: item[0].place()):
        faster = []
        for cell, found in group:
            rival = found[rival_of(found) or OURS]
            ratio = rival[RATE] / found[OURS][RATE]
            if ratio > 1:
                faster.append(f"{cell.share:.2%} ({rival['contender']}, {rival['form']}: {ratio:.2f} x)")
        print(f"* {place}: {'at ' + ', '.join(faster) if faster else 'at no share'}")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog="python -m bench.frames", description=__doc__, formatter_class=raw)
    made.add_argument("--keys", type=int, nargs="+", default=[2_000_000, 10_000_000])
    made.add_argument("--rows", type=int, nargs="+", default=[14_000, 200_000, 2_000_000], help="of a batch")
    made.add_argument("--shares", type=float, nargs="+", default=[0.1, 1, 10, 100], help="touched, in %%")
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    made.add_argument("--durable", choices=["no", "yes"], nargs="+", default=["no", "yes"])
    made.add_argument("--only", nargs="+", choices=[*CONTENDERS, "P27"], default=[*CONTENDERS, "P27"])
    made.add_argument("--batches", type=int, default=15, help="in memory (%(default)s)")
    made.add_argument("--durable-batches", type=int, default=30, help="durable ones (%(default)s)")
    made.add_argument("--quick", action="store_true", help="20,000 keys, and few batches of 2,000 rows")
    made.add_argument("--folder", help="on the disk to measure; default: the system's for temporary files")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--out", type=Path, default=Path("build/bench/frames.json"))
    args = made.parse_args(argv)
    if args.quick:
        args.keys, args.rows, args.batches, args.durable_batches = [20_000], [2_000], 3, 10
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure; 0."""
    args, report = parsed(argv), Report()
    if "P27" in args.only:
        p27(args, report)
    if contenders := [each for each in CONTENDERS if each in args.only]:
        print_tables(p26(args, report))
    out, args.out = args.out, str(args.out)
    versions = {name: import_module(name).__version__ for name in [OURS, *contenders]}
    report.write(out, args, versions=versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
