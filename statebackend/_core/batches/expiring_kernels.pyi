from typing import Any

import numpy as np
from numpy.typing import NDArray

from statebackend._core.tables.state_table import StateTable

def read_many(
    table: StateTable,
    keys: Any,
    *,
    now: int,
    ttl: int,
    shows_expired: bool = False,
    renews: bool = False,
    namespace: int = 0,
    threads: int = 1,
) -> tuple[Any, NDArray[np.bool_]]: ...
def look_many(
    table: StateTable,
    keys: Any,
    *,
    now: int,
    ttl: int,
    shows_expired: bool = False,
    namespace: int = 0,
    threads: int = 1,
) -> NDArray[np.bool_]: ...
