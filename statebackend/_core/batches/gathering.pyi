from typing import Any

import numpy as np
from numpy.typing import NDArray

from statebackend._core.tables.state_table import StateTable

def distinct_slots(slots: NDArray[np.uint32]) -> NDArray[np.int64]: ...
def values_at(table: StateTable, slots: NDArray[np.uint32]) -> Any: ...
def lists_at(table: StateTable, slots: NDArray[np.uint32]) -> tuple[NDArray[np.int64], Any]: ...
