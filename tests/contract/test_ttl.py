"""Time to live: exact expiry, renewal, visibility, per element and per entry."""

from __future__ import annotations

from typing import Any

import pytest
from contract.conftest import MakeKeyed, in_order

from statebackend.errors import UsageError
from statebackend.keys import VOID
from statebackend.state import (
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    KeyedStateBackend,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateBackend,
    ValueStateDescriptor,
)
from statebackend.state.ttl import StateTtlConfig
from statebackend.testing import ManualClock
from statebackend.types import PICKLE

pytestmark = pytest.mark.checked

ON_READ = StateTtlConfig.UpdateType.OnReadAndWrite
SHOW = StateTtlConfig.StateVisibility.ReturnExpiredIfNotCleanedUp
TTL = 100


@pytest.fixture
def keyed(make_keyed: MakeKeyed) -> KeyedStateBackend:
    return make_keyed()


class At:
    """Sets the clock, then the current key: the time is read there."""

    def __init__(self, keyed: KeyedStateBackend, clock: ManualClock) -> None:
        self._keyed, self._clock = keyed, clock

    def __call__(self, now: int, key: int = 1) -> None:
        self._clock.set(now)
        self._keyed.set_current_key(key)


@pytest.fixture
def at(keyed: KeyedStateBackend, clock: ManualClock) -> At:
    return At(keyed, clock)


def with_ttl(descriptor: Any, **options: Any) -> Any:
    if options.get("state_visibility") is SHOW:  # whatever cleanup has not removed yet: let there be none
        options["cleanup_in_background"] = False
    return descriptor.enable_time_to_live(StateTtlConfig(TTL, **options))


def single(kind: str, **options: Any) -> Any:
    made = {
        "value": lambda: ValueStateDescriptor("s", int),
        "reducing": lambda: ReducingStateDescriptor("s", "sum", int),
        "aggregating": lambda: AggregatingStateDescriptor("s", "sum", int),
        "folding": lambda: FoldingStateDescriptor("s", 0, lambda old, new: old + new, int),
    }[kind]()
    return with_ttl(made, **options)


def write(state: Any, value: int) -> None:
    state.update(value) if state.descriptor.kind == "value" else state.add(value)


def read(state: Any) -> Any:
    return state.value() if state.descriptor.kind == "value" else state.get()


singles = pytest.mark.parametrize("kind", ["value", "reducing", "aggregating", "folding"])


@singles
def test_expiry_is_exact(keyed: KeyedStateBackend, at: At, kind: str) -> None:
    state = keyed.get_state(single(kind))
    at(0)
    write(state, 5)
    at(TTL - 1)
    assert read(state) == 5
    assert list(keyed.keys("s")) == [1]
    at(TTL)
    assert not state.exists()
    assert list(keyed.keys("s")) == []
    assert list(keyed.keys_and_namespaces("s")) == []
    assert keyed.num_entries("s") == 1
    assert read(state) is None
    assert keyed.num_entries("s") == 0


@singles
def test_reads_renew_if_asked_to(keyed: KeyedStateBackend, at: At, kind: str) -> None:
    for update_type, expected in ((ON_READ, 5), (StateTtlConfig.UpdateType.OnCreateAndWrite, None)):
        descriptor = single(kind, update_type=update_type)
        descriptor.name = update_type.name
        state = keyed.get_state(descriptor)
        at(0)
        write(state, 5)
        at(60)
        state.exists()
        keyed.num_entries()
        assert read(state) == 5
        at(120)
        assert read(state) == expected
        at(160)
        assert not keyed.get_state(descriptor).exists() or update_type is ON_READ
        at(219)
        assert read(state) == expected
        at(319)
        assert read(state) is None


@singles
def test_expired_may_be_seen_once_if_asked_to(keyed: KeyedStateBackend, at: At, kind: str) -> None:
    state = keyed.get_state(single(kind, state_visibility=SHOW, update_type=ON_READ))
    at(0)
    write(state, 5)
    at(TTL)
    assert state.exists()
    assert list(keyed.keys("s")) == []
    assert read(state) == 5
    assert read(state) is None
    assert not state.exists()


@singles
def test_an_expired_value_is_never_merged_into_new_input(keyed: KeyedStateBackend, at: At, kind: str) -> None:
    state = keyed.get_state(single(kind, state_visibility=SHOW))
    at(0)
    write(state, 5)
    at(TTL)
    write(state, 7)
    assert read(state) == 7
    at(2 * TTL - 1)
    assert read(state) == 7


