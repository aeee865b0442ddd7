"""The memory that progress reports: what state takes, counted once."""

from __future__ import annotations

import numpy as np

import statebackend as sb
from statebackend.runtime.progress import sizes


def test_small_and_large_values_are_counted_once() -> None:
    keyed = sb.create_backend("heap", threads=1).create_keyed_backend(int)
    state = keyed.get_value_state(sb.ValueStateDescriptor("v", str))
    keys = np.arange(20_000)
    state.update_many(keys, [f"user-{key:010d}" for key in range(20_000)])
    small = sizes(keyed.metrics())["memoryUsedBytes"]
    # An entry has 24 bytes, its text a block of 32, and buckets come to that.
    assert 56 * 20_000 < small < 80 * 20_000
    keyed.set_current_key(1)
    state.update("x" * 3_000_000)
    assert 2_990_000 < sizes(keyed.metrics())["memoryUsedBytes"] - small < 3_100_000
    state.clear_many(keys)
    while keyed.core.advance(1 << 20):
        pass
    assert sizes(keyed.metrics())["memoryUsedBytes"] < 100_000
    keyed.close()
