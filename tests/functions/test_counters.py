"""Counters, and that no figure makes a commit fail."""

from __future__ import annotations

import decimal
import fractions
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import statebackend as sb
from statebackend.backends.reference import ReferenceBackend, ReferenceKeyedBackend
from statebackend.functions.context import Counter, Metrics
from statebackend.runtime import BatchSource, Job, Runner
from statebackend.runtime.batch_progress import Stopwatch, describe, storable
from statebackend.types import Serializer, of

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("integer", INTEGERS)
def test_numpy_integers_count_exactly_and_as_ints(integer: type[np.integer[Any]]) -> None:
    counter = Counter()
    counter.inc(integer(100))
    counter.inc(integer(100))  # 200 is more than int8 holds
    assert (counter.get_count(), type(counter.get_count())) == (200, int)
    counter.dec(integer(100))
    assert (counter.get_count(), type(counter.get_count())) == (100, int)


@pytest.mark.parametrize(
    "refused",
    [1.0, np.float64(1), float("nan"), True, np.bool_(True), "1", b"1", None, decimal.Decimal(1),
     fractions.Fraction(1), np.array([1, 2]), [1], 1j],
    ids=repr,
)  # fmt: skip
def test_values_that_are_not_integers_are_refused_and_change_nothing(refused: Any) -> None:
    counter = Counter()
    counter.inc(7)
    for count in (counter.inc, counter.dec):
        with pytest.raises(sb.UsageError, match="whole numbers, not by a"):
            count(refused)
        assert counter.get_count() == 7


def test_a_counter_holds_64_bits() -> None:
    for up, down, most in ((Counter.inc, Counter.dec, 2**63 - 1), (Counter.dec, Counter.inc, 2**63)):
        counter = Counter()
        up(counter, most)
        for more in (1, np.uint64(2**64 - 1), 10**5000):
            with pytest.raises(sb.UsageError, match="64 bits"):
                up(counter, more)
            assert abs(counter.get_count()) == most
        down(counter, 1)


def test_names_of_counters() -> None:
    metrics = Metrics()
    for refused in ("", None, 5, b"late", "late\ud800"):
        with pytest.raises(sb.UsageError, match="name of a counter"):
            metrics.counter(refused)  # type: ignore[arg-type]
    assert metrics.values() == {}
    metrics.counter("zu spät 🕰").inc()
    assert metrics.values() == {"zu spät 🕰": 1}


