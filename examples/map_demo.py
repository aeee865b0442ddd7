"""What works today, in half a minute: a copy-on-write state table that outgrows, outlives and outpaces a dict.

Run by ``make demo``. Fills a state of two million keys, takes a consistent snapshot while writing on at full
speed, rolls a failed batch back, and checks every answer against a plain recomputation.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from statebackend._core.batches import kernels
from statebackend._core.tables.state_core import StateCore
from statebackend._core.tables.state_table import StateTable

KEYS = 2_000_000
KEY_GROUPS = 128


def say(what: str, seconds: float, rows: int) -> None:
    print(f"  {what:<58} {rows / seconds / 1e6:7.1f} M rows/s")


def main() -> None:
    rng = np.random.default_rng(7)
    keys = rng.permutation(KEYS).astype(np.int64)
    core = StateCore()
    table = StateTable(core, key="int", value="long", max_parallelism=KEY_GROUPS)

    print(f"running sums of {KEYS:,} keys in {KEY_GROUPS} key groups, each a copy-on-write map")
    begin = time.perf_counter()
    kernels.update_many(table, keys, keys)
    say("insert all keys", time.perf_counter() - begin, KEYS)

    oracle = np.arange(KEYS, dtype=np.int64)  # by key, what the state must hold
    batch = keys[rng.permutation(KEYS)]
    amounts = rng.integers(0, 1000, KEYS)
    begin = time.perf_counter()
    kernels.reduce_many(table, batch, amounts, "sum")
    say("add to every key, in random order", time.perf_counter() - begin, KEYS)
    oracle[batch] += amounts

    begin = time.perf_counter()
    view = core.snapshot()
    pause = time.perf_counter() - begin
    frozen = oracle.copy()
    rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def write_out() -> None:
        for group in range(KEY_GROUPS):
            columns = view.read_group(table, group)
            rows[group] = columns["key"], columns["value"]
        view.release()

    writer = threading.Thread(target=write_out)
    writer.start()
    begin = time.perf_counter()
    written = 0
    while writer.is_alive() or written == 0:
        batch = rng.integers(0, KEYS, 100_000)
        kernels.reduce_many(table, batch, np.ones(len(batch), dtype=np.int64), "sum")
        np.add.at(oracle, batch, 1)
        written += len(batch)
    writer.join()
    say("add on, while a thread reads a snapshot", time.perf_counter() - begin, written)
    seen = sum(len(key) for key, _ in rows.values())
    exact = all((frozen[key] == value).all() for key, value in rows.values())
    copied = table.metrics()["copied_entries"]
    print(
        f"  snapshot: taken in {pause * 1e6:.0f} us, {seen:,} rows, exactly as of its moment: {exact}; "
        f"{copied:,} entries cloned"
    )

    mark = core.mark()
    kernels.update_many(table, keys[:500_000], np.zeros(500_000, dtype=np.int64))
    begin = time.perf_counter()
    core.rollback(mark)
    core.release(mark)
    say("roll back a failed batch of 500,000 rows", time.perf_counter() - begin, 500_000)

    values, found = kernels.get_many(table, np.arange(KEYS))
    correct = bool(found.all() and (values == oracle).all())
    usage = core.arena.usage()
    print(f"  {usage['used_bytes'] / KEYS:.0f} bytes an entry; state equals a recomputation: {correct}")
    if not (correct and exact and seen == KEYS):
        raise SystemExit("the state is wrong; please report this")


if __name__ == "__main__":
    main()
