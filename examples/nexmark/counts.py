"""How many bids has a person made in a row? Counts that expire: after twenty seconds without a bid they begin anew.

Row by row, the state has a time to live in event time: a bid sees counts by its own time, and a count keeps the latest
time of its bids. Over columns, that time is in the state, and a timer removes it. "In a row" is in the order of
arrival, so `order_by` says it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import statebackend as sb
from examples.nexmark.events import PATIENT, SECOND
from examples.nexmark.job import COLUMNS, ROWS, Job, begins, groups

TTL = 20 * SECOND


class ByRow(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        ttl = sb.StateTtlConfig(
            datetime.timedelta(milliseconds=TTL),
            ttl_time_characteristic=sb.StateTtlConfig.TtlTimeCharacteristic.EventTime,
        )
        self.bids = ctx.get_reducing_state(
            sb.ReducingStateDescriptor("bids", "sum", int).enable_time_to_live(ttl)
        )

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.bids.add(1)
        yield row.seq, row.person, self.bids.get()


class OverColumns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.bids = ctx.get_value_state(sb.ValueStateDescriptor("bids", "struct<last:bigint,n:bigint>"))

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> pa.RecordBatch:
        persons, group = groups(ctx.keys)
        before = self.bids.get_many(persons)
        last, n = (pc.fill_null(field, 0).to_numpy(zero_copy_only=False) for field in before.flatten())
        order = np.argsort(group, kind="stable")
        group, at = group[order], batch["at"].to_numpy()[order]
        is_first = begins(group)
        # The latest time of a person's bids so far: a maximum that goes on within each person's rows alone.
        lowest = min(int(at.min()), int(last.min())) if len(at) else 0
        offset = group.astype(np.int64) * (int(max(at.max(), last.max())) - lowest + 1) if len(at) else group
        latest = np.maximum(at, np.where(is_first, last[group], lowest)) - lowest
        latest = np.maximum.accumulate(latest + offset) - offset + lowest
        previous = np.where(is_first, last[group], np.roll(latest, 1))
        # Where a row finds nothing, counting begins anew; the first row of a person may go on from the state.
        anew = at >= previous + TTL
        begin = np.flatnonzero(anew | is_first)
        run = np.cumsum(anew | is_first) - 1
        nth = np.arange(len(group)) - begin[run] + 1 + np.where(anew[begin], 0, n[group[begin]])[run]
        is_last = np.append(is_first[1:], [True] * bool(len(group)))
        keys = persons.take(pa.array(group[is_last]))
        after = pa.StructArray.from_arrays([pa.array(latest[is_last]), pa.array(nth[is_last])], ["last", "n"])
        self.bids.update_many(keys, after)
        ctx.timer_service().register_event_time_timers(keys, pc.add(after.field("last"), TTL))
        shown = batch.take(pa.array(order))
        return pa.record_batch({"seq": shown["seq"], "person": shown["person"], "nth": nth})

    def on_timers(
        self, keys: pa.Array, timestamps: pa.Array, namespaces: Any, ctx: sb.FunctionContext
    ) -> None:
        last = self.bids.get_many(keys).field("last")
        self.bids.clear_many(keys.filter(pc.less_equal(pc.add(last, TTL), timestamps)))


JOB = Job(
    "counts with TTL",
    functions={ROWS: ByRow, COLUMNS: OverColumns},
    keys={ROWS: "person", COLUMNS: "person"},
    where="kind = 'bid'",
    columns=("seq", "person", "at"),
    schema="seq bigint, person bigint, nth bigint",
    options={
        "event_time": sb.EventTime("at", watermark_delay=PATIENT, timers="after_batch"),
        "order_by": "seq",
    },
    sql={
        "main": f"""
            select seq, person, row_number() over (partition by person, run order by seq) as nth from (
                select seq, person, sum(anew) over (partition by person order by seq) as run from (
                    select seq, person, if(
                        at < max(at) over (partition by person order by seq
                            rows between unbounded preceding and 1 preceding) + {TTL}, 0, 1) as anew
                    from events where kind = 'bid'))"""
    },
)
