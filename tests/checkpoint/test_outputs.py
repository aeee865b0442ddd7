"""Outputs of batches go earlier than states: only the newest two checkpoints keep theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_files import write

import statebackend as sb
from statebackend.checkpoint import CheckpointStore, StateSnapshot, StoredFile


def commit(store: CheckpointStore, checkpoint_id: int, *states: StoredFile) -> tuple[StoredFile, StoredFile]:
    """A checkpoint with one file of state more, and two outputs of which one has a file."""
    writer = store.begin_snapshot(checkpoint_id)
    state, output = write(writer, b"state", "sst"), write(writer, b"output", "output")
    snapshot = StateSnapshot(checkpoint_id, store.epoch, files=(*states, state))
    store.commit(checkpoint_id, [snapshot], outputs={"main": [output], "late": []})
    return state, output


def outputs_in(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.glob("data/*/*-output-*")}


def test_the_newest_two_keep_theirs(root: Path) -> None:
    with CheckpointStore(root, retain=5).open_for_writing() as store:
        made = [commit(store, checkpoint_id)[1] for checkpoint_id in range(6)]
        assert store.checkpoints() == [1, 2, 3, 4, 5]
        assert outputs_in(root) == {made[4].name, made[5].name}
        for checkpoint_id in range(1, 6):
            checkpoint = store.open(checkpoint_id)
            checkpoint.verify()
            assert checkpoint.has_outputs is (checkpoint_id >= 4)
            assert checkpoint.outputs == (
                {"main": (made[checkpoint_id],), "late": ()} if checkpoint_id >= 4 else {}
            )
            assert checkpoint.manifest.outputs["main"] == (made[checkpoint_id],), (
                "that there was one is known"
            )
    assert store.latest(intact=True) == 5
    assert sb.tools.verify(root).ok
    assert sb.tools.verify(root).left_over == []


def test_they_are_gone_for_good(root: Path) -> None:
    """Neither a rewind nor the next writer brings them back, and nobody misses them."""
    with CheckpointStore(root, retain=5).open_for_writing() as store:
        made = [commit(store, checkpoint_id)[1] for checkpoint_id in range(6)]
        store.rewind(3)
        assert outputs_in(root) == set()
        assert not store.open(3).has_outputs
        _, seventh = commit(store, 4)
        assert [store.open(each).has_outputs for each in store.checkpoints()] == [False, False, False, True]
    with CheckpointStore(root, retain=5).open_for_writing() as store:
        assert outputs_in(root) == {seventh.name}
        _, eighth = commit(store, 5)
        assert outputs_in(root) == {seventh.name, eighth.name}
        assert made[5].name != eighth.name
    assert sb.tools.verify(root).ok


@pytest.mark.parametrize("at", [0, 1])
def test_one_that_is_removed_is_missed_only_while_it_is_kept(root: Path, at: int) -> None:
    with CheckpointStore(root, retain=5).open_for_writing() as store:
        made = [commit(store, checkpoint_id)[1] for checkpoint_id in range(2)]
        (root / made[at].name).unlink()
        with pytest.raises(sb.CorruptCheckpointError, match="a file is missing"):
            store.open(at).verify()
        for checkpoint_id in (2, 3):
            commit(store, checkpoint_id)
        store.open(at).verify()
    assert sb.tools.verify(root).ok
