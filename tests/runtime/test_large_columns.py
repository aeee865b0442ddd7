"""Outputs whose columns have more texts than one array of Arrow can hold, 2 GiB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import statebackend as sb
from statebackend.runtime import Incoming, Job, Runner
from statebackend.runtime.origin import plan_identity
from statebackend.runtime.progress import Stopwatch
from statebackend.runtime.row_writer import OutputSchema

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


@pytest.mark.stress
@pytest.mark.parametrize("kind", VALUES)
def test_a_column_of_a_batch_has_more_than_two_gigabytes(tmp_path: Path, kind: str) -> None:
    """Takes 8 GiB of memory."""
    one = pa.array([TEXT])
    rows = pa.table({"user": np.arange(ROWS) % 7, "text": pa.chunked_array([one] * ROWS)})
    job = Job(Given(kind), key="user", schema=f"user bigint, value {kind}")
    runner = Runner(job, sb.CheckpointStore(tmp_path / "state"), sb.types.LONG, query="q")
    try:
        committed = runner.run(0, Incoming(lambda: rows, plan_identity(0, [])), Stopwatch())
        (file,) = committed.output
        with committed.checkpoint.open_file(file) as source:
            found = [batch.num_rows for batch in pq.ParquetFile(source).iter_batches(100)]
    finally:
        runner.close()
    assert sum(found) == ROWS


def test_maps_that_are_converted_a_few_at_a_time_come_in_one_column() -> None:
    schema = OutputSchema("m map<double,bigint>, l array<map<double,bigint>>")
    rows = [({float(n): n}, [{float(n): n}, None]) for n in range(200)]
    found = schema.table_of_rows([*rows, (None, None)]).to_pylist()
    assert found == [
        *({"m": [(n, n)], "l": [[(n, n)], None]} for n in range(200)),
        {"m": None, "l": None},
    ]
