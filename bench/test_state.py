"""The state API of every backend beside a dict: the loops of ``bench.state``, with few keys, results checked."""

import pytest

import statebackend as sb
from bench.flink.keys import random_keys
from bench.state.lockstep import Local, Rounds
from bench.state.operations import OPERATIONS, contents
from bench.state.subjects import BackendSubject, DictSubject

N = 20_000
WARMUP, SAMPLES = 2, 7


def subject(peer, kind, ttl="off"):
    if peer == "dict":
        return DictSubject(kind)
    reason = sb.available_backends()[peer].reason
    if reason is not None:
        pytest.skip(reason)
    return BackendSubject(peer, kind, max_parallelism=128, ttl=ttl)


def measure(benchmark, name, tested):
    """Time the rounds of an operation; pytest-benchmark calls `setup` before each, warm-up included."""
    rounds = Rounds(random_keys(N), WARMUP, SAMPLES)
    local = Local(name, tested, rounds)
    numbers = iter(range(rounds.count))

    def setup():
        number = next(numbers)
        columns = local.prepare(number)
        return (number, tested.loop(name), columns), {}

    returned = []
    benchmark.pedantic(
        lambda number, loop, columns: returned.append((number, loop(*columns))),
        setup=setup,
        rounds=SAMPLES,
        warmup_rounds=WARMUP,
    )
    assert len(returned) == rounds.count
    for number, result in returned:
        local.check(number, result)
    assert local.contents() == contents([local.operation.held(rounds.keys, rounds.count)])
    operations = N * local.operation.per_key
    benchmark.extra_info["M ops/s"] = round(operations / benchmark.stats.stats.median / 1e6, 2)


@pytest.mark.parametrize("peer", ["heap", "reference", "dict"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(benchmark, name, peer):
    benchmark.group = f"{name}, {N:,} keys"
    measure(benchmark, name, subject(peer, OPERATIONS[name].kind))


@pytest.mark.parametrize("peer", ["heap", "reference"])
@pytest.mark.parametrize("ttl", ["default", "no_cleanup"])
@pytest.mark.parametrize("name", ["value_update", "value_get"])
def test_operation_with_ttl(benchmark, name, ttl, peer):
    benchmark.group = f"{name}, TTL {ttl}, {N:,} keys"
    measure(benchmark, name, subject(peer, "value", ttl))
