"""A store of format 1 becomes one of format 2 with the first commit, and is whole wherever that is cut off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from simulated_disk import Dead, Disk, File, Folder, SimulatedCalls
from store_files import commit, write
from store_story import check_nothing_left

import statebackend as sb
from statebackend.checkpoint import CheckpointStore, StateSnapshot
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.store.reader import CheckpointReader
from statebackend.checkpoint.store.sealed import seal
from statebackend.errors import CommitConflictError

GOLDEN = Path(__file__).parents[1] / "golden" / "1" / "store"
#: The checkpoint of the golden store.
NEWEST = 2


@pytest.fixture
def old(root: Path) -> Path:
    shutil.copytree(GOLDEN, root)
    return root


def format_of(root: Path) -> int:
    return json.loads((root / "metadata.json").read_bytes())["format"]


def test_opening_leaves_a_store_as_older_versions_read_it(old: Path) -> None:
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    assert CheckpointStore(old).latest() == NEWEST
    with CheckpointStore(old).open_for_writing() as store:
        assert store.latest() == NEWEST
        write(store.begin_snapshot(3))
        store.abort(3)
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    assert format_of(old) == 1


@pytest.mark.parametrize("first", ["commit", "set_time", "rewind", "restart"])
def test_the_first_entry_upgrades(old: Path, first: str) -> None:
    with CheckpointStore(old, retain=2).open_for_writing() as store:
        incarnation, epoch = store.incarnation, store.epoch
        if first == "commit":
            commit(store, 3, *store.open(NEWEST).files.values())
            assert store.checkpoints() == [NEWEST, 3]
        elif first == "set_time":
            store.set_time(7)
            assert store.open_latest().now == 7
        elif first == "rewind":
            store.rewind(None)
        else:
            store.restart(begins_at=9)
            assert store.done.begins_at == 9
        assert store.epoch == epoch
        assert (store.incarnation == incarnation) is (first in ("commit", "set_time"))
    assert format_of(old) == 2
    with CheckpointStore(old, retain=2).open_for_writing() as store:
        assert store.epoch > epoch
        for checkpoint_id in (4, 5):
            commit(store, checkpoint_id)
        assert store.checkpoints() == [4, 5]
        assert not list(old.glob("checkpoints/*-*.json")), "the last of format 1 has gone"


def test_what_was_done_to_an_old_store_is_known(old: Path) -> None:
    """Records of format 1: a restart, a rewind, and a time for the newest checkpoint."""
    store_id = json.loads((old / "metadata.json").read_bytes())["store"]
    shared = {
        "keeps": None,
        "begins_at": None,
        "first_batch": None,
        "now": None,
        "upon": None,
        "store": store_id,
    }
    records = [
        {"kind": "restart", "number": 0, "incarnation": "1" * 32, "begins_at": 1, "first_batch": 1},
        {"kind": "time", "number": 1, "incarnation": None, "now": 5, "upon": [NEWEST, 9]},
        {"kind": "time", "number": 2, "incarnation": None, "now": 77, "upon": [NEWEST, 1]},
        {"kind": "rewind", "number": 3, "incarnation": "2" * 32, "keeps": 2},
    ]
    for each in records:
        content = seal({**shared, "format": 1, "epoch": 1, **each})
        (old / "checkpoints" / f"record-1-{each['number']}.json").write_bytes(content)
    for upgrade in (False, True):
        with CheckpointStore(old).open_for_writing() as store:
            if upgrade:
                commit(store, 3, *store.open(NEWEST).files.values())
            assert store.incarnation == "2" * 32
            assert store.open(NEWEST).now == 77
            assert store.done.newest_restart is None
            assert (store.done.begins_at, store.done.has_restarted_for(1)) == (1, True)
        assert [each.kind for each in CheckpointReader(old).records()] == [
            "restart",
            "time",
            "time",
            "rewind",
        ]
    with CheckpointStore(old).open_for_writing() as store:
        assert (store.incarnation, store.open(NEWEST).now) == ("2" * 32, 77)


# ------------------------------------------------------------------------------------ cut off anywhere


def old_disk() -> Disk:
    disk = Disk()

    def fill(folder: Folder, path: Path) -> None:
        for each in path.iterdir():
            if each.is_dir():
                folder.entries[each.name] = inner = Folder()
                fill(inner, each)
            else:
                folder.entries[each.name] = File(each.read_bytes())
        folder.sync()

    disk.root.entries["store"] = store = Folder()
    fill(store, GOLDEN)
    disk.root.sync()
    return disk


def store_on(disk: Disk, calls: SimulatedCalls | None = None) -> CheckpointStore:
    return CheckpointStore("/", _files=PosixFiles("/store", calls or SimulatedCalls(disk)))


def upgrade(store: CheckpointStore) -> None:
    store.open_for_writing()
    for checkpoint_id in (3, 4, 5):
        commit(store, checkpoint_id, *store.open_latest().files.values())
    store.close()


def check_is_whole(disk: Disk, possible: set[int]) -> int:
    reader = CheckpointReader("/", _files=PosixFiles("/store", SimulatedCalls(disk)))
    newest = reader.latest()
    assert newest in possible
    assert reader.latest(intact=True) == newest
    for each in reader.checkpoints():
        reader.open(each).verify()
    return newest


@pytest.mark.parametrize("policy", ["kept", "lost", "mixed"])
def test_an_upgrade_that_is_killed_before_every_call(policy: str) -> None:
    clean = SimulatedCalls(old_disk())
    upgrade(store_on(clean.disk, clean))
    assert check_is_whole(clean.disk, {5}) == 5
    found = set()
    for at in range(len(clean.made)):
        disk = old_disk()
        store = store_on(
            disk, SimulatedCalls(disk, lambda number, name, at=at: "die" if number == at else None)
        )
        committed = NEWEST
        try:
            store.open_for_writing()
            for checkpoint_id in (3, 4, 5):
                commit(store, checkpoint_id, *store.open_latest().files.values())
                committed = checkpoint_id
            store.close()
        except Dead:
            pass
        left = disk.crash(policy, at)
        newest = check_is_whole(left, {committed, committed + 1})
        found.add(newest)
        again = store_on(left).open_for_writing()
        assert again.latest() == newest
        for checkpoint_id in range(newest + 1, newest + 4):
            commit(again, checkpoint_id)
        again.close()
        again.open_for_writing()
        start = len("/store/")
        check_nothing_left(again, [p[start:] for p in left.walk() if len(p) > start], again.epoch)
    assert found == {2, 3, 4, 5}


def test_of_two_that_upgrade_one_wins() -> None:
    """The second opens before every call of the first's opening and first commit."""
    clean = SimulatedCalls(old_disk())
    first = store_on(clean.disk, clean).open_for_writing()
    commit(first, 3, *first.open(NEWEST).files.values())
    outcomes = set()
    for at in range(len(clean.made)):
        disk = old_disk()
        second: list[CheckpointStore] = []

        def plan(number: int, name: str, at: int = at, disk: Disk = disk, second: list = second) -> None:
            if number == at:
                second.append(store_on(disk).open_for_writing())

        first = store_on(disk, SimulatedCalls(disk, plan))
        try:
            first.open_for_writing()
            commit(first, 3, *first.open(NEWEST).files.values())
            has_won = True
        except CommitConflictError:
            has_won = False
        outcomes.add(has_won)
        (other,) = second
        if other.is_open_for_writing and other.latest() == NEWEST:
            taken = write(other.begin_snapshot(3))
            if has_won:
                with pytest.raises(CommitConflictError):
                    other.commit(3, [StateSnapshot(3, other.epoch, files=(taken,))])
            else:
                other.commit(3, [StateSnapshot(3, other.epoch, files=(taken,))])
        assert check_is_whole(disk, {3}) == 3
    assert outcomes == {True, False}


def test_golden_state_goes_on_after_the_upgrade(old: Path) -> None:
    backend = sb.create_backend("heap")
    count = sb.ValueStateDescriptor("grown", "bigint")
    with (
        CheckpointStore(old).open_for_writing() as store,
        backend.create_keyed_backend("string", max_parallelism=16, restore=store.open(NEWEST)) as keyed,
    ):
        keyed.get_state(count).update_many(["a key"], [7])
        store.commit(3, [keyed.snapshot(3, store).result()])
    assert CheckpointStore(old).open(3).snapshots[0].files[0].epoch == 1, "it builds on files of format 1"
    with backend.create_keyed_backend(
        "string", max_parallelism=16, restore=CheckpointStore(old).open(3)
    ) as keyed:
        assert keyed.get_state(count).get_many(["a key"]).to_pylist() == [7]
