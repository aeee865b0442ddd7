"""Hashes of the values of columns, added row by row, in two lanes of 64 bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def add_numbers(
    data: Any,
    width: int,
    is_float: bool,
    valid: Any,
    first: int,
    seed_0: int,
    seed_1: int,
    lanes: NDArray[np.uint64],
) -> None: ...
def add_bytes(
    data: Any, offsets: Any, valid: Any, first: int, seed_0: int, seed_1: int, lanes: NDArray[np.uint64]
) -> None: ...
def add_lists(
    elements: NDArray[np.uint64],
    offsets: Any,
    is_ordered: bool,
    valid: Any,
    first: int,
    seed_0: int,
    seed_1: int,
    lanes: NDArray[np.uint64],
) -> None: ...
def add_records(
    fields: NDArray[np.uint64], valid: Any, first: int, seed_0: int, seed_1: int, lanes: NDArray[np.uint64]
) -> None: ...
def add_taken(
    distinct: NDArray[np.uint64],
    indices: Any,
    valid: Any,
    first: int,
    seed_0: int,
    seed_1: int,
    lanes: NDArray[np.uint64],
) -> None: ...
def add_nulls(seed_0: int, seed_1: int, lanes: NDArray[np.uint64]) -> None: ...
def total(lanes: NDArray[np.uint64]) -> tuple[int, int]: ...