class Counting(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        ctx.metrics.counter("amount").inc(row.amount if row.amount < 0 else np.int64(row.amount))
        if row.amount == 99:
            ctx.metrics.counter("amount").inc(0.5)  # type: ignore[arg-type]


class OddKeyed(ReferenceKeyedBackend):
    fails = False

    def counts(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("no figures")
        return {
            **super().counts(),
            "entries": np.int64(3),
            "rows": np.float64("nan"),
            "run_bytes": np.uint64(5),
            "states": {"count": np.int32(3), "odd": object()},
        }

    def count_changes(self, mark: Any) -> Any:
        return np.int64(1), 10**5000


class Odd(ReferenceBackend):
    def create_keyed_backend(self, *args: Any, **options: Any) -> OddKeyed:
        return OddKeyed(*args, **options)


def batch(*amounts: int) -> pa.Table:
    return pa.table({"user": ["ann"] * len(amounts), "amount": amounts})


@pytest.fixture(params=["heap", "reference", Odd()], ids=["heap", "reference", "odd"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    job = Job(Counting(), key="user", backend=request.param)
    runner = Runner(job, sb.CheckpointStore(tmp_path / "store"), of("string"))
    yield runner
    runner.close()


def test_counters_of_numpy_integers_are_committed(runner: Runner) -> None:
    committed = runner.run(0, BatchSource(lambda: batch(3, 4)), Stopwatch())
    assert committed.checkpoint.manifest.progress["customMetrics"] == {"amount": 7}
    with pytest.raises(sb.UsageError, match="whole numbers"):
        runner.run(1, BatchSource(lambda: batch(99)), Stopwatch())
    committed = runner.run(1, BatchSource(lambda: batch(-6)), Stopwatch())
    assert committed.checkpoint.manifest.progress["customMetrics"] == {"amount": 100}
    assert describe({**committed.progress, "processedRowsPerSecond": 1.0})


def test_backend_without_figures_leaves_the_batch_undone(tmp_path: Path) -> None:
    runner = Runner(
        Job(Counting(), key="user", backend=Odd()), sb.CheckpointStore(tmp_path / "store"), of("string")
    )
    try:
        OddKeyed.fails = True
        with pytest.raises(RuntimeError, match="no figures"):
            runner.run(0, BatchSource(lambda: batch(3)), Stopwatch())
        OddKeyed.fails = False
        assert runner.run(0, BatchSource(lambda: batch(3)), Stopwatch()).checkpoint.id == 0
    finally:
        OddKeyed.fails = False
        runner.close()


def test_figures_are_json() -> None:
    figures = {
        "a": np.int64(1), "b": [np.float32(0.5), float("inf")], "c": {1: np.bool_(True), "d": None},
        "e": 2**63, "f": object(), "g": "text", "h": (True, -1), "i": np.str_("text"),
    }  # fmt: skip
    found = storable(figures)
    assert found == {
        "a": 1, "b": [0.5, None], "c": {"1": True, "d": None}, "e": None, "f": None, "g": "text",
        "h": [True, -1], "i": "text",
    }  # fmt: skip
    assert json.loads(json.dumps(found, allow_nan=False)) == found


class Scaled(Serializer):
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def serialize(self, value: Any) -> bytes:
        return str(value).encode()

    def deserialize(self, data: bytes) -> Any:
        return float(data)

    def config(self) -> dict[str, Any]:
        return {"scale": self.scale}


@pytest.mark.parametrize(
    "scale", [np.int64(2), float("nan"), {1, 2}, 10**5000], ids=["np", "nan", "set", "huge"]
)
def test_values_that_manifests_cannot_hold_are_refused_at_once(scale: Any) -> None:
    with pytest.raises(sb.UsageError, match=r"config\(\) of a serializer"):
        sb.ValueStateDescriptor("scaled", Scaled(scale))
    sb.ValueStateDescriptor("scaled", Scaled(2))
    for members in ({"extra": {"scale": scale}}, {"states": ({"name": "a", "kind": "b", "scale": scale},)}):
        with pytest.raises(sb.UsageError, match="is not JSON-able"):
            sb.StateSnapshot(1, epoch=1, **members)  # type: ignore[arg-type]


def test_numpy_integers_in_options_are_taken_as_ints_or_refused_at_the_call(tmp_path: Path) -> None:
    n = np.int64(2)
    assert type(sb.StateTtlConfig(n).ttl) is int
    assert type(sb.EventTime("at", watermark_delay=n).watermark_delay) is int  # type: ignore[arg-type]
    assert type(sb.StateTtlConfig(1, legacy_timestamp=n).legacy_timestamp) is int
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=128)
    keyed = sb.create_backend("heap").create_keyed_backend(int)
    refused = [
        lambda: sb.types.DECIMAL(n, 1),
        lambda: sb.types.DECIMAL(2, n),
        lambda: sb.CheckpointStore(tmp_path, retain=n),  # type: ignore[arg-type]
        lambda: sb.create_backend("heap").create_keyed_backend(int, max_parallelism=n),  # type: ignore[arg-type]
        lambda: Job(Counting(), key="user", max_parallelism=n),  # type: ignore[arg-type]
        lambda: keyed.snapshot(n, store),  # type: ignore[arg-type]
        lambda: store.commit(n),  # type: ignore[arg-type]
        lambda: store.commit(0, now=n),  # type: ignore[arg-type]
    ]
    for call in refused:
        with pytest.raises(sb.UsageError):
            call()
    with pytest.raises(sb.UsageError, match="lone surrogate"):
        sb.types.ROW(**{"a\ud800": int})
    assert store.commit(0, [keyed.snapshot(0, store).result()]).id == 0
