"""The shared base of the reference backend's handles, and their storage: nested dicts of values that are replaced.

A table stores the following, with timestamps in milliseconds (0 without TTL):

* value, reducing, aggregating, folding: `StampedValue`, the serialised value and its timestamp;
* list: a tuple of `StampedValue`, one per element, never empty;
* map: a dict of `StampedValue` by canonical map key, in insertion order, never empty; ``data`` is None for None.
"""

from __future__ import annotations

import itertools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from statebackend.errors import SerializationError, SerializationTypeError
from statebackend.state import KeyedState, WatchedIterator, expired, written_at
from statebackend.types.serializers import TypeSerializer

if TYPE_CHECKING:
    from statebackend.backends.reference.reference_backend import ReferenceKeyedBackend


class EntryKey(NamedTuple):
    """The place of an entry: its key group, encoded namespace, and key in canonical form."""

    group: int
    namespace: bytes
    key: Any


class Journal:
    """Records what each write replaced, while marks are open."""

    def __init__(self) -> None:
        self.old: list[tuple[NestedTable, EntryKey, Any]] = []
        self.is_open = False

    def open(self) -> int:
        """Begin to record, if not begun; return the point to undo to."""
        self.is_open = True
        return len(self.old)

    def undo_to(self, point: int) -> None:
        """Restore what was there, newest first."""
        self.is_open = False
        while len(self.old) > point:
            table, at, stored = self.old.pop()
            if stored is None:
                table.remove(at)
            else:
                table.put(at, stored)
        self.is_open = True

    def before(self, point: int) -> dict[NestedTable, dict[EntryKey, Any]]:
        """The values that were there at the point, for all places written since, by table and place."""
        found: dict[NestedTable, dict[EntryKey, Any]] = {}
        for table, at, stored in self.old[point:]:
            found.setdefault(table, {}).setdefault(at, stored)
        return found

    def forget(self) -> None:
        """Forget everything: no mark is open any more."""
        self.is_open = False
        self.old.clear()


class NestedTable:
    """The entries of one state: key group → namespace → key → what is stored, which is never None."""

    def __init__(self, journal: Journal) -> None:
        self._groups: dict[int, dict[bytes, dict[Any, Any]]] = {}
        self._journal = journal

    def get(self, at: EntryKey) -> Any:
        return self._groups.get(at.group, {}).get(at.namespace, {}).get(at.key)

    def put(self, at: EntryKey, stored: Any) -> None:
        if self._journal.is_open:
            self._journal.old.append((self, at, self.get(at)))
        self._groups.setdefault(at.group, {}).setdefault(at.namespace, {})[at.key] = stored

    def load(self, at: EntryKey, stored: Any) -> None:
        """Store a value, or with None remove it, as if it had always been so: no journal records it."""
        was_open, self._journal.is_open = self._journal.is_open, False
        try:
            if stored is None:
                self.remove(at)
            else:
                self.put(at, stored)
        finally:
            self._journal.is_open = was_open

    def remove(self, at: EntryKey) -> None:
        """Remove the value there, and dicts that become empty."""
        stored = self.get(at)
        if stored is None:
            return
        if self._journal.is_open:
            self._journal.old.append((self, at, stored))
        namespaces = self._groups[at.group]
        keys = namespaces[at.namespace]
        del keys[at.key]
        if not keys:
            del namespaces[at.namespace]
        if not namespaces:
            del self._groups[at.group]

    def places_of_key(self, group: int, key: Any) -> list[EntryKey]:
        """The places where a key has entries, in all namespaces."""
        found = self._groups.get(group, {}).items()
        return [EntryKey(group, namespace, key) for namespace, keys in found if key in keys]

    def __iter__(self) -> Iterator[tuple[EntryKey, Any]]:
        for group, namespaces in self._groups.items():
            for namespace, keys in namespaces.items():
                for key, stored in keys.items():
                    yield EntryKey(group, namespace, key), stored

    def __len__(self) -> int:
        return sum(len(keys) for namespaces in self._groups.values() for keys in namespaces.values())


S = TypeVar("S")


class StampedValue(NamedTuple):
    """A serialised value and the time of its last write, or of its last read if reads renew it."""

    data: bytes | None
    timestamp: int


