"""What all comparisons of this folder share: the rounds, the collectors of the JVM, the report."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

from bench.common.report import Report
from bench.flink import FlinkPeer, random_keys
from bench.state.lockstep import Contender, Flink, Rounds, Timing

#: Enough rows for the last tier of the JVM's compiler, and at least two rounds.
WARMUP_ROWS = 4_000_000
OURS = "statebackend"


class Sides(ABC):
    """The contenders that the arguments allow, and the rows of their figures."""

    def __init__(self, args: argparse.Namespace, flink: FlinkPeer | None, report: Report) -> None:
        self.args, self.flink, self.report = args, flink, report
        #: What the last JVM was.
        self.jvm: dict[str, Any] = {}

    @abstractmethod
    def measure(self, wanted: Collection[str], n: int) -> None:
        """All rows of the figures that are wanted, with so many keys."""

    def rounds(self, n: int) -> Rounds:
        """All keys once a round."""
        warmup = self.args.warmup
        if warmup is None:
            warmup = min(50, max(2, -(-WARMUP_ROWS // n)))
        keys = random_keys(n, self.args.seed)
        return Rounds(keys, warmup, self.args.samples, self.args.seed, scattered=self.args.scattered)

    def flink_sides(
        self, stack: ExitStack, operation: str, rounds: Rounds, **more: Any
    ) -> dict[str, Contender]:
        """Flink with each collector, in JVMs that the stack ends; none where Flink is not there."""
        sides: dict[str, Contender] = {}
        if self.flink is None:
            return sides
        for collector in self.collectors():
            session = self.flink.session(
                operation,
                rounds.keys,
                key_groups=self.args.max_parallelism,
                samples=rounds.samples,
                heap=self.args.heap,
                gc=collector,
                warmup=rounds.warmup,
                huge_pages=self.args.huge_pages,
                **more,
            )
            sides[f"Flink {collector}"] = Flink(stack.enter_context(session))
        return sides

    def collectors(self) -> tuple[str, ...]:
        """The collectors that Flink is measured with."""
        return ("G1", "Parallel") if self.args.gc == "best" else (self.args.gc,)

    def best_collector(self, timings: Mapping[str, Timing]) -> dict[str, Timing]:
        """The timings, of Flink's only the better one, named Flink."""
        result = {who: timing for who, timing in timings.items() if not who.startswith("Flink")}
        flink = sorted(
            (timing for who, timing in timings.items() if who.startswith("Flink")),
            key=lambda timing: timing.ns_per_operation,
        )
        if flink:
            self.jvm = flink[0].details.pop("jvm")
            for other in flink[1:]:
                flink[0].details["other_gc"] = {"gc": other.details["gc"], "mops": other.mops}
            result["Flink"] = flink[0]
        return result
