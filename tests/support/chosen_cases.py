"""Chooses the cases of parametrised tests that a run without ``--stress`` has.

A test with many cases runs as many as contain each pair of values of two parameters. A test marked ``sampled(n)``
runs n of its cases; tests marked ``sampled(n, of=name)`` share n cases. The seed is a day, so that different days have
different cases. A run with ``--stress`` has all cases.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

#: A test with fewer cases runs all of them.
MANY = 24


def chosen_cases(items: Iterable[pytest.Item], seed: str) -> set[pytest.Item]:
    """The chosen cases of each test."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        sampled = item.get_closest_marker("sampled")
        together = sampled.kwargs.get("of") if sampled else None
        tests[together or item.nodeid.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for name, cases in tests.items():
        rng = random.Random(f"{seed}:{name}")
        sampled = cases[0].get_closest_marker("sampled")
        if sampled is not None:
            chosen.update(rng.sample(cases, min(sampled.args[0], len(cases))))
        else:
            chosen.update(cases if len(cases) < MANY else _covering_pairs(cases, rng))
    return chosen


def _covering_pairs(items: list[pytest.Item], rng: random.Random) -> list[pytest.Item]:
    """Few of the items, so that each pair of values that occurs in one item occurs in a chosen one."""
    pairs = {item: _pairs_of(item) for item in items}
    missing = set().union(*pairs.values())
    candidates = rng.sample(items, len(items))
    chosen = []
    while missing:
        best = max(candidates, key=lambda item: len(pairs[item] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def _pairs_of(item: pytest.Item) -> set[tuple[Any, ...]]:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    values = [(name, type(value), _hashable(value)) for name, value in sorted(parameters.items())]
    return set(itertools.combinations(values, min(2, len(values))))


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
