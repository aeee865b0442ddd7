"""The sink that appends to a Delta Lake table: each batch once, whatever fails on the way."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from sink_jobs import sink_job
from spark_streams import BATCHES, DDL, FULL, Stream, fill

import statebackend as sb
from statebackend.errors import StoreError
from statebackend.spark.sinks import delta
from statebackend.spark.sinks.committed_sink import Delivery

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


def test_of_two_drivers_with_one_batch_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has looked at the table before the first has committed, and commits after it."""
    table = tmp_path / "totals"
    sink = delta(table)
    other, given = pickle.loads(pickle.dumps(sink)), []
    opened, original = type(sink)._opened, type(sink).deliver

    def deliver(self: Any, delivery: Delivery) -> Any:
        given.append(delivery)
        return original(self, delivery)

    def slow(self: Any) -> Any:
        found = opened(self)
        if self is sink and given:
            monkeypatch.setattr(type(sink), "_opened", opened)
            assert other.deliver(given[0])["how"] == "written"
        return found

    monkeypatch.setattr(type(sink), "deliver", deliver)
    monkeypatch.setattr(type(sink), "_opened", slow)
    with sink_job(tmp_path / "state", sink) as job:
        assert job.run(0)[0]["how"] == "there"
    assert rows_of(table) == [("a", 0), ("b", 1)]
    assert commits(table) == ["CREATE TABLE", "WRITE"]


def test_a_rewind_takes_batches_back(tmp_path: Path) -> None:
    state, table = tmp_path / "state", tmp_path / "totals"
    with sink_job(state, delta(table), retain=3) as job:
        for batch_id in range(3):
            job.run(batch_id)
    taken = sb.tools.rewind(state, to=0, checkpoint_location=None, sink=delta(table))
    assert [each.removed for each in taken.taken_back] == [
        (f"delta[{table}], version 2",),
        (f"delta[{table}], version 3",),
    ]
    assert all("transaction statebackend/" in each.targets["main"] for each in taken.taken_back)
    assert rows_of(table) == [("a", 0), ("b", 1)]
    assert commits(table)[4:] == ["RESTORE", "RESTORE"]
    # Taken back once: a second time there is nothing to do.
    assert delta(table).take_back(2, taken.taken_back[0].incarnation) == []
    # The batches run anew, under the same numbers and another incarnation.
    with sink_job(state, delta(table)) as job:
        assert [job.run(batch_id)[0]["how"] for batch_id in (1, 2)] == ["written", "written"]
    assert len(rows_of(table)) == 6


def test_every_type(tmp_path: Path) -> None:
    table = tmp_path / "all"
    ddl = "user string, " + DDL.replace("user ", "owner ")
    row = {**FULL, "user": "a", "owner": FULL["user"], "m": list(FULL["m"].items())}
    given = pa.Table.from_pylist([row], pa.schema(list(sb.types.of(ddl).arrow)))
    with sink_job(tmp_path / "state", delta(table, partition_by="day"), ddl) as job:
        job.run(0, given)
    (found,) = deltalake.DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    (wanted,) = given.to_pylist()
    assert {name: found[name] for name in wanted} == wanted
    assert (table / f"day={FULL['day']}").is_dir()


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state, table = tmp_path / "state", tmp_path / "totals"

    def begin(sink: Any) -> None:
        with sink_job(state, sink):
            pass

    with pytest.raises(sb.UsageError, match="no column 'day' to partition by"):
        begin(delta(table, partition_by="day"))
    with pytest.raises(sb.UsageError, match="given by its path"):
        delta("")
    begin(delta(table, partition_by=["user"]))
    with pytest.raises(sb.UsageError, match="partitioned by other columns"):
        begin(delta(table, partition_by="v"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        delta(tmp_path / "file").prepare(pa.schema({"user": pa.string()}))
    assert caught.value.code == "STORE.DELTA"
    monkeypatch.setitem(sys.modules, "deltalake", None)
    monkeypatch.setitem(sys.modules, "deltalake.exceptions", None)
    with pytest.raises(sb.UsageError, match="pip install deltalake"):
        begin(delta(table))
