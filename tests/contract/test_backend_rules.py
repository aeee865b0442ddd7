"""The rules of backends: keys, key groups, names, closing, options, clocks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract.conftest import MakeKeyed
from contract.samples import KINDS, Kind, last_of

from statebackend import types as t
from statebackend.checkpoint import CheckpointStore
from statebackend.errors import ClosedError, KeyGroupError, StateMigrationError, UsageError
from statebackend.keys import key_encoder
from statebackend.keys.key_groups import KeyGroupRange
from statebackend.state import (
    AggregatingState,
    AggregatingStateDescriptor,
    FoldingState,
    FoldingStateDescriptor,
    KeyedListState,
    KeyedStateBackend,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    ReducingState,
    ReducingStateDescriptor,
    StateBackend,
    ValueState,
    ValueStateDescriptor,
)
from statebackend.state.clocks import SystemClock
from statebackend.state.ttl import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)

#: One call of every scalar method of the handles, by kind.
CALLS: dict[str, list[Any]] = {
    "value": [
        lambda s: s.value(),
        lambda s: s.update(1),
    ],
    "list": [
        lambda s: s.get(),
        lambda s: iter(s),
        lambda s: s.add(1),
        lambda s: s.add_all([1]),
        lambda s: s.update([1]),
    ],
    "map": [
        lambda s: s.get("k"),
        lambda s: s["k"],
        lambda s: s.put("k", 1),
        lambda s: s.put_all({"k": 1}),
        lambda s: s.remove("k"),
        lambda s: s.__delitem__("k"),
        lambda s: s.contains("k"),
        lambda s: s.keys(),
        lambda s: s.values(),
        lambda s: s.items(),
        lambda s: iter(s),
        lambda s: s.is_empty(),
    ],
}
for _kind in ("reducing", "aggregating", "folding"):
    CALLS[_kind] = [lambda s: s.get(), lambda s: s.add(1)]
for _calls in CALLS.values():
    _calls += [lambda s: s.clear(), lambda s: s.exists()]
#: The same for the vectorised ones.
VECTORISED: dict[str, list[Any]] = {
    "value": [lambda s: s.get_many([1]), lambda s: s.update_many([1], [1])],
    "list": [lambda s: s.get_many([1]), lambda s: s.add_many([1], [1])],
    "map": [
        lambda s: s.get_many([1], ["k"]),
        lambda s: s.put_many([1], ["k"], [1]),
        lambda s: s.remove_many([1], ["k"]),
    ],
}
for _kind in ("reducing", "aggregating", "folding"):
    VECTORISED[_kind] = [lambda s: s.get_many([1]), lambda s: s.add_many([1], [1])]
for _calls in VECTORISED.values():
    _calls += [lambda s: s.clear_many([1]), lambda s: s.exists_many([1])]


@every_kind
def test_handles_need_a_current_key(make_keyed: MakeKeyed, kind: Kind) -> None:
    keyed = make_keyed()
    state = keyed.get_state(kind.descriptor("s", t.LONG))
    for call in CALLS[kind.name]:
        with pytest.raises(UsageError, match="set_current_key"):
            call(state)
    for call in (lambda: keyed.current_key, keyed.clear_key):
        with pytest.raises(UsageError, match="set_current_key"):
            call()
    assert keyed.num_entries() == 0


@every_kind
def test_everything_raises_after_close(make_keyed: MakeKeyed, kind: Kind) -> None:
    descriptor = kind.descriptor("s", t.LONG)
    keyed = make_keyed()
    keyed.set_current_key(1)
    state = keyed.get_state(descriptor)
    kind.write(state, 1)
    iterators = [iter(state)] if kind.name in ("list", "map") else []
    keyed.close()
    keyed.close()
    for call in (*CALLS[kind.name], *VECTORISED[kind.name]):
        with pytest.raises(ClosedError):
            call(state)
    for steps in iterators:
        with pytest.raises(ClosedError):
            next(steps)
    for use in (
        lambda: keyed.set_current_key(1),
        lambda: keyed.current_key,
        lambda: keyed.set_current_namespace(1),
        lambda: keyed.current_namespace,
        lambda: keyed.get_state(descriptor),
        lambda: keyed.get_value_state(ValueStateDescriptor("x", int)),
        lambda: keyed.keys("s"),
        lambda: keyed.keys_of(["s"]),
        lambda: keyed.keys_and_namespaces("s"),
        lambda: keyed.apply_to_all_keys(descriptor, print),
        lambda: keyed.num_entries(),
        lambda: keyed.num_entries("s"),
        lambda: keyed.clear_key(),
        lambda: keyed.merge_namespaces(descriptor, 1, [2]),
        lambda: keyed.advance(),
        lambda: keyed.mark(),
        lambda: keyed.metrics(),
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_backend_is_a_context_manager(backend: StateBackend) -> None:
    with backend.create_keyed_backend(int) as keyed:
        keyed.set_current_key(1)
    with pytest.raises(ClosedError):
        keyed.set_current_key(1)


def test_factories_are_picklable_and_keyed_backends_independent(backend: StateBackend) -> None:
    again = pickle.loads(pickle.dumps(backend))
    assert type(again) is type(backend)
    with again.create_keyed_backend(int) as one, again.create_keyed_backend(int) as two:
        for number, keyed in enumerate((one, two)):
            keyed.set_current_key(1)
            keyed.get_value_state(ValueStateDescriptor("s", int)).update(number)
        assert one.get_value_state(ValueStateDescriptor("s", int)).value() == 0


def test_key_groups(make_keyed: MakeKeyed) -> None:
    own = make_keyed("bigint", max_parallelism=8, key_group_range=KeyGroupRange(2, 4))
    assert own.max_parallelism == 8
    assert own.key_group_range == KeyGroupRange(2, 4)
    assert own.key_type == t.LONG
    inside = next(key for key in range(100) if key_encoder(int).key_group(key, 8) in range(2, 5))
    own.set_current_key(inside)
    for key in range(100):
        group = key_encoder(int).key_group(key, 8)
        if 2 <= group <= 4:
            own.set_current_key(key)
            inside = key
        else:
            with pytest.raises(KeyGroupError, match=f"{group}"):
                own.set_current_key(key)
            assert own.current_key == inside


@pytest.mark.parametrize(
    "options",
    [
        {"max_parallelism": 0},
        {"max_parallelism": 32_769},
        {"max_parallelism": 1.0},
        {"max_parallelism": 4, "key_group_range": KeyGroupRange(0, 4)},
        {"key_group_range": (0, 4)},
        {"clock": 5},
        {"clock": ManualClock},
        {"key_type": "array<int>"},
        {"key_type": t.PICKLE},
        {"key_type": dict[str, int]},
    ],
    ids=repr,
)
def test_bad_configuration_is_refused_when_made(backend: StateBackend, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        backend.create_keyed_backend(**{"key_type": "bigint", **options})


def test_32768_key_groups(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed("bigint", max_parallelism=32_768)
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    state.update_many(range(100), range(100))
    assert sorted(keyed.keys("s")) == list(range(100))


# --- names ---


@every_kind
def test_the_same_name_is_the_same_state(keyed: KeyedStateBackend, kind: Kind) -> None:
    state = keyed.get_state(kind.descriptor("s", t.LONG))
    kind.write(state, 7)
    again = keyed.get_state(kind.descriptor("s", t.LONG))
    assert again is state
    assert kind.read(again) == 7
    assert state.descriptor.name == "s"
    assert state.backend is keyed
    assert "'s'" in repr(state)


@every_kind
def test_another_kind_or_type_is_refused(keyed: KeyedStateBackend, kind: Kind) -> None:
    state = keyed.get_state(kind.descriptor("s", t.LONG))
    kind.write(state, 7)
    for other in KINDS:
        for declared in (t.LONG, t.INT, t.STRING):
            if (other.name, declared) == (kind.name, t.LONG):
                continue
            with pytest.raises(StateMigrationError) as raised:
                keyed.get_state(other.descriptor("s", declared))
            assert f"{kind.name.upper()}(" in str(raised.value)
            assert f"{other.name.upper()}(" in str(raised.value)
    assert kind.read(state) == 7


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (ReducingStateDescriptor("s", "sum", int), ReducingStateDescriptor("s", "max", int), "'sum'.*'max'"),
        (ReducingStateDescriptor("s", "sum", int), ReducingStateDescriptor("s", last_of, int), "'sum'"),
        (
            AggregatingStateDescriptor("s", "variance", int),
            AggregatingStateDescriptor("s", "stddev", int),
            "'variance'.*'stddev'",
        ),
        (MapStateDescriptor("s", str, int), MapStateDescriptor("s", int, int), "STRING.*LONG"),
        (MapStateDescriptor("s", str, int), MapStateDescriptor("s", str, str), "LONG.*STRING"),
    ],
)
def test_another_function_or_key_type_is_refused(
    keyed: KeyedStateBackend, first: Any, second: Any, named: str
) -> None:
    keyed.get_state(first)
    with pytest.raises(StateMigrationError, match=named):
        keyed.get_state(second)


def test_typed_getters(keyed: KeyedStateBackend) -> None:
    table = [
        (keyed.get_value_state, ValueStateDescriptor("v", int), ValueState),
        (keyed.get_list_state, ListStateDescriptor("l", int), KeyedListState),
        (keyed.get_list_state, ListStateDescriptor("l", int), ListState),
        (keyed.get_map_state, MapStateDescriptor("m", int, int), MapState),
        (keyed.get_reducing_state, ReducingStateDescriptor("r", "sum", int), ReducingState),
        (keyed.get_aggregating_state, AggregatingStateDescriptor("a", "sum", int), AggregatingState),
        (keyed.get_folding_state, FoldingStateDescriptor("f", 0, last_of, int), FoldingState),
    ]
    for getter, descriptor, handle in table:
        state = getter(descriptor)
        assert isinstance(state, handle)
        assert keyed.get_state(descriptor) is state
        for other in table:
            if other[0] != getter:
                with pytest.raises(UsageError, match=type(descriptor).__name__):
                    other[0](descriptor)
        with pytest.raises(UsageError):
            getter("v")
    with pytest.raises(UsageError):
        keyed.get_state("v")


def test_changing_a_descriptor_later_changes_nothing(keyed: KeyedStateBackend) -> None:
    descriptor = ValueStateDescriptor("s", int)
    state = keyed.get_value_state(descriptor)
    descriptor.enable_time_to_live(StateTtlConfig(1))
    assert state.descriptor.ttl_config is None
    with pytest.raises(StateMigrationError, match="without time to live"):
        keyed.get_value_state(descriptor)


def test_advance_does_at_most_what_it_may(keyed: KeyedStateBackend) -> None:
    assert 0 <= keyed.advance() <= 1000
    assert 0 <= keyed.advance(budget=5) <= 5


@pytest.mark.parametrize("budget", [-1, 1.5, None, True, "5", int])
def test_advance_takes_a_number_of_steps(keyed: KeyedStateBackend, budget: Any) -> None:
    with pytest.raises(UsageError, match="number of steps"):
        keyed.advance(budget)
    assert keyed.advance(2**70) == 0


class Telling:
    """A clock that answers what it was given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def now(self) -> Any:
        return self.answer


