"""Checkpoints of backends with a file changed, cut, emptied, exchanged or gone: never wrong data, never a crash."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from keyed_story import Story, contents

import statebackend as sb


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[str]]:
    """A store with one checkpoint of a base, two deltas and operator state; what it holds; its files."""
    root = tmp_path_factory.mktemp("whole")
    store = sb.CheckpointStore(root, retain=1).open_for_writing(key_type=int, max_parallelism=32)
    keyed = sb.create_backend("heap").create_keyed_backend(int, max_parallelism=32)
    operator = sb.create_backend("heap").create_operator_backend()
    operator.get_list_state(sb.ListStateDescriptor("offsets", int)).update([1, 2, 3])
    story = Story(keyed, random.Random(5), int)
    story.change(1500)
    for checkpoint_id in range(3):
        taken = [each.snapshot(checkpoint_id, store) for each in (keyed, operator)]
        committed = store.commit(checkpoint_id, [pending.result() for pending in taken])
        held = contents(keyed)
        story.change(30)
    kinds = [file.kind for file in committed.files.values()]
    assert kinds == ["base", "delta", "delta", "operator"]
    store.close()
    keyed.close()
    return root, held, list(committed.files)


@pytest.fixture
def copy(whole: tuple[Path, list[Any], list[str]], tmp_path: Path) -> Path:
    shutil.copytree(whole[0], tmp_path / "copy")
    return tmp_path / "copy"


def restore(root: Path) -> list[Any]:
    """What a restart finds, operator state at the end."""
    checkpoint = sb.CheckpointStore(root).open(2)
    # First, as the rows of keyed state take long.
    operator = sb.create_backend("heap").create_operator_backend(restore=checkpoint)
    offsets = operator.get_list_state(sb.ListStateDescriptor("offsets", int)).get()
    with sb.create_backend("heap").create_keyed_backend(int, max_parallelism=32, restore=checkpoint) as keyed:
        return [contents(keyed), offsets]


def check_damaged(root: Path, held: list[Any], name: str) -> None:
    """Whoever reads everything is told which file it is; a restart is too, or has read nothing of it that is wrong."""
    with pytest.raises(sb.CorruptCheckpointError, match=Path(name).name):
        sb.CheckpointStore(root).open(2).verify()
    assert sb.CheckpointStore(root).latest(intact=True) is None
    found, error = None, ""
    try:
        found = restore(root)
    except sb.CorruptCheckpointError as refused:
        error = str(refused)
    assert found == [held, [1, 2, 3]] or Path(name).name in error


def places(size: int, rng: random.Random, count: int) -> Iterator[int]:
    """The ends of a file, and places all over it."""
    yield from range(16)
    yield from range(size - 160, size)
    yield from rng.sample(range(size), count)


@pytest.mark.parametrize("number", range(4))
def test_a_byte_flipped_anywhere(
    whole: tuple[Path, list[Any], list[str]], copy: Path, number: int, rng: random.Random, is_stress: bool
) -> None:
    name = whole[2][number]
    path = copy / name
    content = path.read_bytes()
    for at in places(len(content), rng, 2000 if is_stress else 120):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :])
        check_damaged(copy, whole[1], name)
    path.write_bytes(content)
    assert restore(copy) == [whole[1], [1, 2, 3]]


@pytest.mark.parametrize("number", range(4))
def test_a_file_cut_or_longer_or_gone(
    whole: tuple[Path, list[Any], list[str]], copy: Path, number: int, rng: random.Random
) -> None:
    name = whole[2][number]
    path = copy / name
    content = path.read_bytes()
    for left in [0, 1, *rng.sample(range(len(content)), 30), len(content) - 1]:
        path.write_bytes(content[:left])
        with pytest.raises(sb.CorruptCheckpointError, match=Path(name).name):
            restore(copy)
    path.write_bytes(content + b"x")
    with pytest.raises(sb.CorruptCheckpointError, match=Path(name).name):
        restore(copy)
    path.unlink()
    with pytest.raises(sb.CorruptCheckpointError, match=Path(name).name):
        restore(copy)


def test_files_that_changed_places(whole: tuple[Path, list[Any], list[str]], copy: Path) -> None:
    """Also files of one length, each whole in itself."""
    store = sb.CheckpointStore(copy, retain=1).open_for_writing(key_type=int, max_parallelism=32)
    with sb.create_backend("heap").create_keyed_backend(int, max_parallelism=32) as keyed:
        count = keyed.get_state(sb.ValueStateDescriptor("count", int))
        count.update_many(range(1000), range(1000))
        for checkpoint_id in range(3, 23):
            committed = store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])
            count.update_many([7], [checkpoint_id])
    store.close()
    by_length: dict[int, list[Path]] = {}
    for file in committed.files.values():
        by_length.setdefault(file.size, []).append(copy / file.name)
    first, second = next(paths for paths in by_length.values() if len(paths) > 1)[:2]
    mine, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(mine)
    with pytest.raises(sb.CorruptCheckpointError, match=r"content of the file is that of another one"):
        sb.create_backend("heap").create_keyed_backend(
            int, max_parallelism=32, restore=sb.CheckpointStore(copy).open(22)
        )


def test_a_manifest_with_any_byte_flipped(
    whole: tuple[Path, list[Any], list[str]], copy: Path, rng: random.Random
) -> None:
    path = copy / sb.CheckpointStore(copy).open_latest().manifest.name
    for each in (path, copy / "metadata.json"):
        content = each.read_bytes()
        for at in rng.sample(range(len(content)), min(150, len(content))):
            each.write_bytes(
                content[:at] + bytes([content[at] ^ (1 << rng.randrange(7))]) + content[at + 1 :]
            )
            with pytest.raises(sb.CorruptCheckpointError, match=each.name):
                restore(copy)
        each.write_bytes(content)
