"""Jobs without Spark that write to the sinks of `sb.spark.sinks`, as the driver has them do it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import statebackend as sb
from statebackend.checkpoint import CheckpointStore
from statebackend.runtime import BatchSource, Job, Runner
from statebackend.runtime.batch_progress import Figures, Stopwatch
from statebackend.spark.sink_delivery import SinkDeliveries
from statebackend.spark.sinks.committed_sink import SinkContext
from statebackend.types import of


class _ToEach(sb.KeyedProcessFunction):
    """Gives each row to every output."""

    def __init__(self, others: list[str]) -> None:
        self._others = others

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        for name in self._others:
            ctx.output(name, row)
        yield row


def rows_of_batch(batch_id: int) -> pa.Table:
    return pa.table({"user": ["a", "b"], "v": [batch_id * 10, batch_id * 10 + 1]})


class SinkJob:
    def __init__(self, runner: Runner, deliveries: SinkDeliveries) -> None:
        self.runner, self._deliveries = runner, deliveries

    def run(self, batch_id: int, rows: pa.Table | None = None) -> list[Figures]:
        """Run a batch, or find that it is committed, and serve the sinks."""
        table = rows_of_batch(batch_id) if rows is None else rows
        plan = {"kind": "plan", "time": batch_id, "offsets": [batch_id]}
        committed = self.runner.run(batch_id, BatchSource(lambda: table, plan, lambda: None), Stopwatch())
        context = SinkContext(batch_id, self.runner.still_held(), committed.incarnation, committed.is_replay)

        def frame_of(output: str) -> Any:
            raise AssertionError(f"{output}: no function is among the sinks")

        return self._deliveries.deliver(committed, context, frame_of)


@contextmanager
def sink_job(
    state: Path, sink: Any, schema: Any = "user string, v bigint", **options: Any
) -> Iterator[SinkJob]:
    """A run of a query over the store in a folder, with these sinks."""
    others = list(schema)[1:] if isinstance(schema, dict) else []
    job = Job(_ToEach(others), key="user", schema=schema)
    deliveries = SinkDeliveries.of(sink, job.outputs)
    runner = Runner(
        job,
        CheckpointStore(state, **options),
        of("string"),
        query="q",
        delivered=deliveries.partitions(),
        target_of=deliveries.target,
        stream="s",
        location="/x",
    )
    try:
        deliveries.prepare()
        yield SinkJob(runner, deliveries)
    finally:
        runner.close()
