"""What was cleared after a compaction had dropped it does not come back, as a longer time to live would show it.

A compaction notes nothing: what has expired stays in the files of the checkpoint, and a delta has to remove it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import statebackend as sb
from statebackend.backends.rocksdb import RocksDbBackend
from statebackend.state import (
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from statebackend.testing import ManualClock

TTL = 100
REST = ValueStateDescriptor("rest", int)
Clearing = Callable[[Any, Any], object]


def descriptor(kind: str, ttl: int = TTL) -> Any:
    made: dict[str, Any] = {
        "value": ValueStateDescriptor("s", int),
        "list": ListStateDescriptor("s", int),
        "map": MapStateDescriptor("s", str, int),
        "numbers": MapStateDescriptor("s", int, int),
        "reducing": ReducingStateDescriptor("s", "sum", int),
    }
    return made[kind].enable_time_to_live(StateTtlConfig(ttl))


def write(state: Any, kind: str) -> None:
    if kind == "value":
        state.update(1)
    elif kind == "map":
        state.put_all({"": 1, "a": 2})
    elif kind == "numbers":
        state.put_all({-1: 1, 7: 2})
    else:
        state.add(1)


class Story:
    """A state that was committed, has expired, and was dropped by a compaction."""

    def __init__(self, folder: Path, kind: str, namespace: Any, key: Any = 1) -> None:
        (folder / "local").mkdir()
        self.folder, self.kind, self.namespace, self.key = folder, kind, namespace, key
        self.clock = ManualClock(0)
        self.store = sb.CheckpointStore(folder / "store").open_for_writing(
            key_type=type(key), max_parallelism=16
        )
        self.keyed = self.create("rocksdb")
        self.state = self.keyed.get_state(descriptor(kind))
        self.rest = self.keyed.get_state(REST)
        others = list(range(100)) if key == 1 else [str(number) for number in range(100)]
        self.rest.update_many(others, list(range(100)))
        self.go(self.keyed)
        write(self.state, kind)
        for checkpoint_id in range(
            3
        ):  # compactions go by the time of a commit that the next snapshot has seen
            self.commit(checkpoint_id)
            self.clock.set(10 * TTL)
            self.change_rest(checkpoint_id)
        database = self.keyed.scratch.database
        self.keyed.store.flush()
        database.flush()
        database.compact(self.state.table.family)
        files = [each for each in database.live_files() if each["family"] == self.state.table.family.name]
        assert sum(each["entries"] for each in files) == (kind == "list"), "an emptied list is no bytes"

    def create(self, name: str, **options: Any) -> Any:
        more: dict[str, Any] = {"local_dir": self.folder / "local"} if name == "rocksdb" else {}
        backend = RocksDbBackend(**more) if name == "rocksdb" else sb.create_backend(name)
        key_type = type(self.key)
        return backend.create_keyed_backend(key_type, max_parallelism=16, clock=self.clock, **options)

    def go(self, keyed: Any) -> None:
        keyed.set_current_key(self.key)
        keyed.set_current_namespace(self.namespace)

    def change_rest(self, value: int) -> None:
        self.keyed.set_current_key(self.key)
        self.keyed.set_current_namespace(sb.VOID)
        self.rest.update(value)

    def commit(self, checkpoint_id: int) -> list[str]:
        """The kinds of the files of a checkpoint that is taken now."""
        self.store.commit(checkpoint_id, [self.keyed.snapshot(checkpoint_id, self.store).result()])
        return [each.kind for each in self.store.open(checkpoint_id).snapshots[0].files]

    def restored(self, name: str, checkpoint_id: int) -> Any:
        """What a restore with a longer time to live shows."""
        with self.create(name, restore=self.store.open(checkpoint_id)) as keyed:
            state = keyed.get_state(descriptor(self.kind, 1000 * TTL))
            self.go(keyed)
            if self.kind in ("map", "numbers"):
                return dict(state.items())
            return list(state.get() or []) if self.kind == "list" else state.exists()

    def close(self) -> None:
        self.keyed.close()
        self.store.close()
        self.__dict__.clear()


@pytest.fixture
def tell(tmp_path: Path) -> Iterator[Callable[..., Story]]:
    told: list[Story] = []

    def tell(*arguments: Any) -> Story:
        told.append(Story(tmp_path, *arguments))
        return told[-1]

    yield tell
    for each in told:
        each.close()
    told.clear()


def remove_while_iterated(keyed: Any, state: Any) -> None:
    state.put("z", 1)
    entries = iter(state.items())
    next(entries)
    for key in ("", "a", "z"):
        state.remove(key)


#: What a user may do, by the kind of the state, in the namespace where something was.
CLEARINGS: dict[str, tuple[str, Clearing]] = {
    "value.clear": ("value", lambda keyed, state: state.clear()),
    "value.update": ("value", lambda keyed, state: state.update(None)),
    "value.clear_key": ("value", lambda keyed, state: keyed.clear_key()),
    "reducing.clear": ("reducing", lambda keyed, state: state.clear()),
    "reducing.clear_key": ("reducing", lambda keyed, state: keyed.clear_key()),
    "list.clear": ("list", lambda keyed, state: state.clear()),
    "list.clear_key": ("list", lambda keyed, state: keyed.clear_key()),
    "map.clear": ("map", lambda keyed, state: state.clear()),
    "map.clear_key": ("map", lambda keyed, state: keyed.clear_key()),
    "map.put and clear": ("map", lambda keyed, state: (state.put("", 5), state.clear())),
    "map.clear twice": ("map", lambda keyed, state: (state.clear(), state.clear())),
    "map.remove": ("map", lambda keyed, state: (state.remove(""), state.remove("a"))),
    "map.remove while iterated": ("map", remove_while_iterated),
    "numbers.clear": ("numbers", lambda keyed, state: state.clear()),
    "numbers.clear_key": ("numbers", lambda keyed, state: keyed.clear_key()),
}


@pytest.mark.parametrize("name", ["rocksdb", "heap", "reference"])
@pytest.mark.parametrize("namespace", [sb.VOID, "n"], ids=["no namespace", "a namespace"])
@pytest.mark.parametrize("clearing", CLEARINGS)
@pytest.mark.parametrize("key", [1, "k"], ids=["number", "text"])
def test_it_does_not_come_back(
    tell: Callable[..., Story], clearing: str, namespace: Any, name: str, key: Any
) -> None:
    kind, clear = CLEARINGS[clearing]
    story = tell(kind, namespace, key)
    nothing: Any = {"map": {}, "numbers": {}, "list": []}.get(kind, False)
    assert story.restored(name, 2) != nothing, "the files still have it"
    story.go(story.keyed)
    clear(story.keyed, story.state)
    kinds = story.commit(3)
    # In which namespaces a key had something, nobody knows.
    is_base = clearing.endswith("clear_key") and namespace != sb.VOID
    assert kinds == (["base"] if is_base else ["base", "delta", "delta", "delta"])
    assert story.restored(name, 3) == nothing


@pytest.mark.parametrize("name", ["rocksdb", "heap"])
def test_what_is_put_after_a_map_was_cleared_stays(tell: Callable[..., Story], name: str) -> None:
    story = tell("map", "n")
    story.go(story.keyed)
    story.state.put("b", 1)
    story.state.clear()
    story.state.put("", 7)
    story.state.put("c", 8)
    assert story.commit(3) == ["base", "delta", "delta", "delta"]
    assert story.restored(name, 3) == {"": 7, "c": 8}
    story.go(story.keyed)
    story.state.put("d", 9)
    story.commit(4)
    assert story.restored(name, 4) == {"": 7, "c": 8, "d": 9}


def test_a_clear_that_is_rolled_back_removes_nothing(tell: Callable[..., Story]) -> None:
    story = tell("map", sb.VOID)
    before = story.keyed.mark()
    story.go(story.keyed)
    story.state.put("z", 3)
    within = story.keyed.mark()
    story.state.clear()
    assert story.keyed.count_changes(within) == (0, 1)
    story.keyed.rollback(within)
    assert story.keyed.count_changes(before) == (1, 0)
    story.keyed.release(within)
    story.keyed.release(before)
    story.commit(3)
    assert story.restored("rocksdb", 3) == {"": 1, "a": 2, "z": 3}


@pytest.mark.parametrize("kind", ["map", "value", "reducing"])
def test_a_namespace_that_never_had_anything_clears_no_other(tell: Callable[..., Story], kind: str) -> None:
    story = tell(kind, sb.VOID)
    before = story.restored("rocksdb", 2)
    story.keyed.set_current_key(1)
    story.keyed.set_current_namespace("never")
    story.state.clear()
    if kind == "reducing":
        story.keyed.merge_namespaces(descriptor("reducing"), "target", ["never"])
    story.commit(3)
    assert [story.restored(name, 3) for name in ("rocksdb", "heap")] == [before, before]


def test_what_is_merged_into_another_namespace_does_not_come_back(tell: Callable[..., Story]) -> None:
    story = tell("reducing", "n")
    story.go(story.keyed)
    story.keyed.merge_namespaces(descriptor("reducing"), "target", ["n"])
    assert story.commit(3) == ["base", "delta", "delta", "delta"]
    assert story.restored("rocksdb", 3) is False


def test_a_merged_file_clears_as_its_parts_do(
    tell: Callable[..., Story], monkeypatch: pytest.MonkeyPatch
) -> None:
    from statebackend.checkpoint.keyed import rewriting_rules

    monkeypatch.setattr(rewriting_rules, "FAN", 2)
    story = tell("map", sb.VOID)
    story.go(story.keyed)
    story.state.clear()
    for checkpoint_id in range(3, 9):
        story.commit(checkpoint_id)
        if story.keyed._log.rewriting is not None:
            story.keyed._log.rewriting.wait()
        story.change_rest(checkpoint_id)
    files = story.store.open(8).snapshots[0].files
    assert len(files) < 6, "some were merged"
    assert [story.restored(name, 8) for name in ("rocksdb", "heap")] == [{}, {}]
