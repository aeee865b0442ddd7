"""Our side of the comparisons: one state table of LONG (or STRING) keys to LONG values.

All input is built before the clock starts, keys come in a fresh random order each round, results are checked.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.flink.keys import round_order
from statebackend._core.kernels import aggregation_kernels, batch_kernels, ttl_kernels
from statebackend._core.snapshots.snapshot_view import SnapshotView
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_core import StateCore
from statebackend._core.tables.state_table import StateTable

Int64Array = npt.NDArray[np.int64]

WARMUP_ROUNDS = 2


def string_keys(keys: Int64Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """The keys ``user-<number>`` as the buffers of an Arrow string column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = pc.binary_join_element_wise("user-", pa.array(keys).cast(pa.string()), "").cast(
        pa.large_string()
    )
    _, offsets, data = column.buffers()
    return np.frombuffer(offsets, dtype=np.int64), np.frombuffer(data, dtype=np.uint8)


class Rounds:
    """Times an operation round by round; each round has its own order of the keys, made outside the clock."""

    def __init__(self, keys: Int64Array, samples: int, seed: int = 1, strings: bool = False) -> None:
        self.keys, self.samples, self.seed, self.strings = keys, samples, seed, strings

    def batch(self, round_number: int) -> Any:
        ordered = round_order(self.keys, self.seed, round_number)
        return string_keys(ordered) if self.strings else ordered

    def time(self, operation: Callable[[Any], object], warmup: int = WARMUP_ROUNDS) -> float:
        """Median seconds of a round."""
        seconds = []
        for number in range(warmup + self.samples):
            batch = self.batch(number)
            begin = time.perf_counter()
            operation(batch)
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds[warmup:])


def filled(
    keys: Int64Array, *, key_groups: int = 128, strings: bool = False, threads: int = 1
) -> tuple[StateCore, StateTable, Int64Array]:
    """A table in which key i has value i."""
    core = StateCore()
    table = StateTable(core, key="bytes" if strings else "int", value="long", max_parallelism=key_groups)
    values = np.arange(len(keys), dtype=np.int64)
    batch_kernels.update_many(table, string_keys(keys) if strings else keys, values, threads=threads)
    return core, table, values


def map_operations(
    keys: Int64Array, *, threads: int, samples: int, key_groups: int = 128, strings: bool = False
) -> dict[str, float]:
    """Million rows per second of add, update, get, reduce and update under a snapshot."""
    n = len(keys)
    rounds = Rounds(keys, samples, strings=strings)
    values = np.arange(n, dtype=np.int64)
    result = {}

    def add(batch: Any) -> None:
        core = StateCore()
        table = StateTable(core, key="bytes" if strings else "int", value="long", max_parallelism=key_groups)
        begin = time.perf_counter()
        batch_kernels.update_many(table, batch, values, threads=threads)
        seconds.append(time.perf_counter() - begin)
        assert len(table) == n

    # Of the fill, only the call is timed: making and dropping a table is not part of adding.
    seconds: list[float] = []
    rounds.time(add)
    result["add"] = n / statistics.median(seconds[WARMUP_ROUNDS:]) / 1e6

    core, table, values = filled(keys, key_groups=key_groups, strings=strings, threads=threads)
    result["update"] = (
        n / rounds.time(lambda b: batch_kernels.update_many(table, b, values, threads=threads)) / 1e6
    )
    result["get"] = n / rounds.time(lambda b: batch_kernels.get_many(table, b, threads=threads)) / 1e6
    got, found = batch_kernels.get_many(table, rounds.batch(WARMUP_ROUNDS + samples - 1), threads=threads)
    assert found.all()
    assert (got == values).all()
    result["transform"] = (
        n
        / rounds.time(
            lambda b: aggregation_kernels.add_many(table, b, values, AddPlan("sum", "long"), threads=threads)
        )
        / 1e6
    )
    result["update_under_snapshot"] = n / _under_snapshot(core, table, rounds, values, threads) / 1e6
    return result


