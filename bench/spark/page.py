"""Renews the tables and the plot of the page from a run: ``python -m bench.spark.page``.

Reads ``build/bench/spark.json`` (``--run``), writes what the run measured into ``docs/performance/spark.md``
(``--page``), between ``<!-- NAME -->`` and ``<!-- end NAME -->``, and draws ``spark.svg`` beside it. Tables of which
the run measured nothing stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bench.common.plot import bars
from bench.spark.parts import LABELS, batch_parts

#: The contenders, in the order of the plot.
NAMES = {
    "applyInPandasWithState": "`applyInPandasWithState`",
    "transformWithState": "`transformWithState`",
    "spark": "Spark's aggregation, in the JVM",
    "struct": "statebackend, row by row, one struct",
    "rows": "statebackend, row by row",
    "rocksdb": "statebackend, whole batches on RocksDB",
    "delta": "statebackend, whole batches, to Delta",
    "published": "statebackend, whole batches, published",
    "one host": "statebackend, whole batches, one host",
    "two hosts": "statebackend, whole batches, two hosts",
    "four hosts": "statebackend, whole batches, four hosts",
    "batches": "statebackend, whole batches",
}
#: The figure that has tables of its own, and its contenders.
EXECUTORS, HOSTS = "P24", ("one host", "two hosts", "four hosts")
#: Ours in driver mode, as the table of a batch's time has them.
DRIVER = ("batches", "published", "delta", "rocksdb", "rows", "struct")
#: What rows go through, one part after the other.
HOPS = ("read", "scatter", "function", "output", "sink")


def surroundings(run: Mapping[str, Any]) -> str:
    """What the figures were measured on."""
    machine, args, session = run["machine"], run["arguments"], run["session"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, `local[{session['cores']}]`, Spark "
        f"{session['spark']}, Python {machine['python']}, statebackend {run['statebackend']}; Java {session['java']}, "
        f"{session['collector']}, `-Xms` = `-Xmx` = {session['heap']}. Large batches have {args['rows']:,} rows and "
        f"{args['keys']:,} keys; small ones {args['small_rows']:,} and {args['small_keys']:,}. Medians of "
        f"{args['batches']} batches after {args['warmup']} of warm-up."
    )


def figures(run: Mapping[str, Any]) -> list[str]:
    """The table of the ratios of contenders with batches of one size."""
    lines = ["| statebackend | rows/s | compared with | rows/s | ratio |", "|---|---|---|---|---|"]
    rows = [row for row in run["rows"] if row["figure"] != EXECUTORS]
    for row in (each for each in rows if len(set(each["sizes"])) == 1):
        ours, peer = row["sizes"]
        lines.append(
            f"| {NAMES[row['contender']].removeprefix('statebackend, ')}, {ours} | {_rate(row['ours'])} "
            f"| {NAMES[row['peer_name']]}, {peer} | {_rate(row['peer'])} | {row['ratio']:.1f} × |"
        )
    return lines


def breakdown(run: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """The table of where batches of these contenders spend their time."""
    warmup = run["arguments"]["warmup"]
    found = {
        which: batch_parts(run["runs"][which], warmup)
        for name in names
        for which in run["runs"]
        if which.partition("/")[0] == name and run["runs"][which]["parts"]
    }
    lines = [
        "| milliseconds of a batch | " + " | ".join(_title(which) for which in found) + " |",
        "|---|" + "---|" * len(found),
    ]
    took = [{part.name: part for part in parts} for _, parts in found.values()]
    for name, label in LABELS.items():
        if any(name in each and round(each[name].ms) for each in took):
            within = "… " if any(name in each and each[name].is_within for each in took) else ""
            cells = (_ms(each[name].ms) if name in each else "" for each in took)
            lines.append(f"| {within}{label} | " + " | ".join(cells) + " |")
    lines.append("| the whole micro-batch | " + " | ".join(_ms(whole) for whole, _ in found.values()) + " |")
    return lines


def executors(run: Mapping[str, Any]) -> list[str]:
    """The tables of executors mode: rates against driver mode, and the cost of each hop per row."""
    lines = ["| | rows/s | against driver mode |", "|---|---|---|"]
    rows = [row for row in run["rows"] if row["figure"] == EXECUTORS]
    lines.append(f"| driver mode | {_rate(rows[0]['peer'])} | |")
    for row in sorted(rows, key=lambda each: HOSTS.index(each["contender"])):
        lines.append(f"| {row['contender']} | {_rate(row['ours'])} | {row['ratio']:.2f} × |")
    names = ("batches", *HOSTS)
    return [surroundings(run), "", *lines, "", *hops(run, names), "", *breakdown(run, names)]


def hops(run: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """The table of what the parts of large batches cost a row."""
    rows, warmup = run["arguments"]["rows"], run["arguments"]["warmup"]
    found = {name: batch_parts(run["runs"][f"{name}/large"], warmup)[1] for name in names}
    lines = [
        "| nanoseconds a row | " + " | ".join(_title(name) for name in names) + " |",
        "|---|" + "---|" * len(found),
    ]
    for hop in HOPS:
        took = [{part.name: part.ms * 1e6 / rows for part in parts}.get(hop) for parts in found.values()]
        lines.append(f"| {LABELS[hop]} | " + " | ".join(map(_ms, took)) + " |")
    return lines


def renewed(page: str, run: Mapping[str, Any]) -> str:
    """The text of the page with the tables of this run."""
    tables: dict[str, list[str]] = {}
    if any(row["figure"] != EXECUTORS for row in run["rows"]):
        shown = ["![Thousand rows a second](spark.svg)", "", surroundings(run), "", *figures(run)]
        tables = {"figures": shown, "breakdown": breakdown(run, DRIVER)}
    if any(row["figure"] == EXECUTORS for row in run["rows"]):
        tables["executors"] = executors(run)
    for name, lines in tables.items():
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.S)
        if not block.search(page):
            raise ValueError(f"the page has no block {name}")
        text = "\n".join(lines)
        page = block.sub(lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}", page)
    return page


def plot(run: Mapping[str, Any], out: Path) -> None:
    """Draw the rates of all contenders at both sizes of batch."""
    warmup = run["arguments"]["warmup"]
    rates = {
        which: statistics.median(each["rows"] / each["ms"] for each in said["batches"][warmup:])
        for which, said in run["runs"].items()
    }
    names = [
        name for name in NAMES if name not in HOSTS and any(which.startswith(f"{name}/") for which in rates)
    ]
    sizes = {"large": "rows", "small": "small_rows"}
    series = {
        f"batches of {run['arguments'][rows]:,} rows": [rates.get(f"{name}/{size}") for name in names]
        for size, rows in sizes.items()
    }
    labels = [NAMES[name].replace("`", "").replace(", ", ",\n").replace("With", "\nWith") for name in names]
    bars(out, labels, series, "thousand rows a second", "%.0f")


def _title(which: str) -> str:
    name, _, size = which.partition("/")
    if name in HOSTS:
        return name
    return ", ".join(filter(None, (NAMES[name].removeprefix("statebackend, "), size)))


def _rate(thousands: float) -> str:
    return f"{thousands * 1000:,.0f}" if thousands < 100 else f"{thousands:,.0f}k"


def _ms(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.0f}"


def main(argv: list[str] | None = None) -> int:
    """Renew the page and the plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.spark.page", description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("build/bench/spark.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/performance/spark.md"))
    args = parser.parse_args(argv)
    run = json.loads(args.run.read_text())
    args.page.write_text(renewed(args.page.read_text(encoding="utf-8"), run), encoding="utf-8")
    if any(row["figure"] != EXECUTORS for row in run["rows"]):
        plot(run, args.page.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
