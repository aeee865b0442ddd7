"""`verify` finds and names every damaged file of a store, whatever it belongs to, and disturbs nobody."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from keyed_story import Story
from output_files import write_output
from simulated_disk import Disk, SimulatedCalls
from store_files import busy, commit, write

import statebackend as sb
from statebackend.checkpoint import CheckpointReader, CheckpointStore, StateSnapshot
from statebackend.checkpoint.files import PosixFiles
from statebackend.checkpoint.format import GroupedBatch, Section, write_data_file
from statebackend.checkpoint.store.sealed import seal, unseal

pytestmark = pytest.mark.usefixtures("no_fsync")

OUTPUT = pa.table({"user": [f"user-{n}" for n in range(2000)], "n": range(2000)})


@pytest.fixture
def three(root: Path, rng: random.Random) -> Path:
    """Checkpoints 5, 6 and 7 with keyed state, operator state and output, which share files; 8 was taken back."""
    operator = sb.OperatorStateBackend()
    operator.get_list_state(sb.ListStateDescriptor("offsets", int)).add_all([1, 2])
    with (
        CheckpointStore(root, retain=4).open_for_writing(key_type=int, max_parallelism=128) as store,
        sb.create_backend("heap").create_keyed_backend(int) as keyed,
    ):
        story = Story(keyed, rng, int, keys=300)
        story.change(2000)
        for checkpoint_id in range(5, 9):
            story.change(50)
            taken = [each.snapshot(checkpoint_id, store) for each in (keyed, operator)]
            output = write_output(store.begin_snapshot(checkpoint_id), OUTPUT)
            snapshots = [each.result() for each in taken]
            store.commit(checkpoint_id, snapshots, outputs={"main": [output]}, now=checkpoint_id)
            for each in (keyed, operator):
                each.notify_checkpoint_complete(checkpoint_id)
    sb.tools.rewind(root, to=7, checkpoint_location=None)
    sb.tools.set_time(root, now=5000)
    return root


def contents_of(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def needing(root: Path, name: str) -> list[int]:
    reader = CheckpointReader(root)
    opened = [reader.open(each) for each in reader.checkpoints()]
    return [each.id for each in opened if name == each.manifest.name or name in each.files]


def test_a_store_that_is_whole(three: Path) -> None:
    before = contents_of(three)
    report = sb.tools.verify(three)
    assert report.ok
    assert (report.checkpoints, report.newest_intact) == ([5, 6, 7], 7)
    assert (report.problems, report.left_over) == ([], [])
    own = {path: data for path, data in before.items() if path.suffix in (".json", ".arrow", ".parquet")}
    own = {path: data for path, data in own.items() if not path.parent.name.startswith("epoch-")}
    assert (report.files, report.bytes) == (len(own), sum(map(len, own.values())))
    assert repr(report).startswith("Report\n  checkpoints    5, 6, 7\n  newest_intact  7\n")
    assert contents_of(three) == before
    kinds = {file.kind for each in (5, 6, 7) for file in CheckpointReader(three).open(each).files.values()}
    assert kinds == {"base", "delta", "operator", "output"}


def test_a_store_is_given_in_every_way(three: Path) -> None:
    expected = sb.tools.verify(str(three))
    for given in (three, f"file://{three}", CheckpointStore(three), CheckpointReader(three)):
        assert sb.tools.verify(given) == expected
    with CheckpointStore(three).open_for_writing() as store:
        assert sb.tools.verify(store).checkpoints == [5, 6, 7]
        commit(store, 8)


def test_missing_store_is_refused(tmp_path: Path) -> None:
    for given in (tmp_path, tmp_path / "nowhere", CheckpointReader(tmp_path)):
        with pytest.raises(sb.UsageError) as caught:
            sb.tools.verify(given)
        assert caught.value.code == "USAGE.NO_CHECKPOINT"
        with pytest.raises(sb.UsageError) as other:
            sb.tools.state(tmp_path, "state").to_table()
        assert caught.value.message == other.value.message
    with CheckpointStore(tmp_path).open_for_writing():
        assert sb.tools.verify(tmp_path).newest_intact is None


def test_a_dry_run_returns_the_same_and_only_reads(three: Path) -> None:
    tools: list[Callable[..., object]] = [
        lambda **options: sb.tools.drop_state(three, "offsets", **options),
        lambda **options: sb.tools.set_time(three, watermark=9, **options),
        lambda **options: sb.tools.rewind(three, to=6, checkpoint_location=None, **options),
    ]
    for tool in tools:
        with CheckpointStore(three).open_for_writing():
            before = contents_of(three)
            tried = tool(dry_run=True)
            assert contents_of(three) == before
        assert tool() == tried
        assert contents_of(three) != before
    assert repr(tried).startswith("Rewound\n  to          6\n  taken_back  TakenBack(batch_id=7, rows=")


def flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit flipped": flipped,
    "cut short": lambda content: content[:-3],
    "longer": lambda content: content + b"\n",
    "missing": lambda content: None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_named_with_the_checkpoints_that_need_it(three: Path, damage: str) -> None:
    before = sb.tools.verify(three)
    seen = set()
    newest = max(int(path.stem) for path in three.glob("checkpoints/*.json"))
    for path in sorted(three.rglob("*")):
        name = path.relative_to(three).as_posix()
        if not path.is_file() or path.parent.name.startswith("epoch-"):
            continue
        if damage == "missing" and path.parent.name == "checkpoints":
            continue  # nothing tells that it was there
        is_newest = name == f"checkpoints/{newest}.json"
        needed_by = needing(three, name)
        content = path.read_bytes()
        changed = DAMAGE[damage](content)
        path.unlink() if changed is None else path.write_bytes(changed)
        report = sb.tools.verify(three)
        assert [problem.file for problem in report.problems] == [name]
        (problem,) = report.problems
        assert problem.checkpoints == needed_by
        assert problem.code == "CORRUPT_CHECKPOINT"
        assert name in problem.message
        assert not report.ok
        assert report.checkpoints == [5, 6, 7]
        expected = None if name == "metadata.json" else max({5, 6, 7} - set(needed_by), default=None)
        assert report.newest_intact == expected
        if name != "metadata.json" and not is_newest:
            assert report.newest_intact == CheckpointReader(three).latest(intact=True)
        assert report.left_over == []
        path.write_bytes(content)
        seen.add(name.split("-")[2] if name.startswith("data/") else name)
    assert ("checkpoints/1.json" in seen) is (damage != "missing")
    assert seen >= {"metadata.json", "base", "delta", "operator", "output"}
    assert sb.tools.verify(three) == before


def test_all_problems_are_found_at_once(three: Path) -> None:
    broken = [path for path in three.rglob("*.*") if path.is_file() and path.parent.name != "checkpoints"]
    for number, path in enumerate(broken):
        path.write_bytes(list(DAMAGE.values())[number % 3](path.read_bytes()) or b"")
    report = sb.tools.verify(three)
    assert sorted(problem.file for problem in report.problems) == sorted(
        path.relative_to(three).as_posix() for path in broken
    )
    assert report.newest_intact is None
    assert len(broken) > 5


def change_file(root: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file and every manifest that names it, so that they agree about its checksum."""
    content = change((root / name).read_bytes())
    (root / name).write_bytes(content)
    for path in root.glob("checkpoints/*.json"):
        manifest: Any = unseal(path.read_bytes(), path.name)
        if manifest["kind"] != "commit":
            continue
        files = [*manifest["files"], *(each for one in manifest["snapshots"] for each in one["files"])]
        for file in [*files, *(each for own in manifest["outputs"].values() for each in own)]:
            if file["name"] == name:
                file["size"] = len(content)
                file["checksum"] = f"crc32c:{sb.checkpoint.store.sealed.crc32c(content):08x}"
        path.write_bytes(seal(manifest))


