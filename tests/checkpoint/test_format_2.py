"""What befalls a log of format 2: lost files, writers that meet, answers that nobody knows."""

from __future__ import annotations

import datetime
import errno
import time
from pathlib import Path

import pytest
from simulated_disk import Dead, Disk, SimulatedCalls
from store_files import commit, write

import statebackend as sb
from statebackend.checkpoint import CheckpointStore, StateSnapshot
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.store.checkpoint_reader import CheckpointReader
from statebackend.checkpoint.store.sealed import seal
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
def test_a_store_without_entry_is_opened(without_its_newest: Path, retain: int | datetime.timedelta) -> None:
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
    with pytest.raises(CorruptCheckpointError, match=r"a file is missing \(metadata\.json"):
        CheckpointStore(root).open_for_writing()
    assert not (root / "metadata.json").exists()
    (root / "metadata.json").write_bytes(lost)
    CheckpointStore(root).open_for_writing().close()


def test_store_of_format_1_is_refused_and_unchanged(root: Path) -> None:
    """Format 1 was never released. Its metadata and a manifest, as its writers made them."""
    store_id = "9fa6a4313695662f2ad8dbde651e2985"
    metadata = {"store": store_id, "query": None, "key_type": {"type": "string"}, "max_parallelism": 16}
    manifest = {
        "store": store_id,
        "id": 7,
        "epoch": 1,
        "snapshots": [],
        "files": [],
        "now": None,
        "progress": {},
    }
    for name, content in (("metadata.json", metadata), ("checkpoints/7-1.json", manifest)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(seal({**content, "format": 1}))
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    reader = CheckpointReader(root)
    for call in (
        reader.checkpoints,
        reader.latest,
        reader.open_latest,
        reader.metadata,
        lambda: reader.open(7),
        CheckpointStore(root).open_for_writing,
        lambda: sb.tools.set_time(root, now=7),
    ):
        with pytest.raises(
            CorruptCheckpointError, match="^cannot read format 1; expected format 2"
        ) as caught:
            call()
        assert (caught.value.code, caught.value.detail) == ("CORRUPT_CHECKPOINT.VERSION", "metadata.json")
    assert [each.code for each in sb.tools.verify(root).problems] == ["CORRUPT_CHECKPOINT.VERSION"]
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def store_on(disk: Disk, calls: SimulatedCalls | None = None) -> CheckpointStore:
    return CheckpointStore("/", retain=2, _files=PosixFiles("/store", calls or SimulatedCalls(disk)))


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
    with pytest.raises(StoreError, match=r"\[STORE\.UNKNOWN\]"):
        store.commit(2, [StateSnapshot(2, store.epoch, files=(merged, stored))])
    calls.plan = lambda number, name: None
    store.abort(2)
    merged_writer.abort()
    assert store.latest(intact=True) == 2
    store.close()
    assert store.open_for_writing().latest(intact=True) == 2


def test_parts_removed_while_a_manifest_is_read_are_not_called_damaged() -> None:
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
            if error.code != "USAGE.NO_CHECKPOINT":
                raise


def test_a_file_that_is_output_and_state_stays_with_the_state(root: Path) -> None:
    with CheckpointStore(root, retain=4).open_for_writing() as store:
        both = write(store.begin_snapshot(1))
        output = write(store.begin_snapshot(1), kind="output")
        store.commit(1, [StateSnapshot(1, store.epoch, files=(both,))], outputs={"main": [both, output]})
        for checkpoint_id in (2, 3, 4):
            store.commit(checkpoint_id)
        assert list(store.open(1).files) == [both.name]
        store.open(1).verify()
        assert not (root / output.name).exists()


@pytest.mark.parametrize("refused", ["remove", "read"])
def test_a_pin_of_another_user_does_not_keep_a_store_from_being_opened(refused: str) -> None:
    disk = Disk()
    with store_on(disk).open_for_writing() as store:
        commit(store, 1)
        pin = store.pin(1, lease=1)
    while 1000 * time.time() <= pin._until:
        pass  # until the lease has ended

    class OfAnotherUser(SimulatedCalls):
        def remove(self, path: str) -> None:
            self._check(path, "remove")
            super().remove(path)

        def read(self, path: str) -> bytes:
            self._check(path, "read")
            return super().read(path)

        def _check(self, path: str, name: str) -> None:
            if name == refused and "/pins/" in path:
                raise PermissionError(errno.EACCES, "Permission denied")

    store = store_on(disk, OfAnotherUser(disk)).open_for_writing()
    for checkpoint_id in (2, 3, 4):
        commit(store, checkpoint_id)
    assert store.checkpoints() == [3, 4]


def test_a_pin_that_comes_after_its_outputs_were_dropped_knows() -> None:
    disk = Disk()
    writer = CheckpointStore(
        "/", retain=9, _files=PosixFiles("/store", SimulatedCalls(disk))
    ).open_for_writing()
    output = write(writer.begin_snapshot(1), kind="output")
    writer.commit(1, outputs={"main": [output]})

    def plan(number: int, name: str) -> None:
        if name == "create" and writer.latest() == 1:  # of the pin
            for checkpoint_id in (2, 3):
                writer.commit(checkpoint_id)

    with CheckpointReader("/", _files=PosixFiles("/store", SimulatedCalls(disk, plan))).pin(1) as pin:
        assert not pin.checkpoint.has_outputs
        assert not pin.checkpoint.files
