"""Rewinds that have the sinks take their batches back: all of a batch, or an error before it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from sink_jobs import rows_of_batch, sink_job

import statebackend as sb
from statebackend.checkpoint import Checkpoint
from statebackend.spark.sinks import parquet


def published(out: Path) -> list[int]:
    return sorted(int(name.split("-")[1]) for name in os.listdir(out))


def run(state: Path, out: Path, batches: range, **options: int) -> None:
    with sink_job(state, parquet(out), **options) as job:
        for batch_id in batches:
            job.run(batch_id)


def test_a_beginning_that_is_no_longer_there_cannot_be_taken_back(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    run(state, out, range(5), retain=2)
    with pytest.raises(sb.UsageError, match="no longer has the first batches") as caught:
        sb.tools.rewind(state, to=None, checkpoint_location=None, sink=parquet(out))
    assert "oldest checkpoint is 3, and it began with batch 0" in caught.value.detail
    assert published(out) == [0, 1, 2, 3, 4], "nothing has changed"
    assert sb.CheckpointStore(state).checkpoints() == [3, 4]
    # To one that is there, and without the sink, it goes on as ever.
    assert (
        len(sb.tools.rewind(state, to=3, checkpoint_location=None, sink=parquet(out)).taken_back[0].removed)
        == 1
    )
    assert published(out) == [0, 1, 2, 3]
    assert sb.tools.rewind(state, to=None, checkpoint_location=None).taken_back[0].batch_id == 3


def test_a_whole_beginning_is_taken_back(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    run(state, out, range(3), retain=5)
    assert len(sb.tools.rewind(state, to=None, checkpoint_location=None, sink=parquet(out)).taken_back) == 3
    assert published(out) == []
    run(state, out, range(3))
    assert pq.read_table(out).num_rows == 3 * rows_of_batch(0).num_rows
    # There is nothing in the store: nothing to take back, and no error.
    sb.tools.rewind(state, to=None, checkpoint_location=None)
    assert sb.tools.rewind(state, to=None, checkpoint_location=None, sink=parquet(out)).taken_back == []


def test_history_of_a_reset_store_begins_with_its_restart(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    run(state, out, range(2), retain=5)
    with sb.CheckpointStore(state).open_for_writing() as store:
        store.restart(begins_at=7)
    run(state, out, range(7, 9), retain=5)
    taken = sb.tools.rewind(state, to=None, checkpoint_location=None, sink=parquet(out)).taken_back
    assert [each.batch_id for each in taken] == [7, 8]
    assert published(out) == [0, 1], "another stream's"


def test_a_damaged_checkpoint_is_gone_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    run(state, out, range(4), retain=5)
    original, asked = Checkpoint.verify, []

    def verify(self: Checkpoint, *arguments: Any) -> None:
        asked.append(self.id)
        if self.id == 2:
            raise sb.CorruptCheckpointError("a file of it is damaged")
        original(self, *arguments)

    monkeypatch.setattr(Checkpoint, "verify", verify)
    taken = sb.tools.rewind(state, to=1, checkpoint_location=None, sink=parquet(out)).taken_back
    assert 2 in asked
    assert [len(each.removed) for each in taken] == [1, 1]
    assert published(out) == [0, 1]
    assert sb.CheckpointStore(state).checkpoints() == [0, 1]


def test_an_output_whose_sink_is_not_given_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its rows stay, and come again when the batch runs anew."""
    state, out = tmp_path / "state", tmp_path / "out"
    run(state, out, range(2))
    (taken,) = sb.tools.rewind(
        state, to=0, checkpoint_location=None, sink={"other": parquet(tmp_path / "elsewhere")}
    ).taken_back
    assert taken.removed == ()
    assert published(out) == [0, 1]
    (told,) = (each.getMessage() for each in caplog.records if "stays in" in each.getMessage())
    assert told.startswith(f"output 'main' stays in parquet[{out}], batch-00000001-main-")
