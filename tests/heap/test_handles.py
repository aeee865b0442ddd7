"""What handles remember, and what happens when the user's code calls back into them."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import statebackend as sb
from statebackend import types as t
from statebackend._core.core_probe import rows_in
from statebackend._core.memory import arena
from statebackend.backends import available_backends
from statebackend.backends.heap import HeapBackend
from statebackend.errors import ClosedError, KeyGroupError, SerializationTypeError, UsageError
from statebackend.keys import VOID
from statebackend.keys.key_groups import KeyGroupRange
from statebackend.state import (
    AggregateFunction,
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from statebackend.state.ttl import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

PICKLE = t.PICKLE
released_build_only = pytest.mark.skipif(
    arena.is_checked_build(), reason="the checked build refuses calls from inside a call"
)


@pytest.fixture
def keyed() -> Iterator[Any]:
    with HeapBackend().create_keyed_backend(int, max_parallelism=2) as made:
        made.set_current_key(1)
        yield made


# --- remembered slots ------------------------------------------------------------------------------------------------


def test_what_a_handle_remembers_holds_through_everything_that_moves_entries(
    keyed: Any, rng: random.Random
) -> None:
    """Two states, three namespaces, and between any two calls whatever can move, free or replace an entry."""
    states = [
        keyed.get_value_state(ValueStateDescriptor(f"s{n}", declared)) for n, declared in ((0, int), (1, str))
    ]
    model: dict[Any, Any] = {}
    marks: list[Any] = []
    views: list[Any] = []
    where = (1, VOID)
    for step in range(20_000):
        number = rng.randrange(2)
        state, at = states[number], (number, *where)
        action = rng.randrange(40)
        if action < 12:
            value: Any = step if number == 0 else f"text {step}"
            state.update(value)
            model[at] = value
        elif action < 24:
            assert state.value() == model.get(at)
        elif action < 26:
            assert state.exists() == (at in model)
        elif action < 28:
            state.clear()
            model.pop(at, None)
        elif action < 34:
            where = (rng.randrange(300), where[1])
            keyed.set_current_key(where[0])
        elif action < 36:
            where = (where[0], rng.choice([VOID, "n", 7]))
            keyed.set_current_namespace(where[1])
        elif action == 36:
            views.append(keyed.core.snapshot())
            if len(views) > 2:
                views.pop(rng.randrange(3)).release()
        elif action == 37:
            keyed.advance()
        elif action == 38 and len(marks) < 3:
            marks.append((keyed.mark(), dict(model)))
        elif marks:
            mark, before = marks.pop()
            if rng.random() < 0.5:
                keyed.rollback(mark)
                model = before
            keyed.release(mark)
    for view in views:
        view.release()
    for state in states:
        for table in state._tables():
            table._check()
    assert keyed.num_entries() == len(model)


def test_a_batch_between_two_calls_is_seen(keyed: Any) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    state.update(1)
    state.update_many([1, 2], [10, 20])
    assert state.value() == 10
    state.clear_many([1])
    assert state.value() is None
    state.update(3)
    assert state.get_many([1]).to_pylist() == [3]


def test_reads_of_a_growing_map_move_entries_and_find_them(keyed: Any) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    view = None
    for key in range(5_000):
        keyed.set_current_key(key)
        state.update(key)
        if key == 3_000:
            view = keyed.core.snapshot()
        other = key * 7919 % (key + 1)
        keyed.set_current_key(other)
        assert state.value() == other
        state.update(other)
        assert state.value() == other
    assert view is not None
    assert len(rows_in(view, state.plain)) == 3_001
    view.release()
    state.plain._check()


# --- functions that call back ----------------------------------------------------------------------------------------


class Calling(AggregateFunction):
    """Sums, and calls something before it does."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def create_accumulator(self) -> Any:
        return 0

    def add(self, value: Any, accumulator: Any) -> Any:
        self._call()
        return accumulator + value

    def get_result(self, accumulator: Any) -> Any:
        return accumulator

    def merge(self, a: Any, b: Any) -> Any:
        return a + b


def adding_states(keyed: Any, call: Callable[[], Any]) -> list[Any]:
    def add(old: int, new: int) -> int:
        call()
        return old + new

    return [
        keyed.get_reducing_state(ReducingStateDescriptor("reducing", add, int)),
        keyed.get_aggregating_state(AggregatingStateDescriptor("aggregating", Calling(call), int, int)),
        keyed.get_folding_state(FoldingStateDescriptor("folding", 0, add, int)),
    ]


