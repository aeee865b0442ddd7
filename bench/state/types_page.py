"""Renews the tables and the plot of the page by type from a run: ``python -m bench.state.types_page``.

Reads ``build/bench/types.json`` (``--run``), writes what the run measured into ``docs/performance/types.md``
(``--page``), between ``<!-- NAME -->`` and ``<!-- end NAME -->``, and draws ``types.svg`` beside it. Blocks of
figures that the run did not measure stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.common.plot import bars
from bench.state.kinds import KINDS
from bench.state.page import Row, ratio, rows_of, size, surroundings, with_block

_LABELS = {
    "value_update": "update of `{}`",
    "value_get": "get of `{}`",
    "key_update": "update under keys of `{}`",
    "map_put": "put under map keys of `{}`",
    "map_get": "get under map keys of `{}`",
}
_TIMERS = {
    "timer_register": "set the key and register",
    "timer_poll": "fire, in order",
    "timer_move": "set the key, delete and register later",
}


def one_by_one(rows: list[Row]) -> list[str]:
    """The table of what goes through a handle, against Flink and against our own bigint."""
    lines = [
        "| million operations a second | in Java | Flink | collector | statebackend | against Flink "
        "| our time against `bigint` | loop with `set_current_key` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    own = {_place(row): row for row in rows if row["peer_name"] == "bigint"}
    loops = {_place(row): row for row in rows if row["peer_name"] == "plain loop"}
    for row in rows:
        if row["peer_name"] != "Flink":
            continue
        against = own.get(_place(row))
        lines.append(
            f"| {_LABELS[row['operation']].format(row['type'])}{size(row, rows)} | {KINDS[row['type']].java} "
            f"| {_rate(row['peer'])} | {row['peer_details'].get('gc', '')} | {_rate(row['ours'])} "
            f"| {ratio(row)} | {ratio(against) if against else ''} | {_rate(1e3 / loops[_place(row)]['peer'])} |"
        )
    return lines


def in_batches(rows: list[Row]) -> list[str]:
    """The table of whole batches: a row for each type, a column for each operation."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    lines = [
        f"| nanoseconds a row | {' | '.join(f'`{_method(name)}`' for name in operations)} |",
        "|---|" + "---|" * len(operations),
    ]
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["type"], size(row, rows)), {})[row["operation"]] = row
    for (kind, keys), by_operation in found.items():
        cells = " | ".join(_nanos(by_operation.get(name)) for name in operations)
        lines.append(f"| `{kind}`{keys} | {cells} |")
    return lines


def keys(rows: list[Row]) -> list[str]:
    """The tables of P20: one by one, and in batches."""
    batches = [row for row in rows if row["operation"] == "key_add_many"]
    singles = [row for row in rows if row["operation"] != "key_add_many"]
    return [*one_by_one(singles), "", *in_batches(batches)]


def timers(rows: list[Row]) -> list[str]:
    """The table of P21."""
    lines = [
        "| million timers a second | Flink | collector | statebackend | against Flink |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {_TIMERS[row['operation']]}{size(row, rows)} | {_rate(row['peer'])} "
            f"| {row['peer_details'].get('gc', '')} | {_rate(row['ours'])} | {ratio(row)} |"
        )
    return lines


def memory(rows: list[Row]) -> list[str]:
    """The table of bytes."""
    lines = [
        "| bytes per entry | Flink | resident | in runs | of which in blobs |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        what = f"`{row['type']}`" if row["role"] == "value" else f"keys of `{row['type']}`"
        lines.append(
            f"| {what}{size(row, rows)} | {'' if row['peer'] is None else format(row['peer'], '.0f')} "
            f"| {row['ours']:.0f} | {row['run_bytes']:.0f} | {row['blob_bytes']:.0f} |"
        )
    return lines


_TABLES: dict[str, Callable[[list[Row]], list[str]]] = {
    "P18": one_by_one,
    "P19": in_batches,
    "P20": keys,
    "P21": timers,
    "memory-by-type": memory,
}


def renewed(page: str, run: Mapping[str, Any], plot_name: str) -> str:
    """The text of the page with the tables of this run."""
    for name, table in _TABLES.items():
        if rows := rows_of(run, name):
            measured_on = surroundings(run, rows, timed=name != "memory-by-type")
            page = with_block(page, name, "\n".join([measured_on, "", *table(rows)]))
    if rows_of(run, "P18"):
        page = with_block(page, "plot", f"![Million updates a second by type]({plot_name})")
    return page


def plot(run: Mapping[str, Any], out: Path) -> None:
    """Draw the rates of updates of P18, for the first number of keys."""
    n = run["arguments"]["n"][0]
    rows = {
        row["type"]: row
        for row in rows_of(run, "P18")
        if row["operation"] == "value_update" and row["peer_name"] == "Flink" and row["n"] == n
    }
    if not rows:
        return
    series = {
        "Flink": [row["peer"] for row in rows.values()],
        "statebackend": [row["ours"] for row in rows.values()],
    }
    series = {who: rates for who, rates in series.items() if any(rates)}
    bars(out, [_broken(name) for name in rows], series, f"million updates a second, {n:,} keys", "%.1f")


def _place(row: Row) -> tuple[str, str, int]:
    return row["operation"], row["type"], row["n"]


def _method(operation: str) -> str:
    return operation.removeprefix("key_")


def _rate(mops: float | None) -> str:
    # Some take microseconds: a digit more than on the page of the state API.
    return "" if mops is None else f"{mops:.2f}"


def _nanos(row: Row | None) -> str:
    return "" if row is None else f"{row['ours']:,.0f}"


def _broken(name: str) -> str:
    """The name of a type over several lines: that of the outer one, then each field's."""
    return name.rstrip(">").replace("<", "\n").replace(",b", ",\nb")


def main(argv: list[str] | None = None) -> int:
    """Renew the page and the plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.state.types_page", description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("build/bench/types.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/performance/types.md"))
    args = parser.parse_args(argv)
    run = json.loads(args.run.read_text())
    drawing = args.page.with_suffix(".svg")
    text = renewed(args.page.read_text(encoding="utf-8"), run, drawing.name)
    args.page.write_text(text, encoding="utf-8")
    plot(run, drawing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
