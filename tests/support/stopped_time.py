"""A wall clock that stands still until a test moves it."""

from __future__ import annotations


class StoppedTime:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def time(self) -> float:
        return self.now
