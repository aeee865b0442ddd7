"""What befalls a log of format 2: lost files, writers that meet, answers that nobody knows."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from simulated_disk import Dead, Disk, SimulatedCalls
from store_files import commit, write

import statebackend as sb
from statebackend.checkpoint import CheckpointStore, StateSnapshot
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.store.reader import CheckpointReader
from statebackend.errors import CommitConflictError, CorruptCheckpointError, StoreError, UsageError
from statebackend.keys import range_for


def commit_ranges(store: CheckpointStore, checkpoint_id: int) -> None:
    """A checkpoint of two ranges of key groups, so that its manifest has parts."""
    snapshots = []
    for subtask in range(2):
        stored = write(store.begin_snapshot(checkpoint_id))
        groups = range_for(128, 2, subtask)
        snapshots.append(StateSnapshot(checkpoint_id, store.epoch, subtask, 2, groups, (stored,)))
    store.commit(checkpoint_id, snapshots)


@pytest.fixture
def without_its_newest(root: Path) -> Path:
    """A store with a takeover as its newest entry, that has lost the entry of its newest checkpoint, 3."""
    with CheckpointStore(root, retain=3).open_for_writing() as store:
        for checkpoint_id in (1, 2, 3):
            commit(store, checkpoint_id)
    CheckpointStore(root, retain=3).open_for_writing().close()
    (root / "checkpoints" / "4.json").unlink()
    return root


def test_a_checkpoint_whose_entry_is_lost_is_damaged(without_its_newest: Path) -> None:
    reader = CheckpointReader(without_its_newest)
    with pytest.raises(CorruptCheckpointError, match=r"missing \(checkpoints/4\.json\)"):
        reader.open(3)
    assert reader.latest(intact=True) == 2
    report = sb.tools.verify(without_its_newest)
    assert "checkpoints/4.json" in [each.file for each in report.problems]
    assert report.left_over == [], "the lost entry may name anything"


@pytest.mark.parametrize("retain", [3, datetime.timedelta(days=1)])
def test_a_store_that_has_lost_an_entry_is_opened(
    without_its_newest: Path, retain: int | datetime.timedelta
) -> None:
    with CheckpointStore(without_its_newest, retain=retain).open_for_writing() as store:
        assert [each.id for each in store.rewind(2)] == []
        commit(store, 3, *store.open(2).files.values())
        assert store.latest(intact=True) == 3
        assert store.checkpoints() == [1, 2, 3]


def test_a_store_without_metadata_and_checkpoints_is_not_given_others(root: Path) -> None:
    with CheckpointStore(root).open_for_writing() as store:
        commit(store, 0)
        store.rewind(None)
    lost = (root / "metadata.json").read_bytes()
    (root / "metadata.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"a file is missing \(metadata\.json\)"):
        CheckpointStore(root).open_for_writing()
    assert not (root / "metadata.json").exists()
    (root / "metadata.json").write_bytes(lost)
    CheckpointStore(root).open_for_writing().close()


def store_on(disk: Disk, calls: SimulatedCalls | None = None) -> CheckpointStore:
    return CheckpointStore("/", _files=PosixFiles("/store", calls or SimulatedCalls(disk)))


def cut_off_in_retention() -> Disk:
    """A store whose writer was killed before it removed the checkpoint that its last commit drops."""
    disk = Disk()
    calls = SimulatedCalls(disk)
    store = store_on(disk, calls).open_for_writing()
    for checkpoint_id in (1, 2):
        commit(store, checkpoint_id)
    calls.plan = lambda number, name: "die" if name == "rename" else None
    with pytest.raises(Dead):
        commit(store, 3)
    return disk


def test_who_clears_away_and_is_overtaken_is_told() -> None:
    """The second opens before every call of an opening that finishes what retention has left."""
    disk = cut_off_in_retention()
    calls = SimulatedCalls(disk)
    store_on(disk, calls).open_for_writing()
    assert "rename" in calls.made
    for at in range(len(calls.made)):
        disk = cut_off_in_retention()

        def plan(number: int, name: str, at: int = at, disk: Disk = disk) -> None:
            if number == at:
                store_on(disk).open_for_writing()

        try:
            store_on(disk, SimulatedCalls(disk, plan)).open_for_writing()
        except CommitConflictError:
            pass
        assert store_on(disk).latest(intact=True) == 3


def test_aborting_what_may_be_committed_leaves_its_files() -> None:
    disk = Disk()
    calls = SimulatedCalls(disk)
    store = store_on(disk, calls).open_for_writing()
    commit(store, 1)
    stored = write(store.begin_snapshot(2))
    merged_writer = store.begin_snapshot()
    merged = write(merged_writer, kind="base")
    calls.plan = lambda number, name: "fail" if calls.made[-1] == "link" else None  # the sync after the link
    with pytest.raises(StoreError) as caught:
        store.commit(2, [StateSnapshot(2, store.epoch, files=(merged, stored))])
    assert caught.value.code == "STORE.UNKNOWN"
    calls.plan = lambda number, name: None
    store.abort(2)
    merged_writer.abort()
    assert store.latest(intact=True) == 2
    store.close()
    assert store.open_for_writing().latest(intact=True) == 2


def test_parts_that_go_while_a_manifest_is_read_are_no_damage() -> None:
    disk = Disk()
    calls = SimulatedCalls(disk)
    commit_ranges(store_on(disk).open_for_writing(), 1)
    CheckpointReader("/", _files=PosixFiles("/store", calls)).open(1)
    for at in range(len(calls.made)):
        disk = Disk()
        store = store_on(disk).open_for_writing()
        commit_ranges(store, 1)

        def plan(number: int, name: str, at: int = at, store: CheckpointStore = store) -> None:
            if number == at:
                for checkpoint_id in (2, 3):
                    commit_ranges(store, checkpoint_id)

        try:
            CheckpointReader("/", _files=PosixFiles("/store", SimulatedCalls(disk, plan))).open(1)
        except UsageError as error:
            assert error.code == "USAGE.NO_CHECKPOINT"
