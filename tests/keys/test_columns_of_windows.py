"""Columns of times, of the windows that they lie in, and of namespaces."""

from __future__ import annotations

import datetime
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statebackend.errors import SerializationTypeError, UsageError
from statebackend.keys import (
    VOID,
    TimeWindow,
    canonical_list,
    encode_namespace,
    namespace_column,
    time_column,
)

pytestmark = pytest.mark.checked

WINDOW = pa.struct([("start", pa.int64()), ("end", pa.int64())])


def one_by_one(
    times: list[int | None], size: int, slide: int | None, offset: int
) -> list[tuple[int, int, int]]:
    """The windows of each time, found by trying all that begin near it."""
    step = size if slide is None else slide
    found = []
    for row, time in enumerate(times):
        if time is None:
            continue
        starts = range(TimeWindow.of(time, step, offset).start - size // step * step - step, time + 1, step)
        found += [(row, start, start + size) for start in starts if start <= time < start + size]
    return found


@pytest.mark.parametrize("slide", [None, 1, 3, 10, 15])
@pytest.mark.parametrize("offset", [0, 4, -7, 1000])
def test_windows_of_many_times(slide: int | None, offset: int, rng: random.Random) -> None:
    times = [None if rng.random() < 0.1 else rng.randrange(-200, 200) for _ in range(300)]
    rows, windows = TimeWindow.assign_many(times, 10, slide=slide, offset=offset)
    bounds = (windows.field(name).to_pylist() for name in ("start", "end"))
    assert list(zip(rows.to_pylist(), *bounds, strict=True)) == one_by_one(times, 10, slide, offset)
    assert windows.type == WINDOW


def test_durations_and_forms() -> None:
    minute = datetime.timedelta(minutes=1)
    expected = [{"start": -60_000, "end": 0}, {"start": 60_000, "end": 120_000}]
    for times in (
        [-1, 60_000],
        np.array([-1, 60_000]),
        np.array([-1, 60_000], dtype="datetime64[ms]"),
        pa.array([-1, 60_000_999], pa.timestamp("us", "UTC")),
        pa.chunked_array([[-1], [60_000]]),
        [datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999), datetime.datetime(1970, 1, 1, 0, 1)],
    ):
        if isinstance(times, pa.Array) and pa.types.is_timestamp(times.type):
            assert time_column(times).own.tolist() == [-1, 60_000]
        assert TimeWindow.assign_many(times, minute).windows.to_pylist() == expected
    assert len(TimeWindow.assign_many([], minute).rows) == 0
    assert len(TimeWindow.assign_many(pa.nulls(3), minute, slide=minute / 2).windows) == 0


@pytest.mark.parametrize(
    ("times", "options", "error"),
    [
        ([1], {"size": 0}, UsageError),
        ([1], {"size": -5}, UsageError),
        ([1], {"size": 5, "slide": 0}, UsageError),
        ([1], {"size": datetime.timedelta(microseconds=1)}, UsageError),
        ([1], {"size": 1.5}, SerializationTypeError),
        ([1], {"size": True}, SerializationTypeError),
        ([1.5], {"size": 5}, UsageError),
        ([True], {"size": 5}, UsageError),
        (["now"], {"size": 5}, UsageError),
        ([2**63], {"size": 5}, UsageError),
        (pa.array([2**62], pa.timestamp("s")), {"size": 5}, UsageError),
        ([2**63 - 1], {"size": 10}, OverflowError),
        ([-(2**63)], {"size": 10, "slide": 3}, OverflowError),
        ("12", {"size": 5}, SerializationTypeError),
    ],
)
def test_times_and_sizes_that_give_no_windows_are_refused(
    times: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        TimeWindow.assign_many(times, **options)


def test_columns_of_windows_are_as_lists_of_them(rng: random.Random) -> None:
    """Windows of one length, and of several that begin at one time; nulls; sliced arrays."""
    for _ in range(500):
        lengths = rng.choice([[5], [5, 7]])
        windows: list[Any] = []
        for _ in range(rng.choice([0, 1, 2, 20])):
            start = rng.randrange(3)
            windows.append(VOID if rng.random() < 0.2 else TimeWindow(start, start + rng.choice(lengths)))
        shown = [None if each is VOID else {"start": each.start, "end": each.end} for each in windows]
        column = pa.array([*shown[-1:], *shown], WINDOW)[len(shown[-1:]) :]
        found, expected = namespace_column(column), namespace_column(windows)
        assert found.numbers.tolist() == expected.numbers.tolist()
        assert found.distinct == expected.distinct
        assert found.shown().to_pylist() == shown
        assert found.shown().type == WINDOW
        rows = np.array([row for row in range(len(windows)) if rng.random() < 0.5], dtype=np.int64)
        assert canonical_list(found.take(rows).runs()) == [encode_namespace(windows[row]) for row in rows]
