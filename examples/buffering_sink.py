"""A sink that sends rows on in groups of three and loses none when it stops: Flink's `BufferingSink`.

    python examples/buffering_sink.py

What it has not sent yet is operator state: a list that belongs to an instance of the sink, not to a key. After a
restart with another number of instances the list is split evenly over them.
"""

from __future__ import annotations

import statebackend as sb
from statebackend.functions import FunctionInitializationContext, FunctionSnapshotContext

Element = tuple[str, int]


class BufferingSink(sb.CheckpointedFunction):
    """Sends elements on in groups of ``threshold``; what is not sent yet is state."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self.buffered: list[Element] = []
        self.sent: list[list[Element]] = []

    def invoke(self, value: Element) -> None:
        self.buffered.append(value)
        if len(self.buffered) == self._threshold:
            self.sent.append(self.buffered)  # here a real sink would write to the outside
            self.buffered = []

    def initialize_state(self, ctx: FunctionInitializationContext) -> None:
        descriptor = sb.ListStateDescriptor("buffered-elements", tuple[str, int])
        self._checkpointed = ctx.operator_state_store.get_list_state(descriptor)
        if ctx.is_restored:
            self.buffered.extend(self._checkpointed.get())

    def snapshot_state(self, ctx: FunctionSnapshotContext) -> None:
        self._checkpointed.clear()
        for element in self.buffered:
            self._checkpointed.add(element)


def start(store: sb.OperatorStateBackend) -> BufferingSink:
    """A sink with the state that the store has for it."""
    sink = BufferingSink(threshold=3)
    sink.initialize_state(FunctionInitializationContext(store))
    return sink


def main() -> None:
    backend = sb.create_backend("heap")
    store = backend.create_operator_backend()
    sink = start(store)
    for number, name in enumerate("abcde"):
        sink.invoke((name, number))
    print(f"sent:      {sink.sent}")
    print(f"buffered:  {sink.buffered}")

    sink.snapshot_state(FunctionSnapshotContext(checkpoint_id=1, checkpoint_timestamp=0))
    contents = store.contents()  # plain data; writing it into checkpoints is not built yet
    print("\nThe sink stops. Two instances take over what it had buffered:")

    for index in range(2):
        store = backend.create_operator_backend(subtask_index=index, parallelism=2, restore=[contents])
        print(f"instance {index} buffered:  {start(store).buffered}")

    print("\nOr one instance, which goes on:")
    sink = start(backend.create_operator_backend(restore=[contents]))
    sink.invoke(("f", 5))
    print(f"sent:      {sink.sent}")


if __name__ == "__main__":
    main()
