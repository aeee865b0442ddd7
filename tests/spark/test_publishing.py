"""The sink that publishes committed files: each batch once, whole, whatever fails on the way, and read by Spark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from ciphers import AesGcm
from sink_jobs import rows_of_batch, sink_job
from spark_streams import BATCHES, FailsAfter, Outage, Stream, fill

import statebackend as sb
from statebackend.checkpoint import CheckpointReader
from statebackend.spark.sinks import parquet

pytestmark = pytest.mark.spark


def published(folder: Path) -> dict[int, list[tuple[Any, ...]]]:
    """The rows of each batch in a folder."""
    found = {}
    for name in sorted(os.listdir(folder)):
        batch_id = int(name.split("-")[1])
        assert batch_id not in found, "a batch is one file"
        found[batch_id] = [tuple(row.values()) for row in pq.read_table(folder / name).to_pylist()]
    return found


def test_each_batch_is_the_committed_file(stream: Stream) -> None:
    fill(stream)
    out = stream.folder / "out"
    batches = stream.batches(sink=parquet(out))
    stream.run(batches)
    assert published(out) == BATCHES
    newest = CheckpointReader(stream.state).open_latest()
    (file,) = newest.outputs["main"]
    incarnation = newest.manifest.incarnation
    assert os.path.samefile(newest.address(file), out / f"batch-00000002-main-{incarnation}.parquet")
    # Spark, pandas and Arrow read the folder as one table.
    rows = sorted(row for rows in BATCHES.values() for row in rows)
    assert sorted(tuple(row) for row in stream.spark.read.parquet(str(out)).collect()) == rows
    assert sorted(pd.read_parquet(out).itertuples(index=False, name=None)) == rows
    (figures,) = batches.last_progress["sinks"]
    assert {key: figures[key] for key in ("output", "description", "numFiles", "numBytes", "how")} == {
        "output": "main",
        "description": f"parquet[{out}]",
        "numFiles": 1,
        "numBytes": file.size,
        "how": "linked",
    }
    assert 0 <= figures["durationMs"] <= batches.last_progress["durationMs"]["sink"]


def rows_of(batch_id: int) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in rows_of_batch(batch_id).to_pylist()]


@pytest.mark.parametrize("encryption", [None, AesGcm()], ids=["plain", "encrypted"])
def test_a_batch_that_is_delivered_again_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encryption: Any
) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    sink = parquet(out)
    FailsAfter(monkeypatch, sink, 0)
    with sink_job(state, sink, encryption=encryption) as job, pytest.raises(Outage):
        job.run(0)
    written = (out / os.listdir(out)[0]).stat().st_mtime_ns
    with sink_job(state, sink, encryption=encryption) as job:
        assert [job.run(batch_id)[0]["how"] for batch_id in (0, 1)] == [
            "there",
            "copied" if encryption else "linked",
        ]
    assert published(out) == {0: rows_of(0), 1: rows_of(1)}
    assert written in {(out / name).stat().st_mtime_ns for name in os.listdir(out)}


def test_changed_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    sink = parquet(out)
    FailsAfter(monkeypatch, sink, 0)
    with sink_job(tmp_path / "state", sink) as job:
        with pytest.raises(Outage):
            job.run(0)
        (name,) = os.listdir(out)
        (out / name).unlink()
        (out / name).write_bytes(b"something else")
        with pytest.raises(sb.UsageError) as caught:
            job.run(0)
        assert caught.value.code == "USAGE.PUBLISHED"
        assert name in str(caught.value)
        (out / name).unlink()
        job.run(0)
    assert published(out) == {0: rows_of(0)}


def test_batch_without_rows_writes_nothing(tmp_path: Path) -> None:
    with sink_job(tmp_path / "state", parquet(tmp_path / "out")) as job:
        for batch_id in range(3):
            job.run(batch_id, rows_of_batch(1).slice(0, 0) if batch_id == 1 else None)
    assert published(tmp_path / "out") == {0: rows_of(0), 2: rows_of(2)}


def test_a_rewind_names_what_was_published_and_takes_it_back(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    with sink_job(state, parquet(out), retain=3) as job:
        for batch_id in range(3):
            job.run(batch_id)
    before = sorted(os.listdir(out))
    (batch,) = sb.tools.rewind(state, to=1, checkpoint_location=None).taken_back
    assert batch.targets == {"main": f"parquet[{out}], {before[2]}"}
    assert batch.removed == ()
    assert sorted(os.listdir(out)) == before, "what is not asked for stays"
    (out / before[2]).unlink()
    taken = sb.tools.rewind(state, to=0, checkpoint_location=None, sink={"main": parquet(out)})
    assert [each.removed for each in taken.taken_back] == [(str(out / before[1]),)]
    assert os.listdir(out) == before[:1]
    # The batch runs anew, as another: of another incarnation.
    with sink_job(state, parquet(out)) as job:
        job.run(1, rows_of_batch(7))
    assert published(out) == {0: rows_of(0), 1: rows_of(7)}
    assert before[1] not in os.listdir(out)


def test_a_second_query_streams_from_the_folder(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files never get other names, so a batch that is delivered again is no new rows."""
    fill(stream)
    out = stream.folder / "out"
    sink = parquet(out)
    FailsAfter(monkeypatch, sink, 0, 1, 2)
    seen: list[tuple[Any, ...]] = []

    def read_on() -> None:
        stream.read_on(out, lambda frame, _: seen.extend(tuple(row) for row in frame.collect()))

    for _ in range(3):
        stream.fails(stream.batches(sink=sink))
        read_on()
    stream.run(stream.batches(sink=sink))
    read_on()
    assert sorted(seen) == sorted(row for rows in BATCHES.values() for row in rows)


@pytest.mark.parametrize("place", ["state", "state/out"])
def test_publishing_into_the_folder_of_the_checkpoint_is_refused(stream: Stream, place: str) -> None:
    with pytest.raises(sb.UsageError) as refused:
        stream.batches(sink=parquet(stream.folder / place))
    assert refused.value.code == "USAGE.SINKS_LOCATION"
