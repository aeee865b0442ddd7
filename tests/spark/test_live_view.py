"""The live view of a running query: the state after the newest committed batch, from another thread."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from spark_streams import Stream, numbers, spark, stream

import statebackend as sb

__all__ = ["spark", "stream"]
pytestmark = pytest.mark.spark

#: Seconds in which a thread of this process goes on.
SOON = 60


class Gate:
    """A sink that stands still in each batch until the test lets it go on."""

    def __init__(self) -> None:
        self.arrived, self.opened = threading.Semaphore(0), threading.Semaphore(0)
        self.inside: list[str] = []
        self.batches: Any = None

    def __call__(self, frame: Any, batch_id: int) -> None:
        try:
            self.batches.view()
        except sb.UsageError as error:
            self.inside.append(error.code)
        self.arrived.release()
        assert self.opened.acquire(timeout=SOON)

    def view_after_batch(self) -> Any:
        """The view that a call gets which waits for the end of the present batch."""
        made: list[Any] = []
        caller = threading.Thread(target=lambda: made.append(self.batches.view("5 minutes")))
        caller.start()
        while not self.batches._waiting:
            time.sleep(0.01)
        self.opened.release()
        caller.join(timeout=SOON)
        return made[0]


def test_view_waits_for_the_end_of_the_batch_and_keeps_its_moment(stream: Stream) -> None:
    for at in range(3):
        stream.add(numbers(("a", 1), ("b", 10 * at)))
    gate = Gate()
    batches = gate.batches = stream.batches(sink=gate)
    with pytest.raises(sb.UsageError, match="not run a batch in this process") as caught:
        batches.view()
    assert caught.value.code == "USAGE.NO_VIEW"
    query = stream.start(batches)
    try:
        assert gate.arrived.acquire(timeout=SOON)
        with pytest.raises(sb.UsageError, match="has not ended in time"):
            batches.view(timeout=100)
        view = gate.view_after_batch()
        assert view.batch_id == 0
        assert gate.arrived.acquire(timeout=SOON)  # batch 1 is committed
        assert view.get_many("total", ["a", "b", "c"]).to_pylist() == [1, 0, None]
        rows = sb.tools.state(view, "total").to_table().sort_by("key").to_pylist()
        assert rows == [{"key": "a", "value": 1}, {"key": "b", "value": 0}]
        assert sb.tools.state(batches, "total").to_table()["value"].to_pylist() in ([2, 10], [10, 2])
        with gate.view_after_batch() as second:
            assert second.batch_id == 1
            assert second.get_many("total", ["a", "b"]).to_pylist() == [2, 10]
        gate.opened.release()
        query.awaitTermination()
        assert gate.inside == ["USAGE.OVERLAPPING_CALL"] * 3
    finally:
        gate.opened.release(10)
        query.stop()
        batches.close()
    with pytest.raises(sb.ClosedError):
        view.get_many("total", ["a"])
    with pytest.raises(sb.UsageError, match="not run a batch in this process"):
        batches.view()
