"""Our side: one timer for each key at a time that follows from the key, as on the JVM's side; then all of them fire."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import statebackend as sb
from bench.flink.keys import Int64Array, round_order

#: After every time that there is.
THE_END = 2**63 - 1


def times_of(keys: Int64Array) -> Int64Array:
    """A random time for each key, never negative. O(n).

    >>> times_of(np.array([1, 2])).min() > 0
    True
    """
    mixed = keys.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    times: Int64Array = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
    return times


def register(keyed: Any, keys: list[int], times: list[int]) -> None:
    """The timed loop: a timer for each key."""
    set_current_key, register_timer = keyed.set_current_key, keyed.timers.register_event_time_timer
    for key, at in zip(keys, times, strict=True):
        set_current_key(key)
        register_timer(at)


def move(keyed: Any, keys: list[int], times: list[int]) -> None:
    """The timed loop of a session timeout: each key's timer is deleted and registered later."""
    set_current_key, timers = keyed.set_current_key, keyed.timers
    delete, register_timer = timers.delete_event_time_timer, timers.register_event_time_timer
    for key, at in zip(keys, times, strict=True):
        set_current_key(key)
        delete(at)
        register_timer(at + 1)


def poll(keyed: Any) -> int:
    """The timed loop: every timer fires; the sum of their keys."""
    total = 0
    for _ in keyed.timers.due(THE_END):
        total += keyed.current_key
    return total


class Rounds:
    """Rounds of the operations over the same keys, each on an empty backend, in an order of its own."""

    def __init__(self, keys: Int64Array, backend: str = "heap", key_groups: int = 128, seed: int = 1) -> None:
        self.keys, self.backend, self.key_groups, self.seed = keys, backend, key_groups, seed

    def seconds(self, operation: str, number: int) -> float:
        """What one round takes. Its result is checked outside the clock."""
        order = round_order(self.keys, self.seed, number)
        columns = order.tolist(), times_of(order).tolist()
        with sb.create_backend(self.backend).create_keyed_backend(
            sb.types.LONG, max_parallelism=self.key_groups
        ) as keyed:
            if operation == "timer_register":
                took = timed(lambda: register(keyed, *columns))
                total = poll(keyed)
            elif operation == "timer_move":
                register(keyed, *columns)
                took = timed(lambda: move(keyed, *columns))
                total = poll(keyed)
            else:
                register(keyed, *columns)
                found: list[int] = []
                took = timed(lambda: found.append(poll(keyed)))
                (total,) = found
            if total != int(self.keys.sum()) or keyed.timers.count():
                raise AssertionError(f"{operation}: other timers fired than were registered")
        return took


def timed(run: Callable[[], Any]) -> float:
    """Seconds that a call takes, with the cyclic collector at rest."""
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    finally:
        gc.enable()
