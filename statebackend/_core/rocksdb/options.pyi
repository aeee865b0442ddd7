from collections.abc import Mapping
from typing import final

from statebackend._core.rocksdb.callbacks import ExpiryRules

SMALLEST_LIMIT: int

@final
class MemoryBudget:
    def __init__(self, limit: int, *, write_buffer_ratio: float = 0.5) -> None: ...
    @property
    def limit(self) -> int: ...
    def usage(self) -> dict[str, int]: ...

@final
class Options:
    @property
    def budget(self) -> MemoryBudget | None: ...
    def __init__(
        self,
        settings: Mapping[str, str | int | bool] | None = None,
        *,
        budget: MemoryBudget | None = None,
        rules: ExpiryRules | None = None,
        is_list: bool = False,
        threads: int | None = None,
        block_size: int | None = None,
        bloom_bits: float = 0,
        partitioned: bool = True,
    ) -> None: ...
