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
from collections.abc import Mapping
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
    "batches": "statebackend, whole batches",
}


def surroundings(run: Mapping[str, Any]) -> str:
    """What the figures were measured on."""
    machine, args, session = run["machine"], run["arguments"], run["session"]
    return (
        f"Measured on {machine['processor']}, {machine['cores']} cores, `local[{session['cores']}]`, Spark "
        f"{session['spark']}, Python {machine['python']}, statebackend {run['statebackend']}; Java {session['java']}, "
        f"{session['collector']}, `-Xms` = `-Xmx` = {session['heap']}. Large batches have {args['rows']:,} rows and "
        f"{args['keys']:,} keys, small ones {args['small_rows']:,} and {args['small_keys']:,}. Medians of "
        f"{args['batches']} batches after {args['warmup']} of warm-up."
    )


def figures(run: Mapping[str, Any]) -> list[str]:
    """The table of the ratios."""
    lines = ["| | statebackend | | Spark | | ratio | target |", "|---|---|---|---|---|---|---|"]
    for row in run["rows"]:
        ours, peer = row["sizes"]
        ratio = f"{row['ratio']:.1f} ×"
        ratio = (
            f"**{ratio}**" if row["met"] is False else ratio
        )  # what misses its target is not to be overlooked
        target = "" if row["target"] is None else f"at least {row['target']:.0f} ×"
        lines.append(
            f"| {row['figure']} | {NAMES[row['contender']].removeprefix('statebackend, ')}, {ours} batches "
            f"| {_rate(row['ours'])} | {NAMES[row['peer_name']]}, {peer} batches | {_rate(row['peer'])} "
            f"| {ratio} | {target} |"
        )
    return lines


def breakdown(run: Mapping[str, Any]) -> list[str]:
    """The table of where a batch of ours spends its time."""
    warmup = run["arguments"]["warmup"]
    found = {which: batch_parts(said, warmup) for which, said in run["runs"].items() if said["parts"]}
    lines = [
        "| milliseconds of a batch | " + " | ".join(_title(which) for which in found) + " |",
        "|---|" + "---|" * len(found),
    ]
    took = [{part.name: part.ms for part in parts} for _, parts in found.values()]
    for name, label in LABELS.items():
        if any(name in each for each in took):
            lines.append(f"| {label} | " + " | ".join(_ms(each.get(name)) for each in took) + " |")
    lines.append("| the whole micro-batch | " + " | ".join(_ms(whole) for whole, _ in found.values()) + " |")
    return lines


def renewed(page: str, run: Mapping[str, Any]) -> str:
    """The text of the page with the tables of this run."""
    shown = ["![Thousand rows a second](spark.svg)", "", surroundings(run), "", *figures(run)]
    tables = {"figures": shown, "breakdown": breakdown(run)}
    if not run["rows"]:
        return page
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
    names = [name for name in NAMES if any(which.startswith(f"{name}/") for which in rates)]
    sizes = {"large": "rows", "small": "small_rows"}
    series = {
        f"batches of {run['arguments'][rows]:,} rows": [rates.get(f"{name}/{size}") for name in names]
        for size, rows in sizes.items()
    }
    labels = [NAMES[name].replace("`", "").replace(", ", ",\n") for name in names]
    bars(out, labels, series, "thousand rows a second", "%.0f")


def _title(which: str) -> str:
    name, _, size = which.partition("/")
    return f"{NAMES[name].removeprefix('statebackend, ')}, {size}"


def _rate(thousands: float) -> str:
    return f"{thousands * 1000:,.0f} rows/s" if thousands < 100 else f"{thousands:,.0f}k rows/s"


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
    plot(run, args.page.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
