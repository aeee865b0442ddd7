import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]
_Data = NDArray[np.uint8]

def join_elements(values: list[bytes], width: int, stamp: int | None = None) -> bytes: ...
def split_elements(data: bytes, width: int, is_stamped: bool) -> tuple[list[bytes], list[int]]: ...
def split_values(
    offsets: _Ints, data: _Data, is_stamped: bool, is_map_entry: bool, width: int = 0
) -> tuple[_Ints | None, NDArray[np.bool_] | None, _Ints, _Data]: ...
def seen_values(
    found: NDArray[np.uint8],
    offsets: _Ints,
    data: _Data,
    lifetime: int,
    now: int,
    shows_expired: bool,
    is_map_entry: bool,
    width: int = 0,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_], _Ints, _Data]: ...
def set_stamps(offsets: _Ints, data: _Data, now: int) -> None: ...
def are_expired(stamps: _Ints, lifetime: int, now: int) -> NDArray[np.bool_]: ...
def join_values(
    offsets: _Ints,
    data: _Data,
    stamps: _Ints | None = None,
    nulls: NDArray[np.uint8] | None = None,
    is_map_entry: bool = False,
) -> tuple[_Ints, _Data]: ...
def split_lists(
    offsets: _Ints, data: _Data, width: int, is_stamped: bool
) -> tuple[_Ints, _Ints | None, _Ints, _Data]: ...
def join_lists(
    list_offsets: _Ints, offsets: _Ints, data: _Data, width: int, stamps: _Ints | None = None
) -> tuple[_Ints, _Data]: ...
