"""One processor through Spark's operator and through ours, over the same files, batch by batch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import statebackend as sb
from statebackend.spark.session import settings
from statebackend.testing import ManualClock, use_clock

#: Spark's operator needs this store, and batches without rows would come between those with rows.
SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
    "RocksDBStateStoreProvider",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}
#: The columns of every input: two for keys, numbers, a text, and a time that a watermark may be on.
COLUMNS = pa.schema(
    [
        ("k", pa.string()),
        ("g", pa.int32()),
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("s", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)
DDL = "k string, g int, n bigint, x double, s string, at timestamp"
OUTPUT = "k string, text string"


@dataclass
class Pair:
    """A processor, and how both sides run it."""

    processor: Any
    time_mode: str = "None"
    key: tuple[str, ...] = ("k",)
    output_schema: str = OUTPUT
    watermark: str | None = None
    in_pandas: bool = False
    initial_state: Any = None
    settings: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def table(rows: list[dict[str, Any]]) -> pa.Table:
    """A batch of rows; columns that they do not name are null, and times are seconds."""
    named = [{**row, "at": None if row.get("at") is None else round(row["at"] * 1e6)} for row in rows]
    return pa.Table.from_pylist(named, schema=COLUMNS)


class Query:
    """A folder of input and the places of both sides. `run` gives the new rows of each batch as a multiset."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.clock = ManualClock()
        #: The batch times of Spark's side, which ours goes by.
        self.times: dict[int, int] = {}
        self.batches: Any = None
        (folder / "in").mkdir()
        self._written = 0

    def add(self, *tables: pa.Table) -> None:
        import os

        for each in tables:
            path = self.folder / "in" / f"{self._written:04}.parquet"
            pq.write_table(each, path)
            self._written += 1
            os.utime(path, (1_700_000_000 + self._written,) * 2)

    def _rows(self, pair: Pair) -> Any:
        rows = self.spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1)
        rows = rows.parquet(str(self.folder / "in"))
        return rows if pair.watermark is None else rows.withWatermark("at", pair.watermark)

    def _started(self, frame: Any, call: Any, location: str, mode: str) -> None:
        writer = frame.writeStream.foreachBatch(call).outputMode(mode).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self.folder / location)).start().awaitTermination()

    def spark_side(self, pair: Pair) -> dict[int, Counter[Any]]:
        given: dict[int, Counter[Any]] = {}

        def collect(frame: Any, batch_id: int) -> None:
            given[batch_id] = Counter(map(repr, map(tuple, frame.collect())))
            entry = (self.folder / "spark" / "offsets" / str(batch_id)).read_text().splitlines()[1]
            self.times[batch_id] = json.loads(entry)["batchTimestampMs"]

        self._started(self.sparks_frame(pair), collect, "spark", "update")
        return given

    def sparks_frame(self, pair: Pair) -> Any:
        """The frame with Spark's operator."""
        grouped = self._rows(pair).groupBy(*pair.key)
        transform = grouped.transformWithStateInPandas if pair.in_pandas else grouped.transformWithState
        return transform(pair.processor, pair.output_schema, "Update", pair.time_mode, pair.initial_state)

    def callable(self, pair: Pair, sink: Any) -> Any:
        """Our callable."""
        made = sb.spark.transform_with_state_in_pandas if pair.in_pandas else sb.spark.transform_with_state
        return made(
            pair.processor,
            key=list(pair.key),
            output_schema=pair.output_schema,
            time_mode=pair.time_mode,
            output_mode="Update",
            initial_state=pair.initial_state,
            state=self.folder / "state",
            sink=sink,
            **pair.options,
        )

    def our_side(self, pair: Pair) -> dict[int, Counter[Any]]:
        given: dict[int, Counter[Any]] = {}

        def collect(frame: Any, batch_id: int) -> None:
            given[batch_id] = Counter(map(repr, map(tuple, frame.collect())))

        self.batches = batches = use_clock(self.callable(pair, collect), self.clock)

        def call(frame: Any, batch_id: int) -> None:
            self.clock.set(self.times[batch_id])
            batches(frame, batch_id)

        try:
            self._started(self._rows(pair), call, "ours", "append")
        finally:
            batches.close()
        return given

    def compare(self, pair: Pair, ours: Pair | None = None) -> dict[int, Counter[Any]]:
        """Run both sides over the files that came since; assert that all batches are equal, and return them."""
        with settings(self.spark, {**SETTINGS, **pair.settings}):
            theirs = self.spark_side(pair)
            mine = self.our_side(pair if ours is None else ours)
        assert theirs.keys() == mine.keys()
        for batch_id, rows in theirs.items():
            assert mine[batch_id] == rows, (batch_id, mine[batch_id] - rows, rows - mine[batch_id])
        return theirs
