"""What is removed or added up in a namespace leaves what is in others, in checkpoints, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import statebackend as sb

pytestmark = pytest.mark.checked

VALUE, TABLE = sb.ValueStateDescriptor("s", int), sb.MapStateDescriptor("s", str, int)
LIST, SUM = sb.ListStateDescriptor("s", int), sb.ReducingStateDescriptor("s", "sum", int)
#: How something is put, and removed in a namespace in which nothing was written, and read.
REMOVALS: dict[str, tuple[Any, Callable[[Any, int], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "clear": (VALUE, lambda s, k: s.update(k), lambda s: s.clear(), lambda s: s.value()),
    "clear_many": (VALUE, lambda s, k: s.update(k), lambda s: s.clear_many([1]), lambda s: s.value()),
    "nulls": (VALUE, lambda s, k: s.update(k), lambda s: s.update_many([1], [None]), lambda s: s.value()),
    "remove": (TABLE, lambda s, k: s.put("a", k), lambda s: s.remove("a"), lambda s: s.get("a")),
    "remove_many": (
        TABLE,
        lambda s, k: s.put("a", k),
        lambda s: s.remove_many([1], ["a"]),
        lambda s: s.get("a"),
    ),
    "lists": (LIST, lambda s, k: s.add(k), lambda s: s.clear(), lambda s: list(s.get())),
    "add None": (SUM, lambda s, k: s.add(k), lambda s: s.add(None), lambda s: s.get()),
    "add_many": (SUM, lambda s, k: s.add(k), lambda s: s.add_many([1], [None]), lambda s: s.get()),
}


def of(backend: str, **options: Any) -> Any:
    return sb.create_backend(backend).create_keyed_backend(int, max_parallelism=4, **options)


def committed(keyed: Any, store: sb.CheckpointStore, checkpoint: int) -> None:
    store.commit(checkpoint, [keyed.snapshot(checkpoint, store).result()])
    keyed.notify_checkpoint_complete(checkpoint)


@pytest.mark.parametrize("how", REMOVALS)
def test_removing_in_another_namespace_leaves_a_value_in_deltas(tmp_path: Path, how: str) -> None:
    descriptor, put, remove, read = REMOVALS[how]
    with sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=4) as store:
        with of("rocksdb") as keyed:
            state = keyed.get_state(descriptor)
            for key in range(10):
                keyed.set_current_key(key)
                put(state, key + 1)
            committed(keyed, store, 0)
            keyed.set_current_key(1)
            keyed.set_current_namespace("w")
            remove(state)
            keyed.set_current_namespace(sb.VOID)
            expected = read(state)
            assert expected
            committed(keyed, store, 1)
        for backend in ("reference", "rocksdb"):
            with of(backend, restore=store.open(1)) as keyed:
                state = keyed.get_state(descriptor)
                keyed.set_current_key(1)
                assert read(state) == expected
