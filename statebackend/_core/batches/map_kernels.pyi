from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from statebackend._core.tables.map_table import MapTable

#: One for all rows, or one for each: numbers of namespaces, and times.
_Namespaces: TypeAlias = int | NDArray[np.uint32]
_Times: TypeAlias = int | NDArray[np.int64]

def put_many(
    maps: MapTable,
    keys: Any,
    map_keys: Any,
    values: Any,
    *,
    nulls: NDArray[np.bool_] | None = None,
    namespace: _Namespaces = 0,
    timestamp: _Times = 0,
    ttl: int = 0,
    threads: int = 1,
) -> None: ...
def get_many(
    maps: MapTable,
    keys: Any,
    map_keys: Any,
    *,
    namespace: _Namespaces = 0,
    now: _Times = 0,
    ttl: int = 0,
    shows_expired: bool = False,
    renews: bool = False,
    threads: int = 1,
) -> tuple[Any, NDArray[np.bool_]]: ...
def remove_many(
    maps: MapTable, keys: Any, map_keys: Any, *, namespace: _Namespaces = 0, threads: int = 1
) -> NDArray[np.bool_]: ...
