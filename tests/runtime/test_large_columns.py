"""Outputs and states whose columns have more texts than one array of Arrow can hold, 2 GiB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from keyed_stores import create

import statebackend as sb
from statebackend.runtime import BatchSource, CommittedBatch, Job, Runner, output
from statebackend.runtime.arrow_rows import OutputSchema
from statebackend.runtime.batch_identity import plan_identity
from statebackend.runtime.batch_progress import Stopwatch
from statebackend.spark.sinks.committed_sink import Delivery, SinkContext
from statebackend.spark.sinks.delta_table import _batches

CONTEXT = SinkContext(0, 1, "0" * 32, False)
TEXT = "x" * (1 << 20)
ROWS = 2200
#: What a function gives for a text.
VALUES: dict[str, Any] = {
    "string": lambda text: text,
    "array<string>": lambda text: [text],
    "struct<n:int,text:string>": lambda text: (1, text),
    "map<string,string>": lambda text: {"text": text},
}


class Given(sb.KeyedProcessFunction):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def process_element(self, row: Any, ctx: sb.FunctionContext) -> Any:
        yield row.user, VALUES[self.kind](row.text)


@contextmanager
def committed_output(
    folder: Path, kind: str, rows: pa.Table, columns: Sequence[str]
) -> Iterator[CommittedBatch]:
    job = Job(Given(kind), key="user", schema=f"user bigint, value {kind}")
    store = sb.CheckpointStore(folder)
    with closing(Runner(job, store, sb.types.LONG, query="q", delivered={"main": columns})) as runner:
        yield runner.run(0, BatchSource(lambda: rows, plan_identity(0, [])), Stopwatch())


@pytest.mark.stress
@pytest.mark.parametrize("columns", [(), ("user",)], ids=["whole", "partitions"])
@pytest.mark.parametrize("kind", VALUES)
def test_a_column_of_a_batch_has_more_than_two_gigabytes(
    tmp_path: Path, kind: str, columns: Sequence[str]
) -> None:
    """Takes 8 GiB of memory."""
    rows = pa.table({"user": np.arange(ROWS) % 2, "text": pa.chunked_array([pa.array([TEXT])] * ROWS)})
    with committed_output(tmp_path, kind, rows, columns) as committed:
        found = [committed.read_output(file).num_rows for file in committed.output]
    assert found == ([ROWS // 2] * 2 if columns else [ROWS])
    assert sb.tools.verify(tmp_path).ok


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["value", "map"])
def test_a_column_of_a_state_has_more_than_two_gigabytes(tmp_path: Path, kind: str) -> None:
    """Takes 8 GiB of memory."""
    texts = pa.chunked_array([pa.array([TEXT])] * ROWS)
    keys = [[1] * ROWS, range(ROWS)] if kind == "map" else [range(ROWS)]
    is_map = kind == "map"
    descriptor = sb.MapStateDescriptor("text", int, str) if is_map else sb.ValueStateDescriptor("text", str)
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=32)
    with store, create("heap") as keyed:
        state = keyed.get_state(descriptor)
        (state.put_many if is_map else state.update_many)(*keys, texts)
        store.commit(0, [keyed.snapshot(0, store).result()])
    with create("heap", restore=store.open_latest()) as again:
        found = again.get_state(descriptor).get_many(*keys)
        assert found.type == pa.large_string()
        assert pc.all(pc.equal(found, pa.scalar(TEXT, pa.large_string()))).as_py()
    assert sb.tools.state(tmp_path, "text").to_table().num_rows == ROWS


@pytest.mark.parametrize("kind", VALUES)
def test_row_groups_are_cut_by_their_bytes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1 << 10
    monkeypatch.setattr(output, "_ROW_GROUP_BYTES", limit)
    # One row is longer than a row group may be.
    texts = [None if n % 9 == 0 else str(n) * (limit if n == 50 else n % 70) for n in range(200)]
    rows = pa.table({"user": np.arange(200) % 3, "text": texts})
    schema = OutputSchema(f"user bigint, value {kind}")
    given = schema.table_of_rows([(n % 3, VALUES[kind](text)) for n, text in enumerate(texts)])
    for columns in ((), ("user",)):
        with committed_output(tmp_path / f"{len(columns)}", kind, rows, columns) as committed:
            for user, file in enumerate(committed.output):
                with committed.checkpoint.open_file(file) as source:
                    opened = pq.ParquetFile(source)
                    groups = [opened.read_row_group(at) for at in range(opened.num_row_groups)]
                assert len(groups) > 3
                assert all(group.num_rows == 1 or group.nbytes <= limit for group in groups)
                wanted = given.take(np.arange(user, 200, 3)).drop_columns("user") if columns else given
                assert committed.read_output(file).equals(wanted)
                delivery = Delivery("main", (file,), wanted.schema, committed, CONTEXT)
                assert _batches(delivery).read_all().equals(wanted)
            assert len(committed.output) == (3 if columns else 1)
        assert sb.tools.verify(tmp_path / f"{len(columns)}").ok


def test_columns_too_large_for_arrow_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: object) -> None:
        raise pa.ArrowNotImplementedError("nested data")

    rows = pa.table({"user": [1], "text": ["a"]})
    with committed_output(tmp_path, "array<string>", rows, ()) as committed:
        monkeypatch.setattr(output, "read_batches", unable)
        with pytest.raises(pa.ArrowNotImplementedError):
            committed.read_output(committed.output[0])
        (problem,) = sb.tools.verify(tmp_path).problems
        assert problem.code == "STORE"
        path = tmp_path / committed.output[0].name
        path.write_bytes(path.read_bytes()[:-9] + bytes(9))
        with pytest.raises(sb.CorruptCheckpointError):
            committed.read_output(committed.output[0])


def test_maps_that_are_converted_a_few_at_a_time_come_in_one_column() -> None:
    schema = OutputSchema("m map<double,bigint>, l array<map<double,bigint>>")
    rows = [({float(n): n}, [{float(n): n}, None]) for n in range(200)]
    found = schema.table_of_rows([*rows, (None, None)]).to_pylist()
    assert found == [*({"m": [(n, n)], "l": [[(n, n)], None]} for n in range(200)), {"m": None, "l": None}]
