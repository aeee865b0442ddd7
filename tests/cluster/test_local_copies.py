"""Bases on the local disk of a host: its successor restores from them, if they are whole, and not from the store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from host_queries import data_files
from host_worlds import PARALLELISM, World, ticks
from processes import gone
from refusing_disks import fill

import statebackend as sb
from statebackend.checkpoint.files import PosixFiles, StoreFiles, open_files
from statebackend.cluster.host_files import FilesWithCopies, folder_of_copies

pytestmark = pytest.mark.usefixtures("nothing_left_open")

NAME = "data/1/7-0-base-0123.arrow"


@pytest.fixture
def place(tmp_path: Path) -> StoreFiles:
    place = open_files(tmp_path / "store")
    place.make_folder("data/1")
    return place


def test_a_base_is_kept_and_all_else_is_not(place: StoreFiles, tmp_path: Path) -> None:
    files = FilesWithCopies(place, str(tmp_path / "copies"))
    content = os.urandom(10_000_000)
    with_parts = files.create(NAME)
    for at in range(0, len(content), 777_777):
        with_parts.write(content[at : at + 777_777])
    assert list((tmp_path / "copies").iterdir()), "it is written as it comes"
    assert files.open_input(NAME).read() != b"", "what is not finished is read where it is"
    with_parts.finish()
    files.write("data/1/7-0-delta-0123.arrow", b"delta")
    assert len(list((tmp_path / "copies").iterdir())) == 1
    place.remove(NAME)
    assert files.open_input(NAME).read() == content
    assert files.open_input("data/1/7-0-delta-0123.arrow").read() == b"delta"
    assert place.read("data/1/7-0-delta-0123.arrow") == b"delta"
    files.close()
    assert not (tmp_path / "copies").exists()
    with pytest.raises(FileNotFoundError):
        files.open_input(NAME)


@pytest.mark.parametrize("damage", ["byte", "shorter", "longer", "unreadable"])
def test_a_copy_that_is_not_whole_is_not_used(place: StoreFiles, tmp_path: Path, damage: str) -> None:
    files = FilesWithCopies(place, str(tmp_path / "copies"))
    files.write(NAME, b"content")
    (copy,) = (tmp_path / "copies").iterdir()
    content = copy.read_bytes()
    if damage == "unreadable":
        copy.unlink()
        copy.mkdir()
    else:
        damaged = {"byte": b"cOntent", "shorter": content[:-1], "longer": content + b"!"}
        copy.write_bytes(damaged[damage])
    assert files.open_input(NAME).read() == b"content"
    assert not [each for each in (tmp_path / "copies").iterdir() if each.is_file()], "and is removed"


def test_a_disk_without_room_costs_the_copy_alone(
    place: StoreFiles, tmp_path: Path, small_disk: Path
) -> None:
    fill(small_disk / "ballast")
    for folder in (small_disk / "copies", tmp_path / "file" / "copies"):
        (tmp_path / "file").touch()
        files = FilesWithCopies(place, str(folder))
        name = NAME.replace("0123", str(len(str(folder))))
        files.write(name, bytes(3 << 20))
        assert files.open_input(name).read() == bytes(3 << 20)
        assert files._copies() == []


def test_abandoned_or_removed_file_leaves_no_copy(place: StoreFiles, tmp_path: Path) -> None:
    files = FilesWithCopies(place, str(tmp_path / "copies"))
    sink = files.create(NAME)
    sink.write(b"content")
    sink.abandon()
    sink.abandon()
    assert list((tmp_path / "copies").iterdir()) == []
    files.write(NAME, b"content")
    files.remove(NAME)
    assert files._copies() == []
    with pytest.raises(FileNotFoundError):
        files.open_input(NAME)


def test_copies_of_unnamed_files_are_removed(place: StoreFiles, tmp_path: Path) -> None:
    files = FilesWithCopies(place, str(tmp_path / "copies"))
    names = [NAME.replace("0123", str(number)) for number in range(4)]
    for name in names:
        files.write(name, b"content")
    files.forget(names[:1])
    assert len(files._copies()) == 3
    unfinished = files.create(NAME)
    files.forget(names[:1])
    assert len(files._copies()) == 4
    files.keep_only(names[2:3])
    assert len(files._copies()) == 1
    unfinished.finish()  # its copy is gone; it is not
    assert place.read(NAME) == b""


def test_a_process_takes_over_what_a_killed_one_has_left(tmp_path: Path) -> None:
    dead = gone()

    def left(run: str, number: int, pid: int) -> Path:
        made = tmp_path / f"statebackend-copies-{run}-{number}-{pid}"
        made.mkdir()
        (made / "copy").touch()
        return made

    mine, others, another_run = left("run", 3, dead), left("run", 2, dead), left("before", 3, dead)
    living = left("before", 1, os.getppid())
    found = Path(folder_of_copies(str(tmp_path), "run", 3))
    assert found.name == f"statebackend-copies-run-3-{os.getpid()}"
    assert (found / "copy").exists()
    assert not mine.exists()
    assert others.exists(), "its own successor may come"
    assert living.exists()
    assert not another_run.exists()


@pytest.fixture
def bases_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bases that were read from the store."""
    read: list[str] = []
    open_input = PosixFiles.open_input

    def noted(files: PosixFiles, name: str, size: int | None = None) -> object:
        if "-base-" in name or "-sst-" in name:
            read.append(name)
        return open_input(files, name, size)

    monkeypatch.setattr(PosixFiles, "open_input", noted)
    return read