# --- finalisers ------------------------------------------------------------------------------------------------------


class Ends:
    """An object that does something when it ends."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __del__(self) -> None:
        with contextlib.suppress(ClosedError):
            self.act()

    def __deepcopy__(self, memo: Any) -> Ends:
        return Ends(self.act)


ENDINGS: dict[str, Callable[[Any, Any], Any]] = {
    "value-update": lambda keyed, end: keyed.get_value_state(ValueStateDescriptor("v", PICKLE)).update(end),
    "map-put": lambda keyed, end: keyed.get_map_state(MapStateDescriptor("m", int, PICKLE)).put(1, end),
    "list-update": lambda keyed, end: keyed.get_list_state(ListStateDescriptor("l", PICKLE)).update(
        [end, end]
    ),
}
AWAY: dict[str, Callable[[Any], Any]] = {
    "value-update": lambda keyed: keyed.get_value_state(ValueStateDescriptor("v", PICKLE)).update(1),
    "map-put": lambda keyed: keyed.get_map_state(MapStateDescriptor("m", int, PICKLE)).put(1, 1),
    "list-update": lambda keyed: keyed.get_list_state(ListStateDescriptor("l", PICKLE)).update([1]),
}


@released_build_only
@pytest.mark.parametrize("what", ENDINGS)
@pytest.mark.parametrize("how", ["overwrite", "clear_key", "rollback", "close"])
@pytest.mark.parametrize("act", ["other key", "same place", "close", "clear all"])
def test_finalisers_may_do_anything(what: str, how: str, act: str) -> None:
    keyed = HeapBackend().create_keyed_backend(int, max_parallelism=2)
    keyed.set_current_key(1)
    numbers = keyed.get_value_state(ValueStateDescriptor("n", int))
    ended = []

    def end() -> None:
        ended.append(act)
        if act == "close":
            keyed.close()
        elif act == "other key":
            keyed.set_current_key(7)
            numbers.update(7)
        elif act == "same place":
            keyed.set_current_key(1)
            AWAY[what](keyed)
        else:
            for key in range(20):
                keyed.set_current_key(key)
                keyed.clear_key()

    for key in range(20):
        keyed.set_current_key(key)
        ENDINGS[what](keyed, 0)
    keyed.set_current_key(1)
    mark = keyed.mark() if how == "rollback" else None
    ENDINGS[what](keyed, Ends(end))
    assert not ended
    try:
        if how == "overwrite":
            AWAY[what](keyed)
        elif how == "clear_key":
            keyed.clear_key()
        elif how == "rollback":
            keyed.rollback(mark)
        else:
            keyed.close()
        while keyed.core.advance(1 << 20):
            pass
    except ClosedError:
        pass
    gc.collect()
    assert ended
    if not keyed._closed:
        for state in keyed._states.values():
            for table in state._tables():
                table._check()
    keyed.close()


def test_objects_are_dropped_exactly_once(keyed: Any) -> None:
    thing = object()
    before = sys.getrefcount(thing)
    value = keyed.get_value_state(ValueStateDescriptor("v", PICKLE))
    counts = keyed.get_map_state(MapStateDescriptor("m", int, PICKLE))
    things = keyed.get_list_state(ListStateDescriptor("l", PICKLE))
    for _ in range(3):
        value.update(thing)
        counts.put_all({1: thing, 2: thing})
        things.update([thing, thing])
        things.add(thing)
    assert sys.getrefcount(thing) == before + 6
    mark, view = keyed.mark(), keyed.core.snapshot()
    value.update(1)
    counts.clear()
    things.clear()
    keyed.rollback(mark)
    keyed.clear_key()
    keyed.release(mark)
    view.release()
    while keyed.core.advance(1000):
        pass
    assert sys.getrefcount(thing) == before


# --- the aliasing rule -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["value", "map", "list", "folding"])
def test_a_change_that_is_stored_is_undone_with_its_batch(keyed: Any, kind: str) -> None:
    def append(old: list[int], new: int) -> list[int]:
        old.append(new)
        return old

    state = keyed.get_state(
        {
            "value": ValueStateDescriptor("s", PICKLE),
            "map": MapStateDescriptor("s", int, PICKLE),
            "list": ListStateDescriptor("s", PICKLE),
            "folding": FoldingStateDescriptor("s", [], append, PICKLE),
        }[kind]
    )

    def read() -> Any:
        if kind == "value":
            return state.value()
        if kind == "map":
            return state.get(1)
        return state.get()

    def change(number: int) -> None:
        if kind == "folding":
            state.add(number)
            return
        things = read()
        if kind == "list":
            things[0].append(number)
        else:
            things.append(number)
        if kind == "map":
            state.put(1, things)
        else:
            state.update(things)

    if kind != "folding":
        state.update([[0]] if kind == "list" else [0]) if kind != "map" else state.put(1, [0])
    else:
        state.add(0)
    before = repr(read())
    for _ in range(2):
        mark, view = keyed.mark(), keyed.core.snapshot()
        for number in (1, 2):
            change(number)
        table = state.plain_map.entries if kind == "map" else state.plain
        assert next(iter(rows_in(view, table).values())) == ([[0]] if kind == "list" else [0])
        keyed.rollback(mark)
        keyed.release(mark)
        view.release()
        assert repr(read()) == before


# --- iterators -------------------------------------------------------------------------------------------------------


def test_a_list_that_comes_back_the_same_is_another(keyed: Any) -> None:
    state = keyed.get_list_state(ListStateDescriptor("l", int))
    state.update([1, 2, 3])
    steps = iter(state)
    next(steps)
    state.clear()
    state.update([1, 2, 3])
    with pytest.raises(RuntimeError):
        next(steps)


def test_a_map_that_comes_back_the_same_is_another(keyed: Any) -> None:
    state = keyed.get_map_state(MapStateDescriptor("m", int, int))
    state.put_all({1: 1, 2: 2})
    steps = state.items()
    next(steps)
    state.clear()
    state.put_all({1: 1, 2: 2})
    with pytest.raises(RuntimeError):
        next(steps)


@pytest.mark.parametrize("declared", [t.LONG, t.STRING, PICKLE, t.LIST(t.LONG)], ids=repr)
def test_iterators_go_on_while_everything_else_changes(keyed: Any, declared: t.Type) -> None:
    samples: list[Any] = {
        "LONG": list(range(60)),
        "STRING": [str(n) for n in range(60)],
        "PICKLE": [[n] for n in range(60)],
    }.get(declared.name, [[n] for n in range(60)])
    words = keyed.get_list_state(ListStateDescriptor("l", declared))
    counts = keyed.get_map_state(MapStateDescriptor("m", str, declared))
    words.update(samples)
    counts.put_all({str(n): sample for n, sample in enumerate(samples)})
    view, seen, pairs = keyed.core.snapshot(), [], []
    for number, (word, pair) in enumerate(zip(words, counts.items(), strict=True)):
        seen.append(word)
        pairs.append(pair)
        keyed.set_current_key(number + 2)
        words.add(samples[0])
        counts.put("x", samples[0])
        keyed.set_current_key(1)
        counts.put(str(59 - number), samples[59 - number])
        if number == 30:
            view.release()
            keyed.mark()
    assert seen == samples
    assert pairs == [(str(n), sample) for n, sample in enumerate(samples)]


def test_iterators_outlive_nothing(keyed: Any) -> None:
    words = keyed.get_list_state(ListStateDescriptor("l", str))
    counts = keyed.get_map_state(MapStateDescriptor("m", str, str).enable_time_to_live(StateTtlConfig(1000)))
    words.update(["a", "b"])
    counts.put_all({"a": "x", "b": "y"})
    steps = [iter(words), counts.items(), counts.keys()]
    for each in steps:
        next(each)
    keyed.close()
    for each in steps:
        with pytest.raises(ClosedError):
            next(each)


def test_a_map_expires_under_an_iterator_of_another_key() -> None:
    clock = ManualClock()
    with HeapBackend().create_keyed_backend(int, clock=clock) as keyed:
        keyed.set_current_key(1)
        counts = keyed.get_map_state(
            MapStateDescriptor("m", int, int).enable_time_to_live(
                StateTtlConfig(100, cleanup_in_background=False)
            )
        )
        counts.put_all({n: n for n in range(4)})
        steps = counts.items()
        assert next(steps) == (0, 0)
        clock.set(50)
        keyed.set_current_key(2)
        counts.put(9, 9)
        assert next(steps) == (1, 1)
        clock.set(100)
        keyed.set_current_key(2)
        assert list(steps) == []
        assert (keyed.current_key, dict(counts.items())) == (2, {9: 9})
        keyed.set_current_key(1)
        assert counts.is_empty()
        assert keyed.num_entries() == 2  # what was visited before it expired is still there
        assert list(counts) == []
        assert keyed.num_entries() == 1


def test_a_map_that_expired_wholly_ends_its_iterators_and_one_that_was_cleared_does_not() -> None:
    clock = ManualClock()
    with HeapBackend().create_keyed_backend(int, clock=clock) as keyed:
        counts = keyed.get_map_state(
            MapStateDescriptor("m", int, int).enable_time_to_live(StateTtlConfig(100))
        )
        iterators = {}
        for key in (1, 2):
            keyed.set_current_key(key)
            counts.put_all({1: 1, 2: 2})
            iterators[key] = counts.items()
            next(iterators[key])
        keyed.set_current_key(2)
        counts.clear()
        clock.set(100)
        keyed.set_current_key(1)
        assert 1 not in counts
        assert 2 not in counts
        assert keyed.num_entries() == 0
        assert list(iterators[1]) == []
        with pytest.raises(RuntimeError):
            next(iterators[2])


# --- keys ------------------------------------------------------------------------------------------------------------


def test_integer_keys_at_the_ends_of_their_widths() -> None:
    for declared, bits in (("bigint", 64), ("int", 32), ("smallint", 16), ("tinyint", 8)):
        with HeapBackend().create_keyed_backend(declared) as keyed:
            state = keyed.get_value_state(ValueStateDescriptor("s", declared))
            ends = [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 0, -1]
            for key in ends:
                keyed.set_current_key(key)
                state.update(key)
            for key in ends:
                keyed.set_current_key(key)
                assert state.value() == key
            for beyond in (2 ** (bits - 1), -(2 ** (bits - 1)) - 1, 2**80, -(2**80)):
                with pytest.raises(OverflowError):
                    keyed.set_current_key(beyond)
                with pytest.raises(OverflowError):
                    state.update(beyond)
            with pytest.raises(SerializationTypeError):
                keyed.set_current_key(True)
            assert keyed.current_key == -1


# --- keys ---


def test_keys_of_other_instances_may_lie_ahead() -> None:
    part = KeyGroupRange(3, 3)
    with HeapBackend().create_keyed_backend(int, max_parallelism=8, key_group_range=part) as keyed:
        state = keyed.get_value_state(ValueStateDescriptor("s", int))
        own = 0
        run = keyed.each(range(10**9, 10**9 + 4_000))
        while True:
            try:
                key = next(run)
            except KeyGroupError:
                continue
            except StopIteration:
                break
            state.update(key)
            own += 1
        assert keyed.num_entries() == own > 0


def test_a_failed_key_leaves_the_old_one(keyed: Any) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    state.update(5)
    for wrong in ("x", None, 1.5, 2**70):
        with pytest.raises((SerializationTypeError, OverflowError)):
            keyed.set_current_key(wrong)
        assert state.value() == 5


def test_text_keys_live_as_long_as_they_are_current() -> None:
    with HeapBackend().create_keyed_backend(str) as keyed:
        state = keyed.get_value_state(ValueStateDescriptor("s", int))
        for number in range(1000):
            keyed.set_current_key(f"key-é-{number}")
            gc.collect() if number % 250 == 0 else None
            state.update(number)
        assert keyed.current_key == "key-é-999"
        assert sorted(keyed.keys("s")) == sorted(f"key-é-{number}" for number in range(1000))


# --- the machine's clock ---------------------------------------------------------------------------------------------


def test_the_time_is_that_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with HeapBackend().create_keyed_backend(int) as keyed:
        state = keyed.get_value_state(
            ValueStateDescriptor("s", int).enable_time_to_live(StateTtlConfig(1_000_000))
        )
        keyed.set_current_key(1)
        state.update(1)
        first = keyed._now
        assert abs(first / 1000 - __import__("time").time()) < 60
        while keyed._time() == first:
            pass
        assert keyed._now == first  # read once for each key
        keyed.set_current_key(2)
        assert keyed._now > first


# --- whether it is there ---------------------------------------------------------------------------------------------


def test_without_the_extension_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "statebackend._core.handles.map_handle", None)
    found = available_backends()["heap"]
    assert not found.is_available
    assert "setup.py build_ext" in str(found.reason)
    from statebackend.errors import BackendUnavailableError

    with pytest.raises(BackendUnavailableError, match="not built"):
        HeapBackend().create_keyed_backend(int)


def test_metrics_say_what_each_state_takes(keyed: Any) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    for key in range(1000):
        keyed.set_current_key(key)
        state.update(key)
    view = keyed.core.snapshot()
    keyed.set_current_key(5)
    state.update(6)
    metrics = keyed.metrics()
    assert metrics["states"]["s"]["entries"] == metrics["entries"] == 1000
    assert metrics["states"]["s"]["entry_bytes"] >= 24_000
    assert metrics["states"]["s"]["copied_entries"] >= 1
    assert metrics["snapshots"]
    assert metrics["extent_bytes"] >= 2 << 20
    view.release()


def test_a_mark_of_another_backend_changes_nothing(keyed: Any) -> None:
    state = keyed.get_value_state(ValueStateDescriptor("s", int))
    state.update(1)
    with HeapBackend().create_keyed_backend(int) as other, pytest.raises(UsageError):
        keyed.rollback(other.mark())
    assert state.value() == 1


def test_a_backend_that_nobody_holds_goes_with_its_handles_and_iterators() -> None:
    keyed: Any = HeapBackend().create_keyed_backend(int)
    keyed.set_current_key(1)
    words = keyed.get_list_state(ListStateDescriptor("l", PICKLE))
    counts = keyed.get_map_state(MapStateDescriptor("m", int, int))
    words.update([[1], [2]])
    counts.put_all({1: 1, 2: 2})
    steps = [iter(words), iter(counts)]
    for each in steps:
        next(each)
    alive = weakref.ref(keyed)
    del keyed, words, counts
    gc.collect()
    assert [next(each) for each in steps] == [[2], 2]
    del steps, each
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("visible", list(sb.StateTtlConfig.StateVisibility))
def test_a_map_with_a_time_to_live_that_nothing_was_put_into_is_empty(visible: Any) -> None:
    """It has no table yet: the iterator must not look for one."""
    keyed = sb.create_backend("heap").create_keyed_backend(int, clock=sb.testing.ManualClock(1))
    descriptor = sb.MapStateDescriptor("empty", int, int)
    config = sb.StateTtlConfig(10, state_visibility=visible)
    state = keyed.get_map_state(descriptor.enable_time_to_live(config))
    keyed.set_current_key(1)
    for walk in (state.items, state.keys, state.values):
        assert list(walk()) == []
    keyed.close()


@released_build_only
@pytest.mark.parametrize("ttl", [None, 10_000_000])
@pytest.mark.parametrize(
    ("act", "becomes"), [("nothing", [1, 2, 3]), ("clear", []), ("add", [1, 2, 3, 99]), ("other key", [7])]
)
def test_a_finaliser_changes_a_list_while_that_for_its_elements_is_made(
    ttl: int | None, act: str, becomes: list[int]
) -> None:
    """Also when it has used the same handle last."""
    descriptor = ListStateDescriptor("l", int)
    if ttl is not None:
        descriptor.enable_time_to_live(StateTtlConfig(ttl))
    keyed = HeapBackend().create_keyed_backend(int)
    state = keyed.get_list_state(descriptor)
    for key, elements in ((2, [7]), (1, [1, 2, 3])):
        keyed.set_current_key(key)
        state.add_all(elements)

    def change() -> None:
        if act == "clear":
            state.clear()
        elif act == "add":
            state.add(99)
        elif act == "other key":
            keyed.set_current_key(2)
        state.exists()  # the handle knows where it is

    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [Ends(change)]
        cycle.append(cycle)
        del cycle
        assert state.get() == [1, 2, 3]
        kept = [[] for _ in range(2000)]  # so that the next list is not one that was used before
        gc.set_threshold(1, 1, 1)
        gc.enable()
        found = state.get()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    assert len(kept) == 2000
    assert found == becomes
    keyed.close()
