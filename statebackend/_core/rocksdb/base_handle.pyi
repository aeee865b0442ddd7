from typing import Any

from statebackend._core.codecs.value_bytes import ValueBytes
from statebackend._core.rocksdb.store import Store, Table

class BaseHandle:
    expired_on_read: int
    expired_by_cleanup: int
    # Of these, nothing is ever set from Python.
    store: Store
    table: Table
    codec: ValueBytes
    descriptor: Any
    backend: Any

    def _set_up(
        self,
        context: Any,
        descriptor: Any,
        codec: ValueBytes,
        table: Table,
        lifetime: int,
        in_event_time: bool,
        renews: bool,
        shows_expired: bool,
    ) -> None: ...
    def redeclare(self, descriptor: Any) -> None: ...
    def now(self) -> int: ...
    def cleaned_at(self) -> int: ...
    def has_expired(self, stored: bytes) -> bool: ...
    def _is_watched_from_now_on(self) -> None: ...
