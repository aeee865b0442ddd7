"""Copies of stores that fail or are killed: no store is left that a query would open as an empty one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from refusing_disks import fill, small_disk  # noqa: F401 - a fixture
from simulated_disk import Dead, Disk, SimulatedCalls

import statebackend as sb
from statebackend.checkpoint import CheckpointStore
from statebackend.checkpoint.files import PosixFiles, StoreFiles
from statebackend.errors import CorruptCheckpointError, StoreError, UsageError

KEYS = list(range(300))
KEPT = sb.ValueStateDescriptor("kept", bytes)
DROPPED = sb.MapStateDescriptor("dropped", str, int)

TOOLS: dict[str, Callable[[Any, Any], object]] = {
    "backup": lambda source, target: sb.tools.backup(source, target, checkpoint_location=None),
    "restore": lambda source, target: sb.tools.restore(source, target, checkpoint_location=None),
    "rescale": lambda source, target: sb.tools.rescale(source, target, max_parallelism=8),
    "drop_state": lambda source, target: sb.tools.drop_state(source, "dropped", target=target),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one checkpoint of keyed state, operator state, and a watermark that was set for it."""
    root = tmp_path_factory.mktemp("source")
    with (
        CheckpointStore(root) as store,
        store.open_for_writing(query="q", key_type=int, max_parallelism=16),
        sb.create_backend("heap").create_keyed_backend(int, max_parallelism=16) as keyed,
        sb.OperatorStateBackend() as operator,
    ):
        keyed.get_state(KEPT).update_many(KEYS, [os.urandom(8) for _ in KEYS])
        keyed.get_state(DROPPED).put_many(KEYS, ["a"] * len(KEYS), KEYS)
        operator.get_list_state(sb.ListStateDescriptor("offsets", int)).add_all([1, 2])
        store.commit(7, [keyed.snapshot(7, store).result(), operator.snapshot(7, store).result()], now=1000)
        store.set_time(watermark=900)
    return root


def stored_files(files: StoreFiles) -> list[str]:
    """The files below a store's root, apart from names in the folders of epochs."""
    found = [name for name in files.names("") if name.endswith(".json")]
    found += [f"checkpoints/{name}" for name in files.names("checkpoints") if name.endswith(".json")]
    for folder in files.names("data"):
        found += [f"data/{folder}/{name}" for name in files.names(f"data/{folder}")]
    return found


def is_whole_or_refused(files: StoreFiles) -> bool:
    """Open a target as a query does. True if all of the copy exists, False if the store is refused."""
    store = CheckpointStore("/", _files=files)
    if store.metadata() is None:
        with pytest.raises(CorruptCheckpointError, match=r"metadata\.json.*remove the folder"):
            store.open_for_writing(query="q", key_type=int)
        with pytest.raises((UsageError, CorruptCheckpointError)):
            store.open_latest()
        return False
    store.open_for_writing(query="q", key_type=int)
    with store:
        checkpoint = store.open_latest()
        checkpoint.verify()
        assert (checkpoint.id, checkpoint.now, checkpoint.watermark) == (7, 1000, 900)
        with sb.create_backend("heap").create_keyed_backend(
            int, max_parallelism=checkpoint.metadata.max_parallelism, restore=checkpoint
        ) as keyed:
            assert keyed.get_state(KEPT).exists_many(KEYS).to_pylist() == [True] * len(KEYS)
    return True


@pytest.mark.parametrize("tool", TOOLS)
def test_a_copy_is_whole_or_refused_when_its_process_dies_at_any_call(source: Path, tool: str) -> None:
    clean = SimulatedCalls(Disk())
    TOOLS[tool](source, CheckpointStore("/", _files=PosixFiles("/copy", clean)))
    outcomes = set()
    for at in range(len(clean.made)):
        disk = Disk()
        calls = SimulatedCalls(disk, lambda number, name, at=at: "die" if number >= at else None)
        with pytest.raises(Dead):
            TOOLS[tool](source, CheckpointStore("/", _files=PosixFiles("/copy", calls)))
        for policy in ("kept", "lost", "mixed"):
            files = PosixFiles("/copy", SimulatedCalls(disk.crash(policy, at)))
            if not stored_files(files):
                outcomes.add("nothing")
            elif is_whole_or_refused(files):
                outcomes.add("whole")
            else:
                outcomes.add("refused")
                with pytest.raises(CorruptCheckpointError, match=r"metadata\.json"):
                    TOOLS[tool](source, CheckpointStore("/", _files=files))
    assert outcomes == {"nothing", "refused", "whole"}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("stays_full", [False, True])
def test_nothing_is_left_when_a_call_fails(source: Path, tool: str, stays_full: bool) -> None:
    """Each writing call fails in its turn, alone or with all that follow."""
    clean = SimulatedCalls(Disk())
    TOOLS[tool](source, CheckpointStore("/", _files=PosixFiles("/copy", clean)))
    writing = ("create", "write", "sync", "sync_folder", "link", "make_folder")
    left = set()
    for at, name in enumerate(clean.made):
        if name not in writing:
            continue

        def plan(number: int, name: str, at: int = at) -> object:
            fails = number == at or (stays_full and number > at and name in writing)
            return errno.ENOSPC if fails else None

        disk = Disk()
        with pytest.raises(StoreError):
            TOOLS[tool](source, CheckpointStore("/", _files=PosixFiles("/copy", SimulatedCalls(disk, plan))))
        files = PosixFiles("/copy", SimulatedCalls(disk))
        if stored_files(files):
            left.add("whole" if is_whole_or_refused(files) else "refused")
            assert name == "sync_folder"  # the outcome of a write is not known
        else:
            TOOLS[tool](source, CheckpointStore("/", _files=files))  # the same target, once there is room
            assert is_whole_or_refused(files)
    assert left == {"refused", "whole"}


def test_a_target_that_is_a_store_is_refused(source: Path, tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "empty").open_for_writing(query="q").close()
    for tool in TOOLS.values():
        with pytest.raises(UsageError, match="the target is a store already"):
            tool(source, tmp_path / "empty")
    assert CheckpointStore(tmp_path / "empty").checkpoints() == []


def test_a_savepoint_in_a_folder_with_files_of_an_unfinished_one_is_refused(tmp_path: Path) -> None:
    """SIGKILL in the middle leaves files, and no description of them."""
    table = pa.table({"key": KEYS, "kept": [b"x"] * len(KEYS)})
    made = sb.tools.bootstrap(tmp_path, table, key="key", descriptors=[KEPT])
    (described,) = (tmp_path / "_savepoint").iterdir()
    described.unlink()
    for restore in (tmp_path, made):
        with pytest.raises(UsageError, match="no savepoint found"):
            sb.create_backend("heap").create_keyed_backend(int, restore=restore)
    with pytest.raises(UsageError, match="not finished") as caught:
        sb.tools.bootstrap(tmp_path, table, key="key", descriptors=[KEPT])
    assert caught.value.hint == "remove the folder, or give another one"


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("statebackend.tools.rewrite.Progress.advance", interrupted)
    for name, tool in TOOLS.items():
        with pytest.raises(KeyboardInterrupt):
            tool(source, tmp_path / name)
        assert stored_files(PosixFiles(str(tmp_path / name))) == []
