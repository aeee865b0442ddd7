"""Checkpoints whose bases are RocksDB's own files: each is uploaded once, and a restore goes on with them in place."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS
from ciphers import AesGcm
from keyed_story import DESCRIPTORS, Story, contents
from simulated_objects import Bucket, SimulatedObjectCalls

import statebackend as sb
from statebackend import types
from statebackend.backends import create_backend
from statebackend.backends.rocksdb.native_snapshot import FAMILIES, FORMAT
from statebackend.checkpoint import DataWriter
from statebackend.checkpoint.files.object_store import ObjectFiles
from statebackend.checkpoint.keyed import chain
from statebackend.errors import BackendUnavailableError, CorruptCheckpointError, StoreError, UsageError
from statebackend.keys import KeyGroupRange
from statebackend.state import StateTtlConfig
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

GROUPS = 32
COUNT = sb.ValueStateDescriptor("count", int)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    made = tmp_path / "local"
    made.mkdir()
    return made


@pytest.fixture
def native(local: Path) -> Callable[..., Any]:
    return lambda **options: create(local, **options)


def create(local: Path, key_type: Any = int, **options: Any) -> Any:
    backend = create_backend("rocksdb", local_dir=local, checkpoints="native")
    return backend.create_keyed_backend(key_type, max_parallelism=GROUPS, **options)


def other(name: str, key_type: Any = int, **options: Any) -> Any:
    return create_backend(name).create_keyed_backend(key_type, max_parallelism=GROUPS, **options)


def open_store(path: Path, key_type: Any = int, **options: Any) -> sb.CheckpointStore:
    return sb.CheckpointStore(path, **options).open_for_writing(key_type=key_type, max_parallelism=GROUPS)


def commit(keyed: Any, store: sb.CheckpointStore, number: int, **options: Any) -> sb.Checkpoint:
    committed = store.commit(number, [keyed.snapshot(number, store, **options).result()])
    if keyed._log.rewriting is not None:
        keyed._log.rewriting.wait()
    return committed


def natives(checkpoint: sb.Checkpoint) -> dict[str, Any]:
    (snapshot,) = checkpoint.snapshots
    return {file.label: file for file in snapshot.files if file.kind == "sst"}


def tables(checkpoint: sb.Checkpoint) -> dict[str, str]:
    return {label: file.name for label, file in natives(checkpoint).items() if label.endswith(".sst")}


def kinds(checkpoint: sb.Checkpoint) -> list[str]:
    """With one entry for all files of the database."""
    (snapshot,) = checkpoint.snapshots
    found = [file.kind for file in snapshot.files]
    assert found == sorted(found, key=["sst", "base", "delta"].index)
    return [kind for at, kind in enumerate(found) if kind != "sst" or at == 0]


def db_of(keyed: Any) -> Path:
    return Path(keyed.scratch.folder, "db")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "key_type", [int, str, types.of("struct<a:int,b:string>")], ids=["int", "str", "row"]
)
def test_a_random_history_restores_into_every_backend(
    tmp_path: Path, local: Path, key_type: Any, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With open batches, rollbacks, aborted snapshots, restarts in place, and bases forced often."""
    monkeypatch.setattr(chain, "SMALLEST_BASE", 20_000)
    keyed, restarts, seen = create(local, key_type), 0, set()
    try:
        with open_store(tmp_path / "store", key_type) as store:
            story, ids = Story(keyed, rng, key_type), itertools.count()
            for number in range(12):
                story.change(400 if number == 0 else rng.randrange(60))
                if rng.random() < 0.5 and number:
                    mark = keyed.mark()
                    story.change(rng.randrange(30))
                    if rng.random() < 0.5:
                        keyed.rollback(mark)
                mark = keyed.mark()
                story.change(rng.randrange(30))
                if rng.random() < 0.2:
                    keyed.snapshot(next(ids), store).abort()
                committed = commit(keyed, store, next(ids), incremental=rng.random() < 0.6)
                seen.add(tuple(sorted(set(kinds(committed)))))
                if rng.random() < 0.3:
                    story.change(rng.randrange(30))
                    keyed.rollback(mark)
                    committed = commit(keyed, store, next(ids), incremental=rng.random() < 0.5)
                held = contents(keyed)
                for name in BACKENDS if number % 4 == 0 else [rng.choice(BACKENDS)]:
                    with other(name, key_type, restore=committed) as again:
                        assert contents(again) == held, (number, name)
                if rng.random() < 0.4:
                    keyed.close()
                    keyed, restarts = create(local, key_type, restore=committed), restarts + 1
                    if rng.random() < 0.3:  # nobody has declared anything
                        committed = commit(keyed, store, next(ids), incremental=rng.random() < 0.5)
                    assert contents(keyed) == held, (number, "in place")
                    story = Story(keyed, rng, key_type)
        assert restarts > 1
        assert ("delta", "sst") in seen
    finally:
        keyed.close()
    assert os.listdir(local) == []


