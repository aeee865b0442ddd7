"""Who is selling in some states, and what? A join of two streams, with state on both sides (Nexmark's query 3).

Both streams come as one, and `kind` tells them apart. The key is the person. A person is kept for the auctions to come,
and auctions wait for their person. Each pair comes out once, whichever side comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import statebackend as sb
from examples.nexmark.job import COLUMNS, ROWS, Job, elements

CATEGORY = 3
WHO = "struct<name:string,state:string>"


class ByRow(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.who = ctx.get_value_state(sb.ValueStateDescriptor("who", WHO))
        self.waiting = ctx.get_list_state(sb.ListStateDescriptor("waiting", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        if row.kind == "person":
            self.who.update((row.name, row.state))
            for auction in self.waiting:
                yield row.name, row.state, auction
            self.waiting.clear()
            return
        who = self.who.value()
        if who is None:
            self.waiting.add(row.auction)
        else:
            yield who.name, who.state, row.auction


class OverColumns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.who = ctx.get_value_state(sb.ValueStateDescriptor("who", WHO))
        self.waiting = ctx.get_list_state(sb.ListStateDescriptor("waiting", int))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> Iterator[pa.RecordBatch]:
        is_person = pc.equal(batch["kind"], "person")
        people, persons = batch.filter(is_person), ctx.keys.filter(is_person)
        who = pa.StructArray.from_arrays([people["name"], people["state"]], ["name", "state"])
        self.who.update_many(persons, who)
        auctions, owner = elements(self.waiting.get_many(persons))
        yield joined(who.take(pa.array(owner)), auctions)
        self.waiting.clear_many(persons)

        is_auction = pc.invert(is_person)
        sellers, auctions = ctx.keys.filter(is_auction), batch["auction"].filter(is_auction)
        who = self.who.get_many(sellers)
        is_there = who.is_valid()
        yield joined(who.filter(is_there), auctions.filter(is_there))
        is_missing = pc.invert(is_there)
        self.waiting.add_many(sellers.filter(is_missing), auctions.filter(is_missing))


def joined(who: pa.StructArray, auctions: pa.Array) -> pa.RecordBatch:
    name, state = who.flatten()
    return pa.record_batch({"name": name, "state": state, "auction": auctions})


JOB = Job(
    "join of two streams",
    functions={ROWS: ByRow, COLUMNS: OverColumns},
    keys={ROWS: "person", COLUMNS: "person"},
    where=f"kind = 'person' and state in ('OR', 'ID', 'CA') or kind = 'auction' and category = {CATEGORY}",
    columns=("kind", "person", "auction", "name", "state"),
    schema="name string, state string, auction bigint",
    sql={
        "main": f"""
            select p.name, p.state, a.auction from events p join events a on a.person = p.person
            where p.kind = 'person' and p.state in ('OR', 'ID', 'CA') and a.kind = 'auction'
            and a.category = {CATEGORY}"""
    },
)
