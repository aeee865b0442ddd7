"""The sink that appends to a Delta Lake table: each batch once, whatever fails on the way."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import deltalake
import pytest
from sink_faults import BATCHES, FailsAfter, fill
from spark_streams import DDL, Fails, Stream, numbers, spark, stream

import statebackend as sb
from statebackend.errors import StoreError
from statebackend.spark.sinks import delta
from statebackend.spark.sinks.interface import Delivery

__all__ = ["spark", "stream"]
pytestmark = pytest.mark.spark

ROWS = sorted(row for rows in BATCHES.values() for row in rows)


def rows_of(table: Path) -> list[tuple[Any, ...]]:
    """The rows, read by deltalake's own reader and through pandas: the same."""
    opened = deltalake.DeltaTable(str(table))
    frame = opened.to_pandas()
    found = sorted(frame.itertuples(index=False, name=None))
    assert sorted(tuple(row.values()) for row in opened.to_pyarrow_table().to_pylist()) == found
    return found


def commits(table: Path) -> list[str]:
    return [commit["operation"] for commit in reversed(deltalake.DeltaTable(str(table)).history())]


def test_each_batch_is_one_commit(stream: Stream) -> None:
    fill(stream)
    table = stream.folder / "totals"
    batches = stream.batches(sink=delta(table))
    stream.run(batches)
    assert rows_of(table) == ROWS
    assert commits(table) == ["CREATE TABLE", "WRITE", "WRITE", "WRITE"]
    (figures,) = batches.last_progress["sinks"]
    assert figures["description"] == f"delta[{table}]"
    assert (figures["how"], figures["version"], figures["numFiles"]) == ("written", 3, 1)
    opened = deltalake.DeltaTable(str(table))
    assert figures["numBytes"] == sum((table / name).stat().st_size for name in opened.file_uris()[:1])
    newest = opened.history(1)[0]["statebackend.batch"]
    assert newest.endswith("/2/main")
    # Spark without the connector reads the table's files as what they are.
    assert stream.spark.read.parquet(*opened.file_uris()).count() == len(ROWS)


