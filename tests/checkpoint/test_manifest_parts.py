"""Manifests whose parts lie in files of their own, for ranges and for states; each is named again while unchanged."""

from __future__ import annotations

import collections
import dataclasses
import errno
import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from simulated_disk import Disk, SimulatedCalls
from store_files import write

import statebackend as sb
from statebackend.checkpoint import CheckpointStore, StateSnapshot, StoredFile
from statebackend.checkpoint.files import PosixFiles
from statebackend.keys import range_for

GROUPS = 256


class Ranges:
    def __init__(self, store: CheckpointStore, parallelism: int) -> None:
        self.store = store
        self.parallelism = parallelism
        self.files: list[tuple[StoredFile, ...]] = [()] * parallelism
        self.owners = [range_for(GROUPS, parallelism, index) for index in range(parallelism)]

    def snapshots(self, checkpoint_id: int, *changed: int) -> list[StateSnapshot]:
        for index in changed:
            made = write(self.store.begin_snapshot(checkpoint_id), b"of %d" % index, "sst")
            self.files[index] = (*self.files[index], made)
        return [
            StateSnapshot(
                checkpoint_id, self.store.epoch, index, self.parallelism, own, files, now=1000 * checkpoint_id
            )
            for index, (own, files) in enumerate(zip(self.owners, self.files, strict=True))
        ]

    def commit(self, checkpoint_id: int, *changed: int) -> sb.Checkpoint:
        return self.store.commit(checkpoint_id, self.snapshots(checkpoint_id, *changed))


def parts_in(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.glob("data/*/*-manifest-*")}


def names(checkpoint: sb.Checkpoint) -> list[str | None]:
    return [None if part is None else part.name for part in checkpoint.manifest.parts]


def test_a_part_is_named_again_while_its_range_is_unchanged(root: Path) -> None:
    with CheckpointStore(root, retain=2).open_for_writing(max_parallelism=GROUPS) as store:
        ranges = Ranges(store, 4)
        first = names(ranges.commit(0, 0, 1, 2, 3))
        assert len({*first}) == 4
        second = names(ranges.commit(1, 2))
        assert [here == there for here, there in zip(first, second, strict=True)] == [True, True, False, True]
        assert parts_in(root) == {*first, second[2]}
        third = names(ranges.commit(2))
        assert third == second
        assert parts_in(root) == {*second}, "the first's own part has gone with it"
        for checkpoint_id in store.checkpoints():
            checkpoint = store.open(checkpoint_id)
            checkpoint.verify()
            assert {each.checkpoint_id for each in checkpoint.snapshots} == {checkpoint_id}
            assert {each.now for each in checkpoint.snapshots} == {checkpoint_id * 1000}
            assert [each.key_groups for each in checkpoint.snapshots] == ranges.owners
        assert [each.files for each in store.open(2).snapshots] == ranges.files
    # The next writer knows them, too.
    with CheckpointStore(root, retain=2).open_for_writing() as store:
        known = store.open(2).snapshots
        again = store.commit(3, [each.to_json() | {"id": 3} for each in known])
        assert names(again) == third
    assert sb.tools.verify(root).ok


def test_one_range_is_in_the_manifest(root: Path) -> None:
    with CheckpointStore(root).open_for_writing(max_parallelism=GROUPS) as store:
        checkpoint = Ranges(store, 1).commit(0, 0)
        assert names(checkpoint) == [None]
        operator = StateSnapshot(1, store.epoch)
        own = StateSnapshot(1, store.epoch, key_groups=range_for(GROUPS, 1, 0))
        assert names(store.commit(1, [own, operator])) == [None, None]
    assert parts_in(root) == set()


def test_a_manifest_of_256_ranges_stays_small(root: Path) -> None:
    """Each with 64 files: as a whole it would be 4 MB, 16,384 files to look at."""
    with CheckpointStore(root).open_for_writing(max_parallelism=GROUPS) as store:
        ranges = Ranges(store, 256)
        shared = tuple(write(store.begin_snapshot(0), b"%d" % each, "sst") for each in range(64))
        ranges.files = [shared] * 256
        ranges.commit(0)
        checkpoint = ranges.commit(1, 7)
        entry = root / checkpoint.manifest.name
        assert entry.stat().st_size < 80_000
        assert sum("part" in each for each in json.loads(entry.read_bytes())["snapshots"]) == 256
        assert len(parts_in(root)) == 257
        assert store.open(1).snapshots == checkpoint.snapshots


