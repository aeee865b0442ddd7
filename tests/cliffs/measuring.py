"""Ratios of processor time within one run: what a call costs at a large size, in calls at a small size."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: A factor above this is a cliff: the sizes differ by a hundred.
LIMIT = 3.0
#: A sample takes so many nanoseconds of the thread's processor time at least.
SAMPLE = 200_000
#: Interleaved repetitions of small and large, and attempts before a cliff is believed.
REPETITIONS = 3
ATTEMPTS = 5


@contextmanager
def no_collections() -> Iterator[None]:
    """Python's collector walks all objects of the tests: it would show as a cliff of whatever runs then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def spent(call: Callable[[], Any]) -> int:
    """The thread's processor time of one call, in nanoseconds: other processes do not count."""
    before = time.thread_time_ns()
    call()
    return time.thread_time_ns() - before


class Side:
    """A call that is repeated at one size. It gets a number that counts up, so that it can vary what it does."""

    def __init__(self, call: Callable[[int], Any], most: int = 1 << 20) -> None:
        self.call, self.most = call, most
        self.number = 0
        self.length = 0
        self.has_begun = False

    def run(self, calls: int) -> int:
        call, first = self.call, self.number
        self.number += calls
        before = time.thread_time_ns()
        for number in range(first, first + calls):
            call(number)
        return time.thread_time_ns() - before

    def sample(self) -> float:
        """Nanoseconds a call. The first sample finds how many calls make one that is long enough."""
        if self.length:
            return self.run(self.length) / self.length
        calls = 1
        while True:
            taken = self.run(calls)
            if taken >= SAMPLE and calls == 1 and not self.has_begun:
                # The first call may pay for all: it says nothing of how long others take.
                self.has_begun = True
                continue
            if taken >= SAMPLE or calls >= self.most:
                self.length = calls
                return taken / calls
            wanted = 2 * calls if taken <= 0 else int(1.3 * calls * SAMPLE / taken) + 1
            calls = min(self.most, 8 * calls, max(2 * calls, wanted))


def growth(small: Side, large: Side, repetitions: int = REPETITIONS) -> float:
    """How many times as long a call takes on the large side: the least of interleaved samples of each."""
    with no_collections():
        samples = [(small.sample(), large.sample()) for _ in range(repetitions)]
    return min(each for _, each in samples) / max(1.0, min(each for each, _ in samples))


def least(attempt: Callable[[], float], limit: float = LIMIT) -> float:
    """The least of a few attempts; as soon as one keeps the limit, no more are needed."""
    found = []
    for _ in range(ATTEMPTS):
        found.append(attempt())
        if found[-1] <= limit:
            break
    return min(found)


def core_bytes(keyed: Any) -> int:
    """The memory that the core has given to state, journals and snapshots; not what it keeps for later."""
    metrics = keyed.core.metrics()
    return int(metrics["run_bytes"] + metrics["blob_bytes"])
