"""Renews the tables and the plot of the page from a run: ``python -m bench.rocksdb.page``.

Reads ``build/bench/rocksdb.json`` (``--run``), ``build/bench/rocksdb-scalars.json`` (``--scalars-run``),
``build/bench/rocksdb-vectorised.json`` (``--vectorised-run``) and ``build/bench/spark-rocksdb.json`` (``--spark-run``),
those that are there; writes what they measured into ``docs/performance/rocksdb.md`` (``--page``), and draws
``rocksdb.svg`` beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common.plot import curves
from bench.rocksdb.maps import KINDS, OPERATIONS
from bench.spark import page as spark_page
from bench.state.page import with_block

LIBRARIES = {"statebackend": "statebackend", "rocksdb": "RocksDB", "rocksdict": "rocksdict"}
LABELS = {"value": "ValueState of MAP", "pickle": "ValueState of PICKLE", "map": "MapState"}


def surroundings(run: Mapping[str, Any]) -> str:
    """What the figures were measured on."""
    machine, args, versions = run["machine"], run["arguments"], run["versions"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, statebackend "
        f"{versions['statebackend']}, RocksDB {versions['rocksdb']}. {args['total']:,} entries in all, of "
        f"{args['least_keys']} keys at least; medians of {args['samples']} samples."
    )


def _cells(run: Mapping[str, Any]) -> dict[tuple[str, str, str, int], float]:
    return {
        (row["operation"], row["backend"], row["kind"], row["entries"]): row["ours"] for row in run["rows"]
    }


def table(run: Mapping[str, Any]) -> list[str]:
    """Microseconds by size of the map."""
    cells, sizes = _cells(run), run["arguments"]["entries"]
    lines = [
        "| microseconds for one entry of a map with | " + " | ".join(f"{size:,}" for size in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for operation in OPERATIONS:
        for backend in run["arguments"]["backends"]:
            for kind in KINDS:
                found = [cells[operation, backend, kind, size] / 1000 for size in sizes]
                shown = " | ".join(f"{each:,.2f}" if each < 10 else f"{each:,.0f}" for each in found)
                lines.append(f"| {operation}, {LABELS[kind]}, `{backend}` | {shown} |")
    return lines


def plot(run: Mapping[str, Any], out: Path) -> None:
    """The curves: cost by size, for reading and for writing."""
    cells, sizes = _cells(run), run["arguments"]["entries"]
    panels = {
        f"{operation} one entry": {
            f"{LABELS[kind]}, {backend}": [cells[operation, backend, kind, size] / 1000 for size in sizes]
            for backend in run["arguments"]["backends"]
            for kind in KINDS
        }
        for operation in OPERATIONS
    }
    curves(out, sizes, panels, "entries of the map", "microseconds")


def _measured(run: Mapping[str, Any]) -> str:
    machine, versions = run["machine"], run["versions"]
    libraries = ", ".join(f"{LIBRARIES[name]} {version}" for name, version in versions.items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, load average {machine['load_average']:.1f} at "
        f"the end, Python {machine['python']}, {libraries}."
    )


def scalars(run: Mapping[str, Any]) -> list[str]:
    """One value at a time beside `rocksdict`."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in run["rows"]:
        what, peer = row["what"].split(" / rocksdict, ")
        operation, side = what.split(" keys, ours")
        found.setdefault((f"{operation} keys", side.strip(", ") or "no mark"), {})[peer] = row
    lines = [
        f"{_measured(run)} Medians of {run['arguments']['samples']} samples.",
        "",
        "| nanoseconds a call | | statebackend | `rocksdict`, numbers | ratio | `rocksdict`, bytes | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for (operation, side), rows in found.items():
        cells = [f"{each['peer']:,.0f} | {each['ratio']:.2f} ×" for each in (rows["numbers"], rows["bytes"])]
        lines.append(f"| {operation} | {side} | {rows['bytes']['ours']:,.0f} | {' | '.join(cells)} |")
    return lines


def calls(run: Mapping[str, Any]) -> list[str]:
    """Vectorised calls beside scalar ones."""
    args = run["arguments"]
    return [
        f"{_measured(run)} {args['keys']:,} keys; medians of {args['samples']} samples.",
        "",
        "| state | vectorised | ns a row | scalar | ns a call | ratio |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['kind']} | `{row['what'].split(': ')[1]}` | {row['ours']:,.0f} | `{row['peer_name']}` "
            f"| {row['peer']:,.0f} | {row['ratio']:.1f} × |"
            for row in run["rows"]
        ),
    ]


def jobs(run: Mapping[str, Any]) -> list[str]:
    """The job under Spark: RocksDB beside heap, and beside Spark's aggregation."""
    rows = [row for row in run["rows"] if row["figure"] == "RocksDB"]
    return [spark_page.surroundings(run), "", *spark_page.figures({**run, "rows": rows})]


def main(argv: list[str] | None = None) -> int:
    """Renew the page and the plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.rocksdb.page", description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("build/bench/rocksdb.json"))
    parser.add_argument("--scalars-run", type=Path, default=Path("build/bench/rocksdb-scalars.json"))
    parser.add_argument("--vectorised-run", type=Path, default=Path("build/bench/rocksdb-vectorised.json"))
    parser.add_argument("--spark-run", type=Path, default=Path("build/bench/spark-rocksdb.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/performance/rocksdb.md"))
    args = parser.parse_args(argv)
    page = args.page.read_text(encoding="utf-8")
    if args.run.exists():
        run = json.loads(args.run.read_text())
        shown = [f"![Cost of one entry by size of the map]({args.page.stem}.svg)", "", surroundings(run), ""]
        page = with_block(page, "maps", "\n".join([*shown, *table(run)]))
        plot(run, args.page.with_suffix(".svg"))
    if args.scalars_run.exists():
        page = with_block(page, "scalars", "\n".join(scalars(json.loads(args.scalars_run.read_text()))))
    if args.vectorised_run.exists():
        page = with_block(page, "calls", "\n".join(calls(json.loads(args.vectorised_run.read_text()))))
    if args.spark_run.exists():
        page = with_block(page, "jobs", "\n".join(jobs(json.loads(args.spark_run.read_text()))))
    args.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
