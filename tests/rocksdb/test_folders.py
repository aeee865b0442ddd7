"""Folders of databases: those of killed processes go at the next start, those of living ones and of others stay."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from processes import started

import statebackend as sb
from statebackend.backends.rocksdb import scratch as folders
from statebackend.backends.rocksdb.scratch import LockedFolder, remove_left_folders
from statebackend.errors import StoreError

LIVING = """
import os, sys, time
import statebackend as sb
keyed = sb.create_backend("rocksdb", local_dir=sys.argv[1]).create_keyed_backend(int)
keyed.get_value_state(sb.ValueStateDescriptor("v", int)).update_many(range(1000), range(1000))
keyed.scratch.database.flush()
{more}
print(keyed.scratch.folder, flush=True)
time.sleep(600)
"""


def said(process: subprocess.Popen[str]) -> Path:
    """The folder of the database of a living process."""
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder that this process has not yet looked at."""
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


def test_files_of_a_killed_process_are_removed_at_the_next_start(local: Path) -> None:
    with started(LIVING.format(more=""), local) as living:
        with started(LIVING.format(more=""), local) as killed:
            other, its = said(living), said(killed)
            assert {path.name for path in its.iterdir()} == {"db", "lock"}
            assert list(its.glob("db/*.sst"))
        assert sorted(local.iterdir()) == sorted([its, other])
        with sb.create_backend("rocksdb", local_dir=local).create_keyed_backend(int) as keyed:
            assert sorted(local.iterdir()) == sorted([other, Path(keyed.scratch.folder)])
            assert (other / "db" / "CURRENT").exists()
    assert remove_left_folders(local) == [str(other)]
    assert list(local.iterdir()) == []


def test_a_folder_stays_while_a_forked_child_lives(local: Path) -> None:
    forking = "child = os.fork()\nif not child: time.sleep(600)\nprint(child, flush=True)"
    with started(LIVING.format(more=forking), local) as process:
        child, its = int(said(process).name), said(process)
    try:
        assert remove_left_folders(local) == []
        assert (its / "db" / "CURRENT").exists()
    finally:
        os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while remove_left_folders(local) != [str(its)]:  # the child is nobody's: its end cannot be waited for
        assert time.monotonic() < deadline


def test_foreign_files_stay(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "statebackend-rocksdb-"
    (tmp_path / "elsewhere" / "db").mkdir(parents=True)
    (tmp_path / "elsewhere" / "lock").touch()
    (local / f"{name}link").symlink_to(tmp_path / "elsewhere")
    (local / f"{name}file").write_text("")
    (local / f"{name}older" / "db").mkdir(parents=True)  # of a version that had no locks: it may be running
    (local / f"{name}begun").mkdir()
    (local / f"{name}link-for-lock").mkdir()
    (local / f"{name}link-for-lock" / "lock").symlink_to(tmp_path / "elsewhere" / "lock")
    (local / "another").mkdir()
    (local / "another" / "lock").touch()
    before = sorted(path for path in tmp_path.rglob("*"))
    assert remove_left_folders(local) == []
    assert sorted(path for path in tmp_path.rglob("*")) == before
    os.utime(local / f"{name}older", (0, 0))
    os.utime(local / f"{name}begun", (0, 0))
    assert remove_left_folders(local) == [str(local / f"{name}begun")]
    (local / f"{name}somebody's").mkdir()
    (local / f"{name}somebody's" / "lock").touch()
    me = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: me + 1)
        assert remove_left_folders(local) == []
    assert remove_left_folders(local) == [str(local / f"{name}somebody's")]
    assert remove_left_folders(tmp_path / "nowhere") == []


def test_a_folder_that_is_taken_for_a_left_one_is_made_again(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks right between the making of a folder and its locking."""
    real, taken = folders._locked, []

    def locked(folder: str, flags: int = 0) -> int:
        if flags and len(taken) < 3:
            taken.append(folder)
            if len(taken) == 1:
                os.rmdir(folder)
            elif len(taken) == 2:  # removed after it was opened
                handle = os.open(f"{folder}/lock", os.O_CREAT | os.O_RDWR)
                os.close(handle)
                assert remove_left_folders(local) == [folder]
            else:
                open(f"{folder}/lock", "w").close()
                held = real(folder)
                with pytest.raises(BlockingIOError):
                    real(folder, flags)
                os.close(held)
                raise BlockingIOError(11, "held")
        return real(folder, flags)

    monkeypatch.setattr(folders, "_locked", locked)
    made = LockedFolder(str(local))
    assert made.path not in taken
    assert remove_left_folders(local) == [taken[2]]
    assert Path(made.path, "lock").exists()
    made.remove()
    assert list(local.iterdir()) == []


def test_without_locks_nothing_is_removed(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(handle: int, how: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(folders.fcntl, "flock", no_locks)
    made = LockedFolder(str(local))
    assert list(Path(made.path).iterdir()) == []
    monkeypatch.undo()
    assert remove_left_folders(local) == []
    made.remove()
    assert list(local.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="making a folder") as error:
        LockedFolder(str(tmp_path / "nowhere"))
    assert error.value.code == "STORE.DATABASE"


STARTING = """
import sys
from statebackend.backends.rocksdb.scratch import LockedFolder, remove_left_folders
import pathlib
while True:
    remove_left_folders(sys.argv[1])
    made = LockedFolder(sys.argv[1])
    remove_left_folders(sys.argv[1])
    folder = pathlib.Path(made.path, "db")
    folder.mkdir()
    assert (folder.parent / "lock").exists()
    made.remove()
    print(".", flush=True)
"""


@pytest.mark.slow
def test_processes_that_start_and_die_at_once(local: Path, rng: random.Random) -> None:
    """Nobody removes the folder of a living one, which would fail, and nothing is left."""
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        for _ in range(2):
            processes += [stack.enter_context(started(STARTING, local)) for _ in range(3)]
            for each in processes[-3:]:
                for _ in range(rng.randrange(1, 30)):
                    assert said(each) == Path(".")
            for each in processes[-3:-1]:
                each.kill()
        for each in processes:
            assert each.poll() in (None, -signal.SIGKILL), "it has lost its folder"
    remove_left_folders(local)
    for begun in local.iterdir():
        begun.rmdir()  # empty: killed before it was locked
