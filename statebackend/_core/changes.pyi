from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from statebackend._core.state_core import Mark
from statebackend._core.state_table import StateTable

@final
class EntryRows:
    addresses: NDArray[np.uint64]
    groups: NDArray[np.int64]
    is_live: NDArray[np.bool_]
    def __len__(self) -> int: ...
    def take(self, rows: NDArray[Any]) -> EntryRows: ...
    def keys(self) -> dict[str, NDArray[Any]]: ...
    def columns(self) -> dict[str, NDArray[Any]]: ...
    def heads(self, heads: StateTable) -> EntryRows: ...

def changed_entries(table: StateTable, mark: Mark) -> EntryRows: ...
