"""Random programs over random types, on the reference, which has the Python serializers, and on another backend.

Whatever a step returns or raises must be the same on both, and so must all states be, from one restart to the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_layouts import LAYOUTS
from contract.conftest import backend_params
from contract.samples import dump
from random_types import random_value
from type_samples import SORTS, SORTS_OF_KEYS, Sample, keys_of, sample

from statebackend.backends import create_backend
from statebackend.checkpoint import CheckpointStore
from statebackend.errors import StateBackendError
from statebackend.keys import VOID, TimeWindow
from statebackend.state import (
    KeyedStateBackend,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from statebackend.testing import ManualClock

OTHERS = [name for name in backend_params() if name != "reference"] or ["reference"]
NAMESPACES = [VOID, VOID, VOID, TimeWindow(0, 10), "a namespace"]
TTL = 100


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the class and the code of what it raises, in a form that compares."""
    try:
        found = call()
    except (StateBackendError, OverflowError, KeyError) as error:
        return type(error).__name__, getattr(error, "code", None)
    if isinstance(found, (pa.Array, pa.ChunkedArray)):
        found.validate(full=True)
        return str(found.type), repr(found.to_pylist())
    return repr(found)


class Program:
    """Two backends with the same states, and steps that go to both."""

    def __init__(self, rng: random.Random, names: tuple[str, str]) -> None:
        self.rng = rng
        self.names = names
        self.is_ordered = all(create_backend(name).keeps_insertion_order for name in names)
        self.clock = ManualClock(1_000)
        key_sample = sample(rng.choice(SORTS_OF_KEYS), rng)
        self.key_type, self.keys = key_sample.declared, (key_sample, keys_of(key_sample)[1][:6])
        self.map_keys = sample(rng.choice(SORTS_OF_KEYS), rng)
        self.samples = {
            name: sample(rng.choice(["five deep", rng.choice(SORTS)]), rng) for name in ("v", "l", "m", "r")
        }
        self.descriptors: dict[str, Any] = {
            "v": ValueStateDescriptor("v", self.samples["v"].declared),
            "l": ListStateDescriptor("l", self.samples["l"].declared),
            "m": MapStateDescriptor("m", self.map_keys.declared, self.samples["m"].declared),
            "r": ReducingStateDescriptor("r", rng.choice(["first", "last"]), self.samples["r"].declared),
        }
        for descriptor in self.descriptors.values():
            if rng.random() < 0.25:
                descriptor.enable_time_to_live(StateTtlConfig(TTL, cleanup_in_background=False))
        self.marks: list[tuple[Any, Any]] = []
        self.open(None)

    def open(self, restore: Any) -> None:
        self.both = [self._backend(name, restore) for name in self.names]
        self.states = [{n: keyed.get_state(d) for n, d in self.descriptors.items()} for keyed in self.both]

    def _backend(self, name: str, restore: Any) -> KeyedStateBackend:
        options = {} if restore is None else {"restore": restore}
        return create_backend(name).create_keyed_backend(
            self.key_type, max_parallelism=16, clock=self.clock, **options
        )

    def close(self) -> None:
        for keyed in self.both:
            keyed.close()

    def same(self, use: Callable[[Any], Any]) -> None:
        first, second = (outcome(lambda keyed=keyed: use(keyed)) for keyed in self.both)
        assert first == second

    def on(self, name: str, use: Callable[[Any], Any]) -> None:
        first, second = (outcome(lambda states=states: use(states[name])) for states in self.states)
        assert first == second

    def check(self) -> None:
        for descriptor in self.descriptors.values():
            first, second = (dump(keyed, descriptor, sorts_maps=not self.is_ordered) for keyed in self.both)
            assert first == second

    # --- what is given ---

    def value(self, given: Sample) -> Any:
        """A value of the type, in any of its forms; at times None, or one of another type."""
        if self.rng.random() < 0.1:
            return random_value(self.rng, sample(self.rng.choice(SORTS), self.rng).declared)
        return None if self.rng.random() < 0.1 else random_value(self.rng, given.declared)

    def column(self, given: Sample, values: list[Any]) -> Any:
        """Values as a column in any layout, or as a list; at times a column of another type."""
        if self.rng.random() < 0.1:
            other = sample(self.rng.choice(SORTS), self.rng)
            return other.column(self.rng.choice(LAYOUTS), [self.rng.choice(other.values) for _ in values])
        if not values or self.rng.random() < 0.2:
            return values
        return given.column(self.rng.choice(LAYOUTS), values)

    def values(self, given: Sample, count: int, *, nulls: bool) -> list[Any]:
        return [self.rng.choice(given.values if nulls else given.present) for _ in range(count)]

    # --- steps ---

    def step(self) -> None:
        rng = self.rng
        key, namespace = rng.choice(self.keys[1]), rng.choice(NAMESPACES)
        self.same(lambda keyed: keyed.set_current_key(key))
        self.same(lambda keyed: keyed.set_current_namespace(namespace))
        rng.choice([self.one, self.one, self.many, self.many, self.go_back, self.pass_time])()

    def one(self) -> None:
        name = self.rng.choice("vlmr")
        value = self.value(self.samples[name])
        if name == "v":
            self.on(name, lambda state: state.update(value))
            self.on(name, lambda state: state.value())
        elif name == "l":
            values = [value, *self.values(self.samples[name], 2, nulls=False)]
            method = self.rng.choice(["add", "add_all", "update"])
            self.on(name, lambda state: getattr(state, method)(value if method == "add" else values))
            self.on(name, lambda state: state.get())
        elif name == "r":
            self.on(name, lambda state: state.add(value))
            self.on(name, lambda state: state.get())
        else:
            map_key = self.value(self.map_keys)
            self.on(name, lambda state: state.put(map_key, value))
            self.on(name, lambda state: state.get(map_key))
            if self.rng.random() < 0.3:
                self.on(name, lambda state: state.remove(map_key))
            self.on(
                name,
                lambda state: list(state.items()) if self.is_ordered else sorted(state.items(), key=repr),
            )
        if self.rng.random() < 0.1:
            self.on(name, lambda state: state.clear())
        self.on(name, lambda state: state.exists())

    def many(self) -> None:
        count = self.rng.randint(1, 8)
        rows = [self.rng.choice(self.keys[1]) for _ in range(count)]
        keys = self.column(self.keys[0], rows)
        name = self.rng.choice("vlmr")
        given = self.samples[name]
        values = self.column(given, self.values(given, count, nulls=name != "l" or self.rng.random() < 0.1))
        if name == "v":
            self.on(name, lambda state: state.update_many(keys, values))
            self.on(name, lambda state: state.get_many(keys))
        elif name == "m":
            map_keys = self.column(self.map_keys, self.values(self.map_keys, count, nulls=False))
            self.on(name, lambda state: state.put_many(keys, map_keys, values))
            self.on(name, lambda state: state.get_many(keys, map_keys))
            if self.rng.random() < 0.3:
                self.on(name, lambda state: state.remove_many(keys, map_keys))
        else:
            self.on(name, lambda state: state.add_many(keys, values))
            self.on(name, lambda state: state.get_many(keys))
        if self.rng.random() < 0.1:
            self.on(name, lambda state: state.clear_many(keys))
        self.on(name, lambda state: state.exists_many(keys))

    def go_back(self) -> None:
        if self.marks and self.rng.random() < 0.5:
            for keyed, mark in zip(self.both, self.marks.pop(), strict=True):
                keyed.rollback(mark)
                keyed.release(mark)
            self.check()
        else:
            self.marks.append((self.both[0].mark(), self.both[1].mark()))

    def pass_time(self) -> None:
        self.clock.advance(self.rng.choice([1, TTL // 2, TTL]))
        self.same(lambda keyed: keyed.advance(1_000_000) >= 0)


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("other", OTHERS)
def test_random_programs(other: str, number: int, tmp_path: Path, rng: random.Random) -> None:
    program = Program(rng, ("reference", other))
    for part in range(3):
        for _ in range(25):
            program.step()
        program.check()
        # Each goes on from what the other has written, by turns in a checkpoint and in a savepoint.
        written = program.both[part % 2]
        if part == 1:
            source: Any = written.savepoint(tmp_path / "savepoint")
        else:
            store = CheckpointStore(tmp_path / f"store {part}")
            with store.open_for_writing(key_type=program.key_type, max_parallelism=16):
                store.commit(0, [written.snapshot(0, store).result()])
                program.step()
                program.check()
                source = store.commit(1, [written.snapshot(1, store).result()])
        program.marks = []
        program.close()
        program.open(source)
        program.check()
    program.close()


@pytest.mark.stress
@pytest.mark.parametrize("other", OTHERS)
def test_long_random_programs(other: str, rng: random.Random) -> None:
    for _ in range(200):
        program = Program(rng, ("reference", other))
        for _ in range(100):
            program.step()
        program.check()
        program.close()
