"""Files of a store published where others read: whole, durable, under names that are taken once."""

from __future__ import annotations

import errno
import os
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ciphers import AesGcm
from object_servers import SERVERS, Place as Address, object_server
from simulated_disk import Dead, Disk, SimulatedCalls
from simulated_objects import Bucket, SimulatedObjectCalls
from watched_calls import WatchedCalls

import statebackend as sb
from statebackend.checkpoint import Checkpoint, StoredFile
from statebackend.checkpoint.files import PosixFiles, TargetFolder, open_target_folder
from statebackend.checkpoint.files.object_store import ObjectFiles
from statebackend.checkpoint.files.target_folder import ObjectTargetFolder, PosixTargetFolder
from statebackend.checkpoint.store.checkpoint_reader import published
from statebackend.errors import StoreError

__all__ = ["object_server"]

CONTENT = bytes(random.Random(1).randbytes(5 << 20))


def committed(store: sb.CheckpointStore, content: bytes = CONTENT) -> tuple[Checkpoint, StoredFile]:
    """A store with one batch, whose output is one file."""
    with store.open_for_writing() as opened:
        with opened.begin_snapshot(0).create("output", suffix=".parquet") as file:
            file.write(content)
            stored = file.finish()
        checkpoint = opened.commit(0, outputs={"main": [stored]})
        return checkpoint, stored


def read(place: TargetFolder, name: str) -> bytes:
    with place.open_input(name) as file:
        return bytes(file.read())


def watched(no_links: int | None) -> WatchedCalls:
    """Real calls: links fail with an errno."""

    def before(number: int, name: str, *arguments: Any) -> None:
        if no_links is not None and name == "link" and not os.path.basename(arguments[0]).startswith("."):
            raise OSError(no_links, "no link")

    return WatchedCalls(before)


def test_a_file_of_the_same_disk_gets_a_second_name(tmp_path: Path) -> None:
    checkpoint, file = committed(sb.CheckpointStore(tmp_path / "state"))
    place = open_target_folder(tmp_path / "out")
    place.prepare()
    assert [checkpoint.publish(file, place, "a") for _ in range(2)] == ["linked", "there"]
    assert os.path.samefile(checkpoint.address(file), tmp_path / "out" / "a")
    assert read(place, "a") == CONTENT


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, "encrypted"])
def test_elsewhere_and_from_an_encrypted_store_it_is_copied(tmp_path: Path, number: Any) -> None:
    cipher = AesGcm() if number == "encrypted" else None
    checkpoint, file = committed(sb.CheckpointStore(tmp_path / "state", encryption=cipher))
    place = PosixTargetFolder(str(tmp_path / "out"), watched(None if cipher else number))
    place.prepare()
    assert [checkpoint.publish(file, place, "a") for _ in range(2)] == ["copied", "there"]
    assert os.listdir(tmp_path / "out") == ["a"]
    assert read(place, "a") == CONTENT
    assert (CONTENT in Path(checkpoint.address(file)).read_bytes()) is (cipher is None)


@pytest.mark.parametrize("change", ["shorter", "a bit", "longer"])
def test_a_name_with_other_content_is_refused(tmp_path: Path, change: str) -> None:
    checkpoint, file = committed(sb.CheckpointStore(tmp_path / "state"))
    place = open_target_folder(tmp_path / "out")
    place.prepare()
    other = bytearray(CONTENT)
    other[4 << 20] ^= 1
    content = {"shorter": CONTENT[:-1], "a bit": bytes(other), "longer": CONTENT + b"x"}[change]
    (tmp_path / "out" / "a").write_bytes(content)
    with pytest.raises(sb.UsageError, match=r"with other content.*\[USAGE\.PUBLISHED\]"):
        checkpoint.publish(file, place, "a")
    assert (tmp_path / "out" / "a").read_bytes() == content


@pytest.mark.parametrize("how", ["die", "fail"])
@pytest.mark.parametrize("is_linked", [True, False], ids=["linked", "copied"])
def test_found_files_are_durable_before_they_count(how: str, is_linked: bool) -> None:
    """The first stops at any of its calls, the next may find the name, and then the power fails."""
    content, at, seen = b"rows" * 100, 0, set()
    while True:
        disk = Disk()
        setup = SimulatedCalls(disk)
        PosixTargetFolder("/state", setup).prepare()
        PosixTargetFolder("/state", setup).write("rows", [content])
        PosixTargetFolder("/out", setup).prepare()

        def publish(calls: SimulatedCalls) -> str:
            source = PosixFiles("/state", calls) if is_linked else None
            return published(
                PosixTargetFolder("/out", calls), "a", lambda: pa.BufferReader(content), source, "rows"
            )

        first = SimulatedCalls(disk, lambda number, name, at=at: how if number == at else None)  # type: ignore[misc]
        with suppress(Dead, StoreError):
            publish(first)
        out = PosixTargetFolder("/out", SimulatedCalls(disk))
        assert out.names() in ([], ["a"])
        assert out.names() == [] or read(out, "a") == content, "a reader sees whole files"
        seen.add(publish(SimulatedCalls(disk)))
        assert [path for path in disk.walk() if path.startswith("/out/")] == ["/out/", "/out/a"]
        after = PosixTargetFolder("/out", SimulatedCalls(disk.crash("lost")))
        assert after.size("a") == len(content), f"call {at}, {first.made[at:]}"
        assert read(after, "a") == content
        if len(first.made) <= at:
            break
        at += 1
    assert seen == {"linked" if is_linked else "copied", "there"}


