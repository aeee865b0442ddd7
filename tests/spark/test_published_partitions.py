"""Batches of several published files: Spark sees those of a batch at once, whatever fails on the way, and once."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sink_jobs import sink_job
from spark_streams import FailsAfter, Outage, Stream

import statebackend as sb
from statebackend.checkpoint.files import open_target_folder
from statebackend.checkpoint.files.target_folder import PosixTargetFolder
from statebackend.runtime.batch_progress import Figures
from statebackend.spark.sinks import parquet
from statebackend.spark.sinks.parquet_sink import FOLDER, LoggedFile, SinkLog

pytestmark = pytest.mark.spark

SCHEMA = "user string, total bigint, day date, `a b` string, ok boolean"
DAYS = [datetime.date(2024, 1, 1), datetime.date(2024, 1, 2), None]
#: Texts that cannot name a folder as they are.
TEXTS = ["x/y", "50%", "", None, "é: =*?", "mon"]


class Same(sb.KeyedProcessFunction):
    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Iterator[Any]:
        yield row


def wanted(numbers: Iterable[int], empty: str | None = "") -> list[tuple[Any, ...]]:
    """The rows of these numbers, with this in the place of an empty text."""
    texts = [empty if text == "" else text for text in TEXTS]
    return [
        (f"u{n % 5}", n, DAYS[n % len(DAYS)], texts[n % len(TEXTS)], [True, False, None][n % 3])
        for n in numbers
    ]


def table(*numbers: int) -> pa.Table:
    schema = pa.schema(list(sb.types.of(SCHEMA).arrow))
    return pa.Table.from_pylist(
        [dict(zip(schema.names, row, strict=True)) for row in wanted(numbers)], schema
    )


def of_batch(batch: int) -> pa.Table:
    """Forty rows."""
    return table(*range(40 * batch, 40 * batch + 40))


def run(state: Path, sink: Any, batches: Iterable[int] = range(3), **options: Any) -> list[Figures]:
    """Run these batches; the figures of the sink for each."""
    with sink_job(state, sink, SCHEMA, **options) as job:
        return [job.run(batch, of_batch(batch))[0] for batch in batches]


def read(spark: Any, out: Path) -> list[tuple[Any, ...]]:
    rows = spark.read.schema(SCHEMA).parquet(str(out)).select("user", "total", "day", "`a b`", "ok").collect()
    return sorted((tuple(row) for row in rows), key=lambda row: row[1])


def files_below(out: Path) -> set[str]:
    return {str(each.relative_to(out)) for each in out.rglob("*.parquet")}


@pytest.mark.parametrize("by", ["day", ["a b"], ["ok", "day"], ["user"]], ids=str)
def test_rows_come_back_from_their_partitions(spark: Any, tmp_path: Path, by: Any) -> None:
    out = tmp_path / "out"
    figures = run(tmp_path / "state", parquet(out, partition_by=by))[-1]
    # A folder cannot be named after nothing: Hive takes it for null.
    assert read(spark, out) == wanted(range(120), empty=None if "a b" in by else "")
    names = [by] if isinstance(by, str) else by
    for name in files_below(out):
        assert [folder.split("=")[0] for folder in name.split("/")[:-1]] == names
        assert not set(names) & set(pq.read_schema(out / name).names), "the folder has them"
    assert (figures["how"], figures["numFiles"]) == ("linked", len(files_below(out)) // 3)
    if by == ["user"]:
        frame = pd.read_parquet(out)
        assert sorted(frame["total"]) == list(range(120))
        assert all(f"u{n % 5}" == user for n, user in zip(frame["total"], frame["user"], strict=True))


class Stops(PosixTargetFolder):
    """A place that fails before its call of this number that changes something."""

    left = 10**9

    def __reduce__(self) -> tuple[object, ...]:
        return Stops, (self.uri,)


def stopping(name: str) -> Any:
    def call(self: Stops, *arguments: Any) -> Any:
        Stops.left -= 1
        if Stops.left < 0:
            raise Outage("stopped")
        return getattr(PosixTargetFolder, name)(self, *arguments)

    return call


for _name in ("write", "adopt", "prepare", "remove"):
    setattr(Stops, _name, stopping(_name))


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks that are made from now on are at a place that stops."""
    monkeypatch.setattr(
        "statebackend.spark.sinks.parquet_sink.open_target_folder", lambda path, options: Stops(str(path))
    )