@pytest.mark.parametrize("kind", ["base", "delta", "operator", "output"])
def test_damage_within_a_file_whose_own_checksum_is_right(three: Path, kind: str) -> None:
    """As if memory had been damaged before the checksum of the whole file was taken."""
    name = min(path.relative_to(three).as_posix() for path in three.glob(f"data/*/*-{kind}-*"))
    needed_by = needing(three, name)
    change_file(three, name, flipped)
    CheckpointReader(three).open(needed_by[0]).verify()  # which looks at the whole only
    (problem,) = sb.tools.verify(three).problems
    assert (problem.file, problem.checkpoints) == (name, needed_by)
    assert problem.code == "CORRUPT_CHECKPOINT"


def test_wrong_parquet_output_is_reported_and_other_formats_are_not(
    store: CheckpointStore, root: Path
) -> None:
    made = store.begin_snapshot(0)
    with made.create("output", suffix=".parquet") as file:
        file.write(b"what the batch gave")
        bad = file.finish()
    with made.create("output", suffix=".txt") as file:
        file.write(b"what the batch gave")
        other = file.finish()
    native = write(made, b"of RocksDB", "sst")
    store.commit(0, [StateSnapshot(0, store.epoch, files=(native,))], outputs={"main": [bad, other]})
    (problem,) = sb.tools.verify(root).problems
    assert (problem.file, problem.checkpoints) == (bad.name, [0])
    assert "cannot be read, although its checksum is right" in problem.message


