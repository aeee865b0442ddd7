"""What a store promises to whoever writes to it, on a real disk."""

from __future__ import annotations

import errno
import json
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from processes import run
from refusing_disks import SealOff, fill, read_only, small_disk
from store_files import commit, write

import statebackend as sb
from statebackend.checkpoint import CheckpointStore, StateSnapshot, StoredFile
from statebackend.checkpoint.store.checkpoint_reader import CheckpointReader
from statebackend.errors import (
    ClosedError,
    CommitConflictError,
    CorruptCheckpointError,
    StateMigrationError,
    StoreError,
    UsageError,
)
from statebackend.keys.key_groups import KeyGroupRange

__all__ = ["read_only", "small_disk"]


def data_files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.glob("data/*/*")}


def test_committed_content_is_read_back(store: CheckpointStore) -> None:
    writer = store.begin_snapshot(7)
    with writer.create("base", subtask=1, key_groups=KeyGroupRange(64, 127), label="all of it") as file:
        assert file.write(b"") == 0
        assert file.write(np.arange(100_000)) == 800_000
        assert file.write(memoryview(b"tail")) == 4
        assert file.tell() == 800_004
        stored = file.finish()
    assert stored.size == 800_004
    output = write(writer, b"rows", "output")
    state = {"name": "sum", "kind": "value", "types": {"value": {"type": "long"}}, "ttl": False}
    snapshot = StateSnapshot(
        7, store.epoch, 1, 2, KeyGroupRange(64, 127), (stored,), (state,), now=5000, extra={"keys": 3}
    )
    taken = store.commit(7, [snapshot.to_json()], files=[output], progress={"numRowsTotal": 3})

    assert store.checkpoints() == [7]
    assert store.latest() == store.latest(intact=True) == 7
    for opened in (taken, store.open(7), store.open_readonly().open(7)):
        assert opened.snapshots == (snapshot,)
        assert (opened.id, opened.epoch, opened.now) == (7, store.epoch, 5000)
        assert opened.manifest.progress == {"numRowsTotal": 3}
        assert opened.metadata.key_type == {"type": "long"}
        assert set(opened.files) == {stored.name, output.name}
        assert opened.read_file(output) == b"rows"
        assert opened.read_file(stored) == np.arange(100_000).tobytes() + b"tail"
        opened.verify()
        assert Path(opened.address(output)).read_bytes() == b"rows"


def test_the_layout_is_as_documented(store: CheckpointStore, root: Path) -> None:
    stored = commit(store, 3)
    assert {path.relative_to(root).as_posix() for path in root.rglob("*")} == {
        "metadata.json",
        "checkpoints",
        "checkpoints/1.json",
        "checkpoints/2.json",
        "checkpoints/epoch-1",
        "data",
        "data/1",
        stored.name,
    }
    assert json.loads((root / "metadata.json").read_text())["query"] == "q"
    takeover = json.loads((root / "checkpoints/1.json").read_text())
    assert [takeover[name] for name in ("format", "kind", "sequence", "epoch")] == [2, "takeover", 1, 1]
    commit_of_3 = json.loads((root / "checkpoints/2.json").read_text())
    assert (commit_of_3["kind"], commit_of_3["sequence"], commit_of_3["id"]) == ("commit", 2, 3)
    assert commit_of_3["log"]["kept"] == [[3, 2, 1]]
    assert commit_of_3["snapshots"][0]["files"] == [stored.to_json()]
    assert takeover["token"] != commit_of_3["token"]


def test_files_that_only_look_alike_are_left_alone(store: CheckpointStore, root: Path) -> None:
    commit(store, 3)
    strange = [
        "checkpoints/04.json",
        "checkpoints/4.json~",
        "checkpoints/04-1.json",
        "checkpoints/-4.json",
        "checkpoints/x",
        "data/mine",
        "data/1/.hidden",
    ]
    for name in strange:
        (root / name).write_text("not ours")
    (root / "data/01").mkdir()
    again = CheckpointStore(root)
    again.open_for_writing()
    assert again.checkpoints() == [3]
    assert all((root / name).exists() for name in [*strange, "data/01"])


