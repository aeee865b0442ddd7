"""Snapshots that fail, or that another process commits: no file is left, nothing in flight, and backends are told."""

from __future__ import annotations

import gc
import pickle
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS
from keyed_stores import counting, counts, create, open_store, restored_counts

import statebackend as sb
from statebackend.checkpoint import DataWriter
from statebackend.checkpoint.files import PosixCalls
from statebackend.checkpoint.keyed import chain, row_source as writing

pytestmark = pytest.mark.usefixtures("no_fsync", "encoded_behind")


def data_files(path: Path) -> set[str]:
    return {file.name for file in (path / "data").rglob("*") if file.is_file()}


def with_rewritten_base(backend: str, store: sb.CheckpointStore, monkeypatch: Any) -> tuple[Any, Any, int]:
    """A backend with a base that has been rewritten, which the next snapshot names."""
    monkeypatch.setattr(chain, "SMALLEST_BASE", 0)
    keyed, count = counting(backend, 100)
    checkpoint_id = 0
    while keyed._log.rewriting is None:
        count.update_many([checkpoint_id], [1000])
        store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
        checkpoint_id += 1
    keyed._log.rewriting.wait()
    return keyed, count, checkpoint_id


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thread_that_does_not_start(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed, count = counting(backend, 100)
    with keyed, open_store(tmp_path) as store:
        store.commit(0, [keyed.snapshot(0, store).result()])
        count.update_many([1], [7])
        keyed._threads.close()  # the one of the first snapshot would do

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        for incremental in (True, False):
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    keyed.snapshot(1, store, incremental=incremental)
            assert not store._in_flight
            keyed.advance()
            metrics = keyed.metrics()
            assert (metrics.get("marks", 1), metrics.get("snapshots", [])) == (1, [])
        committed = store.commit(1, [keyed.snapshot(1, store).result()])
        assert restored_counts(committed) == counts(count)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_while_writing(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed, count = counting(backend, 100)
    with keyed, open_store(tmp_path) as store:
        store.commit(0, [keyed.snapshot(0, store).result()])
        count.update_many([1], [7])
        before = data_files(tmp_path)

        def fill_the_disk(file: Any, *rows: Any, **options: Any) -> None:
            file.write(bytes(1 << 20))
            raise OSError("no space left on device")

        for incremental in (True, False):
            with monkeypatch.context() as patched:
                patched.setattr(writing, "write_data_file", fill_the_disk)
                pending = keyed.snapshot(1, store, incremental=incremental)
                with pytest.raises(OSError, match="no space left on device"):
                    pending.result()
            assert data_files(tmp_path) == before
            assert not store._in_flight
            keyed.advance()
            assert keyed.metrics().get("snapshots", []) == [], "the error keeps the moment alive"
        committed = store.commit(1, [keyed.snapshot(1, store).result()])
        assert [file.kind for file in committed.files.values()] == ["base", "delta"]
        assert restored_counts(committed) == counts(count)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_base_that_cannot_be_begun_spoils_no_snapshot(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chain, "SMALLEST_BASE", 0)
    keyed, count = counting(backend, 100)
    with keyed, open_store(tmp_path) as store:
        begin = store.begin_snapshot

        def begin_snapshot(checkpoint_id: int | None = None) -> Any:
            if checkpoint_id is None:
                raise sb.StoreError("the folder is gone")
            return begin(checkpoint_id)

        monkeypatch.setattr(store, "begin_snapshot", begin_snapshot)
        for checkpoint_id in range(5):
            count.update_many([checkpoint_id], [1000])
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            assert restored_counts(committed) == counts(count)
        assert "files could not be merged, deltas go on: the folder is gone" in caplog.text
        monkeypatch.setattr(store, "begin_snapshot", begin)
        for checkpoint_id in range(5, 20):  # after each failure it waits for longer
            store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            if keyed._log.rewriting is not None:
                break
        assert checkpoint_id > 6
        keyed._log.rewriting.wait()
        checkpoint_id += 1
        committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
        assert [file.kind for file in committed.files.values()] == ["base"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_merging_on_a_full_disk(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "FAN", 2)
    room = [1000]
    monkeypatch.setattr(PosixCalls, "free_space", lambda calls, path: room[0])
    keyed, count = counting(backend, 100)
    with keyed, open_store(tmp_path, retain=2) as store:
        for checkpoint_id in range(40):
            if checkpoint_id == 20:
                room[0] = 1 << 40
            count.update_many([checkpoint_id], [1000])
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            assert restored_counts(committed) == counts(count)
            if checkpoint_id == 19:
                assert len(committed.files) == 20
            if keyed._log.rewriting is not None:
                keyed._log.rewriting.wait()
        assert len(committed.files) < 15
        assert len(data_files(tmp_path)) < 30


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_base_stays_in_its_store(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "a") as store, open_store(tmp_path / "b") as other:
        keyed, count, checkpoint_id = with_rewritten_base(backend, store, monkeypatch)
        with keyed:
            count.update_many([51], [8])
            committed = other.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, other).result()])
            assert [file.kind for file in committed.files.values()] == ["base"]
            assert restored_counts(committed) == counts(count)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_stores_in_turn(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint is whole in its own store, whichever base was rewritten for which."""
    monkeypatch.setattr(chain, "SMALLEST_BASE", 0)
    rng = random.Random(5)
    keyed, count = counting(backend, 100)
    with keyed, open_store(tmp_path / "a") as first, open_store(tmp_path / "b") as second:
        kinds: dict[tuple[bool, bool], set[str]] = {}
        store = before = first
        flights: list[Any] = []
        for checkpoint_id in range(80):
            count.update_many([rng.randrange(100)], [checkpoint_id])
            if rng.random() < 0.25:
                store = second if store is first else first
            flights.append((checkpoint_id, store, keyed.snapshot(checkpoint_id, store), counts(count)))
            while flights and rng.random() < 0.8:
                number, own, pending, held = flights.pop(0)
                committed = own.commit(number, [pending.result()])
                assert restored_counts(committed) == held
                files = [file.kind for file in committed.files.values()]
                kinds.setdefault((own is before, not flights), set()).add(files[-1])
                before = own
                if keyed._log.rewriting is not None and rng.random() < 0.7:
                    keyed._log.rewriting.wait()
        assert "delta" in kinds[True, True]
        assert "base" in kinds[False, True]


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_a_backend_keeps_a_rewritten_base_only_if_a_snapshot_in_flight_names_it(
    tmp_path: Path, backend: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        keyed, count, checkpoint_id = with_rewritten_base(backend, store, monkeypatch)
        count.update_many([51], [8])
        held = counts(count)
        pending = keyed.snapshot(checkpoint_id, store)
        if not is_named:
            pending.abort()
        keyed.close()
        if is_named:
            committed = store.commit(checkpoint_id, [pending.result()])
            assert [file.kind for file in committed.files.values()] == ["base", "delta"]
            assert restored_counts(committed) == held
        store.restart()
        assert data_files(tmp_path) == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_undeclared_states_are_sorted_by_the_writing_thread(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed, count = counting(backend, 100)
    with keyed, open_store(tmp_path) as store:
        checkpoint = store.commit(0, [keyed.snapshot(0, store).result()])
        with create(backend, restore=checkpoint) as again:
            threads = []
            section = type(again._restored.get("count")).section

            def noting(state: Any) -> Any:
                threads.append(threading.current_thread())
                return section(state)

            monkeypatch.setattr(type(again._restored.get("count")), "section", noting)
            committed = store.commit(1, [again.snapshot(1, store, incremental=False).result()])
            assert threads
            assert threading.current_thread() not in threads
            assert restored_counts(committed) == counts(count)


class Host:
    def __init__(self, backend: str, restore: Any = ()) -> None:
        factory = sb.create_backend(backend)
        self.keyed = factory.create_keyed_backend("bigint", max_parallelism=8, restore=restore)
        self.operator = factory.create_operator_backend(restore=restore)
        self.counts = self.keyed.get_value_state(sb.ValueStateDescriptor("count", int))
        self.offsets = self.operator.get_list_state(sb.ListStateDescriptor("offsets", int))

    def count(self, keys: list[int]) -> None:
        for key in keys:
            self.keyed.set_current_key(key)
            self.counts.update((self.counts.value() or 0) + 1)

    def write(self, checkpoint_id: int, targets: bytes) -> bytes:
        one, other = pickle.loads(targets)
        snapshots = [
            self.keyed.snapshot(checkpoint_id, one).result().to_json(),
            self.operator.snapshot(checkpoint_id, other).result().to_json(),
        ]
        one.sync()
        return pickle.dumps(snapshots)

    def told(self, checkpoint_id: int, is_committed: bool) -> None:
        for backend in (self.keyed, self.operator):
            if is_committed:
                backend.notify_checkpoint_complete(checkpoint_id)
            else:
                backend.notify_checkpoint_aborted(checkpoint_id)

    def contents(self) -> dict[int, int]:
        found = {}
        for key in self.keyed.keys("count"):
            self.keyed.set_current_key(key)
            found[key] = self.counts.value()
        return found

    def close(self) -> None:
        self.keyed.close()
        self.operator.close()


def targets(store: sb.CheckpointStore, checkpoint_id: int) -> bytes:
    return pickle.dumps([store.data_writer(checkpoint_id) for _ in range(2)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_story(tmp_path: Path, backend: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are aborted, files are merged or bases rewritten, batches are rolled back: every commit is whole."""
    monkeypatch.setattr(chain, *("FAN", 2) if backend == "heap" else ("SMALLEST_BASE", 0))
    store = sb.CheckpointStore(tmp_path, retain=1).open_for_writing(key_type="bigint", max_parallelism=8)
    host = Host(backend)
    host.count(list(range(200)))
    kinds: list[str] = []
    bases = set()
    aborted, offsets = 0, None
    for checkpoint_id in range(36):
        mark = host.keyed.mark()
        host.count([rng.randrange(300) for _ in range(3)])
        if rng.random() < 0.2:
            host.keyed.rollback(mark)
        host.keyed.release(mark)
        if rng.random() < 0.3:
            host.offsets.add(checkpoint_id)
        written = pickle.loads(host.write(checkpoint_id, targets(store, checkpoint_id)))
        if host.keyed._log.rewriting is not None and rng.random() < 0.7:
            host.keyed._log.rewriting.wait()
        if rng.random() < 0.2:
            aborted += 1
            store.abort(checkpoint_id)
            host.told(checkpoint_id, False)
            continue
        before = store.open_latest().snapshots[1] if store.checkpoints() else None
        committed = store.commit(checkpoint_id, written)
        host.told(checkpoint_id, True)
        committed.verify()
        if before is not None and host.offsets.get() == offsets:
            assert committed.snapshots[1].files == before.files, "what did not change is named again"
        offsets = host.offsets.get()
        kinds += [file.kind for file in committed.snapshots[0].files]
        bases.add(committed.snapshots[0].files[0].name)
        again = Host(backend, committed)
        assert again.contents() == host.contents()
        assert again.offsets.get() == host.offsets.get()
        again.close()
    assert aborted > 2
    assert kinds.count("delta") > 20
    assert backend == "heap" or len(bases) > 3, "bases are rewritten, named and built on"
    newest = store.latest()
    assert newest is not None
    host.close()
    store.close()
    named = set(sb.CheckpointStore(tmp_path).open(newest).files)
    before = {file.relative_to(tmp_path).as_posix() for file in tmp_path.glob("data/*/*")}
    assert named <= before
    assert len(before - named) <= 3, "aborted snapshots leave nothing"
    sb.CheckpointStore(tmp_path).open(newest).verify()


def test_lent_files_are_kept_until_the_snapshot_is_decided(tmp_path: Path) -> None:
    """Three snapshots on their way: the last builds on files that the first two no longer name."""
    store = sb.CheckpointStore(tmp_path, retain=1).open_for_writing(key_type="bigint", max_parallelism=8)
    host = Host("heap")
    host.count(list(range(100)))
    store.commit(0, pickle.loads(host.write(0, targets(store, 0))))
    host.told(0, True)
    whole = [host.keyed.snapshot(n, store.data_writer(n), incremental=False).result() for n in (1, 2)]
    host.count([2])
    delta = host.keyed.snapshot(3, store.data_writer(3)).result()
    assert [file.kind for file in delta.files] == ["base", "delta"]
    for snapshot in whole:
        store.commit(snapshot.checkpoint_id, [snapshot])
    store.commit(3, [delta]).verify()
    store.commit(4, [])
    store.commit(5, [])
    assert len(list(tmp_path.glob("data/*/*.arrow"))) == 0, "what was lent is removed like everything else"
    host.close()
    store.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_writer_for_another_checkpoint_is_refused(tmp_path: Path, backend: str) -> None:
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type="bigint", max_parallelism=8)
    host = Host(backend)
    for each in (host.keyed, host.operator):
        with pytest.raises(sb.UsageError, match="the writer was made for checkpoint 7, not for 8"):
            each.snapshot(8, store.data_writer(7))
        with pytest.raises(sb.UsageError):
            each.snapshot(8, "not a store")
    assert isinstance(store.data_writer(7), DataWriter)
    host.close()
    store.close()


