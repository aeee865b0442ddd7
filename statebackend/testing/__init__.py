"""Support for tests of stateful functions: a harness that runs them, and a clock that stands still.

>>> clock = ManualClock()
>>> clock.advance(1500)
>>> clock.now()
1500
"""

from statebackend.testing.harness import Harness, ManualClock

__all__ = ["Harness", "ManualClock"]
