from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from statebackend._core.tables.state_table import StateTable

#: One for all rows, or one for each: numbers of namespaces, and times.
_Namespaces: TypeAlias = int | NDArray[np.uint32]
_Times: TypeAlias = int | NDArray[np.int64]

def read_many(
    table: StateTable,
    keys: Any,
    *,
    now: _Times,
    ttl: int,
    shows_expired: bool = False,
    renews: bool = False,
    namespace: _Namespaces = 0,
    threads: int = 1,
) -> tuple[Any, NDArray[np.bool_]]: ...
def look_many(
    table: StateTable,
    keys: Any,
    *,
    now: _Times,
    ttl: int,
    shows_expired: bool = False,
    namespace: _Namespaces = 0,
    threads: int = 1,
) -> NDArray[np.bool_]: ...