def test_the_default_is_returned_with_ttl_too(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_value_state(with_ttl(ValueStateDescriptor("s", int, default=9)))
    at(0)
    assert state.value() == 9
    state.update(1)
    at(TTL)
    assert state.value() == 9


def test_adding_none_clears_with_ttl_too(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_reducing_state(single("reducing"))
    at(0)
    state.add(None)
    state.add(1)
    state.add(None)
    assert keyed.num_entries() == 0


def test_lists_expire_by_element(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_list_state(with_ttl(ListStateDescriptor("s", int)))
    at(0)
    state.add_all([1, 2])
    at(50)
    state.add(3)
    assert state.get() == list(state) == [1, 2, 3]
    at(TTL)
    assert state.get() == list(state) == [3]
    assert state.exists()
    at(TTL + 50)
    assert not state.exists()
    assert list(state) == []
    assert keyed.num_entries("s") == 0


def test_reading_a_list_renews_what_is_left(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_list_state(with_ttl(ListStateDescriptor("s", int), update_type=ON_READ))
    at(0)
    state.add(1)
    at(50)
    state.add(2)
    at(110)
    assert state.get() == [2]
    at(160)
    assert list(state) == [2]
    at(260)
    assert state.get() == []


def test_expired_elements_may_be_seen(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_list_state(with_ttl(ListStateDescriptor("s", int), state_visibility=SHOW))
    at(0)
    state.add(1)
    at(50)
    state.add(2)
    at(TTL)
    assert state.get() == state.get() == [1, 2]
    at(TTL + 50)
    assert state.get() == [1, 2]
    assert state.get() == []


def test_maps_expire_by_entry(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_map_state(with_ttl(MapStateDescriptor("s", str, int)))
    at(0)
    state.put_all({"a": 1, "b": None})
    at(50)
    state["c"] = 3
    at(TTL)
    assert state.get("a", 7) == 7
    assert "b" not in state
    with pytest.raises(KeyError):
        state["a"]
    assert list(state.items()) == [("c", 3)]
    assert not state.is_empty()
    at(TTL + 50)
    assert state.is_empty()
    assert not state.exists()
    assert list(keyed.keys("s")) == []
    assert list(state) == []
    assert keyed.num_entries("s") == 0


def test_reading_a_map_renews_what_is_read(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_map_state(with_ttl(MapStateDescriptor("s", str, int), update_type=ON_READ))
    at(0)
    state.put_all({"a": 1, "b": 2, "c": 3})
    at(60)
    assert state["a"] == 1
    assert "b" in state
    at(TTL)
    assert dict(state.items()) == {"a": 1, "b": 2}
    at(2 * TTL - 1)
    assert list(state) == ["a", "b"]


def test_expired_entries_may_be_seen_once(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_map_state(with_ttl(MapStateDescriptor("s", str, int), state_visibility=SHOW))
    at(0)
    state.put_all({"a": 1, "b": 2})
    at(TTL)
    assert not state.is_empty()
    assert state["a"] == 1
    assert state.get("a") is None
    assert list(state.items()) == [("b", 2)]
    assert state.is_empty()
    assert keyed.num_entries("s") == 0


def test_an_expired_entry_keeps_no_place(keyed: KeyedStateBackend, at: At, backend: StateBackend) -> None:
    state = keyed.get_map_state(with_ttl(MapStateDescriptor("s", str, int)))
    at(0)
    state["a"] = 1
    at(50)
    state["b"] = 2
    at(TTL)
    state["a"] = 3
    assert list(state.items()) == in_order(backend, [("b", 2), ("a", 3)], [("a", 3), ("b", 2)])


def test_reads_that_clean_up_do_not_disturb_iterators(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_map_state(with_ttl(MapStateDescriptor("s", str, int)))
    at(0)
    state.put_all({"a": 1, "b": 2})
    at(50)
    state.put_all({"c": 3, "d": 4})
    at(TTL)
    steps = iter(state)
    assert next(steps) == "c"
    assert "b" not in state
    assert list(steps) == ["d"]


@pytest.mark.parametrize(
    ("target_at", "source_at", "expected"), [(0, 50, 7), (50, 0, 5), (50, 60, 12), (0, 0, None)]
)
def test_merging_namespaces(
    keyed: KeyedStateBackend, at: At, target_at: int, source_at: int, expected: int | None
) -> None:
    descriptor = single("reducing")
    state = keyed.get_reducing_state(descriptor)
    for namespace, now, value in (("t", target_at, 5), ("s", source_at, 7)):
        at(now)
        keyed.set_current_namespace(namespace)
        state.add(value)
    at(120)
    keyed.merge_namespaces(descriptor, "t", ["s"])
    keyed.set_current_namespace("t")
    assert state.get() == expected
    at(120 + TTL - 1)
    assert state.get() == expected  # stamped anew by the merge
    at(120 + TTL)
    assert state.get() is None


def test_merged_lists_keep_their_timestamps(keyed: KeyedStateBackend, at: At) -> None:
    descriptor = with_ttl(ListStateDescriptor("s", int))
    state = keyed.get_list_state(descriptor)
    for namespace, now in (("t", 50), ("s", 0)):
        at(now)
        keyed.set_current_namespace(namespace)
        state.add(now)
    at(60)
    keyed.merge_namespaces(descriptor, "t", ["s"])
    keyed.set_current_namespace("t")
    assert state.get() == [50, 0]
    at(TTL)
    assert state.get() == [50]


def test_rollback_returns_timestamps(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_value_state(single("value", update_type=ON_READ))
    at(0)
    state.update(1)
    mark = keyed.mark()
    at(90)
    assert state.value() == 1
    keyed.rollback(mark)
    at(99)
    mark = keyed.mark()
    assert state.exists()
    at(TTL)
    assert state.value() is None
    keyed.rollback(mark)
    at(99)
    assert state.value() == 1


def test_vectorised_calls_have_one_now(backend: StateBackend) -> None:
    class Running:
        calls = 0

        def now(self) -> int:
            self.calls += 1
            return self.calls

    clock = Running()
    running = backend.create_keyed_backend(int, clock=clock)
    state = running.get_value_state(single("value"))
    state.update_many([1, 2, 3], [1, 2, 3])
    assert clock.calls == 1
    assert state.get_many([1, 2, 3]).to_pylist() == [1, 2, 3]
    assert clock.calls == 2
    running.set_current_key(1)
    state.value()
    state.update(1)
    assert clock.calls == 3
    running.close()


def test_vectorised_reads_expire_and_renew(keyed: KeyedStateBackend, at: At, clock: ManualClock) -> None:
    state = keyed.get_value_state(single("value", update_type=ON_READ))
    clock.set(0)
    state.update_many([1, 2], [1, 2])
    clock.set(50)
    assert state.get_many([1]).to_pylist() == [1]
    clock.set(TTL)
    assert state.exists_many([1, 2]).to_pylist() == [True, False]
    assert state.get_many([1, 2]).to_pylist() == [1, None]
    assert keyed.num_entries() == 1


def test_a_clock_going_backwards(keyed: KeyedStateBackend, at: At) -> None:
    state = keyed.get_value_state(single("value"))
    at(1000)
    state.update(1)
    at(0)
    assert state.value() == 1
    state.update(2)
    at(TTL)
    assert state.value() is None


def test_idle_state_leaves_memory_in_advance(keyed: KeyedStateBackend, at: At) -> None:
    idle = with_ttl(MapStateDescriptor("idle", str, int), cleanup_idle=True)
    kept = with_ttl(ValueStateDescriptor("kept", int))
    counts, value = keyed.get_map_state(idle), keyed.get_value_state(kept)
    for key in (1, 2, 3):
        at(key, key)
        counts["a"] = 1
        value.update(1)
    keyed.set_current_namespace("n")
    counts["z"] = 1
    keyed.set_current_namespace(VOID)
    at(TTL + 2, key=9)
    assert keyed.advance() == 2
    assert keyed.num_entries("idle") == 2
    assert keyed.num_entries("kept") == 3
    at(TTL + 3, key=9)
    assert keyed.advance(budget=1) == 1
    assert keyed.advance(budget=1) == 1
    assert keyed.advance() == 0
    assert keyed.num_entries("idle") == 0
    assert keyed.current_key == 9


def test_event_time_needs_a_clock_that_is_advanced(backend: StateBackend) -> None:
    descriptor = with_ttl(
        ValueStateDescriptor("s", int),
        ttl_time_characteristic=StateTtlConfig.TtlTimeCharacteristic.EventTime,
    )
    with (
        backend.create_keyed_backend(int) as keyed,
        pytest.raises(UsageError, match=r"event time.*'s'.*clock="),
    ):
        keyed.get_state(descriptor)
    with backend.create_keyed_backend(int, clock=ManualClock()) as keyed:
        keyed.get_state(descriptor)


@pytest.mark.parametrize("read", ["get", "contains", "items"])
def test_a_read_that_renews_does_not_give_away_what_a_mark_needs(
    keyed: KeyedStateBackend, at: At, read: str
) -> None:
    config = StateTtlConfig(TTL, update_type=ON_READ)
    state = keyed.get_map_state(MapStateDescriptor("m", int, PICKLE).enable_time_to_live(config))
    at(1_000)
    state.put(1, [1, 2])
    mark = keyed.mark()
    at(1_050)
    if read == "contains":
        assert 1 in state
    held = dict(state.items())[1] if read == "items" else state.get(1)
    held.append(99)
    state.put(1, held)
    keyed.rollback(mark)
    at(1_060)
    assert state.get(1) == [1, 2]


def test_a_list_is_renewed_at_any_time(keyed: KeyedStateBackend, at: At) -> None:
    """Also one millisecond before 1970."""
    state = keyed.get_list_state(with_ttl(ListStateDescriptor("s", int), update_type=ON_READ))
    at(-50)
    state.add(7)
    at(-1)
    assert list(state.get()) == [7]
    at(TTL - 10)
    assert list(state.get()) == [7]
