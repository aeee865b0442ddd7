"""The peer of the comparisons. Tests import ``bench`` from the checkout: it is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.append(str(Path(__file__).parents[2]))

#: Which import it by name.
MODULES = ("bench.state.__main__", "bench.state.by_type")


class InThisProcess:
    """Stands in for a contender in a process of its own, which takes half a second to start."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._contender = make(*arguments)

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._contender, name)


@pytest.fixture(scope="module")
def in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            patch.setattr(f"{name}.OwnProcess", InThisProcess)
        yield


if TYPE_CHECKING:
    from bench.flink import FlinkPeer


@pytest.fixture(scope="module")
def peer() -> FlinkPeer:
    from bench.flink import FlinkPeer

    peer = FlinkPeer(download=False, timeout=120)
    there, reason = peer.available()
    if not there:
        pytest.skip(reason)
    return peer
