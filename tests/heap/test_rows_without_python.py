"""No value of a declared type, and no key, becomes a Python object on the way between a table and Arrow."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from arrow_layouts import LAYOUTS
from type_samples import SORTS, SORTS_OF_KEYS, Sample, keys_of, sample

import statebackend as sb
from statebackend.backends.heap import row_loader
from statebackend.columns import stored_columns
from statebackend.keys import encoders

pytestmark = pytest.mark.checked


@pytest.fixture(autouse=True)
def no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace whatever looks at one row after the other."""
    for module, name in (
        (stored_columns, "_by_value"),
        (stored_columns, "_arrow_by_value"),
        (stored_columns, "serializer_for"),
        (encoders, "encode_each"),
        (row_loader, "from_arrow"),
    ):
        monkeypatch.setattr(module, name, None)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sort", SORTS)
def test_columns_of_every_type_and_layout(sort: str, layout: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    count = len(given.values)
    column, elements = given.column(layout), given.column(layout, given.present)
    with sb.create_backend("heap").create_keyed_backend(int) as keyed:
        value = keyed.get_value_state(sb.ValueStateDescriptor("v", given.declared))
        value.update_many(np.arange(count), column)
        assert value.get_many(np.arange(count)).null_count == 2
        listed = keyed.get_list_state(sb.ListStateDescriptor("l", given.declared))
        listed.add_many(np.arange(len(given.present)), elements)
        assert len(listed.get_many(np.arange(count)).values) == len(given.present)
        entries = keyed.get_map_state(sb.MapStateDescriptor("m", int, given.declared))
        entries.put_many(np.arange(count), np.arange(count), column)
        assert entries.get_many(np.arange(count), np.arange(count)).null_count == 2


@pytest.mark.sampled(24)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sort", SORTS_OF_KEYS)
def test_columns_of_keys(sort: str, layout: str, rng: random.Random) -> None:
    given = sample(sort, rng)
    _, keys = keys_of(given)
    column, numbers = given.column(layout, keys), np.arange(len(keys))
    with sb.create_backend("heap").create_keyed_backend(given.declared) as keyed:
        value = keyed.get_value_state(sb.ValueStateDescriptor("v", int))
        value.update_many(column, numbers)
        assert value.get_many(column).to_pylist() == numbers.tolist()
        entries = keyed.get_map_state(sb.MapStateDescriptor("m", given.declared, int))
        entries.put_many(column, column, numbers)
        assert entries.get_many(column, column).to_pylist() == numbers.tolist()


def contents(keyed: Any, given: Sample, states: list[Any]) -> list[pa.Array]:
    value, listed, entries = (keyed.get_state(descriptor) for descriptor in states[:3])
    numbers = np.arange(len(given.values))
    found = [value.get_many(numbers), listed.get_many(numbers), entries.get_many(numbers, numbers)]
    if len(states) > 3:
        keys = given.column("plain", keys_of(given)[1])
        found.append(keyed.get_state(states[3]).get_many(np.zeros(len(keys), np.int64), keys))
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("sort", SORTS)
def test_checkpoints_and_savepoints(sort: str, tmp_path: Path, rng: random.Random) -> None:
    """A base, a delta and a savepoint, and what is restored from them."""
    given = sample(sort, rng)
    states: list[Any] = [
        sb.ValueStateDescriptor("v", given.declared),
        sb.ListStateDescriptor("l", given.declared),
        sb.MapStateDescriptor("m", int, given.declared),
    ]
    if sort in SORTS_OF_KEYS:
        states.append(sb.MapStateDescriptor("k", given.declared, int))
    heap = sb.create_backend("heap")
    with (
        sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int) as store,
        heap.create_keyed_backend(int) as keyed,
    ):
        value, listed, entries, *by_key = map(keyed.get_state, states)
        for checkpoint_id, times in enumerate((30, 1)):  # few enough changes for a delta
            values = (given.values if checkpoint_id else given.values[::-1]) * times
            present = [each for each in values if each is not None]
            many = np.arange(len(values))
            value.update_many(many, given.column("plain", values))
            listed.add_many(np.arange(len(present)), given.column("plain", present))
            entries.put_many(many, many, given.column("plain", values))
            for state in by_key:
                keys = given.column("plain", keys_of(given)[1][checkpoint_id:])
                state.put_many(np.zeros(len(keys), np.int64), keys, np.arange(len(keys)) + checkpoint_id)
            checkpoint = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
        assert {file.kind for file in checkpoint.files.values()} == {"base", "delta"}
        expected = contents(keyed, given, states)
        for source in (checkpoint, keyed.savepoint(tmp_path / "savepoint")):
            with heap.create_keyed_backend(int, restore=source) as again:
                found = contents(again, given, states)
                assert [repr(each.to_pylist()) for each in found] == [
                    repr(each.to_pylist()) for each in expected
                ]