def test_nothing_is_made_by_reading(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert store.checkpoints() == []
    assert store.latest() is None
    assert store.latest(intact=True) is None
    assert store.metadata() is None
    with pytest.raises(UsageError, match="there is no checkpoint 1 .*there are: none"):
        store.open(1)
    assert list(tmp_path.iterdir()) == []


def test_an_import_of_the_library_loads_nothing_compiled() -> None:
    code = (
        "import sys, statebackend, statebackend.checkpoint; statebackend.CheckpointStore('/nowhere').latest();"
        "assert not [m for m in sys.modules if m.startswith('statebackend._core.')];"
        "assert 'pyarrow.fs' not in sys.modules"
    )
    run(code)


def test_ids_are_committed_in_order_and_once(store: CheckpointStore) -> None:
    commit(store, 5)
    stored = write(store.begin_snapshot(5))
    with pytest.raises(CommitConflictError, match="checkpoint 5 is already committed"):
        store.commit(5, [StateSnapshot(5, store.epoch, files=(stored,))])
    with pytest.raises(UsageError, match="checkpoint 4 cannot follow checkpoint 5"):
        store.commit(4)
    # The loser has lost nothing: what it wrote is there until it gives it up.
    store.commit(6, [StateSnapshot(6, store.epoch, files=(stored,))])
    assert store.open(6).read_file(stored) == b"content"


def test_a_second_writer_fences_the_first(store: CheckpointStore, root: Path) -> None:
    commit(store, 0)
    pending = store.begin_snapshot(1)
    stored = write(pending)
    file = pending.create("delta")
    file.write(b"half")

    other = CheckpointStore(root).open_for_writing()
    assert other.epoch > store.epoch
    with pytest.raises(CommitConflictError, match="another writer has opened the store"):
        store.commit(1, [StateSnapshot(1, store.epoch, files=(stored,))])
    with pytest.raises(CommitConflictError, match="another writer has opened the store"):
        store.begin_snapshot(2)
    write(pending)  # into a folder that is kept for what checkpoint 0 names: the next to open removes it
    commit(other, 1)
    assert other.checkpoints() == store.checkpoints() == [0, 1]
    pending.abort()
    store.open_for_writing()
    with pytest.raises(CommitConflictError):
        commit(other, 2)
    commit(store, 2)
    assert store.checkpoints() == [1, 2]


def test_a_fenced_writer_without_committed_files_is_told_early(store: CheckpointStore, root: Path) -> None:
    pending = store.begin_snapshot(0)
    CheckpointStore(root).open_for_writing()
    with pytest.raises(CommitConflictError, match="opened by another writer"):
        pending.create("delta")


def test_a_writer_that_is_fenced_in_the_middle_of_a_commit_is_told_so(
    store: CheckpointStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = StateSnapshot(0, store.epoch, files=(write(store.begin_snapshot(0)),))
    sync_folder = store._files.sync_folder

    def fenced_before(folder: str) -> None:
        CheckpointStore(root).open_for_writing()  # which removes a folder that no checkpoint names
        sync_folder(folder)

    monkeypatch.setattr(store._files, "sync_folder", fenced_before)
    with pytest.raises(CommitConflictError, match="another writer has opened the store"):
        store.commit(0, [snapshot])
    assert store.checkpoints() == []


def test_a_store_belongs_to_one_query_key_type_and_parallelism(store: CheckpointStore, root: Path) -> None:
    with pytest.raises(UsageError, match="the store belongs to another query"):
        CheckpointStore(root).open_for_writing(query="other")
    with pytest.raises(StateMigrationError, match=r"made for another key_type .*bigint there, string here"):
        CheckpointStore(root).open_for_writing(key_type=str)
    with pytest.raises(StateMigrationError, match="made for another max_parallelism .*128 there, 64 here"):
        CheckpointStore(root).open_for_writing(max_parallelism=64)
    with pytest.raises(UsageError, match="another query"):
        store.open_for_writing(query="other")
    # A refusal comes before anything else: the writer is still the writer.
    commit(store, 0)
    assert store.open_for_writing(query="q", key_type="bigint", max_parallelism=128).epoch == 1


def test_a_snapshot_with_a_missing_or_short_file_is_not_committed(store: CheckpointStore, root: Path) -> None:
    stored = write(store.begin_snapshot(0))
    snapshot = StateSnapshot(0, store.epoch, files=(stored,))
    content = (root / stored.name).read_bytes()
    for change in (content[:-1], content + b"x", None):
        (root / stored.name).unlink()
        if change is not None:
            (root / stored.name).write_bytes(change)
        with pytest.raises(CorruptCheckpointError, match=stored.name):
            store.commit(0, [snapshot])
        assert store.checkpoints() == []
        (root / stored.name).write_bytes(content)
    store.commit(0, [snapshot])


def test_a_snapshot_of_an_earlier_writer_is_not_committed(store: CheckpointStore, root: Path) -> None:
    """Its files are not named by a checkpoint, so that nothing would keep them from being removed."""
    stored = write(store.begin_snapshot(0))
    store.open_for_writing()
    store.close()
    store.open_for_writing()
    (root / stored.name).parent.mkdir(exist_ok=True)
    (root / stored.name).write_bytes(b"content")
    with pytest.raises(UsageError, match=r"file of an earlier writer.*\[USAGE\.STALE_SNAPSHOT\]"):
        store.commit(0, [StateSnapshot(0, 1, files=(stored,))])


@pytest.mark.parametrize(
    ("snapshots", "message"),
    [
        ([{"id": 0}], "a snapshot has no epoch, extra, files"),
        ([StateSnapshot(1, 1)], "a snapshot is one of another checkpoint"),
        (
            [
                StateSnapshot(0, 1, 0, 2, files=(StoredFile("data/1/a", "base", 1, 1),)),
                StateSnapshot(0, 1, 1, 2, files=(StoredFile("data/1/a", "base", 2, 1),)),
            ],
            "data/1/a is named twice, with different content",
        ),
        ([{**StateSnapshot(0, 1).to_json(), "extra": {"x": object()}}], "extra is not JSON-able"),
        ([{**StateSnapshot(0, 1).to_json(), "extra": {"x": float("nan")}}], "extra is not JSON-able"),
    ],
)
def test_wrong_snapshots_are_refused(store: CheckpointStore, snapshots: list, message: str) -> None:
    for snapshot in snapshots:
        for file in getattr(snapshot, "files", ()):
            (Path(store.uri) / file.name).write_bytes(b"x" * file.size)
    with pytest.raises(UsageError, match=message):
        store.commit(0, snapshots)
    commit(store, 0)  # the store goes on


def test_bad_arguments_are_refused(store: CheckpointStore, root: Path) -> None:
    for value, message in ((object(), "Object of type object"), (float("nan"), "Out of range float")):
        with pytest.raises(UsageError, match=f"must be JSON-able: {message}"):
            store.commit(0, progress={"x": value})
    for retain in (0, -1, True, "2"):
        with pytest.raises(UsageError, match="unknown retain=|not a duration"):
            CheckpointStore(root, retain=retain)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a data file is one of base, delta"):
        store.begin_snapshot(0).create("bases")
    with pytest.raises(UsageError, match=r"is not in data/<epoch>/"):
        store.begin_snapshot(0).create("base", suffix="/../x")
    for wrong in (-1, True):
        with pytest.raises(UsageError, match="the checkpoint id is not an integer"):
            store.commit(wrong)
    with pytest.raises(UsageError, match="opened by its id"):
        store.open("1")  # type: ignore[arg-type]
    for uri in ("", b"/x", "ftp://bucket/x", "file://host/x"):
        with pytest.raises(UsageError):
            CheckpointStore(uri)  # type: ignore[arg-type]
    commit(store, 0)  # the store goes on


def test_a_store_that_is_not_open_for_writing_says_so(store: CheckpointStore) -> None:
    store.close()
    store.close()
    for call in (
        lambda: store.epoch,
        lambda: store.commit(0),
        lambda: store.begin_snapshot(0),
        store.restart,
    ):
        with pytest.raises(ClosedError, match=r"call open_for_writing\(\) first"):
            call()


@pytest.mark.parametrize("retain", [1, 2, 3])
def test_retention_keeps_the_newest_and_their_files(root: Path, retain: int) -> None:
    store = CheckpointStore(root, retain=retain).open_for_writing()
    chain: list[StoredFile] = []
    named: dict[int, set[str]] = {}
    for checkpoint_id in range(12):
        if checkpoint_id % 5 == 0:
            chain = []
        chain.append(commit(store, checkpoint_id, *chain))
        named[checkpoint_id] = {file.name for file in chain}
        kept = range(max(0, checkpoint_id + 1 - retain), checkpoint_id + 1)
        assert store.checkpoints() == list(kept)
        there, needed = data_files(root), set().union(*(named[each] for each in kept))
        assert there >= needed
        # What was dropped just now is removed with the next commit, and not later.
        assert there - needed <= named.get(kept[0] - 1, set())
    store.close()
    assert data_files(root) == needed


def test_a_snapshot_in_flight_keeps_what_it_builds_on(root: Path) -> None:
    """It began on checkpoint 0; 1 to 3, with a base of their own, are committed meanwhile."""
    store = CheckpointStore(root, retain=1).open_for_writing()
    base = commit(store, 0)
    late = store.begin_snapshot(4)
    for checkpoint_id in (1, 2, 3):
        commit(store, checkpoint_id)
    assert store.checkpoints() == [3]
    assert base.name in data_files(root)
    stored = write(late)
    store.commit(4, [StateSnapshot(4, store.epoch, files=(base, stored))])
    assert store.open(4).read_file(base) == b"of 0"
    commit(store, 5)
    commit(store, 6)
    assert base.name not in data_files(root)


def test_aborted_snapshot_releases_the_files_that_it_builds_on(root: Path) -> None:
    store = CheckpointStore(root, retain=1).open_for_writing()
    base = commit(store, 0)
    store.begin_snapshot(4)
    commit(store, 1)
    commit(store, 2)
    assert base.name in data_files(root)
    store.abort(4)
    commit(store, 3)
    assert base.name not in data_files(root)


def test_files_in_flight_survive_commits_and_aborts_of_others(root: Path) -> None:
    store = CheckpointStore(root, retain=1).open_for_writing()
    mine, background = store.begin_snapshot(9), store.begin_snapshot()
    written = [write(mine), write(background, kind="base")]
    half = mine.create("delta")
    half.write(b"x")
    for checkpoint_id in range(4):
        commit(store, checkpoint_id)
        store.begin_snapshot(5)
        store.abort(5)
    assert {file.name for file in written} <= data_files(root)
    assert half.name in data_files(root)
    written.append(half.finish())
    store.commit(9, [StateSnapshot(9, store.epoch, files=tuple(written))])
    commit(store, 10, *written)
    mine.abort()
    background.abort()  # what is committed is no longer theirs to remove
    store.open(10).verify()


def test_a_restart_drops_everything(store: CheckpointStore, root: Path) -> None:
    commit(store, 7)
    commit(store, 8)
    writer = store.begin_snapshot(9)
    with pytest.raises(UsageError, match="snapshots are in flight"):
        store.restart()
    writer.abort()
    store.restart()
    assert store.checkpoints() == []
    assert data_files(root) == set()
    commit(store, 0)
    assert store.checkpoints() == [0]


def test_an_abort_removes_the_files_of_a_snapshot(store: CheckpointStore, root: Path) -> None:
    writer = store.begin_snapshot(3)
    write(writer)
    half = writer.create("base")
    half.write(b"half")
    kept = write(store.begin_snapshot(4))
    store.abort(3)
    assert data_files(root) == {kept.name}
    for call in (lambda: half.write(b"more"), half.finish):
        with pytest.raises(UsageError, match="given up"):
            call()
    with pytest.raises(UsageError, match="has been aborted"):
        writer.create("delta")
    store.abort(3)


def test_a_file_that_is_left_without_finish_is_removed(store: CheckpointStore, root: Path) -> None:
    writer = store.begin_snapshot(3)
    with writer.create("delta") as file:
        file.write(b"x")
        assert len(data_files(root)) == 1
    assert data_files(root) == set()
    assert file.closed
    assert writer.unsettled == []


def test_an_abort_while_another_thread_writes(store: CheckpointStore, root: Path) -> None:
    for _ in range(20):
        writer = store.begin_snapshot(3)
        began = threading.Event()
        ended: list[BaseException] = []

        def work(writer: sb.checkpoint.DataWriter = writer, began: threading.Event = began) -> None:
            try:
                while True:
                    with writer.create("delta") as file:
                        for _ in range(5):
                            file.write(b"x" * 100_000)
                            began.set()
                        file.finish()
            except UsageError as error:
                ended.append(error)  # noqa: B023 - joined within the loop

        thread = threading.Thread(target=work)
        thread.start()
        assert began.wait(30)
        store.abort(3)
        thread.join()
        assert "given up" in str(ended[0]) or "aborted" in str(ended[0])
        assert data_files(root) == set()


def test_snapshots_are_written_by_many_threads(store: CheckpointStore) -> None:
    for checkpoint_id in range(5):
        snapshots: list[StateSnapshot] = []

        def work(subtask: int, checkpoint_id: int = checkpoint_id, to: list = snapshots) -> None:
            stored = write(store.begin_snapshot(checkpoint_id), b"%d" % subtask * 10_000)
            to.append(StateSnapshot(checkpoint_id, store.epoch, subtask, 16, files=(stored,)))

        threads = [threading.Thread(target=work, args=(subtask,)) for subtask in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.commit(checkpoint_id, snapshots).verify()
    assert store.checkpoints() == [3, 4]


def test_another_process_writes_for_the_writer(store: CheckpointStore, root: Path) -> None:
    code = (
        "import json, pickle, sys; from statebackend.checkpoint import StateSnapshot;"
        "writer = pickle.load(sys.stdin.buffer);"
        "file = writer.create('delta', subtask=1); file.write(b'from afar'); stored = file.finish();"
        "writer.sync();"
        "print(json.dumps(StateSnapshot(0, writer.epoch, 1, 2, files=(stored,)).to_json()))"
    )

    def elsewhere() -> dict:
        return json.loads(run(code, input=pickle.dumps(store.data_writer(0))).stdout)  # type: ignore[no-any-return]

    won, lost = elsewhere(), elsewhere()
    checkpoint = store.commit(0, [won])
    assert [checkpoint.read_file(file) for file in checkpoint.files.values()] == [b"from afar"]
    store.discard(lost)
    store.discard(won)  # it is committed: nothing happens
    assert data_files(root) == set(checkpoint.files)


def test_a_local_file_is_copied_in(store: CheckpointStore, tmp_path: Path) -> None:
    source = tmp_path / "000012.sst"
    source.write_bytes(os.urandom(3_000_000))
    writer = store.begin_snapshot(0)
    stored = writer.add(source, "sst", label=source.name)
    assert stored.name.endswith(".sst")
    assert stored.label == "000012.sst"
    checkpoint = store.commit(0, [StateSnapshot(0, store.epoch, files=(stored,))])
    assert checkpoint.read_file(stored) == source.read_bytes()
    with pytest.raises(StoreError, match="copying missing.sst"):
        writer.add(tmp_path / "missing.sst", "sst")
    assert writer.unsettled == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_not_the_writer(store: CheckpointStore) -> None:
    code = (
        "import os, sys, tempfile; from statebackend.checkpoint import CheckpointStore\n"
        "from statebackend.errors import UsageError\n"
        "store = CheckpointStore(sys.argv[1]).open_for_writing()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        store.commit(0)\n"
        "    except UsageError as error:\n"
        "        store.close()\n"
        "        os._exit(40 if 'another process' in str(error) else 1)\n"
        "    os._exit(2)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 40\n"
        "store.commit(0)\n"
        "print(store.checkpoints())\n"
    )
    store.close()
    assert run(code, store.uri).stdout == "[0]\n"


def test_a_full_disk(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "store").open_for_writing()
    commit(store, 0)
    with pytest.raises(StoreError, match="No space left on device") as caught:
        write(store.begin_snapshot(1), os.urandom(2_000_000))
    assert caught.value.errno == errno.ENOSPC
    store.abort(1)
    commit(store, 1)  # there is room again: nothing was left behind
    # Full to the last byte: not even a manifest can be written.
    stored = write(store.begin_snapshot(2))
    ballast = small_disk / "ballast"
    fill(ballast)
    with pytest.raises(StoreError, match="nothing was committed") as caught:
        store.commit(2, [StateSnapshot(2, store.epoch, files=(stored,))])
    assert caught.value.errno == errno.ENOSPC
    assert store.checkpoints() == [0, 1]
    assert store.latest(intact=True) == 1
    ballast.unlink()
    store.commit(2, [StateSnapshot(2, store.epoch, files=(stored,))])
    assert store.latest(intact=True) == 2


def test_a_read_only_folder_is_not_written(store: CheckpointStore, root: Path, read_only: SealOff) -> None:
    stored = commit(store, 0)
    pending = store.begin_snapshot(1)
    store.begin_snapshot(2)
    read_only(root)
    reader = CheckpointReader(root)
    assert reader.latest(intact=True) == 0
    assert reader.open(0).read_file(stored) == b"of 0"
    with pytest.raises(StoreError, match="creating data/1/1-0-delta"):
        pending.create("delta")
    with pytest.raises(StoreError, match="nothing was committed"):
        store.commit(1)
    with pytest.raises(StoreError, match=r"taking an epoch.*must be writable") as caught:
        CheckpointStore(root).open_for_writing()
    assert caught.value.errno in (errno.EROFS, errno.EACCES)
    with pytest.raises(StoreError, match="taking an epoch"):
        CheckpointStore(root / "new").open_for_writing()


def test_path_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="Not a directory"):
            CheckpointStore(path).open_for_writing()
    assert (tmp_path / "file").read_text() == "mine"
