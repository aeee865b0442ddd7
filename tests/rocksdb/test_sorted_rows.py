"""Rows as offsets and bytes: sorted, and picked out; against Python's lists and dicts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rocks import rows, texts

import statebackend as sb
from statebackend._core.rocksdb.overlay.sorted_rows import picked, sorted_order

pytestmark = pytest.mark.checked


def some_keys(rng: random.Random, count: int) -> list[bytes]:
    """Keys that often share beginnings, and are often equal."""
    return [bytes(rng.choices(b"\0\1ab\xff", k=rng.randrange(6))) for _ in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 100, 1000])
def test_of_equal_keys_the_last_one_counts_and_the_rest_ascend(count: int, rng: random.Random) -> None:
    for _ in range(20):
        keys = some_keys(rng, count)
        if rng.random() < 0.5:  # runs that ascend, as key groups do
            cut = rng.randrange(count + 1)
            keys = sorted(keys[:cut]) + sorted(keys[cut:])
        last = {key: at for at, key in enumerate(keys)}
        assert sorted_order(*rows(keys)).tolist() == [last[key] for key in sorted(last)]


def test_picked_rows_are_copies_from_a_byte_on(rng: random.Random) -> None:
    for _ in range(50):
        given = some_keys(rng, rng.randrange(1, 30))
        chosen = [rng.randrange(len(given)) for _ in range(rng.randrange(40))]
        begin = [rng.randrange(len(given[row]) + 1) for row in chosen]
        numbers = np.array(chosen, np.int64)
        assert texts(*picked(*rows(given), numbers)) == [given[row] for row in chosen]
        tails = picked(*rows(given), numbers, np.array(begin, np.int64))
        assert texts(*tails) == [given[row][at:] for row, at in zip(chosen, begin, strict=True)]


@pytest.mark.parametrize(("row", "begin"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_row_that_is_not_there_is_refused(row: int, begin: int) -> None:
    with pytest.raises(sb.UsageError, match="a row is asked for that is not there"):
        picked(*rows([b"ab", b"c"]), np.array([row]), np.array([begin]))


def test_numbers_that_do_not_fit_the_rows_are_refused() -> None:
    with pytest.raises(sb.UsageError, match="not as many beginnings as rows"):
        picked(*rows([b"a"]), np.array([0]), np.array([0, 0]))
    with pytest.raises(sb.UsageError, match="the offsets do not fit the data"):
        sorted_order(np.array([0, 5]), np.zeros(3, np.uint8))