class Set(SystemClock):
    """A clock that is derived from the machine's and tells another time."""

    answer = 0

    def now(self) -> int:
        return self.answer


def test_a_clock_derived_from_the_machines_is_asked(make_keyed: MakeKeyed) -> None:
    clock = Set()
    keyed = make_keyed(clock=clock)
    state = keyed.get_value_state(ValueStateDescriptor("s", int).enable_time_to_live(StateTtlConfig(10)))
    for clock.answer, found in [(0, None), (9, 7), (18, 7), (28, None)]:
        keyed.set_current_key(1)
        assert state.value() == found
        if clock.answer < 18:
            state.update(7)


@pytest.mark.parametrize("answer", [1.5, None, True, "1", 2**63, -(2**63) - 1], ids=repr)
def test_a_clock_that_gives_no_milliseconds_is_refused(make_keyed: MakeKeyed, answer: Any) -> None:
    clock = Telling(5)
    keyed = make_keyed(clock=clock)
    config = StateTtlConfig(10, cleanup_idle=True)
    state = keyed.get_value_state(ValueStateDescriptor("s", int).enable_time_to_live(config))
    keyed.set_current_key(1)
    state.update(7)
    keyed.timers.register(1)
    clock.answer = answer
    calls: list[Callable[[], Any]] = [
        lambda: keyed.set_current_key(2),
        lambda: state.update_many([1], [2]),
        lambda: state.get_many([1]),
        lambda: keyed.advance(),
        lambda: list(keyed.timers.due(1)),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"answered .*Hint: it answers milliseconds"):
            call()
    clock.answer = 14
    assert keyed.current_key == 1
    assert keyed.timers.pending() == [1]
    keyed.set_current_key(1)
    assert state.value() == 7


@pytest.mark.parametrize("now", [1_700_000_000_000_000_000, 2**63 - 1, -(2**63)])
def test_a_time_that_no_checkpoint_can_hold_is_refused_before_one_is_written(
    make_keyed: MakeKeyed, tmp_path: Path, now: int
) -> None:
    """Nanoseconds, most likely."""
    clock = Telling(now)
    keyed = make_keyed(clock=clock)
    keyed.set_current_key(1)
    keyed.get_value_state(ValueStateDescriptor("s", int)).update(7)
    with CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128) as store:
        for call in (lambda: keyed.snapshot(0, store), lambda: keyed.savepoint(str(tmp_path / "savepoint"))):
            with pytest.raises(UsageError, match=r"further from 1970.*milliseconds"):
                call()
        assert not (tmp_path / "savepoint").exists()
        clock.answer = now // 1_000_000
        store.commit(0, [keyed.snapshot(0, store).result()])
        assert store.open(0).now == now // 1_000_000
