"""How many bids has each auction in each ten seconds? Windows over event time, and late rows (as Nexmark's query 5).

Row by row, a window is a namespace. Over columns, it is a part of the key, which the query adds as a column. Its timer
gives it out when no row of it can come any more, and rows that come even later go to an output of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

import statebackend as sb
from examples.nexmark.events import DISORDER, SECOND
from examples.nexmark.job import COLUMNS, ROWS, Job

SIZE = 10 * SECOND


class ByRow(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.bids = ctx.get_reducing_state(sb.ReducingStateDescriptor("bids", "sum", int))
        self.highest = ctx.get_reducing_state(sb.ReducingStateDescriptor("highest", "max", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        ctx.current_namespace = window = sb.TimeWindow(row.window, row.window + SIZE)
        self.bids.add(1)
        self.highest.add(row.price)
        ctx.timer_service().register_event_time_timer(window.end)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield ctx.current_key, ctx.current_namespace.start, self.bids.get(), self.highest.get()
        self.bids.clear()
        self.highest.clear()


class OverColumns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.bids = ctx.get_reducing_state(sb.ReducingStateDescriptor("bids", "sum", int))
        self.highest = ctx.get_reducing_state(sb.ReducingStateDescriptor("highest", "max", int))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> None:
        ones = pa.repeat(1, batch.num_rows)
        keys = self.bids.add_many(ctx.keys, ones, return_changed=True).keys
        self.highest.add_many(ctx.keys, batch["price"])
        ctx.timer_service().register_event_time_timers(keys, pa.compute.add(keys.field("window"), SIZE))

    def on_timers(
        self, keys: pa.Array, timestamps: pa.Array, namespaces: Any, ctx: sb.FunctionContext
    ) -> pa.RecordBatch:
        auctions, windows = keys.flatten()
        bids, highest = self.bids.get_many(keys), self.highest.get_many(keys)
        self.bids.clear_many(keys)
        self.highest.clear_many(keys)
        return pa.record_batch({"auction": auctions, "window": windows, "bids": bids, "highest": highest})


JOB = Job(
    "windows and late rows",
    functions={ROWS: ByRow, COLUMNS: OverColumns},
    keys={ROWS: "auction", COLUMNS: ["auction", "window"]},
    where="kind = 'bid'",
    columns=("auction", "price", "at", "seq", f"at - at % {SIZE} as window"),
    schema={
        "windows": "auction bigint, window bigint, bids bigint, highest bigint",
        "late": "auction bigint, at bigint, seq bigint",
    },
    options={"event_time": sb.EventTime("at", watermark_delay=DISORDER, late=sb.to_output("late"))},
    sql={
        "windows": f"""
            select auction, at - at % {SIZE} as window, count(*) as bids, max(price) as highest
            from events join batches using (file) where kind = 'bid' and (watermark is null or at >= watermark)
            group by 1, 2 having window + {SIZE} <= (
                select max(at) - {DISORDER} from events where kind = 'bid')""",
        "late": "select auction, at, seq from events join batches using (file) where kind = 'bid' and at < watermark",
    },
)
