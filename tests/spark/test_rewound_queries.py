"""A rewind of a query takes store, sink and Spark's checkpointLocation back to one batch, or changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from local_spark import settings
from spark_streams import Stream, Total, len_of, numbers, spark, stream

import statebackend as sb
from statebackend.spark.sinks import parquet

__all__ = ["spark", "stream"]
pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = [[("a", 1), ("b", 10)], [("a", 2)], [("b", 20), ("a", 1)], [("a", 4), ("b", 10)], [("c", 5)]]
GOOD = 2
PROVIDER = "org.apache.spark.sql.execution.streaming.state.{}StateStoreProvider"


class Wrong(Total):
    """Counts everything ten times."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        for _ in range(10):
            self.total.add(row.n)
        yield row.user, self.total.get()


def published(folder: Path) -> dict[int, list[tuple[Any, ...]]]:
    files = sorted((folder / "out").glob("*.parquet"))
    rows = {int(path.name.split("-")[1]): pq.read_table(path).to_pylist() for path in files}
    return {batch: [tuple(row.values()) for row in each] for batch, each in rows.items()}


@pytest.fixture(params=["none", "HDFSBacked", "RocksDB"])
def transform(request: pytest.FixtureRequest, spark: Any) -> Any:
    """The operator of Spark above the function: none, or `dropDuplicates` with a state of its own."""
    if request.param == "none":
        yield None
        return
    key = "spark.sql.streaming.stateStore.providerClass"
    spark.conf.set(key, PROVIDER.format(request.param))
    try:
        yield lambda rows: rows.dropDuplicates(["user", "n"])
    finally:
        spark.conf.unset(key)


def run(stream: Stream, function: Any, transform: Any) -> None:
    state = sb.CheckpointStore(stream.state, retain=10)
    stream.run(stream.batches(function, parquet(stream.folder / "out"), state=state), transform=transform)


def bad_history(stream: Stream, transform: Any) -> None:
    """Two good batches and two wrong ones."""
    for at, rows in enumerate(ROWS[:-1]):
        stream.add(numbers(*rows))
        if at == GOOD - 1:
            run(stream, Total(), transform)
    run(stream, Wrong(), transform)


def rewind(folder: Path, to: int | None = GOOD - 1, **options: Any) -> Any:
    where = {"checkpoint_location": folder / "stream", "sink": "recorded"}
    return sb.tools.rewind(folder / "state", to=to, **{**where, **options})


def files_of(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in (folder / "stream").rglob("*") if path.is_file())
    return {str(path) for path in found if ".rewound" not in path.parts}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("to", [GOOD - 1, None])
def test_rewound_query_gives_what_one_without_the_bad_batches_gives(
    stream: Stream, transform: Any, to: int | None
) -> None:
    bad_history(stream, transform)
    assert rewind(stream.folder, to, dry_run=True).moved
    result = rewind(stream.folder, to)
    assert [batch.batch_id for batch in result.taken_back] == list(range(0 if to is None else to + 1, 4))
    assert list(published(stream.folder)) == ([] if to is None else [0, 1])
    stream.add(numbers(*ROWS[-1]))
    run(stream, Total(), transform)
    found = published(stream.folder)

    (stream.folder / "other").mkdir()
    never = Stream(stream.spark, stream.folder / "other")
    for rows in ROWS:
        never.add(numbers(*rows))
    run(never, Total(), transform)
    assert found == published(never.folder)
    assert list(found) == [0, 1, 2, 3, 4]


@pytest.mark.sampled(1)
def test_restored_query_gives_what_one_that_was_not_lost_gives(stream: Stream, transform: Any) -> None:
    for rows in ROWS[:GOOD]:
        stream.add(numbers(*rows))
        run(stream, Total(), transform)
    where = {"checkpoint_location": stream.folder / "stream"}
    copied = stream.folder / "backup"
    assert sb.tools.backup(stream.state, copied, **where).checkpoint == GOOD - 1
    for rows in ROWS[GOOD:]:
        stream.add(numbers(*rows))
        run(stream, Total(), transform)
    expected = published(stream.folder)
    assert sb.tools.backup(stream.state, stream.folder / "older", **where, id=GOOD - 1).stream_files
    for made in (copied, stream.folder / "older"):
        for lost in (
            stream.folder / "stream",
            stream.state,
            *(stream.folder / "out").glob("*-0000000[234]-*"),
        ):
            shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
        sb.tools.restore(made, stream.state, **where)
        run(stream, Total(), transform)
        assert published(stream.folder) == expected


def test_query_is_rewound_directly_after_its_end(stream: Stream) -> None:
    stream.add(numbers(*ROWS[0]))
    stream.start(stream.batches(sink=len_of)).awaitTermination()
    with pytest.raises(sb.UsageError, match=r"function .* cannot be found again .* sink len_of"):
        rewind(stream.folder, None)
    assert rewind(stream.folder, None, sink=None).taken_back[0].rows == 2


def test_rewind_changes_nothing_if_the_stream_cannot_go_back(stream: Stream) -> None:
    bad_history(stream, None)
    before, rows = files_of(stream.folder), published(stream.folder)

    def refused(match: str, **options: Any) -> None:
        with pytest.raises(sb.UsageError, match=match) as caught:
            rewind(stream.folder, **options)
        assert caught.value.code == "USAGE.STREAM_REWIND"
        assert sb.CheckpointStore(stream.state).latest() == 3
        assert published(stream.folder) == rows

    refused("no checkpointLocation", checkpoint_location=stream.folder / "in")
    shutil.copytree(stream.folder / "stream", stream.folder / "other")
    (stream.folder / "other" / "metadata").write_text(json.dumps({"id": "another"}))
    refused("another query", checkpoint_location=stream.folder / "other")
    (stream.folder / "in" / "0003.parquet").rename(stream.folder / "0003.parquet")
    refused("input file")
    (stream.folder / "0003.parquet").rename(stream.folder / "in" / "0003.parquet")
    assert files_of(stream.folder) == before
    manifest = sb.CheckpointStore(stream.state).open(1).manifest
    data = stream.state / min(manifest.all_files.keys() - manifest.output_names)
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    for sink in ("recorded", None):
        with pytest.raises(sb.CorruptCheckpointError):
            rewind(stream.folder, sink=sink)
        assert (files_of(stream.folder), published(stream.folder)) == (before, rows)
    data.write_bytes(whole)
    stream.lose(1, "commits")
    before = files_of(stream.folder)
    assert rewind(stream.folder, dry_run=True).written == ["commits/1"]
    assert (files_of(stream.folder), published(stream.folder)) == (before, rows)


#: Spark keeps few entries of its logs.
FORGETS = {
    "spark.sql.streaming.minBatchesToRetain": "1",
    "spark.sql.streaming.fileSource.log.compactInterval": "2",
    "spark.sql.streaming.fileSource.log.cleanupDelay": "0",
}


def test_query_is_rewound_behind_the_log_of_spark(stream: Stream) -> None:
    for rows in (*ROWS, *ROWS):
        stream.add(numbers(*rows))
    with settings(stream.spark, FORGETS):
        run(stream, Total(), None)
        expected = published(stream.folder)
        assert not (stream.folder / "stream/sources/0/2").exists()
        written = rewind(stream.folder, 2).written
        assert written == ["sources/0/2.compact", "offsets/2", "commits/2", "offsets/1"]
        run(stream, Total(), None)
    assert published(stream.folder) == expected
    assert len(expected) == 2 * len(ROWS)
