"""The content of a checkpoint: the files that it names, and the states in them.

A `StateSnapshot` is the part that one subtask wrote for one checkpoint; a `Manifest` joins those of all subtasks. All
are immutable and JSON-able.

>>> file = StoredFile("data/3/7-0-base-5f3a9c1e.arrow", "base", size=4096, checksum=0x1A2B3C4D)
>>> snapshot = StateSnapshot(7, epoch=3, files=(file,), states=({"name": "sum", "kind": "value"},))
>>> StateSnapshot.from_json(snapshot.to_json()) == snapshot
True
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from statebackend.checkpoint.files.layout import data_epoch, is_data_file, manifest_name
from statebackend.checkpoint.store.json_checks import (
    FORMAT,
    Checked,
    Malformed,
    from_json,
    groups_json,
    groups_of,
    instance,
    integer,
    jsonable,
    made,
    match,
    members_of,
    parse,
    time_of,
)
from statebackend.checkpoint.store.metadata import STORE_ID
from statebackend.checkpoint.store.sealed import JsonObject
from statebackend.keys import MAX_PARALLELISM, KeyGroupRange

__all__ = ["FILE_KINDS", "Manifest", "StateSnapshot", "StoredFile"]

FILE_KINDS = ("base", "delta", "sst", "operator", "output")

_CHECKSUM = re.compile("crc32c:([0-9a-f]{8})")


@dataclass(frozen=True)
class StoredFile(Checked):
    """A data file as manifests name it: its path, kind, length and CRC-32C.

    ``label`` is the writer's own name for the file, such as RocksDB's name of an SST file.

    >>> StoredFile("data/3/a.arrow", "delta", size=10, checksum=0).epoch
    3
    >>> StoredFile("/etc/passwd", "delta", size=10, checksum=0)
    Traceback (most recent call last):
    statebackend.errors.UsageError: not a StoredFile: the name of a file does not lie in data/<epoch>/ [USAGE]
    """

    name: str
    kind: str
    size: int
    checksum: int
    key_groups: KeyGroupRange | None = None
    label: str | None = None

    def _check(self) -> None:
        name = self._given("name")
        if not isinstance(name, str) or not is_data_file(name):
            raise Malformed("the name of a file does not lie in data/<epoch>/")
        if self.kind not in FILE_KINDS:
            raise Malformed(f"the kind of file {self.name} is not one of {', '.join(FILE_KINDS)}")
        integer(self.size, f"the size of {self.name}")
        integer(self.checksum, f"the checksum of {self.name}", 0, 2**32 - 1)
        self._set("key_groups", groups_of(self.key_groups, self.name))
        if self.label is not None:
            instance(self.label, str, f"the label of {self.name}")

    @property
    def epoch(self) -> int:
        """The epoch of the writer that wrote it.

        >>> StoredFile("data/12/a.arrow", "base", size=0, checksum=0).epoch
        12
        """
        return data_epoch(self.name)

    def to_json(self) -> JsonObject:
        """The JSON form, without members that are not set.

        >>> StoredFile("data/3/a.arrow", "delta", size=10, checksum=255).to_json()
        {'name': 'data/3/a.arrow', 'kind': 'delta', 'size': 10, 'checksum': 'crc32c:000000ff'}
        """
        made: JsonObject = {
            "name": self.name,
            "kind": self.kind,
            "size": self.size,
            "checksum": f"crc32c:{self.checksum:08x}",
        }
        if self.key_groups is not None:
            made["key_groups"] = groups_json(self.key_groups)
        if self.label is not None:
            made["label"] = self.label
        return made

    @classmethod
    def from_json(cls, data: object) -> StoredFile:
        """Read the JSON form; `UsageError` if it is not one.

        >>> file = StoredFile("data/3/a.arrow", "base", 10, 255, KeyGroupRange(0, 3))
        >>> StoredFile.from_json(file.to_json()) == file
        True
        """
        return from_json(cls, data)

    @classmethod
    def _read(cls, data: object) -> StoredFile:
        members = dict(
            members_of(data, "a file", {"name", "kind", "size", "checksum"}, {"key_groups", "label"})
        )
        found = match(members["checksum"], _CHECKSUM, "the checksum of a file is of an unknown kind")
        members["checksum"] = int(found[1], 16)
        return made(cls, **members)


@dataclass(frozen=True)
class StateSnapshot(Checked):
    """The part of a checkpoint that one subtask wrote: all files that a restore needs, in the order of applying.

    ``states`` describes each state in them: JSON objects with at least ``name`` and ``kind``. ``extra`` is
    free for the writer. ``now`` is the time of the batch.

    >>> StateSnapshot(7, epoch=3).to_json()["id"]
    7
    """

    checkpoint_id: int
    epoch: int
    subtask_index: int = 0
    parallelism: int = 1
    key_groups: KeyGroupRange | None = None
    files: tuple[StoredFile, ...] = ()
    states: tuple[dict[str, Any], ...] = ()
    now: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def _check(self) -> None:
        integer(self.checkpoint_id, "the checkpoint id")
        integer(self.epoch, "the epoch", 1)
        integer(self.parallelism, "the parallelism", 1, MAX_PARALLELISM)
        integer(self.subtask_index, "the subtask index", 0, self.parallelism - 1)
        self._set("key_groups", groups_of(self.key_groups, "the snapshot"))
        self._set("files", _files(self.files))
        self._set("states", tuple(self.states))
        for state in self.states:
            instance(state, dict, "a state")
            for member in ("name", "kind"):
                if not isinstance(state.get(member), str):
                    raise Malformed(f"a state has no {member}")
        time_of(self.now)
        instance(self.extra, dict, "extra")
        jsonable(self.extra, "extra")
        jsonable(self.states, "a state")

    def to_json(self) -> JsonObject:
        """The JSON form, which `CheckpointStore.commit` also takes.

        >>> sorted(StateSnapshot(7, epoch=3, now=1000).to_json())[:4]
        ['epoch', 'extra', 'files', 'id']
        """
        return {
            "id": self.checkpoint_id,
            "epoch": self.epoch,
            "subtask": self.subtask_index,
            "parallelism": self.parallelism,
            "key_groups": groups_json(self.key_groups),
            "files": [file.to_json() for file in self.files],
            "states": list(self.states),
            "now": self.now,
            "extra": self.extra,
        }

    @classmethod
    def from_json(cls, data: object) -> StateSnapshot:
        """Read the JSON form; `UsageError` if it is not one.

        >>> StateSnapshot.from_json(StateSnapshot(7, epoch=3).to_json()).checkpoint_id
        7
        """
        return from_json(cls, data)

    @classmethod
    def _read(cls, data: object) -> StateSnapshot:
        names = {"id", "epoch", "subtask", "parallelism", "key_groups", "files", "states", "now", "extra"}
        members = members_of(data, "a snapshot", names)
        return made(
            cls,
            checkpoint_id=members["id"],
            epoch=members["epoch"],
            subtask_index=members["subtask"],
            parallelism=members["parallelism"],
            key_groups=members["key_groups"],
            files=_read_files(members["files"]),
            states=tuple(instance(members["states"], list, "states")),
            now=members["now"],
            extra=members["extra"],
        )


@dataclass(frozen=True)
class Manifest(Checked):
    """A committed checkpoint: the snapshots of its subtasks, other files, and the batch's ``now``.

    ``files`` are those that belong to no subtask's state, such as the batch's output. ``progress`` is free.

    >>> manifest = Manifest(7, epoch=3, store="0" * 32, snapshots=(StateSnapshot(7, epoch=3),))
    >>> manifest.name
    'checkpoints/7-3.json'
    """

    checkpoint_id: int
    epoch: int
    store: str
    snapshots: tuple[StateSnapshot, ...] = ()
    files: tuple[StoredFile, ...] = ()
    now: int | None = None
    progress: dict[str, Any] = dataclasses.field(default_factory=dict)

    def _check(self) -> None:
        integer(self.checkpoint_id, "the checkpoint id")
        integer(self.epoch, "the epoch", 1)
        match(self.store, STORE_ID, "the id of the store is not 32 hexadecimal digits")
        self._set("snapshots", tuple(self.snapshots))
        for snapshot in self.snapshots:
            if instance(snapshot, StateSnapshot, "a snapshot").checkpoint_id != self.checkpoint_id:
                raise Malformed("a snapshot is one of another checkpoint")
        self._set("files", _files(self.files))
        time_of(self.now)
        instance(self.progress, dict, "progress")
        self._set("_by_name", self._named())

    def _named(self) -> dict[str, StoredFile]:
        named: dict[str, StoredFile] = {}
        for files in (*(snapshot.files for snapshot in self.snapshots), self.files):
            for file in files:
                known = named.setdefault(file.name, file)
                if (known.size, known.checksum) != (file.size, file.checksum):
                    raise Malformed(f"file {file.name} is named twice, with different content")
        return named

    @property
    def name(self) -> str:
        """The name of its file in the store.

        >>> Manifest(0, epoch=1, store="0" * 32).name
        'checkpoints/0-1.json'
        """
        return manifest_name(self.checkpoint_id, self.epoch)

    @property
    def all_files(self) -> dict[str, StoredFile]:
        """Every file that it names, by name.

        >>> Manifest(0, epoch=1, store="0" * 32).all_files
        {}
        """
        return self._by_name  # type: ignore[attr-defined,no-any-return]

    def to_json(self) -> JsonObject:
        """The content of its file.

        >>> Manifest(0, epoch=1, store="0" * 32).to_json()["format"]
        1
        """
        return {
            "format": FORMAT,
            "store": self.store,
            "id": self.checkpoint_id,
            "epoch": self.epoch,
            "snapshots": [snapshot.to_json() for snapshot in self.snapshots],
            "files": [file.to_json() for file in self.files],
            "now": self.now,
            "progress": self.progress,
        }

    @classmethod
    def parse(cls, data: bytes, name: str) -> Manifest:
        """Read the bytes of the manifest called ``name``; `CorruptCheckpointError` if they are not one.

        >>> from statebackend.checkpoint.store.sealed import seal
        >>> manifest = Manifest(7, epoch=3, store="0" * 32)
        >>> Manifest.parse(seal(manifest.to_json()), manifest.name) == manifest
        True
        """
        return parse(cls, data, name)

    @classmethod
    def _read(cls, data: object) -> Manifest:
        names = {"format", "store", "id", "epoch", "snapshots", "files", "now", "progress"}
        members = members_of(data, "the manifest", names)
        snapshots = instance(members["snapshots"], list, "snapshots")
        return made(
            cls,
            checkpoint_id=members["id"],
            epoch=members["epoch"],
            store=members["store"],
            snapshots=tuple(StateSnapshot._read(each) for each in snapshots),
            files=_read_files(members["files"]),
            now=members["now"],
            progress=members["progress"],
        )


def _files(files: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
    made = tuple(files)
    for file in made:
        instance(file, StoredFile, "a file")
    return made


def _read_files(data: object) -> tuple[StoredFile, ...]:
    return tuple(StoredFile._read(each) for each in instance(data, list, "files"))
