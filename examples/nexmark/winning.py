"""Which bid wins each auction? Found when the auction is over, by a timer (Nexmark's query 9).

The key is the auction. A timer in event time fires when no bid of the auction can come any more. A bid may come before
its auction does: it waits, with a timer for just after its own time. By then its auction would have come, unless it is
over and gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import statebackend as sb
from examples.nexmark.events import PATIENT
from examples.nexmark.job import COLUMNS, ROWS, Job, begins, elements, groups

BID = "struct<price:bigint,at:bigint,seq:bigint,person:bigint>"
FIELDS = ["price", "at", "seq", "person"]


class ByRow(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.expires = ctx.get_value_state(sb.ValueStateDescriptor("expires", int))
        self.best = ctx.get_value_state(sb.ValueStateDescriptor("best", BID))
        self.early = ctx.get_list_state(sb.ListStateDescriptor("early", BID))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        if row.kind == "auction":
            self.expires.update(row.expires)
            ctx.timer_service().register_event_time_timer(row.expires)
            for bid in self.early:
                self.offer(bid, row.expires)
            self.early.clear()
            return
        bid = (row.price, row.at, row.seq, row.person)
        expires = self.expires.value()
        if expires is None:
            self.early.add(bid)
            ctx.timer_service().register_event_time_timer(row.at + 1)
        else:
            self.offer(bid, expires)

    def offer(self, bid: Any, expires: int) -> None:
        if bid[1] < expires:
            best = self.best.value()
            if best is None or (-bid[0], *bid[1:]) < (-best.price, *best[1:]):
                self.best.update(bid)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        expires, best = self.expires.value(), self.best.value()
        if expires is None:
            self.early.clear()
        elif timestamp == expires:
            if best is not None:
                yield ctx.current_key, best.person, best.price, best.at
            self.expires.clear()
            self.best.clear()


class OverColumns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.expires = ctx.get_value_state(sb.ValueStateDescriptor("expires", int))
        self.best = ctx.get_value_state(sb.ValueStateDescriptor("best", BID))
        self.early = ctx.get_list_state(sb.ListStateDescriptor("early", BID))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> None:
        is_auction = pc.equal(batch["kind"], "auction")
        auctions, expires = ctx.keys.filter(is_auction), batch["expires"].filter(is_auction)
        self.expires.update_many(auctions, expires)
        ctx.timer_service().register_event_time_timers(auctions, expires)
        early, owner = elements(self.early.get_many(auctions))
        early_keys = auctions.take(pa.array(owner))
        self.early.clear_many(auctions)

        is_bid = pc.invert(is_auction)
        keys = ctx.keys.filter(is_bid)
        bids = pa.StructArray.from_arrays([batch[name].filter(is_bid) for name in FIELDS], FIELDS)
        is_early = self.expires.get_many(keys).is_null()
        waiting, wait_keys = bids.filter(is_early), keys.filter(is_early)
        self.early.add_many(wait_keys, waiting)
        ctx.timer_service().register_event_time_timers(wait_keys, pc.add(waiting.field("at"), 1))
        in_time = pc.invert(is_early)
        self.offer(
            pa.concat_arrays([keys.filter(in_time), early_keys]),
            pa.concat_arrays([bids.filter(in_time), early.cast(bids.type)]),
        )

    def offer(self, keys: pa.Array, bids: pa.StructArray) -> None:
        """Keep the best of these bids and the one that each auction has."""
        is_valid = pc.less(bids.field("at"), self.expires.get_many(keys))
        keys, bids = keys.filter(is_valid), bids.filter(is_valid)
        auctions, group = groups(keys)
        best = self.best.get_many(auctions).cast(bids.type)
        is_there = best.is_valid()
        all_bids = pa.concat_arrays([bids, best.filter(is_there)])
        group = np.concatenate([group, np.flatnonzero(is_there.to_numpy(zero_copy_only=False))])
        price, at, seq, _ = (column.to_numpy(zero_copy_only=False) for column in all_bids.flatten())
        order = np.lexsort((seq, at, -price, group))
        wins = order[begins(group[order])]
        self.best.update_many(auctions.take(pa.array(group[wins])), all_bids.take(pa.array(wins)))

    def on_timers(
        self, keys: pa.Array, timestamps: pa.Array, namespaces: Any, ctx: sb.FunctionContext
    ) -> pa.RecordBatch:
        expires = self.expires.get_many(keys)
        self.early.clear_many(keys.filter(expires.is_null()))
        is_over = pc.fill_null(pc.equal(expires, timestamps), False)
        over = keys.filter(is_over)
        best = self.best.get_many(over)
        self.expires.clear_many(over)
        self.best.clear_many(over)
        has_bid = best.is_valid()
        best = best.filter(has_bid)
        return pa.record_batch(
            {
                "auction": over.filter(has_bid),
                "person": best.field("person"),
                "price": best.field("price"),
                "at": best.field("at"),
            }
        )


JOB = Job(
    "winning bids by timers",
    functions={ROWS: ByRow, COLUMNS: OverColumns},
    keys={ROWS: "auction", COLUMNS: "auction"},
    where="kind <> 'person'",
    columns=("kind", "auction", "person", "expires", "price", "at", "seq"),
    schema="auction bigint, person bigint, price bigint, at bigint",
    options={"event_time": sb.EventTime("at", watermark_delay=PATIENT)},
    sql={
        "main": f"""
            select auction, person, price, at from (
                select b.auction, b.person, b.price, b.at, row_number() over (
                    partition by b.auction order by b.price desc, b.at, b.seq, b.person) as place
                from events a join events b on a.auction = b.auction
                where a.kind = 'auction' and b.kind = 'bid' and b.at < a.expires
                and a.expires <= (select max(at) - {PATIENT} from events where kind <> 'person'))
            where place = 1"""
    },
)
