"""A state that outgrows, outlives and outpaces a dict, in half a minute.

Fills a state of two million keys, writes a consistent checkpoint while it adds on at full speed, rolls a failed batch
back, and checks every answer against a plain recomputation.
"""

from __future__ import annotations

import tempfile
import time

import numpy as np

import statebackend as sb

KEYS = 2_000_000


def say(what: str, seconds: float, rows: int) -> None:
    print(f"  {what:<58} {rows / seconds / 1e6:7.1f} M rows/s")


def main() -> None:
    rng = np.random.default_rng(7)
    keys = rng.permutation(KEYS).astype(np.int64)
    keyed = sb.create_backend("heap").create_keyed_backend("bigint")
    total = keyed.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", "bigint"))

    print(f"running sums of {KEYS:,} keys in {keyed.max_parallelism} key groups, each a copy-on-write map")
    begin = time.perf_counter()
    total.add_many(keys, keys)
    say("insert all keys", time.perf_counter() - begin, KEYS)

    oracle = np.arange(KEYS, dtype=np.int64)  # by key, what the state must hold
    batch = keys[rng.permutation(KEYS)]
    amounts = rng.integers(0, 1000, KEYS)
    begin = time.perf_counter()
    total.add_many(batch, amounts)
    say("add to every key, in random order", time.perf_counter() - begin, KEYS)
    oracle[batch] += amounts

    with tempfile.TemporaryDirectory() as folder:
        store = sb.CheckpointStore(folder).open_for_writing(key_type="bigint", max_parallelism=128)
        begin = time.perf_counter()
        pending = keyed.snapshot(0, store)
        pause = time.perf_counter() - begin
        frozen = oracle.copy()
        begin = time.perf_counter()
        written = 0
        while not pending.done() or written == 0:
            batch = rng.integers(0, KEYS, 100_000)
            total.add_many(batch, np.ones(len(batch), dtype=np.int64))
            np.add.at(oracle, batch, 1)
            written += len(batch)
        say("add on, while a thread writes a checkpoint", time.perf_counter() - begin, written)
        store.commit(0, [pending.result()])
        store.close()
        rows = sb.tools.state(folder, "total").to_table()
        seen = np.zeros(KEYS, dtype=np.int64)
        seen[rows["key"].to_numpy()] = rows["value"].to_numpy()
        exact = rows.num_rows == KEYS and bool((seen == frozen).all())
    print(
        f"  checkpoint: a pause of {pause * 1e3:.1f} ms, {rows.num_rows:,} rows, exactly as of its moment: {exact}"
    )

    mark = keyed.mark()
    total.add_many(keys[:500_000], np.zeros(500_000, dtype=np.int64) - 1)
    begin = time.perf_counter()
    keyed.rollback(mark)
    keyed.release(mark)
    say("roll back a failed batch of 500,000 rows", time.perf_counter() - begin, 500_000)

    correct = bool((total.get_many(np.arange(KEYS)).to_numpy() == oracle).all())
    used = keyed.metrics()["used_bytes"]
    keyed.close()
    print(f"  {used / KEYS:.0f} bytes an entry; state equals a recomputation: {correct}")
    if not (correct and exact):
        raise SystemExit("the state is wrong; please report this")


if __name__ == "__main__":
    main()
