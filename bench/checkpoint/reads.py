"""Reads of stored and of live state: some keys, and a scan of all entries."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import statebackend as sb
from bench.checkpoint.costs import filled, memory, store_in
from statebackend.runtime.live_view import StateView

NAME = "state 0"


def reads(n: int, samples: int, folder: str | None) -> dict[str, float]:
    """Milliseconds for one key and for 100 random keys of a closed store; million entries a second of a scan.

    ``live`` is the microseconds a key of 100,000 keys in a live view. ``memory`` is the most that a scan takes in a
    process of its own, in MB.
    """
    keyed, (state,) = filled(n)
    keys = np.random.default_rng(5).choice(n, min(n, 100_000), replace=False)
    with store_in(folder) as store:
        with keyed:
            expected = state.get_many(keys)
            checkpoint: Any = SimpleNamespace(id=0, now=None, watermark=None)
            with StateView(keyed, checkpoint) as view:
                live = _seconds(lambda: view.get_many(NAME, keys), samples)
                assert view.get_many(NAME, keys).equals(expected)
            store.commit(0, [keyed.snapshot(0, store).result()])

        def some(count: int) -> float:
            chosen = keys[:count]
            found = sb.tools.state(store.uri, NAME, keys=chosen).to_table()
            assert found.num_rows == len(chosen)
            return _seconds(lambda: sb.tools.state(store.uri, NAME, keys=chosen).to_table(), samples)

        one, hundred = some(1), some(100)
        assert scan(store.uri)[0] == n
        took = _seconds(lambda: scan(store.uri), samples)
        with multiprocessing.get_context("spawn").Pool(1) as other:
            _, more = other.apply(scan, (store.uri,))
    return {
        "one": 1e3 * one,
        "hundred": 1e3 * hundred,
        "live": 1e6 * live / len(keys),
        "scan": n / took / 1e6,
        "memory": more / 1e6,
    }


def _seconds(read: Callable[[], object], samples: int) -> float:
    taken = []
    for _ in range(samples):
        start = time.perf_counter()
        read()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def scan(uri: str) -> tuple[int, int]:
    """The entries of the state, and the most memory that the process had for them."""
    sb.tools.state(uri, NAME, keys=[0]).to_table()  # imports what it needs
    before = memory()
    rows = sum(batch.num_rows for batch in sb.tools.state(uri, NAME).to_batches())
    return rows, memory("VmHWM") - before
