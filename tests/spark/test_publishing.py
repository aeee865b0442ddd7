"""The sink that publishes committed files: each batch once, whole, whatever fails on the way, and read by Spark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from ciphers import AesGcm
from sink_faults import BATCHES, FailsAfter, fill
from spark_streams import Stream, spark, stream

import statebackend as sb
from statebackend.checkpoint import CheckpointReader
from statebackend.spark.sinks import parquet

__all__ = ["spark", "stream"]
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


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_batch_that_is_delivered_again_is_there_once(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
) -> None:
    fill(stream)
    out = stream.folder / "out"
    sink = parquet(out)
    FailsAfter(monkeypatch, sink, 0, 2)
    store: Any = stream.state
    if is_encrypted:
        store = sb.CheckpointStore(stream.state, encryption=AesGcm())
    for _ in (0, 2):
        assert "Outage" in stream.fails(stream.batches(sink=sink, checkpoint=store))
        seen = (out / os.listdir(out)[-1]).stat().st_mtime_ns
    batches = stream.batches(sink=sink, checkpoint=store)
    stream.run(batches)
    assert published(out) == BATCHES
    assert batches.last_progress["isReplay"]
    assert batches.last_progress["sinks"][0]["how"] == "there"
    assert seen in {(out / name).stat().st_mtime_ns for name in os.listdir(out)}


def test_a_file_that_somebody_changed_is_named(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(stream)
    out = stream.folder / "out"
    sink = parquet(out)
    FailsAfter(monkeypatch, sink, 1)
    stream.fails(stream.batches(sink=sink))
    (name,) = (name for name in os.listdir(out) if name.startswith("batch-00000001"))
    (out / name).unlink()
    (out / name).write_bytes(b"something else")
    message = stream.fails(stream.batches(sink=sink))
    assert "USAGE.PUBLISHED" in message
    assert name in message
    (out / name).unlink()
    stream.run(stream.batches(sink=sink))
    assert published(out) == BATCHES


def test_a_batch_without_rows_has_no_file(stream: Stream) -> None:
    class Odd(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            return [(row.user, row.n)] if row.n % 2 else []

    fill(stream)
    out = stream.folder / "out"
    stream.run(stream.batches(Odd(), sink=parquet(out)))
    assert published(out) == {0: [("a", 1)], 2: [("c", 5)]}


def test_a_rewind_names_what_was_published_and_takes_it_back(stream: Stream) -> None:
    fill(stream)
    out = stream.folder / "out"
    stream.run(stream.batches(sink=parquet(out), retain=3))
    before = sorted(os.listdir(out))
    unasked = sb.tools.rewind(stream.state, to=1)
    (batch,) = unasked.taken_back
    assert batch.targets == {"main": str(out / before[2])}
    assert batch.removed == ()
    assert sorted(os.listdir(out)) == before, "what is not asked for stays"
    (out / before[2]).unlink()
    taken = sb.tools.rewind(stream.state, to=0, sink={"main": parquet(out)})
    assert [each.removed for each in taken.taken_back] == [(str(out / before[1]),)]
    assert os.listdir(out) == before[:1]
    # The batches run anew, as others: of another incarnation.
    stream.lose(1, "offsets", "commits")
    stream.lose(2, "offsets", "commits")
    stream.run(stream.batches(sink=parquet(out)), files=2)
    again = published(out)
    assert {batch_id: sorted(rows) for batch_id, rows in again.items()} == {
        0: BATCHES[0],
        1: sorted(BATCHES[1] + BATCHES[2]),
    }
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
def test_the_folder_of_the_checkpoint_is_no_place_to_publish_to(stream: Stream, place: str) -> None:
    fill(stream)
    with pytest.raises(sb.UsageError) as refused:
        stream.batches(sink=parquet(stream.folder / place))
    assert refused.value.code == "USAGE.SINKS_LOCATION"
    assert not list(stream.folder.glob("state/**/batch-*"))
