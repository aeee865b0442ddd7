"""Hashes of the values of columns, added up row by row, in two lanes of 64 bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[np.uint64]

def add_numbers(
    data: Any, width: int, is_float: bool, valid: Any, first: int, seed_0: int, seed_1: int, lanes: Lanes
) -> None: ...
def add_bytes(
    data: Any, offsets: Any, valid: Any, first: int, seed_0: int, seed_1: int, lanes: Lanes
) -> None: ...
def add_lists(
    elements: Lanes,
    offsets: Any,
    is_ordered: bool,
    valid: Any,
    first: int,
    seed_0: int,
    seed_1: int,
    lanes: Lanes,
) -> None: ...
def add_records(fields: Lanes, valid: Any, first: int, seed_0: int, seed_1: int, lanes: Lanes) -> None: ...
def add_taken(
    distinct: Lanes, indices: Any, valid: Any, first: int, seed_0: int, seed_1: int, lanes: Lanes
) -> None: ...
def add_nulls(seed_0: int, seed_1: int, lanes: Lanes) -> None: ...
def total(lanes: Lanes) -> tuple[int, int]: ...