def test_only_files_that_the_store_does_not_have_are_uploaded(tmp_path: Path, native: Any) -> None:
    with open_store(tmp_path / "store") as store, native() as keyed:
        count = keyed.get_value_state(COUNT)
        texts = keyed.get_value_state(sb.ValueStateDescriptor("texts", str))
        count.update_many(list(range(5000)), list(range(5000)))
        texts.update_many(list(range(500)), ["text"] * 500)
        first = commit(keyed, store, 0, incremental=False)
        count.update_many([1], [100])
        second = store.commit(1, [_base(keyed, store, 1).result()])
        assert tables(first).items() <= tables(second).items()
        assert len(tables(second)) == len(tables(first)) + 1
        for label in ("CURRENT", FAMILIES):
            assert natives(first)[label].name != natives(second)[label].name
        keyed.scratch.database.compact(count.table.family)
        third = store.commit(2, [_base(keyed, store, 2).result()])
        kept = tables(second).items() & tables(third).items()
        assert len(kept) == 1, "the file of the other state, which no compaction has touched"
        assert not set(tables(first)) - {label for label, _ in kept} & set(tables(third))
        with other("reference", restore=third) as again:
            assert again.get_value_state(COUNT).get_many([1, 2]).to_pylist() == [100, 2]
            assert again.get_value_state(texts.descriptor).get_many([7]).to_pylist() == ["text"]


def _base(keyed: Any, store: sb.CheckpointStore, number: int) -> Any:
    """A snapshot that is a base, because the newest checkpoint is not known to be committed."""
    keyed._log.forget()
    return keyed.snapshot(number, store)


def test_a_base_that_builds_on_nothing_names_no_older_file(tmp_path: Path, native: Any) -> None:
    with open_store(tmp_path / "a") as store, open_store(tmp_path / "b") as elsewhere, native() as keyed:
        keyed.get_value_state(COUNT).update_many([1, 2], [1, 2])
        first = commit(keyed, store, 0)
        second = commit(keyed, store, 1, incremental=False)
        third = commit(keyed, elsewhere, 2)
        assert tables(first).keys() == tables(second).keys() == tables(third).keys()
        assert len({*tables(first).values(), *tables(second).values(), *tables(third).values()}) == 3
        third.verify()


def test_two_databases_that_began_with_one_checkpoint_share_no_label_but_its_own(
    tmp_path: Path, native: Any
) -> None:
    """Both give the next file the same name."""
    with open_store(tmp_path / "store", retain=9) as store:
        with native() as keyed:
            keyed.get_value_state(COUNT).update_many([1, 2], [1, 2])
            first = commit(keyed, store, 0)
        committed = first
        for number in (1, 2):
            with native(restore=committed) as keyed:
                keyed.get_value_state(COUNT).update_many([3], [10 * number])
                committed = store.commit(number, [_base(keyed, store, number).result()])
            with other("heap", restore=committed) as again:
                assert again.get_value_state(COUNT).get_many([1, 3]).to_pylist() == [1, 10 * number]
        with native(restore=first) as keyed:  # a database that does not know of the later ones
            keyed.get_value_state(COUNT).update_many([3], [99])
            committed = store.commit(3, [_base(keyed, store, 3).result()])
        with other("heap", restore=committed) as again:
            assert again.get_value_state(COUNT).get_many([1, 3]).to_pylist() == [1, 99]


