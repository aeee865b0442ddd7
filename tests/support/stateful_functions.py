"""Functions with state that several tests run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import statebackend as sb


class Total(sb.KeyedProcessFunction):
    """A running total for each user; a negative amount is refused."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.total.add(row.amount)
        if row.amount < 0:
            raise ValueError("negative")
        yield ctx.current_key, self.total.get()


class Buffering(sb.KeyedProcessFunction, sb.CheckpointedFunction):
    """Gives rows out in groups of three; what waits is operator state."""

    def __init__(self) -> None:
        self.waiting: list[int] = []

    def initialize_state(self, ctx: Any) -> None:
        self.state = ctx.operator_state_store.get_list_state(sb.ListStateDescriptor("waiting", int))
        if ctx.is_restored:
            self.waiting = list(self.state.get())

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        if row.n < 0:
            raise ValueError("negative")
        self.waiting.append(row.n)
        if len(self.waiting) == 3:
            yield tuple(self.waiting)
            self.waiting = []

    def snapshot_state(self, ctx: Any) -> None:
        self.state.update(self.waiting)
