"""Backends in all the conditions that must not make a call dearer: small, and a hundred times as large."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from contract.samples import LastAdded

import statebackend as sb
from statebackend.checkpoint.files.posix import PosixCalls
from statebackend.testing import ManualClock

#: Keys that are there in every world: of these one with a large collection, and one that is emptied again and again.
KEYS, HOT, COLD = range(64), 7, 5
TTL = 1_000

_Visibility = sb.StateTtlConfig.StateVisibility


def _latest(old: Any, new: Any) -> Any:
    return new


class Values(NamedTuple):
    declared: Any
    value: Any


VALUES = {
    "LONG": Values(sb.types.LONG, 10**15),
    "STRING": Values(sb.types.STRING, "a text that is not short"),
    "ROW": Values(sb.types.of("struct<a:bigint,b:string>"), (7, "a text")),
    "PICKLE": Values(sb.types.PICKLE, ("an", "object")),
}

EVENT_TIME = sb.StateTtlConfig(
    TTL, ttl_time_characteristic=sb.StateTtlConfig.TtlTimeCharacteristic.EventTime, cleanup_idle=True
)
TIMES: dict[str, sb.StateTtlConfig | None] = {
    "for ever": None,
    "never": sb.StateTtlConfig(TTL, cleanup_idle=True),
    "never, kept": sb.StateTtlConfig(TTL, cleanup_in_background=False),
    "shown, kept": sb.StateTtlConfig(
        TTL, state_visibility=_Visibility.ReturnExpiredIfNotCleanedUp, cleanup_in_background=False
    ),
}

#: Types of values and times to live: not all pairs, but each with each kind of the other.
VARIANTS = [
    ("LONG", "for ever"),
    ("STRING", "for ever"),
    ("ROW", "for ever"),
    ("PICKLE", "for ever"),
    ("LONG", "never"),
    ("STRING", "never, kept"),
    ("ROW", "shown, kept"),
    ("LONG", "shown, kept"),
]


def _aggregate(name: str, declared: Any) -> Any:
    if declared is sb.types.LONG:
        return sb.AggregatingStateDescriptor(name, "avg", declared)
    latest = LastAdded()
    if declared is not sb.types.PICKLE:
        latest.result_type = declared
    return sb.AggregatingStateDescriptor(name, latest, declared, declared)


DESCRIPTORS: dict[str, Callable[[str, Any], Any]] = {
    "value": sb.ValueStateDescriptor,
    "list": sb.ListStateDescriptor,
    "map": lambda name, declared: sb.MapStateDescriptor(name, int, declared),
    "reducing": lambda name, declared: sb.ReducingStateDescriptor(
        name, "max" if declared in (sb.types.LONG, sb.types.STRING) else _latest, declared
    ),
    "aggregating": _aggregate,
    "folding": lambda name, declared: sb.FoldingStateDescriptor(
        name, next(each.value for each in VALUES.values() if each.declared is declared), _latest, declared
    ),
}


class World:
    """A backend with states of one kind or of several, and the keys that every world has."""

    def __init__(self, kinds: tuple[str, ...], values: str, time: str) -> None:
        self.values, self.time = VALUES[values], time
        self.value = self.values.value
        self.clock = ManualClock(TTL - 1)
        self.keyed: Any = sb.create_backend("heap", threads=1).create_keyed_backend(
            int, max_parallelism=16, clock=self.clock
        )
        self.states = {kind: self._made(kind) for kind in kinds}
        self.state = self.states[kinds[0]]
        #: What the world holds on to: marks, snapshots.
        self.held: list[Any] = []
        #: What may take memory.
        self.live = len(KEYS)
        self.rows = 16
        self._folder: Any = None
        self.store: Any = None
        self._checkpoint: Any = None
        self._columns: dict[int, Any] = {}
        self._in_event_time: Any = None

    def _made(self, kind: str) -> Any:
        descriptor = DESCRIPTORS[kind](kind, self.values.declared)
        ttl = TIMES[self.time]
        return self.keyed.get_state(descriptor if ttl is None else descriptor.enable_time_to_live(ttl))

    # --- what it is filled with ---

    def write(self, state: Any, number: int) -> None:
        kind = state.descriptor.kind
        if kind == "value":
            state.update(self.value)
        elif kind == "map":
            state.put(number, self.value)
        else:
            state.add(self.value)

    def fill(self, keys: Any, pieces: int = 1, first: int = 0) -> None:
        for key in keys:
            self.keyed.set_current_key(key)
            for state in self.states.values():
                if state.descriptor.kind in ("list", "map"):
                    for number in range(first, first + pieces):
                        self.write(state, number)
                else:
                    self.write(state, 0)

    def touch(self, number: int) -> None:
        self.fill([number % len(KEYS)])
        if "list" in self.states and number // len(KEYS) % 8 == 7:
            self.states["list"].update([self.value] * 4)

    def settle(self) -> None:
        for _ in range(20_000):
            self.keyed.set_current_key(COLD)
            for state in self.states.values():
                state.exists()

    def base(self) -> None:
        self.clock.set(TTL - 1)
        self.fill(KEYS, 4)
        self.clock.set(TTL)
        self.keyed.set_current_key(HOT)

    # --- what operations need ---

    @property
    def columns(self) -> tuple[Any, Any, Any]:
        if self.rows not in self._columns:
            keys = np.arange(self.rows) % len(KEYS)
            values = [self.value] * self.rows
            if self.values.declared is sb.types.LONG:
                values = pa.array(values, pa.int64())
            elif self.values.declared is sb.types.STRING:
                values = pa.array(values)
            self._columns[self.rows] = keys, keys % 4, values
        return self._columns[self.rows]

    @property
    def in_event_time(self) -> Any:
        """A second state of the first kind, whose time to live goes by the time of rows; made when it is needed."""
        if self._in_event_time is None:
            self.keyed.begin(watermarks=(None, TTL))
            kind = self.state.descriptor.kind
            descriptor = DESCRIPTORS[kind](f"{kind} in event time", self.values.declared)
            self._in_event_time = self.keyed.get_state(descriptor.enable_time_to_live(EVENT_TIME))
        return self._in_event_time

    def opened_store(self) -> Any:
        if self.store is None:
            self._folder = tempfile.TemporaryDirectory()
            self.store = sb.CheckpointStore(Path(self._folder.name) / "store")
            self.store.open_for_writing(key_type=int, max_parallelism=16)
        return self.store

    def folder(self, number: int) -> Path:
        self.opened_store()
        return Path(self._folder.name) / f"savepoint-{number}"

    def checkpoint(self) -> Any:
        if self._checkpoint is None:
            taken = self.keyed.snapshot(0, self.opened_store(), incremental=False).result()
            self._checkpoint = self.store.commit(0, [taken], now=self.clock.now())
        return self._checkpoint

    def close(self) -> None:
        for each in self.held:
            if hasattr(each, "version"):
                each.release()
        self.held.clear()
        self.keyed.close()
        if self.store is not None:
            self.store.close()
            self._folder.cleanup()


class Growth(NamedTuple):
    """Something that there may be much of, without any call becoming dearer."""

    name: str
    prepare: Callable[[World, int], None]
    small: int = 200
    large: int = 20_000
    #: Only where something can expire.
    expiring: bool = False
    #: Whether memory may follow it, as state that is there, or as what a mark or a snapshot needs.
    takes_memory: bool = False


def _open_marks(world: World, count: int) -> None:
    world.base()
    for number in range(count):
        world.held.append(world.keyed.mark())
        world.touch(number)


def _live_snapshots(world: World, count: int) -> None:
    world.base()
    for number in range(count):
        world.held.append(world.keyed.core.snapshot())
        world.touch(number)


def _marks_gone(world: World, count: int) -> None:
    world.base()
    for number in range(count):
        mark = world.keyed.mark()
        world.touch(number)
        if number % 2:
            world.keyed.rollback(mark)
        world.keyed.release(mark)


def _snapshots_gone(world: World, count: int) -> None:
    world.base()
    for number in range(count):
        view = world.keyed.core.snapshot()
        world.touch(number)
        if world.held:
            world.held.pop().release()
        world.held.append(view)
    world.held.pop().release()


def _expired_in_front(world: World, count: int) -> None:
    """Collections of one key begin with what has expired; of other kinds other keys have."""
    world.clock.set(0)
    if {"list", "map"} & set(world.states):
        world.fill([HOT], count, first=1_000)
    if set(world.states) - {"list", "map"}:
        world.fill(range(1_000, 1_000 + count))
    world.base()


def _expired_in_between(world: World, count: int) -> None:
    """Live and expired in turn, in the order in which they were first put."""
    world.clock.set(0)
    each = count // len(KEYS) + 1
    for key in KEYS:
        if "map" in world.states:
            world.fill([HOT], each, first=1_000 + each * key)
        world.fill([key], 4)
        if set(world.states) - {"list", "map"}:
            world.fill(range(1_000 + each * key, 1_000 + each * key + each))
    world.base()


def _gone(world: World, count: int) -> None:
    """Other keys, and other entries or elements of a key, were there."""
    world.fill([HOT], count, first=1_000)
    world.fill(range(1_000, 1_000 + count))
    for state in world.states.values():
        state.clear_many(np.arange(1_000, 1_000 + count))
        state.clear_many([HOT])
    world.base()


def _namespaces(world: World, count: int) -> None:
    for number in range(count):
        world.keyed.set_current_namespace(1 + number)
        world.fill([10 + number % 50])
    world.keyed.set_current_namespace(sb.VOID)
    world.live += count
    world.base()


def _namespaces_gone(world: World, count: int) -> None:
    _namespaces(world, count)
    for number in range(count):
        world.keyed.set_current_namespace(1 + number)
        world.keyed.set_current_key(10 + number % 50)
        for state in world.states.values():
            state.clear()
    world.keyed.set_current_namespace(sb.VOID)
    world.keyed.set_current_key(HOT)
    world.live -= count


def _timers(world: World, count: int) -> None:
    world.base()
    for number in range(count):
        world.keyed.set_current_key(number % len(KEYS))
        world.keyed.timers.register_event_time_timer(1_000_000 + number)
    world.keyed.set_current_key(HOT)
    world.live += count


def _timers_deleted(world: World, count: int) -> None:
    _timers(world, count)
    for number in range(count):
        world.keyed.set_current_key(number % len(KEYS))
        world.keyed.timers.delete_event_time_timer(1_000_000 + number)
    world.keyed.set_current_key(HOT)
    world.live -= count


def _keys(world: World, count: int) -> None:
    world.base()
    world.fill(range(1_000, 1_000 + count))
    world.keyed.set_current_key(HOT)
    world.live += count


def _collection(world: World, count: int) -> None:
    """A long list, a large map, beside what a call works on."""
    for kind in ("list", "map"):
        if kind not in world.states:
            world.states[kind] = world._made(kind)
    world.base()
    world.keyed.set_current_key(HOT)
    for number in range(count):
        world.write(world.states["list"], number)
        world.write(world.states["map"], 1_000 + number)
    world.live += 2 * count


def _rows(world: World, count: int) -> None:
    world.base()
    world.rows = count


#: The calls that came before under one open mark: each operation makes its own.
FORMER = Growth("former calls", lambda world, count: world.base(), takes_memory=True)
#: The rows of one call: the cost of a row.
ROWS = Growth("rows of a batch", _rows, large=5_000)

GROWTHS = [
    FORMER,
    ROWS,
    Growth("open marks", _open_marks, takes_memory=True),
    Growth("live snapshots", _live_snapshots, 3, 300, takes_memory=True),
    Growth("marks gone", _marks_gone),
    Growth("snapshots gone", _snapshots_gone, 20, 2_000),
    Growth("expired in front", _expired_in_front, expiring=True, takes_memory=True),
    Growth("expired in between", _expired_in_between, expiring=True, takes_memory=True),
    Growth("gone", _gone),
    Growth("namespaces", _namespaces),
    Growth("namespaces gone", _namespaces_gone),
    Growth("timers", _timers),
    Growth("timers deleted", _timers_deleted),
    Growth("keys", _keys),
    Growth("length of a collection", _collection),
]


def without_fsync(monkeypatch: Any) -> None:
    monkeypatch.setattr(PosixCalls, "sync", lambda self, descriptor: None)
