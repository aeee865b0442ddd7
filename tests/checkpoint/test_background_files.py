"""Files that are merged in the background: whoever commits, in whatever order, with forks and restarts in between."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS
from keyed_stores import COUNT, counting, counts, create, open_store, restored_counts

import statebackend as sb
from statebackend.checkpoint.keyed import chain, checkpointed_backend, compaction, snapshot_log, state_restore

pytestmark = pytest.mark.usefixtures("no_fsync")

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def opened_in(folder: Path) -> list[str]:
    """The files of a folder that this process has open; what other tests have left may be closed at any time."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if name.startswith(f"{folder}{os.sep}")]


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")


def wait(keyed: Any) -> None:
    if keyed._log.rewriting is not None:
        keyed._log.rewriting.wait()


@each_backend
def test_a_file_stays_if_two_commits_are_told(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process commits: the first checkpoint names the merged file, the second, a base, does not."""
    monkeypatch.setattr(chain, "FAN", 2)
    keyed, count = counting(backend)
    with keyed, open_store(tmp_path, retain=10) as store:

        def taken(checkpoint_id: int, **options: Any) -> Any:
            count.update_many([checkpoint_id], [1000 + checkpoint_id])
            target = pickle.loads(pickle.dumps(store.data_writer(checkpoint_id)))
            return keyed.snapshot(checkpoint_id, target, **options).result()

        contents = {}
        for checkpoint_id in range(0, 30, 3):
            first = taken(checkpoint_id)
            contents[checkpoint_id] = counts(count)
            second = taken(checkpoint_id + 1, incremental=checkpoint_id % 2 == 0)
            contents[checkpoint_id + 1] = counts(count)
            for own, snapshot in ((checkpoint_id, first), (checkpoint_id + 1, second)):
                store.commit(own, [snapshot])
            if checkpoint_id % 4 == 0:  # of the first nobody tells
                keyed.notify_checkpoint_complete(checkpoint_id)
            keyed.notify_checkpoint_complete(checkpoint_id + 1)
            third = taken(checkpoint_id + 2)
            contents[checkpoint_id + 2] = counts(count)
            store.commit(checkpoint_id + 2, [third])
            keyed.notify_checkpoint_complete(checkpoint_id + 2)
            wait(keyed)
            for each in store.checkpoints():
                store.open(each).verify()
                assert restored_counts(store.open(each)) == contents[each]


@each_backend
def test_two_snapshots_are_in_flight(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each builds on the last but one: merges of one lineage wait for it, and files stay few."""
    monkeypatch.setattr(chain, "FAN", 3)
    monkeypatch.setattr(chain, "SMALLEST_BASE", 1 << 40)
    keyed, count = counting(backend)
    longest = 0
    with keyed, open_store(tmp_path, retain=3) as store:
        store.commit(0, [keyed.snapshot(0, store).result()])
        flight = (1, keyed.snapshot(1, store), counts(count))
        for checkpoint_id in range(2, 50):
            count.update_many([checkpoint_id], [1000 + checkpoint_id])
            following = (checkpoint_id, keyed.snapshot(checkpoint_id, store), counts(count))
            number, pending, contents = flight
            committed = store.commit(number, [pending.result()])
            assert restored_counts(committed) == contents
            longest = max(longest, len(committed.files))
            wait(keyed)
            flight = following
    assert longest < 20


@each_backend
def test_a_store_may_be_restarted_or_rewound_while_files_are_merged(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "FAN", 2)
    keyed, count = counting(backend)
    with keyed, open_store(tmp_path, retain=4) as store:
        checkpoint_id = 0
        for change in (lambda: store.rewind(store.checkpoints()[-2]), store.restart):
            while keyed._log.rewriting is None:
                count.update_many([checkpoint_id], [7])
                store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
                checkpoint_id += 1
            change()
            wait(keyed)
            for _ in range(4):
                count.update_many([checkpoint_id], [8])
                checkpoint_id += 1
                committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
                committed.verify()
                assert restored_counts(committed) == counts(count)
            checkpoint_id += 1
    named = {name for each in store.checkpoints() for name in store.open(each).files}
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("data/*/*")} == named