class ReferenceState(KeyedState, Generic[S]):
    """The base of all handles; ``S`` is the type that the table stores for a key."""

    def __init__(self, backend: ReferenceKeyedBackend, descriptor: Any) -> None:
        self._backend = backend
        self._descriptor = descriptor
        self.table = NestedTable(backend.journal)
        self._iterations: weakref.WeakSet[WatchedIterator] = weakref.WeakSet()
        config = descriptor.ttl_config
        self._ttl: int | None = None if config is None else config.ttl
        self._refreshes = config is not None and config.renews_on_read
        self._shows_expired = config is not None and config.shows_expired
        self._in_event_time = config is not None and config.is_in_event_time
        cleanup = None if config is None else config.incremental_cleanup
        self._cleanup_size = 0 if cleanup is None else cleanup.cleanup_size
        self._round: list[EntryKey] = []
        #: How much has expired, by the cause that removed it.
        self.expired_on_read = 0
        self.expired_by_cleanup = 0

    @property
    def descriptor(self) -> Any:
        return self._descriptor

    @property
    def backend(self) -> ReferenceKeyedBackend:
        return self._backend

    # --- places and time ---

    def _here(self) -> EntryKey:
        return self._backend.place()

    def _expired(self, stamped: StampedValue) -> bool:
        """Return True if it has expired by the time of the call: no read sees it, and no write builds on it."""
        return self._ttl is not None and expired(stamped.timestamp, self._ttl, self._now())

    def _dead(self, stamped: StampedValue) -> bool:
        """Return True if expiry may remove it. In event time, a row with an earlier time may still see the rest."""
        time = self._backend.event_cleaned if self._in_event_time else self._backend._now
        return self._ttl is not None and expired(stamped.timestamp, self._ttl, time)

    def _visible(self, stamped: StampedValue) -> bool:
        return self._shows_expired or not self._expired(stamped)

    def _stamp(self, data: bytes | None, on: int | None = None) -> StampedValue:
        """Stamp the call's writes; ``on`` is the timestamp of the value that it builds on."""
        return StampedValue(
            data, 0 if self._ttl is None else written_at(on, self._now(), self._in_event_time)
        )

    def _now(self) -> int:
        """The time by which it is read and stamped."""
        return self._backend.event_now if self._in_event_time else self._backend._now

    def _serialize(self, serializer: TypeSerializer, value: Any) -> bytes:
        if value is None:
            raise SerializationTypeError(
                "None cannot be stored here", code="SERIALIZATION.NULL", detail=self._where()
            )
        try:
            return self._backend._run(serializer.serialize, value)
        except SerializationError as error:
            raise error.at(self._where()) from None

    def _deserialize(self, serializer: TypeSerializer, data: bytes | None) -> Any:
        return self._backend._run(serializer.deserialize, data)

    def _where(self) -> str:
        return f"state {self._descriptor.name!r}"

    # --- cleaning up ---

    def accessed(self) -> None:
        """Begin a call. Look at the next few entries and remove what is dead; rounds repeat over all entries."""
        self._backend._check_call()
        if self._cleanup_size and not self._round:
            self._round = [at for at, _ in self.table]
        for at in self._round[: self._cleanup_size]:
            stored = self.table.get(at)
            if stored is not None:
                self.expired_by_cleanup += self.clean(at, stored, 2**63)
        del self._round[: self._cleanup_size]

    def clean(self, at: EntryKey, stored: S, budget: int) -> int:
        """Remove up to ``budget`` dead map entries, values, or lists with dead elements; return how many."""
        left, done = self.without_dead(stored, budget)
        if left is None:
            self.table.remove(at)
        elif done:
            self.table.put(at, left)
        return done

    def oldest_timestamp(self) -> int | None:
        found = [self._timestamps(stored) for _, stored in self.table]
        alive = [each for each in itertools.chain(*found) if not expired(each, self._ttl or 1, self._now())]
        return min(alive, default=None)

    # --- what each kind says about what it stores ---

    @abstractmethod
    def _any(self, stored: S, wanted: Callable[[StampedValue], bool]) -> bool:
        """Return True if one of the values, elements or entries satisfies ``wanted``."""

    @abstractmethod
    def without_dead(self, stored: S, budget: int = 2**63) -> tuple[S | None, int]:
        """Drop up to ``budget`` dead things; return the rest (None if nothing is left) and how many were dropped."""

    @abstractmethod
    def _timestamps(self, stored: S) -> Iterable[int]:
        """All timestamps in it."""

    def rows_of(self, stored: S | None) -> dict[Any, Any]:
        """The rows stored for a key: one, except for maps."""
        return {} if stored is None else {None: stored}

    def moved(self, stored: S) -> S | None:
        """The part of a stored value that a merge of namespaces takes; None if nothing of it counts."""
        return stored

    def merged(self, a: S, b: S) -> S | None:
        """Merge what two namespaces store, ``a`` first."""
        raise NotImplementedError

    # --- shared operations ---

    def exists(self) -> bool:
        stored = self.table.get(self._here())
        return stored is not None and self._any(stored, self._visible)

    def is_alive(self, stored: S) -> bool:
        return self._any(stored, lambda stamped: not self._expired(stamped))

    def clear(self) -> None:
        self.accessed()
        self.drop(self._here())

    def drop(self, at: EntryKey) -> None:
        """Remove what is stored there, at the user's request: open iterators end with an error."""
        if self.table.get(at) is not None:
            self.table.remove(at)
            self.changed(at)

    def changed(self, at: EntryKey | None) -> None:
        """Note that the collection there (None: every one) has other elements or keys now."""
        for iteration in self._iterations:
            if at is None or iteration.place == at:
                iteration.is_stale = True

    def watched(self, at: EntryKey, steps: Iterator[Any]) -> Iterator[Any]:
        """Yield ``steps``, but raise if the collection changes in between."""
        iteration = WatchedIterator(self._backend, at, steps)
        self._iterations.add(iteration)
        return iteration
