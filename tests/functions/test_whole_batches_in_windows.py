"""Functions over whole batches with columns of namespaces and times leave what functions row by row leave."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract.samples import dump

import statebackend as sb
from statebackend.testing import Harness

TTL, SIZE, DELAY = 400, 100, 300
ON_READ = sb.StateTtlConfig.UpdateType.OnReadAndWrite


def descriptors() -> dict[str, Any]:
    made: dict[str, Any] = {
        "n": sb.ReducingStateDescriptor("n", "sum", int),
        "first": sb.ValueStateDescriptor("first", int),
        "all": sb.ListStateDescriptor("all", int),
        "by_number": sb.MapStateDescriptor("by_number", int, int),
    }
    event_time = sb.StateTtlConfig.TtlTimeCharacteristic.EventTime
    for name, descriptor in made.items():
        # What a late row sees must not depend on when something is cleaned up.
        config = sb.StateTtlConfig(
            TTL,
            ttl_time_characteristic=event_time,
            cleanup_in_background=False,
            **({"update_type": ON_READ} if name == "first" else {}),
        )
        descriptor.enable_time_to_live(config)
    return made


class ByRows(sb.KeyedProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.states = {name: ctx.get_state(each) for name, each in descriptors().items()}

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> None:
        at = ctx.timestamp
        if at is not None:
            ctx.namespace = window = sb.TimeWindow.of(at, SIZE)
            self.states["n"].add(row.number)
            ctx.timers.register(window.end)
        ctx.namespace = sb.VOID
        self.states["all"].add(row.number)
        self.states["by_number"].put(row.number % 3, row.number)
        if self.states["first"].value() is None:
            self.states["first"].update(row.number)

    def on_timer(self, timestamp: int, ctx: sb.FunctionContext) -> Any:
        yield ctx.current_key, ctx.namespace.start, self.states["n"].get()
        self.states["n"].clear()


class ByColumns(sb.BatchProcessFunction):
    def open(self, ctx: sb.FunctionContext) -> None:
        self.states = {name: ctx.get_state(each) for name, each in descriptors().items()}

    def process_batch(self, batch: pa.RecordBatch, ctx: sb.FunctionContext) -> None:
        at, number = batch["at"], batch["number"]
        rows, windows = sb.TimeWindow.assign_many(at, SIZE)
        users = ctx.keys.take(rows)
        times, numbers = at.take(rows), number.take(rows)
        users, windows, _ = self.states["n"].add_many(
            users, numbers, return_changed=True, namespaces=windows, times=times
        )
        if len(users):
            ctx.timers.register_many(users, windows.field("end"), namespaces=windows)
        self.states["all"].add_many(ctx.keys, number, times=at)
        remainders = np.asarray(number) % 3
        self.states["by_number"].put_many(ctx.keys, remainders, number, times=at)
        # A row sees what the one before it has written: one call for each, of one row.
        for row in range(batch.num_rows):
            one = slice(row, row + 1)
            if not self.states["first"].get_many(ctx.keys[one], times=at[one])[0].is_valid:
                self.states["first"].update_many(ctx.keys[one], number[one], times=at[one])

    def on_timers(self, keys: Any, timestamps: Any, namespaces: Any, ctx: sb.FunctionContext) -> Any:
        # At the time of each timer, as `on_timer` goes by it.
        sums = self.states["n"].get_many(keys, namespaces=namespaces, times=timestamps)
        self.states["n"].clear_many(keys, namespaces=namespaces)
        return pa.record_batch({"user": keys, "start": namespaces.field("start"), "sum": sums})


def contents(harness: Harness) -> dict[str, Any]:
    held = {name: dump(harness.keyed, each, sorts_maps=True) for name, each in descriptors().items()}
    return {**held, "timers": list(harness.keyed.timers.rows())}


def day(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "user": rng.choice(["ann", "bob", "cid"]),
            "at": None if rng.random() < 0.05 else 10_000 + 10 * number - rng.randrange(DELAY),
            "number": number,
        }
        for number in range(300)
    ]


SCHEMA = "user string, start bigint, sum bigint"
TYPES = pa.schema({"user": pa.string(), "at": pa.int64(), "number": pa.int64()})


@pytest.mark.parametrize("backend", ["reference", "heap", "rocksdb"])
@pytest.mark.parametrize("pieces", [1, 7, 24])
def test_whole_batches_leave_what_rows_leave(backend: str, pieces: int, rng: random.Random) -> None:
    reason = sb.available_backends()[backend].reason
    if reason is not None:
        pytest.skip(reason)
    rows, given, left = day(rng), [], []
    at = sb.spark.EventTime("at", delay=DELAY)
    for function in (ByRows(), ByColumns()):
        with Harness(function, str, key="user", schema=SCHEMA, event_time=at, backend=backend) as harness:
            output = []
            for piece in range(pieces):
                part = rows[len(rows) * piece // pieces : len(rows) * (piece + 1) // pieces]
                output += harness.process_batch(pa.Table.from_pylist(part, TYPES))
                if piece % 3 == 1:
                    harness.restore(harness.snapshot())
            output += harness.advance_watermark(13_050)
            left.append(contents(harness))
            output += harness.advance_watermark(100_000)
            given.append(sorted(map(tuple, output)))
    assert left[0] == left[1]
    assert given[0] == given[1]
    assert len(given[0]) > 50
