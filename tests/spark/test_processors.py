"""Processors of `transformWithState` give the same through Spark's operator and through ours, batch by batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from processor_pairs import Pair, Query, table
from processors import CASES, Written, several

MODES = ("None", "ProcessingTime", "EventTime")


def rows_of(names: Any, rng: random.Random, batch: int, keys: int = 3) -> pa.Table:
    """Some rows for each of these processors."""
    rows = []
    for name in names:
        for key in range(keys):
            rows += [
                {
                    "k": f"{name}:{key}",
                    "g": rng.randrange(3),
                    "n": rng.randrange(1, 7),
                    "x": rng.choice([None, 0.5, -1.0]),
                    "s": rng.choice(["a", "b", "é", None]),
                    "at": 100 + 8 * batch + rng.randrange(-12, 12),
                }
                for _ in range(rng.randrange(4))
            ]
    rng.shuffle(rows)
    return table(rows)


@pytest.mark.parametrize("in_pandas", [False, True], ids=["rows", "pandas"])
@pytest.mark.parametrize("mode", MODES)
def test_written_processors_give_the_same(
    spark: Any, tmp_path: Path, rng: random.Random, mode: str, in_pandas: bool
) -> None:
    query = Query(spark, tmp_path)
    pair = Pair(several(mode, in_pandas), mode, in_pandas=in_pandas)
    pair.watermark = "10 seconds" if mode == "EventTime" else None
    query.add(*[rows_of(CASES[mode], rng, batch) for batch in range(3)])
    query.compare(pair)
    query.add(rows_of(CASES[mode], rng, 3))
    query.compare(pair)  # a restart


@pytest.mark.stress
@pytest.mark.parametrize("name", CASES["None"])
def test_each_processor_alone_gives_the_same(
    spark: Any, tmp_path: Path, rng: random.Random, name: str
) -> None:
    query = Query(spark, tmp_path)
    query.add(*[rows_of([name], rng, batch) for batch in range(3)])
    query.compare(Pair(Written(*CASES["None"][name])))
