from typing import Any

import numpy as np
from numpy.typing import NDArray

from statebackend._core.tables.map_table import MapTable

def put_many(
    maps: MapTable,
    keys: Any,
    map_keys: Any,
    values: Any,
    *,
    nulls: NDArray[np.bool_] | None = None,
    namespace: int = 0,
    timestamp: int | NDArray[np.int64] = 0,
    ttl: int = 0,
    threads: int = 1,
) -> None: ...
def get_many(
    maps: MapTable,
    keys: Any,
    map_keys: Any,
    *,
    namespace: int = 0,
    now: int = 0,
    ttl: int = 0,
    shows_expired: bool = False,
    renews: bool = False,
    threads: int = 1,
) -> tuple[Any, NDArray[np.bool_]]: ...
def remove_many(
    maps: MapTable, keys: Any, map_keys: Any, *, namespace: int = 0, threads: int = 1
) -> NDArray[np.bool_]: ...