def kill(world: World, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """A host goes as if by SIGKILL: it does not tidy up."""
    with monkeypatch.context() as killed:
        killed.setattr(FilesWithCopies, "close", lambda files: None)
        world.cluster.lose(0)
        meanwhile()
        world.batch()


def damage(world: World) -> None:
    for copy in world.temporary.glob("statebackend-copies-*/*"):
        copy.write_bytes(b"damaged")


def test_a_successor_restores_from_the_local_disk(
    world: World, monkeypatch: pytest.MonkeyPatch, bases_read: list[str]
) -> None:
    world.open(local_copies=True)
    world.batch()
    world.batch()
    assert len(list(world.temporary.glob("statebackend-copies-*/*"))) >= PARALLELISM, "there are bases"
    kill(world, monkeypatch, lambda: None)
    assert bases_read == []
    world.batch()


def test_bases_of_batches_that_were_taken_back_have_no_copies(world: World) -> None:
    """The first of a new state is a base; and the one after a rollback is, too."""
    world.open(local_copies=True)
    left = [3]

    def die() -> None:
        left[0] -= 1
        if left[0] == 0:
            world.cluster.die()

    for _ in range(3):
        left[0] = 3
        ticks[:] = [die]
        world.batch()
    ticks.clear()
    named = {name.rpartition("/")[2] for name in data_files(world.folder)[1]}
    copies = [each.name.partition("~")[0] for each in world.temporary.glob("statebackend-copies-*/*")]
    assert copies
    assert [each for each in copies if each.rpartition("_")[2] not in named] == []


def test_verification_reads_the_file_and_not_its_copy(world: World, bases_read: list[str]) -> None:
    """A base that was written in the background is named once it has been read again: its copy would prove nothing."""
    query = world.open(local_copies=True)
    world.batch()
    bases = [each for each in query.store.open_latest().manifest.all_files.values() if each.kind == "base"]
    assert bases
    for base in bases:
        with world.cluster.hosts[0]._writer.read_back(base):
            pass
    assert bases_read == [each.name for each in bases]


def test_a_successor_without_a_whole_copy_restores_from_the_store(
    world: World, monkeypatch: pytest.MonkeyPatch, bases_read: list[str]
) -> None:
    world.open(local_copies=True)
    world.batch()
    damage(world)
    kill(world, monkeypatch, lambda: damage(world))
    assert bases_read
    world.batch()


@pytest.mark.parametrize("is_far", [True, False], ids=["far", "near"])
def test_files_of_a_database_have_copies(
    world: World, monkeypatch: pytest.MonkeyPatch, bases_read: list[str], is_far: bool
) -> None:
    """In a base of RocksDB's own files each has one; what is near is linked as it is."""
    if is_far:  # a name that is no path, as those in an object store
        monkeypatch.setattr(PosixFiles, "address", lambda files, name: f"far://{name}")
    world.open(local_copies=True, backend=sb.create_backend("rocksdb", checkpoints="native"))
    world.batch()
    world.batch()
    copies = [each.name for each in world.temporary.glob("statebackend-copies-*/*")]
    assert sum("-sst-" in each for each in copies) >= PARALLELISM
    kill(world, monkeypatch, lambda: None)
    assert bases_read == []
    if is_far:
        damage(world)
        kill(world, monkeypatch, lambda: damage(world))
        assert any("-sst-" in each for each in bases_read)
    world.batch()


def test_without_them_nothing_is_copied(
    world: World, monkeypatch: pytest.MonkeyPatch, bases_read: list[str]
) -> None:
    world.open()
    world.batch()
    assert not list(world.temporary.glob("statebackend-copies-*"))
    kill(world, monkeypatch, lambda: None)
    assert bases_read, "from a folder, the store is near enough"
