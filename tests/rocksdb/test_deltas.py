"""What a delta and a base of RocksDB hold: of a list that only grew, what was appended; of a batch, every row once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import statebackend as sb
from statebackend.checkpoint.format import Op, read_data_file
from statebackend.checkpoint.keyed import compiled_backend

pytestmark = pytest.mark.checked

TAGS = sb.ListStateDescriptor("tags", str)
NUMBERS = sb.ListStateDescriptor("numbers", int)
COUNT = sb.ValueStateDescriptor("count", int)


def create(backend: str, **options: Any) -> Any:
    return sb.create_backend(backend).create_keyed_backend(int, max_parallelism=4, **options)


@contextmanager
def writing(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A store, and a backend that writes to it."""
    with (
        sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=4) as store,
        create("rocksdb", clock=sb.testing.ManualClock(0)) as keyed,
    ):
        yield store, keyed


def written(checkpoint: Any, name: str) -> dict[int, tuple[str, Any]]:
    """What the newest file does to each key of a state."""
    file = checkpoint.snapshots[0].files[-1]
    assert file.kind == "delta"
    found = {}
    with checkpoint.open_file(file) as source:
        for rows in read_data_file(source, file.name).read(name):
            for row in rows.batch.to_pylist():
                assert row["key"] not in found
                found[row["key"]] = (Op(row["op"]).name, row["value"])
    return found


def take(keyed: Any, store: Any, checkpoint_id: int) -> Any:
    return store.commit(checkpoint_id, [keyed.snapshot(checkpoint_id, store).result()])


def at(keyed: Any, state: Any, key: int) -> Any:
    keyed.set_current_key(key)
    return state


@pytest.mark.parametrize("descriptor", [TAGS, NUMBERS], ids=lambda each: each.name)
@pytest.mark.parametrize("is_marked", [False, True], ids=["without a mark", "in a mark"])
def test_of_a_list_that_only_grew_a_delta_has_what_was_appended(
    tmp_path: Path, descriptor: Any, is_marked: bool
) -> None:
    one, two, three = ("one", "two", "three") if descriptor is TAGS else (1, 2, 3)
    with writing(tmp_path) as (store, keyed):
        tags = keyed.get_state(descriptor)
        for key in range(20):
            at(keyed, tags, key).add_all([one, two])
        take(keyed, store, 0)
        if is_marked:
            keyed.mark()
        at(keyed, tags, 0).add(three)
        at(keyed, tags, 1).add_all([three, one])
        at(keyed, tags, 1).add(two)
        at(keyed, tags, 2).update([three])
        at(keyed, tags, 3).clear()
        at(keyed, tags, 4).clear()
        tags.add(three)
        at(keyed, tags, 5).add(three)
        tags.clear()
        at(keyed, tags, 6).add(three)
        tags.update([one])
        at(keyed, tags, 100).add(three)
        committed = take(keyed, store, 1)
        assert written(committed, descriptor.name) == {
            0: ("APPEND", [three]),
            1: ("APPEND", [three, one, two]),
            2: ("PUT", [three]),
            3: ("REMOVE", None),
            4: ("PUT", [three]),
            5: ("REMOVE", None),
            6: ("PUT", [one]),
            100: ("PUT", [three]),
        }
        at(keyed, tags, 0).add(one)
        assert written(take(keyed, store, 2), descriptor.name) == {0: ("APPEND", [one])}


def test_columns_that_are_appended_are_noted_like_calls(tmp_path: Path) -> None:
    with writing(tmp_path) as (store, keyed):
        tags = keyed.get_state(TAGS)
        tags.add_many([1, 2, 3, 4, 5], ["a", "b", "c", "d", "e"])
        take(keyed, store, 0)
        tags.add_many([1, 1, 2], ["x", "y", "z"])
        assert written(take(keyed, store, 1), "tags") == {1: ("APPEND", ["x", "y"]), 2: ("APPEND", ["z"])}


def test_rolled_back_appends_are_not_in_a_delta(tmp_path: Path) -> None:
    with writing(tmp_path) as (store, keyed):
        tags = keyed.get_state(TAGS)
        tags.add_many(range(9), ["old"] * 9)
        take(keyed, store, 0)
        outer = keyed.mark()
        at(keyed, tags, 1).add("stays")
        inner = keyed.mark()
        tags.add("goes")
        at(keyed, tags, 2).add("goes, too")
        keyed.rollback(inner)
        at(keyed, tags, 1).add("after")
        keyed.release(inner)
        keyed.release(outer)
        committed = take(keyed, store, 1)
        assert written(committed, "tags") == {1: ("APPEND", ["stays", "after"])}


def test_an_aborted_snapshot_passes_on_what_was_appended(tmp_path: Path) -> None:
    with writing(tmp_path) as (store, keyed):
        tags = keyed.get_state(TAGS)
        tags.add_many(range(9), ["old"] * 9)
        take(keyed, store, 0)
        at(keyed, tags, 1).add("a")
        keyed.snapshot(1, store).abort()
        tags.add("b")
        pending = keyed.snapshot(2, store)
        tags.add("c")
        committed = store.commit(2, [pending.result()])
        assert written(committed, "tags") == {1: ("APPEND", ["a", "b"])}
        assert written(take(keyed, store, 3), "tags") == {1: ("APPEND", ["c"])}


def test_a_list_with_a_time_to_live_is_written_whole(tmp_path: Path) -> None:
    """Merging may have dropped elements that have expired: what was there is not what is in front."""
    descriptor = sb.ListStateDescriptor("tags", str).enable_time_to_live(sb.StateTtlConfig(10**9))
    with writing(tmp_path) as (store, keyed):
        tags = keyed.get_state(descriptor)
        tags.add_many(range(9), ["old"] * 9)
        take(keyed, store, 0)
        at(keyed, tags, 1).add("new")
        assert written(take(keyed, store, 1), "tags") == {1: ("PUT", ["old", "new"])}


@pytest.mark.parametrize("block", [1, 7, 65_536])
def test_a_base_has_every_row_once_whatever_the_batch_has_in_front(
    tmp_path: Path, block: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of the batch before, between and behind those of the database; written, removed, and both."""
    monkeypatch.setattr(compiled_backend, "BATCH_ROWS", block)
    with sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=4) as store:
        for checkpoint_id in range(6):
            with create("rocksdb") as keyed:
                count, tags = keyed.get_state(COUNT), keyed.get_state(TAGS)
                expected: dict[int, int] = {}
                lists: dict[int, list[str]] = {}
                for is_marked in (False, True):
                    if is_marked:
                        keyed.mark()
                    for _ in range(rng.randrange(60)):
                        key = rng.randrange(-30, 30)
                        keyed.set_current_key(key)
                        if rng.random() < 0.3:
                            count.clear()
                            tags.clear()
                            expected.pop(key, None)
                            lists.pop(key, None)
                        else:
                            count.update(expected.setdefault(key, rng.randrange(100)))
                            tags.add("x")
                            lists.setdefault(key, []).append("x")
                committed = take(keyed, store, checkpoint_id)
            assert [file.kind for file in committed.files.values()] in (["base"], [])
            for backend in ("heap", "rocksdb"):
                with create(backend, restore=committed) as restored:
                    count, tags = restored.get_state(COUNT), restored.get_state(TAGS)
                    assert {
                        key: at(restored, count, key).value() for key in restored.keys("count")
                    } == expected
                    assert {
                        key: list(at(restored, tags, key).get()) for key in restored.keys("tags")
                    } == lists
