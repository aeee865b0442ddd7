"""A query that streams what another one's sink has written: with the recipe of the page, no batch is read twice."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from spark_streams import Fails, Stream, numbers

import statebackend as sb

pytestmark = pytest.mark.spark

PAGE = Path(__file__).parents[2] / "docs/run/exactly-once.md"


def recipe(folder: Path) -> Any:
    """The function ``publish`` of the page, with its folders in this one."""
    found = re.search(r"^import os\nfrom pathlib import Path\n.*?(?=^```)", PAGE.read_text(), re.M | re.S)
    code = found[0].replace('f"out/', f'f"{folder}/out/').replace('f"aside/', f'f"{folder}/aside/')
    namespace: dict[str, Any] = {}
    exec(compile(code, "exactly-once.md", "exec"), namespace)
    return namespace["publish"]


@pytest.mark.parametrize("is_safe", [True, False], ids=["the recipe", "a folder that is overwritten"])
def test_a_batch_that_is_delivered_again_is_not_read_twice(stream: Stream, is_safe: bool) -> None:
    (stream.folder / "out").mkdir()
    publish = recipe(stream.folder)
    fail = Fails(1)

    def sink(frame: Any, batch_id: int, context: Any) -> None:
        if is_safe:
            publish(frame, batch_id, context)
        else:
            frame.write.mode("overwrite").parquet(f"{stream.folder}/out/batch={batch_id}")
        fail(batch_id)

    read: list[Any] = []

    def second() -> None:
        stream.read_on(f"{stream.folder}/out/*/", lambda frame, batch_id: read.extend(frame.collect()))

    for n in range(2):
        stream.add(numbers(("a", n + 1)))
    assert "Outage" in stream.fails(stream.batches(sink=sink))
    second()
    stream.run(stream.batches(sink=sink))
    second()
    totals = sorted(row.total for row in read)
    assert totals == ([1, 3] if is_safe else [1, 3, 3]), "the page says why"


def test_batches_that_run_again_after_a_rewind_are_published(stream: Stream) -> None:
    publish = recipe(stream.folder)
    for n in range(2):
        stream.add(numbers(("a", n + 1)))
    stream.run(stream.batches(sink=publish))
    stream.lose(1, "offsets", "commits", "sources/0")
    stream.add(numbers(("a", 10)))
    assert "OTHER_ROWS" in stream.fails(stream.batches(sink=publish), files=2)
    (taken_back,) = sb.tools.rewind(stream.state, to=0, checkpoint_location=None).taken_back
    shutil.rmtree(stream.folder / "out" / f"{taken_back.incarnation}-1")
    stream.run(stream.batches(sink=publish), files=2)
    rows = stream.spark.read.parquet(f"{stream.folder}/out/*/").collect()
    assert sorted(row.total for row in rows) == [1, 3, 13]
