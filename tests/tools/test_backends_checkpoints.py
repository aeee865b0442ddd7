"""The tools on checkpoints of real backends: what they read and copy is what is restored."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS
from keyed_stores import KEY_TYPES, create, without_groups
from keyed_story import DESCRIPTORS, Story, contents

import statebackend as sb
from statebackend import types as t
from statebackend.state.value_columns import to_values


def rows_of(name: str, key_type: Any, root: Path) -> list[Any]:
    """A state as `contents` has it, from its table."""
    table = sb.tools.read_state(root, name)
    descriptor = DESCRIPTORS[name]()
    stored = list(descriptor.stored_types().values())[-1]
    read = pickle.loads if stored == t.PICKLE else plain
    is_list, is_map = descriptor.kind == "list", descriptor.kind == "map"
    column_type = t.BYTES if stored == t.PICKLE else stored
    columns = {
        "key": [plain(key) for key in to_values(table["key"], t.of(key_type))],
        "namespace": [None] * table.num_rows,
        "map_key": [None] * table.num_rows,
        **{each: table[each].to_pylist() for each in table.schema.names if each in ("namespace", "map_key")},
        "value": to_values(table["value"], t.LIST(column_type) if is_list else column_type),
    }
    found: dict[Any, Any] = {}
    for key, namespace, map_key, value in zip(*columns.values(), strict=True):
        held = None if value is None else list(map(read, value)) if is_list else read(value)
        place = (name, key, "VOID" if namespace is None else namespace)
        if is_map:
            found.setdefault(place, []).append((map_key, held))
        else:
            assert place not in found
            found[place] = held
    return sorted(((*place, held) for place, held in found.items()), key=repr)


def plain(value: Any) -> Any:
    """Rows as tuples, whatever they come as."""
    return (
        tuple(value.values())
        if isinstance(value, dict)
        else tuple(value)
        if isinstance(value, tuple)
        else value
    )


def plain_contents(name: str, found: list[Any]) -> list[Any]:
    keep = DESCRIPTORS[name]().stored_types().get("value") == t.PICKLE
    rows = [
        (state, plain(key), namespace, held if keep else plain(held))
        for state, key, namespace, held in (row for row in found if len(row) == 4)
        if state == name
    ]
    return sorted(rows, key=repr)


#: All but the one whose table has accumulators.
READABLE = [name for name in DESCRIPTORS if name != "mean"]


@pytest.mark.parametrize("key_type", KEY_TYPES.values(), ids=KEY_TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_and_copies_hold_what_the_backend_holds(
    tmp_path: Path, backend: str, key_type: Any, rng: random.Random
) -> None:
    root = tmp_path / "state"
    with (
        create(backend, key_type) as keyed,
        sb.CheckpointStore(root).open_for_writing(key_type=key_type, max_parallelism=32) as store,
    ):
        story = Story(keyed, rng, key_type)
        story.change(1500)
        for checkpoint_id, max_parallelism in enumerate((7, 128, 1)):
            for _ in range(3):
                story.change(40)
            store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            held = contents(keyed)
            for name in READABLE:
                assert rows_of(name, key_type, root) == plain_contents(name, held)
            target = tmp_path / f"copy-{max_parallelism}"
            copy = sb.tools.rescale(root, target, max_parallelism)
            for into in BACKENDS:
                with create(into, key_type, max_parallelism=max_parallelism, restore=copy) as again:
                    assert without_groups(contents(again)) == without_groups(held)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_was_dropped_is_not_restored(tmp_path: Path, backend: str, rng: random.Random) -> None:
    root = tmp_path / "state"
    with (
        create(backend, str) as keyed,
        sb.CheckpointStore(root).open_for_writing(key_type=str, max_parallelism=32) as store,
    ):
        story = Story(keyed, rng, str)
        for checkpoint_id in range(3):
            story.change(300)
            store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
        held = contents(keyed)
    copy = sb.tools.drop_state(root, "thing", target=tmp_path / "copy")
    left = [name for name in DESCRIPTORS if name != "thing"]
    with create(backend, str, restore=copy) as keyed:
        assert keyed.undeclared_states() == sorted(left)
        assert contents(keyed, left) == [each for each in held if each[0] != "thing"]
        assert [row for row in contents(keyed, ["thing"]) if len(row) == 4] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_that_nobody_asked_for_are_read_and_copied(
    tmp_path: Path, backend: str, rng: random.Random
) -> None:
    """They are written as histories of changes."""
    root = tmp_path / "state"
    with (
        create(backend, int) as keyed,
        sb.CheckpointStore(root).open_for_writing(key_type=int, max_parallelism=32) as store,
    ):
        story = Story(keyed, rng, int)
        for checkpoint_id in range(6):
            story.change(200)
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
        held = contents(keyed)
        with create(backend, int, restore=committed) as again:
            store.commit(6, [again.snapshot(6, store, incremental=False).result()])
    for name in READABLE:
        assert rows_of(name, int, root) == plain_contents(name, held)
    copy = sb.tools.rescale(root, tmp_path / "copy", 5)
    with create(backend, int, max_parallelism=5, restore=copy) as again:
        assert without_groups(contents(again)) == without_groups(held)