def test_files_that_no_manifest_names(three: Path) -> None:
    with CheckpointStore(three).open_for_writing() as store:
        flying = write(store.begin_snapshot(8), b"in flight")
        report = sb.tools.verify(three)
        assert (report.ok, report.left_over) == (True, [flying.name])
        (three / "data" / "notes.txt").write_bytes(b"mine")
        assert sb.tools.verify(three).left_over == [flying.name]
        manifest = three / CheckpointReader(three).open(5).manifest.name
        content = manifest.read_bytes()
        manifest.write_bytes(content[:-1])
        report = sb.tools.verify(three)
        # It may name any file.
        assert ([problem.checkpoints for problem in report.problems], report.left_over) == ([[5]], [])
        manifest.write_bytes(content)


def test_a_disk_that_cannot_be_read_is_a_problem_like_others() -> None:
    disk = Disk()
    with CheckpointStore("/", retain=3, _files=PosixFiles("/store", SimulatedCalls(disk))) as store:
        store.open_for_writing()
        rows = pa.record_batch({"key": [1]})
        for checkpoint_id in range(3):
            with store.begin_snapshot(checkpoint_id).create("base") as file:
                write_data_file(file, [Section("n", rows.schema, [GroupedBatch.of(rows, [0])])])
                stored = file.finish()
            store.commit(checkpoint_id, [StateSnapshot(checkpoint_id, store.epoch, files=(stored,))])
    clean = SimulatedCalls(disk)
    reader = CheckpointReader("/", _files=PosixFiles("/store", clean))
    assert sb.tools.verify(reader).ok
    listings = 0
    for at, name in enumerate(clean.made):
        calls = SimulatedCalls(disk, lambda number, name, at=at: errno.EIO if number == at else None)
        reader = CheckpointReader("/", _files=PosixFiles("/store", calls))
        if name == "names" or at == 0:
            with pytest.raises(sb.StoreError):
                sb.tools.verify(reader)
            listings += 1
            continue
        try:
            report = sb.tools.verify(reader)
        except sb.StoreError:
            is_log = at == clean.made.index("read")
            assert is_log or at > len(clean.made) - 10, (
                "only the newest entry, and the sizes at the end are needed for the report itself"
            )
            continue
        (problem,) = report.problems
        assert problem.code.startswith("STORE")
        assert len(problem.checkpoints) == (
            0 if problem.file in ("metadata.json", "checkpoints/1.json") else 1
        )
    assert listings > 3


class Dropping(PosixFiles):
    """Files of which a writer drops some checkpoint when the reader asks for the n-th thing."""

    def __init__(self, root: str, at: int, drop: Callable[[], None]) -> None:
        super().__init__(root)
        self.left, self.drop = at, drop

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.drop()

    def read(self, name: str) -> bytes:
        self.count()
        return super().read(name)

    def size(self, name: str) -> int | None:
        self.count()
        return super().size(name)

    def names(self, folder: str) -> list[str]:
        self.count()
        return super().names(folder)

    def open_input(self, name: str, size: int | None = None) -> pa.NativeFile:
        self.count()
        return super().open_input(name, size)


def test_a_checkpoint_that_is_dropped_at_any_moment_is_left_out(tmp_path: Path) -> None:
    moments, found = 1, set()
    while True:
        root = tmp_path / str(moments)
        with CheckpointStore(root, retain=2).open_for_writing() as store:
            shared = write(store.begin_snapshot(0), b"shared", "sst")
            damaged = commit(store, 0, shared, kind="sst")
            (root / damaged.name).write_bytes(b"OF 0")
            commit(store, 1, shared, kind="sst")

            def drop(store: CheckpointStore = store, shared: Any = shared) -> None:
                for checkpoint_id in (2, 3, 4):  # 0 and 1 go, with their files
                    commit(store, checkpoint_id, *([shared] if checkpoint_id == 2 else []), kind="sst")

            files = Dropping(str(root), moments, drop)
            report = sb.tools.verify(CheckpointReader(root, _files=files))
            if files.left > 0:
                break
        expected = [(damaged.name, [0])] if 0 in report.checkpoints else []
        assert [(problem.file, problem.checkpoints) for problem in report.problems] == expected
        assert report.newest_intact == max(report.checkpoints, default=None)
        found.add(tuple(report.checkpoints))
        reader = CheckpointReader(root)
        named = {name for each in reader.checkpoints() for name in reader.open(each).files}
        assert not named & set(report.left_over)
        moments += 1
    assert moments > 10
    assert () in found