@pytest.mark.usefixtures("stops")
def test_files_from_before_the_log_are_seen_whatever_fails(spark: Any, tmp_path: Path) -> None:
    """A job whose batches may have several files from now on, as on executors, begins with what is there."""
    out = tmp_path / "out"
    with sink_job(tmp_path / "state", parquet(out), SCHEMA) as job:
        job.run(0, table(*range(12)))
    steps = 0
    while True:
        sink = parquet(out)
        sink.check("main", pa.schema([]), most_files=2)
        Stops.left = steps
        with suppress(Outage), sink_job(tmp_path / "state", sink, SCHEMA) as job:
            job.run(1, table(12))
        Stops.left = 10**9
        if (out / FOLDER / "0").exists() or not (out / FOLDER).exists():
            seen = [row[1] for row in read(spark, out)]
            assert seen in (list(range(12)), list(range(13))), steps
            if len(seen) == 13 and (out / FOLDER / "1").exists():
                break
        steps += 1
    assert steps > 3


@pytest.mark.parametrize(("first", "then"), [((), "day"), ("day", ()), ("day", "user")])
def test_a_folder_with_other_partitions_is_refused(tmp_path: Path, first: Any, then: Any) -> None:
    out = tmp_path / "out"
    run(tmp_path / "state", parquet(out, partition_by=first))
    with pytest.raises(sb.UsageError, match="partitioned in another way") as caught:
        run(tmp_path / "state", parquet(out, partition_by=then), [3])
    assert caught.value.code == "USAGE.PUBLISHED"
    run(tmp_path / "state", parquet(out, partition_by=first), [3])
    assert pq.read_table(out).num_rows == 160


@pytest.mark.usefixtures("stops")
def test_readers_see_whole_batches_once_after_each_failure(spark: Any, tmp_path: Path) -> None:
    """The sink stops before each of its steps in turn; after each stop Spark reads the folder."""
    out = tmp_path / "out"
    steps = done = 0
    while done < 2:
        Stops.left = steps
        with suppress(Outage), sink_job(tmp_path / "state", parquet(out, partition_by="user"), SCHEMA) as job:
            while done < 2:
                job.run(done, table(*range(12 * done, 12 * done + 12)))
                done += 1
        Stops.left = 10**9
        seen = read(spark, out) if (out / FOLDER / "0").exists() else []
        assert [row[1] for row in seen] in (list(range(n)) for n in (12 * done, 12 * done + 12)), steps
        steps += 1
    assert [row[1] for row in seen] == list(range(24))
    assert steps > 5
    assert len(files_below(out)) == 10, "five users in two batches, each file once"


