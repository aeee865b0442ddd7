"""Measures the scalar state API, Flink's heap backend and a dict in one run: ``python -m bench.state``.

Figures: ``P1`` values and sums, ``collections`` maps and lists, ``P8`` read-modify-write beside a dict, ``P2``
values with TTL; without names all of these. Contenders, each in a separate process, take turns round by round. Prints
a table and writes ``build/bench/state.json``, from which ``python -m bench.state.page`` renews the page. Nothing else
should run on the machine meanwhile.

By type, in a run without the figures above: ``types`` (``P18`` values, ``P19`` values in batches, ``P20`` keys),
``timers`` (``P21``) and ``memory-by-type``. It writes ``build/bench/types.json``, from which ``python -m
bench.state.types_page`` renews its page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import statebackend as sb
from bench.common.report import Report
from bench.flink import FlinkPeer, random_keys
from bench.state.by_type import PARTS, ByType
from bench.state.kinds import KINDS
from bench.state.lockstep import Contender, Rounds, Timing, make_local, take_turns
from bench.state.processes import OwnProcess
from bench.state.sides import OURS, Sides

FIGURES = ("P1", "P8", "collections", "P2")
#: What each operation has to reach of Flink's rate.
P1_TARGETS = {"value_update": 1.1, "value_get": 1.1, "value_rmw": 1.5, "reducing_add": 1.5, "value_add": 0.8}
COLLECTION_TARGETS = {
    "map_get": 1.0,
    "map_update": 1.0,
    "map_iterate": 1.0,
    "list_append": 1.0,
    "list_get": 1.0,
}
P2_TARGETS = {"default": 4.0, "no_cleanup": 2.0}
P2_OPERATIONS = ("value_update", "value_get")
TTL_AGAINST_WITHOUT = 1.3
P8_TARGETS = {"random": 2.0, "cached": 0.6}
DICT = "dict"
#: Ours with `set_current_key` for each key instead of `each`.
PLAIN = "plain loop"


class Bench(Sides):
    """The contenders of P1, P2, P8 and the collections, and their rows."""

    def __init__(self, args: argparse.Namespace, flink: FlinkPeer | None, report: Report) -> None:
        super().__init__(args, flink, report)
        self._read_modify_write: dict[int, dict[str, Timing]] = {}

    def run(
        self, operation: str, rounds: Rounds, peers: Iterable[str], ttls: Iterable[str] = ("off",)
    ) -> dict[str, Timing]:
        """Let ours (once for each way to have TTL), a dict and Flink take turns at one operation."""
        ttls = tuple(ttls)
        with ExitStack() as stack:
            contenders: dict[str, Contender] = {}
            if "Flink" in peers:
                contenders |= self.flink_sides(stack, operation, rounds, ttl=ttls[-1])
            for ttl in ttls:
                ours = OwnProcess(
                    make_local, operation, self.args.backend, rounds, self.args.max_parallelism, ttl
                )
                contenders[f"{OURS} {ttl}"] = stack.enter_context(ours)
            if PLAIN in peers:
                plain = OwnProcess(
                    make_local, operation, self.args.backend, rounds, self.args.max_parallelism, "off", PLAIN
                )
                contenders[PLAIN] = stack.enter_context(plain)
            if DICT in peers and not self.args.no_dict:
                contenders[DICT] = stack.enter_context(OwnProcess(make_local, operation, DICT, rounds))
            return self.best_collector(take_turns(operation, contenders, rounds))

    def row(
        self,
        figure: str,
        what: str,
        operation: str,
        n: int,
        timings: Mapping[str, Timing],
        peer: str,
        target: float | None,
        ttl: str = "off",
    ) -> None:
        """A row of million operations a second, ours and a peer's."""
        ours, theirs = timings[f"{OURS} {ttl}"], timings.get(peer)
        self.report.row(
            figure,
            what,
            ours.mops,
            "M ops/s",
            theirs.mops if theirs else None,
            peer_name=peer,
            target=target,
            operation=operation,
            n=n,
            ttl=ttl,
            ours_ns=ours.ns_per_operation,
            ours_samples_ns=[nanos / ours.operations for nanos in ours.nanos],
            peer_samples_ns=[nanos / theirs.operations for nanos in theirs.nanos] if theirs else [],
            peer_details=theirs.details if theirs else {},
        )

    def against_flink(self, figure: str, targets: Mapping[str, float], n: int) -> None:
        """P1 and collections; the dict beside them has no target but in P8."""
        for operation, target in targets.items():
            timings = self.run(operation, self.rounds(n), ("Flink", DICT, PLAIN))
            if operation == "value_rmw":
                self._read_modify_write[n] = timings
            what = f"{operation}, {n:,} keys"
            self.row(figure, what, operation, n, timings, "Flink", target)
            self.row(figure, what, operation, n, timings, DICT, None)
            self.row(figure, what, operation, n, timings, PLAIN, None)

    def against_dict(self, n: int) -> None:
        """P8: all keys in random order, and few keys again and again."""
        operation = "value_rmw"
        timings = self._read_modify_write.get(n) or self.run(operation, self.rounds(n), (DICT,))
        self.row("P8", f"{operation}, {n:,} keys", operation, n, timings, DICT, P8_TARGETS["random"])
        few = self.args.cached_n
        rounds = replace(self.rounds(n), keys=random_keys(few, self.args.seed), passes=max(1, n // few))
        timings = self.run(operation, rounds, (DICT,))
        self.row(
            "P8", f"{operation}, {few:,} keys, in cache", operation, few, timings, DICT, P8_TARGETS["cached"]
        )

    def with_ttl(self, n: int) -> None:
        """P2: values with TTL against Flink's with TTL, and against ours without."""
        for ttl, target in P2_TARGETS.items():
            for operation in P2_OPERATIONS:
                timings = self.run(operation, self.rounds(n), ("Flink",), ("off", ttl))
                what = f"{operation}, TTL {ttl}, {n:,} keys"
                self.row("P2", what, operation, n, timings, "Flink", target, ttl)
                with_ttl, without = timings[f"{OURS} {ttl}"], timings[f"{OURS} off"]
                self.report.row(
                    "P2",
                    f"{what}: our time",
                    with_ttl.ns_per_operation,
                    "ns",
                    without.ns_per_operation,
                    peer_name="without TTL",
                    target=TTL_AGAINST_WITHOUT,
                    at_most=True,
                    operation=operation,
                    n=n,
                    ttl=ttl,
                )

    def measure(self, wanted: Collection[str], n: int) -> None:
        """All rows of the figures that are wanted, with so many keys."""
        if "P1" in wanted:
            self.against_flink("P1", P1_TARGETS, n)
        if "P8" in wanted:
            self.against_dict(n)
        if "collections" in wanted:
            self.against_flink("collections", COLLECTION_TARGETS, n)
        if "P2" in wanted:
            self.with_ttl(n)


def parser() -> argparse.ArgumentParser:
    """The arguments, with the settings of the figures for defaults."""
    made = argparse.ArgumentParser(prog="python -m bench.state", description=__doc__)
    made.add_argument("figures", nargs="*", metavar="figure", help=f"of {', '.join((*FIGURES, *PARTS))}")
    made.add_argument("--n", type=int, nargs="+", default=[500_000], help="keys")
    made.add_argument("--cached-n", type=int, default=10_000, help="keys of P8 in cache")
    made.add_argument("--samples", type=int, default=7)
    made.add_argument("--warmup", type=int, help="rounds before the samples (default: four million rows)")
    made.add_argument("--backend", default="heap", help="any registered backend")
    made.add_argument("--max-parallelism", type=int, default=128, help="key groups, on both sides")
    made.add_argument("--no-flink", action="store_true")
    made.add_argument("--no-dict", action="store_true")
    made.add_argument(
        "--scattered", action="store_true", help="key objects lie in memory in no order; without Flink"
    )
    made.add_argument("--heap", default="4g", help="-Xms and -Xmx of each JVM; there are two with --gc best")
    made.add_argument("--gc", choices=["G1", "Parallel", "best"], default="best", help="best: of both")
    made.add_argument("--huge-pages", action="store_true", help="transparent huge pages for the JVM's heap")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument(
        "--types",
        nargs="+",
        metavar="type",
        choices=list(KINDS),
        default=list(KINDS),
        help="of types and memory",
    )
    made.add_argument("--out", type=Path, help="default: build/bench/state.json, or types.json")
    return made


def main(argv: list[str] | None = None) -> int:
    """Measure; 0, or 1 where a peer or a backend cannot be used."""
    args = parser().parse_args(argv)
    wanted = set(args.figures or FIGURES)
    if unknown := wanted - {*FIGURES, *PARTS}:
        there_are = ", ".join((*FIGURES, *PARTS))
        parser().error(f"no such figure: {', '.join(sorted(unknown))}; there are {there_are}")
    by_type = not wanted.isdisjoint(PARTS)
    if by_type and not wanted.isdisjoint(FIGURES):
        parser().error(f"{', '.join(PARTS)} are measured in a run of their own")
    if by_type and args.scattered:
        parser().error("keys of other types cannot be scattered")
    try:
        sb.create_backend(args.backend)
    except sb.BackendUnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    flink = None
    if not args.no_flink and not args.scattered:
        flink = FlinkPeer(seed=args.seed)
        there, reason = flink.available()
        if not there:
            print(f"without Flink: {reason}")
            flink = None
    report = Report()
    bench: Sides = (ByType if by_type else Bench)(args, flink, report)
    for n in args.n:
        bench.measure(wanted, n)
    args.out = str(args.out or f"build/bench/{'types' if by_type else 'state'}.json")
    report.write(Path(args.out), args, versions={"statebackend": sb.__version__}, jvm=bench.jvm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