def test_a_base_in_the_background_names_what_is_there(
    tmp_path: Path, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "SMALLEST_BASE", 0)
    with open_store(tmp_path / "store", retain=1) as store, native() as keyed:
        count = keyed.get_value_state(COUNT)
        texts = keyed.get_value_state(sb.ValueStateDescriptor("texts", str))
        texts.update_many(list(range(300)), ["a text"] * 300)
        first = commit(keyed, store, 0)
        for number in range(1, 8):
            count.update_many(list(range(50)), [number] * 50)
            last = commit(keyed, store, number)
        assert tables(first).items() <= tables(last).items()
        assert natives(first)["CURRENT"].name != natives(last)["CURRENT"].name
        last.verify()
        with other("reference", restore=last) as again:
            assert again.get_value_state(COUNT).get_many([7]).to_pylist() == [7]
            assert again.get_value_state(texts.descriptor).get_many([7]).to_pylist() == ["a text"]


def test_a_restore_links_files_and_goes_on_with_deltas(tmp_path: Path, native: Any) -> None:
    with open_store(tmp_path / "store") as store:
        with native() as keyed:
            keyed.get_value_state(COUNT).update_many(list(range(1000)), list(range(1000)))
            committed = commit(keyed, store, 0)
        with native(restore=committed) as keyed:
            for label in tables(committed):
                assert os.stat(db_of(keyed) / label).st_nlink == 2
            assert os.stat(db_of(keyed) / "CURRENT").st_nlink == 1
            count = keyed.get_value_state(COUNT)
            count.update_many([5], [50])
            again = commit(keyed, store, 1)
            assert kinds(again) == ["sst", "delta"]
            assert natives(again) == natives(committed)
            keyed.scratch.database.compact(count.table.family)
        again.verify()  # neither compactions nor the end of the database have touched what the store has


def test_a_restore_with_more_and_with_fewer_instances(
    tmp_path: Path, native: Any, rng: random.Random
) -> None:
    with open_store(tmp_path / "store") as store:
        with native() as keyed:
            story = Story(keyed, rng, int)
            story.change(600)
            committed = commit(keyed, store, 0)
            story.change(20)
            committed = commit(keyed, store, 1)
            whole = contents(keyed)
        snapshots, found, timers = [], [], 0
        for own in (KeyGroupRange(0, 10), KeyGroupRange(11, 11), KeyGroupRange(12, 31)):
            with native(restore=committed, key_group_range=own) as part:
                found += contents(part)
                snapshots.append(part.snapshot(2, store).result())
                left = len(list(part.timers.rows()))
                fired = [at for domain in ("event", "processing") for at in part.timers.due(10**6, domain)]
                assert left == len(fired)
                timers += left
                assert part.timers.count("event") == part.timers.count("processing") == 0
        assert sorted(found, key=repr) == sorted(whole, key=repr)
        assert timers > 0
        names = [file.name for each in snapshots for file in each.files]
        assert len(set(names)) < len(names), "instances name the files that they have begun with"
        joined = store.commit(2, snapshots)
        joined.verify()
        for make in (native, lambda **options: other("reference", **options)):
            with make(restore=joined) as again:
                assert contents(again) == whole
        with native(restore=joined, key_group_range=KeyGroupRange(5, 20)) as part:
            assert set(map(repr, contents(part))) <= set(map(repr, whole))


