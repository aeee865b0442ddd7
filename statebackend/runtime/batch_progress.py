"""The progress of a batch: its effects and the time of each part, in Spark's terms."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

_log = logging.getLogger(__name__)

#: Values of JSON.
Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
#: Figures, names and lists of them, as a backend or a manifest has them: the name of each says its meaning.
Figures: TypeAlias = dict[str, Any]


class Stopwatch:
    """Measures the time of each part of a batch."""

    __slots__ = ("_began", "_parts")

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the ``with`` block under a name, which may occur more than once."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - began

    def durations(self) -> dict[str, float]:
        """Milliseconds of each part so far, in the order of their first use."""
        return {name: round(seconds * 1000, 1) for name, seconds in self._parts.items()}

    def total(self) -> float:
        return time.perf_counter() - self._began


#: After so many batches in which a state without TTL has grown, the log says so.
GROWING_BATCHES = 100


class GrowthWatch:
    """Warns of states without TTL that have grown in each of the last 100 batches. O(states) for each batch."""

    def __init__(self) -> None:
        #: By state, its entries after the newest batch, and the batches in a row in which it has grown.
        self._seen: dict[str, tuple[int, int]] = {}

    def committed(self, entries: Mapping[str, int | None], has_ttl: Callable[[str], bool]) -> None:
        """Note the entries of all states after a batch; a backend may lack the figure of a state."""
        seen = {}
        for name, count in entries.items():
            if count is None:
                continue
            before, grown = self._seen.get(name, (count, 0))
            grown = grown + 1 if count > before else 0
            seen[name] = count, grown
            if grown == GROWING_BATCHES and not has_ttl(name):
                _log.warning(
                    "state %r has no TTL and has grown in each of the last %d batches, to %d entries. "
                    "sb.tools.growth(store) shows its largest keys",
                    name,
                    grown,
                    count,
                )
        self._seen = seen


def sizes(metrics: Figures) -> dict[str, int]:
    """The size of the state, as Spark defines it, from a keyed backend's metrics.

    >>> sizes({"entries": 2, "rows": 3, "run_bytes": 100, "used_bytes": 4120, "extent_bytes": 4096})
    {'numRowsTotal': 3, 'memoryUsedBytes': 124}
    >>> sizes({"entries": 2, "memory": {"cache": 5000, "table_readers": 10, "memtables": 900}})
    {'numRowsTotal': 2, 'memoryUsedBytes': 5010}
    """
    rows = metrics.get("rows", metrics["entries"])
    if "memory" in metrics:  # of a database: its cache holds the write buffers too
        parts = metrics["memory"]
        return {"numRowsTotal": rows, "memoryUsedBytes": parts["cache"] + parts["table_readers"]}
    # Runs hold entries and small values; large values and directories are outside of extents.
    outside = metrics.get("used_bytes", 0) - metrics.get("extent_bytes", 0)
    memory = metrics.get("run_bytes", 0) + max(0, outside)
    return {"numRowsTotal": rows, "memoryUsedBytes": memory}


def storable(figures: Mapping[str, object]) -> Figures:
    """Convert figures to JSON: Python's numbers, and None for values that JSON cannot express.

    A backend of another package may count in any type, and no commit may fail because of that.

    >>> storable({"entries": np.int64(3), "share": float("nan"), "states": {"count": np.float32(0.5)}})
    {'entries': 3, 'share': None, 'states': {'count': 0.5}}
    """
    stored: Figures = {}
    for name, figure in figures.items():
        is_plain = type(figure) is int and -(2**63) <= figure < 2**63  # most are
        stored[str(name)] = figure if is_plain else _storable(figure)
    return stored


def _storable(figure: object) -> Json:
    if figure is None or isinstance(figure, bool):
        return figure
    if isinstance(figure, str):
        return str(figure)
    if isinstance(figure, Mapping):
        return storable(figure)
    if isinstance(figure, (list, tuple)):
        return [_storable(each) for each in figure]
    if isinstance(figure, (float, np.floating)):
        return float(figure) if math.isfinite(figure) else None
    if isinstance(figure, np.bool_):
        return bool(figure)
    if not isinstance(figure, SupportsIndex):
        return None
    try:
        number = operator.index(figure)
    except TypeError:
        return None
    return number if -(2**63) <= number < 2**63 else None


def describe(progress: Figures) -> str:
    """One line for the log.

    >>> describe({"batchId": 3, "numInputRows": 10, "numOutputRows": 2, "numRowsTotal": 7,
    ...           "memoryUsedBytes": 2_500_000, "commitTimeMs": 4.2, "processedRowsPerSecond": 1234.5})
    'batch 3: 10 rows in, 2 out, 1,234 rows/s; state 7 rows, 2.5 MB; commit 4.2 ms'

    It mentions rows written and removed if they are known, rows that are not on time and timers if there were any, and
    the time of each part.
    """
    name = f"query {progress['name']}, " if progress.get("name") else ""
    text = (
        f"{name}batch {progress['batchId']}: {progress['numInputRows']:,} rows in, {progress['numOutputRows']:,} out, "
        f"{progress['processedRowsPerSecond']:,.0f} rows/s; state {progress['numRowsTotal'] or 0:,} rows, "
        f"{(progress['memoryUsedBytes'] or 0) / 1e6:,.1f} MB"
    )
    updated, removed = progress.get("numRowsUpdated"), progress.get("numRowsRemoved")
    if updated is not None and removed is not None:
        text += f", {updated:,} written, {removed:,} removed"
    text += f"; commit {progress['commitTimeMs']:.1f} ms"
    late, ahead = progress.get("numRowsLate"), progress.get("numRowsAhead")
    if late or ahead:
        text += f"; {late or 0:,} rows late, {ahead or 0:,} ahead, {progress['numRowsDroppedByWatermark']:,} dropped"
    if progress.get("numTimersFired"):
        text += f"; {progress['numTimersFired']:,} timers fired"
    durations = progress.get("durationMs")
    if durations:
        text += "; " + ", ".join([f"{name} {took:.0f}" for name, took in durations.items()]) + " ms"
    return text