def test_a_batch_that_is_delivered_again_is_named_once(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in range(3):
        stream.add(of_batch(batch))
    out = stream.folder / "out"
    sink = parquet(out, partition_by="day")
    FailsAfter(monkeypatch, sink, 0, 2)
    for _ in (0, 2):
        assert "Outage" in stream.fails(stream.batches(Same(), sink, schema=SCHEMA))
    made = stream.batches(Same(), sink, schema=SCHEMA)
    stream.run(made)
    assert made.last_progress["isReplay"]
    assert made.last_progress["sinks"][0]["how"] == "there"
    assert read(stream.spark, out) == wanted(range(120))


def test_a_rewind_takes_the_files_of_all_partitions_back(spark: Any, tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    sink = parquet(out, partition_by="day")
    run(state, sink, retain=3)
    (taken,) = sb.tools.rewind(state, to=1, checkpoint_location=None, sink=sink).taken_back
    assert taken.targets["main"].startswith(f"parquet[{out}], day=*/batch-00000002-main@*-")
    assert len(taken.removed) == 3
    assert read(spark, out) == wanted(range(80))
    assert not [name for name in files_below(out) if "batch-00000002" in name]
    run(state, sink, [2])
    assert read(spark, out) == wanted(range(120))


def test_a_stream_reads_whole_batches_through_the_log(stream: Stream) -> None:
    """Over more than two of its compact entries, of which each batch is seen once.

    It reads after the first batch, right before and after each compact entry, and after many batches at once.
    """
    out = stream.folder / "out"
    seen: list[int] = []
    with sink_job(stream.state, parquet(out, partition_by="user"), SCHEMA) as job:
        for number in range(24):
            job.run(number, table(2 * number, 2 * number + 1))
            if number in (0, 7, 8, 9, 17, 18, 19, 23):
                stream.read_on(out, lambda frame, _: seen.extend(row.total for row in frame.collect()))
    assert sorted(seen) == list(range(48))
    kept = sorted(name for name in os.listdir(out / FOLDER) if not name.startswith((".", "s")))
    assert kept == sorted(["9.compact", *map(str, range(10, 19)), "19.compact", *map(str, range(20, 25))])


def test_files_from_before_the_log_stay_visible(spark: Any, tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    run(state, parquet(out), [0, 1])
    run(state, parquet(out, partition_by=[]), [2])
    assert not (out / FOLDER).exists(), "a batch of one file needs none"
    PosixTargetFolder(str(out)).prepare()
    SinkLog(open_target_folder(out)).begin(
        LoggedFile(name, (out / name).stat().st_size) for name in files_below(out)
    )
    run(state, parquet(out), [3])
    assert [row[1] for row in read(spark, out)] == list(range(160)), (
        "and a job of one file keeps a log that is there"
    )


def test_the_folder_of_a_file_sink_of_spark_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / FOLDER).mkdir(parents=True)
    (out / FOLDER / "0").write_text("v1")
    with pytest.raises(sb.UsageError) as caught:
        run(tmp_path / "state", parquet(out))
    assert caught.value.code == "USAGE.PUBLISHED"


def of(batch: int) -> Any:
    return lambda name: int(name.split("-")[1]) - batch


def test_two_writers_of_one_batch_add_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes between what the first has read and what it writes."""
    log = SinkLog(open_target_folder(tmp_path))
    log.begin([])
    assert log.add([LoggedFile("b-1", 5)], of(1))
    create = PosixTargetFolder.create

    def late(self: PosixTargetFolder, name: str, content: bytes) -> None:
        monkeypatch.setattr(PosixTargetFolder, "create", create)
        assert SinkLog(open_target_folder(tmp_path)).add([LoggedFile("b-2", 5)], of(2))
        create(self, name, content)

    monkeypatch.setattr(PosixTargetFolder, "create", late)
    assert not log.add([LoggedFile("b-2", 5)], of(2))
    assert log.names() == ["b-1", "b-2"]


def test_an_entry_that_is_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    log = SinkLog(open_target_folder(tmp_path))
    log.begin([])
    for batch in range(1, 4):
        log.add([LoggedFile(f"b-{batch}", 5)], of(batch))
    (tmp_path / FOLDER / "2").unlink()
    with pytest.raises(sb.StoreError, match=f"{FOLDER}/2 is missing") as caught:
        log.add([LoggedFile("b-4", 5)], of(4))
    assert caught.value.code == "STORE.PUBLISHED_LOG"


def test_taking_out_leaves_what_is_before_and_after(tmp_path: Path) -> None:
    for before in range(1, 25):
        log = SinkLog(open_target_folder(tmp_path / str(before)))
        open_target_folder(tmp_path / str(before)).prepare()
        log.begin([])
        for batch in range(before):
            log.add([LoggedFile(f"p=a b/b-{batch}", 5), LoggedFile(f"p=%2F/b-{batch}", 6)], of(batch))
        for _ in range(2):
            log.take_out(lambda name, last=before - 1: name.endswith(f"/b-{last}"))
        assert log.add([LoggedFile(f"p=c/b-{before}", 5)], of(before))
        kept = [f"p={folder}/b-{batch}" for batch in range(before - 1) for folder in ("a b", "%2F")]
        assert log.names() == [*kept, f"p=c/b-{before}"], before


def test_an_entry_has_what_spark_writes(tmp_path: Path) -> None:
    log = SinkLog(open_target_folder(tmp_path / "a b"))
    open_target_folder(tmp_path / "a b").prepare()
    log.begin([LoggedFile("day=x%2Fy/f", 7)])
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
