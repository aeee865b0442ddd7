"""Shows the progress of a long tool on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

#: Seconds between two displays, and before the first: a quick tool shows nothing.
_INTERVAL = 0.5


class Progress:
    """A line with the share that is done; it overwrites itself, and appears only on a terminal."""

    def __init__(
        self, doing: str, total: int, *, stream: Any = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        self._doing = doing
        self._total = total
        self._done = 0
        self._meanwhile = meanwhile
        self._stream = sys.stderr if stream is None else stream
        self.is_shown: bool = self._stream is not None and self._stream.isatty()
        self._next = time.monotonic() + _INTERVAL
        self._has_line = False

    def advance(self, done: int) -> None:
        """Add finished work, and call ``meanwhile``."""
        self._done += done
        if self._meanwhile is not None:
            self._meanwhile()
        if not self.is_shown or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _INTERVAL
        share = 100 * self._done // max(self._total, 1)
        self._stream.write(f"\r{self._doing}: {min(share, 100)} %")
        self._stream.flush()
        self._has_line = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._has_line:
            self._stream.write("\r" + " " * (len(self._doing) + 8) + "\r")
            self._stream.flush()
