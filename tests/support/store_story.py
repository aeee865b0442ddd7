"""A history of a store, told step by step, and what must be true of the store wherever the telling stops.

The same story runs on a simulated disk and on a real one, where the process is killed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from statebackend.checkpoint import CheckpointStore, StateSnapshot
from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.store.checkpoint_reader import CheckpointReader
from statebackend.checkpoint.store.log import read_entry
from statebackend.errors import CommitConflictError
from statebackend.keys import range_for
from statebackend.tools.verification import Inventory

RETAIN = 2
QUERY = "the query"


def content_of(checkpoint_id: int, subtask: int, kind: str) -> bytes:
    return f"{kind} of checkpoint {checkpoint_id}, subtask {subtask}\n".encode() * (10 + checkpoint_id)


@dataclasses.dataclass
class Told:
    """What has happened so far, as far as the teller knows."""

    #: The newest checkpoint whose commit has returned, and one whose commit has begun since.
    committed: int | None = None
    tried: int | None = None
    #: Whether what is tried is to go back to there, which may have happened also if it fails.
    rewinds: bool = False

    def possible(self) -> set[int | None]:
        return {self.committed, self.tried if self.tried is not None else self.committed}


def open_store(files: StoreFiles, retain: int = RETAIN) -> CheckpointStore:
    store = CheckpointStore("/", retain=retain, _files=files)
    return store.open_for_writing(query=QUERY, key_type=int, max_parallelism=128)


def take(store: CheckpointStore, checkpoint_id: int, told: Told, subtasks: int = 1) -> None:
    """One checkpoint: per subtask a delta on top of the newest one's files, or a base at every fourth."""
    newest = store.latest()
    earlier = {s.subtask_index: s.files for s in store.open(newest).snapshots} if newest is not None else {}
    snapshots = []
    for subtask in range(subtasks):
        writer = store.begin_snapshot(checkpoint_id)
        kind = "base" if checkpoint_id % 4 == 0 or newest is None else "delta"
        with writer.create(kind, subtask=subtask) as file:
            content = content_of(checkpoint_id, subtask, kind)
            file.write(content[:7])
            file.write(content[7:])
            stored = file.finish()
        files = (stored,) if kind == "base" else (*earlier.get(subtask, ()), stored)
        groups = range_for(128, subtasks, subtask)
        snapshots.append(StateSnapshot(checkpoint_id, store.epoch, subtask, subtasks, groups, files))
    told.tried = checkpoint_id
    store.commit(checkpoint_id, snapshots, now=checkpoint_id * 1000)
    told.committed, told.tried = checkpoint_id, None


def give_up(store: CheckpointStore, checkpoint_id: int) -> None:
    """A snapshot that comes to nothing: one file finished, one not."""
    writer = store.begin_snapshot(checkpoint_id)
    with writer.create("delta") as file:
        file.write(b"given up")
        file.finish()
    writer.create("delta").write(b"never finished")
    store.abort(checkpoint_id)


def tell(files: Callable[[], StoreFiles], told: Told) -> None:
    """Opening, commits with retention, an aborted snapshot, closing; a second writer that takes over; a rewind."""
    store = open_store(files())
    for checkpoint_id in range(3):
        take(store, checkpoint_id, told)
    give_up(store, 3)
    take(store, 3, told, subtasks=2)
    store.close()

    first = open_store(files())
    take(first, 4, told, subtasks=2)
    pending = first.begin_snapshot(5)
    with pending.create("delta") as file:
        file.write(b"too late")
        stored = file.finish()
    second = open_store(files())
    take(second, 5, told)
    try:
        first.commit(5, [StateSnapshot(5, 2, files=(stored,))])
    except CommitConflictError:
        pass
    else:
        raise AssertionError("a writer that was fenced has committed")
    take(second, 6, told)
    second.close()

    third = open_store(files())
    told.tried, told.rewinds = 5, True
    third.rewind(5)
    told.committed, told.tried, told.rewinds = 5, None, False
    take(third, 6, told)
    third.close()


# ------------------------------------------------------------------------------------ what must be true


def check_checkpoints(reader: CheckpointReader, told: Told) -> None:
    """The newest is the last committed, or the one that was being committed; each one there is whole."""
    there = reader.checkpoints()
    newest = there[-1] if there else None
    assert newest in told.possible(), (there, told)
    assert reader.latest(intact=True) == newest
    for checkpoint_id in there:
        checkpoint = reader.open(checkpoint_id)
        assert checkpoint.now == checkpoint_id * 1000
        for snapshot in checkpoint.snapshots:
            for file in snapshot.files:
                whose = re.fullmatch(r"data/\d+/(\d+)-(\d+)-(\w+)-\w+\.arrow", file.name)
                assert whose is not None, file.name
                expected = content_of(int(whose[1]), int(whose[2]), whose[3])
                assert checkpoint.read_file(file) == expected, file.name


def entries_beside_commits(reader: CheckpointReader) -> Iterator[str]:
    """What the log has beside the checkpoints that are kept; no checkpoint that was dropped is among it."""
    inventory = Inventory.of(reader)
    for name in inventory.log().names_of_others():
        assert read_entry(inventory._files, name).key is None, name
        yield name


def check_nothing_left(reader: CheckpointReader, there: Iterable[str], epoch: int) -> None:
    """Every file and folder is the store's own, named by a checkpoint, or the open writer's empty folder."""
    expected = {"metadata.json", "checkpoints/", "data/", f"checkpoints/epoch-{epoch}/", f"data/{epoch}/"}
    expected.update(entries_beside_commits(reader))
    for checkpoint_id in reader.checkpoints():
        checkpoint = reader.open(checkpoint_id)
        expected.add(checkpoint.manifest.name)
        for file in checkpoint.files.values():
            expected |= {file.name, f"data/{file.epoch}/"}
    assert sorted(there) == sorted(expected)


def check_recovery(
    files: StoreFiles, list_all: Callable[[], Iterable[str]], told: Told, check_left: Any = check_nothing_left
) -> None:
    """After any crash: the checkpoints are right, opening leaves nothing behind, and the story can go on."""
    reader = CheckpointReader("/", _files=files)
    check_checkpoints(reader, told)
    store = open_store(files)
    check_checkpoints(store, told)
    check_left(store, list_all(), store.epoch)
    newest = store.latest()
    told = Told(newest)
    first = 0 if newest is None else newest + 1
    for checkpoint_id in range(first, first + RETAIN + 1):
        take(store, checkpoint_id, told)
    store.close()
    assert store.checkpoints() == list(range(first + 1, first + RETAIN + 1))
    check_checkpoints(store, told)
    store.open_for_writing()  # removes the folders that retention has emptied
    check_left(store, list_all(), store.epoch)
    store.close()