def test_undeclared_states_stay_in_the_database(tmp_path: Path, native: Any) -> None:
    """Also what deltas have changed of them, and rows that have come from elsewhere."""
    custom = sb.ValueStateDescriptor("custom", types.of(Doubling()))
    with open_store(tmp_path / "store") as store:
        with native() as keyed:
            keyed.get_value_state(custom).update_many([1, 2], [10, 20])
            keyed.get_list_state(sb.ListStateDescriptor("things", types.of(Doubling()))).add_many([1], [5])
            keyed.set_current_namespace("n")
            keyed.set_current_key(1)
            keyed.get_value_state(COUNT).update(7)
            keyed.set_current_namespace(sb.VOID)
            commit(keyed, store, 0)
            keyed.get_value_state(custom).update_many([2], [21])
            keyed.get_list_state(sb.ListStateDescriptor("things", types.of(Doubling()))).add_many([1], [6])
            committed = commit(keyed, store, 1)
        for number in (2, 3):
            with native(restore=committed) as keyed:
                assert keyed.undeclared_states() == ["count", "custom", "things"]
                committed = commit(keyed, store, number, incremental=False)
                assert kinds(committed) == ["sst"]
        with other("heap", restore=committed) as keyed:
            assert values(keyed, custom, 1, 2) == [10, 21]
            keyed.get_value_state(COUNT)
            committed = commit(keyed, store, 4, incremental=False)
        with native(restore=committed) as keyed:
            committed = commit(keyed, store, 5, incremental=False)
            assert kinds(committed) == ["sst", "base"], "what nobody has declared is not in the database"
            keyed.get_value_state(custom)
            committed = commit(keyed, store, 6, incremental=False)
            assert kinds(committed) == ["sst", "base"]
        with native(restore=committed) as keyed:
            things = keyed.get_list_state(sb.ListStateDescriptor("things", types.of(Doubling())))
            assert values(keyed, things.descriptor, 1) == [[5, 6]]
            assert values(keyed, custom, 1, 2) == [10, 21]
            nested = sb.ValueStateDescriptor("nested", types.LIST(types.of(Doubling())))
            keyed.get_value_state(nested).update_many([1], [[1, 2]])
            committed = commit(keyed, store, 7, incremental=False)
            assert kinds(committed) == ["base"], "nobody else can read what a serializer has nested"
        with other("heap", restore=committed) as keyed:
            assert values(keyed, nested, 1) == [[1, 2]]


def values(keyed: Any, descriptor: Any, *keys: int) -> list[Any]:
    found, state = [], keyed.get_state(descriptor)
    for key in keys:
        keyed.set_current_key(key)
        found.append(state.get() if state.descriptor.kind == "list" else state.value())
    return found


class Doubling(types.Serializer):
    """Of a user."""

    is_immutable = True
    fixed_width = None

    def serialize(self, value: Any) -> bytes:
        return b"%d" % (2 * value)

    def deserialize(self, data: bytes) -> Any:
        return int(data) // 2

    def config(self) -> dict[str, Any]:
        return {}


def test_other_types_and_a_time_to_live_are_migrated(tmp_path: Path, native: Any) -> None:
    ttl = StateTtlConfig(1000)
    clock = ManualClock(100)
    stays = sb.ValueStateDescriptor("stays", int).enable_time_to_live(ttl)
    wider = sb.ValueStateDescriptor("n", "bigint").enable_time_to_live(ttl)
    with open_store(tmp_path / "store") as store:
        with native(clock=clock) as keyed:
            keyed.get_value_state(sb.ValueStateDescriptor("n", "int")).update_many([1], [7])
            keyed.get_value_state(sb.ValueStateDescriptor("n.by time", "int")).update_many([1], [8])
            keyed.get_value_state(stays).update_many([1], [9])
            committed = commit(keyed, store, 0)
        for number in (1, 2):
            with native(restore=committed, clock=clock) as keyed:
                assert values(keyed, wider, 1) == [7]
                assert values(keyed, sb.ValueStateDescriptor("n.by time", "int"), 1) == [8]
                assert values(keyed, stays, 1) == [9]
                committed = commit(keyed, store, number)
                assert kinds(committed) == ["sst"]
        clock.set(2000)
        with native(restore=committed, clock=clock) as keyed:
            assert values(keyed, stays, 1) == [None]


def test_compactions_of_an_adopted_state_drop_what_has_expired(tmp_path: Path, native: Any) -> None:
    cleanup = StateTtlConfig(1000, cleanup_in_rocksdb_compact_filter=(1, 3_600_000))
    clock = ManualClock(0)
    state = sb.ValueStateDescriptor("n", int).enable_time_to_live(cleanup)
    with open_store(tmp_path / "store") as store:
        with native(clock=clock) as keyed:
            keyed.get_value_state(state).update_many([1, 2], [1, 2])
            commit(keyed, store, 0)
            committed = commit(keyed, store, 1, incremental=False)
        clock.set(5000)
        with native(restore=committed, clock=clock) as keyed:
            handle = keyed.get_value_state(state)
            handle.update_many([3], [3])
            commit(keyed, store, 2)
            keyed.snapshot(3, store).abort()  # tells that the one before is committed
            keyed.scratch.database.flush()
            keyed.scratch.database.compact(handle.table.family)
            assert handle.rules.counters()["dropped_values"] == 2


