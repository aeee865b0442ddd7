"""Finalisers that do something at every collection, and collections wherever an object is made.

On CPython 3.10 and 3.11 any new container can start a collection, so that with a threshold of 1 a finaliser runs at
every point that makes one. On later versions collections wait for the next bytecode, and tests see less.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from statebackend.errors import UsageError


class Cycle:
    """Garbage that acts when a collection finds it, and leaves more of its kind."""

    def __init__(self, meddler: Meddler) -> None:
        self.meddler, self.itself = meddler, self

    def __del__(self) -> None:
        self.meddler.meddle()


class Meddler:
    """Runs `act` in a finaliser at every collection, and has one start whenever an object is made."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.runs, self.refused = act, 0, 0
        self.failures: list[BaseException] = []
        self.is_on = self.is_inside = False

    def meddle(self) -> None:
        if not self.is_on:
            return
        if not self.is_inside:
            self.is_inside = True
            try:
                self.act()
                self.runs += 1
            except UsageError:  # within a call
                self.refused += 1
            except BaseException as error:  # noqa: BLE001 - of a finaliser it would be lost
                self.failures.append(error)
            finally:
                self.is_inside = False
        Cycle(self)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        before = gc.get_threshold()
        gc.collect()
        self.is_on = True
        Cycle(self)
        gc.set_threshold(1, 100_000, 100_000)  # of the youngest only: the others take long
        try:
            yield
        finally:
            gc.set_threshold(*before)
            self.is_on = False
            gc.collect()
        assert self.runs
        assert not self.failures, self.failures[0]
