"""Spark's checkpointLocation, written by hand, and the files that a rewind moves in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import statebackend as sb
from statebackend.tools.stream_rewind import SparkCheckpoint


def plan(batch: int, watermark: int = 0) -> str:
    times = {"batchWatermarkMs": watermark, "batchTimestampMs": batch, "conf": {}}
    return "\n".join(["v1", json.dumps(times, separators=(",", ":")), json.dumps({"logOffset": batch}), "-"])


def commit(watermark: int = 0) -> str:
    return f'v1\n{{"nextBatchWatermarkMs":{watermark}}}'


def source_entry(folder: Path, *batches: int) -> str:
    return "\n".join(
        ["v1", *(json.dumps({"path": f"file://{folder}/in/{each}", "batchId": each}) for each in batches)]
    )


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """Batches 0 to 12 of a file source, whose log is compacted at 9, and of a source that keeps its origin."""
    for folder in ("offsets", "commits", "sources/0", "sources/1", "in"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "metadata").write_text('{"id":"q"}')
    (tmp_path / "sources/1/0").write_text("v1\n1700000000000")
    for batch in range(13):
        (tmp_path / f"in/{batch}").touch()
        (tmp_path / f"offsets/{batch}").write_text(plan(batch))
        (tmp_path / f"commits/{batch}").write_text(commit())
        name, whole = (f"{batch}.compact", range(batch + 1)) if batch == 9 else (f"{batch}", [batch])
        (tmp_path / f"sources/0/{name}").write_text(source_entry(tmp_path, *whole))
    return tmp_path


def left(location: Path, folder: str) -> list[str]:
    return sorted(os.listdir(location / folder), key=lambda name: int(name.split(".")[0]))


def test_rewind_to_the_start_moves_the_log_of_files_though_no_offset_is_left(location: Path) -> None:
    stream = SparkCheckpoint(location)
    files = stream.files_after(None)
    stream.move([path for path in files if "sources" not in path.parts], "first")
    assert left(location, "offsets") == []
    stream.move(stream.files_after(None), "second")
    assert (left(location, "sources/0"), left(location, "sources/1")) == ([], ["0"])


def test_rewind_needs_the_input_of_later_batches_only(location: Path) -> None:
    (location / "in/7").unlink()
    assert SparkCheckpoint(location).files_after(8)
    with pytest.raises(sb.UsageError, match="an input file of a later batch is gone"):
        SparkCheckpoint(location).files_after(6)


# --- entries that Spark has removed ---


def purged(location: Path, before: int) -> SparkCheckpoint:
    """Spark's logs without the entries before a batch; those of the file source are in its compacted one."""
    for batch in range(before):
        for name in ("offsets", "commits", "sources/0"):
            (location / name / f"{batch}").unlink(missing_ok=True)
    return SparkCheckpoint(location)


def kept(batch: int, watermark: int = 0) -> dict[str, object]:
    """The part of Spark's log in a manifest."""
    before = plan(batch - 1).splitlines()[2:] if batch else None
    done = commit(watermark) if batch else None
    return {"plan": plan(batch, watermark), "before": before, "done": done}


@pytest.mark.parametrize("later", [5, 11])
def test_lost_entries_are_written_again_from_the_manifests(location: Path, later: int) -> None:
    stream = purged(location, 9)
    lost = stream.lost_entries(4, {4: kept(4), later: kept(later)})
    assert {*lost} == {"offsets/4", "offsets/3", "commits/4", "sources/0/4.compact"}
    moved = stream.files_after(4, lost)
    for entry in lost.items():  # a kill after each
        stream.write(dict([entry]))
        again = stream.lost_entries(4, {4: kept(4), later: kept(later)})
        assert stream.files_after(4, again) == moved
    assert again == {}
    assert stream.files_after(4) == moved
    stream.move(moved, "now")
    assert (left(location, "offsets"), left(location, "commits")) == (["3", "4"], ["4"])
    assert (location / "offsets/4").read_text() == plan(4)
    assert (location / "offsets/3").read_text().splitlines()[2:] == plan(3).splitlines()[2:]
    assert left(location, "sources/0") == ["4.compact"]
    assert (location / "sources/0/4.compact").read_text() == source_entry(location, *range(5))


def test_lost_entries_are_refused_if_they_cannot_be_made_again(location: Path) -> None:
    stream = purged(location, 9)
    with pytest.raises(sb.UsageError, match="the watermark after it is not known"):
        stream.lost_entries(4, {4: kept(4), 11: kept(11, watermark=500)})
    assert stream.lost_entries(4, {4: kept(4), 5: kept(5, watermark=500)})["commits/4"] == commit(500)
    (location / "state/0/0").mkdir(parents=True)
    (location / "state/0/0/12.delta").touch()
    with pytest.raises(sb.UsageError, match="an operator of Spark has state"):
        stream.lost_entries(4, {4: kept(4), 5: kept(5)})
    with pytest.raises(sb.UsageError, match="no offsets/4 any more"):
        stream.files_after(4, stream.lost_entries(4, {}))
