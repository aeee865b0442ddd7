"""`savepoint` of a checkpoint: what is restored from it is what is restored from the checkpoint itself."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from all_backends import BACKENDS
from keyed_files import GROUPS, Model, keyed_snapshot, write
from keyed_stores import create, open_store, without_groups
from keyed_story import DESCRIPTORS, Story, contents
from simulated_disk import Dead, Disk, SimulatedCalls

import statebackend as sb
from statebackend import types as t
from statebackend.checkpoint import CheckpointReader, CheckpointStore
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.store.savepoint_folder import Savepoint
from statebackend.keys.key_groups import range_for
from statebackend.testing import ManualClock
from statebackend.tools import export

pytestmark = pytest.mark.usefixtures("no_fsync")

each_backend = pytest.mark.parametrize("backend", BACKENDS)
TTL = sb.StateTtlConfig(10_000)
TIMED: dict[str, Callable[[], Any]] = {
    "timed value": lambda: sb.ValueStateDescriptor("timed value", int).enable_time_to_live(TTL),
    "timed list": lambda: sb.ListStateDescriptor("timed list", str).enable_time_to_live(TTL),
    "timed map": lambda: sb.MapStateDescriptor("timed map", int, int).enable_time_to_live(TTL),
}
OPERATOR: dict[str, Callable[[Any], Any]] = {
    "n": lambda operator: operator.get_list_state(sb.ListStateDescriptor("n", int)),
    "u": lambda operator: operator.get_union_list_state(sb.ListStateDescriptor("u", t.PICKLE)),
    "b": lambda operator: operator.get_broadcast_state(sb.MapStateDescriptor("b", str, "decimal(4,1)")),
    "none": lambda operator: operator.get_list_state(sb.ListStateDescriptor("none", float)),
}


def history(root: Path, backend: str, key_type: Any, rng: random.Random, parallelism: int = 3) -> None:
    """Checkpoints of several instances with every kind of state; the newest has a base and deltas."""
    clock = ManualClock(1000)
    ranges = [range_for(32, parallelism, index) for index in range(parallelism)]
    many = [create(backend, key_type, key_group_range=own, clock=clock) for own in ranges]
    operators = [
        sb.create_backend(backend).create_operator_backend(subtask_index=index, parallelism=2)
        for index in range(2)
    ]
    stories = []
    for keyed, own in zip(many, ranges, strict=True):
        story = Story(keyed, rng, key_type, keys=40)
        story.keys = [key for key in story.keys if keyed._encoder.key_group(key, 32) in own]
        stories.append(story)
    with CheckpointStore(root).open_for_writing(key_type=key_type, max_parallelism=32) as store:
        for checkpoint_id in range(4):
            clock.set(1000 * (checkpoint_id + 1))
            for story in stories:
                story.change(100)
                story.keyed.set_current_namespace(sb.VOID)
                for key in rng.sample(story.keys, 5):
                    story.keyed.set_current_key(key)
                    story.keyed.get_state(TIMED["timed value"]()).update(checkpoint_id)
                    story.keyed.get_state(TIMED["timed list"]()).add(str(checkpoint_id))
                    story.keyed.get_state(TIMED["timed map"]()).put(checkpoint_id, None)
            for index, operator in enumerate(operators):
                OPERATOR["n"](operator).add_all([checkpoint_id, 10 * index])
                OPERATOR["u"](operator).add({checkpoint_id, index})
                OPERATOR["b"](operator).put_all({"x": index, "y": None})
                OPERATOR["none"](operator)
            taken = [each.snapshot(checkpoint_id, store) for each in (*many, *operators)]
            now = 1000 * (checkpoint_id + 1)
            checkpoint = store.commit(checkpoint_id, [each.result() for each in taken], now=now)
            for each in (*many, *operators):
                each.notify_checkpoint_complete(checkpoint_id)
    assert {file.kind for file in checkpoint.files.values()} - {"manifest"} == {"base", "delta", "operator"}
    for each in many:
        each.close()


def held(backend: str, key_type: Any, restore: Any, max_parallelism: int, *, now: int = 6000) -> Any:
    """All that can be restored: keyed state with its timestamps as they expire, timers, operator state."""
    options = {"max_parallelism": max_parallelism, "restore": restore, "clock": ManualClock(now)}
    with create(backend, key_type, **options) as keyed:
        undeclared = keyed.undeclared_states()
        found = contents(keyed, descriptors={**DESCRIPTORS, **TIMED})
    made = sb.create_backend(backend)
    operators = [
        made.create_operator_backend(subtask_index=index, parallelism=3, restore=restore).contents()
        for index in range(3)
    ]
    return undeclared, without_groups(found), operators


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "savepoint"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("key_type", "rows"),
    [(int, 1 << 20), (str, 50), ("struct<a:int,b:string>", 50)],
    ids=["int", "str", "row"],
)
@each_backend
def test_restored_state_equals_the_checkpoint(
    root: Path,
    target: Path,
    rng: random.Random,
    backend: str,
    key_type: Any,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export, "_SLICE_ROWS", rows)
    history(root, backend, key_type, rng)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    made = sb.tools.savepoint(root, target)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert (made.uri, made.now) == (str(target), 4000)
    sb.tools.savepoint(CheckpointReader(root), target.with_name("older"), id=2)
    older = (2, target.with_name("older"), rng.choice(BACKENDS))
    for checkpoint_id, savepoint, restored in (
        older,
        *((3, target, each) for each in rng.sample(BACKENDS, 2)),
    ):
        checkpoint = CheckpointReader(root).open(checkpoint_id)
        for now in (6000, 12_500):  # some, and then all of what has a time to live is gone
            expected = held(restored, key_type, checkpoint, 32, now=now)
            assert expected[0] == sorted([*DESCRIPTORS, *TIMED])
            assert len(expected[1]) > 50
            assert held(restored, key_type, savepoint, 32, now=now) == expected
        assert held(restored, key_type, savepoint, 57, now=12_500) == expected
    for name in [*DESCRIPTORS, *TIMED, *OPERATOR, "statebackend.timers.event"]:
        found, expected = sb.tools.state(target, name).to_table(), sb.tools.state(root, name).to_table()
        assert sorted(found.schema.names) == sorted(expected.schema.names)
        columns = expected.schema.names
        assert sorted(found.select(columns).to_pylist(), key=repr) == sorted(expected.to_pylist(), key=repr)
        assert dict(zip(found.schema.names, found.schema.types, strict=True)) == dict(
            zip(expected.schema.names, expected.schema.types, strict=True)
        )


def test_savepoint_has_the_time_of_the_checkpoint_also_after_set_time(root: Path, target: Path) -> None:
    with open_store(root) as store, create("heap", clock=ManualClock(7000)) as keyed:
        keyed.get_state(DESCRIPTORS["count"]()).update_many([1], [1])
        store.commit(0, [keyed.snapshot(0, store).result()], now=7000)
    assert sb.tools.savepoint(root, target).now == 7000
    sb.tools.set_time(root, now=99)
    assert sb.tools.savepoint(root, target.with_name("other")).now == 99
    assert CheckpointReader(root).open(0).now == 99


@pytest.mark.sampled(7)
@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize(
    "namespaces",
    [[7], ["a", "b"], [b"x"], [sb.TimeWindow(0, 5)], [7, "7", sb.TimeWindow(1, 2)], [("a", 1)], []],
    ids=["int", "text", "bytes", "window", "mixed", "tuple", "void"],
)
def test_slices_have_the_same_columns(
    root: Path, target: Path, rows: int, namespaces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one slice has namespaces of one sort, or none, and another has others."""
    monkeypatch.setattr(export, "_SLICE_ROWS", rows)
    count = DESCRIPTORS["count"]
    with open_store(root) as store, create("heap") as keyed:
        state = keyed.get_state(count())
        for key in range(24):
            keyed.set_current_key(key)
            keyed.set_current_namespace([sb.VOID, sb.VOID, *namespaces][key % (len(namespaces) + 2)])
            state.update(key)
        store.commit(0, [keyed.snapshot(0, store).result()])
        expected = contents(keyed, ["count"])
        keyed.savepoint(target.with_name("other"))
    sb.tools.savepoint(root, target)
    mine, other = (pq.read_table(each / "keyed" / "count") for each in (target, target.with_name("other")))
    assert mine.schema == other.schema
    for backend in BACKENDS:
        with create(backend, int, restore=target, max_parallelism=16) as again:
            assert contents(again, ["count"]) == expected