def test_two_that_publish_at_once_agree(tmp_path: Path) -> None:
    checkpoint, file = committed(sb.CheckpointStore(tmp_path / "state"))

    class Late(PosixTargetFolder):
        def adopt(self, name: str, source: Any, source_name: str) -> str | None:
            (tmp_path / "out" / name).write_bytes(content)
            return super().adopt(name, source, source_name)

    place = Late(str(tmp_path / "out"))
    place.prepare()
    content = CONTENT
    assert checkpoint.publish(file, place, "same") == "there"
    content = b"other"
    with pytest.raises(sb.UsageError, match="with other content"):
        checkpoint.publish(file, place, "other")


def test_in_one_bucket_the_service_copies() -> None:
    bucket = Bucket()
    files = ObjectFiles("s3://simulated/state", SimulatedObjectCalls(bucket))
    checkpoint, file = committed(sb.CheckpointStore("s3://simulated/state", _files=files))
    calls = SimulatedObjectCalls(bucket)
    place = ObjectTargetFolder("s3://simulated/out", calls)
    assert [checkpoint.publish(file, place, "a") for _ in range(2)] == ["copied by the service", "there"]
    assert "copy" in calls.made
    assert "put" not in calls.made
    assert bucket.objects["out/a"] == CONTENT
    assert place.names() == ["a"]
    # Where the service refuses, or the bucket is another, the bytes come here and go there.
    refusing = SimulatedObjectCalls(bucket, lambda number, name: errno.EACCES if name == "copy" else None)
    assert checkpoint.publish(file, ObjectTargetFolder("s3://simulated/out", refusing), "b") == "copied"
    other = Bucket()
    assert (
        checkpoint.publish(file, ObjectTargetFolder("s3://other/out", SimulatedObjectCalls(other)), "a")
        == "copied"
    )
    assert bucket.objects["out/b"] == other.objects["out/a"] == CONTENT


@pytest.mark.parametrize("name", SERVERS)
def test_on_real_services(object_server: Callable[[str], Address], name: str, tmp_path: Path) -> None:
    address, options = object_server(name)
    store = sb.CheckpointStore(f"{address}/state", options=options)
    checkpoint, file = committed(store)
    place = pickle.loads(pickle.dumps(open_target_folder(f"{address}/out", options)))
    assert checkpoint.publish(file, place, "a") == "copied by the service"
    assert checkpoint.publish(file, place, "a") == "there"
    assert read(place, "a") == CONTENT
    assert place.names() == ["a"]
    place.remove("a")
    assert place.names() == []
    # From there to a folder, and from a folder to there.
    here = open_target_folder(tmp_path / "out")
    here.prepare()
    assert checkpoint.publish(file, here, "a") == "copied"
    assert read(here, "a") == CONTENT
    checkpoint, file = committed(sb.CheckpointStore(tmp_path / "state"), b"short")
    assert checkpoint.publish(file, place, "b") == "copied"
    assert read(place, "b") == b"short"


def test_addresses() -> None:
    assert open_target_folder("file:///data/out").uri == "/data/out"
    assert open_target_folder("s3://KEY:SECRET@bucket/out").uri == "s3://bucket/out"
    for wrong in ("hdfs://host/out", "s3a://bucket/out", "file://host/out"):
        with pytest.raises(sb.UsageError, match="cannot be published"):
            open_target_folder(wrong)
    with pytest.raises(sb.UsageError, match="only an object store"):
        open_target_folder("/data/out", {"region": "here"})
    with pytest.raises(sb.UsageError, match="a path or uri|path or uri"):
        open_target_folder("")


def test_tidying_leaves_what_is_written_for_a_longer_name(tmp_path: Path) -> None:
    """As of an output ``late`` and another one ``late.v2``: only one of the two was cut off."""
    place = open_target_folder(tmp_path)
    left, other = tmp_path / f".a.{'0' * 16}", tmp_path / f".a.b.{'1' * 16}"
    left.touch()
    other.touch()
    place.tidy("a")
    assert (left.exists(), other.exists()) == (False, True)
    place.tidy("a.b")
    assert not other.exists()