def test_while_a_writer_commits_and_retires(root: Path, rng: random.Random) -> None:
    store = CheckpointStore(root, retain=2).open_for_writing(key_type=int, max_parallelism=128)
    keyed = sb.create_backend("heap").create_keyed_backend(int)
    story = Story(keyed, rng, int)

    def write_one(checkpoint_id: int) -> None:
        story.change(20)
        pending = keyed.snapshot(checkpoint_id, store, incremental=checkpoint_id % 3 > 0)
        output = write_output(store.begin_snapshot(checkpoint_id), OUTPUT.slice(0, 10))
        store.commit(checkpoint_id, [pending.result()], files=[output])
        keyed.notify_checkpoint_complete(checkpoint_id)

    reports: list[Any] = []
    with busy(write_one) as writer:
        while not writer.done() and len({report.newest_intact for report in reports}) < 20:
            if store.latest() is not None:
                reports.append(sb.tools.verify(root))
    assert [problem for report in reports for problem in report.problems] == []
    assert all(len(report.checkpoints) <= 3 for report in reports)
    keyed.close()
    store.close()
    assert sb.tools.verify(root).ok


def entries(root: Path) -> list[Path]:
    return sorted(root.glob("checkpoints/*.json"), key=lambda path: int(path.stem))


@pytest.mark.parametrize("newest", ["a commit", "a rewind", "an opening", "two commits"])
def test_a_damaged_log_is_repaired(three: Path, newest: str) -> None:
    """The store goes back to the newest whole checkpoint, and its writer goes on from there."""
    expected = 7
    with CheckpointStore(three, retain=9).open_for_writing() as store:
        if "commit" in newest:
            commit(store, 8, kind="sst")
        if newest == "two commits":
            commit(store, 9, kind="sst")
    if newest == "a rewind":
        sb.tools.rewind(three, to=6, checkpoint_location=None)
        expected = 6
    damaged = entries(three)[-1:]
    if newest == "two commits":
        damaged = entries(three)[-2:]
        expected = 6  # the second commit removed the output of 7, which is therefore not whole
    for path in damaged:
        path.write_bytes(flipped(path.read_bytes()))
    for call in (CheckpointStore(three).open_latest, CheckpointStore(three).open_for_writing):
        with pytest.raises(sb.CorruptCheckpointError, match=r"\[CORRUPT_CHECKPOINT\.LOG\]"):
            call()
    assert sb.tools.verify(three).newest_intact == expected
    names = [path.relative_to(three).as_posix() for path in damaged]
    for dry_run in (True, False):
        assert sb.tools.repair(three, dry_run=dry_run) == sb.tools.Repaired(expected, names)
    assert sb.tools.verify(three).ok
    assert sb.tools.repair(three) == sb.tools.Repaired(expected, [])
    with CheckpointStore(three, retain=9).open_for_writing() as store:
        assert store.latest() == expected
        commit(store, expected + 1, kind="sst")
    assert sb.tools.verify(three).ok


def test_a_repair_passes_over_checkpoints_that_are_damaged_too(three: Path) -> None:
    with CheckpointStore(three, retain=9).open_for_writing() as store:
        commit(store, 8, kind="sst")
    reader = CheckpointReader(three)
    newer = set(reader.open(7).files) - set(reader.open(6).files)
    (three / min(newer)).unlink()
    entries(three)[-1].write_bytes(b"")
    assert sb.tools.repair(three).to == 6
    assert CheckpointReader(three).checkpoints() == [5, 6]


def test_a_repair_that_cannot_help_changes_nothing(root: Path) -> None:
    with CheckpointStore(root, retain=1).open_for_writing() as store:
        commit(store, 0)
        commit(store, 1)  # checkpoint 0 goes with it
    entries(root)[-1].write_bytes(b"damaged")
    before = contents_of(root)
    with pytest.raises(sb.CorruptCheckpointError, match="no whole checkpoint to go back to"):
        sb.tools.repair(root)
    assert contents_of(root) == before


def test_a_store_in_use_is_not_repaired(three: Path) -> None:
    with CheckpointStore(three).open_for_writing() as store:
        commit(store, 8, kind="sst")
        entries(three)[-1].write_bytes(b"damaged")
        before = contents_of(three)
        with pytest.raises(sb.UsageError, match=r"\[USAGE\.STORE_IN_USE\]"):
            sb.tools.repair(three)
        assert contents_of(three) == before
