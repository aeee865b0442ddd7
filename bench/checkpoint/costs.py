"""The measured parts. Input is made outside the clock, and what was restored is checked."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import statebackend as sb

#: Rows of a batch, where the figure does not say otherwise.
BATCH = 100_000

#: Types of values by the way in which the backend keeps them; a struct is in the arena, and a nested type in files.
LAYOUTS = {
    "inline": "bigint",
    "arena": "string",
    "struct": "struct<a:bigint,b:string>",
    "object": sb.types.PICKLE,
}


def descriptor(layout: str, name: str = "state") -> Any:
    """A value state of the type of a layout."""
    return sb.ValueStateDescriptor(name, LAYOUTS[layout])


def values_of(layout: str, numbers: Any) -> Any:
    """Values of a layout, made of numbers."""
    if layout == "inline":
        return numbers
    if layout == "arena":
        return pa.array(numbers).cast(pa.string())
    if layout == "struct":
        text = pa.array(numbers[::-1]).cast(pa.string())
        return pa.StructArray.from_arrays([pa.array(numbers), text], ["a", "b"])
    return [(int(number),) for number in numbers]


def filled(
    n: int, layout: str = "inline", states: int = 1, max_parallelism: int = 128
) -> tuple[Any, list[Any]]:
    """A backend with ``n`` random entries in all, and its states."""
    keyed = sb.create_backend("heap").create_keyed_backend("bigint", max_parallelism=max_parallelism)
    rng = np.random.default_rng(1)
    made = []
    for number in range(states):
        state = keyed.get_state(descriptor(layout, f"state {number}"))
        for start in range(0, n // states, 1_000_000):
            count = min(1_000_000, n // states - start)
            keys = np.arange(start, start + count)
            state.update_many(keys, values_of(layout, rng.integers(-(2**62), 2**62, count)))
        made.append(state)
    return keyed, made


@contextmanager
def store_in(folder: str | None, max_parallelism: int = 128, retain: Any = 1) -> Iterator[sb.CheckpointStore]:
    """A store of its own, on the disk that ``folder`` is on."""
    with tempfile.TemporaryDirectory(dir=folder) as root:
        store = sb.CheckpointStore(root, retain=retain)
        with store.open_for_writing(key_type="bigint", max_parallelism=max_parallelism):
            yield store


def fsync_ms(folder: str | None, samples: int = 30) -> float:
    """What the disk takes for 4 KB to be durable, in the median."""
    taken = []
    with tempfile.TemporaryDirectory(dir=folder) as root:
        for number in range(samples):
            with open(Path(root) / str(number), "wb", buffering=0) as file:
                file.write(bytes(4096))
                start = time.perf_counter()
                os.fsync(file.fileno())
                taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def incremental(n: int, changed: list[int], samples: int, folder: str | None) -> dict[int, dict[str, float]]:
    """Milliseconds of a delta of so many changes on ``n`` entries: until `snapshot` returns, and until committed."""
    keyed, (state,) = filled(n)
    rng = np.random.default_rng(2)
    found = {}
    with store_in(folder) as store, keyed:
        ids = itertools.count()
        _commit(keyed, store, next(ids))
        for count in changed:
            pauses, totals = [], []
            for _ in range(samples):
                keys = rng.choice(n, count, replace=False)
                state.update_many(keys, rng.integers(0, 2**62, count))
                pause, total = _commit(keyed, store, next(ids))
                pauses.append(pause)
                totals.append(total)
            found[count] = {
                "pause": 1e3 * statistics.median(pauses),
                "total": 1e3 * statistics.median(totals),
            }
    return found


def _commit(keyed: Any, store: sb.CheckpointStore, checkpoint_id: int, **options: Any) -> tuple[float, float]:
    start = time.perf_counter()
    pending = keyed.snapshot(checkpoint_id, store, **options)
    pause = time.perf_counter() - start
    store.commit(checkpoint_id, [pending.result()])
    return pause, time.perf_counter() - start


def full(n: int, samples: int, folder: str | None, layout: str = "inline") -> dict[str, float]:
    """Million entries a second of a full checkpoint, committed, and of its restore; bytes an entry; and memory.

    ``peak`` is the most memory that a process of its own has during a restore, by what it has afterwards.
    """
    keyed, (state,) = filled(n, layout)
    with store_in(folder) as store, keyed:
        written = [_commit(keyed, store, each, incremental=False)[1] for each in range(samples)]
        checkpoint = store.open(samples - 1)
        some = np.random.default_rng(3).choice(n, min(n, 100_000), replace=False)
        expected = state.get_many(some)
        keyed.close()
        restored = []
        for _ in range(samples):
            start = time.perf_counter()
            again = sb.create_backend("heap").create_keyed_backend("bigint", restore=checkpoint)
            state = again.get_state(descriptor(layout, "state 0"))
            restored.append(time.perf_counter() - start)
            assert again.num_entries() == n
            assert state.get_many(some).equals(expected)
            again.close()
        with multiprocessing.get_context("spawn").Pool(1) as other:
            peak = other.apply(peak_of_restore, (store.uri, samples - 1, layout))
        size = sum(file.size for file in checkpoint.files.values())
    return {
        "write": n / statistics.median(written) / 1e6,
        "restore": n / statistics.median(restored) / 1e6,
        "bytes": size / n,
        "peak": peak,
    }


def peak_of_restore(uri: str, checkpoint_id: int, layout: str) -> float:
    """The most memory that this process had in a restore, by what it has afterwards; it should do nothing else."""
    checkpoint = sb.CheckpointStore(uri).open(checkpoint_id)
    with sb.create_backend("heap").create_keyed_backend("bigint", restore=checkpoint) as keyed:
        keyed.get_state(descriptor(layout, "state 0"))
        return memory("VmHWM") / memory("VmRSS")


def memory(what: str = "VmRSS") -> int:
    """The memory that this process has (``VmRSS``), or had at most (``VmHWM``), in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def pause(n: int, states: int, max_parallelism: int, samples: int, folder: str | None) -> float:
    """Milliseconds until `snapshot` of a whole backend returns."""
    keyed, made = filled(n, states=states, max_parallelism=max_parallelism)
    taken = []
    with store_in(folder, max_parallelism) as store, keyed:
        for each in range(samples):
            start = time.perf_counter()
            pending = keyed.snapshot(each, store, incremental=False)
            taken.append(time.perf_counter() - start)
            store.commit(each, [pending.result()])
            made[0].update_many([1], [each])
    return 1e3 * statistics.median(taken)


def slow_down(n: int, layout: str, samples: int, folder: str | None) -> dict[str, float]:
    """Batches of updates while a full checkpoint is written, beside batches without one."""
    keyed, (state,) = filled(n, layout)
    rng = np.random.default_rng(4)
    rows = BATCH if layout != "object" else BATCH // 10
    batches = [(rng.integers(0, n, rows), values_of(layout, rng.integers(0, 2**62, rows))) for _ in range(20)]
    turn = itertools.cycle(batches)

    def run() -> float:
        start = time.perf_counter()
        state.update_many(*next(turn))
        return time.perf_counter() - start

    alone, beside, writing = [], [], []
    with store_in(folder) as store, keyed:
        for each in range(samples):
            alone += [run() for _ in range(30)]
            start = time.perf_counter()
            pending = keyed.snapshot(each, store, incremental=False)
            while not pending.done():
                beside.append(run())
            writing.append(time.perf_counter() - start)
            store.commit(each, [pending.result()])
            keyed.advance(10_000_000)
    return {
        "alone": 1e9 * statistics.mean(alone) / rows,
        "beside": 1e9 * statistics.mean(beside) / rows,
        "worst": 1e3 * max(beside),
        "writing": statistics.median(writing),
    }


Figure = Callable[..., Any]
