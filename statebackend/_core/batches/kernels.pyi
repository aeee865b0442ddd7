from typing import Any, Literal, TypeAlias, final, overload

import numpy as np
from numpy.typing import NDArray

from statebackend._core.tables.state_table import StateTable

#: An array, or (offsets, data) of byte strings.
_Offsets: TypeAlias = tuple[NDArray[np.int64], NDArray[np.uint8]]
_Keys: TypeAlias = NDArray[np.int64] | _Offsets
_Values: TypeAlias = NDArray[Any] | _Offsets
#: One for all rows, or one for each: numbers of namespaces, and times.
_Namespaces: TypeAlias = int | NDArray[np.uint32]
_Times: TypeAlias = int | NDArray[np.int64]

@final
class LaneWork:
    def __call__(self, *args: Any, **kwargs: Any) -> None: ...

@final
class BatchCall:
    def __init__(self, table: StateTable, keys: _Keys, namespaces: _Namespaces, threads: int) -> None: ...

def update_many(
    table: StateTable,
    keys: _Keys,
    values: _Values,
    *,
    namespace: _Namespaces = 0,
    timestamp: _Times = 0,
    threads: int = 1,
) -> None: ...
def get_many(
    table: StateTable, keys: _Keys, *, namespace: _Namespaces = 0, threads: int = 1
) -> tuple[Any, NDArray[np.bool_]]: ...
def find_many(
    table: StateTable, keys: _Keys, *, namespace: _Namespaces = 0, threads: int = 1
) -> NDArray[np.uint32]: ...
def remove_many(
    table: StateTable, keys: _Keys, *, namespace: _Namespaces = 0, threads: int = 1
) -> NDArray[np.bool_]: ...
@overload
def reduce_many(
    table: StateTable,
    keys: _Keys,
    values: NDArray[Any] | None,
    reduction: str,
    *,
    namespace: _Namespaces = 0,
    timestamp: _Times = 0,
    threads: int = 1,
    return_touched: Literal[True],
) -> tuple[NDArray[np.int64], NDArray[Any]]: ...
@overload
def reduce_many(
    table: StateTable,
    keys: _Keys,
    values: NDArray[Any] | None,
    reduction: str,
    *,
    namespace: _Namespaces = 0,
    timestamp: _Times = 0,
    threads: int = 1,
    return_touched: Literal[False] = False,
) -> None: ...
def append_many(
    table: StateTable,
    keys: _Keys,
    values: _Values,
    *,
    namespace: _Namespaces = 0,
    timestamp: _Times = 0,
    threads: int = 1,
) -> None: ...
def lists_of(
    table: StateTable, keys: Any, *, namespace: _Namespaces = 0, threads: int = 1
) -> tuple[NDArray[np.int64], Any]: ...