class Trap:
    is_armed = False

    def __setstate__(self, state: dict[str, int]) -> None:
        assert not Trap.is_armed


def test_no_code_of_the_user_runs(root: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = Trap()
    trap.__dict__["n"] = 1  # without any state, there is nothing to set
    with open_store(root) as store, create("heap") as keyed:
        keyed.get_state(DESCRIPTORS["thing"]()).update_many([1], [trap])
        operator = sb.OperatorStateBackend()
        operator.get_list_state(sb.ListStateDescriptor("u", t.PICKLE)).add(trap)
        taken = [each.snapshot(0, store) for each in (keyed, operator)]
        store.commit(0, [each.result() for each in taken])
    monkeypatch.setattr(Trap, "is_armed", True)
    sb.tools.savepoint(root, target)
    assert pq.read_table(target / "keyed" / "thing").schema.field("value").type == pa.binary()
    assert pq.read_table(target / "operator" / "u").schema.field("value").type == pa.binary()


def test_a_slice_is_in_memory(
    root: Path, target: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(root, "heap", int, rng, parallelism=1)
    seen: list[int] = []
    original = export.SnapshotFiles.remaining

    def noted(files: Any, name: str, kind: str, key_groups: Any) -> Any:
        seen.append(sum(table.num_rows for table in files.read(name, key_groups)))
        return original(files, name, kind, key_groups)

    monkeypatch.setattr(export, "_SLICE_ROWS", 20)
    monkeypatch.setattr(export.SnapshotFiles, "remaining", noted)
    sb.tools.savepoint(root, target)
    assert len(seen) > 50
    assert max(seen) < 60


def test_checkpoints_that_cannot_become_a_savepoint_are_refused(
    store: CheckpointStore, root: Path, target: Path
) -> None:
    with pytest.raises(sb.UsageError, match=r"there is no checkpoint.*\[USAGE\.NO_CHECKPOINT\]"):
        sb.tools.savepoint(target.with_name("nowhere"), target)
    model = Model("value", int, int)
    store.commit(0)
    with pytest.raises(sb.UsageError, match="holds no state"):
        sb.tools.savepoint(root, target)
    native = write(store, 1, "sst", [])
    store.commit(1, [keyed_snapshot(store, 1, [native], [model.described("n")])])
    with pytest.raises(sb.UsageError, match="'sst'"):
        sb.tools.savepoint(root, target)
    part = keyed_snapshot(store, 2, [], [model.described("n")], key_groups=range_for(GROUPS, 2, 0))
    store.commit(2, [part])
    with pytest.raises(sb.CorruptCheckpointError, match="every key group once") as broken:
        sb.tools.savepoint(root, target)
    assert broken.value.code == "CORRUPT_CHECKPOINT.INCOMPLETE"
    unnamed = write(store, 3, "base", [model.section("other", is_base=True)])
    store.commit(3, [keyed_snapshot(store, 3, [unnamed], [model.described("n")])])
    with pytest.raises(sb.CorruptCheckpointError, match="'other' that the manifest does not name"):
        sb.tools.savepoint(root, target)
    with pytest.raises(sb.UsageError, match="there is no checkpoint 9"):
        sb.tools.savepoint(root, target, id=9)
    assert Savepoint(target).parts("keyed") == []


def test_a_target_that_exists_is_refused_and_stays(root: Path, target: Path, rng: random.Random) -> None:
    history(root, "heap", int, rng)
    sb.tools.savepoint(root, target, id=2)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    with pytest.raises(sb.UsageError, match="there is a savepoint already"):
        sb.tools.savepoint(root, target)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before


def test_damage_is_found_and_nothing_is_left(root: Path, target: Path, rng: random.Random) -> None:
    history(root, "heap", int, rng, parallelism=1)
    checkpoint = CheckpointReader(root).open(3)
    for number, name in enumerate(checkpoint.files):
        content = bytearray((root / name).read_bytes())
        for at in (len(content) // 4, len(content) - 20):
            content[at] ^= 4
            (root / name).write_bytes(bytes(content))
            with pytest.raises(sb.CorruptCheckpointError, match=name):
                sb.tools.savepoint(root, target / str(number))
            assert [path for path in target.rglob("*") if path.is_file()] == []
            content[at] ^= 4
        (root / name).write_bytes(bytes(content))
    sb.tools.savepoint(root, target)


class Vanishing(PosixFiles):
    """Files of which all data vanish, with their manifests, before the n-th is opened."""

    left = 0

    def open_input(self, name: str, size: int | None = None) -> pa.NativeFile:
        self.left -= 1
        if self.left == 0:
            root = Path(self.uri)
            for path in [*root.glob("checkpoints/*.json"), *root.glob("data/*/*")]:
                path.unlink()
        return super().open_input(name, size)


def test_a_checkpoint_that_is_dropped_meanwhile(tmp_path: Path, target: Path, rng: random.Random) -> None:
    history(tmp_path / "kept", "heap", int, rng)
    files_of_3 = CheckpointReader(tmp_path / "kept").open(3).files.values()
    count = sum(file.kind != "manifest" for file in files_of_3)
    assert count > 5
    for at in range(1, count + 1):
        root = shutil.copytree(tmp_path / "kept", tmp_path / f"store {at}")
        files = Vanishing(str(root))
        files.left = at
        with pytest.raises(sb.UsageError) as caught:
            sb.tools.savepoint(CheckpointReader(root, _files=files), target)
        assert caught.value.code == "USAGE.NO_CHECKPOINT"
        assert "try again" in str(caught.value)
        assert "retain" in str(caught.value)
        assert [path for path in target.rglob("*") if path.is_file()] == []
    sb.tools.savepoint(tmp_path / "kept", target)


def code_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except sb.StateBackendError as error:
        return error.code
    return None


def test_crash_or_full_disk_leaves_no_partial_savepoint(root: Path) -> None:
    many = [create("heap", int, key_group_range=range_for(32, 2, index)) for index in range(2)]
    operators = [sb.OperatorStateBackend(subtask_index=index, parallelism=2) for index in range(2)]
    with CheckpointStore(root).open_for_writing(key_type=int, max_parallelism=32) as store:
        for keyed in many:
            keys = [key for key in range(20) if keyed._encoder.key_group(key, 32) in keyed.key_group_range]
            keyed.get_state(DESCRIPTORS["count"]()).update_many(keys, keys)
        for operator in operators:
            OPERATOR["n"](operator).add(1)
        taken = [each.snapshot(0, store) for each in (*many, *operators)]
        store.commit(0, [each.result() for each in taken])
    clean = SimulatedCalls(Disk())
    sb.tools.savepoint(root, Savepoint("/", _files=PosixFiles("/savepoint", clean)))
    made = list(enumerate(clean.made))
    wrote = [(at, name) for at, name in made if name not in ("status", "names", "close", "remove")]
    whole = 0
    codes: set[str | None] = set()
    for at, _ in wrote:
        disk = Disk()
        calls = SimulatedCalls(disk, lambda number, name, at=at: errno.ENOSPC if number == at else None)
        with pytest.raises(sb.StoreError):
            sb.tools.savepoint(root, Savepoint("/", _files=PosixFiles("/savepoint", calls)))
        assert [name for name in disk.walk() if name.endswith((".parquet", ".json"))] == []

        def die(number: int, name: str, at: int = at) -> None:
            if number >= at:
                raise Dead

        disk = Disk()
        dying = Savepoint("/", _files=PosixFiles("/savepoint", SimulatedCalls(disk, die)))
        with pytest.raises(Dead):
            sb.tools.savepoint(root, dying)
        for how in ("kept", "lost"):
            left = Savepoint("/", _files=PosixFiles("/savepoint", SimulatedCalls(disk.crash(how))))
            for restore in (
                lambda left=left: create("reference", int, restore=left).close(),
                lambda left=left: sb.create_backend("heap").create_operator_backend(restore=left).close(),
                lambda left=left: sb.tools.state(left, "count").to_table(),
            ):
                if code_of(restore) is None:
                    assert len(left.parts("keyed") + left.parts("operator")) == 4
                    whole += 1
                else:
                    codes.add(code_of(restore))
    assert whole < 20  # only at the last calls
    # The last is of a description that was being written.
    assert codes == {"USAGE.NO_CHECKPOINT", "CORRUPT_CHECKPOINT.INCOMPLETE", "CORRUPT_CHECKPOINT"}


def test_a_checkpoint_that_its_writer_drops_is_written_whole(
    tmp_path: Path, target: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin holds its files, and is gone afterwards."""
    root = tmp_path / "store"
    history(root, "heap", int, rng)
    expected = sb.tools.savepoint(root, tmp_path / "undisturbed")
    opened = PosixFiles.open_input
    dropped = []

    def dropping(files: PosixFiles, name: str, size: int | None = None) -> pa.NativeFile:
        if not dropped and str(root) in files.uri:
            with CheckpointStore(root, retain=1).open_for_writing() as store:
                dropped.append(store.latest())
                store.commit(store.latest() + 1)
                store.commit(store.latest() + 1)
        return opened(files, name, size)

    monkeypatch.setattr(PosixFiles, "open_input", dropping)
    made = sb.tools.savepoint(root, target)
    assert dropped
    assert dropped[0] not in CheckpointReader(root).checkpoints()
    assert sb.tools.state(made, "n").to_table().equals(sb.tools.state(expected, "n").to_table())
    assert list(root.glob("pins/*")) == []
