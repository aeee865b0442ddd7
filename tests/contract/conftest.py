"""The contract suite runs over every backend that can be used here.

A test takes ``backend`` (the factory), ``make_keyed`` (keyed backends of it, closed afterwards) or ``keyed``
(one with LONG keys), and ``clock``. ``STATEBACKEND_CONTRACT_BACKENDS``, names with commas between, runs the
suite on other backends instead: those of another package, say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from all_backends import BACKENDS

import statebackend as sb
from statebackend.checkpoint.files.posix_calls import PosixCalls
from statebackend.testing import ManualClock

Keyed = sb.KeyedStateBackend
MakeKeyed = Callable[..., Keyed]


def backend_params() -> list[Any]:
    chosen = os.environ.get("STATEBACKEND_CONTRACT_BACKENDS")
    available = sb.available_backends()
    if chosen:
        return chosen.split(",")
    return [
        name
        if available[name].is_available
        else pytest.param(name, marks=pytest.mark.skip(reason=str(available[name].reason)))
        for name in BACKENDS
    ]


@pytest.fixture(params=backend_params())
def backend(request: pytest.FixtureRequest) -> sb.StateBackend:
    return sb.create_backend(request.param)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000)


@pytest.fixture
def make_keyed(backend: sb.StateBackend, clock: ManualClock) -> Iterator[MakeKeyed]:
    """Makes keyed backends, which are closed when the test ends."""
    made = []

    def make(key_type: Any = "bigint", **options: Any) -> Keyed:
        options.setdefault("clock", clock)
        made.append(backend.create_keyed_backend(key_type, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    made.clear()


@pytest.fixture
def keyed(make_keyed: MakeKeyed) -> Keyed:
    """A keyed backend with LONG keys, of which 1 is the current one."""
    made = make_keyed()
    made.set_current_key(1)
    return made


@pytest.fixture
def incremental_cleanup(backend: sb.StateBackend) -> None:
    """For tests of `cleanup_incrementally`, which has no effect on backends that say so, as in Flink."""
    if not backend.cleans_up_incrementally:
        pytest.skip("the backend defines incremental cleanup as without effect")


def assert_same(backend: sb.StateBackend, found: list[Any], expected: list[Any]) -> None:
    """The entries of a map are these, and in this order if the backend keeps it."""
    assert found == expected if backend.keeps_insertion_order else sorted(found) == sorted(expected)


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints do not wait for the disk: for tests of what is in thousands of them, and not of how they last."""
    monkeypatch.setattr(PosixCalls, "sync", lambda self, descriptor: None)
