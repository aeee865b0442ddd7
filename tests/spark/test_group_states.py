"""Functions of `applyInPandasWithState` give the same through Spark's operator and through ours, batch by batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from group_functions import CASES, GroupPair, GroupQuery, out, several, stored
from processor_pairs import table

import statebackend as sb
from statebackend.errors import UsageError
from statebackend.testing import Harness

TIMEOUTS = list(CASES)


def rows_of(timeout: str, rng: random.Random, batch: int) -> pa.Table:
    """Some rows for each function of a timeout."""
    rows = [
        {
            "k": f"{name}:{key}",
            "g": rng.choice([None, 1, 2]),
            "n": rng.randrange(9),
            "x": rng.choice([None, 0.5, -1.0]),
            "s": rng.choice(["a", "é", None]),
            "at": 100 + 8 * batch + rng.randrange(-12, 12),
        }
        for name in {**CASES["NoTimeout"], **CASES[timeout]}
        for key in range(3)
        for _ in range(rng.randrange(4))
    ]
    rng.shuffle(rows)
    return table(rows)


@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_written_functions_give_the_same(
    spark: Any, tmp_path: Path, rng: random.Random, timeout: str
) -> None:
    query = GroupQuery(spark, tmp_path)
    pair = GroupPair(several(timeout), timeout)
    pair.watermark = None if timeout == "ProcessingTimeTimeout" else "10 seconds"
    query.add(*[rows_of(timeout, rng, batch) for batch in range(4)])
    query.compare(pair)
    query.add(rows_of(timeout, rng, 4))
    query.compare(pair)  # a restart
