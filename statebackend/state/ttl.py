"""Time to live: the expiry of state, its visibility after that, and its cleanup.

The rules of expiry. State expires at a time (`expired`), and a call uses two times. State that has expired by the
first, the time of the call, is not visible to it. Only state that has expired by the second too, is dead, and removed.
In processing time both are the clock's. In event time the first is the time of the row or timer at hand, and the second
is the watermark: a row that comes later with an earlier time still finds what this one does not see. `written_at` is
the timestamp of a write that builds on stored state. `_core/tables/expiry` holds the same rules in C.

>>> from datetime import timedelta
>>> config = StateTtlConfig.new_builder(timedelta(hours=1)).update_ttl_on_read_and_write().build()
>>> config == StateTtlConfig("1 hour", update_type=StateTtlConfig.UpdateType.OnReadAndWrite)
True
>>> expired(timestamp=0, ttl=10, now=9), expired(timestamp=0, ttl=10, now=10)
(False, True)
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import operator
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from statebackend.errors import usage
from statebackend.state.units import Duration, milliseconds

MAX_TIMESTAMP = 2**63 - 1
_MIN_TIMESTAMP = -(2**63)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_MILLISECOND = datetime.timedelta(milliseconds=1)

E = TypeVar("E", bound=enum.Enum)


def expiration_timestamp(timestamp: int, ttl: int) -> int:
    """The time at which something stamped ``timestamp`` expires, at most the largest 64-bit time; O(1)."""
    return timestamp + (min(ttl, MAX_TIMESTAMP - timestamp) if timestamp > 0 else ttl)


def expired(timestamp: int, ttl: int, now: int) -> bool:
    """Return True if something stamped ``timestamp`` has expired at ``now``: from ``timestamp + ttl`` on; O(1)."""
    return expiration_timestamp(timestamp, ttl) <= now


def newest_expired(ttl: int, now: int) -> int:
    """The newest timestamp that has expired at ``now``; all older ones have expired as well. O(1)."""
    return MAX_TIMESTAMP if now == MAX_TIMESTAMP else now - ttl


def written_at(timestamp: int | None, time: int, in_event_time: bool) -> int:
    """The timestamp of state that builds on what was stamped ``timestamp``, at ``time``; None: on nothing. O(1).

    Values that are added, merged or renewed by reads build on what is there. In event time they never become older.
    """
    return max(timestamp, time) if in_event_time and timestamp is not None else time


class IncrementalCleanup(NamedTuple):
    """Look at ``cleanup_size`` entries on every access of the state, and on every record if asked."""

    cleanup_size: int
    run_cleanup_for_every_record: bool


class RocksDBCleanup(NamedTuple):
    """Drop expired state when RocksDB compacts; at least every ``periodic_compaction_time`` milliseconds."""

    query_time_after_num_entries: int
    periodic_compaction_time: int


DEFAULT_INCREMENTAL_CLEANUP = IncrementalCleanup(5, False)
DEFAULT_ROCKSDB_CLEANUP = RocksDBCleanup(1000, 30 * 24 * 3_600_000)


class _UpdateType(enum.Enum):
    """The accesses that renew the timestamp of state."""

    Disabled = 0
    OnCreateAndWrite = 1
    OnReadAndWrite = 2


class _StateVisibility(enum.Enum):
    """The choice to return expired state that is still there, or never to."""

    ReturnExpiredIfNotCleanedUp = 0
    NeverReturnExpired = 1


class _TtlTimeCharacteristic(enum.Enum):
    """The clock that TTL uses."""

    ProcessingTime = 0
    EventTime = 1


for _enum in (_UpdateType, _StateVisibility, _TtlTimeCharacteristic):
    # Pickled and shown under the names that users write: StateTtlConfig.UpdateType.
    _enum.__name__ = _enum.__name__[1:]
    _enum.__qualname__ = f"StateTtlConfig.{_enum.__name__}"


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class StateTtlConfig:
    """The lifetime of state; immutable, comparable, picklable. The constructor checks everything.

    ``ttl`` is a duration: a `datetime.timedelta`, milliseconds, or a text such as ``"1 hour"``. With ``time="event"``
    it counts in event time. The keywords correspond to the methods of `Builder`:
    ``cleanup_incrementally=(5, True)``, ``cleanup_in_rocksdb_compact_filter=(1000,)`` or
    ``=(1000, timedelta(days=1))``, and ``cleanup_in_background=False`` for `Builder.disable_cleanup_in_background`.

    Two options go beyond Flink. With ``cleanup_idle=True``, `advance` removes expired state from memory that is not
    accessed. ``legacy_timestamp`` (milliseconds or an aware datetime; default: the time of the restart) is the
    timestamp for entries that were written without TTL, when it is turned on.

    >>> config = StateTtlConfig(1000, cleanup_full_snapshot=True)
    >>> config.ttl, config.state_visibility.name, config.cleanup_full_snapshot
    (1000, 'NeverReturnExpired', True)
    >>> StateTtlConfig(0)
    Traceback (most recent call last):
    statebackend.errors.UsageError: the duration is less than 1 ms (ttl). Hint: ...
    """

    UpdateType = _UpdateType
    StateVisibility = _StateVisibility
    TtlTimeCharacteristic = _TtlTimeCharacteristic
    #: No expiry at all: the setting of a descriptor before `enable_time_to_live`.
    DISABLED: ClassVar[StateTtlConfig]

    #: Milliseconds.
    ttl: int
    update_type: _UpdateType
    state_visibility: _StateVisibility
    ttl_time_characteristic: _TtlTimeCharacteristic
    cleanup_full_snapshot: bool
    #: As configured, or None; `incremental_cleanup` is the one in force.
    cleanup_incrementally: IncrementalCleanup | None
    #: As configured, or None; `rocksdb_cleanup` is the one in force.
    cleanup_in_rocksdb_compact_filter: RocksDBCleanup | None
    cleanup_in_background: bool
    cleanup_idle: bool
    legacy_timestamp: int | None

    def __init__(
        self,
        ttl: Duration,
        *,
        update_type: _UpdateType = _UpdateType.OnCreateAndWrite,
        state_visibility: _StateVisibility = _StateVisibility.NeverReturnExpired,
        ttl_time_characteristic: _TtlTimeCharacteristic | None = None,
        time: Literal["processing", "event"] | None = None,
        cleanup_full_snapshot: bool = False,
        cleanup_incrementally: tuple[int, bool] | None = None,
        cleanup_in_rocksdb_compact_filter: tuple[Any, ...] | None = None,
        cleanup_in_background: bool = True,
        cleanup_idle: bool = False,
        legacy_timestamp: datetime.datetime | int | None = None,
    ) -> None:
        checked = {
            "ttl": milliseconds("ttl", ttl),
            "update_type": _member("update_type", update_type, _UpdateType),
            "state_visibility": _member("state_visibility", state_visibility, _StateVisibility),
            "ttl_time_characteristic": _characteristic(ttl_time_characteristic, time),
            "cleanup_full_snapshot": _flag("cleanup_full_snapshot", cleanup_full_snapshot),
            "cleanup_incrementally": _incremental(cleanup_incrementally),
            "cleanup_in_rocksdb_compact_filter": _compact_filter(cleanup_in_rocksdb_compact_filter),
            "cleanup_in_background": _flag("cleanup_in_background", cleanup_in_background),
            "cleanup_idle": _flag("cleanup_idle", cleanup_idle),
            "legacy_timestamp": _timestamp("legacy_timestamp", legacy_timestamp),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def new_builder(ttl: Duration) -> Builder:
        """A builder with Flink's method names; each method returns the builder, so calls chain."""
        return Builder(ttl)

    Builder: ClassVar[type[Builder]]

    @property
    def is_enabled(self) -> bool:
        """True if state expires at all."""
        return self.update_type is not _UpdateType.Disabled

    @property
    def is_in_event_time(self) -> bool:
        """True if it uses event time."""
        return self.ttl_time_characteristic is _TtlTimeCharacteristic.EventTime

    @property
    def renews_on_read(self) -> bool:
        """True if reads renew timestamps."""
        return self.update_type is _UpdateType.OnReadAndWrite

    @property
    def shows_expired(self) -> bool:
        """True if reads return what has expired and is still there; never in event time: cuts of batches would show.

        >>> visibility = StateTtlConfig.StateVisibility.ReturnExpiredIfNotCleanedUp
        >>> in_event_time = StateTtlConfig.TtlTimeCharacteristic.EventTime
        >>> config = StateTtlConfig(1, state_visibility=visibility)
        >>> config.shows_expired
        True
        >>> StateTtlConfig(1, state_visibility=visibility, ttl_time_characteristic=in_event_time).shows_expired
        False
        """
        is_asked_for = self.state_visibility is _StateVisibility.ReturnExpiredIfNotCleanedUp
        return is_asked_for and not self.is_in_event_time

    @property
    def incremental_cleanup(self) -> IncrementalCleanup | None:
        """The incremental cleanup in force: the configured one, otherwise the default while cleanup is on."""
        default = DEFAULT_INCREMENTAL_CLEANUP if self.cleanup_in_background else None
        return self.cleanup_incrementally or default

    @property
    def rocksdb_cleanup(self) -> RocksDBCleanup | None:
        """The compaction filter in force: the configured one, otherwise the default while cleanup is on."""
        default = DEFAULT_ROCKSDB_CLEANUP if self.cleanup_in_background else None
        return self.cleanup_in_rocksdb_compact_filter or default

    def __repr__(self) -> str:
        shown = [f"{self.ttl}"]
        for name in ("update_type", "state_visibility", "ttl_time_characteristic"):
            shown.append(f"{name}={getattr(self, name).name}")
        return f"StateTtlConfig({', '.join(shown)})"


