"""What every test gets: profiles, seeds, and the check that nothing of the core stays alive.

Options: ``--stress`` runs the tests marked ``stress`` and all cases of the others (see `chosen_cases`), and draws a new
seed; ``--seed N`` repeats a run; ``--day`` repeats the choice of cases of another day; ``--kills N`` says how often the
long run kills a query.
The environment variable ``STATEBACKEND_BUILD`` (``release`` or ``checked``, set by the Makefile) says which
build must be found, so that a suite meant for one can never pass on the other.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import itertools
import os
import random
import secrets
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from types import ModuleType
from typing import Any

import hypothesis
import numpy as np
import pytest
import spark_classes
from left_alive import left_alive

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


# ------------------------------------------------------------------------------------------- randomness

# A slow machine fails no health check.
_PATIENT = hypothesis.settings(
    deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", _PATIENT, derandomize=True, database=None, max_examples=60)
hypothesis.settings.register_profile(
    "stress", _PATIENT, max_examples=int(os.environ.get("STATEBACKEND_STRESS_EXAMPLES", "2000"))
)

DEFAULT_SEED = 20_240_101


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("statebackend")
    group.addoption(
        "--stress", action="store_true", help="run all cases and the tests marked 'stress', on a new seed"
    )
    group.addoption("--kills", type=int, default=200, help="of real queries, in the long run (%(default)s)")
    group.addoption(
        "--day",
        default=datetime.date.today().isoformat(),
        help="chooses the cases of tests with many of them (%(default)s)",
    )
    group.addoption("--seed", type=int, default=None, help="seed of the fixtures rng and np_rng")


def pytest_configure(config: pytest.Config) -> None:
    stress = config.getoption("stress")
    hypothesis.settings.load_profile("stress" if stress else "ci")
    if not stress:
        # Of Spark's drivers, and of its masters and workers. `spark_cluster` hands them on to executors.
        os.environ.setdefault("SPARK_SUBMIT_OPTS", spark_classes.options())
        os.environ.setdefault("SPARK_DAEMON_JAVA_OPTS", spark_classes.SHORT_LIVED)
    if config.option.seed is None:
        config.option.seed = secrets.randbelow(2**31) if stress else DEFAULT_SEED
    wanted, found = os.environ.get("STATEBACKEND_BUILD"), core_build()
    if wanted and found not in (wanted, "not built"):
        raise pytest.UsageError(f"this run is for the {wanted} build, but the {found} build is in place")


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"statebackend: {core_build()} build, seed {config.option.seed}, cases of --day {config.option.day}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("stress"):
        return
    chosen = chosen_cases([item for item in items if "stress" not in item.keywords], config.option.day)
    deselected = [item for item in items if item not in chosen]
    items[:] = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=deselected)


def pytest_collection_finish() -> None:
    """Hide the tests themselves from the garbage collector, which would walk all of them in each collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """A generator seeded by ``--seed`` and the name of the test, so that it repeats in any selection."""
    return random.Random(f"{request.config.option.seed}:{request.node.nodeid}")


@pytest.fixture
def np_rng(rng: random.Random) -> np.random.Generator:
    """The same for numpy."""
    return np.random.default_rng(rng.getrandbits(64))


@pytest.fixture
def day_rng(request: pytest.FixtureRequest) -> random.Random:
    """A generator seeded by ``--day`` and the name of the test: it chooses the cases of a run without ``--stress``."""
    return random.Random(f"{request.config.option.day}:{request.node.nodeid}")


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """Bytes traced since the start of the test."""
    gc.collect()
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()


@pytest.fixture
def is_stress(request: pytest.FixtureRequest) -> bool:
    """Whether this is the long run, with ``--stress``."""
    return bool(request.config.getoption("stress"))


# ------------------------------------------------------------------------------------------- live objects

_failed = pytest.StashKey[bool]()
#: Tests that failed or leaked: pytest keeps their frames, and those keep objects of the core.
_excused: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and report.when in ("setup", "call"):
        item.stash[_failed] = True
        if {"rng", "np_rng"} & set(getattr(item, "fixturenames", ())):
            stress = " --stress" if item.config.getoption("stress") else ""
            repeat = f"make test PYTEST_ARGS='{item.nodeid} --seed {item.config.option.seed}{stress}'"
            report.sections.append(("how to repeat", repeat))
    return report


def _arena() -> ModuleType | None:
    try:
        return importlib.import_module("statebackend._core.memory.arena")
    except ImportError:
        return None


def core_build() -> str:
    """Which build is in place: ``release``, ``checked`` or ``not built``."""
    arena = _arena()
    if arena is None:
        return "not built"
    return "checked" if arena.is_checked_build() else "release"


def live_counters() -> Callable[[], dict[str, int]] | None:
    """The core's counters of live objects; only the checked build counts."""
    return _arena().live_counters if core_build() == "checked" else None


@pytest.fixture(scope="session", autouse=True)
def nothing_alive_at_the_end() -> Iterator[None]:
    """On the checked build: when the last fixture is gone, so is every object of the core."""
    counters = live_counters()
    yield
    if counters is not None and not _excused:
        assert left_alive(counters, {}) == {}


@pytest.fixture(autouse=True)
def nothingleft_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the checked build: after each test the counters are back where they were before it.

    That is zero, unless a fixture of a wider scope holds something; those are seen to at the session's end.
    """
    counters = live_counters()
    if counters is None:
        yield
        return
    before = counters()
    yield
    if request.node.stash.get(_failed, False):
        _excused.append(request.node.nodeid)
        return
    # pytest keeps the fixtures' values here until after the last teardown.
    request.node.funcargs.clear()
    left = left_alive(counters, before)
    if left:
        _excused.append(request.node.nodeid)
    assert left == {}, f"left alive by this test: {left} (before it: {before})"
