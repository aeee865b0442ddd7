"""A sink takes no output whose columns have other types than in the rows that it has: a table has one type a column."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sink_jobs import sink_job

import statebackend as sb
from statebackend.checkpoint import CheckpointReader
from statebackend.spark import sinks

pytestmark = pytest.mark.spark

#: The type of each column, and another for it.
TYPES = {
    "l": ("bigint", "int"),
    "i": ("int", "bigint"),
    "s": ("smallint", "tinyint"),
    "t": ("tinyint", "boolean"),
    "f": ("float", "double"),
    "d": ("double", "bigint"),
    "b": ("boolean", "string"),
    "text": ("string", "binary"),
    "raw": ("binary", "string"),
    "day": ("date", "timestamp"),
    "at": ("timestamp", "timestamp_ntz"),
    "local": ("timestamp_ntz", "timestamp"),
    "amount": ("decimal(10,2)", "decimal(12,2)"),
    "list": ("array<bigint>", "array<int>"),
    "map": ("map<string,bigint>", "map<string,array<bigint>>"),
    "record": ("struct<x:bigint,y:struct<z:date>>", "struct<x:bigint,y:struct<z:timestamp>>"),
    "wider": ("struct<x:bigint>", "struct<x:bigint,y:bigint>"),
    "records": ("array<struct<at:timestamp>>", "array<struct<at:timestamp_ntz>>"),
}


def run(folder: Path, sink: Any, types: dict[str, str], batch_id: int, store: str = "state") -> None:
    """A run of the query for one batch of a row, with these columns in its output, most of them null."""
    ddl = ", ".join(f"`{name}` {kind}" for name, kind in {"user": "string", **types}.items())
    row = {"user": "a", "l": batch_id if types.get("l") == "bigint" else None}
    with sink_job(folder / store, sink, ddl) as job:
        job.run(batch_id, pa.Table.from_pylist([row], pa.schema(list(sb.types.of(ddl).arrow))))


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(sb.UsageError) as caught:
        run(*arguments, **options)
    assert caught.value.code == "USAGE.OTHER_SCHEMA", caught.value
    assert "by schema=" in str(caught.value.hint), "it says how to go on"
    return str(caught.value)


@pytest.mark.parametrize("make", [sinks.parquet, sinks.delta])
def test_sink_refuses_another_type_in_a_column(tmp_path: Path, make: Any) -> None:
    sink, before = make(tmp_path / "out"), {name: old for name, (old, _) in TYPES.items()}
    run(tmp_path, sink, before, 0)
    for name, (_, other) in TYPES.items():
        text = refusal(tmp_path, sink, {**before, name: other}, 1)
        assert f"{name} is " in text, "the column is named"
        assert text.count(" in the output") == 1, "no other is"
    assert CheckpointReader(tmp_path / "state").latest() == 0, "nothing has been committed"
    run(tmp_path, sink, before, 1)
    # Rows that another output, or another query, has brought there count too.
    refusal(tmp_path, sink, {**before, "l": "string"}, 0, store="other")


def test_publishing_takes_more_columns_and_reads_older_files(tmp_path: Path) -> None:
    sink = sinks.parquet(tmp_path / "out")
    run(tmp_path, sink, {"l": "bigint"}, 0)
    run(tmp_path, sink, {"n": "bigint"}, 1)
    assert "l is int64" in refusal(tmp_path, sink, {"n": "bigint", "l": "string"}, 2)
    run(tmp_path, sink, {"n": "bigint", "l": "bigint"}, 2)
    found = sorted(os.listdir(tmp_path / "out"))
    assert [pq.read_schema(tmp_path / "out" / name).names[1:] for name in found] == [["l"], ["n"], ["n", "l"]]
    for name in found:  # they are the user's to remove
        (tmp_path / "out" / name).unlink()
    run(tmp_path, sink, {"n": "string"}, 3)


def test_publishing_opens_one_file_at_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = sinks.parquet(tmp_path / "out")
    for batch_id in range(3):
        run(tmp_path, sink, {"l": "bigint"}, batch_id)
    opened: list[str] = []
    open_input = type(sink._place).open_input  # type: ignore[attr-defined]

    def counting(place: Any, name: str) -> pa.NativeFile:
        opened.append(name)
        return open_input(place, name)

    monkeypatch.setattr(type(sink._place), "open_input", counting)  # type: ignore[attr-defined]
    sink.prepare(pa.schema({"user": pa.string(), "l": pa.int64()}))
    assert len(opened) == 1
    assert opened[0].startswith("batch-00000002-")


def test_publishing_in_partitions_knows_the_types_of_their_columns(tmp_path: Path) -> None:
    sink = sinks.parquet(tmp_path / "out", partition_by="l")
    run(tmp_path, sink, {"l": "bigint", "n": "int"}, 0)
    for name, other in (("l", "string"), ("n", "string")):
        assert f"{name} is " in refusal(tmp_path, sink, {"l": "bigint", "n": "int", name: other}, 1)
    run(tmp_path, sink, {"l": "bigint", "n": "int"}, 1)


def test_outputs_with_other_types_are_not_published_to_one_folder(tmp_path: Path) -> None:
    def made(path: Path) -> Any:
        return sb.spark.stateful(
            sb.map_with_state(lambda row, n: (row, n), int),
            key="user",
            schema={"totals": "user string, n bigint", "late": "user string, n string"},
            state=tmp_path / "state",
            sink={"totals": sinks.parquet(tmp_path / "out"), "late": sinks.parquet(path)},
        )

    with pytest.raises(
        sb.UsageError, match="n is int64 in another output and string in the output"
    ) as caught:
        made(tmp_path / "out")
    assert caught.value.hint == "give each output a place of its own"
    made(tmp_path / "late")
