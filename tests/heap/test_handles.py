"""What handles remember, what finalisers find, and how objects and iterators of states behave."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from meddling import Meddler

import statebackend as sb
from statebackend import types as t
from statebackend._core.core_probe import rows_in
from statebackend.backends import available_backends
from statebackend.backends.heap import HeapBackend
from statebackend.errors import BackendUnavailableError, ClosedError
from statebackend.keys import VOID
from statebackend.state import (
    FoldingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ValueStateDescriptor,
)
from statebackend.state.ttl import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

PICKLE = t.PICKLE


@pytest.fixture
def keyed() -> Iterator[Any]:
    with HeapBackend().create_keyed_backend(int, max_parallelism=2) as made:
        made.set_current_key(1)
        yield made


# --- remembered slots ------------------------------------------------------------------------------------------------


def test_remembered_place_holds_through_every_move_of_entries(keyed: Any, rng: random.Random) -> None:
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
        elif action == 28:
            state.update_many([where[0], 1], [step, step] if number == 0 else ["text", f"text {step}"])
            model[at], model[number, 1, where[1]] = (step, step) if number == 0 else ("text", f"text {step}")
        elif action == 29:
            state.clear_many([where[0]])
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


# --- objects and finalisers ------------------------------------------------------------------------------------------


class Ends:
    """An object that does something when it ends."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __del__(self) -> None:
        with contextlib.suppress(ClosedError):
            self.act()

    def __deepcopy__(self, memo: Any) -> Ends:
        return Ends(self.act)


STORES: dict[str, Callable[[Any, Any], None]] = {
    "value": lambda keyed, thing: keyed.get_state(ValueStateDescriptor("v", PICKLE)).update(thing),
    "map": lambda keyed, thing: keyed.get_state(MapStateDescriptor("m", int, PICKLE)).put(1, thing),
    "list": lambda keyed, thing: keyed.get_state(ListStateDescriptor("l", PICKLE)).update([thing, thing]),
}


@pytest.mark.parametrize("what", STORES)
@pytest.mark.parametrize("how", ["overwrite", "clear_key", "rollback", "close"])
@pytest.mark.parametrize("act", ["other key", "same place", "close", "clear all"])
def test_a_finaliser_runs_between_calls_and_may_do_anything(what: str, how: str, act: str) -> None:
    keyed = HeapBackend().create_keyed_backend(int, max_parallelism=2)
    keyed.set_current_key(1)
    numbers = keyed.get_value_state(ValueStateDescriptor("n", int))
    ended = []

    def end() -> None:
        assert not keyed._calls_inside
        assert keyed._closed or not keyed._under_way
        keyed.core._check()
        ended.append(act)
        if act == "close":
            keyed.close()
        elif act == "other key":
            keyed.set_current_key(7)
            numbers.update(7)
        elif act == "same place":
            keyed.set_current_key(1)
            STORES[what](keyed, 1)
        else:
            for key in range(20):
                keyed.set_current_key(key)
                keyed.clear_key()

    for key in range(20):
        keyed.set_current_key(key)
        STORES[what](keyed, 0)
    keyed.set_current_key(1)
    mark = keyed.mark() if how == "rollback" else None
    STORES[what](keyed, Ends(end))
    assert not ended
    try:
        if how == "overwrite":
            STORES[what](keyed, 1)
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
    assert ended
    if not keyed._closed:
        for state in keyed._states.values():
            for table in state._tables():
                table._check()
    keyed.close()


def test_a_batch_lets_go_of_replaced_objects_row_by_row(keyed: Any) -> None:
    class Accumulator:
        alive = most = 0

        def __init__(self) -> None:
            Accumulator.alive += 1
            Accumulator.most = max(Accumulator.most, Accumulator.alive)

        def __del__(self) -> None:
            Accumulator.alive -= 1

    state = keyed.get_state(FoldingStateDescriptor("f", 0, lambda _old, _new: Accumulator(), PICKLE))
    state.add_many([1, 2] * 1000, [0] * 2000)
    assert Accumulator.most <= 5
    for key in (1, 2):
        keyed.set_current_key(key)
        state.clear()
    while keyed.core.advance():
        pass
    assert Accumulator.alive == 0


