"""What a test has left alive, by counters of live objects."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping


def left_alive(counters: Callable[[], Mapping[str, int]], before: Mapping[str, int]) -> dict[str, int]:
    """Counts that have risen. A full collection takes a tenth of a second: only where something seems to be left.

    A backend that is closed does not wait for what its threads still write, and these hold it until they end.
    """

    def left() -> dict[str, int]:
        return {name: count for name, count in counters().items() if count > before.get(name, 0)}

    deadline = time.monotonic() + 30
    found = left()
    while found:
        writing = [each for each in threading.enumerate() if each.name.startswith("statebackend-writing")]
        gc.collect()
        found = left()
        if not writing or time.monotonic() > deadline:
            break
        writing[0].join(0.05)
    return found
