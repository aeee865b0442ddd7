"""The three programs of Flink's "Working with State", which are the examples, on every backend."""

from __future__ import annotations

import pytest
from buffering_sink import BufferingSink
from count_window_average import ROWS, CountWindowAverage
from counter_source import CounterSource

import statebackend as sb
from statebackend.functions import FunctionInitializationContext, FunctionSnapshotContext
from statebackend.testing import Harness

pytestmark = pytest.mark.checked


def average_of(harness: Harness, rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [out for key, value in rows for out in harness.process_element({"key": key, "value": value})]


def test_count_window_average(backend: sb.StateBackend) -> None:
    with Harness(CountWindowAverage(), key="key", backend=backend) as harness:
        assert average_of(harness, ROWS) == [(1, 4), (1, 5)]
        assert list(harness.keyed.keys("average")) == [1]
        assert average_of(harness, [(2, 10), (1, 4), (2, 20)]) == [(1, 3), (2, 15)]
        assert harness.keyed.num_entries() == 0


def started(function: sb.CheckpointedFunction, store: sb.OperatorStateBackend) -> sb.CheckpointedFunction:
    function.initialize_state(FunctionInitializationContext(store))
    return function


SNAPSHOT = FunctionSnapshotContext(checkpoint_id=1, checkpoint_timestamp=0)


def test_buffering_sink(backend: sb.StateBackend) -> None:
    store = backend.create_operator_backend()
    sink = BufferingSink(threshold=3)
    started(sink, store)
    for number, name in enumerate("abcde"):
        sink.invoke((name, number))
    sink.snapshot_state(SNAPSHOT)
    sink.invoke(("lost", 0))
    assert sink.sent == [[("a", 0), ("b", 1), ("c", 2)], [("d", 3), ("e", 4), ("lost", 0)]]

    again = BufferingSink(threshold=3)
    started(again, backend.create_operator_backend(restore=[store.contents()]))
    again.invoke(("f", 5))
    assert again.sent == [[("d", 3), ("e", 4), ("f", 5)]]


def test_counter_source(backend: sb.StateBackend) -> None:
    store = backend.create_operator_backend()
    source = CounterSource()
    started(source, store)
    assert source.run(3) == [0, 1, 2]
    source.snapshot_state(SNAPSHOT)
    assert source.run(2) == [3, 4]
    source.snapshot_state(SNAPSHOT)
    mark = store.mark()
    source.run(10)
    source.snapshot_state(SNAPSHOT)
    store.rollback(mark)

    again = CounterSource()
    started(again, backend.create_operator_backend(restore=[store.contents()]))
    assert again.run(2) == [5, 6]
