"""Measures vectorised calls beside the scalar ones that do the same: ``python -m bench.rocksdb.vectorised``.

Each operation goes over all keys in random order, once by scalar calls, the current key set before each, and once by
one call for the whole column. Both work below a mark, as jobs do, on state that the batches before have written into
the database; the mark is opened and released outside the clock. Keys and values are objects for the scalar calls, and
Arrow columns for the vectorised ones, made outside the clock. What is there afterwards is compared, and so is what was
read. Nothing else should run on the machine meanwhile. Writes ``build/bench/rocksdb-vectorised.json``, from which
``python -m bench.rocksdb.page`` renews docs/performance/rocksdb.md.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import statebackend as sb
from bench.common.report import Report

FIGURE, TARGET = "vectorised", 2.0


class Larger:
    """A user's function: a reduction without a name."""

    def __call__(self, old: int, new: int) -> int:
        return old if old > new else new


class Operation(NamedTuple):
    """A scalar call and the vectorised one that does the same; what both are given beside the key."""

    kind: str
    scalar: str
    vectorised: str
    #: Which of map key and value they take.
    takes: tuple[str, ...]
    #: True if they return something, which is compared.
    reads: bool


OPERATIONS = (
    Operation("value", "update", "update_many", ("value",), False),
    Operation("value", "value", "get_many", (), True),
    Operation("value", "exists", "exists_many", (), True),
    Operation("value", "clear", "clear_many", (), False),
    Operation("list", "add", "add_many", ("value",), False),
    Operation("list", "get", "get_many", (), True),
    Operation("map", "put", "put_many", ("map key", "value"), False),
    Operation("map", "get", "get_many", ("map key",), True),
    Operation("map", "remove", "remove_many", ("map key",), False),
    Operation("map", "exists", "exists_many", (), True),
    Operation("reducing, sum", "add", "add_many", ("value",), False),
    Operation("reducing, sum", "get", "get_many", (), True),
    Operation("reducing, a function", "add", "add_many", ("value",), False),
    Operation("aggregating, avg", "add", "add_many", ("value",), False),
    Operation("aggregating, avg", "get", "get_many", (), True),
)
DESCRIPTORS: dict[str, Callable[[], Any]] = {
    "value": lambda: sb.ValueStateDescriptor("state", "bigint"),
    "list": lambda: sb.ListStateDescriptor("state", "bigint"),
    "map": lambda: sb.MapStateDescriptor("state", "bigint", "bigint"),
    "reducing, sum": lambda: sb.ReducingStateDescriptor("state", "sum", "bigint"),
    "reducing, a function": lambda: sb.ReducingStateDescriptor("state", Larger(), "bigint"),
    "aggregating, avg": lambda: sb.AggregatingStateDescriptor("state", "avg", "bigint"),
}


class Side:
    """A backend of its own with one state, which all keys have."""

    def __init__(self, backend: str, kind: str, keys: int) -> None:
        self.keyed: Any = sb.create_backend(backend).create_keyed_backend("bigint")
        self.state = self.keyed.get_state(DESCRIPTORS[kind]())
        self.kind, self.keys = kind, keys
        self.fill(np.arange(keys, dtype=np.int64) << 20)

    def fill(self, keys: Any) -> None:
        """Let all keys have a value."""
        values = keys % 1000
        if self.kind == "map":
            self.state.put_many(keys, keys, values)
        else:
            (self.state.update_many if self.kind == "value" else self.state.add_many)(keys, values)

    def scalar(self, operation: Operation, rows: list[tuple[int, ...]]) -> tuple[float, list[Any]]:
        """The seconds of one call for each row, and what they returned."""
        set_key, call = self.keyed.set_current_key, getattr(self.state, operation.scalar)
        mark = self.keyed.mark()
        began = time.perf_counter()
        if not operation.takes:
            found = [call() for key, *_ in rows if set_key(key) is None]
        elif len(operation.takes) == 1:
            found = [call(given) for key, given in rows if set_key(key) is None]
        else:
            found = [call(given, other) for key, given, other in rows if set_key(key) is None]
        took = time.perf_counter() - began
        self.keyed.release(mark)
        return took, [list(each) if self.kind == "list" and each is not None else each for each in found]

    def vectorised(self, operation: Operation, columns: list[pa.Array]) -> tuple[float, list[Any]]:
        """The seconds of one call for all rows, and what it returned."""
        call = getattr(self.state, operation.vectorised)
        mark = self.keyed.mark()
        began = time.perf_counter()
        found = call(*columns)
        took = time.perf_counter() - began
        self.keyed.release(mark)
        return took, [] if found is None else found.to_pylist()

    def contents(self, keys: Any) -> list[Any]:
        """What is there for all keys."""
        found = self.state.get_many(keys, keys) if self.kind == "map" else self.state.get_many(keys)
        return found.to_pylist()


def sample(sides: tuple[Side, Side], operation: Operation, seed: int, number: int) -> tuple[float, float]:
    """The nanoseconds of a row, of both sides."""
    keys = np.random.default_rng((seed, number)).permutation(sides[0].keys).astype(np.int64) << 20
    given = {"map key": keys, "value": keys % 1000 + number}
    columns = [keys, *(given[name] for name in operation.takes)]
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    gc.collect()
    gc.disable()
    try:
        slow, was_read = sides[0].scalar(operation, rows)
        fast, is_read = sides[1].vectorised(operation, [pa.array(column) for column in columns])
    finally:
        gc.enable()
    if (operation.reads and was_read != is_read) or sides[0].contents(keys) != sides[1].contents(keys):
        raise AssertionError(f"{operation.vectorised} does not do what {operation.scalar} does")
    if operation.scalar in ("clear", "remove"):
        for side in sides:
            side.fill(keys)
    return slow / len(keys) * 1e9, fast / len(keys) * 1e9


def measure(args: argparse.Namespace, report: Report) -> None:
    for operation in OPERATIONS:
        sides = tuple(Side(args.backend, operation.kind, args.keys) for _ in range(2))
        runs = [sample(sides, operation, args.seed, number) for number in range(args.warmup + args.samples)]  # type: ignore[arg-type]
        scalar, vectorised = zip(*runs[args.warmup :], strict=True)
        report.row(
            FIGURE,
            f"{operation.kind}: {operation.vectorised}",
            statistics.median(vectorised),
            "ns a row",
            statistics.median(scalar),
            bigger_is_better=False,
            peer_name=operation.scalar,
            target=TARGET,
            kind=operation.kind,
            samples_ns=vectorised,
            peer_samples_ns=scalar,
        )
        for side in sides:
            side.keyed.close()


def parsed(argv: list[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m bench.rocksdb.vectorised", description=__doc__)
    made.add_argument("--backend", default="rocksdb")
    made.add_argument("--keys", type=int, default=200_000)
    made.add_argument("--warmup", type=int, default=1)
    made.add_argument("--samples", type=int, default=5)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--out", type=Path, default=Path("build/bench/rocksdb-vectorised.json"))
    return made.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure; 0."""
    args = parsed(argv)
    report = Report()
    measure(args, report)
    library = sb.available_backends()["rocksdb"].library or {}
    versions = {"statebackend": sb.__version__, "rocksdb": library.get("version")}
    out, args.out = args.out, str(args.out)
    report.write(out, args, versions=versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
