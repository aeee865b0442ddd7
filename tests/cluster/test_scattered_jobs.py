"""A job over hosts and in one process: each goes on with what the other has written, and listeners are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from host_queries import HostQuery, LocalQuery, rows_out
from host_worlds import JOB, ROWS

import statebackend as sb
from statebackend.runtime import Job

IN_BOTH_MODES = [LocalQuery, lambda *given: HostQuery(*given, 2)]


def test_each_mode_goes_on_with_what_the_other_has_written(tmp_path: Path) -> None:
    for batch_id, made in enumerate([*IN_BOTH_MODES, *IN_BOTH_MODES]):
        query = made(tmp_path, JOB)
        try:
            totals = [(row["user"], row["n"] * (batch_id + 1)) for row in ROWS.to_pylist()]
            assert sorted(rows_out(query.run(batch_id, ROWS))) == totals
        finally:
            query.close()


class Listening(sb.KeyedProcessFunction, sb.CheckpointListener):
    """Counts rows by user, and cannot hear of the first batch."""

    def open(self, ctx: sb.FunctionContext) -> None:
        self.count = ctx.get_reducing_state(sb.ReducingStateDescriptor("count", "sum", int))

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        self.count.add(1)
        yield row.user, self.count.get()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        if checkpoint_id == 0:
            raise ValueError("it is not to be heard")


@pytest.mark.parametrize("made", IN_BOTH_MODES, ids=["driver", "executors"])
def test_a_listener_that_fails_is_raised_once_the_batch_is_committed(tmp_path: Path, made: Any) -> None:
    """In both modes, and no host is lost for it."""
    query = made(tmp_path, Job(Listening(), key="user", schema="user string, count bigint"))
    table = pa.table({"user": ["ann", "bob", "eve", "kim"]})
    try:
        with pytest.raises((ValueError, sb.HostError), match="it is not to be heard"):
            query.run(0, table)
        assert query.store.latest() == 0
        assert sorted(rows_out(query.run(1, table))) == [(user, 2) for user in ("ann", "bob", "eve", "kim")]
        assert getattr(query, "clusters", []) == [] or query.cluster.ended == []
    finally:
        query.close()