@pytest.mark.parametrize("where", ["after", "between"])
def test_a_batch_that_is_delivered_again_is_there_once(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    fill(stream)
    table = stream.folder / "totals"
    sink = delta(table)
    if where == "after":
        FailsAfter(monkeypatch, sink, 0, 2)
    else:
        # The commit is made; what follows it in the sink is not.
        fail, original = Fails(1, 3), type(sink)._sync

        def sync(self: Any, version: int) -> Any:
            fail(version)
            return original(self, version)

        monkeypatch.setattr(type(sink), "_sync", sync)
    for _ in range(2):
        assert "Outage" in stream.fails(stream.batches(sink=sink))
    batches = stream.batches(sink=sink)
    stream.run(batches)
    assert rows_of(table) == ROWS
    assert commits(table).count("WRITE") == 3
    assert batches.last_progress["sinks"][0]["how"] == "there"


def test_of_two_drivers_with_one_batch_one_writes(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has looked at the table before the first has committed, and commits after it."""
    stream.add(numbers(("a", 1)))
    table = stream.folder / "totals"
    sink = delta(table)
    other, given = pickle.loads(pickle.dumps(sink)), []
    opened = type(sink)._opened

    def deliver(self: Any, delivery: Delivery) -> Any:
        given.append(delivery)
        return original(self, delivery)

    def slow(self: Any) -> Any:
        found = opened(self)
        if self is sink and given:
            monkeypatch.setattr(type(sink), "_opened", opened)
            assert other.deliver(given[0])["how"] == "written"
        return found

    original = type(sink).deliver
    monkeypatch.setattr(type(sink), "deliver", deliver)
    monkeypatch.setattr(type(sink), "_opened", slow)
    batches = stream.batches(sink=sink)
    stream.run(batches)
    assert batches.last_progress["sinks"][0]["how"] == "there"
    assert rows_of(table) == [("a", 1)]
    assert commits(table) == ["CREATE TABLE", "WRITE"]


def test_a_rewind_takes_batches_back(stream: Stream) -> None:
    fill(stream)
    table = stream.folder / "totals"
    stream.run(stream.batches(sink=delta(table), retain=3))
    taken = sb.tools.rewind(stream.state, to=0, sink=delta(table))
    assert [each.removed for each in taken.taken_back] == [
        (f"delta[{table}], version 2",),
        (f"delta[{table}], version 3",),
    ]
    assert all("transaction statebackend/" in each.targets["main"] for each in taken.taken_back)
    assert rows_of(table) == sorted(BATCHES[0])
    assert commits(table)[4:] == ["RESTORE", "RESTORE"]
    # Taken back once: a second time there is nothing to do.
    incarnation = taken.taken_back[0].incarnation
    assert delta(table).take_back(2, incarnation) == []
    # The batches run anew, under the same numbers and another incarnation.
    for batch_id in (1, 2):
        stream.lose(batch_id, "offsets", "commits")
    stream.run(stream.batches(sink=delta(table)))
    assert rows_of(table) == ROWS


def test_what_others_have_written_is_not_taken_back(stream: Stream) -> None:
    fill(stream)
    table = stream.folder / "totals"
    stream.run(stream.batches(sink=delta(table)))
    deltalake.write_deltalake(
        str(table), deltalake.DeltaTable(str(table)).to_pyarrow_table().slice(0, 1), mode="append"
    )
    with pytest.raises(sb.UsageError, match="has been written to since"):
        sb.tools.rewind(stream.state, to=1, sink=delta(table))
    assert len(rows_of(table)) == len(ROWS) + 1
    assert sb.CheckpointStore(stream.state).latest() == 2, "nothing has changed"


def test_every_type(stream: Stream) -> None:
    columns = stream.spark.sql("select 1").selectExpr(
        "named_struct('id', cast(1.5 as decimal(10,2)), 'at', timestamp'2020-01-01 00:00:00') user",
        "1 i",
        "cast(2 as smallint) s",
        "cast(3 as tinyint) t",
        "cast(1.5 as float) f",
        "2.5D d",
        "true b",
        "cast('x' as binary) bin",
        "date'2020-01-02' day",
        "timestamp'2020-01-01 12:00:00' at",
        "timestamp_ntz'2020-01-01 12:00:00' local",
        "cast(1 as decimal(38,18)) dec",
        "array('x', null) tags",
        "map('k', named_struct('x', 1, 'y', array(1L, 2L))) m",
        "named_struct('a', named_struct('b', 'c')) nest",
        "cast(null as string) `a b`",
    )
    stream.add(columns.toArrow())

    class Same(sb.KeyedProcessFunction):
        def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
            yield row

    table = stream.folder / "all"
    stream.run(stream.batches(Same(), sink=delta(table, partition_by="day"), schema=DDL))
    (row,) = deltalake.DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    (wanted,) = columns.toArrow().to_pylist()
    assert {name: row[name] for name in wanted} == wanted
    assert (table / "day=2020-01-02").is_dir()


def test_refusals(stream: Stream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream.add(numbers(("a", 1)))
    table = stream.folder / "totals"
    with pytest.raises(sb.UsageError, match="no column 'day' to partition by"):
        stream.batches(sink=delta(table, partition_by="day"))
    with pytest.raises(sb.UsageError, match="given by its path"):
        delta("")
    stream.run(stream.batches(sink=delta(table, partition_by=["user"])))
    message = stream.fails(
        stream.batches(sink=delta(table, partition_by="total"), checkpoint=tmp_path / "third"),
        checkpoint="third stream",
    )
    assert "partitioned by other columns" in message
    assert rows_of(table) == [("a", 1)]
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        delta(tmp_path / "file").prepare(numbers().schema)
    assert caught.value.code == "STORE.DELTA"
    monkeypatch.setitem(sys.modules, "deltalake", None)
    monkeypatch.setitem(sys.modules, "deltalake.exceptions", None)
    with pytest.raises(sb.UsageError, match="pip install deltalake"):
        stream.batches(sink=delta(table))