@pytest.mark.parametrize("damage", ["lost", "cut", "flipped", "another's"])
@pytest.mark.parametrize("what", ["parts of ranges", "descriptions of states"])
def test_a_file_of_a_manifest_that_is_not_as_it_was_written(root: Path, what: str, damage: str) -> None:
    with CheckpointStore(root, retain=3).open_for_writing(max_parallelism=GROUPS) as store:
        ranges = Ranges(store, 2)
        if what == "parts of ranges":
            ranges.commit(0, 0, 1)
            other, path = (root / str(name) for name in names(ranges.commit(1, 0, 1)))
        else:
            snapshots = [StateSnapshot(each, store.epoch, states=many(200 + each)) for each in range(2)]
            committed = [store.commit(each.checkpoint_id, [each]) for each in snapshots]
            other, path = (root / str(described(each)[0]) for each in committed)
    content = path.read_bytes()
    if damage == "lost":
        path.unlink()
    else:
        flipped = content[:30] + bytes([content[30] ^ 1]) + content[31:]
        path.write_bytes({"cut": content[:-3], "flipped": flipped, "another's": other.read_bytes()}[damage])
    reader = CheckpointStore(root)
    with pytest.raises(sb.CorruptCheckpointError, match=path.name):
        reader.open(1)
    assert reader.latest(intact=True) == 0
    assert not sb.tools.verify(root).ok
    before = set(root.glob("data/*/*"))
    with CheckpointStore(root, retain=1).open_for_writing() as store:
        assert set(root.glob("data/*/*")) >= before, "nobody can tell what the checkpoint names"
        store.rewind(0)
        assert store.open(0).verify() is None


def test_parts_of_a_commit_that_fails_are_removed() -> None:
    disk = Disk()
    calls = SimulatedCalls(disk)
    store = CheckpointStore("/", _files=PosixFiles("/store", calls)).open_for_writing(max_parallelism=GROUPS)
    ranges = Ranges(store, 2)
    ranges.commit(0, 0, 1)
    snapshots = ranges.snapshots(1, 0)
    before = set(disk.walk())
    creates = 0

    def full(number: int, name: str) -> object:
        nonlocal creates
        creates += name == "create"
        return (
            errno.ENOSPC if name == "create" and creates == 2 else None
        )  # the part is there, the entry is not

    calls.plan = full
    with pytest.raises(sb.StoreError, match="nothing was committed"):
        store.commit(1, snapshots)
    calls.plan = lambda number, name: None
    assert set(disk.walk()) == before
    assert store.commit(1, snapshots).id == 1


