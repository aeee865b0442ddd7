"""Streaming queries for tests: a folder of input, a query over it that is run to its end, sinks that remember."""

from __future__ import annotations

import datetime
import decimal
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_spark import spark

import statebackend as sb
from statebackend.spark.sinks.committed_sink import CommittedSink, Delivery

__all__ = ["spark"]


#: A column of every type.
DDL = (
    "user struct<id:decimal(10,2),at:timestamp>, i int, s smallint, t tinyint, f float, d double, b boolean, "
    "bin binary, day date, at timestamp, local timestamp_ntz, dec decimal(38,18), tags array<string>, "
    "m map<string,struct<x:int,y:array<bigint>>>, nest struct<a:struct<b:string>>, `a b` string"
)


#: A row of these columns.
FULL = {
    "user": {
        "id": decimal.Decimal("1.50"),
        "at": datetime.datetime(2024, 3, 10, 2, 30, 0, 123456, tzinfo=datetime.timezone.utc),
    },
    "i": -1,
    "s": 2,
    "t": 3,
    "f": 0.5,
    "d": float("inf"),
    "b": True,
    "bin": b"\x00\xff",
    "day": datetime.date(1500, 1, 1),
    "at": datetime.datetime(2024, 3, 10, 2, 30, 0, 123456, tzinfo=datetime.timezone.utc),
    "local": datetime.datetime(1582, 10, 4, 23, 59),
    "dec": decimal.Decimal("-1.000000000000000001"),
    "tags": ["a", None],
    "m": {"k": {"x": 1, "y": [1, 2]}, "n": None},
    "nest": {"a": {"b": "é"}},
    "a b": "spaced",
}


class Total(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        self.total.add(row.n)
        yield row.user, self.total.get()


def shipped_total(message: str | None = None) -> Any:
    """The same as `Total`, or a function that fails with a message, of a class that Spark ships to its workers."""

    class Shipped(sb.KeyedProcessFunction):
        def open(self, ctx: sb.FunctionContext) -> None:
            self.total = ctx.get_reducing_state(sb.ReducingStateDescriptor("total", "sum", int))

        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            if message is not None:
                raise RuntimeError(message)
            self.total.add(row.n)
            yield row.user, self.total.get()

    return Shipped()


class Stream:
    """A folder of input files, one batch each, and a query over it that is run to its end."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.state = folder / "state"
        self.written = 0
        (folder / "in").mkdir()

    def add(self, table: pa.Table) -> None:
        path = self.folder / "in" / f"{self.written:04}.parquet"
        pq.write_table(table, path)
        self.written += 1
        os.utime(path, (1_700_000_000 + self.written,) * 2)  # Spark takes the oldest first

    def rows(self, files: int = 1) -> Any:
        """A streaming frame over the input."""
        folder = str(self.folder / "in")
        schema = self.spark.read.parquet(folder).schema
        return self.spark.readStream.schema(schema).option("maxFilesPerTrigger", files).parquet(folder)

    def batches(self, function: Any = None, sink: Any = None, **options: Any) -> Any:
        settings = {"key": "user", "schema": "user string, total bigint", "state": self.state}
        return sb.spark.stateful(function or Total(), **{**settings, **options}, sink=sink)

    def start(
        self,
        batches: Any,
        checkpoint: str = "stream",
        transform: Any = None,
        files: int = 1,
        name: str | None = None,
    ) -> Any:
        rows = self.rows(files)
        rows = rows if transform is None else transform(rows)
        writer = rows.writeStream.foreachBatch(batches).trigger(availableNow=True)
        return writer.option("checkpointLocation", str(self.folder / checkpoint)).start(queryName=name)

    def run(self, batches: Any, **options: Any) -> None:
        self.run_called(batches, batches, **options)

    def run_called(self, called: Any, batches: Any, **options: Any) -> None:
        """Run a query that calls ``called``, which hands on to ``batches``."""
        try:
            self.start(called, **options).awaitTermination()
        finally:
            batches.close()  # which would happen by itself, a moment later

    def read_on(self, path: object, called: Callable[[Any, int], object]) -> None:
        """Run a second query over what the sink has written, from where it was before."""
        rows = self.spark.readStream.schema("user string, total bigint").parquet(str(path))
        writer = rows.writeStream.foreachBatch(called).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self.folder / "second")).start().awaitTermination()

    def lose(self, batch_id: int, *logs: str, checkpoint: str = "stream") -> None:
        """Let Spark's notes on a batch be gone, as after a power failure, or by hand."""
        for log in logs:
            for name in (str(batch_id), f".{batch_id}.crc"):
                (self.folder / checkpoint / log / name).unlink()

    def fails(self, batches: Any, **options: Any) -> str:
        with pytest.raises(Exception, match="Python Proxy") as caught:
            self.run(batches, **options)
        return str(caught.value)


@pytest.fixture
def stream(spark: Any, tmp_path: Path) -> Stream:
    return Stream(spark, tmp_path)


def numbers(*pairs: tuple[str | None, int]) -> pa.Table:
    return pa.table({"user": [user for user, _ in pairs], "n": [n for _, n in pairs]})


def timed(*each: tuple[str, int, int]) -> pa.Table:
    user, n, at = zip(*each, strict=True)
    return pa.table({"user": user, "n": n, "at": pa.array(at, pa.timestamp("ms", "UTC"))})


class Outage(Exception):
    pass


class Fails:
    """Raises an outage for each of these batches, as often as it is named."""

    def __init__(self, *batches: int) -> None:
        self._left = Counter(batches)

    def __call__(self, batch_id: int) -> None:
        if self._left[batch_id] > 0:
            self._left[batch_id] -= 1
            raise Outage(batch_id)


class FailsAfter:
    """A sink of `sb.spark.sinks` that publishes, and then fails, for some batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sink: CommittedSink, *batches: int) -> None:
        original, fail = type(sink).deliver, Fails(*batches)

        def deliver(self: CommittedSink, delivery: Delivery) -> Any:
            figures = original(self, delivery)
            fail(delivery.context.batch_id)
            return figures

        monkeypatch.setattr(type(sink), "deliver", deliver)


class Collecting:
    """A sink that remembers what each call was given."""

    def __init__(self, before: Callable[[int], None] = lambda batch_id: None) -> None:
        self.calls: list[tuple[int, list[tuple[Any, ...]]]] = []
        self.before = before

    def __call__(self, frame: Any, batch_id: int) -> None:
        rows = [tuple(row) for row in frame.collect()]
        self.calls.append((batch_id, rows))
        self.before(batch_id)


def len_of(frame: Any, batch_id: int) -> None:
    """A sink that looks at its rows and keeps nothing."""
    frame.count()


#: What the function gives for each batch.
BATCHES = {0: [("a", 1), ("b", 10)], 1: [("a", 3)], 2: [("b", 30), ("c", 5)]}


def fill(stream: Stream) -> None:
    for rows in ((("a", 1), ("b", 10)), (("a", 2),), (("b", 20), ("c", 5))):
        stream.add(numbers(*rows))
