"""Batches of several published files: Spark sees those of a batch at once, whatever fails on the way, and once."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from sink_faults import FailsAfter
from spark_streams import Outage, Stream, spark, stream

import statebackend as sb
from statebackend.checkpoint.files import open_place
from statebackend.checkpoint.files.places import PosixPlace
from statebackend.spark.sinks import parquet
from statebackend.spark.sinks.published import FOLDER, Listed, SinkLog

__all__ = ["spark", "stream"]
pytestmark = pytest.mark.spark

SCHEMA = "user string, total bigint, day date, `a b` string, ok boolean"
DAYS = [datetime.date(2024, 1, 1), datetime.date(2024, 1, 2), None]
#: Texts that cannot name a folder as they are.
TEXTS = ["x/y", "50%", "", None, "é: =*?", "mon"]


class Everything(sb.KeyedProcessFunction):
    """A row out for each row in, with values for the folders."""

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield (
            row.user,
            row.n,
            DAYS[row.n % len(DAYS)],
            TEXTS[row.n % len(TEXTS)],
            [True, False, None][row.n % 3],
        )


def fill(stream: Stream, batches: int = 3, rows: int = 40) -> None:
    for batch in range(batches):
        numbers = list(range(batch * rows, (batch + 1) * rows))
        stream.add(pa.table({"user": [f"u{n % 5}" for n in numbers], "n": numbers}))


def wanted(count: int, empty: str | None = "") -> list[tuple[Any, ...]]:
    """All rows of the first so many numbers, with this in the place of an empty text."""
    texts = [empty if text == "" else text for text in TEXTS]
    rows = [
        (f"u{n % 5}", n, DAYS[n % len(DAYS)], texts[n % len(TEXTS)], [True, False, None][n % 3])
        for n in range(count)
    ]
    return sorted(rows, key=lambda row: row[1])


def read(stream: Stream, out: Path) -> list[tuple[Any, ...]]:
    frame = stream.spark.read.schema(SCHEMA).parquet(str(out))
    rows = frame.select("user", "total", "day", "`a b`", "ok").collect()
    return sorted((tuple(row) for row in rows), key=lambda row: row[1])


def batches(stream: Stream, sink: Any, **options: Any) -> Any:
    return stream.batches(Everything(), sink=sink, schema=SCHEMA, **options)


def files_below(out: Path) -> set[str]:
    return {str(each.relative_to(out)) for each in out.rglob("*.parquet")}


@pytest.mark.parametrize("by", ["day", ["a b"], ["ok", "day"], ["user"]], ids=str)
def test_rows_come_back_from_their_partitions(stream: Stream, by: Any) -> None:
    fill(stream)
    out = stream.folder / "out"
    made = batches(stream, parquet(out, partition_by=by))
    stream.run(made)
    # A folder cannot be named after nothing: Hive takes it for null.
    assert read(stream, out) == wanted(120, empty=None if "a b" in by else "")
    names = [by] if isinstance(by, str) else by
    for name in files_below(out):
        assert [folder.split("=")[0] for folder in name.split("/")[:-1]] == names
        assert not set(names) & set(pq.read_schema(out / name).names), "the folder has them"
    (figures,) = made.last_progress["sinks"]
    assert (figures["how"], figures["numFiles"]) == ("linked", len(files_below(out)) // 3)


def test_pandas_reads_the_partitions(stream: Stream) -> None:
    fill(stream)
    out = stream.folder / "out"
    stream.run(batches(stream, parquet(out, partition_by="user")))
    frame = pd.read_parquet(out)
    assert sorted(frame["total"]) == list(range(120))
    assert all(f"u{n % 5}" == user for n, user in zip(frame["total"], frame["user"], strict=True))


class Stops(PosixPlace):
    """A place that fails before its call of this number that changes something."""

    left = 10**9

    def __reduce__(self) -> tuple[object, ...]:
        return Stops, (self.uri,)


def stopping(name: str) -> Any:
    def call(self: Stops, *arguments: Any) -> Any:
        Stops.left -= 1
        if Stops.left < 0:
            raise Outage("stopped")
        return getattr(PosixPlace, name)(self, *arguments)

    return call


for _name in ("write", "adopt", "prepare", "remove"):
    setattr(Stops, _name, stopping(_name))


def test_files_from_before_the_log_are_seen_whatever_fails(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose batches may have several files from now on, as on executors, begins with what is there."""
    fill(stream, batches=1, rows=12)
    out = stream.folder / "out"
    stream.run(batches(stream, parquet(out)))
    stream.add(pa.table({"user": ["a"], "n": [12]}))
    monkeypatch.setattr(
        "statebackend.spark.sinks.published.open_place", lambda path, options: Stops(str(path))
    )
    steps = 0
    while True:
        sink = parquet(out)
        sink.check("main", pa.schema([]), most_files=2)
        Stops.left = steps
        with suppress(StreamingQueryException):
            stream.run(batches(stream, sink))
        Stops.left = 10**9
        if (out / FOLDER / "0").exists() or not (out / FOLDER).exists():
            seen = [row[1] for row in read(stream, out)]
            assert seen in (list(range(12)), list(range(13))), steps
            if len(seen) == 13 and (out / FOLDER / "1").exists():
                break
        steps += 1
    assert steps > 3