class Waiting(PosixFiles):
    """Files that count the requests that are under way at once, by kind, and fail where they are told."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.changed = threading.Condition()
        self.under_way = 0
        self.most: collections.Counter[str] = collections.Counter()
        #: No request for a file of data ends before there were so many at once of its kind.
        self.awaited = 0
        self.fails: Callable[[str, str], bool] = lambda what, name: False

    def _while(self, what: str, name: str) -> None:
        with self.changed:
            self.under_way += 1
            self.most[what] = max(self.most[what], self.under_way)
            self.changed.notify_all()
            if name.startswith("data/"):
                assert self.changed.wait_for(lambda: self.most[what] >= self.awaited, timeout=20)
        time.sleep(0.002)  # others that come at the same time are seen
        with self.changed:
            self.under_way -= 1
        if self.fails(what, name):
            raise OSError(errno.EIO, "as told")

    def write(self, name: str, content: bytes) -> None:
        super().write(name, content)
        self._while("write", name)

    def size(self, name: str) -> int | None:
        self._while("size", name)
        return super().size(name)

    def retire(self, names: Iterable[str], epoch: int) -> None:
        told = list(names)
        self._while("retire", told[0])
        super().retire(told, epoch)


def test_many_ranges_wait_for_the_store_together(root: Path) -> None:
    files = Waiting(str(root))
    with CheckpointStore(root, retain=1, _files=files).open_for_writing(max_parallelism=GROUPS) as store:
        ranges = Ranges(store, 64)
        files.awaited = 9
        for checkpoint_id in range(3):
            files.most.clear()
            checkpoint = ranges.commit(checkpoint_id, *range(64))
            assert min(files.most[what] for what in ("write", "size")) > 8
            checkpoint.verify()
        assert files.most["retire"] > 8, "parts of the checkpoint before"
        assert [each.key_groups for each in checkpoint.snapshots] == ranges.owners
        assert parts_in(root) == {*names(checkpoint)}, "those of before are gone"
        files.awaited = 0
        files.most.clear()
        ranges.commit(3, 5)
        assert set(files.most.values()) == {1}, "few requests are made one after the other"


@pytest.mark.parametrize("what", ["write", "size"])
def test_nothing_stays_of_many_parts_if_one_cannot_be_written(root: Path, what: str) -> None:
    files = Waiting(str(root))
    with CheckpointStore(root, _files=files).open_for_writing(max_parallelism=GROUPS) as store:
        ranges = Ranges(store, 64)
        first = ranges.commit(0, *range(64))
        snapshots = ranges.snapshots(1, *range(64))
        bad = snapshots[40].files[-1].name
        files.fails = lambda kind, name: kind == what and (name == bad or "/1-40-manifest-" in name)
        before = {path for path in root.rglob("*") if path.is_file()}
        with pytest.raises(sb.StoreError, match="as told"):
            store.commit(1, snapshots)
        files.fails = lambda what, name: False
        after = {path for path in root.rglob("*") if path.is_file()}
        left = after - before
        assert len(left) <= (1 if what == "write" else 0), "the one whose writing has failed is not known"
        assert store.latest() == 0
        store.open(0).verify()
        assert names(first) == names(store.open(0))
        store.commit(1, snapshots).verify()


def test_files_that_cannot_be_removed_are_removed_after_the_next_commit(root: Path) -> None:
    files = Waiting(str(root))
    with CheckpointStore(root, retain=1, _files=files).open_for_writing(max_parallelism=GROUPS) as store:
        ranges = Ranges(store, 64)
        ranges.commit(0, *range(64))
        ranges.files = [()] * 64
        files.fails = lambda what, name: what == "retire" and "-3" in name
        ranges.commit(1, *range(64))
        assert len(list(root.glob("data/*/*"))) > 128
        files.fails = lambda what, name: False
        ranges.commit(2)
        assert len(list(root.glob("data/*/*"))) == 128
        assert sb.tools.verify(root).ok


def described(checkpoint: sb.Checkpoint) -> list[str | None]:
    return [None if file is None else file.name for file in checkpoint.manifest.described]


def many(count: int, kind: str = "value") -> list[dict[str, str]]:
    return [{"name": f"state {number}", "kind": kind} for number in range(count)]


@pytest.mark.parametrize("parallelism", [1, 3])
def test_descriptions_of_many_states_are_sealed_once_and_named_again(root: Path, parallelism: int) -> None:
    def commit(checkpoint_id: int, states: list[dict[str, str]]) -> sb.Checkpoint:
        taken = ranges.snapshots(checkpoint_id, 0)
        return store.commit(checkpoint_id, [dataclasses.replace(each, states=states) for each in taken])

    with CheckpointStore(root, retain=2).open_for_writing(max_parallelism=GROUPS) as store:
        ranges = Ranges(store, parallelism)
        few = commit(0, many(20))
        assert described(few) == [None] * parallelism
        first, second = commit(1, many(2_000)), commit(2, many(2_000))
        (name,) = {*described(first), *described(second)}
        assert name is not None
        assert (root / second.manifest.name).stat().st_size < 8_000
        assert len([*root.glob("data/*/*-states-*")]) == 1
        for checkpoint_id in (1, 2):
            opened = CheckpointStore(root).open(checkpoint_id)
            assert [list(each.states) for each in opened.snapshots] == [many(2_000)] * parallelism
            assert opened.files[name].size == (root / name).stat().st_size
            opened.verify()
    with CheckpointStore(root, retain=2).open_for_writing() as store:
        ranges.store = store
        assert {*described(commit(3, many(2_000)))} == {name}, "the next writer names them again"
        assert {*described(commit(4, many(2_001)))} != {name}
        assert (root / name).exists()
        (other,) = {*described(commit(5, many(2_001)))}
        assert not (root / name).exists(), "they have gone with the last checkpoint that named them"
        assert described(commit(6, many(2_001, "list"))) != [other] * parallelism
    assert sb.tools.verify(root).ok
