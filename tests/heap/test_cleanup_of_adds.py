"""`cleanup_incrementally` looks at so many entries for each `add`, whichever way the value goes."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

import statebackend as sb
from statebackend.state import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

LONG, DATE = sb.types.LONG, sb.types.DATE
SIZE = 2


def added(a: int, b: int) -> int:
    return a + b


CASES: dict[str, tuple[Any, Any]] = {
    "a function": (sb.ReducingStateDescriptor("s", added, LONG), 1),
    "a sum": (sb.ReducingStateDescriptor("s", "sum", LONG), 1),
    "a sum of numpy's numbers": (sb.ReducingStateDescriptor("s", "sum", LONG), np.int64(1)),
    "a sum of decimals": (
        sb.ReducingStateDescriptor("s", "sum", sb.types.of("decimal(10,2)")),
        Decimal("1.50"),
    ),
    "the latest date": (sb.ReducingStateDescriptor("s", "max", DATE), datetime.date(2026, 1, 2)),
    "an average": (sb.AggregatingStateDescriptor("s", "avg", LONG), 3),
    "an average of numpy's numbers": (sb.AggregatingStateDescriptor("s", "avg", LONG), np.int64(3)),
    "a fold": (sb.FoldingStateDescriptor("s", 0, added, LONG), 1),
    "nothing": (sb.ReducingStateDescriptor("s", added, LONG), None),
}


@pytest.mark.parametrize("case", CASES)
def test_an_add_cleans_up_once(case: str) -> None:
    descriptor, value = CASES[case]
    clock = ManualClock(0)
    config = StateTtlConfig.new_builder(10).cleanup_incrementally(SIZE, False).build()
    with sb.create_backend("heap").create_keyed_backend(int, clock=clock, max_parallelism=1) as keyed:
        state: Any = keyed.get_state(descriptor.enable_time_to_live(config))
        state.add_many(range(40), [1 if value is None else value] * 40)
        clock.set(1_000)
        for turn in range(1, 5):
            keyed.set_current_key(1_000 + turn)
            state.add(value)
            assert keyed.metrics()["states"]["s"]["expired_by_cleanup"] == SIZE * turn
