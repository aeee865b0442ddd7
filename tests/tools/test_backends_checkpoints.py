"""Copies of checkpoints of real backends: what is in them is what is restored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS
from keyed_stores import KEY_TYPES, create, without_groups
from keyed_story import DESCRIPTORS, Story, contents

import statebackend as sb

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("key_type", KEY_TYPES.values(), ids=KEY_TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_hold_what_it_holds(tmp_path: Path, backend: str, key_type: Any, rng: random.Random) -> None:
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
            target = tmp_path / f"copy-{max_parallelism}"
            copy = sb.tools.rescale(root, target, max_parallelism=max_parallelism)
            for into in BACKENDS:
                with create(into, key_type, max_parallelism=max_parallelism, restore=copy) as again:
                    assert without_groups(contents(again)) == without_groups(held)
    sb.tools.drop_state(root, "thing", target=tmp_path / "without")
    copy = sb.CheckpointStore(tmp_path / "without").open_latest()
    left = [name for name in DESCRIPTORS if name != "thing"]
    with create(backend, key_type, restore=copy) as again:
        assert again.undeclared_states() == sorted(left)
        assert contents(again, left) == [each for each in held if each[0] != "thing"]
        assert [row for row in contents(again, ["thing"]) if len(row) == 4] == []
