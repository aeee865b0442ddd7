"""Three batches for the sinks of `sb.spark.sinks`, and sinks that fail when they are done."""

from __future__ import annotations

from typing import Any

import pytest
from spark_streams import Fails, Stream, numbers

from statebackend.spark.sinks.interface import CommittedSink, Delivery


class FailsAfter:
    """A sink of `sb.spark.sinks` that publishes, and then fails, for some batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sink: CommittedSink, *batches: int) -> None:
        original, fail = type(sink).deliver, Fails(*batches)

        def deliver(self: CommittedSink, delivery: Delivery) -> Any:
            figures = original(self, delivery)
            fail(delivery.context.batch_id)
            return figures

        monkeypatch.setattr(type(sink), "deliver", deliver)


#: What the function gives for each batch.
BATCHES = {0: [("a", 1), ("b", 10)], 1: [("a", 3)], 2: [("b", 30), ("c", 5)]}


def fill(stream: Stream) -> None:
    for rows in ((("a", 1), ("b", 10)), (("a", 2),), (("b", 20), ("c", 5))):
        stream.add(numbers(*rows))
