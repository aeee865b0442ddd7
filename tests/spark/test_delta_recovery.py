"""The Delta sink over kills, failures of the disk and rewinds, one call at a time and without Spark."""

from __future__ import annotations

import shutil
import traceback
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from sink_jobs import rows_of_batch, sink_job

import statebackend as sb
from statebackend.checkpoint.files import PosixCalls
from statebackend.errors import StoreError
from statebackend.spark.sinks import delta, delta_table

pytestmark = pytest.mark.spark


class Killed(BaseException):
    """The process is gone here."""


def killed(*arguments: Any) -> Any:
    raise Killed


class Synced:
    """What the sink makes durable, by names relative to the table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, table: Path) -> None:
        self.files: list[str] = []
        self.folders: list[str] = []
        record = self

        class Calls(PosixCalls):
            def sync_file(self, path: str) -> None:
                super().sync_file(path)
                record.files.append(str(Path(path).relative_to(table)))

            def sync_folder(self, path: str) -> None:
                super().sync_folder(path)
                record.folders.append(str(Path(path).relative_to(table)))

        monkeypatch.setattr(delta_table, "PosixCalls", Calls)

    def clear(self) -> None:
        self.files.clear()
        self.folders.clear()


def rows(table: Path) -> list[int]:
    return sorted(deltalake.DeltaTable(str(table)).to_pyarrow_table()["v"].to_pylist())


@pytest.mark.parametrize("form", ["path", "file address"])
def test_a_commit_that_was_not_made_durable_is_when_the_batch_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    table = tmp_path / "a b"
    synced = Synced(monkeypatch, table)
    sink = delta(table if form == "path" else table.as_uri())

    with sink_job(tmp_path / "state", sink) as job, monkeypatch.context() as patched:
        assert synced.files == ["_delta_log/00000000000000000000.json"]
        patched.setattr(type(sink), "_sync", killed)
        with pytest.raises(Killed):
            job.run(0)
    synced.clear()
    with sink_job(tmp_path / "state", sink) as job:
        (figures,) = job.run(0)
    assert figures["how"] == "there"
    (added,) = deltalake.DeltaTable(str(table)).file_uris()
    assert set(synced.files) == {Path(added).name, "_delta_log/00000000000000000001.json"}
    assert set(synced.folders) == {".", "_delta_log"}
    assert rows(table) == [0, 1]


def test_folders_of_partitions_are_durable_up_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table"
    synced = Synced(monkeypatch, table)
    with sink_job(
        tmp_path / "state", delta(table, partition_by=["v", "user"]), "user string, v bigint, n bigint"
    ) as job:
        synced.clear()
        job.run(0, rows_of_batch(0).append_column("n", [[1, 2]]))
    assert {".", "_delta_log", "v=0", "v=0/user=a", "v=1", "v=1/user=b"} == set(synced.folders)


TWO = {"a": "user string, v bigint", "b": "user string, v bigint"}


def test_two_outputs_in_one_table_are_taken_back_together(tmp_path: Path) -> None:
    state, table = tmp_path / "state", tmp_path / "table"
    sinks = {"a": delta(table), "b": delta(table)}
    with sink_job(state, sinks, TWO) as job:
        job.run(0)
        job.run(1)
    (batch,) = sb.tools.rewind(state, to=0, checkpoint_location=None, sink=sinks).taken_back
    assert batch.removed == (f"delta[{table}], version 3",)
    assert rows(table) == [0, 0, 1, 1]
    with sink_job(state, sinks, TWO) as job:
        job.run(1)
    assert rows(table) == [0, 0, 1, 1, 10, 10, 11, 11]


@pytest.mark.parametrize("schema", ["user string, v bigint", TWO], ids=["one output", "two outputs"])
def test_a_rewind_that_is_killed_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Any
) -> None:
    """The table has been restored, and the store not rewound: the replay writes the batch again, once."""
    state, table = tmp_path / "state", tmp_path / "table"
    sink = delta(table) if schema is not TWO else {"a": delta(table), "b": delta(table)}
    copies = 1 if schema is not TWO else 2

    def expected(*batches: int) -> list[int]:
        return sorted(copies * [v for each in batches for v in (each * 10, each * 10 + 1)])

    with sink_job(state, sink, schema) as job:
        job.run(0)
        job.run(1)
    for _ in range(2):  # a batch that came again is taken back like any other
        with monkeypatch.context() as patched:
            patched.setattr(sb.CheckpointStore, "rewind", killed)
            with pytest.raises(Killed):
                sb.tools.rewind(state, to=0, checkpoint_location=None, sink=sink)
        assert rows(table) == expected(0)
        with sink_job(state, sink, schema) as job:
            assert {figures["how"] for figures in job.run(1)} == {"written"}
            assert {figures["how"] for figures in job.run(1)} == {"there"}
        assert rows(table) == expected(0, 1)
    with sink_job(state, sink, schema) as job:
        job.run(2)
    assert rows(table) == expected(0, 1, 2)
    sb.tools.rewind(state, to=1, checkpoint_location=None, sink=sink)
    assert rows(table) == expected(0, 1)


def test_rows_of_others_between_two_outputs_are_not_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, table = tmp_path / "state", tmp_path / "table"
    sinks = {"a": delta(table), "b": delta(table)}
    original = type(sinks["a"]).deliver

    def deliver(self: Any, delivery: Any) -> Any:
        if delivery.output == "b" and delivery.context.batch_id == 1:
            other = pa.table({"user": ["other"], "v": [99]})
            deltalake.write_deltalake(str(table), other, mode="append")
        return original(self, delivery)

    monkeypatch.setattr(type(sinks["a"]), "deliver", deliver)
    with sink_job(state, sinks, TWO) as job:
        job.run(0)
        job.run(1)
    with pytest.raises(sb.UsageError, match="has been written to since") as caught:
        sb.tools.rewind(state, to=0, checkpoint_location=None, sink=sinks)
    assert "the batch is version 3; since then 4 to 4" in caught.value.detail
    assert rows(table) == [0, 0, 1, 1, 10, 10, 11, 11, 99]


@pytest.mark.parametrize("foreign_after", [1, 3])
def test_a_sink_that_refuses_leaves_one_batch_half_taken_back(tmp_path: Path, foreign_after: int) -> None:
    state, table, other = tmp_path / "state", tmp_path / "table", tmp_path / "other"
    sinks = {"a": delta(table), "b": delta(other)}
    with sink_job(state, sinks, TWO, retain=5) as job:
        for batch_id in range(4):
            job.run(batch_id)
            if batch_id == foreign_after:
                rows_of_other = pa.table({"user": ["other"], "v": [99]})
                deltalake.write_deltalake(str(other), rows_of_other, mode="append")
    with pytest.raises(sb.UsageError, match="has been written to since"):
        sb.tools.rewind(state, to=0, checkpoint_location=None, sink=sinks)
    # Of what came later nothing is left anywhere; this one is gone from the first table alone.
    assert sb.CheckpointStore(state).checkpoints() == list(range(foreign_after + 1))
    kept = [v for batch_id in range(foreign_after) for v in (batch_id * 10, batch_id * 10 + 1)]
    half = [foreign_after * 10, foreign_after * 10 + 1]
    assert (rows(table), rows(other)) == (kept, [*kept, *half, 99])
    if foreign_after == 3:
        with sink_job(state, sinks, TWO) as job:
            assert [figures["how"] for figures in job.run(3)] == ["written", "there"]
    else:
        # The output of an older batch is no longer there to be delivered again: as the hint says.
        with pytest.raises(sb.UsageError, match="that has been dropped"), sink_job(state, sinks, TWO) as job:
            job.run(1)
        deltalake.DeltaTable(str(other)).delete("v in (10, 11)")
        sb.tools.rewind(state, to=0, checkpoint_location=None)
        with sink_job(state, sinks, TWO) as job:
            for batch_id in (1, 2, 3):
                job.run(batch_id)
    assert rows(table) == [0, 1, 10, 11, 20, 21, 30, 31]
    assert rows(other) == [0, 1, 10, 11, 20, 21, 30, 31, 99]


INT, TEXT = pa.int32(), pa.string()


@pytest.mark.parametrize(
    ("there", "differs"),
    [
        ({"v": pa.int64()}, "user is missing in the table and string in the output"),
        ({"user": TEXT, "v": pa.int64(), "n": INT}, "n is int32 in the table and missing in the output"),
        ({"V": pa.int64(), "user": TEXT}, "v is missing in the table and int64 in the output; V is int64 in"),
    ],
)
def test_other_columns_are_refused_before_a_batch_is_committed(
    tmp_path: Path, there: dict[str, pa.DataType], differs: str
) -> None:
    state, table = tmp_path / "state", tmp_path / "table"
    deltalake.DeltaTable.create(str(table), pa.schema(list(there.items())))
    refused = pytest.raises(sb.UsageError, match="has other columns than the output")
    with refused as caught, sink_job(state, delta(table)):
        pass
    assert caught.value.code == "USAGE.OTHER_SCHEMA"
    assert differs in caught.value.detail
    assert sb.CheckpointStore(state).latest() is None


def test_columns_may_have_another_order_and_one_that_is_added_meanwhile_is_named(tmp_path: Path) -> None:
    table = tmp_path / "table"
    deltalake.DeltaTable.create(str(table), pa.schema({"v": pa.int64(), "user": TEXT}))
    with sink_job(tmp_path / "state", delta(table)) as job:
        job.run(0)
        opened = deltalake.DeltaTable(str(table))
        found = opened.to_pyarrow_table().sort_by("v").to_pylist()
        assert found == [{"v": 0, "user": "a"}, {"v": 1, "user": "b"}]
        opened.alter.add_columns([deltalake.Field("more", deltalake.schema.PrimitiveType("string"))])
        with pytest.raises(sb.UsageError, match="more is string in the table and missing in the output"):
            job.run(1)
    assert rows(table) == [0, 1]


@pytest.mark.parametrize("refuses", ["constraint", "null"])
def test_rows_that_the_table_refuses_are_not_quoted(tmp_path: Path, refuses: str) -> None:
    table = tmp_path / "table"
    columns = [pa.field("user", TEXT), pa.field("v", pa.int64(), refuses != "null")]
    deltalake.DeltaTable.create(str(table), pa.schema(columns))
    if refuses == "constraint":
        deltalake.DeltaTable(str(table)).alter.add_constraint({"small": "v < 1000"})
    wrong = pa.table({"user": ["secret"], "v": pa.array([None if refuses == "null" else 4242], pa.int64())})
    with sink_job(tmp_path / "state", delta(table)) as job:
        job.run(0)
        with pytest.raises(StoreError, match="writing to the Delta table failed") as caught:
            job.run(1, wrong)
    assert caught.value.code == "STORE.DELTA"
    shown = "".join(traceback.format_exception(caught.value))
    assert "secret" not in shown
    assert "4242" not in shown
    assert "the table's constraints" in (caught.value.hint or "")
    assert rows(table) == [0, 1]


def test_an_error_that_quotes_nothing_is_shown(tmp_path: Path) -> None:
    table = tmp_path / "table"
    with sink_job(tmp_path / "state", delta(table)) as job:
        table.rename(tmp_path / "away")
        with pytest.raises(
            StoreError, match="writing to the Delta table failed: TableNotFoundError"
        ) as caught:
            job.run(0)
        assert isinstance(caught.value.__cause__, deltalake.exceptions.TableNotFoundError)
        (tmp_path / "away").rename(table)
        assert job.run(0)[0]["how"] == "written"


def test_a_restore_that_was_not_made_durable_is_when_it_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, table = tmp_path / "state", tmp_path / "table"
    sink = delta(table)
    with sink_job(state, sink) as job:
        job.run(0)
        job.run(1)

    with monkeypatch.context() as patched:
        patched.setattr(type(sink), "_sync", killed)
        with pytest.raises(Killed):
            sb.tools.rewind(state, to=0, checkpoint_location=None, sink=sink)
    synced = Synced(monkeypatch, table)
    assert sb.tools.rewind(state, to=0, checkpoint_location=None, sink=sink).taken_back[0].removed == ()
    assert "_delta_log/00000000000000000003.json" in synced.files
    assert rows(table) == [0, 1]


@pytest.mark.parametrize("is_restored", [True, False], ids=["table restored", "table not restored"])
def test_a_batch_of_a_restored_store_is_not_taken_for_the_one_of_its_number_before(
    tmp_path: Path, is_restored: bool
) -> None:
    """The store comes from an older copy; after that its incarnation and the numbers of its batches come again."""
    state, table, sink = tmp_path / "state", tmp_path / "table", delta(tmp_path / "table")
    with sink_job(state, sink) as job:
        job.run(0)
    shutil.copytree(state, tmp_path / "backup")
    with sink_job(state, sink) as job:
        job.run(1)
        job.run(2)
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    other = pa.table({"user": ["c"], "v": [1000]})
    if not is_restored:
        with sink_job(state, sink) as job, pytest.raises(sb.UsageError, match="to version 1, and") as caught:
            job.run(1, other)
        assert caught.value.code == "USAGE.PUBLISHED"
        assert rows(table) == [0, 1, 10, 11, 20, 21]
    deltalake.DeltaTable(str(table)).restore(1)
    with sink_job(state, sink) as job:
        assert [job.run(1, other)[0]["how"], job.run(2)[0]["how"]] == ["written", "written"]
    with sink_job(state, sink) as job:
        assert job.run(2)[0]["how"] == "there"
    assert rows(table) == [0, 1, 20, 21, 1000]
