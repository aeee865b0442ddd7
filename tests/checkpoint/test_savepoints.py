"""Savepoints: what any backend wrote any other restores, and other programs read."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from all_backends import BACKENDS
from keyed_stores import KEY_TYPES, create, without_groups
from keyed_story import Story, contents
from simulated_disk import Disk, SimulatedCalls

import statebackend as sb
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.files.posix import PosixCalls
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.checkpoint.store.sealed import seal, unseal
from statebackend.errors import ClosedError, CorruptCheckpointError, StoreError, UsageError

pytestmark = pytest.mark.usefixtures("no_fsync")


def instances(
    backend: str, key_type: Any, parallelism: int, max_parallelism: int = 32, **options: Any
) -> list[Any]:
    ranges = [sb.key_groups.range_for(max_parallelism, parallelism, index) for index in range(parallelism)]
    return [
        create(backend, key_type, key_group_range=own, max_parallelism=max_parallelism, **options)
        for own in ranges
    ]


def all_of(many: list[Any]) -> list[Any]:
    found = [each for keyed in many for each in contents(keyed)]
    for keyed in many:
        keyed.close()
    return without_groups(found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("key_type", KEY_TYPES.values(), ids=KEY_TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_backend_restores_parts(tmp_path: Path, backend: str, key_type: Any, rng: random.Random) -> None:
    with create(backend, key_type) as keyed:
        Story(keyed, rng, key_type).change(2000)
        keyed.savepoint(tmp_path / "savepoint")
        held = contents(keyed)
    assert len(held) > 100
    shutil.move(tmp_path / "savepoint", tmp_path / "elsewhere")
    for other in BACKENDS:
        with create(other, key_type, restore=tmp_path / "elsewhere") as again:
            assert contents(again) == held
        for parallelism, max_parallelism in ((3, 32), (1, 5)):
            many = instances(
                other, key_type, parallelism, max_parallelism, restore=str(tmp_path / "elsewhere")
            )
            assert all_of(many) == without_groups(held)


@pytest.mark.parametrize("backend", BACKENDS)
def test_undeclared_states_are_written_merged(tmp_path: Path, backend: str, rng: random.Random) -> None:
    """Of a checkpoint they are a history of changes."""
    with (
        create(backend, int) as keyed,
        sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=32) as store,
    ):
        story = Story(keyed, rng, int)
        for checkpoint_id in range(5):
            story.change(300)
            checkpoint = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
        held = contents(keyed)
        with create(backend, int, restore=checkpoint) as again:
            savepoint = again.savepoint(store)
        store.restart()  # which leaves it where it is
    assert savepoint.uri == str(tmp_path / "store" / "savepoints" / "4")
    for other in BACKENDS:
        with create(other, int, restore=savepoint) as again:
            assert contents(again) == held


def test_operator_state(tmp_path: Path) -> None:
    made = sb.create_backend("heap")
    for index in range(3):
        with made.create_operator_backend(subtask_index=index, parallelism=3) as operator:
            numbers = range(index * 10, index * 10 + 4 - index)
            operator.get_list_state(sb.ListStateDescriptor("n", int)).add_all(numbers)
            operator.get_list_state(sb.ListStateDescriptor("none", float))
            operator.savepoint(tmp_path)
    with create("reference", int) as keyed:
        keyed.savepoint(tmp_path)
    again = made.create_operator_backend(restore=tmp_path)
    assert again.is_restored
    assert again.undeclared_states() == ["n", "none"]
    assert again.get_list_state(sb.ListStateDescriptor("n", int)).get() == [0, 1, 2, 3, 10, 11, 12, 20, 21]
    assert pq.read_table(tmp_path / "operator" / "n" / "1-of-3.parquet").to_pydict() == {
        "value": [10, 11, 12]
    }
    (tmp_path / "_savepoint" / "operator-1-of-3.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="every instance once"):
        made.create_operator_backend(restore=tmp_path)
    with create("heap", int, restore=tmp_path) as again:
        assert again.undeclared_states() == []


def test_other_programs_read_it(tmp_path: Path) -> None:
    with create("heap", "struct<a:int,b:string>") as keyed:
        limits = keyed.get_map_state(sb.MapStateDescriptor("limits", str, "decimal(10,2)"))
        seen = keyed.get_value_state(sb.ValueStateDescriptor("_seen/by day=1", "timestamp"))
        keyed.get_value_state(sb.ValueStateDescriptor("empty", int))
        windows = keyed.get_list_state(sb.ListStateDescriptor("windows", int))
        mixed = keyed.get_value_state(sb.ValueStateDescriptor("mixed", int))
        keyed.set_current_key((1, None))
        limits.put_all({"b": 1, "a": None})
        seen.clear()
        for start in (0, 60):
            keyed.set_current_namespace(sb.TimeWindow(start, start + 60))
            windows.add(start)
        for number, namespace in enumerate((sb.VOID, 7, "7", ("x", 7))):
            keyed.set_current_namespace(namespace)
            mixed.update(number)
        keyed.savepoint(tmp_path)
    folders = sorted(path.name for path in (tmp_path / "keyed").iterdir() if "timers" not in path.name)
    assert folders == ["%5Fseen%2Fby%20day%3D1", "empty", "limits", "mixed", "windows"]
    assert pq.read_table(tmp_path / "keyed" / "empty").schema.names == ["key", "value"]
    key = {"a": 1, "b": None}
    assert pq.read_table(tmp_path / "keyed" / "limits").select(["key", "map_key"]).to_pylist() == [
        {"key": key, "map_key": "b"},
        {"key": key, "map_key": "a"},
    ]
    rows = sorted(pq.read_table(tmp_path / "keyed" / "windows").to_pylist(), key=lambda row: row["value"])
    assert [row["namespace"] for row in rows] == [{"start": 0, "end": 60}, {"start": 60, "end": 120}]
    table = pq.read_table(tmp_path / "keyed" / "mixed").sort_by("value")
    assert table.schema.names == ["key", "namespace", "namespace_bytes", "value"]
    assert table["namespace"].to_pylist() == [None, "7", "'7'", "('x', 7)"]
    with create("reference", "struct<a:int,b:string>", restore=tmp_path) as again:
        assert "_seen/by day=1" in again.undeclared_states()
        again.get_value_state(sb.ValueStateDescriptor("mixed", int))
        found = {repr(namespace) for _, namespace in again.keys_and_namespaces("mixed")}
        assert found == {"VOID", "7", "'7'", "('x', 7)"}


def test_names_of_states_are_names_of_folders(tmp_path: Path) -> None:
    names = ["a/b", "../up", ".hidden", "_hidden", "x=1", "ü" * 200, "ü" * 199 + "u", " ", "A"]
    with create("heap", int) as keyed:
        for number, name in enumerate(names):
            keyed.get_value_state(sb.ValueStateDescriptor(name, int)).update_many([1], [number])
        keyed.savepoint(tmp_path)
    folders = [path.name for path in (tmp_path / "keyed").iterdir() if "timers" not in path.name]
    assert len(folders) == len(names)
    assert not [name for name in folders if name[0] in "._" or "/" in name or "=" in name or len(name) > 200]
    with create("heap", int, restore=tmp_path) as again:
        for number, name in enumerate(names):
            state = again.get_value_state(sb.ValueStateDescriptor(name, int))
            assert state.get_many([1]).to_pylist() == [number]


def test_there_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", str(tmp_path)):
        with pytest.raises(UsageError, match=r"\[USAGE\.NO_CHECKPOINT\]"):
            create("heap", int, restore=path)
        with pytest.raises(UsageError):
            sb.create_backend("heap").create_operator_backend(restore=path)
    keyed = create("heap", int)
    store = sb.CheckpointStore(tmp_path / "store")
    with pytest.raises(UsageError, match="lacks a checkpoint"):
        keyed.savepoint(store)
    keyed.close()
    with pytest.raises(ClosedError):
        keyed.savepoint(tmp_path)


def test_one_folder_holds_one(tmp_path: Path) -> None:
    with create("heap", int) as keyed:
        keyed.get_value_state(sb.ValueStateDescriptor("n", int)).update_many([1], [5])
        keyed.savepoint(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        keyed.get_value_state(sb.ValueStateDescriptor("n", int)).update_many([1], [6])
        with pytest.raises(UsageError, match="there is a savepoint already"):
            keyed.savepoint(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_part_that_is_missing_is_noticed(tmp_path: Path) -> None:
    many = instances("heap", int, 3)
    for each in many:
        each.savepoint(tmp_path)
        each.close()
    for part in sorted((tmp_path / "_savepoint").iterdir()):
        away = part.rename(tmp_path / "away")
        for index in range(2):
            with pytest.raises(CorruptCheckpointError, match=r"\[CORRUPT_CHECKPOINT\.INCOMPLETE\]"):
                create("heap", int, key_group_range=sb.key_groups.range_for(32, 2, index), restore=tmp_path)
        away.rename(part)


def test_any_damage_is_found(tmp_path: Path, rng: random.Random) -> None:
    operator = sb.create_backend("heap").create_operator_backend()
    operator.get_list_state(sb.ListStateDescriptor("n", int)).add(1)
    operator.savepoint(tmp_path)
    with create("heap", int) as keyed:
        Story(keyed, rng, int, names=["count", "tags", "deep"]).change(200)
        keyed.savepoint(tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 8
    contents_of = [path.read_bytes() for path in files]

    def restore_both() -> None:
        create("heap", int, restore=tmp_path).close()
        sb.create_backend("heap").create_operator_backend(restore=tmp_path)

    def check(path: Path) -> None:
        with pytest.raises(CorruptCheckpointError, match=path.name):
            restore_both()

    for path, content in zip(files, contents_of, strict=True):
        for at in range(0, len(content), max(len(content) // 25, 1)):
            changed = bytearray(content)
            changed[at] ^= 1 << at % 8
            path.write_bytes(bytes(changed))
            check(path)
        for changed_to in (b"", content[:-1], content + b"x", contents_of[files.index(path) - 1]):
            path.write_bytes(changed_to)
            check(path)
        if path.suffix == ".parquet":
            path.unlink()
            check(path)
        path.write_bytes(content)
    with create("heap", int, restore=tmp_path) as again:
        assert again.undeclared_states() == ["count", "deep", "tags"]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"states": None},
        {"states": [{"name": "n"}]},
        {"states": [7]},
        {"states": [{"name": "n", "kind": "value", "types": {}, "ttl": False, "file": {"name": "../up"}}]},
        {"key_groups": None},
        {"key_groups": [5]},
        {"max_parallelism": 0},
        {"max_parallelism": 64},
    ],
    ids=str,
)
def test_a_description_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with create("heap", int) as keyed:
        keyed.savepoint(tmp_path)
    (path,) = (tmp_path / "_savepoint").iterdir()
    described = unseal(path.read_bytes(), "")
    described.pop("checksum", None)
    path.write_bytes(seal({**described, **change}))
    with pytest.raises(CorruptCheckpointError):
        create("heap", int, restore=tmp_path)


def test_failed_savepoint_leaves_nothing() -> None:
    """Every call fails once: what was written is removed, and a second attempt succeeds."""
    clean = SimulatedCalls(Disk())
    with create("heap", int) as keyed:
        keyed.get_value_state(sb.ValueStateDescriptor("n", int)).update_many([1, 2], [5, 6])
        keyed.get_list_state(sb.ListStateDescriptor("l", int)).add_many([1], [7])
        keyed.savepoint(Savepoint("/", _files=PosixFiles("/savepoint", clean)))
        assert len(clean.made) > 10
        for at, name in enumerate(clean.made):
            if name in ("status", "names", "close", "remove"):
                continue
            disk = Disk()
            calls = SimulatedCalls(disk, lambda number, name, at=at: errno.ENOSPC if number == at else None)
            savepoint = Savepoint("/", _files=PosixFiles("/savepoint", calls))
            with pytest.raises(StoreError) as caught:
                keyed.savepoint(savepoint)
            assert caught.value.errno == errno.ENOSPC
            assert [name for name in disk.walk() if name.endswith((".parquet", ".json"))] == []
            calls.plan = lambda number, name: None
            keyed.savepoint(savepoint)
            # All of it is durable: a power failure takes nothing.
            left = Savepoint("/", _files=PosixFiles("/savepoint", SimulatedCalls(disk.crash("lost"))))
            with create("reference", int, restore=left) as again:
                state = again.get_value_state(sb.ValueStateDescriptor("n", int))
                assert state.get_many([1, 2]).to_pylist() == [5, 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_savepoint_is_of_the_moment_of_its_call(tmp_path: Path, backend: str) -> None:
    with create(backend, int) as keyed:
        state = keyed.get_value_state(sb.ValueStateDescriptor("n", int))
        state.update_many([1], [5])
        mark = keyed.mark()
        state.update_many([1], [6])
        savepoint = keyed.savepoint(tmp_path)
        keyed.rollback(mark)
    with create(backend, int, restore=savepoint) as again:
        assert again.get_value_state(sb.ValueStateDescriptor("n", int)).get_many([1]).to_pylist() == [6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_savepoint_of_many_states_waits_for_the_disk_once_for_each_file_and_its_folder(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, synced, sync = 60, [], PosixCalls.sync

    def syncing(calls: PosixCalls, descriptor: int) -> None:
        synced.append(descriptor)
        sync(calls, descriptor)

    monkeypatch.setattr(PosixCalls, "sync", syncing)
    with create(backend, int) as keyed:
        for number in range(count):
            keyed.get_state(sb.ValueStateDescriptor(f"s{number}", int)).update_many([1], [number])
        synced.clear()
        savepoint = keyed.savepoint(tmp_path / "it")
    assert 2 * count <= len(synced) <= 2 * count + 40
    with create(backend, int, restore=savepoint) as again:
        for number in range(count):
            state = again.get_state(sb.ValueStateDescriptor(f"s{number}", int))
            assert state.get_many([1]).to_pylist() == [number]