@pytest.mark.parametrize(("first", "then"), [((), "day"), ("day", ()), ("day", "user")])
def test_a_folder_with_other_partitions_is_refused(stream: Stream, first: Any, then: Any) -> None:
    fill(stream)
    out = stream.folder / "out"
    stream.run(batches(stream, parquet(out, partition_by=first)))
    stream.add(pa.table({"user": ["a"], "n": [120]}))
    refused = stream.fails(batches(stream, parquet(out, partition_by=then)))
    assert "USAGE.PUBLISHED" in refused
    assert "partitioned in another way" in refused
    stream.run(batches(stream, parquet(out, partition_by=first)))
    assert len(read(stream, out)) == 121


def test_whatever_fails_readers_see_whole_batches_once(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink stops before each of its steps in turn; after each stop Spark reads the folder."""
    fill(stream, batches=2, rows=12)
    out = stream.folder / "out"
    monkeypatch.setattr(
        "statebackend.spark.sinks.published.open_place", lambda path, options: Stops(str(path))
    )
    steps = 0
    while True:
        Stops.left = steps
        with suppress(StreamingQueryException):
            stream.run(batches(stream, parquet(out, partition_by="user")))
        Stops.left = 10**9
        seen = read(stream, out) if (out / FOLDER / "0").exists() else []
        assert [row[1] for row in seen] in (list(range(n)) for n in (0, 12, 24)), steps
        if len(seen) == 24:
            break
        steps += 1
    assert steps > 5
    assert len(files_below(out)) == 10, "five users in two batches, each file once"


def test_a_batch_that_is_delivered_again_is_named_once(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(stream)
    out = stream.folder / "out"
    sink = parquet(out, partition_by="day")
    FailsAfter(monkeypatch, sink, 0, 2)
    for _ in (0, 2):
        assert "Outage" in stream.fails(batches(stream, sink))
    made = batches(stream, sink)
    stream.run(made)
    assert made.last_progress["isReplay"]
    assert made.last_progress["sinks"][0]["how"] == "there"
    assert read(stream, out) == wanted(120)


def test_a_rewind_takes_the_files_of_all_partitions_back(stream: Stream) -> None:
    fill(stream)
    out = stream.folder / "out"
    sink = parquet(out, partition_by="day")
    stream.run(batches(stream, sink, retain=3))
    (taken,) = sb.tools.rewind(stream.state, to=1, sink=sink).taken_back
    assert taken.targets["main"].startswith(f"{out}/day=*/batch-00000002-main@*-")
    assert len(taken.removed) == 3
    assert read(stream, out) == wanted(80)
    assert not [name for name in files_below(out) if "batch-00000002" in name]
    stream.lose(2, "offsets", "commits")
    stream.run(batches(stream, sink))
    assert read(stream, out) == wanted(120)


def test_a_stream_reads_whole_batches_through_the_log(stream: Stream) -> None:
    """Over more than two of its compact entries, of which each batch is seen once.

    It reads after the first batch, right before and after each compact entry, and after many batches at once.
    """
    out = stream.folder / "out"
    seen: list[int] = []
    for number in range(24):
        stream.add(pa.table({"user": ["a", "b"], "n": [2 * number, 2 * number + 1]}))
        if number in (0, 7, 8, 9, 17, 18, 19, 23):
            stream.run(batches(stream, parquet(out, partition_by="user")))
            stream.read_on(out, lambda frame, _: seen.extend(row.total for row in frame.collect()))
    assert sorted(seen) == list(range(48))
    kept = sorted(name for name in os.listdir(out / FOLDER) if not name.startswith((".", "s")))
    assert kept == sorted(["9.compact", *map(str, range(10, 19)), "19.compact", *map(str, range(20, 25))])


def test_files_from_before_the_log_stay_visible(stream: Stream) -> None:
    fill(stream, batches=2)
    out = stream.folder / "out"
    stream.run(batches(stream, parquet(out)))
    stream.add(pa.table({"user": ["u0"], "n": [80]}))
    stream.run(batches(stream, parquet(out, partition_by=[])))
    assert not (out / FOLDER).exists(), "a batch of one file needs none"
    PosixPlace(str(out)).prepare()
    SinkLog(open_place(out)).begin(Listed(name, (out / name).stat().st_size) for name in files_below(out))
    stream.add(pa.table({"user": ["u1"], "n": [81]}))
    stream.run(batches(stream, parquet(out)))
    assert [row[1] for row in read(stream, out)] == list(range(82)), (
        "and a job of one file keeps a log that is there"
    )


def test_the_folder_of_a_file_sink_of_spark_is_refused(stream: Stream) -> None:
    fill(stream)
    out = stream.folder / "out"
    (out / FOLDER).mkdir(parents=True)
    (out / FOLDER / "0").write_text("v1")
    assert "USAGE.PUBLISHED" in stream.fails(batches(stream, parquet(out)))


# ------------------------------------------------------------------------------------------- the log alone


def of(batch: int) -> Any:
    return lambda name: int(name.split("-")[1]) - batch


def test_two_writers_of_one_batch_add_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes between what the first has read and what it writes."""
    log = SinkLog(open_place(tmp_path))
    log.begin([])
    assert log.add([Listed("b-1", 5)], of(1))
    create = PosixPlace.create

    def late(self: PosixPlace, name: str, content: bytes) -> None:
        monkeypatch.setattr(PosixPlace, "create", create)
        assert SinkLog(open_place(tmp_path)).add([Listed("b-2", 5)], of(2))
        create(self, name, content)

    monkeypatch.setattr(PosixPlace, "create", late)
    assert not log.add([Listed("b-2", 5)], of(2))
    assert log.names() == ["b-1", "b-2"]


def test_an_entry_that_is_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    log = SinkLog(open_place(tmp_path))
    log.begin([])
    for batch in range(1, 4):
        log.add([Listed(f"b-{batch}", 5)], of(batch))
    (tmp_path / FOLDER / "2").unlink()
    with pytest.raises(sb.StoreError, match=f"{FOLDER}/2 is missing") as caught:
        log.add([Listed("b-4", 5)], of(4))
    assert caught.value.code == "STORE.PUBLISHED_LOG"


@pytest.mark.parametrize("before", range(1, 25))
def test_taking_out_leaves_what_is_before_and_after(tmp_path: Path, before: int) -> None:
    log = SinkLog(open_place(tmp_path))
    log.begin([])
    for batch in range(before):
        log.add([Listed(f"p=a b/b-{batch}", 5), Listed(f"p=%2F/b-{batch}", 6)], of(batch))
    log.take_out(lambda name: name.endswith(f"/b-{before - 1}"))
    log.take_out(lambda name: name.endswith(f"/b-{before - 1}"))
    assert log.add([Listed(f"p=c/b-{before}", 5)], of(before))
    kept = [f"p={folder}/b-{batch}" for batch in range(before - 1) for folder in ("a b", "%2F")]
    assert log.names() == [*kept, f"p=c/b-{before}"]


def test_an_entry_has_what_spark_writes(tmp_path: Path) -> None:
    log = SinkLog(open_place(tmp_path / "a b"))
    open_place(tmp_path / "a b").prepare()
    log.begin([Listed("day=x%2Fy/f", 7)])
    version, line = (tmp_path / "a b" / FOLDER / "0").read_text().split("\n")
    assert version == "v1"
    found = json.loads(line)
    assert found.pop("modificationTime") > 0
    assert found == {
        "path": f"file://{tmp_path}/a%20b/day=x%252Fy/f",
        "size": 7,
        "isDir": False,
        "blockReplication": 1,
        "blockSize": 33554432,
        "action": "add",
    }
