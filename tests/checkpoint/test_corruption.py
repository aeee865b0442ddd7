"""Every byte of what a store writes about itself, and every file it names, changed in every way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_files import commit, write

from statebackend.checkpoint import CheckpointStore, Manifest, Metadata, StateSnapshot, StoredFile
from statebackend.checkpoint.store.log import CheckpointRun, Entry, LogState, Restart, TimeOverride
from statebackend.checkpoint.store.sealed import parse, seal, unseal
from statebackend.errors import CorruptCheckpointError, StateBackendError


@pytest.fixture
def three(root: Path) -> Path:
    store = CheckpointStore(root, retain=3).open_for_writing(query="q", key_type=int, max_parallelism=128)
    for checkpoint_id in range(3):
        base = write(store.begin_snapshot(checkpoint_id), b"base %d " % checkpoint_id * 50, "base")
        commit(store, checkpoint_id, base)
    store.close()
    return root


def manifests(root: Path) -> list[Path]:
    return sorted(root.glob("checkpoints/*.json"))


def changes(content: bytes, others: list[bytes]) -> Iterator[tuple[str, bytes]]:
    for at in range(len(content)):
        for bit in (0, 5):  # 5 turns a letter's case
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            yield f"bit {bit} of byte {at} flipped", bytes(flipped)
    for length in range(len(content)):
        yield f"cut to {length}", content[:length]
    for tail in (b"\n", b" ", b"\0" * 40, content):
        yield f"{len(tail)} bytes more", content + tail
    yield "zeroed", bytes(len(content))
    for other in others:
        if other != content:
            yield "swapped", other


def refused(call: Callable[[], object], name: str) -> bool:
    try:
        call()
    except CorruptCheckpointError as error:
        return name in (error.detail or "")
    return False


def test_any_change_of_a_manifest_is_found(three: Path) -> None:
    store = CheckpointStore(three)
    path = manifests(three)[-1]
    content = path.read_bytes()
    others = [*(each.read_bytes() for each in manifests(three)), (three / "metadata.json").read_bytes()]
    for how, changed in changes(content, others):
        path.write_bytes(changed)
        assert refused(lambda: store.open(2), f"checkpoints/{path.name}"), how
        assert refused(store.latest, f"checkpoints/{path.name}"), how
    for call in (store.checkpoints, lambda: store.open(0)):
        assert refused(call, f"checkpoints/{path.name}"), "also older ones are known by the newest entry only"
    path.write_bytes(content)
    store.open(2).verify()


def test_any_change_of_the_metadata_is_found(three: Path) -> None:
    store = CheckpointStore(three)
    path = three / "metadata.json"
    content = path.read_bytes()
    for how, changed in changes(content, [each.read_bytes() for each in manifests(three)]):
        path.write_bytes(changed)
        assert refused(lambda: store.open(2), "metadata.json"), how
        assert refused(lambda: CheckpointStore(three).open_for_writing(), "metadata.json"), how
        assert store.latest() == 2
    path.unlink()
    assert refused(lambda: store.open(2), "metadata.json")
    assert refused(lambda: CheckpointStore(three).open_for_writing(), "metadata.json")
    assert len(list(three.glob("checkpoints/epoch-*"))) == 1, "a damaged store was taken over"


def test_metadata_of_another_store_is_found(three: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    CheckpointStore(other).open_for_writing(query="q", key_type=int, max_parallelism=128).close()
    shutil.copy(other / "metadata.json", three / "metadata.json")
    with pytest.raises(CorruptCheckpointError, match="of two different stores"):
        CheckpointStore(three).open(2)


def test_a_manifest_of_another_store_is_found(three: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    commit(CheckpointStore(other).open_for_writing(), 2)
    shutil.copy(other / "checkpoints/2.json", three / "checkpoints/2.json")
    for checkpoint_id in (0, 2):
        is_older = checkpoint_id == 0
        assert (
            refused(lambda each=checkpoint_id: CheckpointStore(three).open(each), "checkpoints/2.json")
            is is_older
        )
    shutil.copy(
        other / "checkpoints/2.json", three / "checkpoints/5.json"
    )  # the newest entry, which holds another
    assert refused(lambda: CheckpointStore(three).open_latest(), "checkpoints/5.json")


def test_any_change_of_a_data_file_is_found(three: Path) -> None:
    store = CheckpointStore(three)
    checkpoint = store.open(2)
    for file in checkpoint.files.values():
        path = three / file.name
        content = path.read_bytes()
        others = [each.read_bytes() for each in three.glob("data/*/*")]
        for how, changed in changes(content, others):
            path.write_bytes(changed)
            assert refused(checkpoint.verify, file.name), how
            assert refused(lambda file=file: checkpoint.read_file(file), file.name), how
        assert store.latest(intact=True) == 1
        path.unlink()
        for call in (checkpoint.verify, lambda file=file: checkpoint.open_file(file)):
            assert refused(call, file.name)
        assert store.latest(intact=True) == 1
        path.write_bytes(content)
        checkpoint.verify()


def test_a_file_that_a_folder_has_taken_the_place_of(three: Path) -> None:
    checkpoint = CheckpointStore(three).open(2)
    name = next(iter(checkpoint.files))
    (three / name).unlink()
    (three / name).mkdir()
    assert refused(checkpoint.verify, name)


def test_a_manifest_that_vanishes_while_its_checkpoint_is_read(three: Path) -> None:
    """Its writer has dropped it: that is not damage."""
    checkpoint = CheckpointStore(three).open(0)
    with CheckpointStore(three, retain=1).open_for_writing() as store:
        commit(store, 3)
    assert not (three / next(iter(checkpoint.files))).exists()
    with pytest.raises(StateBackendError, match=r"has been dropped by its writer.*\[USAGE\.NO_CHECKPOINT\]"):
        checkpoint.verify()


def test_nothing_is_removed_while_a_manifest_cannot_be_read(three: Path) -> None:
    """It may name anything. When retention has dropped it, the next open removes what it left."""
    damaged = manifests(three)[-1]
    CheckpointStore(three, retain=3).open_for_writing().close()  # the newest entry of the log is whole
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (three / "data/1/0-0-delta-left.arrow").write_bytes(b"left over")
    before = {path.name for path in three.glob("data/1/*")}
    store = CheckpointStore(three, retain=3).open_for_writing()
    assert store.latest(intact=True) == 1
    kept = list(store.open(1).files.values())
    for checkpoint_id in (3, 4):
        commit(store, checkpoint_id, *kept)
        assert {path.name for path in three.glob("data/1/*")} == before
    commit(store, 5, *kept)
    assert store.checkpoints() == [3, 4, 5]
    store.open_for_writing()
    store.close()
    store.open_for_writing()
    assert {path.name for path in three.glob("data/1/*")} == {Path(file.name).name for file in kept}
    store.open(5).verify()


STATE = LogState(
    "0" * 32,
    runs=(CheckpointRun(6, 11, 2),),
    restarts=(Restart("1" * 32, 3),),
    times=((7, TimeOverride(5)),),
)
FILE = StoredFile("data/3/a", "base", 1, 1)
GOOD = Entry(
    "commit",
    12,
    3,
    "0" * 32,
    STATE,
    Manifest(
        7,
        3,
        "0" * 32,
        (StateSnapshot(7, 3, files=(FILE,), states=({"name": "s", "kind": "v"},)),),
        now=4,
        sequence=12,
        incarnation="0" * 32,
        outputs={"main": (StoredFile("data/3/b", "output", 1, 1),)},
        written=5,
    ),
)


def altered(path: tuple[object, ...], value: object) -> bytes:
    content = json.loads(json.dumps(GOOD.to_json()))
    inner = content
    for step in path[:-1]:
        inner = inner[step]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return seal(content)


#: Values that no manifest has, by their places in it.
IMPOSSIBLE: dict[tuple[object, ...], list[object]] = {
    ("id",): [-1, 1.0, True, 10**18],
    ("epoch",): [0],
    ("store",): ["x", None],
    ("snapshots",): [{}],
    ("snapshots", 0): [[]],
    ("snapshots", 0, "id"): [8],
    ("snapshots", 0, "subtask"): [1],
    ("snapshots", 0, "parallelism"): [0, 32_769],
    ("snapshots", 0, "key_groups"): [[3, 1], [0, 32_768], [0], "0"],
    ("snapshots", 0, "states", 0): ["s"],
    ("snapshots", 0, "states", 0, "name"): [KeyError],
    ("snapshots", 0, "states", 0, "kind"): [7],
    ("snapshots", 0, "now"): ["7"],
    ("snapshots", 0, "extra"): [[]],
    ("snapshots", 0, "unknown"): [1],
    ("snapshots", 0, "files", 0, "name"): [
        "data/3/../../etc/passwd",
        "/etc/passwd",
        "data/3/a/b",
        "data/3/a\n",
        "data/3/.a",
        "metadata.json",
        7,
    ],
    ("snapshots", 0, "files", 0, "kind"): ["bases", []],
    ("snapshots", 0, "files", 0, "size"): [-1, "1"],
    ("snapshots", 0, "files", 0, "checksum"): ["crc32c:0000000G", "md5:00000000", 7],
    ("snapshots", 0, "files", 0, "label"): [7],
    ("snapshots", 0, "files"): [KeyError],
    ("files",): [None, [7], [{"name": "data/3/a", "kind": "base", "size": 2, "checksum": "crc32c:00000001"}]],
    ("times",): [None],
    ("times", "now"): [1.5],
    ("times", "watermark"): ["1"],
    ("written",): ["now"],
    ("batch",): [None],
    ("progress",): [None],
    ("outputs",): [[]],
    ("outputs", "main"): [None],
    ("outputs", "main", 0, "size"): [-1],
    ("kind",): ["takeover", "rewind", None],
    ("sequence",): [13, 2, "12"],
    ("token",): ["x"],
    ("log",): [None],
    ("log", "incarnation"): ["x"],
    ("log", "kept"): [[[6, 11]], [[6, 11, 0]], [[6, 11, 10**17]], [[6, 11, "2"]], [[7, 12, 1], [6, 11, 1]]],
    ("log", "restarts"): [[["x", 3]], [["1" * 32, "3"]], [["1" * 32, 3, 3]]],
    ("log", "times"): [[[7, 5]]],
    ("log", "dropped_states"): [None, [[7]], [["7", "a"]], [[7, 3]]],
    ("log", "outputs_from"): [None],
    ("log", "swept"): [-1],
    ("log", "more"): [1],
    ("format",): [1, 3, "1", KeyError],
    ("more",): [1],
}


@pytest.mark.parametrize("path", IMPOSSIBLE)
def test_a_sealed_manifest_that_says_what_cannot_be(path: tuple[object, ...]) -> None:
    assert Entry.parse(GOOD.sealed(), GOOD.name) == GOOD
    for value in IMPOSSIBLE[path]:
        with pytest.raises(CorruptCheckpointError, match=r"checkpoints/12\.json"):
            Entry.parse(altered(path, value), GOOD.name)


def test_a_newer_version_is_named() -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot read format 3; expected format 2") as caught:
        Entry.parse(altered(("format",), 3), GOOD.name)
    assert caught.value.code == "CORRUPT_CHECKPOINT.VERSION"
    with pytest.raises(CorruptCheckpointError, match="format 9"):
        parse(Metadata, seal({"format": 9}), "metadata.json")


@pytest.mark.parametrize(
    "body", [b'{"a"', b'{"a":1]', b'[{"a":1', b"{" + b'"a":{' * 100_000, b'"a', b'{"a":\xff', b""]
)
def test_right_checksum_over_wrong_json_is_refused(body: bytes) -> None:
    from statebackend.checkpoint.store.sealed import crc32c

    with pytest.raises(CorruptCheckpointError, match=r"x\.json"):
        unseal(body + b',"checksum":"crc32c:%08x"}\n' % crc32c(body), "x.json")


def test_no_message_prints_what_a_file_holds() -> None:
    for path in (("id",), ("snapshots", 0, "files", 0, "name"), ("store",), ("format",)):
        with pytest.raises(CorruptCheckpointError) as caught:
            Entry.parse(altered(path, "hunter2"), GOOD.name)
        assert "hunter2" not in str(caught.value)
