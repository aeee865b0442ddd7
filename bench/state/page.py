"""Renews the tables and the plot of the page from a run: ``python -m bench.state.page``.

Reads ``build/bench/state.json`` (``--run``), writes what the run measured into ``docs/performance/state.md``
(``--page``), between ``<!-- NAME -->`` and ``<!-- end NAME -->``, and draws ``state.svg`` beside it. Blocks of
figures that the run did not measure stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.common.plot import bars
from bench.state.operations import OPERATIONS

Row = dict[str, Any]

_LABELS = {
    "value_update": "value: update",
    "value_get": "value: get",
    "value_rmw": "value: read, add one, write",
    "value_add": "value: first update of a key",
    "reducing_add": "sum: add",
    "map_get": "map: get",
    "map_update": "map: put",
    "map_iterate": "map: entry iterated",
    "list_append": "list: add",
    "list_get": "list: get and iterate",
}
_TTL_LABELS = {"default": "default cleanup", "no_cleanup": "no cleanup"}


def surroundings(run: Mapping[str, Any], rows: list[Row], timed: bool = True) -> str:
    """The machine, the versions and the settings of these figures, and the rounds of those that are times."""
    machine, args, jvm = run["machine"], run["arguments"], run.get("jvm") or {}
    warmup = args["warmup"]
    parts = [
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, "
        f"statebackend {run['versions']['statebackend']} (backend `{args['backend']}`), "
        f"{args['max_parallelism']} key groups"
    ]
    if len(args["n"]) == 1:
        parts[0] += f", {args['n'][0]:,} keys"
    if timed:
        parts[0] += f", medians of {args['samples']} rounds"
        if warmup is not None:
            parts[0] += f" after {warmup} of warm-up"
    if jvm and _of_peer(rows, "Flink"):
        parts.append(
            f"Flink {jvm['flink_version']}, Java {jvm['java_version']}, `-Xms` = `-Xmx` = {args['heap']}"
            + ((", huge pages" if args["huge_pages"] else ", no huge pages") if timed else "")
        )
    return ". ".join(parts) + "."


def against_peers(rows: list[Row]) -> list[str]:
    """The table of P1 and of the collections."""
    lines = [
        "| million operations a second | Flink | collector | dict | statebackend | against Flink "
        "| loop with `set_current_key` |",
        "|---|---|---|---|---|---|---|",
    ]
    peers = (_of_peer(rows, name) for name in ("Flink", "dict", "plain loop"))
    for flink, plain, loop in zip(*peers, strict=True):
        collector = flink["peer_details"].get("gc", "")
        lines.append(
            f"| {_LABELS[flink['operation']]}{size(flink, rows)} | {rate(flink['peer'])} | {collector} "
            f"| {rate(plain['peer'])} | {rate(flink['ours'])} | {ratio(flink)} | {rate(loop['peer'])} |"
        )
    return lines


def against_dict(rows: list[Row]) -> list[str]:
    """The table of P8."""
    lines = [
        "| million read-modify-writes a second | dict | statebackend | against the dict |",
        "|---|---|---|---|",
    ]
    for row in rows:
        where = "in cache" if row["what"].endswith("in cache") else "random order"
        lines.append(
            f"| {row['n']:,} keys, {where} | {rate(row['peer'])} | {rate(row['ours'])} | {ratio(row)} |"
        )
    return lines


def with_ttl(rows: list[Row]) -> list[str]:
    """The table of P2."""
    lines = [
        "| million operations a second, with TTL | Flink | statebackend | against Flink "
        "| our time with TTL against without |",
        "|---|---|---|---|---|",
    ]
    for flink, own in zip(_of_peer(rows, "Flink"), _of_peer(rows, "without TTL"), strict=True):
        label = f"{_LABELS[flink['operation']]}, {_TTL_LABELS[flink['ttl']]}{size(flink, rows)}"
        lines.append(
            f"| {label} | {rate(flink['peer'])} | {rate(flink['ours'])} | {ratio(flink)} | {ratio(own)} |"
        )
    return lines


_TABLES: dict[str, Callable[[list[Row]], list[str]]] = {
    "P1": against_peers,
    "collections": against_peers,
    "P8": against_dict,
    "P2": with_ttl,
}


def renewed(page: str, run: Mapping[str, Any]) -> str:
    """The text of the page with the tables of this run."""
    for name, table in _TABLES.items():
        if rows := rows_of(run, name):
            page = with_block(page, name, "\n".join([surroundings(run, rows), "", *table(rows)]))
    return page


def rows_of(run: Mapping[str, Any], figure: str) -> list[Row]:
    """What the run measured of a figure."""
    return [row for row in run["rows"] if row["figure"] == figure]


def with_block(page: str, name: str, text: str) -> str:
    """The page with another text between ``<!-- NAME -->`` and ``<!-- end NAME -->``.

    >>> with_block("<!-- P1 -->\\nold\\n<!-- end P1 -->", "P1", "new")
    '<!-- P1 -->\\n\\nnew\\n\\n<!-- end P1 -->'
    """
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.S)
    if not block.search(page):
        raise ValueError(f"the page has no block {name}")
    return block.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def plot(run: Mapping[str, Any], out: Path) -> None:
    """Draw the rates of P1 and the collections, for the first number of keys."""
    n = run["arguments"]["n"][0]
    rows = [row for row in run["rows"] if row["figure"] in ("P1", "collections") and row["n"] == n]
    names = [name for name in OPERATIONS if any(row["operation"] == name for row in rows)]
    if not names:
        return
    by_peer = {
        peer: {row["operation"]: row for row in _of_peer(rows, peer) if row["peer"] is not None}
        for peer in ("Flink", "dict")
    }
    ours = {row["operation"]: row["ours"] for row in rows}
    series = {
        peer: [found[name]["peer"] if name in found else None for name in names]
        for peer, found in by_peer.items()
    }
    series = {peer: values for peer, values in series.items() if any(values)}
    series["statebackend"] = [ours[name] for name in names]
    labels = [name.replace("_", "\n") for name in names]
    bars(out, labels, series, f"million operations a second, {n:,} keys", "%.1f")


def _of_peer(rows: list[Row], peer: str) -> list[Row]:
    return [row for row in rows if row["peer_name"] == peer]


def rate(mops: float | None) -> str:
    """Millions a second, as a cell."""
    return "" if mops is None else f"{mops:.1f}"


def ratio(row: Row) -> str:
    """Against the peer, as a cell."""
    return "" if row["ratio"] is None else f"{row['ratio']:.2f} ×"


def size(row: Row, rows: list[Row]) -> str:
    """The number of keys, as the end of a label; empty if all rows of the table have the same."""
    return f", {row['n']:,} keys" if len({each["n"] for each in rows}) > 1 else ""


def main(argv: list[str] | None = None) -> int:
    """Renew the page and the plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.state.page", description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("build/bench/state.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/performance/state.md"))
    args = parser.parse_args(argv)
    run = json.loads(args.run.read_text())
    args.page.write_text(renewed(args.page.read_text(encoding="utf-8"), run), encoding="utf-8")
    plot(run, args.page.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
