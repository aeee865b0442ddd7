"""Contenders that carry out the same operation and take turns, round by round.

A machine that slows down for a while slows down all of them. Who begins changes from round to round. After
the last round all must hold the same: the checksums of their states are compared with each other and with
what the operation says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bench.flink import Session, round_order
from bench.flink.keys import Int64Array
from bench.state.operations import OPERATIONS, Operation, contents, parts_of
from bench.state.subjects import BackendSubject, DictSubject


class WrongResult(AssertionError):
    """A contender computed something else than the others."""


@dataclass
class Rounds:
    """Which keys, how many rounds, and in which orders."""

    keys: Int64Array
    warmup: int
    samples: int
    seed: int = 1
    #: How often a round goes over the keys; more than once makes them stay in the cache.
    passes: int = 1
    #: Whether the key objects lie in memory in no order, instead of that of the round.
    scattered: bool = False

    @property
    def count(self) -> int:
        """All rounds, the warm-up included."""
        return self.warmup + self.samples

    def order(self, number: int) -> Int64Array:
        """The keys in the order of a round."""
        return round_order(self.keys, self.seed, number)


def scattered(order: Int64Array) -> list[int]:
    """The keys as a list whose objects were made in another order than theirs. O(n log n).

    >>> scattered(np.array([30, 10, 20]))
    [30, 10, 20]
    """
    ascending = np.sort(order)
    made = ascending.tolist()
    return [made[position] for position in np.searchsorted(ascending, order).tolist()]


class Contender(Protocol):
    """One that takes turns."""

    def run_round(self, number: int) -> int:
        """Run a round and return the nanoseconds of its timed part."""

    def contents(self) -> int:
        """The checksum of what the state holds after the last round."""

    def details(self) -> dict[str, Any]:
        """What to keep beside the figures; asked after the last round."""


class Local:
    """A contender in this process: a backend of ours or a dict."""

    def __init__(self, name: str, subject: BackendSubject | DictSubject, rounds: Rounds) -> None:
        self.name, self.subject, self.rounds = name, subject, rounds
        self.operation: Operation = OPERATIONS[name]()
        if not self.operation.starts_empty:
            self.fill()
        elif rounds.passes != 1:
            raise ValueError("an operation on empty state can be done once a round")

    def fill(self) -> None:
        """Put what is there before the first round, or before each."""
        for part in parts_of(self.rounds.keys):
            self.subject.fill(self.operation.fill(part))

    def prepare(self, number: int) -> tuple[list[Any], ...]:
        """The input of a round; where rounds start from empty state, the state too."""
        if self.operation.starts_empty:
            self.subject.clear()
            self.fill()
        order = self.rounds.order(number)
        columns = self.operation.columns(order, number)
        return (scattered(order), *columns[1:]) if self.rounds.scattered else columns

    def run_round(self, number: int) -> int:
        columns = self.prepare(number)
        loop, passes = self.subject.loop(self.name), range(self.rounds.passes)
        begin = time.perf_counter_ns()
        for _ in passes:
            returned = loop(*columns)
        took = time.perf_counter_ns() - begin
        self.check(number, returned)
        return took

    def check(self, number: int, returned: int | None) -> None:
        """Raise unless the round read what it had to and left every key with state."""
        if returned != self.operation.returned(self.rounds.keys, number):
            raise WrongResult(f"{self.name} read other values than were written")
        if self.subject.entries() != len(self.rounds.keys):
            raise WrongResult(f"{self.name} left another number of keys")

    def contents(self) -> int:
        checksum = contents(self.subject.held(part) for part in parts_of(self.rounds.keys))
        self.subject.close()
        return checksum

    def details(self) -> dict[str, Any]:
        return {}


def make_local(
    name: str, who: str, rounds: Rounds, max_parallelism: int = 128, ttl: str = "off", loops: str = "each"
) -> Local:
    """The contender of a backend, by its name, or of a dict."""
    kind = OPERATIONS[name].kind
    subject = DictSubject(kind) if who == "dict" else BackendSubject(who, kind, max_parallelism, ttl, loops)
    return Local(name, subject, rounds)


class Flink:
    """A contender in a JVM, which checks its rounds itself."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.measurement: dict[str, Any] = {}

    def run_round(self, number: int) -> int:
        return self.session.run_round()

    def contents(self) -> int:
        self.measurement = self.session.measurement()
        return int(self.measurement["contents"])

    def details(self) -> dict[str, Any]:
        return {name: self.measurement[name] for name in ("gc", "gc_ms_in_samples", "jvm")}


@dataclass
class Timing:
    """What a contender took."""

    operations: int
    nanos: list[int] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ns_per_operation(self) -> float:
        """The median over the samples."""
        return statistics.median(self.nanos) / self.operations

    @property
    def mops(self) -> float:
        """Million operations per second."""
        return 1e3 / self.ns_per_operation


def take_turns(name: str, contenders: Mapping[str, Contender], rounds: Rounds) -> dict[str, Timing]:
    """Run all rounds of all contenders at one of the operations; their timings, without the warm-up."""
    operation = OPERATIONS[name]()
    operations = len(rounds.keys) * operation.per_key * rounds.passes
    expected = contents(operation.held(part, rounds.count, rounds.passes) for part in parts_of(rounds.keys))
    return in_turns(name, contenders, rounds, operations, dict.fromkeys(contenders, expected))


def in_turns(
    name: str,
    contenders: Mapping[str, Contender],
    rounds: Rounds,
    operations: int,
    expected: Mapping[str, int],
) -> dict[str, Timing]:
    """Run all rounds of all contenders, each of so many operations, and compare what each holds in the end."""
    timings = {who: Timing(operations) for who in contenders}
    order = list(contenders)
    for number in range(rounds.count):
        for who in order:
            nanos = contenders[who].run_round(number)
            if number >= rounds.warmup:
                timings[who].nanos.append(nanos)
        order.append(order.pop(0))
    for who, contender in contenders.items():
        if contender.contents() != expected[who]:
            raise WrongResult(f"after {name} the state of {who} is not what it has to be")
        timings[who].details = contender.details()
    return timings
