"""A day that is replayed in one batch, or in any others, gives the rows and leaves the state of the day as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
from contract.samples import dump
from event_days import (
    DELAY,
    SCHEMA,
    Counts,
    Event,
    Sessions,
    Windows,
    cut,
    cut_at_random,
    day,
    sessions_of,
    table_of,
)
from functions.conftest import each_way

import statebackend as sb
from statebackend.testing import Harness

pytestmark = [pytest.mark.usefixtures("either_way"), each_way]


class Replay:
    def __init__(self, harness: Harness, rows: list[Any]) -> None:
        #: Rows of different users come in another order, as do their batches.
        self.rows = sorted((tuple(row) for row in rows), key=lambda row: (row[0], row[1]))
        keyed: Any = harness.keyed
        self.watermark = harness.watermark
        self.timers = keyed.timers.rows()
        states = [state for _, state in sorted(keyed._states.items())]
        self.state = [dump(keyed, state.descriptor, sorts_maps=True) for state in states]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replay) and vars(self) == vars(other)


def replay(function: Any, batches: list[list[Event]], timers: str, backend: str, restarts: int = 0) -> Replay:
    event_time = sb.EventTime("at", watermark_delay=DELAY, timers=timers)
    with Harness(function, key="user", schema=SCHEMA, event_time=event_time, backend=backend) as harness:
        rows = []
        for number, batch in enumerate(batches):
            rows += harness.process_batch(table_of(batch))
            if restarts and number % restarts == 0:
                harness.restart()
        if restarts:
            harness.process_batch(table_of([]))  # the function asks for its states
        return Replay(harness, rows)


def live(events: list[Event]) -> list[list[Event]]:
    return [[event] for event in events]


def events_for(backend: str) -> int:
    return 300 if backend == "heap" else 150


@pytest.mark.sampled(4)
@pytest.mark.parametrize("timers", ["after_batch", "between_rows"])
def test_expiring_counts_equal_the_live_day(backend: str, timers: str, rng: random.Random) -> None:
    events = day(rng, events_for(backend), ordered_by_user=True)
    wanted = replay(Counts(), live(events), timers, backend)
    assert len(wanted.rows) == len(events)
    assert len({row[2][1] for row in wanted.rows}) > 3, "some go on"
    assert sum(row[2][1] == 1 for row in wanted.rows) > 10, "some begin anew"
    for batches in (cut(events, 1), cut(events, 7), cut_at_random(events, rng)):
        assert replay(Counts(), batches, timers, backend) == wanted, list(map(len, batches))
    assert replay(Counts(), cut(events, 20), timers, backend, restarts=3) == wanted


@pytest.mark.sampled(4)
@pytest.mark.parametrize("function", [Windows, Sessions], ids=["windows", "sessions"])
def test_windows_and_sessions_equal_the_live_day(
    backend: str, function: type[sb.KeyedProcessFunction], rng: random.Random
) -> None:
    events = day(rng, events_for(backend), ordered_by_user=False)
    wanted = replay(function(), live(events), "between_rows", backend)
    assert len(wanted.rows) > 20
    for batches in (cut(events, 1), cut(events, 7), cut_at_random(events, rng)):
        assert replay(function(), batches, "between_rows", backend) == wanted, list(map(len, batches))
    assert replay(function(), cut(events, 20), "between_rows", backend, restarts=3) == wanted
    if function is Sessions:
        assert wanted.watermark is not None
        assert [tuple(row) for row in wanted.rows] == sessions_of(events, wanted.watermark)
