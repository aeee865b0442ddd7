"""Measures figures of the core beside Flink's classes: ``python -m bench.core P3 P4 P9``, or all without names.

Prints a table and writes ``build/bench/core.json``. Nothing else should run on the machine meanwhile. Sizes
follow ``--n`` (entries), threads ``--threads``; ``--no-flink`` leaves the peer out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.common.report import Report
from bench.core import ours
from bench.flink import FlinkPeer
from bench.flink.keys import random_keys

OPERATIONS = ("add", "update", "get", "transform", "update_under_snapshot")


def flink_mops(
    flink: FlinkPeer | None, keys: Any, operations: Any, strings: bool, samples: int
) -> dict[str, float]:
    if flink is None:
        return {}
    run = flink.run_strings if strings else flink.run_map
    return {
        m["name"]: m["median_mops"]
        for m in run(operations, keys, samples=samples, heap="10g")
        if "median_mops" in m
    }


def compare_operations(
    report: Report, flink: FlinkPeer | None, args: argparse.Namespace, strings: bool
) -> None:
    for n in args.n:
        keys = random_keys(n)
        peer = flink_mops(flink, keys, OPERATIONS, strings, args.samples)
        for threads in args.threads:
            mine = ours.map_operations(keys, threads=threads, samples=args.samples, strings=strings)
            for name in OPERATIONS:
                figure = "P9" if strings else "P4" if name == "update_under_snapshot" else "P3"
                report.row(
                    figure, f"{name}, {n:,} keys, {threads} thread(s)", mine[name], "M rows/s", peer.get(name)
                )


def compare_batches(report: Report, args: argparse.Namespace) -> None:
    for n in args.n:
        keys = random_keys(n)
        for threads in args.threads:
            one, twenty = (
                ours.add_in_batches(keys, batches, threads=threads, samples=args.samples)
                for batches in (1, 20)
            )
            what = f"add in 20 batches, {n:,} keys, {threads} thread(s)"
            report.row("P3", what, twenty, "M rows/s")
            report.row("P3", "the same against one batch", twenty / one, "x")


def compare_ttl_and_nulls(report: Report, args: argparse.Namespace) -> None:
    for n in args.n:
        keys = random_keys(n)
        for threads in args.threads:
            mine = ours.with_ttl_and_nulls(keys, threads=threads, samples=args.samples)
            for name, speed in mine.items():
                report.row("P3", f"{name}, {n:,} keys, {threads} thread(s)", speed, "M rows/s")


def memory(report: Report, flink: FlinkPeer | None, args: argparse.Namespace) -> None:
    keys = random_keys(2_000_000)
    peer = None
    if flink is not None:
        peer = flink.run_map(["bytes_per_entry"], keys, samples=1)[0]["bytes_per_entry"]
    mine = ours.bytes_per_entry(keys)
    report.row("P6", "bytes per LONG->LONG entry, 2,000,000", mine["at_end"], "bytes", peer, False)
    report.row("P6", "the same, worst while growing", mine["worst_while_growing"], "bytes", peer, False)
    of_few = ours.bytes_after_many_rows_a_key(8_000_000, 100_000)
    report.row("P6", "in runs, after a first batch of 8,000,000 rows over 100,000 keys", of_few, "bytes")
    rest = ours.bytes_after_removal(keys, len(keys) // 1000)
    report.row("P6", "after 99.9 % were removed, against a table of what is left", rest, "x")


def growth(report: Report, flink: FlinkPeer | None, args: argparse.Namespace) -> None:
    ours.growth(10_000_000)  # the system's memory is warm afterwards
    peer = {}
    if flink is not None:
        peer = flink.run_map(["worst_put_cpu"], random_keys(10_000_000), samples=1)[0]["quantiles_ns"]
    mine = ours.growth(10_000_000)
    for name in ("p50", "p99", "p99_99", "p99_9999", "max", "clock"):
        report.row(
            "P7",
            f"thread CPU time of a put, growing to 10,000,000, {name}",
            mine[name] / 1e6,
            "ms",
            peer.get(name, 0) / 1e6,
            False,
        )


def hundred_million(report: Report, flink: FlinkPeer | None, args: argparse.Namespace) -> None:
    mine = ours.growth(100_000_000)
    for name in ("p50", "p99", "p99_99", "p99_9999", "max", "clock"):
        report.row(
            "100M", f"thread CPU time of a put, growing to 100,000,000, {name}", mine[name] / 1e6, "ms"
        )
    report.row("100M", "bytes per entry at the end", mine["bytes_per_entry"], "bytes")


def pause(report: Report, flink: FlinkPeer | None, args: argparse.Namespace) -> None:
    for key_groups in (128, 1024):
        peer = None
        if flink is not None:
            peer = flink.run_snapshot_pause(
                random_keys(1_000_000), 10, key_groups=key_groups, samples=args.samples
            )[0]["median_ms"]
        mine = ours.snapshot_pause(10_000_000, 10, key_groups, args.samples)
        report.row(
            "P5",
            f"pause of snapshot(), 10 states, 10,000,000, {key_groups} groups",
            mine["pause_ms"],
            "ms",
            peer,
            False,
        )
        for name in ("written", "read"):
            what = f"slow-down of batches while it is {name}, {mine[f'{name}_seconds']:.2f} s"
            report.row("P5", what, mine[f"{name}_slow_down"], "x")


def marks(report: Report, flink: FlinkPeer | None, args: argparse.Namespace) -> None:
    for rows in (10_000, 100_000):
        mine = ours.mark_cost(10_000_000, rows, 101)
        report.row(
            "P17",
            f"random updates of 10,000,000 entries, {rows:,} rows, no mark",
            mine["plain_ns_per_row"],
            "ns/row",
        )
        report.row("P17", "the same under an open mark", mine["marked_ns_per_row"], "ns/row")
        report.row("P17", "ratio", mine["ratio"], "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", default=[])
    parser.add_argument("--n", type=int, nargs="+", default=[500_000, 2_000_000, 10_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--no-flink", action="store_true")
    args = parser.parse_args()
    wanted = set(args.figures) or {"P3", "P5", "P6", "P7", "P9", "P17", "100M"}
    flink = None
    if not args.no_flink:
        flink = FlinkPeer()
        available, reason = flink.available()
        if not available:
            print(f"without Flink: {reason}")
            flink = None
    report = Report()
    if wanted & {"P3", "P4", "P16"}:
        compare_operations(report, flink, args, strings=False)
    if "P3" in wanted:
        compare_batches(report, args)
        compare_ttl_and_nulls(report, args)
    if "P9" in wanted:
        compare_operations(report, flink, args, strings=True)
    for name, run in (
        ("P5", pause),
        ("P6", memory),
        ("P7", growth),
        ("P17", marks),
        ("100M", hundred_million),
    ):
        if name in wanted:
            run(report, flink, args)
    report.write(Path("build/bench/core.json"), args)


if __name__ == "__main__":
    main()