class Builder:
    """Collects the options of a `StateTtlConfig`, under Flink's names; get one from `new_builder`.

    >>> StateTtlConfig.new_builder(5).never_return_expired().build().ttl
    5
    """

    __slots__ = ("_options", "_ttl")

    def __init__(self, ttl: Duration) -> None:
        self._ttl: Any = ttl
        self._options: dict[str, Any] = {}

    def _with(self, **options: Any) -> Builder:
        self._options.update(options)
        return self

    def set_ttl(self, ttl: Duration) -> Builder:
        """Set the lifetime of state, a duration."""
        self._ttl = ttl
        return self

    def set_update_type(self, update_type: _UpdateType) -> Builder:
        """Set the accesses that renew the timestamp: a member of `StateTtlConfig.UpdateType`."""
        return self._with(update_type=update_type)

    def update_ttl_on_create_and_write(self) -> Builder:
        """Renew on every write (the default)."""
        return self.set_update_type(_UpdateType.OnCreateAndWrite)

    def update_ttl_on_read_and_write(self) -> Builder:
        """Renew on every write and on every read."""
        return self.set_update_type(_UpdateType.OnReadAndWrite)

    def set_state_visibility(self, state_visibility: _StateVisibility) -> Builder:
        """Set the visibility of expired state: a member of `StateTtlConfig.StateVisibility`."""
        return self._with(state_visibility=state_visibility)

    def never_return_expired(self) -> Builder:
        """Treat expired state as if it were not there (the default)."""
        return self.set_state_visibility(_StateVisibility.NeverReturnExpired)

    def return_expired_if_not_cleaned_up(self) -> Builder:
        """Return expired state as long as it is still there; in event time, the same as `never_return_expired`."""
        return self.set_state_visibility(_StateVisibility.ReturnExpiredIfNotCleanedUp)

    def set_ttl_time_characteristic(self, characteristic: _TtlTimeCharacteristic) -> Builder:
        """Set the clock: a member of `StateTtlConfig.TtlTimeCharacteristic`."""
        return self._with(ttl_time_characteristic=characteristic)

    def use_processing_time(self) -> Builder:
        """Go by processing time (the default)."""
        return self.set_ttl_time_characteristic(_TtlTimeCharacteristic.ProcessingTime)

    def cleanup_full_snapshot(self) -> Builder:
        """Leave expired state out of full snapshots and savepoints."""
        return self._with(cleanup_full_snapshot=True)

    def cleanup_incrementally(self, cleanup_size: int, run_cleanup_for_every_record: bool) -> Builder:
        """Look at this many entries on every access of the state, and on every record if asked."""
        return self._with(cleanup_incrementally=(cleanup_size, run_cleanup_for_every_record))

    def cleanup_in_rocksdb_compact_filter(
        self,
        query_time_after_num_entries: int,
        periodic_compaction_time: Duration = DEFAULT_ROCKSDB_CLEANUP[1],
    ) -> Builder:
        """Drop expired state when RocksDB compacts, reading the time once per so many entries."""
        options = (query_time_after_num_entries, periodic_compaction_time)
        return self._with(cleanup_in_rocksdb_compact_filter=options)

    def disable_cleanup_in_background(self) -> Builder:
        """Turn the default cleanup off: expired state goes when it is read, or by explicitly configured cleanup."""
        return self._with(cleanup_in_background=False)

    def build(self) -> StateTtlConfig:
        """The configuration, checked."""
        return StateTtlConfig(self._ttl, **self._options)


