"""The functions of the page on windows give what Spark's own windows give over the same rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from house_tools import ROOT

import statebackend as sb

pytestmark = pytest.mark.spark

sys.path.append(str(ROOT / "tests" / "house"))


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the blocks of the page define."""
    from test_docs import python_blocks

    path = Path("docs/build/windows.md")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in python_blocks((ROOT / path).read_text(encoding="utf-8")):
        exec(compile(block.code, str(path), "exec"), names)
    return names


@pytest.fixture(scope="module")
def frame(spark: Any, page: dict[str, Any]) -> Any:
    """The clicks of the page, with a time that Spark takes for one."""
    clicks = pa.Table.from_pylist(page["clicks"])
    at = clicks["at"].cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))
    return spark.createDataFrame(clicks.set_column(clicks.column_names.index("at"), "at", at).to_pandas())


@pytest.mark.parametrize(
    ("kind", "arguments", "least", "runs"),
    [
        ("window", ["30 minutes"], 100, [("run_columns", "TumblingColumns")]),
        ("window", ["30 minutes", "10 minutes"], 400, [("run_columns", "SlidingColumns")]),
        ("session_window", ["5 minutes"], 50, [("run_columns", "SessionColumns"), ("run", "Sessions")]),
    ],
    ids=["tumbling", "sliding", "sessions"],
)
def test_windows_of_the_page_equal_sparks(
    frame: Any, page: dict[str, Any], kind: str, arguments: list[str], least: int, runs: list[tuple[str, str]]
) -> None:
    """The page counts a click that comes just when a session ends to that session, as Spark does."""
    from pyspark.sql import functions as F

    counted = frame.groupBy("user", getattr(F, kind)("at", *arguments).alias("w")).count()
    milliseconds = [F.unix_millis(f"w.{bound}") for bound in ("start", "end")]
    expected = sorted(tuple(row) for row in counted.select("user", *milliseconds, "count").collect())
    assert len(expected) > least
    for run, function in runs:
        assert page[run](page[function]()) == expected


@pytest.mark.parametrize(
    ("size", "slide", "offset"),
    [(30, None, 0), (30, None, 7), (30, 10, 0), (30, 7, 0), (10, 10, 3), (7, 3, 2), (60, 1, 0)],
)
def test_assigned_windows(spark: Any, size: int, slide: int | None, offset: int) -> None:
    """`TimeWindow.assign_many` puts each time into the windows that Spark puts it into, before 1970 too."""
    from pyspark.sql import functions as F

    times = [*range(-100_000, 100_000, 7_777), -1, 0, 1, 29_999, 30_000, 1_700_000_000_123, None]
    table = pa.table({"row": range(len(times)), "at": pa.array(times, pa.timestamp("ms", "UTC"))})
    rows, windows = sb.TimeWindow.assign_many(
        table["at"], 1000 * size, slide=None if slide is None else 1000 * slide, offset=1000 * offset
    )
    starts, ends = (windows.field(name).to_pylist() for name in ("start", "end"))
    found = sorted(zip(rows.to_pylist(), starts, ends, strict=True))
    arguments = [f"{each} seconds" for each in (size, size if slide is None else slide, offset)]
    frame = spark.createDataFrame([(row, at) for row, at in enumerate(times)], "row int, ms bigint")
    placed = frame.select("row", F.window(F.timestamp_millis("ms"), *arguments).alias("w"))
    asked = placed.select("row", F.unix_millis("w.start"), F.unix_millis("w.end"))
    assert found == sorted(tuple(row) for row in asked.collect())
