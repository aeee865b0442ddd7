"""Measures checkpoints: ``python -m bench.checkpoint P5 P10 P11 P23 slow-down operator many retained reads``.

Without names it measures all. It prints a table and writes ``build/bench/checkpoint.json``. Nothing else should run on
the machine meanwhile. ``--n`` entries, ``--folder`` on the disk that is to be measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.checkpoint import amplification, costs, many, operator_lists, reads
from bench.common.report import Report

CHANGED = (1000, 10_000, 100_000, 1_000_000)


def p5(report: Report, args: argparse.Namespace) -> None:
    for groups in (128, 1024):
        taken = costs.pause(args.n, 10, groups, args.samples, args.folder)
        report.row(
            "P5", f"pause of snapshot(), 10 states, {args.n:,} entries, {groups} key groups", taken, "ms"
        )


def p10(report: Report, args: argparse.Namespace) -> None:
    report.row("P10", "fsync of 4 KB", costs.fsync_ms(args.folder), "ms")
    changed = [count for count in CHANGED if 2 * count <= args.n]
    for count, taken in costs.incremental(args.n, changed, args.samples, args.folder).items():
        allowed = 20 + 0.3e-3 * count
        report.row("P10", f"delta of {count:,} changes, snapshot() returns", taken["pause"], "ms")
        report.row(
            "P10", f"delta of {count:,} changes, committed; at most {allowed:.0f} ms", taken["total"], "ms"
        )


def p11(report: Report, args: argparse.Namespace) -> None:
    for layout, asked in (("inline", 8), ("struct", 2)):
        taken = costs.full(args.n, args.samples, args.folder, layout)
        what = f"{args.n:,} entries of LONG to {costs.LAYOUTS[layout]}"
        for figure, name in (("write", "full checkpoint, committed"), ("restore", "its restore")):
            report.row("P11", f"{name}, {what}; at least {asked}", taken[figure], "M entries/s")
        report.row("P11", "its size", taken["bytes"], "bytes/entry")
        report.row("P11", "memory at the peak of a restore; at most 1.15", taken["peak"], "x afterwards")


def p23(report: Report, args: argparse.Namespace) -> None:
    found = {
        "1,000,000": amplification.measured(1_000_000, args.batches, 100, args.folder),
        "1,000,000, simulated": amplification.simulated(1_000_000, args.batches, 100),
        "100,000,000, simulated": amplification.simulated(100_000_000, args.batches, 100),
    }
    for n, written in found.items():
        what = f"{args.batches:,} batches of 100 changes, {n} entries"
        for kind, name in (
            ("delta", "deltas"),
            ("merged", "merged deltas"),
            ("manifest", "manifests"),
            ("base", "bases"),
        ):
            report.row("P23", f"{name}, {what}", written[kind], "x 16 bytes a change")
        total = sum(written[kind] for kind in ("delta", "merged", "manifest"))
        report.row("P23", f"all but bases, {what}; at most 12", total, "x 16 bytes a change")
        report.row("P23", f"most files at a time, {what}", written["files"], "files")
        if "first" in written:
            report.row("flat", f"snapshot and commit, the first tenth of {what}", written["first"], "ms")
            report.row("flat", "the same, the last tenth", written["last"], "ms")
            report.row(
                "flat",
                "memory after the last batch, more than after the first tenth",
                written["memory"],
                "MB",
            )


def operator(report: Report, args: argparse.Namespace) -> None:
    n = min(args.n, 1_000_000)
    for layout, kind in operator_lists.KINDS.items():
        taken = operator_lists.union_list(n, layout, args.samples, args.folder)
        what = f"union list, {n:,} elements of {kind}"
        report.row("operator", f"snapshot of a {what}, committed", taken["write"], "M elements/s")
        report.row("operator", f"restore of a {what}", taken["restore"], "M elements/s")


def slow_down(report: Report, args: argparse.Namespace) -> None:
    for layout in ("inline", "arena", "object"):
        n = args.n if layout != "object" else args.n // 10
        taken = costs.slow_down(n, layout, max(1, args.samples // 3), args.folder)
        what = f"{layout}, {n:,} entries"
        report.row("slow-down", f"update of a row, {what}", taken["alone"], "ns")
        report.row("slow-down", f"the same while a full checkpoint is written, {what}", taken["beside"], "ns")
        report.row("slow-down", f"longest batch meanwhile, {what}", taken["worst"], "ms")
        report.row("slow-down", f"time to write it, {what}", taken["writing"], "s")


def many_of(report: Report, args: argparse.Namespace) -> None:
    for count, allowed in ((2_000, 20), (10_000, 40)):
        taken = many.states(count, args.samples, args.folder)
        of = f"{count:,} value states"
        report.row("many", f"batch that changes one of {of}; at most {allowed}", taken["one"], "ms")
        report.row("many", f"its time of the processor, {of}", taken["processor"], "ms")
        report.row("many", f"base of {of} with a row each; at most 100", taken["base"], "us/state")
    n = min(args.n, 1_000_000)
    for kind in many.KINDS:
        restored = many.namespaces(n, kind, args.samples, args.folder)
        report.row("many", f"restore of {n:,} namespaces of a {kind} state; at least 1", restored, "M/s")


def retained(report: Report, args: argparse.Namespace) -> None:
    n = min(args.n, 4_000_000)
    for share in (0.001, 0.1, 1):
        taken = amplification.space(n, 150, int(n * share), args.folder)
        what = f"{n:,} entries, 150 batches of {share:.1%} of the keys"
        report.row("retained", f"the state, {what}", taken["state"], "MB")
        report.row("retained", "its store with retain='auto', at most", taken["disk"], "MB")
        report.row("retained", "checkpoints kept after the last batch", taken["kept"], "checkpoints")


def reads_of(report: Report, args: argparse.Namespace) -> None:
    taken = reads.reads(args.n, args.samples, args.folder)
    what = f"{args.n:,} entries of LONG"
    report.row("reads", f"one key of a closed store, {what}; at most 60", taken["one"], "ms")
    report.row("reads", f"100 random keys, {what}; at most 1500", taken["hundred"], "ms")
    report.row("reads", f"a key of a live view, of 100,000, {what}; at most 5", taken["live"], "us")
    report.row("reads", f"scan of the store, {what}; at least 5", taken["scan"], "M entries/s")
    report.row("reads", f"memory of a scan, {what}; at most 200", taken["memory"], "MB")


FIGURES = {
    "P5": p5,
    "P10": p10,
    "P11": p11,
    "P23": p23,
    "slow-down": slow_down,
    "operator": operator,
    "many": many_of,
    "retained": retained,
    "reads": reads_of,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint")
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], help="default: all")
    parser.add_argument("--n", type=int, default=10_000_000, help="entries")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--batches", type=int, default=10_000, help="of P23")
    parser.add_argument(
        "--folder", default=None, help="where the store lies; default: the system's for temporary files"
    )
    args = parser.parse_args()
    report = Report()
    for name in args.figures or FIGURES:
        FIGURES[name](report, args)
    report.write(Path("build/bench/checkpoint.json"), args)


if __name__ == "__main__":
    main()
