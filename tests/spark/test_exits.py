"""Real queries whose code raises an exit, such as `SystemExit`: they fail with an error, and do not hang."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from local_spark import settings
from pyspark.errors import StreamingQueryException
from spark_streams import Collecting, Stream, Total, numbers

import statebackend as sb

pytestmark = pytest.mark.spark


class Leave(BaseException):
    pass


@pytest.fixture(autouse=True)
def stops(spark: Any) -> Iterator[None]:
    """A query that hangs is not waited for longer than this."""
    with settings(spark, {"spark.sql.streaming.stopTimeout": "5s"}):
        yield


def wait_for(query: Any) -> None:
    assert query.awaitTermination(120), "it hangs"


PLACES = [
    ("function", SystemExit(3)),
    ("generator", Leave("as told")),
    ("timer", asyncio.CancelledError("as told")),
    ("sink", KeyboardInterrupt("as told")),
    ("sink with a context", SystemExit("as told")),
    ("on_batch", asyncio.CancelledError()),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("place", "error"), PLACES)
def test_query_fails_with_an_error_when_its_code_raises_an_exit(
    stream: Stream, place: str, error: BaseException
) -> None:
    armed: list[str] = []

    def called(where: str) -> None:
        if where in armed:
            armed.clear()
            raise error

    class Totals(Total):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            ctx.timer_service().register_processing_time_timer(ctx.now)
            called("function")
            yield from super().process_element(row, ctx)
            called("generator")

        def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> None:
            called("timer")

    collecting = Collecting(lambda batch_id: called("sink"))

    def with_context(frame: Any, batch_id: int, context: Any) -> None:
        called("sink with a context")
        collecting(frame, batch_id)

    for n in (1, 2):
        stream.add(numbers(("a", n)))
    sink = with_context if "context" in place else collecting

    def arm(progress: Any) -> None:
        called("on_batch")
        if progress["batchId"] == 0 and not seen:
            armed.append(place)

    batches = stream.batches(Totals(), sink, on_batch=arm)
    seen: list[Exception] = []

    def call(frame: Any, batch_id: int) -> None:
        try:
            batches(frame, batch_id)
        except Exception as raised:
            seen.append(raised)
            raise

    query = stream.start(call)
    try:
        with pytest.raises(StreamingQueryException, match=re.escape("[USAGE.EXIT]")):
            wait_for(query)
    finally:
        query.stop()
    (raised,) = seen
    assert isinstance(raised, sb.UsageError)
    assert (raised.code, raised.__cause__) == ("USAGE.EXIT", error)
    assert str(error) in raised.message
    assert raised.message.startswith(type(error).__name__)
    batches.close()
    committed = 0 if place in ("function", "generator", "timer") else 1
    assert sb.CheckpointStore(stream.state, single_writer=True).latest() == committed
    stream.run(batches)
    assert collecting.calls[-1] == (1, [("a", 3)])


class ConnectFrame:
    """A frame of a Connect worker, whose main thread calls the function."""

    __module__ = "pyspark.sql.connect.dataframe"


@pytest.mark.parametrize(
    ("frame", "is_main", "raises"),
    [
        (object(), True, KeyboardInterrupt),
        (object(), False, sb.UsageError),
        (ConnectFrame(), True, sb.UsageError),
    ],
    ids=["main thread", "other thread", "connect"],
)
def test_keyboard_interrupt_of_the_main_thread_stays_one(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, frame: Any, is_main: bool, raises: type[BaseException]
) -> None:
    batches = stream.batches(sink=Collecting())

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(batches, "_run", interrupted)
    with ThreadPoolExecutor(1) as pool, pytest.raises(raises):
        batches(frame, 7) if is_main else pool.submit(batches, frame, 7).result()
