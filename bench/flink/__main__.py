"""``python -m bench.flink``: measure the Flink peer and print a table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.flink.harness import BACKEND_OPS, MAP_OPS, TIMER_OPS, TTL_MODES, FlinkPeer
from bench.flink.jvm import Measurement, PeerFailed
from bench.flink.keys import random_keys
from bench.flink.provision import PeerUnavailable

_SUITES = {"map": MAP_OPS, "strings": MAP_OPS, "backend": BACKEND_OPS, "timers": TIMER_OPS, "snapshot": ()}


def main(argv: list[str] | None = None) -> int:
    """Run one suite; return 0, or 1 with a message if the peer is unavailable or failed."""
    options = _parser().parse_args(argv)
    peer = FlinkPeer(seed=options.seed, timeout=options.timeout)
    try:
        peer.prepare()
        measurements = [] if options.suite == "prepare" else _measure(peer, options)
    except PeerUnavailable as unavailable:
        print(f"the Flink peer is unavailable: {unavailable.reason}", file=sys.stderr)
        return 1
    except (PeerFailed, ValueError) as failure:
        print(failure, file=sys.stderr)
        return 1
    if measurements:
        print(table(measurements))
    if options.json:
        Path(options.json).write_text(json.dumps(measurements, indent=1) + "\n")
    return 0


def table(measurements: list[Measurement]) -> str:
    """Return measurements as text, a line for each, below a line on the JVM."""
    jvm = measurements[0]["jvm"]
    heap = jvm["heap_bytes"] / 2**30
    pages = "transparent huge pages" if measurements[0]["huge_pages"] else "default pages"
    lines = [
        f"Flink {jvm['flink_version']}, Java {jvm['java_version']}, heap {heap:.1f} GiB, {pages}, "
        f"{jvm['processors']} processors, load {jvm['load_average']}",
        f"{'operation':28}{'n':>10}{'groups':>8}  {'gc':8}  result",
    ]
    for one in measurements:
        name = one["name"] + ("" if one.get("ttl", "off") == "off" else f" ttl={one['ttl']}")
        lines.append(
            f"{name:28}{one['n']:>10}{one['key_groups']:>8}  {one['gc']:8}  {_result(one)}{_other(one)}"
        )
    return "\n".join(lines)


def _result(one: Measurement) -> str:
    if "quantiles_ns" in one:
        levels = ", ".join(f"{level} {_duration(value)}" for level, value in one["quantiles_ns"].items())
        return f"{levels} (a reading of the clock {_duration(one['clock_cost_ns'])})"
    if "bytes_per_entry" in one:
        return f"{one['bytes_per_entry']:.1f} bytes"
    spread = (
        f"{min(one['samples_ms']):.3g} to {max(one['samples_ms']):.3g} ms in {len(one['samples_ms'])} samples"
    )
    if one["operations"] > 1:
        return f"{one['median_mops']:8.2f} M/s  {one['median_ns_per_op']:8.1f} ns   {spread}"
    result = f"{one['median_ms']:.3g} ms   {spread}"
    if one.get("median_slowdown") is not None:
        result += (
            f"; {one['entries']} entries in {one['states']} states, written in"
            f" {one['median_write_ms']:.0f} ms, batches {one['median_slowdown']:.2f} x slower meanwhile"
        )
    return result


def _other(one: Measurement) -> str:
    other = one.get("other_gc", {})
    return (
        f"   ({other['gc']}: {_duration(other['median_ns_per_op'])})" if "median_ns_per_op" in other else ""
    )


def _duration(nanos: float) -> str:
    for unit, size in (("ms", 1e6), ("us", 1e3)):
        if nanos >= size:
            return f"{nanos / size:.3g} {unit}"
    return f"{nanos:.0f} ns"


def _measure(peer: FlinkPeer, options: argparse.Namespace) -> list[Measurement]:
    keys = random_keys(options.n, options.seed)
    shared = {
        "key_groups": options.key_groups,
        "samples": options.samples,
        "heap": options.heap,
        "gc": options.gc,
        "huge_pages": options.huge_pages,
        "settled": options.settled,
    }
    if options.warmup is not None:
        shared["warmup"] = options.warmup
    if options.suite == "snapshot":
        return peer.run_snapshot_pause(keys, options.states, **shared)
    ops = options.ops.split(",") if options.ops else list(_SUITES[options.suite])
    if options.suite == "backend":
        return peer.run_backend(ops, keys, ttl=options.ttl, **shared)
    run = {"map": peer.run_map, "strings": peer.run_strings, "timers": peer.run_timers}[options.suite]
    return run(ops, keys, **shared)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.flink", description=__doc__)
    parser.add_argument(
        "suite", choices=[*_SUITES, "prepare"], help="what to measure; prepare only downloads"
    )
    parser.add_argument("--ops", help="operations, separated by commas (default: all of the suite)")
    parser.add_argument("--n", type=int, default=500_000, help="keys (snapshot: keys per state)")
    parser.add_argument("--key-groups", type=int, default=128)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--warmup", type=int, help="rounds before the samples")
    parser.add_argument("--states", type=int, default=10, help="states of the snapshot suite")
    parser.add_argument("--ttl", choices=TTL_MODES, default="off", help="of the backend suite")
    parser.add_argument("--heap", default="8g")
    parser.add_argument("--gc", choices=["G1", "Parallel", "best"], default="best", help="best: of both")
    parser.add_argument("--settled", action="store_true", help="collect fully before each sample")
    parser.add_argument("--huge-pages", action="store_true", help="transparent huge pages for the heap")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds per JVM")
    parser.add_argument("--json", help="write the measurements to this file too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
