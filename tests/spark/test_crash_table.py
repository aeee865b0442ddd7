"""The table of docs/spark/exactly-once.md: each cell is run, checked, and has come out as the page says."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import connect_table
import pytest
from crash_table import BEFORE, THEN, cell, cells_of, shown, table_of
from local_spark import spark

__all__ = ["spark"]
pytestmark = [pytest.mark.spark, pytest.mark.slow]

PAGE = (Path(__file__).parents[2] / "docs/spark/exactly-once.md").read_text()
CLASSIC, CONNECT = "### In the classic API", "### In Spark Connect"
CELLS = list(itertools.product(BEFORE, THEN))


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("before", "then"), CELLS)
def test_a_cell(spark: Any, tmp_path: Path, before: str, then: str) -> None:
    shuffled = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    try:
        assert shown(cell(spark, tmp_path, before, then)) == cells_of(PAGE, CLASSIC)[before, then]
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", shuffled)


def connect_outcomes(folder: Path, cells: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    # The server starts its workers with this path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, connect_table.__file__, str(folder), json.dumps(cells)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return {(before, then): shown(outcome) for before, then, outcome in lines}


@pytest.mark.sampled(1, of="connect")
def test_cells_through_connect(
    tmp_path: Path, request: pytest.FixtureRequest, day_rng: random.Random
) -> None:
    cells = CELLS if request.config.getoption("stress") else day_rng.sample(CELLS, 1)
    wanted = cells_of(PAGE, CONNECT)
    assert connect_outcomes(tmp_path, cells) == {each: wanted[each] for each in cells}


def test_the_tables_are_whole() -> None:
    for heading in (CLASSIC, CONNECT):
        found = cells_of(PAGE, heading)
        assert sorted(found) == sorted(CELLS)
        assert table_of(lambda before, then, found=found: found[before, then].strip("`")) in PAGE
