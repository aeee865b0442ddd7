"""Support for tests of stateful functions: a harness that runs them, and a clock that stands still.

>>> clock = ManualClock()
>>> clock.advance(1500)
>>> clock.now()
1500
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from statebackend.errors import usage
from statebackend.state.clocks import Clock
from statebackend.testing.harness import Harness, InjectedFault, ManualClock

if TYPE_CHECKING:
    from statebackend.testing.tws_tester import TwsTester

__all__ = ["Harness", "InjectedFault", "ManualClock", "TwsTester", "use_clock"]

B = TypeVar("B")


def __getattr__(name: str) -> Any:
    if name == "TwsTester":  # needs PySpark
        from statebackend.testing.tws_tester import TwsTester

        return TwsTester
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def use_clock(batches: B, clock: Clock) -> B:
    """Let a query use a clock of the test instead of the machine's; return ``batches``, made by ``stateful``.

    Set it before the query starts.

    >>> import statebackend as sb
    >>> function = sb.map_with_state(lambda row, n: (None, (n or 0) + 1), int)
    >>> use_clock(sb.spark.stateful(function, key="user", state="/data/state"), ManualClock())
    <stateful MapWithState, key 'user', state at /data/state>
    """
    use = getattr(batches, "_use_clock", None)
    if not callable(use):
        raise usage.argument(
            f"cannot set the clock of a {type(batches).__name__}; expected the result of sb.spark.stateful"
        )
    use(clock)
    return batches
