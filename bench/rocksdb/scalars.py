"""Measures scalar reads and writes beside `rocksdict` (P15): ``python -m bench.rocksdb.scalars``.

Both have RocksDB with the same settings, without a log, and hold the same bytes: the composite keys of
`statebackend`, and eight bytes for a value. ``update`` and ``get`` go over all keys in the same random order. Ours
sets the current key and calls the handle, outside marks and below one, as jobs do. `rocksdict` is measured twice: with
numbers, which have to be packed into bytes and taken out of them, and with keys and values that are bytes already.
Contenders, each in a process of its own, take turns. Nothing else should run on the machine meanwhile. `rocksdict` is
none of our dependencies: ``pip install rocksdict``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import struct
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import statebackend as sb
from bench.common.report import Report
from bench.state.processes import OwnProcess

FIGURE, TARGET = "P15", 1.5
OPERATIONS = ("update", "get")
OURS = {"ours": False, "ours, below a mark": True}
PEERS = {"rocksdict, numbers": False, "rocksdict, bytes": True}
SIGN = 1 << 63
_KEY, _VALUE = struct.Struct(">HQx"), struct.Struct("<q")


def shuffled(n: int, seed: int, number: int) -> list[int]:
    """The keys of a round, as objects of their own."""
    order = np.random.default_rng((seed, number)).permutation(n)
    return [int(key) << 20 for key in order]


def checksum(values: list[int]) -> int:
    return sum(values)


class Rounds:
    """A contender: rounds of one operation. Values are the keys, and the number of the round for updates."""

    def __init__(self, operation: str, n: int, seed: int) -> None:
        self.operation, self.n, self.seed = operation, n, seed
        self.open()
        for part in range(2):
            self.update(self.prepared(shuffled(n, seed, part), 0))

    def run_round(self, number: int) -> int:
        """The nanoseconds of a round; what it read, or wrote, is checked outside of them."""
        keys = shuffled(self.n, self.seed, number)
        rows = self.prepared(keys, number)
        gc.collect()
        gc.disable()
        try:
            began = time.perf_counter_ns()
            found = getattr(self, self.operation)(rows)
            took = time.perf_counter_ns() - began
        finally:
            gc.enable()
        if self.operation == "update":
            found, added = self.get(rows), number
        else:
            added = 0
        if checksum(self.numbers(found)) != sum(keys) + added * self.n:
            raise AssertionError("a value is not what was written")
        return took

    # --- of each ---

    def open(self) -> None: ...

    def prepared(self, keys: list[int], added: int) -> list[Any]:
        raise NotImplementedError

    def update(self, rows: list[Any]) -> None:
        raise NotImplementedError

    def get(self, rows: list[Any]) -> list[Any]:
        raise NotImplementedError

    def numbers(self, found: list[Any]) -> list[int]:
        return found


class Ours(Rounds):
    """A value state."""

    def __init__(self, operation: str, n: int, seed: int, is_marked: bool) -> None:
        self.is_marked = is_marked
        super().__init__(operation, n, seed)

    def open(self) -> None:
        self.keyed: Any = sb.create_backend("rocksdb").create_keyed_backend("bigint")
        self.value = self.keyed.get_value_state(sb.ValueStateDescriptor("value", "bigint"))
        if self.is_marked:
            self.keyed.mark()

    def prepared(self, keys: list[int], added: int) -> list[Any]:
        return [(key, key + added) for key in keys]

    def update(self, rows: list[Any]) -> None:
        set_key, update = self.keyed.set_current_key, self.value.update
        for key, value in rows:
            set_key(key)
            update(value)

    def get(self, rows: list[Any]) -> list[Any]:
        set_key, get = self.keyed.set_current_key, self.value.value
        found = []
        for key, _ in rows:
            set_key(key)
            found.append(get())
        return found


class Rocksdict(Rounds):
    """The same bytes in a database of `rocksdict`, with numbers outside or bytes."""

    def __init__(self, operation: str, n: int, seed: int, is_packed: bool) -> None:
        self.is_packed = is_packed
        super().__init__(operation, n, seed)

    def open(self) -> None:
        from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteOptions

        from statebackend.backends.rocksdb.settings import Settings

        # What `Scratch` sets for a column family; all that there is here stays in the write buffer.
        blocks = BlockBasedOptions()
        blocks.set_block_cache(Cache(Settings().memory_limit))
        blocks.set_cache_index_and_filter_blocks(True)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_block_based_table_factory(blocks)
        self.folder = tempfile.TemporaryDirectory()
        self.db: Any = Rdict(self.folder.name, options=options)
        unlogged = WriteOptions()
        unlogged.disable_wal = True
        self.db.set_write_options(unlogged)

    def prepared(self, keys: list[int], added: int) -> list[Any]:
        encoder = sb.create_backend("reference").create_keyed_backend("bigint", max_parallelism=128)._encoder
        groups = [encoder.spark_hash(key) % 128 for key in keys]
        rows = [(group, key, key + added) for group, key in zip(groups, keys, strict=True)]
        if not self.is_packed:
            return rows
        return [(_KEY.pack(group, key + SIGN), _VALUE.pack(value)) for group, key, value in rows]

    def update(self, rows: list[Any]) -> None:
        db, key_of, value_of = self.db, _KEY.pack, _VALUE.pack
        if self.is_packed:
            for key, value in rows:
                db[key] = value
            return
        for group, number, value in rows:
            db[key_of(group, number + SIGN)] = value_of(value)

    def get(self, rows: list[Any]) -> list[Any]:
        db, key_of, number_of = self.db, _KEY.pack, _VALUE.unpack
        if self.is_packed:
            return [db[key] for key, _ in rows]
        return [number_of(db[key_of(group, number + SIGN)])[0] for group, number, _ in rows]

    def numbers(self, found: list[Any]) -> list[int]:
        return [_VALUE.unpack(each)[0] for each in found] if self.is_packed else found


def measure(args: argparse.Namespace, report: Report) -> None:
    for n in args.keys:
        for operation in OPERATIONS:
            with ExitStack() as stack:
                every: dict[str, OwnProcess] = {}
                for make, variants in ((Ours, OURS), (Rocksdict, PEERS)):
                    for name, variant in variants.items():
                        each = OwnProcess(make, operation, n, args.seed, variant)
                        every[name] = stack.enter_context(each)
                took: dict[str, list[float]] = {name: [] for name in every}
                for number in range(2, 2 + args.warmup + args.samples):
                    for name in sorted(every, key=lambda name: (hash((name, number)), name)):
                        nanoseconds = every[name].run_round(number) / n
                        if number >= 2 + args.warmup:
                            took[name].append(nanoseconds)
                for name in OURS:
                    for peer in PEERS:
                        report.row(
                            FIGURE,
                            f"{operation}, {n:,} keys, {name} / {peer}",
                            statistics.median(took[name]),
                            "ns",
                            statistics.median(took[peer]),
                            bigger_is_better=False,
                            peer_name="rocksdict",
                            target=TARGET,
                            samples_ns=took[name],
                            peer_samples_ns=took[peer],
                        )


def parsed(argv: list[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m bench.rocksdb.scalars", description=__doc__)
    made.add_argument("--keys", type=int, nargs="+", default=[10_000, 500_000])
    made.add_argument("--warmup", type=int, default=1)
    made.add_argument("--samples", type=int, default=5)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--out", type=Path, default=Path("build/bench/rocksdb-scalars.json"))
    return made.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure; 0."""
    args = parsed(argv)
    report = Report()
    measure(args, report)
    library = sb.available_backends()["rocksdb"].library or {}
    out, args.out = args.out, str(args.out)
    versions = {
        "statebackend": sb.__version__,
        "rocksdb": library.get("version"),
        "rocksdict": version("rocksdict"),
    }
    report.write(out, args, versions=versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
