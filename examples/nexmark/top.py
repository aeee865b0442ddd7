"""Which are the ten highest bids of each auction? The list is given out whenever it changes (Nexmark's query 19).

Over columns, the lists of all auctions of a batch are read, sorted with the bids of the batch, and cut, in one go: an
auction comes out once a batch. Row by row, it comes out with each bid that changes its list.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import statebackend as sb
from examples.nexmark.job import COLUMNS, ROWS, Job, begins, elements, groups

K = 10
BID = "struct<price:bigint,seq:bigint,person:bigint>"
FIELDS = ["price", "seq", "person"]


class ByRow(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.top = ctx.get_value_state(sb.ValueStateDescriptor("top", f"array<{BID}>", default=[]))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        top = self.top.value()
        bid = (row.price, row.seq, row.person)
        place = bisect.bisect(top, rank(bid), key=rank)
        if place < K:
            top.insert(place, bid)
            self.top.update(top[:K])
            yield ctx.current_key, top[:K]


def rank(bid: Any) -> tuple[int, int]:
    """What bids are sorted by: the highest first, and of equal ones the one that came first."""
    return -bid[0], bid[1]


class OverColumns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.top = ctx.get_value_state(sb.ValueStateDescriptor("top", f"array<{BID}>", default=[]))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
        auctions, group = groups(ctx.keys)
        before, owner = elements(self.top.get_many(auctions))
        bids = pa.StructArray.from_arrays([batch[name] for name in FIELDS], FIELDS)
        bids = pa.concat_arrays([bids, before.cast(bids.type)])
        group = np.concatenate([group, owner])
        price, seq, _ = (column.to_numpy(zero_copy_only=False) for column in bids.flatten())
        order = np.lexsort((seq, -price, group))
        # The place of a bid is how far it is from the first of its auction.
        start = np.flatnonzero(begins(group[order]))
        place = np.arange(len(order)) - np.repeat(start, np.diff(np.append(start, len(order))))
        kept = order[place < K]
        ends = np.cumsum(np.bincount(group[kept], minlength=len(auctions)))
        top = pa.ListArray.from_arrays(
            pa.array(np.append(0, ends).astype(np.int32)), bids.take(pa.array(kept))
        )
        self.top.update_many(auctions, top)
        return pa.record_batch({"auction": auctions, "top": top})


JOB = Job(
    "top k",
    functions={ROWS: ByRow, COLUMNS: OverColumns},
    keys={ROWS: "auction", COLUMNS: "auction"},
    where="kind = 'bid'",
    columns=("auction", "price", "seq", "person"),
    schema=f"auction bigint, top array<{BID}>",
    replaced_by=("auction",),
    sql={
        "main": f"""
            select auction, transform(
                slice(sort_array(collect_list(struct(-price, seq, person))), 1, {K}),
                bid -> struct(-bid.col1 as price, bid.seq as seq, bid.person as person)) as top
            from events where kind = 'bid' group by auction"""
    },
)
