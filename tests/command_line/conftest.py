"""Stores that commands look at and change."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from contract.conftest import no_fsync
from keyed_story import Story
from sink_jobs import sink_job

import statebackend as sb
from statebackend.spark.sinks import parquet

__all__ = ["no_fsync"]


@pytest.fixture
def keyed_store(tmp_path: Path, rng: random.Random) -> Path:
    """Checkpoints 5 to 7 of a store with the states ``count`` and ``name``."""
    folder = tmp_path / "keyed"
    with (
        sb.CheckpointStore(folder, retain=4).open_for_writing(key_type=int, max_parallelism=128) as store,
        sb.create_backend("heap").create_keyed_backend(int) as keyed,
    ):
        story = Story(keyed, rng, int, names=["count", "name"])
        for batch_id in range(5, 8):
            story.change(50)
            store.commit(batch_id, [keyed.snapshot(batch_id, store).result()], now=batch_id * 1000)
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Batches 38 to 44 of a query: its ``state``, files published in ``out``, and Spark's ``stream`` from batch 40."""
    folder = tmp_path / "totals"
    with sink_job(folder / "state", parquet(folder / "out")):
        pass  # the store is made
    sb.tools.reset(folder / "state", first_batch=38)
    with sink_job(folder / "state", parquet(folder / "out"), retain=10) as query:
        for batch_id in range(38, 45):
            query.run(batch_id)
    for name in ("offsets", "commits"):
        (folder / "stream" / name).mkdir(parents=True)
        for batch_id in range(40, 45):
            plan: list[Any] = ["v1", json.dumps({"batchTimestampMs": batch_id * 60_000}), "{}"]
            (folder / "stream" / name / str(batch_id)).write_text("\n".join(plan), encoding="utf-8")
    (folder / "stream" / "metadata").write_text(json.dumps({"id": "s"}), encoding="utf-8")
    return folder
