"""Map states: one entry per map key, threaded by key in insertion order."""

from collections.abc import Callable, Iterator
from typing import Any, final

from statebackend._core.key_groups import HashPlan
from statebackend._core.tables.state_core import StateCore
from statebackend._core.tables.state_table import StateTable

@final
class MapTable:
    def __init__(
        self,
        owner: StateCore,
        *,
        map_key: str = "int",
        value: str | int = "long",
        timestamps: bool = False,
        namespaces: bool = False,
        hash_mask: int = 0xFFFFFFFF,
        copy_value: Callable[[Any], Any] | None = None,
        nullable: bool = False,
        key: str = "int",
        max_parallelism: int = 128,
        key_group_range: tuple[int, int] | None = None,
        plan: HashPlan | None = None,
        initial_capacity: int = 64,
    ) -> None: ...
    @property
    def owner(self) -> StateCore: ...
    @property
    def heads(self) -> StateTable: ...
    @property
    def entries(self) -> StateTable: ...
    def put(
        self, key: int | bytes, map_key: int | bytes, value: Any, namespace: int = 0, timestamp: int = 0
    ) -> None: ...
    def get(self, key: int | bytes, map_key: int | bytes, namespace: int = 0) -> Any: ...
    def contains(self, key: int | bytes, map_key: int | bytes, namespace: int = 0) -> bool: ...
    def remove(self, key: int | bytes, map_key: int | bytes, namespace: int = 0) -> bool: ...
    def clear(self, key: int | bytes, namespace: int = 0) -> bool: ...
    def items(self, key: int | bytes, namespace: int = 0) -> Iterator[tuple[Any, Any]]: ...
    def __len__(self) -> int: ...
    def _check(self) -> None: ...

@final
class MapItems:
    def __init__(self, owner: MapTable, key: int | bytes, namespace: int) -> None: ...
    def __iter__(self) -> MapItems: ...
    def __next__(self) -> tuple[Any, Any]: ...
