"""The harness between two steps: checkpoints, restarts, and back to where a function was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from stateful_functions import Buffering, Total

import statebackend as sb
from statebackend.testing import Harness

pytestmark = [pytest.mark.parametrize("backend", ["heap", "rocksdb"])]


def test_a_restart_between_any_two_steps_changes_nothing(backend: str) -> None:
    with Harness(Total(), str, backend=backend) as harness:
        given = []
        for user, amount in [("a", 1), ("b", 5), ("a", 2), ("b", 1), ("a", 3)]:
            given += harness.process_element(user, {"amount": amount})
            harness.restart()
        assert given == [("a", 1), ("b", 5), ("a", 3), ("b", 6), ("a", 6)]


def test_operator_state_comes_back_too(backend: str) -> None:
    with Harness(Buffering(), int, key="n", backend=backend) as harness:
        given = []
        for n in range(1, 8):
            given += harness.process_batch([{"n": n}])
            harness.restart()
        assert given == [(1, 2, 3), (4, 5, 6)]


def test_back_to_an_older_checkpoint_and_on_from_there(backend: str) -> None:
    with Harness(Total(), str, backend=backend) as harness:
        harness.process_element("a", {"amount": 1})
        older = harness.snapshot()
        harness.process_element("a", {"amount": 10})
        newer = harness.snapshot()
        harness.restore(older)
        assert harness.process_element("a", {"amount": 100}) == [("a", 101)]
        third = harness.snapshot()
        harness.restore(newer)
        assert harness.process_element("a", {"amount": 100}) == [("a", 111)]
        harness.restore(third)
        assert harness.process_element("a", {"amount": 100}) == [("a", 201)]


class Restored(sb.KeyedProcessFunction, sb.CheckpointedFunction):
    def initialize_state(self, ctx: Any) -> None:
        self.restored = ctx.is_restored, ctx.restored_checkpoint_id

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield self.restored

    def snapshot_state(self, ctx: Any) -> None:
        pass


def test_a_function_is_told_whether_it_was_restored(backend: str) -> None:
    with Harness(Restored(), int, backend=backend) as harness:
        assert harness.process_element(1, {}) == [(False, None)]
        harness.restart()
        assert harness.process_element(1, {}) == [(True, 0)]
