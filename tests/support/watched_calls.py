"""Real calls of the system, each of which a test sees before it is made: to count it, to fail it, or to die there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statebackend.checkpoint.files import PosixCalls


class WatchedCalls(PosixCalls):
    """Real calls. ``before`` is given the number, the name and the arguments of each; if it raises, nothing is done."""

    def __init__(self, before: Callable[..., object]) -> None:
        self.before = before
        self.count = 0

    def tick(self, name: str = "", *arguments: Any) -> None:
        """A call, or a place between two, which counts as one."""
        self.before(self.count, name, *arguments)
        self.count += 1


def _watched(name: str) -> Callable[..., Any]:
    def call(self: WatchedCalls, *arguments: Any) -> Any:
        self.tick(name, *arguments)
        return getattr(PosixCalls, name)(self, *arguments)

    return call


for _name in [name for name in vars(PosixCalls) if not name.startswith("_")]:
    setattr(WatchedCalls, _name, _watched(_name))
