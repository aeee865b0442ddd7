"""The base of all handles: the tables of one state, and the place of the current key's entry in them."""

from collections.abc import Callable
from typing import Any

from statebackend._core.codecs.codecs import ValueCodec
from statebackend._core.handles.key_context import KeyContext
from statebackend._core.tables.state_core import StateCore
from statebackend._core.tables.state_table import StateTable

class BaseHandle:
    def __init__(
        self,
        context: KeyContext,
        codec: ValueCodec,
        make_table: Callable[[bool], Any],
        ttl: int,
        watcher: Any,
    ) -> None: ...
    @property
    def context(self) -> KeyContext: ...
    @property
    def core(self) -> StateCore: ...
    @property
    def codec(self) -> ValueCodec: ...
    @property
    def watcher(self) -> Any: ...
    @property
    def plain(self) -> StateTable: ...
    @property
    def spaced(self) -> StateTable | None: ...
    def _note_times(self, latest: int, earliest: int) -> None: ...
