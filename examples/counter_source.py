"""A source that goes on where it stopped: Flink's `CounterSource`.

    python examples/counter_source.py

It counts 0, 1, 2, ...; its offset is operator state. Numbers that it handed out after the last snapshot are handed
out again after a restart, and no number is left out.
"""

from __future__ import annotations

import statebackend as sb
from statebackend.functions import FunctionInitializationContext, FunctionSnapshotContext


class CounterSource(sb.CheckpointedFunction):
    """Counts; the offset is state."""

    offset = 0

    def run(self, count: int) -> list[int]:
        """The next ``count`` numbers. Output and offset move together: nothing happens in between."""
        collected = list(range(self.offset, self.offset + count))
        self.offset += count
        return collected

    def initialize_state(self, ctx: FunctionInitializationContext) -> None:
        self._state = ctx.operator_state_store.get_list_state(sb.ListStateDescriptor("state", int))
        for offset in self._state.get():
            self.offset = offset

    def snapshot_state(self, ctx: FunctionSnapshotContext) -> None:
        self._state.clear()
        self._state.add(self.offset)


def main() -> None:
    backend = sb.create_backend("heap")
    store = backend.create_operator_backend()
    source = CounterSource()
    source.initialize_state(FunctionInitializationContext(store))
    print(f"before the snapshot:  {source.run(3)}")

    source.snapshot_state(FunctionSnapshotContext(checkpoint_id=1, checkpoint_timestamp=0))
    contents = store.contents()  # plain data; writing it into checkpoints is not built yet
    print(f"after the snapshot:   {source.run(2)}")
    print("The source stops.")

    source = CounterSource()
    source.initialize_state(
        FunctionInitializationContext(backend.create_operator_backend(restore=[contents]))
    )
    print(f"restored:             {source.run(4)}")


if __name__ == "__main__":
    main()
