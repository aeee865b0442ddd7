from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from statebackend._core.tables.accumulators import AddPlan
from statebackend._core.tables.state_table import StateTable

#: One for all rows, or one for each: numbers of namespaces, and times.
_Namespaces: TypeAlias = int | NDArray[np.uint32]
_Times: TypeAlias = int | NDArray[np.int64]

def add_many(
    table: StateTable,
    keys: Any,
    values: Any,
    plan: AddPlan,
    *,
    nulls: NDArray[np.bool_] | None = None,
    namespace: _Namespaces = 0,
    timestamp: _Times = 0,
    ttl: int = 0,
    threads: int = 1,
    rows: NDArray[np.int64] | None = None,
    return_touched: bool = False,
) -> Any: ...