def with_ttl_and_nulls(
    keys: Int64Array, *, threads: int, samples: int, key_groups: int = 128, null_share: float = 0.01
) -> dict[str, float]:
    """Million rows per second where values have a time to live, which none outlives, and of columns with nulls.

    A null clears its key, and the next round adds it again.
    """
    n = len(keys)
    rounds = Rounds(keys, samples)
    values = np.arange(n, dtype=np.int64)
    nulls = np.random.default_rng(3).random(n) < null_share
    total, last = AddPlan("sum", "long"), AddPlan("last", 8)
    expiring = StateTable(StateCore(), value="long", timestamps=True, max_parallelism=key_groups)
    batch_kernels.update_many(expiring, keys, values, timestamp=1, threads=threads)
    time_to_live: dict[str, int] = {"ttl": 100, "threads": threads}

    def speed(operation: Callable[[Any], object]) -> float:
        return n / rounds.time(operation) / 1e6

    result = {
        "update, ttl": speed(
            lambda b: batch_kernels.update_many(expiring, b, values, timestamp=2, threads=threads)
        ),
        "get, ttl": speed(lambda b: ttl_kernels.read_many(expiring, b, now=3, **time_to_live)),
        "get that renews, ttl": speed(
            lambda b: ttl_kernels.read_many(expiring, b, now=3, renews=True, **time_to_live)
        ),
    }
    batch = rounds.batch(WARMUP_ROUNDS + samples)
    batch_kernels.update_many(expiring, batch, values, timestamp=2, threads=threads)
    got, found = ttl_kernels.read_many(expiring, batch, now=3, **time_to_live)
    assert found.all()
    assert (got == values).all()
    result["transform, ttl"] = speed(
        lambda b: aggregation_kernels.add_many(expiring, b, values, total, timestamp=3, **time_to_live)
    )
    assert len(expiring) == n
    table = filled(keys, key_groups=key_groups, threads=threads)[1]
    for name, plan in (("update", last), ("transform", total)):
        result[f"{name}, {null_share:.0%} nulls"] = speed(
            lambda b, plan=plan: aggregation_kernels.add_many(
                table, b, values, plan, nulls=nulls, threads=threads
            )
        )
        assert len(table) == n - nulls.sum()
    return result


def add_in_batches(
    keys: Int64Array, batches: int, *, threads: int, samples: int, key_groups: int = 128
) -> float:
    """Million rows per second of adding the keys to an empty table, in so many calls."""
    seconds = []
    for number in range(WARMUP_ROUNDS + samples):
        parts = np.array_split(round_order(keys, 1, number), batches)
        table = StateTable(StateCore(), value="long", max_parallelism=key_groups)
        begin = time.perf_counter()
        for part in parts:
            batch_kernels.update_many(table, part, part, threads=threads)
        seconds.append(time.perf_counter() - begin)
        assert len(table) == len(keys)
    return len(keys) / statistics.median(seconds[WARMUP_ROUNDS:]) / 1e6


def _under_snapshot(
    core: StateCore, table: StateTable, rounds: Rounds, values: Int64Array, threads: int
) -> float:
    """Median seconds to update each entry once while a snapshot is held; the snapshot is checked afterwards."""
    seconds = []
    for number in range(WARMUP_ROUNDS + rounds.samples):
        batch = rounds.batch(number)
        copied = table.metrics()["copied_entries"]
        view = core.snapshot()
        begin = time.perf_counter()
        batch_kernels.update_many(table, batch, values, threads=threads)
        seconds.append(time.perf_counter() - begin)
        assert table.metrics()["copied_entries"] - copied >= len(values)
        view.release()
        while core.advance(1 << 30):
            pass
    return statistics.median(seconds[WARMUP_ROUNDS:])


