"""How many bids has each person in each session? It ends when none has come for ten seconds (Nexmark's query 11).

A person may have several sessions at a time, because rows come out of order: a row may even join two of them. Row by
row, they are a map from where a session begins. Over columns they are a list, and those of all persons are merged with
the rows of the batch in one sort.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import statebackend as sb
from examples.nexmark.events import PATIENT, SECOND
from examples.nexmark.job import COLUMNS, ROWS, Job, begins, elements, groups

GAP = 10 * SECOND
SESSION = "struct<start:bigint,end:bigint,bids:bigint>"


class ByRow(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.sessions = ctx.get_map_state(sb.MapStateDescriptor("sessions", int, tuple[int, int]))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        start, end, bids = row.at, row.at + GAP, 1
        for other, (its_end, its_bids) in list(self.sessions.items()):
            if other < end and start < its_end:
                start, end, bids = min(start, other), max(end, its_end), bids + its_bids
                self.sessions.remove(other)
        self.sessions.put(start, (end, bids))
        ctx.timer_service().register_event_time_timer(end)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Iterator[Any]:
        for start, (end, bids) in list(self.sessions.items()):
            if end == timestamp:  # no row has moved it since
                yield ctx.current_key, start, end, bids
                self.sessions.remove(start)


class OverColumns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.sessions = ctx.get_list_state(sb.ListStateDescriptor("sessions", SESSION))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> None:
        persons, group = groups(ctx.keys)
        open_ones, owner = elements(self.sessions.get_many(persons))
        at = batch["at"].to_numpy()
        start, end, bids = (
            np.concatenate([rows, column.to_numpy()])
            for rows, column in zip((at, at + GAP, np.ones_like(at)), open_ones.flatten(), strict=True)
        )
        group = np.concatenate([group, owner])
        order = np.lexsort((start, group))
        group, start, end, bids = group[order], start[order], end[order], bids[order]
        # A session begins where the ends of all before it in its group do not reach.
        first = begins(group)
        shift = group * (int(end.max(initial=0)) + 1)
        reached = np.maximum.accumulate(end + shift) - shift
        first[1:] |= start[1:] >= reached[:-1]
        at_first = np.flatnonzero(first)
        last = np.append(at_first[1:], len(group)) - 1
        merged = pa.StructArray.from_arrays(
            [
                pa.array(start[at_first]),
                pa.array(reached[last]),
                pa.array(np.add.reduceat(bids, at_first) if len(at_first) else bids),
            ],
            ["start", "end", "bids"],
        )
        keys = persons.take(pa.array(group[at_first]))
        self.sessions.clear_many(persons)
        self.sessions.add_many(keys, merged)
        ctx.timer_service().register_event_time_timers(keys, merged.field("end"))

    def on_timers(
        self, keys: pa.Array, timestamps: pa.Array, namespaces: Any, ctx: sb.FunctionContext
    ) -> pa.RecordBatch:
        persons = keys.unique()
        sessions, owner = elements(self.sessions.get_many(persons))
        has_ended = pc.less_equal(sessions.field("end"), ctx.watermark)
        owners = persons.take(pa.array(owner))
        goes_on = pc.invert(has_ended)
        self.sessions.clear_many(persons)
        self.sessions.add_many(owners.filter(goes_on), sessions.filter(goes_on))
        start, end, bids = sessions.filter(has_ended).flatten()
        return pa.record_batch({"person": owners.filter(has_ended), "start": start, "end": end, "bids": bids})


JOB = Job(
    "sessions",
    functions={ROWS: ByRow, COLUMNS: OverColumns},
    keys={ROWS: "person", COLUMNS: "person"},
    where="kind = 'bid'",
    columns=("person", "at"),
    schema="person bigint, start bigint, end bigint, bids bigint",
    options={"event_time": sb.EventTime("at", watermark_delay=PATIENT)},
    sql={
        "main": f"""
            select person, min(at) as start, max(at) + {GAP} as end, count(*) as bids from (
                select person, at, sum(is_first) over (partition by person order by at
                    rows between unbounded preceding and current row) as session
                from (
                    select person, at, if(at - lag(at) over (partition by person order by at) < {GAP}, 0, 1)
                        as is_first
                    from events where kind = 'bid'))
            group by person, session
            having end <= (select max(at) - {PATIENT} from events where kind = 'bid')"""
    },
)
