"""The three programs of Flink's "Working with State", over the handles themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from statebackend.backend import KeyedStateBackend, StateBackend
from statebackend.descriptors import ListStateDescriptor, ValueStateDescriptor
from statebackend.operator_state import (
    CheckpointedFunction,
    FunctionInitializationContext,
    FunctionSnapshotContext,
    OperatorStateBackend,
)


class CountWindowAverage:
    """The average of every two values of a key."""

    def __init__(self, keyed: KeyedStateBackend) -> None:
        self._keyed = keyed
        self._sum = keyed.get_value_state(ValueStateDescriptor("average", tuple[int, int]))

    def flat_map(self, row: tuple[int, int]) -> Iterator[tuple[int, int]]:
        key, value = row
        self._keyed.set_current_key(key)
        count, total = self._sum.value() or (0, 0)
        count, total = count + 1, total + value
        self._sum.update((count, total))
        if count >= 2:
            yield key, total // count
            self._sum.clear()

    def run(self, rows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return [out for row in rows for out in self.flat_map(row)]


def test_count_window_average(backend: StateBackend) -> None:
    with backend.create_keyed_backend("bigint") as keyed:
        average = CountWindowAverage(keyed)
        assert average.run([(1, 3), (1, 5), (1, 7), (1, 4), (1, 2)]) == [(1, 4), (1, 5)]
        assert list(keyed.keys("average")) == [1]
        assert average.run([(2, 10), (1, 4), (2, 20)]) == [(1, 3), (2, 15)]
        assert keyed.num_entries() == 0


def test_count_window_average_over_a_failed_batch(backend: StateBackend) -> None:
    with backend.create_keyed_backend("bigint") as keyed:
        average = CountWindowAverage(keyed)
        assert average.run([(1, 3)]) == []
        mark = keyed.mark()
        assert average.run([(1, 5), (1, 7)]) == [(1, 4)]
        keyed.rollback(mark)
        assert average.run([(1, 5), (1, 7), (1, 4)]) == [(1, 4), (1, 5)]


class BufferingSink(CheckpointedFunction):
    """Sends elements on in groups of ``threshold``; what is not sent yet is state."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._buffered: list[tuple[str, int]] = []
        self.sent: list[list[tuple[str, int]]] = []

    def invoke(self, value: tuple[str, int]) -> None:
        self._buffered.append(value)
        if len(self._buffered) == self._threshold:
            self.sent.append(self._buffered)
            self._buffered = []

    def snapshot_state(self, ctx: FunctionSnapshotContext) -> None:
        self._checkpointed.clear()
        for element in self._buffered:
            self._checkpointed.add(element)

    def initialize_state(self, ctx: FunctionInitializationContext) -> None:
        descriptor = ListStateDescriptor("buffered-elements", tuple[str, int])
        self._checkpointed = ctx.operator_state_store.get_list_state(descriptor)
        if ctx.is_restored:
            self._buffered.extend(self._checkpointed.get())


class CounterSource(CheckpointedFunction):
    """Counts; the offset is state."""

    offset = 0

    def run(self, count: int) -> list[int]:
        collected = list(range(self.offset, self.offset + count))
        self.offset += count
        return collected

    def initialize_state(self, ctx: FunctionInitializationContext) -> None:
        self._state = ctx.operator_state_store.get_list_state(ListStateDescriptor("state", int))
        for offset in self._state.get():
            self.offset = offset

    def snapshot_state(self, ctx: FunctionSnapshotContext) -> None:
        self._state.clear()
        self._state.add(self.offset)


def started(function: CheckpointedFunction, store: OperatorStateBackend) -> CheckpointedFunction:
    function.initialize_state(FunctionInitializationContext(store))
    return function


SNAPSHOT = FunctionSnapshotContext(checkpoint_id=1, checkpoint_timestamp=0)


def test_buffering_sink(backend: StateBackend) -> None:
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


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_buffering_sink_at_another_parallelism(backend: StateBackend, parallelism: int) -> None:
    contents = []
    for i in range(2):
        store = backend.create_operator_backend(subtask_index=i, parallelism=2)
        sink = BufferingSink(threshold=100)
        started(sink, store)
        for number in range(3):
            sink.invoke((f"{i}", number))
        sink.snapshot_state(SNAPSHOT)
        contents.append(store.contents())
    found = []
    for i in range(parallelism):
        sink = BufferingSink(threshold=100)
        store = backend.create_operator_backend(subtask_index=i, parallelism=parallelism, restore=contents)
        started(sink, store)
        found.append(sink._buffered)
    assert [element for each in found for element in each] == [
        ("0", 0),
        ("0", 1),
        ("0", 2),
        ("1", 0),
        ("1", 1),
        ("1", 2),
    ]
    assert {len(each) for each in found} == {6 // parallelism}


def test_counter_source(backend: StateBackend) -> None:
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
