from typing import Any

import numpy as np
from numpy.typing import NDArray

from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_table import StateTable

def add_many(
    table: StateTable,
    keys: Any,
    values: Any,
    plan: AddPlan,
    *,
    nulls: NDArray[np.bool_] | None = None,
    namespace: int = 0,
    timestamp: int = 0,
    ttl: int = 0,
    threads: int = 1,
    return_touched: bool = False,
) -> Any: ...
