"""Runs one form in a separate process: batches without a pause. It checks their results afterwards."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from bench.checkpoint.costs import memory

__all__ = ["CONTENDERS", "OURS", "Cell", "apart", "changed_against_without", "forms", "restored", "run"]

#: The modules of the contenders. Only ours works on behind a commit.
OURS = "statebackend"
CONTENDERS = {OURS: "heap", "duckdb": "duckdb_tables", "polars": "polars_frames"}
#: Keys are in no order: their numbers times this, of 62 bits.
ODD, BITS = np.uint64(0x9E3779B97F4A7C15), np.uint64(2**62 - 1)
#: So many batches differ; a run goes around them.
DISTINCT = 10


class Cell(NamedTuple):
    """What is measured."""

    durable: bool
    threads: int
    keys: int
    rows: int
    touched: int

    def __str__(self) -> str:
        return f"{self.place()}, {self.share:.2%} touched"

    def place(self) -> str:
        """The cell without its share."""
        where = "durable" if self.durable else "in memory"
        return f"{where}, {self.threads} threads, {self.keys:,} keys, {self.rows:,} rows"

    @property
    def share(self) -> float:
        """The share of the keys that a batch touches."""
        return self.touched / self.keys


def forms(contender: str, durable: bool) -> dict[str, Any]:
    """The forms of a contender. Its module loads here: Polars reads the number of its threads then."""
    module = importlib.import_module(f"bench.frames.{CONTENDERS[contender]}")
    return dict(module.FORMS[durable])


def lines_of(form: Any) -> int:
    """The lines that a user writes for the durable form."""
    classes = [each for each in form.__mro__ if each is not object]
    methods = {name: each for kind in reversed(classes) for name, each in vars(kind).items()}
    code = [inspect.getsource(each) for name, each in methods.items()
            if inspect.isfunction(each) and name not in ("fill", "contents")]  # fmt: skip
    return sum(bool(line.strip()) for each in code for line in each.splitlines())


def keys_of(numbers: Any) -> Any:
    """The keys with these numbers."""
    return ((numbers.astype(np.uint64) * ODD) & BITS).astype(np.int64)


def made(cell: Cell, count: int, seed: int) -> list[tuple[Any, Any]]:
    """Batches, as the numbers of keys and the values. Each has exactly so many distinct keys."""
    rng, batches = np.random.default_rng(seed), []
    for _ in range(min(count, DISTINCT)):
        pool = rng.choice(cell.keys, cell.touched, replace=False)
        numbers = np.concatenate([pool, pool[rng.integers(0, cell.touched, cell.rows - cell.touched)]])
        rng.shuffle(numbers)
        batches.append((numbers, rng.integers(0, 1000, cell.rows)))
    return batches


def columns_of(batches: Iterable[tuple[Any, Any]]) -> list[tuple[pa.Array, pa.Array]]:
    """Keys and values as the contenders get them."""
    return [(pa.array(keys_of(numbers)), pa.array(values)) for numbers, values in batches]


def fill(subject: Any, keys: int) -> None:
    """Let all keys be there: the sum is the number of the key, the count is 1."""
    for start in range(0, keys, 1_000_000):
        numbers = np.arange(start, min(start + 1_000_000, keys))
        subject.fill(pa.array(keys_of(numbers)), pa.array(numbers))


class Expected:
    """The sums and counts by numpy."""

    def __init__(self, keys: int) -> None:
        self.keys = keys_of(np.arange(keys))
        self.sums, self.counts = np.arange(keys), np.ones(keys, dtype=np.int64)

    def add(self, numbers: Any, values: Any) -> pa.Table:
        """Add a batch; return the new values of the keys that it touches."""
        np.add.at(self.sums, numbers, values)
        np.add.at(self.counts, numbers, 1)
        touched = np.zeros(len(self.keys), dtype=bool)
        touched[numbers] = True
        return self.table(touched)

    def table(self, chosen: Any = slice(None)) -> pa.Table:
        """Keys with their sums and counts."""
        return pa.table({"k": self.keys[chosen], "s": self.sums[chosen], "n": self.counts[chosen]})


def check(found: Any, wanted: pa.Table) -> None:
    """Compare whole tables; the order of their rows may differ."""
    if not all(np.array_equal(*each) for each in zip(_sorted(found), _sorted(wanted), strict=True)):
        raise AssertionError("the sums and counts are not what numpy computes")


def _sorted(table: Any) -> list[Any]:
    order = np.argsort(table["k"].to_numpy())
    return [table[name].to_numpy()[order] for name in ("k", "s", "n")]


def _digest(table: Any) -> tuple[int, ...]:
    """The number of rows and the sum of each column: little work, since the next batch waits for it."""
    return (len(table), *(int(table[name].to_numpy().sum()) for name in ("k", "s", "n")))


def run(
    contender: str, form: str, cell: Cell, batches: int, warmup: int, seed: int, folder: str | None
) -> dict[str, Any]:
    """Run batches one after the other. Check the result of each batch, and the state at the end."""
    kind, inputs = forms(contender, cell.durable)[form], made(cell, batches + warmup, seed)
    columns, digests, before_it = columns_of(inputs), [], memory()
    subject, most, changed = kind(folder, cell.threads), 0, None
    fill(subject, cell.keys)
    if cell.durable:
        subject.save()

    def one() -> tuple[float, float]:
        nonlocal most, changed
        cpu, start = time.process_time(), time.perf_counter()
        changed = subject.add(*columns[len(digests) % len(columns)])
        if cell.durable:
            subject.save()
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        digests.append(_digest(changed))
        most = max(most, memory())
        return took, cpu

    for _ in range(warmup):
        one()
    began = time.process_time()
    seconds = [one()[0] for _ in range(batches)]
    cpu = time.process_time() - began + drained()
    entries = sum(digest[0] for digest in digests[warmup:])
    found = {
        "M rows/s": cell.rows / 1e6 / (statistics.fmean if cell.durable else statistics.median)(seconds),
        "RSS bytes a key": (most - before_it) / cell.keys,
        "CPU ns a changed entry": cpu / entries * 1e9,
        "seconds": seconds,
    }
    if cell.durable:
        found["lines of code"] = lines_of(kind)
    if cell.durable and contender == OURS:  # again, each batch after the work behind the one before
        cpus = [(one()[1], drained()) for _ in range(batches)]
        entries = sum(digest[0] for digest in digests[-batches:])
        for name, each in zip(("before the commit", "behind it"), zip(*cpus, strict=True), strict=True):
            found[f"CPU ns a changed entry {name}"] = sum(each) / entries * 1e9
    expected = Expected(cell.keys)
    for number, digest in enumerate(digests):
        last = expected.add(*inputs[number % len(inputs)])
        if _digest(last) != digest:
            raise AssertionError(f"batch {number} returned other sums or counts")
    check(changed, last)
    check(subject.contents(pa.array(expected.keys)), expected.table())
    return found | {"added": len(digests)}


def drained() -> float:
    """Wait until the process does nothing; return the CPU time that it took until then."""
    began = last = time.process_time()
    while True:
        time.sleep(0.05)
        now = time.process_time()
        if now - last < 0.002:
            return last - began
        last = now


def restored(
    contender: str, form: str, cell: Cell, batches: int, added: int, seed: int, folder: str
) -> dict[str, float]:
    """Open the durable form of a run of ``batches`` whose process has ended, and check it."""
    size = sum(file.stat().st_size for file in Path(folder).glob("**/*") if file.is_file())
    kind = forms(contender, True)[form]
    start = time.perf_counter()
    subject = kind(folder, cell.threads)
    took = time.perf_counter() - start
    inputs, expected = made(cell, batches, seed), Expected(cell.keys)
    for number in range(added):
        expected.add(*inputs[number % len(inputs)])
    check(subject.contents(pa.array(expected.keys)), expected.table())
    return {"seconds of a restore": took, "disk bytes a key": size / cell.keys}


def changed_against_without(
    keys: int, rows: Iterable[int], threads: int, samples: int, seed: int
) -> dict[int, tuple[float, float]]:
    """Nanoseconds a row of ``add_many`` with the changed keys, and without, by turns, in the median."""
    subject, found = forms(OURS, False)["two states"](None, threads), {}
    fill(subject, keys)
    for count in rows:
        columns = columns_of(made(Cell(False, threads, keys, count, min(keys, count)), samples, seed))
        taken: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * (samples + 1)):
            is_asked, start = number % 2 == 0, time.perf_counter()
            subject.total.add_many(*columns[number // 2 % len(columns)], return_changed=is_asked)
            taken[is_asked].append((time.perf_counter() - start) / count * 1e9)
        found[count] = (statistics.median(taken[True][1:]), statistics.median(taken[False][1:]))
    return found


def apart(threads: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a separate process with so many processors. The process ends without closing anything."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(theirs, threads, function, arguments))
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        answer = f"the process of {arguments} died"
    process.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _alone(pipe: Connection, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["POLARS_MAX_THREADS"] = str(threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    try:
        answer = function(*arguments)
    except Exception:  # noqa: BLE001 - it is raised where the answer is read
        answer = traceback.format_exc()
    pipe.send(answer)
    os._exit(0)
