"""The interfaces of backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar, overload

from statebackend.errors import UsageError, usage
from statebackend.keys import ALL_NAMESPACES, VOID, KeyGroupRange
from statebackend.state.descriptors import (
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from statebackend.state.handles import (
    AggregatingState,
    FoldingState,
    KeyedListState,
    MapState,
    ReducingState,
    ValueState,
)
from statebackend.state.timers import Timers
from statebackend.types import ACC, IN, OUT, A, K as MapKey, T, Type, V

K = TypeVar("K", bound="KeyedStateBackend")
#: The watermarks before a batch and after it.
Watermarks: TypeAlias = tuple[int | None, int | None]


class StateBackend(ABC):
    """A factory of keyed and operator backends. It holds configuration only and is picklable.

    Its constructor takes the options of the backend, all of them as keywords.

    >>> from statebackend.backends import create_backend
    >>> create_backend("reference")
    ReferenceBackend()
    """

    #: The name under which it is registered.
    name: str
    #: True if maps iterate in the order in which their keys were put; False: in the order of their encoded keys.
    keeps_insertion_order: bool = True
    #: True if ``cleanup_incrementally`` has an effect: reads and writes remove what has expired elsewhere.
    cleans_up_incrementally: bool = True
    #: True if ``cleanup_in_rocksdb_compact_filter`` has one.
    cleans_up_in_compactions: bool = False

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """The reason why the backend cannot be used here, with the remedy; None if it can."""
        return None

    @classmethod
    def native_library(cls) -> dict[str, str | None] | None:
        """The library that it uses here, or would use: name, version, path, origin; None if it needs none.

        Loads nothing. Where it cannot be used, raises what `unavailable_reason` tells.
        """
        return None

    @abstractmethod
    def create_keyed_backend(
        self,
        key_type: Any,
        *,
        max_parallelism: int = 128,
        key_group_range: KeyGroupRange | None = None,
        clock: Any = None,
        restore: Any = (),
    ) -> KeyedStateBackend:
        """Make a keyed backend for keys of a type, serving a range of key groups (default: all).

        ``clock`` is any object with ``now() -> int``, in milliseconds; default: the machine's.

        >>> from statebackend.backends import create_backend
        >>> keyed = create_backend("reference").create_keyed_backend(int, max_parallelism=8)
        >>> keyed.key_group_range
        KeyGroupRange(0, 7)
        """

    @abstractmethod
    def create_operator_backend(
        self, *, subtask_index: int = 0, parallelism: int = 1, restore: Any = ()
    ) -> Any:
        """Make the `OperatorStateBackend` of one of ``parallelism`` instances."""


class StateGetters:
    """The methods that give a state for its descriptor: of any kind, and of each."""

    __slots__ = ()

    @overload
    def get_state(self, descriptor: ValueStateDescriptor[T, A]) -> ValueState[T, A]: ...
    @overload
    def get_state(self, descriptor: ListStateDescriptor[T]) -> KeyedListState[T]: ...
    @overload
    def get_state(self, descriptor: MapStateDescriptor[MapKey, V]) -> MapState[MapKey, V]: ...
    @overload
    def get_state(self, descriptor: ReducingStateDescriptor[T]) -> ReducingState[T]: ...
    @overload
    def get_state(self, descriptor: AggregatingStateDescriptor[IN, OUT]) -> AggregatingState[IN, OUT]: ...
    @overload
    def get_state(self, descriptor: FoldingStateDescriptor[IN, ACC]) -> FoldingState[IN, ACC]: ...
    @overload
    def get_state(self, descriptor: StateDescriptor) -> Any: ...
    def get_state(self, descriptor: Any) -> Any:
        """The state of a descriptor of any kind; the same name gives the same handle again. O(1).

        A name that another kind, type or time to live has taken raises `StateMigrationError`.
        """
        return self._state_of(descriptor)

    def _state_of(self, descriptor: Any) -> Any:
        raise NotImplementedError

    def _get(self, descriptor: Any, wanted: type[StateDescriptor]) -> Any:
        if not isinstance(descriptor, wanted):
            raise usage.descriptor(
                f"get_{wanted.kind}_state takes a {wanted.__name__}, not a {type(descriptor).__name__}",
                hint="get_state takes descriptors of all kinds",
            )
        return self.get_state(descriptor)

    def get_value_state(self, descriptor: ValueStateDescriptor[T, A]) -> ValueState[T, A]:
        """The value state of a descriptor."""
        state: ValueState[T, A] = self._get(descriptor, ValueStateDescriptor)
        return state

    def get_list_state(self, descriptor: ListStateDescriptor[T]) -> KeyedListState[T]:
        """The list state of a descriptor."""
        state: KeyedListState[T] = self._get(descriptor, ListStateDescriptor)
        return state

    def get_map_state(self, descriptor: MapStateDescriptor[MapKey, V]) -> MapState[MapKey, V]:
        """The map state of a descriptor."""
        state: MapState[MapKey, V] = self._get(descriptor, MapStateDescriptor)
        return state

    def get_reducing_state(self, descriptor: ReducingStateDescriptor[T]) -> ReducingState[T]:
        """The reducing state of a descriptor."""
        state: ReducingState[T] = self._get(descriptor, ReducingStateDescriptor)
        return state

    def get_aggregating_state(
        self, descriptor: AggregatingStateDescriptor[IN, OUT]
    ) -> AggregatingState[IN, OUT]:
        """The aggregating state of a descriptor."""
        state: AggregatingState[IN, OUT] = self._get(descriptor, AggregatingStateDescriptor)
        return state

    def get_folding_state(self, descriptor: FoldingStateDescriptor[IN, ACC]) -> FoldingState[IN, ACC]:
        """The folding state of a descriptor."""
        state: FoldingState[IN, ACC] = self._get(descriptor, FoldingStateDescriptor)
        return state


class KeyedStateBackend(StateGetters, ABC):
    """State of many keys: states by name, the current key and namespace, enumeration, marks.

    At most one call may be inside it at a time; different threads may use it one after the other. It is a context
    manager that closes it.

    >>> from statebackend.backends import create_backend
    >>> from statebackend.state import ListStateDescriptor
    >>> with create_backend("reference").create_keyed_backend(str) as keyed:
    ...     words = keyed.get_list_state(ListStateDescriptor("words", str))
    ...     keyed.set_current_key("a")
    ...     words.add("x")
    ...     list(keyed.keys("words"))
    ['a']
    """

    # --- what it is ---

    @property
    @abstractmethod
    def key_type(self) -> Type:
        """The type of keys."""

    @property
    @abstractmethod
    def max_parallelism(self) -> int:
        """The number of key groups that keys are spread over."""

    @property
    @abstractmethod
    def key_group_range(self) -> KeyGroupRange:
        """The key groups that this backend serves."""

    # --- the current key and namespace ---

    @abstractmethod
    def set_current_key(self, key: Any) -> None:
        """Make ``key`` the key that handles work on, and read the clock. O(1).

        Raises for a key of the wrong type or of a key group outside the range; the old key then stays current.
        """

    def each(self, keys: Any) -> Iterator[Any]:
        """Iterate over ``keys``, an iterable or an array, with each key as the current one in its turn.

        The memory that the next keys need is fetched ahead. So keys are taken from an iterator up to twelve before
        their turn. The last key stays current.

        >>> from statebackend.backends import create_backend
        >>> from statebackend.state import ValueStateDescriptor
        >>> with create_backend("heap").create_keyed_backend(str) as keyed:
        ...     count = keyed.get_value_state(ValueStateDescriptor("count", int))
        ...     for key in keyed.each(["a", "b", "a"]):
        ...         count.update((count.value() or 0) + 1)
        ...     count.get_many(["a", "b"]).to_pylist()
        [2, 1]
        """
        convert = getattr(keys, "to_pylist", None) or getattr(keys, "tolist", None)
        return self._each(keys if convert is None else convert())

    def _each(self, keys: Iterable[Any]) -> Iterator[Any]:
        for key in keys:
            self.set_current_key(key)
            yield key

    def clear_current_key(self) -> None:
        """Have no current key, as in the beginning. A backend without this method keeps the last one."""

    @property
    @abstractmethod
    def current_key(self) -> Any:
        """The current key, in its canonical form (-0.0 is 0.0); `UsageError` if none is set."""

    @abstractmethod
    def set_current_namespace(self, namespace: Any) -> None:
        """Make ``namespace`` the one that handles work in: ``VOID``, a `TimeWindow`, int, str, bytes, tuple.

        The namespace belongs to the backend, holds for all its handles, and stays when the key changes. O(1).
        """

    @property
    @abstractmethod
    def current_namespace(self) -> Any:
        """The current namespace; if you set none, it is ``VOID``."""

    # --- enumeration ---

    @abstractmethod
    def keys(self, name: str, namespace: Any = VOID) -> Iterator[Any]:
        """The keys that have this state at the time of the call, each once; leaves out expired ones.

        Pass ``ALL_NAMESPACES`` for the keys of all namespaces. The order is not defined. State may change while
        iterating: the keys are those at the call. A name that is not registered raises `UsageError`.
        """

    @abstractmethod
    def keys_of(self, names: Iterable[str], namespace: Any = VOID) -> Iterator[Any]:
        """The keys that have at least one of these states, each once; otherwise as `keys`."""

    @abstractmethod
    def keys_and_namespaces(self, name: str) -> Iterator[tuple[Any, Any]]:
        """Pairs of key and namespace that have this state; otherwise as `keys`."""

    @abstractmethod
    def apply_to_all_keys(
        self, descriptor: StateDescriptor, function: Callable[[Any, Any], Any], namespace: Any = VOID
    ) -> None:
        """Call ``function(key, state)`` for each key that has the state at the time of the call.

        Key and namespace are current meanwhile and restored afterwards, also if the function raises. Its changes up
        to then stay.
        """

    def _clear_state(self, descriptor: StateDescriptor) -> None:
        """Clear a state for all keys, in all namespaces."""
        self.apply_to_all_keys(descriptor, lambda _key, state: state.clear(), ALL_NAMESPACES)

    @abstractmethod
    def num_entries(self, name: str | None = None) -> int:
        """The number of (key, namespace) pairs that have the state, or the sum over all states.

        Counts expired ones that have not been cleaned up. An estimate on RocksDB.
        """

    # --- whole keys and namespaces ---

    @abstractmethod
    def clear_key(self) -> None:
        """Remove all states of the current key, in all namespaces."""

    @abstractmethod
    def merge_namespaces(self, descriptor: StateDescriptor, target: Any, sources: Iterable[Any]) -> None:
        """Merge the current key's state in the source namespaces into ``target``'s, in order.

        For list, reducing and aggregating states; others raise `UsageError`. It leaves the sources empty and skips
        absent ones. Atomic.
        """

    # --- time ---

    def begin(self, now: int | None = None, watermarks: Watermarks | None = None) -> None:
        """Begin a batch at a time: until the next call, values expire by ``now``, and no clock is read. O(1).

        None returns to the clock. A job calls this once per batch.

        ``watermarks`` are those before the batch and after it. With them, states with a time to live in event time use
        the time of rows. Values are read and stamped by the second until `set_event_time`, and by vectorised calls
        always. Only values that have expired by the first are removed: a later row with an earlier time, on time, still
        sees the rest. While a watermark is None, nothing expires by it. Without ``watermarks``, event time stays as it
        is. Until they are given, restored values use the watermark of their checkpoint, if it has one.

        A job refuses a time to live in event time on a backend that does not override both this and `set_event_time`:
        values would expire by the clock.
        """

    def set_event_time(self, time: int | None) -> None:
        """Let states in event time use ``time``, that of a row or a timer; None: nothing expires. O(1).

        Vectorised calls use the watermark after the batch nevertheless.
        """

    @property
    def has_timers(self) -> bool:
        """True if it has `timers`, which are optional."""
        return False

    @property
    def timers(self) -> Timers:
        """The timers of all keys; methods for a single timer work on the current key and namespace."""
        raise UsageError(f"{type(self).__name__} lacks timers", code="USAGE.NOT_AVAILABLE")

    @abstractmethod
    def advance(self, budget: int = 1000) -> int:
        """Do up to ``budget`` small steps of background work (cleanup, reclaiming); return how many were done.

        Results are right without it. Call it between batches.
        """

    # --- marks ---

    @abstractmethod
    def mark(self) -> Any:
        """Open a point to roll back to. O(1)."""

    @abstractmethod
    def rollback(self, mark: Any) -> None:
        """Return all states to where they were at ``mark``, timestamps included. O(changes since).

        ``mark`` and older ones stay valid; newer ones and open iterators do not. Handles stay valid; a state
        registered since then holds what was restored, or nothing. The current key and namespace stay as they are.
        """

    @abstractmethod
    def release(self, mark: Any) -> None:
        """Give up the possibility to roll back to ``mark``. Idempotent."""

    def count_changes(self, mark: Any) -> tuple[int, int] | None:
        """Count the rows put or written since ``mark`` that exist now, and the rows that existed then and are gone.

        A row is a value, a list or a map entry, as in ``metrics()["rows"]``. Optional: None if it is not known.
        """
        return None

    # --- checkpoints: optional; a backend without them keeps state in memory only ---

    def snapshot(self, checkpoint_id: int, store: Any, *, incremental: bool = True) -> Any:
        """Open a consistent view and write it in the background. Optional: raises if not supported."""
        raise UsageError(f"{type(self).__name__} writes no checkpoints", code="USAGE.NOT_AVAILABLE")

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Note that the checkpoint is committed; needed only if the store that committed it is in another process."""

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Note that the checkpoint will not be committed: the next one writes what it held."""

    def undeclared_states(self) -> list[str]:
        """The names of restored states that are not declared yet, sorted; they are kept and written again.

        The library's own states, such as timers, are not among them. O(their number).
        """
        return []

    def _restored_descriptor(self, name: str) -> StateDescriptor | None:
        """A descriptor that takes over a restored state as it is, which is not declared; None if there is none."""
        return None

    def savepoint(self, store_or_uri: Any) -> Any:
        """Write everything in the form that all backends read. Optional: raises if not supported."""
        raise UsageError(f"{type(self).__name__} writes no savepoints", code="USAGE.NOT_AVAILABLE")

    # --- the end ---

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Figures: at least ``entries``, and ``states`` with ``kind`` and ``entries`` by name.

        An entry is one key's share of a state; ``rows``, if present, counts each entry of a map.

        States with a time to live add ``expired_on_read``, ``expired_by_cleanup`` and ``oldest_timestamp``. If
        checkpoints are written, they also add ``expired_in_snapshots``: the values, list elements and map entries
        that full ones left out. Backends with timers add ``timers``, the number that wait in each domain, and
        ``timers_fired``. Counts begin with the backend.
        """

    def counts(self) -> dict[str, Any]:
        """The figures of `metrics` that the progress of each batch has, with the entries of each state by its name."""
        metrics = self.metrics()
        return {**metrics, "states": {name: each["entries"] for name, each in metrics["states"].items()}}

    @abstractmethod
    def close(self) -> None:
        """Drop everything; every later call except `close` raises `ClosedError`."""

    def __enter__(self: K) -> K:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # --- for handles ---

    @abstractmethod
    def _vectorised_call(self, canonical_keys: Sequence[Any]) -> AbstractContextManager[None]:
        """The context in which a vectorised method makes scalar calls.

        It checks the key groups of all keys first and reads the clock once. An error undoes the changes made inside.
        At the end it restores the current key and its time.
        """


def overrides(keyed: KeyedStateBackend, *names: str) -> bool:
    """True if a backend has these optional methods itself: the interface's do nothing."""
    return all(getattr(type(keyed), name, None) is not getattr(KeyedStateBackend, name) for name in names)
