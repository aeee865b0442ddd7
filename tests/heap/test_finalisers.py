"""Finalisers that use the backend, run by collections wherever an object is made: handles of every kind, and timers."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
from meddling import Meddler

from statebackend import types as t
from statebackend.backends.heap import HeapBackend
from statebackend.keys import VOID
from statebackend.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from statebackend.state.ttl import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

NAMESPACES = [VOID, "n", 7]
FOREVER = 1 << 50
LONG = 3_600  # characters: a few hundred strings fill an extent
KINDS = ["number", "text", "thing", "list", "things", "map", "mapped", "reducing", "aggregating", "timers"]


class World:
    """A backend with states of every kind. The test has the keys from 0 on, finalisers the negative ones."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        # One thread: a finaliser on another would change the current key while this one uses it.
        self.keyed: Any = HeapBackend(threads=1).create_keyed_backend(
            int, max_parallelism=2, clock=self.clock
        )
        kinds = [
            ValueStateDescriptor("number", int),
            ValueStateDescriptor("text", str),
            ValueStateDescriptor("thing", t.PICKLE),
            ListStateDescriptor("list", str),
            ListStateDescriptor("things", t.PICKLE),
            MapStateDescriptor("map", int, str),
            MapStateDescriptor("mapped", str, t.PICKLE),
            ReducingStateDescriptor("reducing", "sum", int),
            AggregatingStateDescriptor("aggregating", "count", int),
        ]
        if options:
            config = StateTtlConfig(**{"ttl": FOREVER, **options})
            kinds = [each.enable_time_to_live(config) for each in kinds]
        self.states = {each.name: self.keyed.get_state(each) for each in kinds}
        self.numbers = itertools.count()
        #: By state, namespace and key: what the test and finalisers have put.
        self.model: dict[str, dict[Any, Any]] = {name: {} for name in self.states}
        self.timers: set[Any] = set()
        self.keyed.set_current_key(0)
        self.meddler = Meddler(self.meddle)

    def meddle(self) -> None:
        key, namespace = self.keyed.current_key, self.keyed.current_namespace
        number = next(self.numbers)
        try:
            self.change(-1 - number % 40, NAMESPACES[number % 3], number, KINDS[number % 10])
        finally:
            self.keyed.set_current_namespace(namespace)
            self.keyed.set_current_key(key)

    def change(self, key: int, namespace: Any, number: int, kind: str) -> None:
        """Do something to one state, or the timers, at a key."""
        place = (key, namespace)
        self.keyed.set_current_namespace(namespace)
        self.keyed.set_current_key(key)
        if kind == "timers":
            if number % 5 == 0:
                self.keyed.timers.delete(number % 7)
                self.timers.discard((number % 7, *place))
            else:
                self.keyed.timers.register(number % 7, "event")
                self.timers.add((number % 7, *place))
            return
        state, model = self.states[kind], self.model[kind]
        if number % 5 == 0:
            state.clear()
            model.pop(place, None)
        elif kind in ("number", "text", "thing"):
            model[place] = {"number": number, "text": f"{number:{LONG}}", "thing": [number]}[kind]
            state.update(model[place])
            assert state.value() == model[place]
        elif kind in ("list", "things"):
            element: Any = f"{number:{LONG}}" if kind == "list" else [number]
            state.add(element)
            model.setdefault(place, []).append(element)
            assert state.get() == model[place]
            assert list(state) == model[place]
        elif kind in ("map", "mapped"):
            at: Any = number % 4 if kind == "map" else f"{number % 4}"
            value: Any = f"{number:{LONG}}" if kind == "map" else [number]
            state.put(at, value)
            model.setdefault(place, {})[at] = value
            assert list(state.items()) == list(model[place].items())
        else:
            state.add(number)
            model[place] = model.get(place, 0) + (number if kind == "reducing" else 1)

    def check(self) -> None:
        for state in self.states.values():
            for table in state._tables():
                table._check()
        for handle in self.keyed.timers._handles().values():
            handle._check()
        self.keyed.core._check()
        for name, state in self.states.items():
            assert state._count() == len(self.model[name])
            for (key, namespace), value in self.model[name].items():
                self.keyed.set_current_namespace(namespace)
                self.keyed.set_current_key(key)
                if isinstance(value, dict):
                    assert dict(state.items()) == value
                else:
                    assert (state.value if name in ("number", "text", "thing") else state.get)() == value
        assert self.keyed.timers.count() == len(self.timers)
        fired = {
            (time, self.keyed.current_key, self.keyed.current_namespace)
            for time in self.keyed.timers.due(1 << 40)
        }
        assert fired == self.timers


