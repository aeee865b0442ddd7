from collections.abc import Callable
from typing import Any

from statebackend._core.codecs.codecs import KeyCodec
from statebackend._core.rocksdb.store import Store

class CurrentKey:
    _closed: bool
    _key: Any
    _key_group: int
    _namespace: bytes
    _now: int
    _event_now: int | None
    _event_cleaned: int
    _worked_at: int | None
    _fixed_now: int | None

    @property
    def store(self) -> Store: ...
    @property
    def codec(self) -> KeyCodec: ...
    @property
    def event_cleaned_now(self) -> int: ...
    def _open(
        self,
        store: Store,
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
    def _refuse(self) -> None: ...
    def set_current_key(self, key: Any) -> None: ...
    def clear_current_key(self) -> None: ...
    def _require_key(self) -> Any: ...
    def _save_key(self) -> Any: ...
    def _restore_key(self, saved: Any) -> None: ...
    def _enter(self, canonical: Any, namespace: bytes) -> None: ...
    def set_current_namespace(self, namespace: Any) -> None: ...
    def _cleans_up(self) -> None: ...
