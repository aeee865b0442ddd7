"""Batches in pieces, for tests of what a batch means: rows of a table that come a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from statebackend.runtime import Batch, BatchSource, Job, Runner
from statebackend.runtime.batch_rows import ChunkedBatch, ChunkedRows


class TableInPieces(ChunkedRows):
    """The rows of a table, ``most`` at a time, in the order that a job wants, as Spark would sort them."""

    def __init__(self, job: Job, table: pa.Table, most: int) -> None:
        self.table, self.most = in_order(job, table), most

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema

    def pieces(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        table = self.table if columns is None else self.table.select(columns)
        for start in range(0, table.num_rows, self.most):
            yield table.slice(start, self.most)


def in_order(job: Job, table: pa.Table) -> pa.Table:
    by = [*(job.columns if job.takes_whole_keys else ()), *job.sorted_by]
    if not by or not table.num_rows:
        return table
    sorting: dict[str, Any] = {}
    if job.broadcast is not None:
        flags = pc.fill_null(table.column(job.broadcast), False)
        sorting["others"] = pc.cast(pc.invert(flags), pa.int8())
    for at, name in enumerate(by):
        values = table.column(name)
        if job.broadcast is not None:
            values = pc.if_else(flags, pa.scalar(None, values.type), values)
        parts = values.combine_chunks().flatten() if pa.types.is_struct(values.type) else [values]
        for place, part in enumerate(parts):
            sorting[f"valid{at}.{place}"] = pc.cast(pc.is_valid(part), pa.int8())
            sorting[f"by{at}.{place}"] = part
    keys = pa.table({**sorting, "position": range(table.num_rows)})
    order = pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])
    return table.take(order)


@pytest.fixture(params=[None, 1], ids=["whole", "in pieces"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Each batch of a runner or harness as it is, or in pieces of so many rows."""
    most: int | None = request.param
    if most is None:
        return None
    run = Runner.run

    def run_in_pieces(runner: Runner, batch_id: int, incoming: BatchSource, *arguments: Any) -> Any:
        read = incoming.read
        incoming = incoming._replace(read=lambda: TableInPieces(runner._job, read(), most))
        return run(runner, batch_id, incoming, *arguments)

    def batch_in_pieces(job: Job, table: pa.Table, **options: Any) -> Batch | ChunkedBatch:
        return ChunkedBatch(job, TableInPieces(job, table, most), **options)

    monkeypatch.setattr(Runner, "run", run_in_pieces)
    monkeypatch.setattr("statebackend.testing.harness.Batch", batch_in_pieces)
    return most
