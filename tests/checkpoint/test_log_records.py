"""What is done to a store beside commits: restarts, rewinds, other times; cut off anywhere, and overtaken."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from store_files import write
from watched_calls import WatchedCalls

import statebackend as sb
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.store.log import CheckpointKey, Record


def committed(folder: Path, *ids: int) -> sb.CheckpointStore:
    store = sb.CheckpointStore(folder, retain=10).open_for_writing()
    for checkpoint_id in ids:
        base = write(store.begin_snapshot(checkpoint_id), b"%d" % checkpoint_id, "base")
        store.commit(checkpoint_id, [sb.StateSnapshot(checkpoint_id, store.epoch, files=(base,))], now=1000)
    return store


def data_files(folder: Path) -> int:
    return sum(1 for _ in folder.glob("data/*/*"))


def test_the_incarnation_is_new_after_a_rewind_and_not_by_opening(tmp_path: Path) -> None:
    with committed(tmp_path, 5, 6, 7) as store:
        first = store.incarnation
        assert first == store.metadata().store  # type: ignore[union-attr]
    with store.open_for_writing():
        assert store.incarnation == first
        assert [each.id for each in store.rewind(5)] == [6, 7]
        second = store.incarnation
        assert second != first
        assert store.rewind(5) == []
        assert store.incarnation == second, "nothing was taken back"
        assert store.checkpoints() == [5]
    with store.open_for_writing():
        assert store.incarnation == second
        assert data_files(tmp_path) == 1
        assert store.open(5).read_file(store.open(5).snapshots[0].files[0]) == b"5"
        store.restart(begins_at=9)
        third = store.incarnation
        assert len({first, second, third}) == 3
    with store.open_for_writing():
        assert store.incarnation == third
        assert store.done.begins_at == 9
        assert [record.kind for record in store.records()] == ["rewind", "restart"]
    assert data_files(tmp_path) == 0


def test_rewind_to_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with committed(tmp_path, 5, 6) as store:
        with pytest.raises(sb.UsageError, match="checkpoint 4 to go back to does not exist") as caught:
            store.rewind(4)
        assert caught.value.code == "USAGE.NO_CHECKPOINT"
        assert "5, 6" in str(caught.value.hint)
        assert store.checkpoints() == [5, 6]
        assert store.records() == []


def test_a_sink_can_take_back_what_it_did(tmp_path: Path) -> None:
    class Table:
        def __init__(self) -> None:
            self.batches = [5, 6, 7]

        def take_back(self, batch_id: int, incarnation: str) -> None:
            assert self.batches.pop() == batch_id
            assert len(incarnation) == 32

    committed(tmp_path, 5, 6, 7).close()
    with pytest.raises(sb.UsageError, match="cannot take a batch back"):
        sb.tools.rewind(tmp_path, to=5, checkpoint_location=None, sink=print)
    table = Table()
    sb.tools.rewind(tmp_path, to=5, checkpoint_location=None, sink=table)
    assert table.batches == [5]
    assert sb.CheckpointStore(tmp_path).checkpoints() == [5]


def test_a_query_that_runs_is_not_rewound(tmp_path: Path) -> None:
    with committed(tmp_path, 5, 6) as store:
        for tool in (
            lambda: sb.tools.rewind(tmp_path, to=5, checkpoint_location=None),
            lambda: sb.tools.set_time(tmp_path, now=1),
        ):
            with pytest.raises(sb.UsageError, match=r"\[USAGE\.STORE_IN_USE\]"):
                tool()
        assert store.checkpoints() == [5, 6]


def test_a_writer_that_was_overtaken_rewinds_nothing(tmp_path: Path) -> None:
    older = committed(tmp_path, 5, 6)
    with sb.CheckpointStore(tmp_path).open_for_writing():
        for call in (lambda: older.rewind(5), older.restart, lambda: older.set_time(7), older.check_held):
            with pytest.raises(sb.CommitConflictError):
                call()
    assert older.open_readonly().checkpoints() == [5, 6]
    assert older.open_readonly().records() == []


def cut_after(left: list[int]) -> WatchedCalls:
    """Calls that fail for good when so many have changed something."""

    def before(number: int, name: str, *arguments: Any) -> None:
        if name in ("create", "link", "rename", "remove", "sync_folder"):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(5, "as told")

    return WatchedCalls(before)


def test_a_restart_that_is_cut_off_leaves_whole_checkpoints_and_can_be_repeated(tmp_path: Path) -> None:
    """A rewind to one of them is part of the story that is told on a simulated disk."""
    for calls in range(200):
        folder = tmp_path / str(calls)
        committed(folder, 5, 6, 7).close()
        left = [1_000_000]
        files = PosixFiles(str(folder), cut_after(left))
        store = sb.CheckpointStore(folder, _files=files).open_for_writing()
        left[0] = calls
        try:
            store.rewind(None)
        except OSError:
            pass
        else:
            break
        reader = sb.CheckpointStore(folder)
        ids = reader.checkpoints()
        assert ids in ([5, 6, 7], [6, 7], [7], [])
        for each in ids:
            reader.open(each).verify()
        store.close()
        with reader.open_for_writing():
            reader.rewind(None)
            assert reader.checkpoints() == []
    else:
        raise AssertionError("it never came to its end")
    assert calls > 8


def test_time_that_was_set_belongs_to_one_checkpoint(tmp_path: Path) -> None:
    committed(tmp_path, 5, 6).close()
    assert sb.tools.set_time(tmp_path, now=7000).now == 7000
    store = sb.CheckpointStore(tmp_path, retain=2)
    assert (store.open(5).now, store.open(6).now, store.open_latest().manifest.now) == (1000, 7000, 1000)
    with store.open_for_writing():
        store.commit(7, now=8000)
        store.set_time(9000)  # by the writer that has committed it
    assert [store.open(each).now for each in store.checkpoints()] == [7000, 9000]
    sb.tools.set_time(tmp_path, now=-5)
    assert store.open_latest().now == -5
    sb.tools.rewind(tmp_path, to=6, checkpoint_location=None)
    assert store.open_latest().now == 7000


def test_a_pickled_store_is_one_that_is_not_open(tmp_path: Path) -> None:
    with sb.CheckpointStore(
        tmp_path, retain=7, compression="lz4", max_clock_jump=5
    ).open_for_writing() as store:
        other = pickle.loads(pickle.dumps(store))
        assert not other.is_open_for_writing
        assert (other.uri, other.max_clock_jump) == (store.uri, 5)
        assert not store.unopened().is_open_for_writing
        assert store.is_open_for_writing


@pytest.mark.parametrize("damage", ["manifest", "data", "lost"])
def test_rewind_to_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    """It would take the place of the only checkpoint that is whole."""

    class Table:
        def take_back(self, batch_id: int, incarnation: str) -> None:
            raise AssertionError("nothing is taken back that cannot be given again")

    committed(tmp_path, 5, 6).close()
    pattern = "checkpoints/2.json" if damage == "manifest" else "data/*/5-*"
    (path,) = tmp_path.glob(pattern)
    if damage == "lost":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
    for sink in (None, Table()):
        with pytest.raises(sb.CorruptCheckpointError):
            sb.tools.rewind(tmp_path, to=5, checkpoint_location=None, sink=sink)
    assert sb.CheckpointStore(tmp_path).latest(intact=True) == 6
    assert sb.CheckpointStore(tmp_path).records() == []


def test_epochs_continue_from_the_records(tmp_path: Path) -> None:
    """A copy of a store has no empty folders, and those were all that was left of some epochs."""
    committed(tmp_path, 5, 6).close()
    incarnations = []
    for _ in range(3):
        sb.tools.rewind(tmp_path, to=5, checkpoint_location=None)
        for folder in sorted(tmp_path.glob("*/*/"), reverse=True):
            if folder.is_dir() and not list(folder.iterdir()):
                folder.rmdir()
        with sb.CheckpointStore(tmp_path).open_for_writing() as store:
            store.commit(6)
            incarnations.append(store.incarnation)
    assert len(set(incarnations)) == 3
    names = [record.name for record in store.records()]
    assert len(set(names)) == len(names) == 3


def test_file_in_the_place_of_a_folder_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    with committed(tmp_path, 5) as store:
        (tmp_path / "offsets").touch()
        assert not store.has_folder("offsets")


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("drop", {}),
        ("drop", {"dropped_state": 7}),
        ("drop", {"dropped_state": "a", "incarnation": "1" * 32}),
        ("drop", {"dropped_state": "a", "now": 5}),
        ("time", {"now": 5}),
        ("time", {"now": 5, "dropped_state": "a", "upon": CheckpointKey(7, "checkpoints/9.json")}),
        ("rewind", {"dropped_state": "a"}),
        ("rewind", {"incarnation": "1" * 32, "upon": CheckpointKey(7, "checkpoints/9.json")}),
        ("other", {"incarnation": "1" * 32}),
    ],
)
def test_record_is_refused_with_members_of_another_kind(kind: str, members: dict[str, Any]) -> None:
    with pytest.raises(sb.UsageError, match="not a Record"):
        Record(kind, 3, "checkpoints/12.json", **members)
