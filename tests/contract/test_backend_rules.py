"""The rules of backends: keys, key groups, names, closing, options, clocks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract.conftest import Keyed, MakeKeyed
from contract.samples import KINDS, Kind, last_of

import statebackend as sb
from statebackend import types as t
from statebackend.keys import key_encoder
from statebackend.state import KeyedListState
from statebackend.state.clocks import SystemClock
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)

#: One call of every scalar method of the handles, by kind, as its name and arguments.
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "value": [("value",), ("update", 1)],
    "list": [("get",), ("__iter__",), ("add", 1), ("add_all", [1]), ("update", [1])],
    "map": [
        *[(name, "k") for name in ("get", "__getitem__", "remove", "__delitem__", "contains")],
        *[(name,) for name in ("keys", "values", "items", "__iter__", "is_empty")],
        ("put", "k", 1),
        ("put_all", {"k": 1}),
    ],
    **{kind: [("get",), ("add", 1)] for kind in ("reducing", "aggregating", "folding")},
}
#: The same for the vectorised ones.
VECTORISED: dict[str, list[tuple[Any, ...]]] = {
    "value": [("get_many", [1]), ("update_many", [1], [1])],
    "map": [("get_many", [1], ["k"]), ("put_many", [1], ["k"], [1]), ("remove_many", [1], ["k"])],
    **{kind: [("get_many", [1]), ("add_many", [1], [1])] for kind in CALLS if kind not in ("value", "map")},
}


def refuse(state: Any, calls: list[Any], error: type[Exception], match: Any = None, **options: Any) -> None:
    for name, *arguments in calls:
        with pytest.raises(error, match=match):
            getattr(state, name)(*arguments, **options)


@every_kind
def test_handles_need_a_current_key(make_keyed: MakeKeyed, kind: Kind) -> None:
    keyed = make_keyed()
    state = keyed.get_state(kind.descriptor("s", t.LONG))
    refuse(state, [*CALLS[kind.name], ("clear",), ("exists",)], sb.UsageError, "set_current_key")
    for call in (lambda: keyed.current_key, keyed.clear_key):
        with pytest.raises(sb.UsageError, match="set_current_key"):
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
    mark = keyed.mark()
    keyed.close()
    keyed.close()
    refuse(state, [*CALLS[kind.name], ("clear",), ("exists",)], sb.ClosedError)
    for options in ({}, {"namespaces": ["n"]}):
        calls = [*VECTORISED[kind.name], ("clear_many", [1]), ("exists_many", [1])]
        refuse(state, calls, sb.ClosedError, **options)
    for steps in iterators:
        with pytest.raises(sb.ClosedError):
            next(steps)
    for use in (
        lambda: keyed.set_current_key(1),
        lambda: keyed.current_key,
        lambda: keyed.set_current_namespace(1),
        lambda: keyed.current_namespace,
        lambda: keyed.get_state(descriptor),
        lambda: keyed.get_value_state(sb.ValueStateDescriptor("x", int)),
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
        lambda: keyed.rollback(mark),
        lambda: keyed.begin(1),
        lambda: keyed.clear_current_key(),
        lambda: keyed.metrics(),
    ):
        with pytest.raises(sb.ClosedError):
            use()


def test_factories_are_picklable_and_keyed_backends_independent(backend: sb.StateBackend) -> None:
    again = pickle.loads(pickle.dumps(backend))
    assert type(again) is type(backend)
    with again.create_keyed_backend(int) as one, again.create_keyed_backend(int) as two:
        for number, keyed in enumerate((one, two)):
            keyed.set_current_key(1)
            keyed.get_value_state(sb.ValueStateDescriptor("s", int)).update(number)
        assert one.get_value_state(sb.ValueStateDescriptor("s", int)).value() == 0
    for keyed in (one, two):
        with pytest.raises(sb.ClosedError):
            keyed.set_current_key(1)


def test_key_groups(make_keyed: MakeKeyed) -> None:
    own = make_keyed("bigint", max_parallelism=8, key_group_range=sb.KeyGroupRange(2, 4))
    assert own.max_parallelism == 8
    assert own.key_group_range == sb.KeyGroupRange(2, 4)
    assert own.key_type == t.LONG
    inside = next(key for key in range(100) if key_encoder(int).key_group(key, 8) in range(2, 5))
    own.set_current_key(inside)
    for key in range(100):
        group = key_encoder(int).key_group(key, 8)
        if 2 <= group <= 4:
            own.set_current_key(key)
            inside = key
        else:
            with pytest.raises(sb.KeyGroupError, match=f"{group}"):
                own.set_current_key(key)
            assert own.current_key == inside


@pytest.mark.parametrize(
    "options",
    [
        {"max_parallelism": 0},
        {"max_parallelism": 32_769},
        {"max_parallelism": 1.0},
        {"max_parallelism": 4, "key_group_range": sb.KeyGroupRange(0, 4)},
        {"key_group_range": (0, 4)},
        {"clock": 5},
        {"clock": ManualClock},
        {"key_type": "array<int>"},
        {"key_type": t.PICKLE},
        {"key_type": dict[str, int]},
    ],
    ids=repr,
)
def test_bad_configuration_is_refused_when_made(backend: sb.StateBackend, options: dict[str, Any]) -> None:
    with pytest.raises(sb.UsageError):
        backend.create_keyed_backend(**{"key_type": "bigint", **options})


@every_kind
def test_the_same_name_is_the_same_state(keyed: Keyed, kind: Kind) -> None:
    state = keyed.get_state(kind.descriptor("s", t.LONG))
    kind.write(state, 7)
    again = keyed.get_state(kind.descriptor("s", t.LONG))
    assert again is state
    assert kind.read(again) == 7
    assert state.descriptor.name == "s"
    assert state.backend is keyed
    assert "'s'" in repr(state)


@every_kind
def test_another_kind_or_type_is_refused(keyed: Keyed, kind: Kind) -> None:
    state = keyed.get_state(kind.descriptor("s", t.LONG))
    kind.write(state, 7)
    for other in KINDS:
        for declared in (t.LONG, t.INT, t.STRING):
            if (other.name, declared) == (kind.name, t.LONG):
                continue
            with pytest.raises(sb.StateMigrationError) as raised:
                keyed.get_state(other.descriptor("s", declared))
            assert f"{kind.name.upper()}(" in str(raised.value)
            assert f"{other.name.upper()}(" in str(raised.value)
    assert kind.read(state) == 7


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (
            sb.ReducingStateDescriptor("s", "sum", int),
            sb.ReducingStateDescriptor("s", "max", int),
            "'sum'.*'max'",
        ),
        (sb.ReducingStateDescriptor("s", "sum", int), sb.ReducingStateDescriptor("s", last_of, int), "'sum'"),
        (
            sb.AggregatingStateDescriptor("s", "variance", int),
            sb.AggregatingStateDescriptor("s", "stddev", int),
            "'variance'.*'stddev'",
        ),
        (sb.MapStateDescriptor("s", str, int), sb.MapStateDescriptor("s", int, int), "STRING.*LONG"),
        (sb.MapStateDescriptor("s", str, int), sb.MapStateDescriptor("s", str, str), "LONG.*STRING"),
    ],
)
def test_another_function_or_key_type_is_refused(keyed: Keyed, first: Any, second: Any, named: str) -> None:
    keyed.get_state(first)
    with pytest.raises(sb.StateMigrationError, match=named):
        keyed.get_state(second)


def test_typed_getters(keyed: Keyed) -> None:
    table = [
        (keyed.get_value_state, sb.ValueStateDescriptor("v", int), sb.ValueState),
        (keyed.get_list_state, sb.ListStateDescriptor("l", int), KeyedListState),
        (keyed.get_list_state, sb.ListStateDescriptor("l", int), sb.ListState),
        (keyed.get_map_state, sb.MapStateDescriptor("m", int, int), sb.MapState),
        (keyed.get_reducing_state, sb.ReducingStateDescriptor("r", "sum", int), sb.ReducingState),
        (keyed.get_aggregating_state, sb.AggregatingStateDescriptor("a", "sum", int), sb.AggregatingState),
        (keyed.get_folding_state, sb.FoldingStateDescriptor("f", 0, last_of, int), sb.FoldingState),
    ]
    for getter, descriptor, handle in table:
        state = getter(descriptor)
        assert isinstance(state, handle)
        assert keyed.get_state(descriptor) is state
        for other in table:
            if other[0] != getter:
                with pytest.raises(sb.UsageError, match=type(descriptor).__name__):
                    other[0](descriptor)
        with pytest.raises(sb.UsageError):
            getter("v")
    with pytest.raises(sb.UsageError):
        keyed.get_state("v")


def test_changing_a_descriptor_later_changes_nothing(keyed: Keyed) -> None:
    descriptor = sb.ValueStateDescriptor("s", int)
    state = keyed.get_value_state(descriptor)
    descriptor.enable_time_to_live(sb.StateTtlConfig(1))
    assert state.descriptor.ttl_config is None
    with pytest.raises(sb.StateMigrationError, match="without time to live"):
        keyed.get_value_state(descriptor)


@pytest.mark.parametrize("budget", [-1, 1.5, None, True, "5", int])
def test_advance_takes_a_number_of_steps(keyed: Keyed, budget: Any) -> None:
    with pytest.raises(sb.UsageError, match="number of steps"):
        keyed.advance(budget)
    assert keyed.advance(2**70) == 0


class Telling:
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
    state = keyed.get_value_state(
        sb.ValueStateDescriptor("s", int).enable_time_to_live(sb.StateTtlConfig(10))
    )
    for clock.answer, found in [(0, None), (9, 7), (18, 7), (28, None)]:
        keyed.set_current_key(1)
        assert state.value() == found
        if clock.answer < 18:
            state.update(7)


@pytest.mark.parametrize("answer", [1.5, None, True, "1", 2**63, -(2**63) - 1], ids=repr)
def test_a_clock_that_gives_no_milliseconds_is_refused(make_keyed: MakeKeyed, answer: Any) -> None:
    clock = Telling(5)
    keyed = make_keyed(clock=clock)
    config = sb.StateTtlConfig(10, cleanup_idle=True)
    state = keyed.get_value_state(sb.ValueStateDescriptor("s", int).enable_time_to_live(config))
    keyed.set_current_key(1)
    state.update(7)
    keyed.timers.register_event_time_timer(1)
    clock.answer = answer
    calls: list[Callable[[], Any]] = [
        lambda: keyed.set_current_key(2),
        lambda: state.update_many([1], [2]),
        lambda: state.get_many([1]),
        lambda: keyed.advance(),
        lambda: list(keyed.timers.due(1)),
    ]
    for call in calls:
        with pytest.raises(sb.UsageError, match=r"answered .*Hint: it answers milliseconds"):
            call()
    clock.answer = 14
    assert keyed.current_key == 1
    assert keyed.timers.pending_event_time_timers() == [1]
    keyed.set_current_key(1)
    assert state.value() == 7


@pytest.mark.parametrize("now", [1_700_000_000_000_000_000, 2**63 - 1, -(2**63)])
def test_a_time_that_no_checkpoint_holds_is_refused(make_keyed: MakeKeyed, tmp_path: Path, now: int) -> None:
    """Nanoseconds, most likely."""
    clock = Telling(now)
    keyed = make_keyed(clock=clock)
    keyed.set_current_key(1)
    keyed.get_value_state(sb.ValueStateDescriptor("s", int)).update(7)
    with sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128) as store:
        for call in (lambda: keyed.snapshot(0, store), lambda: keyed.savepoint(str(tmp_path / "savepoint"))):
            with pytest.raises(sb.UsageError, match=r"further from 1970.*milliseconds"):
                call()
        assert not (tmp_path / "savepoint").exists()
        clock.answer = now // 1_000_000
        store.commit(0, [keyed.snapshot(0, store).result()])
        assert store.open(0).now == now // 1_000_000
