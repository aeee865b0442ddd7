"""The shared part of keyed backends: registration, current key and namespace, enumeration, marks, closing."""

from __future__ import annotations

import copy
import operator
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

from statebackend.errors import ClosedError, KeyGroupError, UsageError, overlapping_call, usage
from statebackend.keys import (
    ALL_NAMESPACES,
    MAX_PARALLELISM,
    VOID,
    KeyGroupRange,
    decode_namespace,
    encode_namespace,
    key_encoder,
)
from statebackend.state import clocks
from statebackend.state.backend_interface import KeyedStateBackend, Watermarks
from statebackend.state.descriptors import StateDescriptor
from statebackend.state.handles import KeyedState
from statebackend.state.marks import MarkStack
from statebackend.state.timers import DOMAINS, RESERVED, Timers
from statebackend.state.ttl import StateTtlConfig
from statebackend.types import Type

Result = TypeVar("Result")

#: The event time while there is none: nothing has expired by then.
NO_TIME = -(2**63)
_MERGING = ("list", "reducing", "aggregating")
#: Represents all namespaces where an encoded one is expected.
ALL = None


def checked_range(max_parallelism: Any, key_group_range: Any) -> KeyGroupRange:
    """The range itself, or all key groups for None; checks that it lies within ``max_parallelism``."""
    if type(max_parallelism) is not int or not 1 <= max_parallelism <= MAX_PARALLELISM:
        raise usage.key_groups(f"max_parallelism is an int from 1 to {MAX_PARALLELISM}")
    if key_group_range is None:
        return KeyGroupRange(0, max_parallelism - 1)
    if not isinstance(key_group_range, KeyGroupRange):
        raise usage.key_groups(
            f"a {type(key_group_range).__name__} is not a range of key groups",
            hint="write KeyGroupRange(start, end), or key_groups.range_for(...)",
        )
    if key_group_range.end >= max_parallelism:
        raise usage.key_groups(
            "the range of key groups is larger than max_parallelism",
            detail=f"{key_group_range!r}, max_parallelism {max_parallelism}",
        )
    return key_group_range


def checked_budget(budget: Any) -> int:
    """Return the number of steps for `advance`; it must be a whole number and not negative."""
    try:
        steps = -1 if isinstance(budget, bool) else operator.index(budget)
    except TypeError:
        steps = -1
    if steps < 0:
        raise usage.argument("the budget is a number of steps, and not negative", hint="write advance(1000)")
    return min(steps, 2**62)


def _closed() -> ClosedError:
    return ClosedError("the backend is closed", hint="create another one")


def _event_time(time: int | None) -> int:
    return NO_TIME if time is None else clocks.checked_now(time)


class _Iteration:
    """An iterator over a generator. ``check_call`` raises where a step may not begin, which leaves it open."""

    def __init__(self, check_call: Callable[[], None], steps: Generator[Any, None, None]) -> None:
        self._check_call, self._steps = check_call, steps

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._check_call()
        return next(self._steps)

    def close(self) -> None:
        self._steps.close()


class WatchedIterator:
    """An open iterator over the collection at a place, which raises once the collection has changed."""

    def __init__(self, backend: BaseKeyedStateBackend, place: Any, steps: Iterator[Any]) -> None:
        self._backend = backend
        self._steps = steps
        self.place = place
        self.is_stale = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            self._backend._check_open()
        except ClosedError:
            raise ClosedError("the backend of this iterator is closed") from None
        if self.is_stale:
            raise RuntimeError("the state was changed while it was iterated")
        return next(self._steps)


