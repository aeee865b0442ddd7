"""The table of docs/run/exactly-once.md: each cell is run, checked, and has come out as the page says."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from crash_table import BEFORE, THEN, cell, cells_of, shown, table_of
from local_spark import settings
from spark_cluster import Cluster

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PAGE = (Path(__file__).parents[2] / "docs/run/exactly-once.md").read_text()
CELLS = list(itertools.product(BEFORE, THEN))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("before", "then"), CELLS)
def test_a_cell(spark: Any, tmp_path: Path, before: str, then: str) -> None:
    with settings(spark, {"spark.sql.shuffle.partitions": "2"}):
        assert shown(cell(spark, tmp_path, before, then)) == cells_of(PAGE)[before, then]


@pytest.mark.sampled(1, of="connect")
def test_cells_through_connect(tmp_path: Path, is_stress: bool, day_rng: random.Random) -> None:
    cells = CELLS if is_stress else day_rng.sample(CELLS, 1)
    wanted = {at: "exact" if at[1] == "lost offsets" else each for at, each in cells_of(PAGE).items()}
    with Cluster(tmp_path, "connect:local[2]", **{"spark.sql.shuffle.partitions": "2"}) as server:
        for number, (before, then) in enumerate(cells):
            became = server.ask("cell", folder=tmp_path / str(number), before=before, then=then)
            assert shown(became) == wanted[before, then]


def test_the_table_is_whole() -> None:
    found = cells_of(PAGE)
    assert sorted(found) == sorted(CELLS)
    assert table_of(lambda before, then: found[before, then].strip("`")) in PAGE