@pytest.mark.parametrize(("place", "backend"), [("encrypted", "heap"), ("objects", "reference")])
def test_in_other_stores(tmp_path: Path, native: Any, rng: random.Random, place: str, backend: str) -> None:
    if place == "encrypted":
        store = open_store(tmp_path / "store", encryption=AesGcm())
    else:
        files = ObjectFiles("s3://bucket/store", SimulatedObjectCalls(Bucket()))
        store = open_store(Path("/"), _files=files)
    with store:
        with native() as keyed:
            Story(keyed, rng, int).change(200)
            committed = first = commit(keyed, store, 0)
            held = contents(keyed)
        for number in (1, 2):
            with native(restore=committed) as keyed:
                assert contents(keyed) == held
                committed = store.commit(number, [_base(keyed, store, number).result()])
                assert tables(committed) == tables(first)
        with other(backend, restore=committed) as keyed:
            assert contents(keyed) == held


def test_without_the_library(tmp_path: Path, native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "store") as store:
        with native() as keyed:
            keyed.get_value_state(COUNT).update_many([1], [1])
            committed = commit(keyed, store, 0)

        def missing() -> None:
            raise BackendUnavailableError("no library of RocksDB found")

        monkeypatch.setattr("statebackend.backends.rocksdb.native_base.load_library", missing)
        with pytest.raises(
            BackendUnavailableError, match="has files of RocksDB, whose library is not available"
        ):
            other("heap", restore=committed)


@pytest.mark.parametrize("name", ["rocksdb", "heap", "native"])
@pytest.mark.parametrize("label", [".sst", "CURRENT", "MANIFEST", FAMILIES])
@pytest.mark.parametrize("how", ["damaged", "missing", "shorter"])
def test_a_file_that_is_not_as_it_was_written(
    tmp_path: Path, local: Path, native: Any, name: str, label: str, how: str
) -> None:
    with open_store(tmp_path / "store") as store:
        with native() as keyed:
            keyed.get_value_state(COUNT).update_many([1], [1])
            committed = commit(keyed, store, 0)
        (file,) = [each for found, each in natives(committed).items() if label in found]
        path = tmp_path / "store" / file.name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.unlink()
        if how != "missing":
            path.write_bytes(content if how == "damaged" else content[:-1])
        with pytest.raises(CorruptCheckpointError) as error:
            native(restore=committed) if name == "native" else other(name, restore=committed)
        assert file.name in str(error.value)
        assert os.listdir(local) == []


def test_a_newer_format_is_refused(tmp_path: Path, native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path / "store") as store, native() as keyed:
        keyed.get_value_state(COUNT).update_many([1], [1])
        monkeypatch.setattr("statebackend.backends.rocksdb.native_snapshot.FORMAT", FORMAT + 1)
        committed = commit(keyed, store, 0)
        monkeypatch.undo()
        families = natives(committed)[FAMILIES]
        assert json.loads(committed.read_file(families))["format"] == FORMAT + 1
        for make in (native, lambda **options: other("heap", **options)):
            with pytest.raises(CorruptCheckpointError) as error:
                make(restore=committed)
            assert error.value.code == "CORRUPT_CHECKPOINT.VERSION"


def test_a_file_that_the_snapshot_has_lost_is_told(tmp_path: Path, local: Path, native: Any) -> None:
    with open_store(tmp_path / "store") as store, native() as keyed:
        keyed.get_value_state(COUNT).update_many([1], [1])
        (snapshot,) = commit(keyed, store, 0).snapshots
        data = snapshot.to_json()
        data["files"] = [each for each in data["files"] if not each["label"].endswith(".sst")]
        with pytest.raises(CorruptCheckpointError, match="RocksDB cannot open the files of a checkpoint"):
            native(restore=store.open_snapshots([data]))
        assert len(os.listdir(local)) == 1


