"""The current key of a keyed backend, in the form in which tables take it."""

from collections.abc import Callable
from typing import Any

from statebackend._core.codecs.codecs import KeyCodec
from statebackend._core.tables.state_core import StateCore

class KeyContext:
    _key: Any
    _namespace: bytes
    _now: int
    _fixed_now: int | None
    _worked_at: int | None
    _event_now: int | None
    _event_cleaned: int
    @property
    def _group(self) -> int: ...
    def _open(
        self,
        core: StateCore,
        codec: KeyCodec,
        max_parallelism: int,
        first_group: int,
        last_group: int,
        clock: Any,
        read_clock: Callable[[Any], int],
        is_system_clock: bool,
        encode_namespace: Callable[[Any], bytes],
        frozen_types: frozenset[type],
    ) -> None: ...
    @property
    def core(self) -> StateCore: ...
    @property
    def codec(self) -> KeyCodec: ...
    @property
    def current_key(self) -> Any: ...
    def set_current_key(self, key: Any) -> None: ...
    def set_current_namespace(self, namespace: Any) -> None: ...
    def _require_key(self) -> Any: ...
    def _save_key(self) -> Any: ...
    def _restore_key(self, saved: Any) -> None: ...
    def _saw(self, now: int) -> int: ...
    def _clean_on_record(self, state: Any) -> None: ...
