"""Clicks gathered into sessions: a session ends when its user has done nothing for half an hour.

    python examples/spark/click_sessions.py

The pages of the running session are a list state; its end is a timer in event time, moved with every click. Clicks may
come a minute late. The sessions of all batches are compared with those of a loop over the whole input.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import statebackend as sb

GAP = 30 * 60_000
LATE = 60_000
START = 1_700_000_000_000
COLUMNS = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("page", pa.string())])
SCHEMA = "user string, start bigint, end bigint, pages array<string>"
Session = tuple[str, int, int, list[str]]


def milliseconds(at: datetime.datetime) -> int:
    return round(at.timestamp() * 1000)


class Sessions(sb.KeyedProcessFunction):
    """Gives out a session when it has ended."""

    def open(self, ctx: sb.FunctionContext) -> None:
        # Sessions that lost their timer would stay for ever; after a day they go by themselves.
        event_time = sb.StateTtlConfig.TtlTimeCharacteristic.EventTime
        ttl = sb.StateTtlConfig(datetime.timedelta(days=1), ttl_time_characteristic=event_time)
        self.pages = ctx.get_list_state(sb.ListStateDescriptor("pages", str).enable_time_to_live(ttl))
        self.start = ctx.get_value_state(sb.ValueStateDescriptor("start", int).enable_time_to_live(ttl))
        self.last = ctx.get_value_state(sb.ValueStateDescriptor("last", int).enable_time_to_live(ttl))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Session]:
        at, last = milliseconds(row.at), self.last.value()
        if last is not None and at - last >= GAP:
            yield self.end(ctx)
            last = None
        if last is None:
            self.start.update(at)
        else:
            ctx.timer_service().delete_event_time_timer(last + GAP)
        self.pages.add(row.page)
        self.last.update(at)
        ctx.timer_service().register_event_time_timer(at + GAP)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Session]:
        yield self.end(ctx)

    def end(self, ctx: sb.FunctionContext) -> Session:
        start, last = self.start.value(), self.last.value()
        assert start is not None
        assert last is not None
        session = (ctx.current_key, start, last, self.pages.get())
        ctx.timer_service().delete_event_time_timer(last + GAP)
        for state in (self.pages, self.start, self.last):
            state.clear()
        return session


def generate(folder: Path, batches: int, clicks: int, users: int) -> None:
    """Ten minutes of clicks a batch, some of them late; the last batch is one click of a day later."""
    rng = np.random.default_rng(13)
    (folder / "in").mkdir(parents=True)
    for batch in range(batches):
        begin = START + batch * 600_000
        at = begin + rng.integers(0, 600_000, clicks)
        shown = np.argsort(at + rng.integers(0, LATE, clicks))  # the order of arrival
        at = at[shown]
        who = rng.integers(0, users, clicks)
        if batch == batches - 1:
            at, who = np.array([begin + 86_400_000 // 2]), np.array([users])
        rows = {
            "user": [f"u{user}" for user in who.tolist()],
            "at": pa.array(at * 1000).cast(COLUMNS.field("at").type),
            "page": [f"/{page}" for page in rng.integers(0, 50, len(at)).tolist()],
        }
        path = folder / "in" / f"{batch:05}.parquet"
        pq.write_table(pa.table(rows, COLUMNS), path)
        os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))  # Spark takes the oldest first


def expected(folder: Path) -> list[Session]:
    """The sessions of a plain loop over the clicks of each user in the order of time."""
    clicks: dict[str, list[tuple[int, str]]] = {}
    for path in sorted((folder / "in").iterdir()):
        for row in pq.read_table(path).to_pylist():
            clicks.setdefault(row["user"], []).append((milliseconds(row["at"]), row["page"]))
    sessions: list[Session] = []
    end = max(at for each in clicks.values() for at, _ in each) - LATE
    for user, each in clicks.items():
        each.sort(key=lambda click: click[0])
        run: list[tuple[int, str]] = []
        for at, page in each:
            if run and at - run[-1][0] >= GAP:
                sessions.append((user, run[0][0], run[-1][0], [page for _, page in run]))
                run = []
            run.append((at, page))
        if run[-1][0] + GAP <= end:
            sessions.append((user, run[0][0], run[-1][0], [page for _, page in run]))
    return sorted(sessions)


def example_of(sessions: list[Session]) -> str:
    if not sessions:
        return ""
    user, start, end, pages = max(sessions, key=lambda session: len(session[3]))
    return f"; the longest: {user}, {(end - start) // 60_000} minutes, {', '.join(pages)}"


def run(spark: Any, folder: Path) -> list[Session]:
    """Run the query over the input that is there; the sessions that have ended, sorted."""
    sessions: list[Session] = []

    def sink(frame: Any, batch_id: int) -> None:
        new = [tuple(row) for row in frame.collect()]
        sessions.extend(new)
        print(f"batch {batch_id}: {len(new):,} sessions have ended{example_of(new)}", flush=True)

    batches = sb.spark.stateful(
        Sessions(),
        key="user",
        schema=SCHEMA,
        state=folder / "state",
        event_time=sb.EventTime("at", watermark_delay=LATE),
        order_by="at",
        sink=sink,
    )
    query = (
        spark.readStream.schema("user string, at timestamp, page string")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(folder / "in"))
        .writeStream.foreachBatch(batches)
        .option("checkpointLocation", str(folder / "stream"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    batches.close()
    return sorted(sessions)


def main() -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    sizes = {"batches": 15, "clicks": 10_000, "users": 40_000}
    print("{batches} batches of {clicks:,} clicks by {users:,} users\n".format(**sizes))
    with tempfile.TemporaryDirectory(prefix="statebackend-clicks-") as name:
        folder = Path(name)
        generate(folder, **sizes)
        sessions = run(spark, folder)
        wanted = expected(folder)
    spark.stop()
    right = sessions == wanted
    print(f"\n{len(sessions):,} sessions; the same as those of a loop over the whole input: {right}")
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
