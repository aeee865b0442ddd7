"""The shared part of the handles: how they are set up, what cleanup asks, and iterations that notice changes."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from statebackend._core.codecs.value_bytes import ValueBytes
from statebackend._core.rocksdb.binding.callbacks import ExpiryRules
from statebackend._core.rocksdb.overlay.store import Store, Table
from statebackend.columns.codec_choice import value_bytes
from statebackend.state import KeyedState, StateTtlConfig, WatchedIterator, expired
from statebackend.types import Type

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed import RocksDbKeyedBackend

#: In front of each value of a state with a time to live.
STAMP = struct.Struct("<q")


class RocksDbState(KeyedState):
    """The shared part. A timestamp of eight bytes comes first in what is stored, if there is a time to live."""

    #: Of `ExpiryRules`.
    layout = "value"

    # Of the compiled handle, which comes first in the class.
    store: Store
    table: Table
    codec: ValueBytes
    has_expired: Callable[[bytes], bool]
    now: Callable[[], int]

    def __init__(self, backend: RocksDbKeyedBackend, descriptor: Any, value_type: Type) -> None:
        self._backend = backend
        config: StateTtlConfig | None = descriptor.ttl_config
        #: Milliseconds, or None.
        self.ttl = None if config is None else config.ttl
        self._in_event_time = config is not None and config.is_in_event_time
        self._shows_expired = config is not None and config.shows_expired
        #: Where `advance` goes on.
        self.cursor = b""
        #: What compactions had dropped of it when it was cleared for all keys.
        self.dropped_at_clearing = 0
        self._renews = config is not None and config.renews_on_read
        #: True if compactions drop what has expired.
        self.has_drops = config is not None and config.rocksdb_cleanup is not None
        #: What compactions go by; they count there what they drop.
        self.rules = self._make_rules(descriptor)
        self._set_up(  # type: ignore[attr-defined]
            backend,
            descriptor,
            value_bytes(value_type, f"state {descriptor.name!r}"),
            backend.create_table(descriptor.name, self.rules, self.layout, config),
            self.ttl or 0,
            self._in_event_time,
            self._renews,
            self._shows_expired,
        )
        self.plan_calls()
        self._store = self.store
        self._watches: weakref.WeakSet[WatchedIterator] = weakref.WeakSet()

    def _make_rules(self, descriptor: Any) -> ExpiryRules:
        config: StateTtlConfig | None = descriptor.ttl_config
        cleanup = None if config is None else config.rocksdb_cleanup
        options: dict[str, int] = {}
        if config is not None and cleanup is not None:
            options = {"ttl": config.ttl, "query_every": max(1, cleanup.query_time_after_num_entries)}
        return self._backend.make_rules(
            descriptor.name, self._in_event_time, self.layout, self.element_bytes(descriptor), options
        )

    def plan_calls(self) -> None:
        """Plan vectorised calls, when the state is declared and whenever its descriptor takes effect again."""

    def element_bytes(self, descriptor: Any) -> int:
        """The bytes of an element of a list with its timestamp, if all have as many; else 0."""
        return 0

    def may_have(self, namespace: bytes) -> bool:
        """Return True if anything was ever written in this namespace, as far as is known without looking."""
        return not namespace or self.table.has_namespaces

    @property
    def is_stamped(self) -> bool:
        """True if timestamps are stored."""
        return self.ttl is not None

    # --- what each kind says about what it stores ---

    def is_there(self, stored: bytes | None) -> bool:
        """Return True if something is stored, expired or not."""
        return stored is not None

    def is_alive(self, stored: bytes) -> bool:
        """Return True if any part of it has not expired."""
        return not self.has_expired(stored)

    def stamps_of(self, stored: bytes) -> list[int]:
        """All timestamps in it."""
        return [STAMP.unpack_from(stored)[0]]

    def without_expired(self, stored: bytes, now: int) -> bytes | None:
        """What is left of it at a time; None if nothing is."""
        assert self.ttl is not None
        return None if expired(STAMP.unpack_from(stored)[0], self.ttl, now) else stored

    def moved(self, stored: bytes) -> bytes | None:
        """What a merge of namespaces takes of what one of them stores; None if nothing of it counts."""
        return stored

    def merged(self, a: bytes, b: bytes) -> bytes | None:
        """Merge what two namespaces store, ``a`` first."""
        raise NotImplementedError

    # --- iterations ---

    @property
    def is_watched(self) -> bool:
        """True if somebody iterates over one of its collections."""
        return len(self._watches) > 0

    def changed(self, place: bytes | None) -> None:
        """Note that the collection there (None: every one) has other elements or keys now."""
        for watch in self._watches:
            if place is None or watch.place.startswith(place):
                watch.is_stale = True

    def watched(self, place: bytes, steps: Iterator[Any]) -> Iterator[Any]:
        """Yield ``steps``, but raise if the collection at a place changes in between."""
        watch = WatchedIterator(self._backend, place, steps)
        self._watches.add(watch)
        self._is_watched_from_now_on()  # type: ignore[attr-defined]
        return watch