@pytest.fixture(params=[{}, {"update_type": StateTtlConfig.UpdateType.OnReadAndWrite}], ids=["plain", "ttl"])
def world(request: pytest.FixtureRequest) -> Any:
    made = World(**request.param)
    yield made
    made.keyed.close()


def test_handles_timers_marks_and_snapshots(world: World) -> None:
    """Firing makes objects and reclaims: finalisers register and delete timers meanwhile."""
    views: list[Any] = []
    fired = 0
    with world.meddler.at_work():
        mark = world.keyed.mark()
        for number in range(3, 350):
            for kind in KINDS:
                world.change(number * 13 % 300, NAMESPACES[number % 3], number, kind)
            if number % 40 == 0:
                views.append(world.keyed.core.snapshot())
                world.keyed.release(mark)
                mark = world.keyed.mark()
            if number % 50 == 0:
                for time in world.keyed.timers.due(4):
                    key, namespace = world.keyed.current_key, world.keyed.current_namespace
                    world.timers.discard((time, key, namespace))
                    fired += 1
            if len(views) > 2:
                views.pop(0).release()
                world.keyed.advance()
        world.keyed.release(mark)
    assert fired
    for view in views:
        view.release()
    world.check()


def test_whole_columns(world: World) -> None:
    keys = np.arange(500)
    number, text, each, pairs, total = (
        world.states[name] for name in ("number", "text", "list", "map", "reducing")
    )
    texts = [f"{key}" for key in keys]
    world.keyed.set_current_namespace(VOID)
    text.update_many(keys, texts)  # before finalisers are at work: what that imports takes long with them
    assert text.get_many(keys).to_pylist() == texts
    with world.meddler.at_work():
        number.update_many(keys, keys)
        assert (number.get_many(keys).to_numpy() == keys).all()
        text.update_many(keys, texts)
        assert text.get_many(keys).to_pylist() == texts
        each.add_many(keys[:20], texts[:20])
        assert each.get_many(keys[:20]).to_pylist() == [[other] for other in texts[:20]]
        pairs.put_many(keys, keys % 7, texts)
        assert pairs.get_many(keys, keys % 7).to_pylist() == texts
        total.add_many(keys, keys)
        touched, sums = total.add_many(keys[:10], keys[:10], return_changed=True)
        assert dict(zip(touched.to_pylist(), sums.to_pylist(), strict=True)) == {n: 2 * n for n in range(10)}
    for key in keys.tolist():
        place = (key, VOID)
        world.model["number"][place], world.model["text"][place] = key, texts[key]
        world.model["map"][place] = {key % 7: texts[key]}
        world.model["reducing"][place] = 2 * key if key < 10 else key
        if key < 20:
            world.model["list"][place] = [texts[key]]
    world.check()


@pytest.mark.parametrize("kind", ["get", "iteration"])
def test_a_list_that_a_finaliser_replaces_is_read_whole(world: World, kind: str) -> None:
    state = world.states["list"]
    numbers = itertools.count()
    kept: list[Any] = []  # so that the interpreter has no old list to give out for a new one

    def replace() -> None:
        number = next(numbers)
        for key in (2, 1):
            world.keyed.set_current_key(key)
            state.clear()
        for _ in range(number % 300 + 1):
            for key in (2, 1):  # the one where the other has been
                world.keyed.set_current_key(key)
                state.add(f"{number}" if key == 1 else "another")
        kept.append([])
        kept.append([])

    for _ in range(100):
        replace()
    meddler = Meddler(replace)
    with meddler.at_work():
        for turn in range(300):
            for _ in range(turn % 3):
                kept.append([])  # so that now one, now another object starts a collection
            if kind == "get":
                found = state.get()
            else:
                found = []
                with contextlib.suppress(RuntimeError):  # the state was changed while it was iterated
                    found = list(state)
            kept.append(found)
            assert len(set(found)) == 1 or kind == "iteration"
            assert not found or len(found) == int(found[0]) % 300 + 1
    for key in (2, 1):
        world.keyed.set_current_key(key)
        state.clear()
    world.check()
