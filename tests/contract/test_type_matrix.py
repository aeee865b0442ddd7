"""Every sort of type, in every layout of a column, through every operation that takes or gives values of it.

`tests/types/test_layouts.py` sees to it that the sorts have all types of `statebackend.types.layout`.
The serializers and the encoders of keys say what must come back. Types within types are random, five deep at most.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_layouts import LAYOUTS
from contract.conftest import Keyed, MakeKeyed, assert_same
from contract.samples import KINDS
from type_samples import OBJECTS, SORTS, SORTS_OF_KEYS, Sample, keys_of, sample, texts

import statebackend as sb

every_sort = pytest.mark.parametrize("sort", SORTS)
every_sort_of_key = pytest.mark.parametrize("sort", SORTS_OF_KEYS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
#: Each sort in each layout runs in one of the tests of values at least, most days.
some_values = pytest.mark.sampled(230, of="columns of values")
some_keys = pytest.mark.sampled(110, of="columns of keys")


def listed(rows: list[tuple[int, Any]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for key, value in rows:
        found.setdefault(key, []).append(repr(value))
    return found


@some_values
@every_layout
@every_sort
def test_columns_of_values(keyed: Keyed, sort: str, layout: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    numbers = range(len(given.values))
    state = keyed.get_value_state(sb.ValueStateDescriptor("v", given.declared))
    state.update_many(numbers, given.column("plain", given.values[::-1]))
    state.update_many(numbers, given.column(layout))
    assert given.shown(state.get_many(numbers)) == texts(given.values)
    for number in numbers:
        keyed.set_current_key(number)
        assert repr(state.value()) == repr(given.values[number])
        assert state.exists() == (given.values[number] is not None)
    last = keyed.get_reducing_state(sb.ReducingStateDescriptor("r", "last", given.declared))
    last.add_many([number // 2 for number in numbers], given.column(layout))
    # None clears, and what comes next is the first again.
    assert given.shown(last.get_many([0])) == texts(given.values[1:2])
    state.update_many(numbers, pa.nulls(len(numbers)))
    assert not any(state.exists_many(numbers).to_pylist())
    state.update_many([], given.column("plain", []))


@some_values
@every_layout
@every_sort
def test_columns_of_elements(keyed: Keyed, sort: str, layout: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    rows = [(number % 3, value) for number, value in enumerate(given.present)]
    numbers = [number for number, _ in rows]
    state = keyed.get_list_state(sb.ListStateDescriptor("l", given.declared))
    state.add_many(numbers, given.column(layout, given.present))
    with pytest.raises(sb.SerializationError, match="position 1"):
        state.add_many(range(len(given.values)), given.column(layout))
    for number, expected in listed(rows).items():
        keyed.set_current_key(number)
        assert texts(state.get()) == texts(state) == expected
        (found,) = state.get_many([number])
        assert given.shown(found.values) == expected
        state.add_all(given.column(layout, given.present))
        assert texts(state.get()) == expected + texts(given.present)
        state.update(given.column(layout, given.present[::-1]))
        assert texts(state.get()) == texts(given.present[::-1])


@some_values
@every_layout
@every_sort
def test_columns_of_map_values(keyed: Keyed, sort: str, layout: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    count = len(given.values)
    numbers, places = [number % 3 for number in range(count)], range(count)
    state = keyed.get_map_state(sb.MapStateDescriptor("m", int, given.declared))
    state.put_many(numbers, places, given.column(layout))
    assert given.shown(state.get_many(numbers, places)) == texts(given.values)
    for number in range(3):
        keyed.set_current_key(number)
        assert texts(state.values()) == texts(given.values[number::3])
        assert texts(state[place] for place in places[number::3]) == texts(given.values[number::3])


@pytest.mark.checked
@some_keys
@every_layout
@every_sort_of_key
def test_columns_of_map_keys(
    backend: sb.StateBackend, keyed: Keyed, sort: str, layout: str, rng: random.Random
) -> None:
    given = sample(sort, rng)
    _, keys = keys_of(given)
    column = given.column(layout, keys)
    state = keyed.get_map_state(sb.MapStateDescriptor("m", given.declared, int))
    state.put_many([7] * len(keys), column, range(len(keys)))
    keyed.set_current_key(7)
    assert_same(backend, texts(state.keys()), texts(keys))
    assert [state[key] for key in keys] == list(range(len(keys)))
    assert state.get_many([7] * len(keys), column).to_pylist() == list(range(len(keys)))
    state.remove_many([7], given.column(layout, keys[:1]) if layout != "chunked" else column[:1])
    assert_same(backend, texts(state), texts(keys[1:]))
    with pytest.raises(sb.SerializationError, match="position 1"):
        state.put_many([7] * len(given.values), given.column(layout), range(len(given.values)))
    assert_same(backend, texts(state), texts(keys[1:]))


@pytest.mark.checked
@some_keys
@every_layout
@every_sort_of_key
def test_columns_of_keys(make_keyed: MakeKeyed, sort: str, layout: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    _, keys = keys_of(given)
    column = given.column(layout, keys)
    keyed = make_keyed(given.declared)
    state = keyed.get_value_state(sb.ValueStateDescriptor("v", int))
    state.update_many(column, range(len(keys)))
    assert state.get_many(column).to_pylist() == list(range(len(keys)))
    assert sorted(texts(keyed.keys("v"))) == sorted(texts(keys))
    for number, key in enumerate(keys):
        keyed.set_current_key(key)
        assert repr(keyed.current_key) == repr(key)
        assert state.value() == number
    with pytest.raises(sb.SerializationError, match="position 1"):
        state.update_many(given.column(layout), range(len(given.values)))
    state.clear_many(column)
    assert keyed.num_entries() == 0


class Held:
    def __init__(self, given: Sample, writer: sb.StateBackend, keyed: Keyed) -> None:
        self.given = given
        self.writer = writer  # what it reads for a snapshot is in its order
        declared = given.declared
        self.values: dict[int, str] = {}
        self.elements: dict[int, list[str]] = {}
        self.entries: dict[int, dict[int, str]] = {}
        self.by_key: dict[int, dict[str, int]] = {}
        self.keys = keys_of(given)[1] if declared.is_key_type else []
        self.open(keyed)

    def open(self, keyed: Keyed) -> None:
        declared = self.given.declared
        self.keyed = keyed
        self.value = keyed.get_value_state(sb.ValueStateDescriptor("v", declared))
        self.list = keyed.get_list_state(sb.ListStateDescriptor("l", declared))
        self.map = keyed.get_map_state(sb.MapStateDescriptor("m", int, declared))
        self.added = [
            (kind, keyed.get_state(kind.descriptor(kind.name, declared)))
            for kind in KINDS
            if kind.name in ("reducing", "aggregating")
        ]
        if self.keys:
            self.keyed_map = keyed.get_map_state(sb.MapStateDescriptor("k", declared, int))

    def change(self, rng: random.Random, rows: int) -> None:
        for _ in range(rows):
            number, value = rng.randrange(12), rng.choice(self.given.values)
            self.keyed.set_current_key(number)
            self.value.update(value)
            self.values[number] = repr(value)
            for kind, state in self.added:
                if value is None:
                    state.clear()
                else:
                    kind.write(state, value)
            if value is None:
                del self.values[number]
                self.list.clear()
                self.elements.pop(number, None)
            else:
                self.list.add(value)
                self.elements.setdefault(number, []).append(repr(value))
            place = rng.randrange(5)
            self.map.remove(place)  # so that it comes back at the end
            self.map.put(place, value)
            own = self.entries.setdefault(number, {})
            own.pop(place, None)
            own[place] = repr(value)
            if self.keys:
                key = rng.choice(self.keys)
                held = self.by_key.setdefault(number, {})
                if repr(key) in held:
                    self.keyed_map.remove(key)
                    del held[repr(key)]
                else:
                    self.keyed_map.put(key, place)
                    held[repr(key)] = place

    def check(self, keyed: Keyed) -> None:
        self.open(keyed)
        shown = self.given.shown(self.value.get_many(range(12)))
        assert shown == [self.values.get(number, "None") for number in range(12)]
        for number in range(12):
            keyed.set_current_key(number)
            assert repr(self.value.value()) == self.values.get(number, "None")
            for kind, state in self.added:
                assert repr(kind.read(state)) == self.values.get(number, "None"), kind.name
            assert texts(self.list.get()) == self.elements.get(number, [])
            assert {place: repr(each) for place, each in self.map.items()} == self.entries.get(number, {})
            assert_same(self.writer, list(self.map), list(self.entries.get(number, {})))
            if self.keys:
                found = {repr(key): place for key, place in self.keyed_map.items()}
                assert_same(self.writer, list(found.items()), list(self.by_key.get(number, {}).items()))


@pytest.mark.parametrize("sort", [*SORTS, *OBJECTS])
def test_values_are_restored(backend: sb.StateBackend, sort: str, tmp_path: Path, rng: random.Random) -> None:
    given = sample(sort, rng)
    with sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=16) as store:
        with backend.create_keyed_backend(int, max_parallelism=16) as keyed:
            held, kinds = Held(given, backend, keyed), set()
            for checkpoint_id, rows in enumerate((60, 5, 1, 9)):
                held.change(rng, rows)
                checkpoint = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
                kinds |= {file.kind for file in checkpoint.files.values()}
                for name in {"reference", backend.name} if checkpoint_id in (1, 3) else ():
                    with sb.create_backend(name).create_keyed_backend(
                        int, max_parallelism=16, restore=checkpoint
                    ) as again:
                        held.check(again)
                held.open(keyed)
            assert kinds == {"base", "delta"}
            savepoint = keyed.savepoint(tmp_path / "savepoint")
        for name in {"reference", backend.name}:
            with sb.create_backend(name).create_keyed_backend(
                int, max_parallelism=16, restore=savepoint
            ) as again:
                held.check(again)


@every_sort_of_key
def test_keys_are_restored(backend: sb.StateBackend, sort: str, tmp_path: Path, rng: random.Random) -> None:
    given = sample(sort, rng)
    _, keys = keys_of(given)
    counted = sb.ValueStateDescriptor("v", int)
    with sb.CheckpointStore(tmp_path / "store").open_for_writing(
        key_type=given.declared, max_parallelism=16
    ) as store:
        keyed = backend.create_keyed_backend(given.declared, max_parallelism=16)
        keyed.get_value_state(counted).update_many(given.column("plain", keys), range(len(keys)))
        store.commit(0, [keyed.snapshot(0, store).result()])
        keyed.get_value_state(counted).update_many(given.column("plain", keys[:1]), [None])
        checkpoint = store.commit(1, [keyed.snapshot(1, store).result()])
        sources = [checkpoint, keyed.savepoint(tmp_path / "savepoint")]
        keyed.close()
        for source, name in itertools.product(sources, {"reference", backend.name}):
            again = sb.create_backend(name).create_keyed_backend(
                given.declared, max_parallelism=16, restore=source
            )
            with again:
                found = again.get_value_state(counted)
                expected = [None, *range(1, len(keys))]
                assert found.get_many(given.column("plain", keys)).to_pylist() == expected
                assert sorted(texts(again.keys("v"))) == sorted(texts(keys[1:]))