class BaseKeyedStateBackend(KeyedStateBackend):
    """The shared part. A backend derives from it and writes the methods under "to be written".

    A compiled backend that keeps the key itself overrides `set_current_key`, `current_key`, `set_current_namespace`,
    `current_namespace`, `_save_key` and `_restore_key` together.

    The methods under "to be written" get keys in canonical form and namespaces encoded; `ALL` is None.
    """

    def __init__(
        self,
        key_type: Any,
        *,
        max_parallelism: int = 128,
        key_group_range: KeyGroupRange | None = None,
        clock: Any = None,
    ) -> None:
        self._encoder = key_encoder(key_type)
        self._key_group_range = checked_range(max_parallelism, key_group_range)
        self._max_parallelism = max_parallelism
        self._clock = clocks.checked_clock(clock)
        self._states: dict[str, KeyedState] = {}
        self._marks = MarkStack(type(self).__name__)
        self._closed = False
        #: The current key in canonical form (None: none is set), its group, and the time at which it was set.
        self._key: Any = None
        self._key_group = 0
        self._now = 0
        self._namespace = b""
        #: The time of the batch, or of the vectorised call, that is running. None: the clock tells.
        self._fixed_now: int | None = None
        #: The time that a given clock told the last operation that may have changed something. Never the machine's.
        self._worked_at: int | None = None
        #: The time that states in event time use: the time of the row or timer at hand. None: all states use one time.
        self._event_now: int | None = None
        #: The time by which they are cleaned up, and the watermark after the batch.
        self._event_cleaned = NO_TIME
        self._watermark: int | None = None
        self._timers: Timers | None = None
        #: Callables that run at the end of the outermost call.
        self._later: list[Callable[[], None]] = []
        self._process = os.getpid()

    #: Parts of calls during which other calls are refused.
    _calls_inside: int = 0
    #: Calls that may run the user's code, from begin to end.
    _under_way: int = 0
    #: The thread of both.
    _inside_thread: int = 0

    # --- to be written ---

    @abstractmethod
    def _create_state(self, descriptor: StateDescriptor) -> KeyedState:
        """Make a handle of a new, empty state. The descriptor is the backend's own copy."""

    @abstractmethod
    def _redeclare_state(self, state: KeyedState, descriptor: StateDescriptor) -> None:
        """Let ``descriptor``, of the same state, take effect: its default and its functions."""

    @abstractmethod
    def _canonical_keys(self, state: KeyedState, namespace: bytes | None) -> Iterable[Any]:
        """Canonical keys of unexpired entries in a namespace or in ALL; a key may occur more than once.

        Read at once: the result does not change when the state does.
        """

    @abstractmethod
    def _canonical_entries(self, state: KeyedState) -> Iterable[tuple[Any, bytes]]:
        """Canonical keys and encoded namespaces of unexpired entries, read at once."""

    @abstractmethod
    def _entry_count(self, state: KeyedState) -> int:
        """The number of (key, namespace) pairs stored, expired ones included."""

    @abstractmethod
    def _clear_key_in(self, states: list[Any]) -> None:
        """Remove the current key's entries in these states, in all namespaces."""

    @abstractmethod
    def _merge(self, state: KeyedState, target: bytes, sources: list[bytes]) -> None:
        """Merge namespaces of the current key. Runs inside a mark: an error undoes it."""

    @abstractmethod
    def _mark_point(self) -> Any:
        """The point that lets `_return_to` find back to this moment."""

    @abstractmethod
    def _return_to(self, point: Any) -> None:
        """Return all states to a point and invalidate open iterators."""

    @abstractmethod
    def _forget_point(self, point: Any) -> None:
        """Release a mark's point; ``len(self._marks)`` marks are left."""

    def _let_go(self) -> None:
        """Stop writer threads and the log of snapshots; the backend is closed next."""

    @abstractmethod
    def _drop_all(self) -> None:
        """Release everything; the backend is already closed."""

    # --- what it is ---

    @property
    def key_type(self) -> Type:
        return self._encoder.declared_type

    @property
    def max_parallelism(self) -> int:
        return self._max_parallelism

    @property
    def key_group_range(self) -> KeyGroupRange:
        return self._key_group_range

    def __repr__(self) -> str:
        what = "closed" if self._closed else f"{len(self._states)} states"
        return f"<{type(self).__name__} of {self.key_type!r}, {self._key_group_range!r}, {what}>"

    def _check_open(self) -> None:
        """Raise if the backend is closed, or another call is in progress; run what was deferred to its end."""
        if not self._closed:
            self._check_call()
        if self._closed:  # perhaps by a deferred `close`
            raise _closed()

    # --- calls: one at a time is inside (SPEC calls this "Threads and re-entry") ---

    def _check_call(self) -> None:
        """Raise if another call is in progress; run what was deferred to its end."""
        if self._calls_inside:
            raise overlapping_call()
        self._settle()

    def _settle(self) -> None:
        """Run what was deferred to the end of the outermost call."""
        while self._later and not self._under_way and not self._calls_inside:
            self._later.pop(0)()

    def _is_inside(self, own_writes: int = 0) -> bool:
        """Return True if a call is in progress on this thread; wait for one on another, for half a minute.

        ``own_writes`` of the writes under way are the caller's.
        """
        until = time.monotonic() + 30
        while self._calls_inside or self._under_way > own_writes:
            if self._inside_thread == threading.get_ident() or time.monotonic() > until:
                return True
            if self._process != os.getpid():  # a child lacks its parent's other threads
                return False
            time.sleep(0.0001)
        return False

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the user's inside a call: it may not call the backend."""
        self._inside_thread = (
            threading.get_ident()
        )  # first: an interrupt between the two leaves nothing counted
        self._calls_inside += 1
        try:
            return function(*arguments)
        finally:
            self._calls_inside -= 1

    def _run_alone(self, step: Callable[..., Result], *arguments: Any) -> Result:
        """Run a step that takes several changes, or many reads, to one moment: other calls are refused meanwhile."""
        try:
            result: Result = self._run(step, *arguments)
            return result
        finally:
            self._settle()

    def _call_each(
        self,
        keys: list[Any],
        namespaces: list[bytes] | None,
        times: list[int] | None,
        action: Callable[..., Any],
        columns: Sequence[Sequence[Any]],
        rows: Iterable[int] | None,
    ) -> list[Any]:
        """Call ``action(*values of the row)`` for each row, or each of ``rows``, in order; return its results.

        Meanwhile the row's key is current, and its namespace and time, if these are given. A compiled loop lets no
        signal handler run between the key of a row and its call.
        """
        results = []
        for row in range(len(keys)) if rows is None else rows:
            if times is not None:
                self._event_now = times[row]
            self.set_current_key(keys[row])
            if namespaces is not None:
                self._namespace = namespaces[row]
            results.append(action(*[column[row] for column in columns]))
        return results

    def _open_iteration(self, steps: Generator[Any, None, None]) -> Iterator[Any]:
        """An iterator over ``steps``, with `close`. Inside a call it refuses a step, and remains open."""
        return _Iteration(self._check_call, steps)

    def _do_later(self, deferred: Callable[[], None]) -> None:
        """Call ``deferred`` at the end of the outermost call."""
        self._later.append(deferred)

    # --- the current key and namespace ---

    def set_current_key(self, key: Any) -> None:
        self._check_open()
        canonical = self._encoder.encode(key)
        group = self._group_of(canonical)
        self._now = self._work_time()
        self._key, self._key_group = canonical, group

    def _group_of(self, canonical: Any) -> int:
        group = self._encoder.spark_hash(canonical) % self._max_parallelism
        own = self._key_group_range
        if not own.start <= group <= own.end:
            self.refuse_group(group)
        return group

    def refuse_group(self, group: int) -> NoReturn:
        """Raise: this key group is not served."""
        own = self._key_group_range
        raise KeyGroupError(
            "the key belongs to a key group that this backend does not serve",
            detail=f"key group {group}, served are {own.start} to {own.end}",
            hint="send it to the instance that operator_index_for(...) names",
        )

    def _time(self) -> int:
        return clocks.read(self._clock) if self._fixed_now is None else self._fixed_now

    def _work_time(self) -> int:
        """The time of an operation that may change something."""
        now = self._time()
        if type(self._clock) is not clocks.SystemClock:
            self._worked_at = now
        return now

    def begin(self, now: int | None = None, watermarks: Watermarks | None = None) -> None:
        self._check_open()
        fixed = None if now is None else clocks.checked_now(now)
        if watermarks is not None:
            before, after = watermarks
            cleaned, event_now = _event_time(before), _event_time(after)
            self._watermark = after
            self._event_cleaned, self._event_now = cleaned, event_now
            if self._timers is not None:
                self._timers._watermark = before
        self._fixed_now = fixed
        if fixed is not None:
            self._worked_at = fixed

    def set_event_time(self, time: int | None) -> None:
        self._check_open()
        if self._event_now is None:
            raise usage.no_event_time(
                "the backend lacks event time", hint="call begin(now, watermarks) first"
            )
        self._event_now = _event_time(time)

    def _by_watermark(self) -> int | None:
        """What vectorised calls use in event time; None if all states use one time."""
        return None if self._event_now is None else _event_time(self._watermark)

    def clear_current_key(self) -> None:
        self._check_open()
        self._key = None

    def _require_key(self) -> Any:
        self._check_open()
        return self._known_key()

    def _known_key(self) -> Any:
        if self._closed:
            raise _closed()
        if self._key is None:
            raise usage.no_key("no current key is set", hint="call set_current_key(key) first")
        return self._key

    @property
    def current_key(self) -> Any:
        self._settle()
        return self._encoder.decode(self._known_key())  # functions of the user's may ask for it too

    def set_current_namespace(self, namespace: Any) -> None:
        self._check_open()
        self._namespace = encode_namespace(namespace)

    @property
    def current_namespace(self) -> Any:
        self._settle()
        if self._closed:
            raise _closed()
        return decode_namespace(self._namespace)

    def _save_key(self) -> Any:
        """The current key, its time and the namespace, for `_restore_key`."""
        return self._key, self._key_group, self._now, self._namespace

    def _restore_key(self, saved: Any) -> None:
        """Return to the key that `_save_key` gave, without reading the clock; inside a call, at its end."""
        if self._calls_inside:
            self._do_later(partial(self._restore_key, saved))
            return
        self._key, self._key_group, self._now, self._namespace = saved

    # --- states ---

    def _state_of(self, descriptor: Any) -> Any:
        self._check_open()
        if not isinstance(descriptor, StateDescriptor):
            raise usage.descriptor(
                f"a state is asked for with a descriptor, not with a {type(descriptor).__name__}",
                hint='write for example ValueStateDescriptor("name", "bigint")',
            )
        state = self._states.get(descriptor.name)
        if state is None:
            if descriptor.name.startswith(RESERVED):
                raise usage.name(f"names of states do not begin with {RESERVED!r}", hint="use another name")
            self._check_time(descriptor)
            state = self._new_state(copy.copy(descriptor))
            self._states[descriptor.name] = state
            return state
        state.descriptor.check_same_state(descriptor)
        self._redeclare_state(state, copy.copy(descriptor))
        return state

    def _new_state(self, descriptor: StateDescriptor) -> KeyedState:
        """The handle of a state that is asked for the first time, with its restored contents."""
        return self._create_state(descriptor)

    def _check_time(self, descriptor: StateDescriptor) -> None:
        config = descriptor.ttl_config
        event_time = StateTtlConfig.TtlTimeCharacteristic.EventTime
        if config is None or config.ttl_time_characteristic is not event_time:
            return
        if isinstance(self._clock, clocks.SystemClock) and self._event_now is None:
            raise usage.no_event_time(
                "a time to live in event time needs a clock that the caller advances",
                detail=f"state {descriptor.name!r}",
                hint="give create_keyed_backend(clock=...) an object whose now() is the event time",
            )

    def _get(self, descriptor: Any, wanted: type[StateDescriptor]) -> Any:
        if not isinstance(descriptor, wanted):
            self._check_open()
        return super()._get(descriptor, wanted)

    def _registered(self, name: str) -> KeyedState:
        self._check_open()
        state = self._states.get(name)
        if state is None:
            known = ", ".join(map(repr, sorted(self._states))) or "none"
            raise UsageError(
                f"no state {name!r} is registered", code="USAGE.NO_STATE", hint=f"registered: {known}"
            )
        return state

    # --- enumeration ---

    def _at_one_time(self, read: Callable[[], Iterable[Any]]) -> list[Any]:
        """Collect ``read()`` at its own time, and leave the current key's time as it was."""
        saved = self._save_key()
        self._now = self._time()
        try:
            return list(read())
        finally:
            self._restore_key(saved)

    def keys(self, name: str, namespace: Any = VOID) -> Iterator[Any]:
        return self.keys_of((name,), namespace)

    def keys_of(self, names: Iterable[str], namespace: Any = VOID) -> Iterator[Any]:
        self._check_open()
        if isinstance(names, str):
            raise usage.argument("keys_of takes several names", hint="write keys(name) for one state")
        states = [self._registered(name) for name in names]
        encoded = ALL if namespace is ALL_NAMESPACES else encode_namespace(namespace)
        distinct: dict[Any, None] = {}
        for state in states:
            keys = self._at_one_time(partial(self._canonical_keys, state, encoded))
            distinct.update(dict.fromkeys(keys))
        return self._encoder.decode_each(distinct)

    def keys_and_namespaces(self, name: str) -> Iterator[tuple[Any, Any]]:
        state = self._registered(name)
        entries = self._at_one_time(partial(self._canonical_entries, state))
        return ((self._encoder.decode(key), decode_namespace(namespace)) for key, namespace in entries)

    def apply_to_all_keys(
        self, descriptor: StateDescriptor, function: Callable[[Any, Any], Any], namespace: Any = VOID
    ) -> None:
        state = self.get_state(descriptor)
        if not callable(function):
            raise usage.function("apply_to_all_keys needs a function (key, state)")
        pairs: Iterable[tuple[Any, Any]]
        if namespace is ALL_NAMESPACES:
            pairs = self.keys_and_namespaces(descriptor.name)
        else:
            pairs = ((key, namespace) for key in self.keys(descriptor.name, namespace))
        saved = self._save_key()
        try:
            for key, each_namespace in pairs:
                self.set_current_key(key)
                self.set_current_namespace(each_namespace)
                function(key, state)
        finally:
            if not self._closed:
                self._restore_key(saved)

    def _clear_state(self, descriptor: StateDescriptor) -> None:
        # At a time before all others: expired state goes too, or a longer time to live would bring it back.
        state = self.get_state(descriptor)
        saved, time_before, event_before = self._save_key(), self._fixed_now, self._event_now
        self._fixed_now = self._now = NO_TIME
        if event_before is not None:
            self._event_now = NO_TIME
        try:
            entries = list(self._canonical_entries(state))
        finally:
            self._fixed_now, self._event_now = time_before, event_before
            self._restore_key(saved)
        try:
            for key, namespace in entries:
                self.set_current_key(self._encoder.decode(key))
                self.set_current_namespace(decode_namespace(namespace))
                state.clear()
        finally:
            if not self._closed:
                self._restore_key(saved)

    def num_entries(self, name: str | None = None) -> int:
        self._check_open()
        if name is not None:
            return self._entry_count(self._registered(name))
        return sum(map(self._entry_count, self._states.values()))

    # --- whole keys and namespaces ---

    def clear_key(self) -> None:
        self._require_key()
        self._clear_key_in(list(self._states.values()))

    def merge_namespaces(self, descriptor: StateDescriptor, target: Any, sources: Iterable[Any]) -> None:
        state = self.get_state(descriptor)
        if descriptor.kind not in _MERGING:
            raise usage.state_kind(
                f"a {descriptor.kind} state cannot be merged across namespaces",
                detail=f"state {descriptor.name!r}",
                hint="list, reducing and aggregating states can",
            )
        self._require_key()
        if isinstance(sources, (str, bytes)):
            raise usage.argument("the sources of a merge are several namespaces", hint="give a list")
        encoded_target = encode_namespace(target)
        encoded = [encode_namespace(source) for source in sources or ()]
        if encoded:
            with self._undone_on_error():
                self._merge(state, encoded_target, encoded)

    # --- marks ---

    def mark(self) -> Any:
        self._check_open()
        return self._run_alone(lambda: self._marks.open(self._mark_point()))

    def rollback(self, mark: Any) -> None:
        self._check_open()
        self._run_alone(lambda: self._return_to(self._marks.back_to(mark)))

    def release(self, mark: Any) -> None:
        # A mark may always be released. Deferred, it would be released amid the end of another thread's call.
        if self._calls_inside and self._is_inside(self._under_way):
            self._do_later(partial(self.release, mark))
        elif not self._closed:
            self._run_alone(self._close_mark, mark)

    def _close_mark(self, mark: Any) -> None:
        if self._marks.release(mark):
            self._forget_point(mark.point)

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        before = len(self._marks)
        self._under_way += 1
        try:
            mark = self.mark()
            try:
                yield
            except BaseException:
                if not self._closed:
                    self.rollback(mark)
                raise
            finally:
                self.release(mark)
        except BaseException:
            # An interrupt may strike between a mark and its holder, or before it is released.
            if not self._closed:
                for lost in self._marks.newer_than(before):
                    self.release(lost)
                self._drop_lost_marks()
            raise
        finally:
            self._under_way -= 1
            self._settle()

    def _drop_lost_marks(self) -> None:
        """Release the remains of interrupted marks that are not open."""

    def _check_groups(self, canonical_keys: Sequence[Any]) -> None:
        """Raise if a key belongs to a key group that the backend does not serve."""
        for canonical in canonical_keys:
            self._group_of(canonical)

    @contextmanager
    def _vectorised_call(self, canonical_keys: Sequence[Any], now: int | None = None) -> Iterator[None]:
        """A vectorised call at ``now``, or at the time that the clock tells."""
        self._check_open()
        self._check_groups(canonical_keys)
        saved, time_before, event_before = self._save_key(), self._fixed_now, self._event_now
        self._under_way += 1
        try:
            self._fixed_now = self._work_time() if now is None else now
            self._event_now = self._by_watermark()
            with self._undone_on_error():
                yield
        finally:
            try:
                self._fixed_now, self._event_now = time_before, event_before
                if not self._closed:
                    self._restore_key(saved)
            finally:
                self._under_way -= 1
                self._settle()

    # --- time and the end ---

    @property
    def has_timers(self) -> bool:
        return self._timers is not None

    @property
    def timers(self) -> Timers:
        self._check_open()
        return super().timers if self._timers is None else self._timers

    def advance(self, budget: int = 1000) -> int:
        self._check_open()
        checked_budget(budget)
        return 0

    def metrics(self) -> dict[str, Any]:
        metrics = self.counts()
        metrics["states"] = {
            name: {"kind": self._states[name].descriptor.kind, "entries": entries}
            for name, entries in metrics["states"].items()
        }
        for name, state in self._states.items():
            if state.descriptor.ttl_config is not None:
                metrics["states"][name].update(self._expiry_metrics(state))
        return metrics

    def counts(self) -> dict[str, Any]:
        self._check_open()
        states = {name: self._entry_count(state) for name, state in self._states.items()}
        rows = sum(map(self._row_count, self._states.values()))
        metrics: dict[str, Any] = {"entries": sum(states.values()), "rows": rows, "states": states}
        if self._timers is not None:
            metrics["timers"] = {domain: self._timers.count(domain) for domain in DOMAINS}
            metrics["timers_fired"] = self._timers.fired
        return metrics

    def _row_count(self, state: KeyedState) -> int:
        """Count the values, lists and map entries of a state."""
        return self._entry_count(state)

    def _expiry_metrics(self, state: KeyedState) -> dict[str, Any]:
        """The figures of a state with a time to live: expired and remaining entries."""
        return {}

    def close(self) -> None:
        if self._is_inside():
            self._do_later(self.close)
        elif not self._closed:
            self._let_go()
            self._closed = True
            self._marks.close()
            self._drop_all()
            self._key = None