@pytest.mark.parametrize("kind", ["get", "iteration"])
def test_a_list_that_a_finaliser_replaces_is_read_whole(keyed: Any, kind: str) -> None:
    state = keyed.get_list_state(ListStateDescriptor("list", str))
    numbers = itertools.count()
    kept: list[Any] = []  # so that the interpreter has no old list to give out for a new one

    def replace() -> None:
        number = next(numbers)
        for key in (2, 1):
            keyed.set_current_key(key)
            state.clear()
        for _ in range(number % 300 + 1):
            for key in (2, 1):  # the one where the other has been
                keyed.set_current_key(key)
                state.add(f"{number}" if key == 1 else "another")
        kept.append([])
        kept.append([])

    for _ in range(100):
        replace()
    with Meddler(replace).at_work():
        for turn in range(300):
            for _ in range(turn % 3):
                kept.append([])  # so that now one, now another object starts a collection
            found = []
            with contextlib.suppress(RuntimeError):  # the state was changed while it was iterated
                found = state.get() if kind == "get" else list(state)
            kept.append(found)
            assert len(set(found)) == 1 or kind == "iteration"
            assert not found or len(found) == int(found[0]) % 300 + 1


@pytest.mark.parametrize("kind", ["value", "map", "list", "folding"])
def test_a_change_that_is_stored_is_undone_with_its_batch(keyed: Any, kind: str) -> None:
    def append(old: list[int], new: int) -> list[int]:
        old.append(new)
        return old

    descriptor, read, change = {
        "value": (
            ValueStateDescriptor("s", PICKLE),
            lambda: state.value(),
            lambda number: state.update(append(state.value() or [], number)),
        ),
        "map": (
            MapStateDescriptor("s", int, PICKLE),
            lambda: state.get(1),
            lambda number: state.put(1, append(state.get(1) or [], number)),
        ),
        "list": (
            ListStateDescriptor("s", PICKLE),
            lambda: state.get()[0],
            lambda number: state.update([append(next(iter(state.get()), []), number)]),
        ),
        "folding": (
            FoldingStateDescriptor("s", [], append, PICKLE),
            lambda: state.get(),
            lambda number: state.add(number),
        ),
    }[kind]
    state: Any = keyed.get_state(descriptor)
    change(0)
    for _ in range(2):
        mark, view = keyed.mark(), keyed.core.snapshot()
        for number in (1, 2):
            change(number)
        assert read() == [0, 1, 2]
        table = state.plain_map.entries if kind == "map" else state.plain
        assert list(rows_in(view, table).values()) == [[[0]] if kind == "list" else [0]]
        keyed.rollback(mark)
        keyed.release(mark)
        view.release()
        assert read() == [0]


# --- iterators -------------------------------------------------------------------------------------------------------


def test_iterator_fails_after_its_collection_was_cleared_and_refilled(keyed: Any) -> None:
    words = keyed.get_list_state(ListStateDescriptor("l", int))
    counts = keyed.get_map_state(MapStateDescriptor("m", int, int))
    for fill, steps in (
        (lambda: words.update([1, 2, 3]), lambda: iter(words)),
        (lambda: counts.put_all({1: 1, 2: 2}), lambda: counts.items()),
    ):
        fill()
        iterator = steps()
        next(iterator)
        words.clear()
        counts.clear()
        fill()
        with pytest.raises(RuntimeError):
            next(iterator)


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


# --- keys, clocks, and backends --------------------------------------------------------------------------------------


def test_text_keys_live_as_long_as_they_are_current() -> None:
    with HeapBackend().create_keyed_backend(str) as keyed:
        state = keyed.get_value_state(ValueStateDescriptor("s", int))
        for number in range(1000):
            keyed.set_current_key(f"key-é-{number}")
            gc.collect() if number % 250 == 0 else None
            state.update(number)
        assert keyed.current_key == "key-é-999"
        assert sorted(keyed.keys("s")) == sorted(f"key-é-{number}" for number in range(1000))


def test_time_is_read_once_for_each_key() -> None:
    with HeapBackend().create_keyed_backend(int) as keyed:
        state = keyed.get_value_state(
            ValueStateDescriptor("s", int).enable_time_to_live(StateTtlConfig(1_000_000))
        )
        keyed.set_current_key(1)
        state.update(1)
        first = keyed._now
        assert abs(first / 1000 - time.time()) < 60
        while keyed._time() == first:
            pass
        assert keyed._now == first  # read once for each key
        keyed.set_current_key(2)
        assert keyed._now > first


def test_without_the_extension_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "statebackend._core.handles.map_table_handle", None)
    found = available_backends()["heap"]
    assert not found.is_available
    assert "setup.py build_ext" in str(found.reason)
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


def test_unreferenced_backend_goes_with_its_handles_and_iterators() -> None:
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
