"""Removal of what has expired: a little with each access, or everything that is due."""

from collections.abc import Callable
from typing import Any

from statebackend._core.codecs.codecs import ValueCodec
from statebackend._core.handles.base_handle import BaseHandle
from statebackend._core.handles.key_context import KeyContext
from statebackend._core.tables.sweeping import ExpiryIndex

class CleanupHandle(BaseHandle):
    def __init__(
        self,
        context: KeyContext,
        codec: ValueCodec,
        make_table: Callable[[bool], Any],
        ttl: int,
        watcher: Any,
        cleanup_size: int,
    ) -> None: ...
    @property
    def plain_index(self) -> ExpiryIndex | None: ...
    @property
    def spaced_index(self) -> ExpiryIndex | None: ...
    def _clean_some(self, rows: int = 1, now: int | None = None) -> None: ...
    def _expire(self, budget: int) -> int: ...
    def _close(self) -> None: ...
    def _count_expired(self, entries: int) -> None: ...
    def _expiry_metrics(self) -> dict[str, int | None]: ...