@pytest.mark.parametrize("is_aborted", [False, True])
@each_backend
def test_a_base_leaves_the_deltas_that_were_committed_while_it_was_written(
    tmp_path: Path, backend: str, is_aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the place of the files of the snapshot of its moment. If that one is aborted, it is removed."""
    monkeypatch.setattr(chain, "SMALLEST_BASE", 0)
    monkeypatch.setattr(chain.Chain, "is_base_due", property(lambda chain: len(chain.files) >= 2))
    may_write, write = threading.Event(), snapshot_log.write_in_background

    def write_later(*work: Any) -> None:
        may_write.wait(60)
        write(*work)

    monkeypatch.setattr(snapshot_log, "write_in_background", write_later)
    keyed, count = counting(backend, 100)
    with keyed, open_store(tmp_path) as store:

        def snapshot(checkpoint_id: int) -> Any:
            count.update_many([checkpoint_id], [1000 + checkpoint_id])
            return keyed.snapshot(checkpoint_id, store)

        for checkpoint_id in range(2):
            store.commit(checkpoint_id, [snapshot(checkpoint_id).result()])
        pending = snapshot(2)
        assert keyed._log.rewriting is not None
        if is_aborted:
            pending.abort()
        else:
            store.commit(2, [pending.result()])
        for checkpoint_id in (3, 4):
            store.commit(checkpoint_id, [snapshot(checkpoint_id).result()])
        may_write.set()
        wait(keyed)
        new = keyed._log.rewriting.files[0].name
        committed = store.commit(5, [snapshot(5).result()])
        committed.verify()
        assert restored_counts(committed) == counts(count)
        kinds = [file.kind for file in committed.files.values()]
        assert (new in committed.files) == (not is_aborted)
        assert kinds == ["base", *["delta"] * (4 if is_aborted else 3)]
        assert (tmp_path / new).exists() == (not is_aborted)


def test_a_base_waits_for_the_files_of_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain.Chain, "is_base_due", property(lambda chain: len(chain.files) >= 2))
    may_write, write = threading.Event(), checkpointed_backend.write_snapshot

    def write_later(snapshot: Any, *work: Any) -> Any:
        may_write.wait(60)
        return write(snapshot, *work)

    keyed, count = counting("heap", 100)
    with keyed, open_store(tmp_path) as store:
        for checkpoint_id in range(2):
            count.update_many([checkpoint_id], [1000])
            store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
        count.update_many([2], [1000])
        with monkeypatch.context() as patched:
            patched.setattr(checkpointed_backend, "write_snapshot", write_later)
            pending = keyed.snapshot(2, store)
        wait(keyed)
        following = keyed.snapshot(3, store)
        may_write.set()
        store.commit(2, [pending.result()])
        following.abort()
        committed = store.commit(4, [keyed.snapshot(4, store).result()])
        assert [file.kind for file in committed.files.values()] == ["base"]
        assert restored_counts(committed) == counts(count)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@each_backend
def test_a_fork_removes_nothing(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "FAN", 2)
    keyed, count = counting(backend)
    with keyed, open_store(tmp_path) as store:
        for checkpoint_id in range(12):
            count.update_many([checkpoint_id], [7])
            pending = keyed.snapshot(checkpoint_id, store)
            pending.result()
            wait(keyed)
            child = os.fork()
            if child == 0:
                try:
                    keyed.close()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            committed = store.commit(checkpoint_id, [pending.result()])
            committed.verify()
            assert restored_counts(committed) == counts(count)
        assert len(committed.files) < 8


def test_namespaces_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """A piece whose files know no namespaces is merged beside one whose files do."""
    monkeypatch.setattr(chain, "FAN", 4)
    monkeypatch.setattr(compaction, "PIECE_ROWS", 5)
    keyed, count = counting("heap")
    with keyed, open_store(tmp_path) as store:
        merged = 0
        for checkpoint_id in range(24):
            if checkpoint_id == 7:
                keyed.set_current_key(3)
                keyed.set_current_namespace("window")
                count.update(1)
                keyed.set_current_namespace(sb.VOID)
            count.update_many([rng.randrange(200) for _ in range(9)], range(9))
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            assert restored_counts(committed) == counts(count)
            if keyed._log.rewriting is not None:
                keyed._log.rewriting.wait()
                assert keyed._log.rewriting.made() is not None
                merged += 1
        assert merged >= 3
        with create("heap", restore=committed) as again:
            state = again.get_state(COUNT)
            again.set_current_key(3)
            again.set_current_namespace("window")
            assert state.value() == 1


@needs_proc
def test_a_restore_from_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_restore, "_MOST_OPEN", 2)
    monkeypatch.setattr(chain, "FAN", 100)
    keyed, count = counting("heap")
    with keyed, open_store(tmp_path) as store:
        for checkpoint_id in range(20):
            count.update_many([checkpoint_id], [1000])
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
        assert len(committed.files) == 20
        before = len(opened_in(tmp_path))
        with create("heap", restore=committed) as again:
            assert len(opened_in(tmp_path)) == before + 2
            assert counts(again.get_state(COUNT)) == counts(count)


@needs_proc
def test_a_closed_backend_holds_no_file(tmp_path: Path) -> None:
    keyed, _ = counting("heap")
    with keyed, open_store(tmp_path) as store:
        committed = store.commit(0, [keyed.snapshot(0, store).result()])
    assert opened_in(tmp_path) == []
    again = create("heap", restore=committed)
    assert len(opened_in(tmp_path)) == 1
    again.close()
    assert opened_in(tmp_path) == []