# --- checks ---


def _integer(option: str, value: Any, hint: str) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise usage.ttl(f"{option} is not a bool", detail=option, hint=hint)
    try:
        return operator.index(value)
    except TypeError:
        raise usage.ttl(
            f"{option} does not take a {type(value).__name__}", detail=option, hint=hint
        ) from None


def _member(option: str, value: Any, of: type[E]) -> E:
    if isinstance(value, of):
        return value
    known = ", ".join(f"{of.__qualname__}.{member.name}" for member in of)
    raise usage.ttl(
        f"{option} does not take a {type(value).__name__}", detail=option, hint=f"write one of {known}"
    )


def _characteristic(member: Any, time: Any) -> _TtlTimeCharacteristic:
    """The time that state expires by, given as a member of the enum or as a word."""
    by_word = {
        "processing": _TtlTimeCharacteristic.ProcessingTime,
        "event": _TtlTimeCharacteristic.EventTime,
    }
    if time is None:
        default = _TtlTimeCharacteristic.ProcessingTime if member is None else member
        return _member("ttl_time_characteristic", default, _TtlTimeCharacteristic)
    if time not in by_word:
        raise usage.ttl("time names no time", detail=f"time={time!r}", hint="write 'processing' or 'event'")
    if member not in (None, by_word[time]):
        raise usage.ttl(f"time={time!r} contradicts ttl_time_characteristic", hint="give one of them")
    return by_word[time]


