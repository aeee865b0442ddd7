"""Random use of state with a time to live, in every combination of the options, against a model.

The model is written from the rules alone. It holds each part (a value, a list element, a map entry) with its stamp and
says what a call may give. Between any two steps the backend may be started anew: from a full checkpoint, a delta or a
savepoint, as this backend or as another one, with this duration or another one. Iterators stay open over the steps.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from all_backends import BACKENDS
from contract.test_ttl import CLEANUPS, TTL, Never, OnRead, OnWrite, Show

import statebackend as sb
from statebackend.state.ttl import expired
from statebackend.testing import ManualClock
from statebackend.types import PICKLE

#: What removes nothing but what a read finds, as these backends have no compaction filter.
EXACT = ("off", "rocksdb")

pytestmark = [pytest.mark.checked, pytest.mark.usefixtures("no_fsync")]

TEXTS = ["", "x", "yy", "z" * 60]
NUMBERS = range(-20, 20)
NAMESPACES = [sb.VOID, sb.VOID, "n", 7]


class Shape(NamedTuple):
    """The keys of a programme, the sizes of its writes, its steps of time, and the backends of its restarts."""

    keys: list[str]
    map_keys: list[str]
    bursts: list[int]
    pauses: list[int]
    backends: list[str]


WIDE = Shape(
    [f"k{number}" * (1 + number) for number in range(3)],
    ["", "a", "b", "é" * 20],
    [1, 1, 3],
    [0, 1, 1, TTL // 2, TTL - 1, TTL],
    BACKENDS,
)
#: Compiled lists and maps, in which much expires and is cleaned up in parts.
DEEP = Shape(
    ["k", "k", "k", "kk"],
    [f"key {number}" for number in range(80)],
    [1, 3, 30],
    [0, 1, 1, 3, 10, TTL // 2, TTL],
    ["heap"],
)


class Kind(NamedTuple):
    """How a state is made and written on; the model holds what `added` makes of what is there and what is new."""

    make: Callable[[], Any]
    values: Any
    added: Callable[[Any, Any], Any] = lambda old, new: new
    #: What two of them come to, for kinds whose namespaces can be merged.
    merged: Callable[[Any, Any], Any] | None = None
    shown: Callable[[Any], Any] = lambda stored: stored


def fold(old: int, new: int) -> int:
    return (2 * old + new) % 1_000_003


def plus(old: Any, new: Any) -> Any:
    return new if old is None else old + new


KINDS = {
    "value": Kind(lambda: sb.ValueStateDescriptor("s", int), NUMBERS),
    "text": Kind(lambda: sb.ValueStateDescriptor("s", str), TEXTS),
    "list": Kind(lambda: sb.ListStateDescriptor("s", int), NUMBERS, merged=plus),
    "list of texts": Kind(lambda: sb.ListStateDescriptor("s", str), TEXTS, merged=plus),
    "list of objects": Kind(
        lambda: sb.ListStateDescriptor("s", PICKLE), [[number] for number in NUMBERS], merged=plus
    ),
    "map": Kind(lambda: sb.MapStateDescriptor("s", str, int), NUMBERS),
    "map of texts": Kind(lambda: sb.MapStateDescriptor("s", str, str), TEXTS),
    "sum": Kind(lambda: sb.ReducingStateDescriptor("s", "sum", int), NUMBERS, plus, plus),
    "join": Kind(lambda: sb.ReducingStateDescriptor("s", plus, str), TEXTS, plus, plus),
    "avg": Kind(
        lambda: sb.AggregatingStateDescriptor("s", "avg", int),
        NUMBERS,
        lambda old, new: (new, 1) if old is None else (old[0] + new, old[1] + 1),
        lambda one, other: (one[0] + other[0], one[1] + other[1]),
        lambda stored: stored[0] / stored[1],
    ),
    "fold": Kind(
        lambda: sb.FoldingStateDescriptor("s", 0, fold, int), NUMBERS, lambda old, new: fold(old or 0, new)
    ),
}


class Part(NamedTuple):
    """Something with a stamp of its own; ``key`` is that of a map entry."""

    key: Any
    value: Any
    stamp: int


class Model:
    """The parts of each key and namespace, in their order."""

    def __init__(self, kind: Kind, config: sb.StateTtlConfig, *, is_exact: bool) -> None:
        self.kind, self.of = kind, kind.make().kind
        self.ttl, self.refreshes = config.ttl, config.update_type is OnRead
        self.shows, self.is_exact = config.state_visibility is Show, is_exact
        self.parts: dict[tuple[Any, Any], list[Part]] = {}
        self.is_sorted = False

    def keep_sorted(self, is_sorted: bool) -> None:
        """Have the entries of maps by their keys from now on, or in the order in which they are put."""
        self.is_sorted = is_sorted
        for at, parts in list(self.parts.items()):
            self.put(at, parts)

    def is_alive(self, part: Part, now: int) -> bool:
        return not expired(part.stamp, self.ttl, now)

    def alive(self, at: Any, now: int) -> list[Part]:
        return [part for part in self.parts.get(at, []) if self.is_alive(part, now)]

    def put(self, at: Any, parts: list[Part]) -> None:
        in_order = self.is_sorted and self.of == "map"
        self.parts[at] = sorted(parts, key=lambda part: part.key.encode()) if in_order else parts
        if not parts:
            del self.parts[at]

    def write(self, at: Any, key: Any, value: Any, now: int) -> None:
        there = self.parts.get(at, [])
        if self.of == "list":
            self.put(at, [*there, Part(None, value, now)])
        elif self.of == "map":
            written = Part(key, value, now)
            if any(part.key == key and self.is_alive(part, now) for part in there):
                self.put(at, [written if part.key == key else part for part in there])
            else:
                self.put(at, [*(part for part in there if part.key != key), written])
        else:
            old = next((part.value for part in self.alive(at, now)), None)
            self.put(at, [Part(None, self.kind.added(old, value), now)])

    def shown(self, at: Any, keys: Iterable[Any] | None, now: int) -> list[Any]:
        """The result of a read of all parts, or of some map keys. Expired parts may be missing from it."""
        read = [part for part in self.parts.get(at, []) if keys is None or part.key in keys]
        visible = [part for part in read if self.shows or self.is_alive(part, now)]
        return [(part.key, self.kind.shown(part.value)) for part in visible]

    def check_read(self, at: Any, keys: Iterable[Any] | None, now: int, found: list[Any]) -> None:
        """Check the result of a read, and apply its effect to the model."""
        there = self.parts.get(at, [])
        read = [part for part in there if keys is None or part.key in keys]
        alive = [part for part in read if self.is_alive(part, now)]
        self.check(found, self.shown(at, keys, now), alive)
        renewed = [part._replace(stamp=now) if self.refreshes else part for part in alive]
        if self.of == "list":
            if not alive or self.refreshes:
                self.put(at, renewed)
            return
        others = iter(renewed)
        left = [
            next(others) if part in alive else part for part in there if part in alive or part not in read
        ]
        self.put(at, left)

    def check(self, found: list[Any], shown: list[Any], alive: list[Part]) -> None:
        if self.is_exact or not self.shows:
            assert found == shown
            return
        # What has expired may have been cleaned up, part by part.
        rest = iter(shown)
        assert all(each in rest for each in found)
        assert all((part.key, self.kind.shown(part.value)) in found for part in alive)

    def merge(self, key: Any, target: Any, sources: list[Any], now: int) -> None:
        found = [parts for parts in (self.parts.pop((key, each), None) for each in sources) if parts]
        merged: list[Part] = []
        for parts in found:
            merged = self.merged(merged, parts, now) if merged else parts
        if not merged:
            return
        if (key, target) in self.parts:
            merged = self.merged(self.parts[key, target], merged, now)
        self.put((key, target), merged) if merged else self.parts.pop((key, target), None)

    def merged(self, one: list[Part], other: list[Part], now: int) -> list[Part]:
        if self.of == "list":
            return one + other
        both = [part.value for part in one + other if self.is_alive(part, now)]
        assert self.kind.merged is not None
        return [Part(None, self.kind.merged(*both) if len(both) == 2 else both[0], now)] if both else []


class Iteration:
    """An open iterator of a list, of which ``rest`` comes, or of a map, of which ``rest`` are the keys to come."""

    def __init__(self, at: Any, steps: Iterator[Any], rest: list[Any]) -> None:
        self.at, self.steps, self.rest = at, steps, rest
        #: Something else was put there, or removed: it says so, or ends if everything has expired since.
        self.is_stale = False

    def step(self) -> tuple[str, Any]:
        try:
            return "next", next(self.steps)
        except StopIteration:
            return "end", None
        except RuntimeError:
            return "changed", None


class Driver:
    def __init__(
        self,
        backend: sb.StateBackend,
        folder: Path,
        name: str,
        shape: Shape,
        options: dict[str, Any],
        rng: random.Random,
    ) -> None:
        self.rng, self.folder, self.options, self.kind = rng, folder, options, KINDS[name]
        self.shape = shape
        self.cleanup = options["cleanup"]
        self.ttl = TTL
        self.clock = ManualClock(rng.choice([0, -1_000, 10**12, 10**18 - 10**6]))
        self.max_parallelism = rng.choice([1, 4, 128])
        self.store = sb.CheckpointStore(folder / "store").open_for_writing(
            key_type=str, max_parallelism=self.max_parallelism
        )
        self.numbers = itertools.count()
        self.model = Model(self.kind, self.config, is_exact=self.cleanup in EXACT)
        self.marks: list[Any] = []
        self.iterations: list[Iteration] = []
        self.start(backend)
        # Most entries do not change, so that snapshots are deltas.
        others = self.keyed.get_value_state(sb.ValueStateDescriptor("others", int))
        others.update_many([f"other {number}" for number in range(100)], range(100))
        self.key, self.namespace, self.now = self.shape.keys[0], sb.VOID, 0
        self.set_key()

    @property
    def config(self) -> sb.StateTtlConfig:
        chosen = {name: self.options[name] for name in ("update_type", "state_visibility")}
        return sb.StateTtlConfig(self.ttl, **chosen, **CLEANUPS[self.cleanup])

    def descriptor(self) -> Any:
        return self.kind.make().enable_time_to_live(self.config)

    def start(self, backend: sb.StateBackend, restore: Any = ()) -> None:
        self.keyed: Any = backend.create_keyed_backend(
            str, max_parallelism=self.max_parallelism, clock=self.clock, restore=restore
        )
        self.state: Any = self.keyed.get_state(self.descriptor())
        self.model.keep_sorted(not backend.keeps_insertion_order)
        # What compactions and merges remove nobody knows; and it does not come back.
        self.model.is_exact &= self.cleanup != "rocksdb" or not backend.cleans_up_in_compactions

    @property
    def at(self) -> tuple[Any, Any]:
        return self.key, self.namespace

    # --- steps ---

    def step(self) -> None:
        steps: list[tuple[Callable[[], None], int]] = [
            (self.let_time_pass, 10),
            (self.set_namespace, 2),
            (self.write, 10),
            (self.read, 6),
            (self.clear, 1),
            (self.replace, 1),
            (self.begin_to_iterate, 3),
            (self.iterate, 6),
            (self.write_many, 2),
            (self.read_many, 2),
            (self.look, 4),
            (self.advance, 3),
            (self.merge, 3),
            (self.mark, 2),
            (self.roll_back_or_release, 2),
            (self.restart, 1),
        ]
        self.rng.choices([each for each, _ in steps], [weight for _, weight in steps])[0]()
        for table in self.tables():
            table._check()

    def tables(self) -> list[Any]:
        return list(self.state._tables()) if hasattr(self.keyed, "core") else []

    def set_key(self) -> None:
        self.keyed.set_current_key(self.key)
        self.keyed.set_current_namespace(self.namespace)
        self.now = self.clock.now()

    def let_time_pass(self) -> None:
        # What was cleaned up does not come back when the clock is set back.
        back = [-5] if self.cleanup == "off" else []
        self.clock.advance(self.rng.choice([*self.shape.pauses, *back]))
        self.key = self.rng.choice(self.shape.keys)
        self.set_key()

    def set_namespace(self) -> None:
        self.namespace = self.rng.choice(NAMESPACES)
        self.keyed.set_current_namespace(self.namespace)

    def write(self) -> None:
        for _ in range(self.rng.choice(self.shape.bursts)):
            if self.rng.random() < 0.3:
                self.clock.advance(1)
                self.set_key()
            key, value = self.rng.choice(self.shape.map_keys), self.rng.choice(self.kind.values)
            if self.model.of == "map" and self.rng.random() < 0.2:
                self.state.remove(key)
                there = self.model.parts.get(self.at, [])
                gone = [part for part in there if part.key == key]
                if gone:
                    self.now_stale(self.at, [part for part in gone if self.model.is_alive(part, self.now)])
                self.model.put(self.at, [part for part in there if part not in gone])
                continue
            if self.model.of == "map":
                self.state.put(key, value)
            elif self.model.of == "value":
                self.state.update(value)
            else:
                self.state.add(value)
            self.written(self.at, key, value, self.now)

    def written(self, at: Any, key: Any, value: Any, now: int) -> None:
        alive = self.model.alive(at, now)
        if self.model.of == "list" or key not in [part.key for part in alive]:
            self.now_stale(at, alive)
        self.model.write(at, key, value, now)

    def now_stale(self, at: Any, alive: list[Part]) -> None:
        """Other parts are there now, in place of these or next to them: iterators say so, at once or later."""
        for each in [each for each in self.iterations if each.at == at and not each.is_stale]:
            each.is_stale = True
            if alive and self.rng.random() < 0.5:
                assert each.step() == ("changed", None)
                self.iterations.remove(each)

    def replace(self) -> None:
        values = [self.rng.choice(self.kind.values) for _ in range(self.rng.randrange(3))]
        if self.model.of == "list":
            self.state.update(values)
            self.now_stale(self.at, self.model.alive(self.at, self.now))
            self.model.put(self.at, [Part(None, value, self.now) for value in values])

    def read(self) -> None:
        keys = None
        if self.model.of == "map":
            way = self.rng.randrange(3)
            if way == 0:
                found = list(self.state.items())
            else:
                keys = [self.rng.choice(self.shape.map_keys)]
                if way == 1:
                    value = self.state.get(keys[0])
                    found = [] if value is None else [(keys[0], value)]
                else:
                    there = self.model.parts.get(self.at, []) if keys[0] in self.state else []
                    found = [(part.key, part.value) for part in there if part.key == keys[0]]
        elif self.model.of == "list":
            elements = self.state.get() if self.rng.random() < 0.5 else list(self.state)
            found = [(None, element) for element in elements]
        else:
            value = self.state.value() if self.model.of == "value" else self.state.get()
            found = [] if value is None else [(None, value)]
        self.model.check_read(self.at, keys, self.now, found)

    def clear(self) -> None:
        self.state.clear()
        self.now_stale(self.at, self.model.alive(self.at, self.now))
        self.model.put(self.at, [])

    def begin_to_iterate(self) -> None:
        if self.model.of in ("list", "map") and (self.model.is_exact or not self.model.shows):
            steps = iter(self.state) if self.model.of == "list" else iter(self.state.items())
            rest = self.model.shown(self.at, None, self.now)
            if self.model.of == "map":
                rest = [part.key for part in self.model.parts.get(self.at, [])]
            else:
                self.model.check_read(self.at, None, self.now, rest)
            self.iterations.append(Iteration(self.at, steps, rest))

    def iterate(self) -> None:
        """A few steps of an iterator; to its end, or until it says that there was a change."""
        if not self.iterations:
            return
        one = self.rng.choice(self.iterations)
        for _ in range(self.rng.choice([1, 5, 1_000])):
            step, found = one.step()
            if step == "changed" or one.is_stale:
                self.iterations.remove(one)
                return
            expected = self.next_of(one)
            assert ([] if step == "end" else [found if self.model.of == "map" else (None, found)]) == expected
            if step == "end":
                self.iterations.remove(one)
                return

    def next_of(self, one: Iteration) -> list[Any]:
        while one.rest:
            first = one.rest.pop(0)
            if self.model.of == "list":
                return [first]
            shown = self.model.shown(one.at, [first], self.now)
            self.model.check_read(one.at, [first], self.now, shown)
            if shown:
                return shown
        return []

    def look(self) -> None:
        there, alive = self.model.parts.get(self.at, []), self.model.alive(self.at, self.now)
        certain = self.model.is_exact or not self.model.shows
        shown = bool(there if self.model.shows else alive)
        assert self.state.exists() in ({shown} if certain else {bool(alive), shown})
        for namespace in (sb.VOID, "n", 7):
            places = [at for at in self.model.parts if at[1] == namespace]
            wanted = [key for key, _ in places if self.model.alive((key, namespace), self.clock.now())]
            assert sorted(self.keyed.keys("s", namespace)) == sorted(wanted)

    def write_many(self) -> None:
        if self.kind.make().kind == "folding":
            return
        rows = [self.rng.choice(self.shape.keys) for _ in range(self.rng.randrange(8))]
        map_keys = [self.rng.choice(self.shape.map_keys) for _ in rows]
        values = [self.rng.choice(self.kind.values) for _ in rows]
        if self.model.of == "map":
            self.state.put_many(rows, map_keys, values)
        elif self.model.of == "value":
            self.state.update_many(rows, values)
        else:
            self.state.add_many(rows, values)
        for key, map_key, value in zip(rows, map_keys, values, strict=True):
            self.written((key, self.namespace), map_key, value, self.clock.now())

    def read_many(self) -> None:
        rows = [self.rng.choice(self.shape.keys) for _ in range(self.rng.randrange(8))]
        map_keys = [self.rng.choice(self.shape.map_keys) for _ in rows]
        is_map = self.model.of == "map"
        found = (self.state.get_many(rows, map_keys) if is_map else self.state.get_many(rows)).to_pylist()
        for key, map_key, given in zip(rows, map_keys, found, strict=True):
            parts = [] if given is None else given if self.model.of == "list" else [given]
            parts = [pickle.loads(part) if isinstance(part, bytes) else part for part in parts]
            named = [(map_key if is_map else None, part) for part in parts]
            wanted = [map_key] if is_map else None
            self.model.check_read((key, self.namespace), wanted, self.clock.now(), named)

    def advance(self) -> None:
        self.keyed.advance(10**9)
        now = self.clock.now()
        if self.cleanup == "idle":
            left = sum(1 for at in self.model.parts if self.model.alive(at, now))
            if not (self.model.of == "list" and self.iterations):  # what is iterated stays
                assert self.keyed.num_entries("s") == left
            self.model.parts = {at: self.model.alive(at, now) for at in self.model.parts}
            self.model.parts = {at: parts for at, parts in self.model.parts.items() if parts}

    def merge(self) -> None:
        if self.kind.merged is None:
            return
        target, *sources = (self.rng.choice(NAMESPACES) for _ in range(self.rng.randrange(1, 5)))
        places = [(self.key, each) for each in (target, *sources)]
        if not self.model.is_exact and any(
            len(self.model.alive(at, self.now)) < len(self.model.parts.get(at, [])) for at in places
        ):
            # What is merged with something expired is stamped anew, what is merged with nothing is not.
            return
        self.keyed.merge_namespaces(self.descriptor(), target, sources)
        for _, namespace in places:
            self.now_stale((self.key, namespace), [])
        self.model.merge(self.key, target, sources, self.now)

    def mark(self) -> None:
        self.marks.append((self.keyed.mark(), dict(self.model.parts)))

    def roll_back_or_release(self) -> None:
        if self.marks:
            mark, parts = self.marks.pop()
            if self.rng.random() < 0.6:
                self.keyed.rollback(mark)
                self.model.parts = parts
                for each in self.iterations:
                    each.is_stale = True
            self.keyed.release(mark)

    def restart(self) -> None:
        """Restart from the state as it is now, with later writes dropped; or go on."""
        self.release()
        number = next(self.numbers)
        if self.rng.random() < 0.3:
            stored: Any = self.keyed.savepoint(str(self.folder / f"savepoint {number}"))
        else:
            # A delta of a backend that sorts maps leaves those of its base in the order of another one.
            may_be_delta = not (self.model.of == "map" and self.model.is_sorted)
            is_delta = may_be_delta and self.rng.random() < 0.6
            pending = self.keyed.snapshot(number, self.store, incremental=is_delta)
            if self.rng.random() < 0.3:
                self.store.commit(number, [pending.result()], now=self.clock.now())
                return
            self.keyed.advance(10**9)
            self.write_elsewhere()
            stored = self.store.commit(number, [pending.result()], now=self.clock.now())
        self.keyed.close()
        now = self.clock.now()
        if self.rng.random() < 0.5:
            # What had expired by a shorter duration may be there still or not: no use to ask.
            all_alive = all(
                len(self.model.alive(at, now)) == len(self.model.parts[at]) for at in self.model.parts
            )
            self.ttl = self.model.ttl = self.rng.choice([1, 50, 100, 150] if all_alive else [1, self.ttl])
        self.start(sb.create_backend(self.rng.choice(self.shape.backends)), stored)
        self.set_key()

    def write_elsewhere(self) -> None:
        rows = [*self.shape.keys, "other"]
        if self.model.of == "value":
            self.state.clear_many(rows)
        elif self.model.of == "map":
            self.state.put_many(rows, self.shape.map_keys[:1] * len(rows), [self.kind.values[3]] * len(rows))
        else:
            for key in rows:
                self.keyed.set_current_key(key)
                self.state.add(self.kind.values[3])

    def read_all(self) -> None:
        for place in itertools.product(dict.fromkeys(self.shape.keys), dict.fromkeys(NAMESPACES)):
            self.key, self.namespace = place
            self.set_key()
            self.read()

    def release(self) -> None:
        self.marks.clear()
        self.iterations.clear()

    def close(self) -> None:
        self.release()
        self.keyed.close()
        self.store.close()


def run(driver: Driver, steps: int) -> None:
    try:
        for _ in range(steps):
            driver.step()
        driver.read_all()
    finally:
        driver.close()


@pytest.mark.parametrize("cleanup", CLEANUPS)
@pytest.mark.parametrize("visibility", sb.StateTtlConfig.StateVisibility, ids=lambda each: each.name)
@pytest.mark.parametrize("update", [OnWrite, OnRead], ids=lambda each: each.name)
@pytest.mark.parametrize("name", KINDS)
def test_random_use_agrees_with_the_rules(
    backend: sb.StateBackend,
    tmp_path: Path,
    name: str,
    update: Any,
    visibility: Any,
    cleanup: str,
    is_stress: bool,
    rng: random.Random,
) -> None:
    options = {"update_type": update, "state_visibility": visibility, "cleanup": cleanup}
    run(Driver(backend, tmp_path, name, WIDE, options, rng), 600 if is_stress else 60)


#: Options under which the result of a read does not depend on when cleanup runs.
WAYS = [(Never, each) for each in CLEANUPS] + [(Show, "off")]


@pytest.mark.parametrize(("visibility", "cleanup"), WAYS, ids=lambda each: getattr(each, "name", each))
@pytest.mark.parametrize("update", [OnWrite, OnRead], ids=lambda each: each.name)
@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].make().kind in ("list", "map")])
def test_random_use_of_long_lists_and_large_maps_agrees_with_the_rules(
    tmp_path: Path, name: str, update: Any, visibility: Any, cleanup: str, is_stress: bool, rng: random.Random
) -> None:
    options = {"update_type": update, "state_visibility": visibility, "cleanup": cleanup}
    run(Driver(sb.create_backend("heap"), tmp_path, name, DEEP, options, rng), 3_000 if is_stress else 120)
