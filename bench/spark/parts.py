"""Where a micro-batch of ours spends its time.

The parts are those of ``last_progress["durationMs"]``; `KERNELS` is what the function itself has counted of its part,
and the rest of what Spark reports for the micro-batch is Spark's.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

#: The counter in which the function sums up its calls of state, in microseconds.
KERNELS = "kernels_us"

LABELS = {
    "open": "check that the run is current",
    "plan": "read Spark's plan and make it durable",
    "read": "Spark reads the input and hands over Arrow",
    "hosts": "wait for a host for each range",
    "scatter": "tasks read, split and send the input",
    "run": "hosts run the function and write files",
    "staged": "take the staged rows",
    "sync": "make file names durable",
    "prepare": "null keys, joining chunks",
    "function": "the function",
    "kernels": "of which state calls",
    "snapshot": "state: view, copies of changes, counts",
    "output": "output: write and fsync, along with state",
    "state": "state: wait for the remaining files",
    "commit": "manifest",
    "verify": "check the output's checksum",
    "sink": "sink: Spark writes, or files are published",
    "Spark": "Spark: offsets, planning, commit log",
}


class Part(NamedTuple):
    """A part of the median batch, in milliseconds."""

    name: str
    ms: float
    #: Whether it is counted in the part before it.
    is_within: bool = False


def slowest_host(progress: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of each part at the host that took longest for it; medians of the batches."""
    names = dict.fromkeys(name for each in progress for host in each["hosts"] for name in host["durationMs"])
    return {
        name: statistics.median(
            max(host["durationMs"].get(name, 0.0) for host in each["hosts"]) for each in progress
        )
        for name in names
    }


def batch_parts(said: dict[str, Any], warmup: int) -> tuple[float, list[Part]]:
    """Milliseconds of the median batch after warm-up, and of its parts, each the median of its own."""
    whole = statistics.median(each["ms"] for each in said["batches"][warmup:])
    progress = said["parts"][warmup:]
    durations = [each["durationMs"] for each in progress]
    took = {
        name: statistics.median(each.get(name, 0.0) for each in durations)
        for name in durations[0]
        if name != "batch"
    }
    parts = []
    for name, ms in took.items():
        parts.append(Part(name, ms))
        counted = [each["customMetrics"].get(KERNELS) for each in said["parts"]]
        if name == "run":
            parts += [Part(part, ms, True) for part, ms in slowest_host(progress).items()]
        if name == "function" and None not in counted:
            # A counter goes on from batch to batch.
            gone = [now - before for before, now in zip([0, *counted], counted, strict=False)]
            parts.append(Part("kernels", statistics.median(gone[warmup:]) / 1000, True))
    return whole, [*parts, Part("Spark", whole - sum(took.values()))]