def _flag(option: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise usage.ttl(
        f"{option} does not take a {type(value).__name__}", detail=option, hint="write True or False"
    )


def _parts(option: str, value: Any, lengths: tuple[int, ...], hint: str) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or len(value) not in lengths:
        raise usage.ttl(f"{option} does not take this", detail=f"a {type(value).__name__}", hint=hint)
    return tuple(value)


def _incremental(value: Any) -> IncrementalCleanup | None:
    if value is None:
        return None
    hint = "write (cleanup_size, run_cleanup_for_every_record), for example (5, False)"
    size, every_record = _parts("cleanup_incrementally", value, (2,), hint)
    size = _integer("cleanup_size", size, hint)
    if not 0 < size < 2**31:
        raise usage.ttl("cleanup_size must be positive, and less than 2**31", hint=hint)
    return IncrementalCleanup(size, _flag("run_cleanup_for_every_record", every_record))


def _compact_filter(value: Any) -> RocksDBCleanup | None:
    if value is None:
        return None
    option = "query_time_after_num_entries"
    hint = "write (query_time_after_num_entries,) or (query_time_after_num_entries, timedelta(days=30))"
    parts = _parts("cleanup_in_rocksdb_compact_filter", value, (1, 2), hint)
    entries = _integer(option, parts[0], hint)
    if not 0 < entries <= MAX_TIMESTAMP:
        raise usage.ttl(f"{option} must be positive", hint=hint)
    period = parts[1] if len(parts) == 2 else DEFAULT_ROCKSDB_CLEANUP.periodic_compaction_time
    return RocksDBCleanup(entries, milliseconds("periodic_compaction_time", period, least=0))


def _timestamp(option: str, value: Any) -> int | None:
    if value is None:
        return None
    hint = "write milliseconds since 1970-01-01 UTC as an int, or a datetime with a time zone"
    if isinstance(value, datetime.datetime):
        if value.utcoffset() is None:
            raise usage.ttl(f"{option} lacks a time zone", detail=option, hint=hint)
        return (value - _EPOCH) // _MILLISECOND
    number = _integer(option, value, hint)
    if not _MIN_TIMESTAMP <= number <= MAX_TIMESTAMP:
        raise usage.ttl(f"{option} does not fit in 64 bits", detail=option, hint=hint)
    return number


StateTtlConfig.Builder = Builder
StateTtlConfig.DISABLED = StateTtlConfig(MAX_TIMESTAMP, update_type=_UpdateType.Disabled)
