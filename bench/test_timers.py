"""Timers of every backend: the loops of `bench.timers.ours`, with few keys, results checked."""

import pytest

import statebackend as sb
from bench.flink.keys import random_keys
from bench.timers.ours import poll, register, times_of

SIZES = {"heap": 20_000, "reference": 200}


@pytest.mark.parametrize("backend", SIZES)
@pytest.mark.parametrize("operation", ["register", "poll"])
def test_timers(benchmark, operation, backend):
    keys = random_keys(SIZES[backend])
    columns = keys.tolist(), times_of(keys).tolist()
    made, totals = [], []

    def setup():
        keyed = sb.create_backend(backend).create_keyed_backend(sb.types.LONG)
        made.append(keyed)
        if operation == "poll":
            register(keyed, *columns)
        return (keyed,), {}

    def run(keyed):
        if operation == "poll":
            totals.append(poll(keyed))
        else:
            register(keyed, *columns)

    benchmark.group = f"timers: {operation}"
    benchmark.pedantic(run, setup=setup, rounds=5, warmup_rounds=1)
    if operation == "register":
        totals = [poll(keyed) for keyed in made]
    assert set(totals) == {int(keys.sum())}
    for keyed in made:
        keyed.close()
    benchmark.extra_info["M ops/s"] = round(len(keys) / benchmark.stats.stats.median / 1e6, 3)