def test_a_base_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "store") as store, native() as keyed:
        count = keyed.get_value_state(COUNT)
        count.update_many([1], [1])
        scratch = Path(keyed.scratch.folder)
        before = sorted(os.listdir(scratch))
        add = type(store.begin_snapshot(99)).add
        added: list[str] = []

        def full(writer: Any, path: Any, *given: Any, **options: Any) -> Any:
            added.append(str(path))
            if len(added) == 2:
                raise StoreError("no room")
            return add(writer, path, *given, **options)

        monkeypatch.setattr("statebackend.checkpoint.store.data_files.DataWriter.add", full)
        with pytest.raises(StoreError, match="no room"):
            keyed.snapshot(0, store).result()
        monkeypatch.undo()
        scratch.chmod(0o500)
        try:
            if os.geteuid():
                with pytest.raises(StoreError):
                    keyed.snapshot(0, store).result()
        finally:
            scratch.chmod(0o700)
        assert sorted(os.listdir(scratch)) == before
        committed = commit(keyed, store, 1)
        committed.verify()
        with other("heap", restore=committed) as again:
            assert again.get_value_state(COUNT).get_many([1]).to_pylist() == [1]


def test_the_option_is_checked_and_shown(tmp_path: Path) -> None:
    assert repr(create_backend("rocksdb", checkpoints="native")) == "RocksDbBackend(checkpoints='native')"
    with pytest.raises(UsageError, match='expected "rows" or "native"'):
        create_backend("rocksdb", checkpoints="files")


def test_a_checkpoint_of_the_database_that_fails_leaves_no_folder(
    tmp_path: Path, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "store") as store, native() as keyed:
        keyed.get_value_state(COUNT).update_many([1], [1])
        before = sorted(os.listdir(keyed.scratch.folder))
        monkeypatch.setattr("statebackend.backends.rocksdb.native_base.secrets.token_hex", lambda _: "x")
        Path(keyed.scratch.folder, "base-x").mkdir()  # RocksDB refuses a folder that is there
        with pytest.raises(UsageError, match=r"RocksDB refuses an argument .*base-x"):
            keyed.snapshot(0, store)
        assert sorted(os.listdir(keyed.scratch.folder)) == before
        assert not keyed.scratch.has_readers
        monkeypatch.undo()
        commit(keyed, store, 1).verify()


def test_a_background_base_that_is_not_what_was_written_is_given_up(
    tmp_path: Path, native: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chain, "SMALLEST_BASE", 0)
    add = DataWriter.add

    def damaged(writer: Any, path: Any, *given: Any, **options: Any) -> Any:
        stored = add(writer, path, *given, **options)
        if writer.checkpoint_id is None and stored.label.startswith("MANIFEST"):
            written = tmp_path / "store" / stored.name
            written.write_bytes(bytes(len(written.read_bytes())))
        return stored

    with open_store(tmp_path / "store") as store, native() as keyed:
        count = keyed.get_value_state(COUNT)
        count.update_many(list(range(200)), list(range(200)))
        commit(keyed, store, 0)
        monkeypatch.setattr(DataWriter, "add", damaged)
        for number in range(1, 12):
            count.update_many(list(range(50)), [number] * 50)
            last = commit(keyed, store, number)
        assert "a file does not match its checksum" in caplog.text
        last.verify()
        assert set(kinds(last)) == {"sst", "delta"}
        with other("heap", restore=last) as again:
            assert again.get_value_state(COUNT).get_many([7, 100]).to_pylist() == [11, 100]


def test_savepoint_has_undeclared_states(tmp_path: Path, native: Any, rng: random.Random) -> None:
    with open_store(tmp_path / "store") as store:
        with native() as keyed:
            story = Story(keyed, rng, int)
            story.change(300)
            commit(keyed, store, 0)
            story.change(20)
            committed = commit(keyed, store, 1)
            held = contents(keyed)
        with native(restore=committed) as keyed:
            keyed.get_state(DESCRIPTORS["count"]())
            savepoint = keyed.savepoint(tmp_path / "savepoint")
    for name in BACKENDS:
        with other(name, restore=savepoint) as again:
            assert contents(again) == held
