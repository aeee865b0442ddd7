"""A keyed backend on a disk that is full, or that loses or damages a file: an error with its name, and a way back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refusing_disks import disk

import statebackend as sb
from statebackend.errors import StoreError

DESCRIPTOR = sb.ValueStateDescriptor("v", bytes)
ROWS = 4000


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "small", "24m") as made:
        yield made


def filled(local: Path, store: sb.CheckpointStore) -> tuple[Any, Any]:
    """A backend with some files of its state, committed as checkpoint 0."""
    backend = sb.create_backend("rocksdb", local_dir=local, memory_limit=4 << 20, compression="none")
    keyed = backend.create_keyed_backend(int)
    state = keyed.get_value_state(DESCRIPTOR)
    state.update_many(list(range(ROWS)), [b"%d" % key * 40 for key in range(ROWS)])
    store.commit(0, [keyed.snapshot(0, store).result()])
    keyed.notify_checkpoint_complete(0)
    keyed.scratch.database.flush()
    keyed.scratch.database.wait_for_compactions()
    return keyed, state


def check_the_way_back(root: Path) -> None:
    """The checkpoint has all that was committed."""
    checkpoint = sb.CheckpointStore(root).open_latest()
    with sb.create_backend("rocksdb").create_keyed_backend(int, restore=checkpoint) as keyed:
        state = keyed.get_value_state(DESCRIPTOR)
        assert state.get_many(list(range(ROWS))).to_pylist() == [b"%d" % key * 40 for key in range(ROWS)]
        assert keyed.num_entries("v") == ROWS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[sb.CheckpointStore]:
    with sb.CheckpointStore(tmp_path / "state").open_for_writing(key_type=int, max_parallelism=128) as opened:
        yield opened


def test_a_full_disk(tmp_path: Path, small: Path, store: sb.CheckpointStore) -> None:
    keyed, state = filled(small, store)
    rows = [os.urandom(1000)] * 500

    def fill() -> None:
        for start in range(10**6, 10**6 + 100_000, 500):  # 100 MB
            state.update_many(list(range(start, start + 500)), rows)

    with pytest.raises(StoreError) as full:
        fill()
    assert str(small) in (full.value.detail or "")
    codes = {full.value.code}
    try:  # what is there is found, or the error says why not
        found = state.get_many(list(range(ROWS))).to_pylist()
        assert found == [b"%d" % key * 40 for key in range(ROWS)]
    except StoreError as error:
        codes.add(error.code)
    keyed.close()
    assert codes == {"STORE.DATABASE_FULL"}
    assert list(small.iterdir()) == []
    check_the_way_back(tmp_path / "state")


def test_a_batch_that_could_not_be_written_stays_and_is_not_kept_silently(
    small: Path, store: sb.CheckpointStore
) -> None:
    keyed, state = filled(small, store)
    row, batch = os.urandom(1000), 0
    with pytest.raises(StoreError):  # noqa: PT012 - the disk is full after one of them
        for batch in range(200):
            mark = keyed.mark()
            for key in range(500):
                keyed.set_current_key(1_000_000 + 500 * batch + key)
                state.update(row)
            keyed.release(mark)
    assert one(keyed, state, 1_000_000 + 500 * batch + 499) == row
    assert len(keyed.store.overlay) > 0
    keyed.set_current_key(7)
    before = state.value()
    for again in (lambda: state.update(b"lost"), keyed.mark):
        with pytest.raises(StoreError) as full:
            again()
        assert full.value.code == "STORE.DATABASE_FULL"
    assert state.value() == before
    keyed.close()


def test_single_writes_outside_marks_on_a_full_disk(
    tmp_path: Path, small: Path, store: sb.CheckpointStore
) -> None:
    """They are gathered. What was taken is found, and goes into a checkpoint; what cannot be written is refused."""
    keyed, state = filled(small, store)
    first, taken = 1_000_000, 0
    row = os.urandom(1000)
    with pytest.raises(StoreError) as full:  # noqa: PT012 - the disk is full after one of them
        for taken in range(100_000):  # 100 MB
            keyed.set_current_key(first + taken)
            state.update(b"%d" % taken + row)
    codes = {full.value.code}
    assert len(keyed.store.overlay) > 0
    for key in range(taken):
        assert one(keyed, state, first + key) == b"%d" % key + row
    assert one(keyed, state, first + taken) is None
    keyed.set_current_key(7)
    before = state.value()
    for again in (lambda: state.update(b"lost"), state.clear, keyed.mark):
        with pytest.raises(StoreError) as refused:
            again()
        codes.add(refused.value.code)
    assert state.value() == before
    assert codes == {"STORE.DATABASE_FULL"}
    store.commit(1, [keyed.snapshot(1, store, incremental=False).result()])
    keyed.close()
    checkpoint = sb.CheckpointStore(tmp_path / "state").open_latest()
    with sb.create_backend("rocksdb").create_keyed_backend(int, restore=checkpoint) as restored:
        values = restored.get_value_state(DESCRIPTOR)
        assert restored.num_entries("v") == ROWS + taken
        assert values.get_many(list(range(first, first + taken))).to_pylist() == [
            b"%d" % key + row for key in range(taken)
        ]


def files_of(keyed: Any) -> list[Path]:
    return sorted(Path(keyed.scratch.folder, "db").glob("*.sst"), key=lambda path: -path.stat().st_size)


def read_all(keyed: Any, state: Any) -> None:
    """Reads every row in several ways; raises unless all of them are as they were."""
    expected = [b"%d" % key * 40 for key in range(ROWS)]
    assert state.get_many(list(range(ROWS))).to_pylist() == expected
    assert [one(keyed, state, key) for key in range(ROWS)] == expected
    assert sorted(keyed.keys("v")) == list(range(ROWS))


def one(keyed: Any, state: Any, key: int) -> Any:
    keyed.set_current_key(key)
    return state.value()


def test_a_damaged_file(tmp_path: Path, store: sb.CheckpointStore) -> None:
    """No flipped bit of the data gives wrong values, or none."""
    for part in (0.1, 0.5, 0.9):
        with sb.CheckpointStore(tmp_path / f"state {part}").open_for_writing(key_type=int) as own:
            keyed, state = filled(tmp_path, own)
        (file, *_) = files_of(keyed)
        content = bytearray(file.read_bytes())
        content[int(len(content) * part * 0.9)] ^= 0x10
        with open(file, "r+b") as opened:  # the database has it open: the same file
            opened.write(content)
        with pytest.raises(StoreError) as error:
            read_all(keyed, state)
        assert error.value.code == "STORE.DATABASE_CORRUPT"
        assert file.name in str(error.value)
        with pytest.raises(StoreError):  # nothing of it goes into a checkpoint either
            keyed.snapshot(1, store, incremental=False).result()
        keyed.close()
        check_the_way_back(tmp_path / f"state {part}")
