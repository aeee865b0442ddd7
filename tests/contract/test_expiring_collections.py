"""Random use of lists and maps that expire, many elements for a key: the heap backend gives what the reference gives.

Marks, snapshots, restarts from full and incremental checkpoints, merges, open iterators, clocks that are set back.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from contract.ttl_samples import CLEANUPS, Never, OnRead, OnWrite, Show

from statebackend import types as t
from statebackend.backends import create_backend
from statebackend.checkpoint import CheckpointStore
from statebackend.keys import VOID
from statebackend.state import ListStateDescriptor, MapStateDescriptor, ValueStateDescriptor
from statebackend.state.ttl import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = [pytest.mark.checked, pytest.mark.usefixtures("no_fsync")]

TTL = 100
MAX_PARALLELISM = 4
KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: ListStateDescriptor("s", int),
    "list of texts": lambda: ListStateDescriptor("s", str),
    "list of objects": lambda: ListStateDescriptor("s", t.PICKLE),
    "map": lambda: MapStateDescriptor("s", int, int),
    "map of texts": lambda: MapStateDescriptor("s", str, str),
}
#: What reads show must not depend on when something is cleaned up; or nothing but reads may clean up.
WAYS = [(Never, each) for each in CLEANUPS] + [(Show, "off")]


class Both:
    """The same calls for two backends, which must have the same results."""

    def __init__(
        self, folder: Path, kind: str, cleanup: str, options: dict[str, Any], rng: random.Random
    ) -> None:
        self.cleanup = cleanup
        self.rng, self.clock = rng, ManualClock(rng.choice([0, 10**12]))
        self.kind, self.config = kind, StateTtlConfig(TTL, **options, **CLEANUPS[cleanup])
        self.is_list = kind.startswith("list")
        self.numbers = itertools.count()
        self.stores = {
            name: CheckpointStore(folder / name).open_for_writing(
                key_type=int, max_parallelism=MAX_PARALLELISM
            )
            for name in ("heap", "reference")
        }
        self.marks: list[list[Any]] = []
        self.iterators: list[list[Any]] = []
        self.views: list[tuple[Any, list[Any]]] = []
        self.start({})
        for keyed in self.keyed:  # most of it stays as it is, so that deltas are written
            keyed.get_state(ValueStateDescriptor("others", int)).update_many(range(100), range(100))
        self.move()

    def descriptor(self) -> Any:
        return KINDS[self.kind]().enable_time_to_live(self.config)

    def start(self, restore: dict[str, Any]) -> None:
        self.keyed: list[Any] = [
            create_backend(name).create_keyed_backend(
                int, max_parallelism=MAX_PARALLELISM, clock=self.clock, restore=restore.get(name, ())
            )
            for name in self.stores
        ]
        self.states = [keyed.get_state(self.descriptor()) for keyed in self.keyed]

    def same(self, call: Callable[[Any, Any], Any]) -> Any:
        results = [call(*each) for each in zip(self.keyed, self.states, strict=True)]
        assert results[0] == results[1]
        return results[0]

    def value(self) -> Any:
        number = self.rng.randrange(1_000)
        return {"list of texts": str(number), "map of texts": str(number), "list of objects": [number]}.get(
            self.kind, number
        )

    def map_key(self) -> Any:
        number = self.rng.randrange(80)
        return number if self.kind == "map" else f"key {number}"

    # --- steps ---

    def step(self) -> None:
        steps: list[tuple[Callable[[], Any], int]] = [
            (self.move, 10),
            (self.write, 10),
            (self.replace, 1),
            (self.read, 4),
            (self.look, 4),
            (self.begin_to_iterate, 3),
            (self.iterate, 6),
            (self.advance, 4),
            (self.merge, 1),
            (self.mark, 2),
            (self.roll_back_or_release, 2),
            (self.take_or_end_snapshot, 2),
            (self.restart, 1),
        ]
        self.rng.choices([each for each, _ in steps], [weight for _, weight in steps])[0]()
        for table in self.states[0]._tables():
            table._check()

    def move(self) -> None:
        # What was cleaned up does not come back when the clock is set back.
        back = -5 if self.cleanup == "off" else 0
        self.clock.advance(self.rng.choice([0, 1, 1, 3, 10, TTL // 2, TTL, back]))
        self.set(self.rng.choice([1, 1, 1, 2]), self.rng.choice([VOID, VOID, VOID, "n"]))

    def set(self, key: int, namespace: Any) -> None:
        for keyed in self.keyed:
            keyed.set_current_key(key)
            keyed.set_current_namespace(namespace)
        self.key, self.namespace = key, namespace

    def write(self) -> None:
        for _ in range(self.rng.choice([1, 3, 30])):
            if self.rng.random() < 0.3:
                self.clock.advance(1)
                self.set(self.key, self.namespace)
            if not self.is_list:
                key, value, is_gone = self.map_key(), self.value(), self.rng.random() < 0.2
                self.same(lambda _, s, k=key, v=value, r=is_gone: s.remove(k) if r else s.put(k, v))
            elif self.rng.random() < 0.2:
                values = [self.value() for _ in range(self.rng.randrange(20))]
                self.same(lambda _, s, v=values: s.add_all(v))
            else:
                value = self.value()
                self.same(lambda _, s, v=value: s.add(v))

    def replace(self) -> None:
        values = [self.value() for _ in range(self.rng.randrange(3))]
        self.same(lambda _, s: s.update(values) if self.is_list else s.clear())

    def read(self) -> None:
        key = self.map_key()
        self.same(lambda _, s: s.get() if self.is_list else s.get(key))

    def look(self) -> None:
        self.same(lambda _, s: s.exists())
        self.same(lambda keyed, _: sorted(keyed.keys("s", self.namespace)))
        if not self.is_list:
            self.same(lambda _, s: s.is_empty())

    def begin_to_iterate(self) -> None:
        self.iterators.append([iter(s) if self.is_list else iter(s.items()) for s in self.states])

    def iterate(self) -> None:
        """A few steps of an iterator; to its end, or until one of the two says that the map or list has changed.

        They need not agree on that: a read that renews a list, or removes the last element, may be a change.
        """
        if not self.iterators:
            return
        place = self.rng.randrange(len(self.iterators))
        for _ in range(self.rng.choice([1, 5, 1_000])):
            found = [self.next_of(each) for each in self.iterators[place]]
            is_over = any(each[0] == "changed" for each in found)
            assert is_over or found[0] == found[1]
            if is_over or found[0][0] == "end":
                del self.iterators[place]
                return

    @staticmethod
    def next_of(iterator: Any) -> tuple[str, Any]:
        try:
            return "next", next(iterator)
        except StopIteration:
            return "end", None
        except RuntimeError:
            return "changed", None

    def advance(self) -> None:
        for keyed in self.keyed:
            keyed.advance(10**9)

    def merge(self) -> None:
        if self.is_list:
            into, of = self.rng.sample([VOID, "n", "m"], 2)
            self.same(lambda keyed, _: keyed.merge_namespaces(self.descriptor(), into, [of]))

    def mark(self) -> None:
        self.marks.append([keyed.mark() for keyed in self.keyed])

    def roll_back_or_release(self) -> None:
        if self.marks:
            marks = self.marks.pop()
            rolls_back = self.rng.random() < 0.6
            for keyed, mark in zip(self.keyed, marks, strict=True):
                if rolls_back:
                    keyed.rollback(mark)
                keyed.release(mark)

    def take_or_end_snapshot(self) -> None:
        """The first backend clones what a snapshot has; what that one shows stays as it is."""
        tables = self.states[0]._tables()
        if self.views and self.rng.random() < 0.6:
            view, shown = self.views.pop(self.rng.randrange(len(self.views)))
            assert [view.items(table) for table in tables[: len(shown)]] == shown
            view.release()
        else:
            view = self.keyed[0].core.snapshot()
            self.views.append((view, [view.items(table) for table in tables]))

    def restart(self) -> None:
        self.release()
        number = next(self.numbers)
        whole = self.rng.random() < 0.3
        pending = [
            keyed.snapshot(number, store, incremental=not whole)
            for keyed, store in zip(self.keyed, self.stores.values(), strict=True)
        ]
        if self.rng.random() < 0.7:
            goes_on = [
                store.commit(number, [each.result()], now=self.clock.now())
                for each, store in zip(pending, self.stores.values(), strict=True)
            ]
            if self.rng.random() < 0.5:
                return
        else:
            self.write()
            goes_on = [
                store.commit(number, [each.result()], now=self.clock.now())
                for each, store in zip(pending, self.stores.values(), strict=True)
            ]
        for keyed in self.keyed:
            keyed.close()
        self.start(dict(zip(self.stores, goes_on, strict=True)))
        self.set(self.key, self.namespace)
        self.read_all()

    def read_all(self) -> None:
        """By what changes nothing but what a time to live ends."""
        for key, namespace in itertools.product([1, 2], [VOID, "n", "m"]):
            self.set(key, namespace)
            self.same(lambda _, s: s.get() if self.is_list else dict(s.items()))

    def release(self) -> None:
        self.marks.clear()
        self.iterators.clear()
        for view, _ in self.views:
            view.release()
        self.views.clear()

    def close(self) -> None:
        self.release()
        things: Iterable[Any] = [*self.keyed, *self.stores.values()]
        for each in things:
            each.close()


@pytest.mark.parametrize("steps", [200, pytest.param(3_000, marks=pytest.mark.stress)])
@pytest.mark.parametrize(("visibility", "cleanup"), WAYS, ids=lambda each: getattr(each, "name", each))
@pytest.mark.parametrize("update", [OnWrite, OnRead], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_heap_backend_gives_what_the_reference_gives(
    tmp_path: Path, kind: str, update: Any, visibility: Any, cleanup: str, steps: int, rng: random.Random
) -> None:
    options = {"update_type": update, "state_visibility": visibility}
    both = Both(tmp_path, kind, cleanup, options, rng)
    try:
        for _ in range(steps):
            both.step()
        both.read_all()
    finally:
        both.close()
