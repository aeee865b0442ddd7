"""What many small batches write, by kind of file, beside the sixteen bytes that each change has, and what they take."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoint.costs import filled, memory, store_in
from statebackend.checkpoint.keyed.chain import is_base_due, run_to_merge

#: A key and a value of eight bytes each.
CHANGE = 16


class Seen:
    """The files of a store, each counted once, by what it is."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: set[str] = set()
        self.written = {"base": 0, "delta": 0, "merged": 0, "manifest": 0}
        self.most_files = 0

    def look(self) -> None:
        """Count what has come since the last look; call it after every batch."""
        files = [path for path in self._root.rglob("*") if path.is_file()]
        self.most_files = max(self.most_files, len(files))
        for path in files:
            name = path.relative_to(self._root).as_posix()
            if name in self._known:
                continue
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                continue
            if name.startswith("data/"):
                if path.name.startswith("x-") and "-delta-" in path.name:
                    kind = "merged"
                else:
                    kind = "base" if "-base-" in path.name else "delta"
            elif name.startswith("checkpoints/") and path.parent.name == "checkpoints":
                kind = "manifest"
            else:
                continue
            self._known.add(name)
            self.written[kind] += size


def measured(n: int, batches: int, changes: int, folder: str | None) -> dict[str, float]:
    """Bytes written for each byte of change, by kind, the most files that the store held, and what batches took.

    Times of a snapshot and its commit are medians of the first and of the last tenth of all batches; ``memory`` is what
    the process had after the last batch and not after the first tenth.
    """
    keyed, (state,) = filled(n)
    rng = np.random.default_rng(5)
    with store_in(folder) as store, keyed:
        store.commit(0, [keyed.snapshot(0, store).result()])
        seen = Seen(Path(store.uri))
        seen.look()
        for kind in seen.written:
            seen.written[kind] = 0
        took, at_first = [], 0
        for batch in range(1, batches + 1):
            keys = rng.choice(n, changes, replace=False)
            state.update_many(keys, rng.integers(0, 2**62, changes))
            began = time.perf_counter()
            pending = keyed.snapshot(batch, store)
            pending.result()
            paused = time.perf_counter()
            rewriting = keyed._log.rewriting
            if rewriting is not None:
                rewriting.wait()  # so that every file is seen, however fast batches follow each other
                seen.look()
            resumed = time.perf_counter()
            store.commit(batch, [pending.result()])
            took.append(1000 * (time.perf_counter() - resumed + paused - began))
            seen.look()
            if batch == batches // 10:
                at_first = memory()
        grown = memory() - at_first
    tenth = max(batches // 10, 1)
    flat = {
        "first": statistics.median(took[:tenth]),
        "last": statistics.median(took[-tenth:]),
        "memory": grown / 1e6,
    }
    of_changes = batches * changes * CHANGE
    return {kind: size / of_changes for kind, size in seen.written.items()} | {
        "files": seen.most_files,
        **flat,
    }


def simulated(n: int, batches: int, changes: int) -> dict[str, Any]:
    """The same for a state of any size, by the sizes of files alone: what merges write by the rules of the library.

    Sizes are those that `measured` shows: 12 bytes a row of a base; of a delta 1,300 and 20 a row, of a merged one 16,
    with one row for each different key; of a manifest 1,200 and 165 for each file that it names.
    """
    base, deltas = 12 * n, [(1_300 + 20 * changes, changes)]
    written = {"base": 0, "delta": 0, "merged": 0, "manifest": 0}
    most = 0
    for _ in range(batches):
        size = 1_300 + 20 * changes
        deltas.append((size, changes))
        written["delta"] += size
        sizes = [each for each, _ in deltas]
        if is_base_due(base, sum(sizes)):
            written["base"] += base
            deltas = []
        elif (run := run_to_merge(sizes, base)) is not None:
            rows = sum(deltas[at][1] for at in run)
            distinct = int(n * -np.expm1(-rows / n))
            made = 1_300 + 16 * distinct
            written["merged"] += made
            deltas[run.start : run.stop] = [(made, rows)]
        written["manifest"] += 1_200 + 165 * (1 + len(deltas))
        most = max(most, len(deltas) + 1)
    of_changes = batches * changes * CHANGE
    return {kind: size / of_changes for kind, size in written.items()} | {"files": most}


def space(n: int, batches: int, changes: int, folder: str | None) -> dict[str, float]:
    """The disk that a store with ``retain="auto"`` needs at most, the state, and how many checkpoints are kept."""
    keyed, (state,) = filled(n)
    rng, most = np.random.default_rng(5), 0
    with store_in(folder, retain="auto") as store, keyed:
        for batch in range(batches):
            keys = np.arange(n) if changes == n else rng.choice(n, changes, replace=False)
            state.update_many(keys, rng.integers(0, 2**62, changes))
            store.commit(batch, [keyed.snapshot(batch, store).result()])
            files = [path.stat() for path in Path(store.uri).rglob("*") if path.is_file()]
            most = max(most, sum(each.st_size for each in files))
            if batch == 0:
                state_bytes = most
        kept = len(store.checkpoints())
    return {"state": state_bytes / 1e6, "disk": most / 1e6, "kept": kept}
