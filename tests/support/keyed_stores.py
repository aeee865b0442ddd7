"""Keyed backends of 32 key groups and stores for them; and one that counts, for tests that need no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import statebackend as sb

KEY_TYPES = {"int": int, "str": str, "row": "struct<a:int,b:string>"}
COUNT = sb.ValueStateDescriptor("count", int)
#: The most keys of a backend that counts.
KEYS = 200


def create(backend: str, key_type: Any = int, **options: Any) -> Any:
    options.setdefault("max_parallelism", 32)
    return sb.create_backend(backend).create_keyed_backend(key_type, **options)


def open_store(path: Path, key_type: Any = int, **options: Any) -> sb.CheckpointStore:
    store = sb.CheckpointStore(path, **options)
    return store.open_for_writing(key_type=key_type, max_parallelism=32)


def counting(backend: str, keys: int = KEYS) -> tuple[Any, Any]:
    """A backend, and its state, which has a number for each of so many keys."""
    keyed = create(backend)
    count = keyed.get_state(COUNT)
    count.update_many(range(keys), range(keys))
    return keyed, count


def counts(count: Any) -> list[int | None]:
    found: list[int | None] = count.get_many(range(KEYS)).to_pylist()
    return found


def restored_counts(checkpoint: sb.Checkpoint, backend: str = "heap") -> list[int | None]:
    with create(backend, restore=checkpoint) as keyed:
        return counts(keyed.get_state(COUNT))


def without_groups(found: list[Any]) -> list[Any]:
    """What `keyed_story.contents` gives, in any order, and without the key groups of timers."""
    return sorted(((row[0], *row[2:]) if len(row) == 5 else row for row in found), key=repr)
