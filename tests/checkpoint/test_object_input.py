"""An object read by ranges has the content of the whole, at few requests."""

from __future__ import annotations

import io
import random

import numpy as np
import pyarrow as pa
import pytest

from statebackend.checkpoint.files.objects import RangedFile


def test_random_reads_are_those_of_the_content(rng: random.Random) -> None:
    content = rng.randbytes(5_000_000)
    file = RangedFile(lambda start, end: content[start:end], len(content))
    for _ in range(300):
        if rng.random() < 0.6:
            file.seek(rng.randrange(len(content) + 10))
        at, wanted = file.tell(), rng.choice([0, 1, 10, 70_000, 2_000_000, -1])
        expected = content[at:] if wanted < 0 else content[at : at + wanted]
        assert bytes(file.read(wanted)) == expected
        assert file.tell() == max(at, min(at + len(expected), len(content)))
    target = bytearray(10)
    file.seek(-4, io.SEEK_END)
    assert file.readinto(target) == 4
    assert file.readall() == b""
    with pytest.raises(ValueError, match="before the start"):
        file.seek(-1)


def test_a_file_that_arrow_reads_in_order_takes_few_requests() -> None:
    table = pa.table({"value": np.arange(1_000_000)})
    stream = io.BytesIO()
    with pa.ipc.new_file(stream, table.schema) as out:
        out.write_table(table, 10_000)  # 100 batches, 8 MB
    content, asked = stream.getvalue(), []

    def fetch(start: int, end: int) -> bytes:
        assert 0 <= start < end <= len(content)
        asked.append((start, end))
        return content[start:end]

    with pa.PythonFile(RangedFile(fetch, len(content)), mode="r") as source:
        reader = pa.ipc.open_file(source)
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
    assert pa.Table.from_batches(batches) == table
    assert len(asked) <= 5
    assert sum(end - start for start, end in asked) <= len(content) + (1 << 20)
    assert all(end - start >= 1 << 20 or end == len(content) for start, end in asked)