def bytes_per_entry(keys: Int64Array, key_groups: int = 128) -> dict[str, float]:
    """Resident bytes per entry, after filling and at the worst point: when the maps have just doubled.

    Extents made ahead count; the working memory of a batch call, up to 29 MB a backend, does not.
    """
    worst = resident = 0.0
    core = StateCore()
    table = StateTable(core, value="long", max_parallelism=key_groups)
    base = core.arena.usage()["used_bytes"]
    step = max(1, len(keys) // 400)
    for at in range(0, len(keys), step):
        part = keys[at : at + step]
        batch_kernels.update_many(table, part, part)
        core.advance(1 << 30)
        usage = core.arena.usage()
        resident = (usage["used_bytes"] + usage["spare_bytes"] - base) / len(table)
        if len(table) >= len(keys) * 3 // 4:
            worst = max(worst, resident)
    return {"at_end": resident, "worst_while_growing": worst}


def bytes_after_many_rows_a_key(rows: int, keys: int, key_groups: int = 128) -> float:
    """Bytes per entry in use after a first batch with many rows for each key."""
    core = StateCore()
    table = StateTable(core, value="long", max_parallelism=key_groups)
    batch = np.random.default_rng(1).integers(0, keys, rows)
    aggregation_kernels.add_many(table, batch, np.ones(rows, dtype=np.int64), AddPlan("sum", "long"))
    return float(core.arena.usage()["run_bytes"] / len(table))


def bytes_after_removal(keys: Int64Array, left: int, key_groups: int = 128) -> float:
    """How many times as much runs take after all but `left` entries were removed as a table with just those."""
    core, table, _ = filled(keys, key_groups=key_groups)
    batch_kernels.remove_many(table, keys[left:])
    while core.advance(1 << 20):
        pass
    fresh = filled(keys[:left], key_groups=key_groups)[0]
    return float(core.arena.usage()["run_bytes"] / fresh.arena.usage()["run_bytes"])


def growth(n: int, key_groups: int = 128) -> dict[str, float]:
    """Thread CPU time of single puts while a table grows to `n` entries, in nanoseconds; the clock included."""
    core = StateCore()
    table = StateTable(core, value="long", max_parallelism=key_groups)
    times = np.zeros(n, dtype=np.int32)
    put, clock = table.put, time.thread_time_ns
    chunk = 1_000_000
    for at in range(0, n, chunk):
        # A permutation of 0..n-1 without holding n Python integers: multiply by an odd number modulo 2^k.
        keys = scattered(np.arange(at, min(at + chunk, n), dtype=np.int64)).tolist()
        view = memoryview(times[at : at + chunk])
        for i, key in enumerate(keys):
            begin = clock()
            put(key, i)
            view[i] = clock() - begin
    assert len(table) == n
    usage = core.arena.usage()
    result = quantiles(times)
    result["bytes_per_entry"] = usage["used_bytes"] / n
    result["clock"] = float(statistics.median(_clock_cost() for _ in range(1001)))
    return result


def scattered(numbers: Int64Array) -> Int64Array:
    """Distinct numbers for distinct numbers, in no visible order."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(1)).astype(np.int64)


def _clock_cost() -> int:
    begin = time.thread_time_ns()
    return time.thread_time_ns() - begin


def quantiles(times: npt.NDArray[Any]) -> dict[str, float]:
    times = np.sort(times)
    picks = {"p50": 0.5, "p99": 0.99, "p99_99": 0.9999, "p99_9999": 0.999999}
    result = {name: float(times[min(len(times) - 1, int(q * len(times)))]) for name, q in picks.items()}
    result["max"] = float(times[-1])
    return result


def snapshot_pause(n: int, states: int, key_groups: int, samples: int) -> dict[str, float]:
    """The pause of `snapshot()` with `states` tables of `n` entries in all, and what batches cost until release.

    ``written``: until the snapshot is on disk, as zstd-compressed Arrow IPC, synced; this is what a checkpoint does.
    ``read``: a reader that does nothing with what it reads, so that all entries are cloned within its short time.
    """
    core = StateCore()
    tables = [StateTable(core, value="long", max_parallelism=key_groups) for _ in range(states)]
    per_table = n // states
    keys = np.random.default_rng(1).permutation(per_table).astype(np.int64)
    for table in tables:
        batch_kernels.update_many(table, keys, keys)
    rng = np.random.default_rng(2)
    batches = [keys[rng.integers(0, per_table, 100_000)] for _ in range(50)]
    values = rng.integers(-(1 << 62), 1 << 62, 100_000)

    numbers = itertools.count()

    def run(count: int) -> float:
        """Mean seconds of a batch; every batch goes to the next table, with the next of the 50 batches of rows."""
        begin = time.perf_counter()
        for i in itertools.islice(numbers, count):
            batch_kernels.update_many(tables[i % states], batches[i % len(batches)], values)
        return (time.perf_counter() - begin) / count

    run(50)
    plain: list[float] = []
    pauses: list[float] = []
    result = {}
    for name, read in (("read", _read_snapshot), ("written", _write_snapshot)):
        held, until_release = [], []
        for _ in range(samples):
            plain.append(run(100))
            begin = time.perf_counter()
            view = core.snapshot()
            pauses.append(time.perf_counter() - begin)
            reader = threading.Thread(target=read, args=(view, tables, key_groups))
            reader.start()
            batch_seconds = []
            while reader.is_alive():
                batch_seconds.append(run(1))
            reader.join()
            held.append(statistics.mean(batch_seconds))
            until_release.append(time.perf_counter() - begin)
            while core.advance(1 << 30):
                pass
        result[f"{name}_held_ms"] = statistics.median(held) * 1e3
        result[f"{name}_seconds"] = statistics.median(until_release)
    result["pause_ms"] = statistics.median(pauses) * 1e3
    result["batch_ms"] = statistics.median(plain) * 1e3
    for name in ("read", "written"):
        result[f"{name}_slow_down"] = result[f"{name}_held_ms"] / result["batch_ms"]
    return result


def _read_snapshot(view: SnapshotView, tables: list[StateTable], key_groups: int) -> None:
    with view:
        for table in tables:
            for group in range(key_groups):
                view.rows(table, group, group).columns()


def _write_snapshot(view: SnapshotView, tables: list[StateTable], key_groups: int) -> None:
    import pyarrow as pa

    schema = pa.schema([("key", pa.int64()), ("value", pa.int64())])
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with view, tempfile.TemporaryFile() as file:
        with pa.ipc.new_file(file, schema, options=options) as writer:
            for table in tables:
                for group in range(key_groups):
                    columns = view.rows(table, group, group).columns()
                    writer.write(pa.record_batch([columns["key"], columns["value"]], schema=schema))
        file.flush()
        os.fsync(file.fileno())


def mark_cost(n: int, rows: int, samples: int) -> dict[str, float]:
    """Seconds of random batch updates with and without an open mark, as medians over many batches each."""
    keys = np.random.default_rng(1).permutation(n).astype(np.int64)
    core, table, _ = filled(keys)
    rng = np.random.default_rng(2)
    values = np.arange(rows, dtype=np.int64)
    plain, marked = [], []
    for _ in range(samples):
        batch = keys[rng.integers(0, n, rows)]
        begin = time.perf_counter()
        batch_kernels.update_many(table, batch, values)
        plain.append(time.perf_counter() - begin)
        batch = keys[rng.integers(0, n, rows)]
        mark = core.mark()
        begin = time.perf_counter()
        batch_kernels.update_many(table, batch, values)
        marked.append(time.perf_counter() - begin)
        core.release(mark)
    return {
        "plain_ns_per_row": statistics.median(plain) / rows * 1e9,
        "marked_ns_per_row": statistics.median(marked) / rows * 1e9,
        "ratio": statistics.median(marked) / statistics.median(plain),
    }
