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

pytestmark = pytest.mark.usefixtures("no_fsync")


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


@pytest.mark.sampled(4)
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
    copy = sb.tools.drop_state(root, "thing", target=tmp_path / "without")
    left = [name for name in DESCRIPTORS if name != "thing"]
    with create(backend, key_type, restore=copy) as again:
        assert again.undeclared_states() == sorted(left)
        assert contents(again, left) == [each for each in held if each[0] != "thing"]
        assert [row for row in contents(again, ["thing"]) if len(row) == 4] == []
