"""The core's map beside a dict, in one run: one key at a time, and in batches. Random order, results checked."""

import random

import numpy as np
import pytest

from statebackend._core.core_probe import StateTable
from statebackend._core.kernels import aggregation_kernels, batch_kernels
from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_core import StateCore

N = 500_000
STEP = 20_000


@pytest.fixture(scope="module")
def keys():
    return np.random.default_rng(1).permutation(N).astype(np.int64) + 1_000_000_000


@pytest.fixture(scope="module")
def table(keys):
    made = StateTable(StateCore(), value="long")
    batch_kernels.update_many(made, keys, np.zeros(N, dtype=np.int64))
    return made


@pytest.fixture
def some(keys):
    """Fresh key objects in random order, made outside the clock."""
    rng = random.Random(2)
    return [int(keys[rng.randrange(N)]) for _ in range(STEP)]


def rounds(benchmark, operation, rows):
    benchmark.extra_info["rows"] = rows
    benchmark.pedantic(operation, rounds=15, warmup_rounds=3)
    benchmark.extra_info["M rows/s"] = round(rows / benchmark.stats.stats.median / 1e6, 2)


@pytest.mark.benchmark(group="scalar read-modify-write, 500k keys, random order")
@pytest.mark.parametrize("peer", ["statebackend", "dict"])
def test_scalar_read_modify_write(benchmark, table, keys, some, peer):
    plain = dict.fromkeys(keys.tolist(), 0)

    def ours():
        for key in some:
            table.put(key, table.get(key) + 1)

    def theirs():
        for key in some:
            plain[key] = plain[key] + 1

    rounds(benchmark, ours if peer == "statebackend" else theirs, STEP)


@pytest.mark.benchmark(group="batch operations, 500k keys, random order")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("operation", ["update", "get", "sum"])
def test_batch(benchmark, table, keys, operation, threads):
    batch = np.random.default_rng(3).permutation(keys)
    values = np.ones(N, dtype=np.int64)
    run = {
        "update": lambda: batch_kernels.update_many(table, batch, values, threads=threads),
        "get": lambda: batch_kernels.get_many(table, batch, threads=threads),
        "sum": lambda: aggregation_kernels.add_many(
            table, batch, values, AddPlan("sum", "long"), threads=threads
        ),
    }[operation]
    rounds(benchmark, run, N)
    assert len(table) == N


@pytest.mark.benchmark(group="snapshot of 500k entries")
def test_snapshot_pause(benchmark, table):
    views = []
    benchmark.pedantic(lambda: views.append(table.owner.snapshot()), rounds=50)
    assert table.rows_in(views[0]).keys() == {(e.key, 0) for e in table}
    for view in views:
        view.release()


@pytest.mark.benchmark(group="mark and rollback of a 20k-row batch")
def test_rollback(benchmark, table, keys):
    batch = keys[:STEP]

    def undo():
        mark = table.owner.mark()
        batch_kernels.update_many(table, batch, np.full(STEP, 7, dtype=np.int64))
        table.owner.rollback(mark)
        table.owner.release(mark)

    before = batch_kernels.get_many(table, batch)[0]
    rounds(benchmark, undo, STEP)
    assert (batch_kernels.get_many(table, batch)[0] == before).all()