@pytest.mark.parametrize("teller", ["store", "other process"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_point_is_dropped_by_the_call_after_a_commit_or_an_abort(
    tmp_path: Path, backend: str, teller: str
) -> None:
    """So the changes of one batch are remembered between batches, not those of two."""

    def points() -> int:
        log = host.keyed._log
        found = [log._chain, *log._in_flight] if log._chain is not None else log._in_flight
        return sum(log._points.is_valid(each.point) for each in found)

    host, before = Host(backend), None
    with sb.CheckpointStore(tmp_path).open_for_writing(key_type="bigint", max_parallelism=8) as store:
        for checkpoint_id in range(4):
            mark = host.keyed.mark()
            host.count([checkpoint_id])
            if teller == "store":
                snapshot = host.keyed.snapshot(checkpoint_id, store)
            else:
                target = pickle.loads(pickle.dumps(store.data_writer(checkpoint_id)))
                snapshot = host.keyed.snapshot(checkpoint_id, target)
            written = snapshot.result()
            assert points() == (2 if checkpoint_id else 1)
            is_committed = checkpoint_id != 2
            if is_committed:
                store.commit(checkpoint_id, [written])
            elif teller == "store":
                store.abort(checkpoint_id)
            if teller != "store":
                host.told(checkpoint_id, is_committed)
            host.keyed.release(mark)
            assert points() == 1
            assert host.keyed._log._chain.point is (snapshot.point if is_committed else before)
            before = host.keyed._log._chain.point
    host.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_commit_on_another_thread_waits_for_the_next_call(tmp_path: Path, backend: str) -> None:
    host = Host(backend)
    host.count([1])
    with sb.CheckpointStore(tmp_path).open_for_writing(key_type="bigint", max_parallelism=8) as store:
        written = host.keyed.snapshot(0, store).result()
        thread = threading.Thread(target=store.commit, args=(0, [written]))
        thread.start()
        thread.join()
        assert host.keyed._log._chain is None
        host.count([2])
        assert host.keyed._log._chain.files == written.files
    host.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_store_keeps_no_backend_alive_for_its_snapshots(tmp_path: Path, backend: str) -> None:
    host = Host(backend)
    with sb.CheckpointStore(tmp_path).open_for_writing(key_type="bigint", max_parallelism=8) as store:
        snapshot = host.keyed.snapshot(0, store)
        written = snapshot.result()
        alive = weakref.ref(host.keyed)
        del host
        gc.collect()
        assert alive() is None
        store.commit(0, [written])


@pytest.mark.parametrize("backend", BACKENDS)
def test_next_call_settles_all_outcomes_since_the_last_one(tmp_path: Path, backend: str) -> None:
    """Dropping a point may settle the next outcome in between."""
    host = Host(backend)
    with sb.CheckpointStore(tmp_path).open_for_writing(key_type="bigint", max_parallelism=8) as store:
        snapshots = []
        for checkpoint_id in range(5):
            host.count([checkpoint_id])
            snapshots.append(host.keyed.snapshot(checkpoint_id, store))
            snapshots[-1].result()
        for checkpoint_id in (0, 2, 1):
            store.abort(checkpoint_id)
        store.commit(3, [snapshots[3].result()])
        store.abort(4)
        log = host.keyed._log
        assert len(log._in_flight) == 5
        host.count([7])
        assert log._in_flight == []
        assert log._chain.point is snapshots[3].point
        assert [log._points.is_valid(each.point) for each in snapshots] == [False] * 3 + [True, False]
    host.close()
