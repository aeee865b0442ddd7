"""What a checkpoint consists of: the files it names, the states in them, and what the store is for.

`StateSnapshot` is what one subtask wrote for one checkpoint; a `Manifest` joins those of all subtasks;
`Metadata` describes the store. All are immutable and JSON-able.

>>> file = StoredFile("data/3/7-0-base-5f3a9c1e.arrow", "base", size=4096, checksum=0x1A2B3C4D)
>>> snapshot = StateSnapshot(7, epoch=3, files=(file,), states=({"name": "sum", "kind": "value"},))
>>> StateSnapshot.from_json(snapshot.to_json()) == snapshot
True
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from statebackend.checkpoint.layout import data_epoch, is_data_file, manifest_name
from statebackend.checkpoint.sealed import unseal
from statebackend.errors import CorruptCheckpointError, UsageError
from statebackend.key_groups import MAX_PARALLELISM, KeyGroupRange

__all__ = ["FILE_KINDS", "FORMAT", "Manifest", "Metadata", "StateSnapshot", "StoredFile"]

#: The version of manifests and metadata that is written. Every version that was ever released is read.
FORMAT = 1

FILE_KINDS = ("base", "delta", "sst", "operator", "output")

_MAX = 10**18 - 1
_STORE = re.compile("[0-9a-f]{32}")
_CHECKSUM = re.compile("crc32c:([0-9a-f]{8})")

T = TypeVar("T")


class _Malformed(Exception):
    """A member is missing or is not what it should be; the message says which, never its value."""


def _integer(value: Any, what: str, low: int = 0, high: int = _MAX) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _Malformed(f"{what} is not an integer from {low} to {high}")
    return value


def _instance(value: Any, cls: type[T], what: str) -> T:
    if not isinstance(value, cls):
        raise _Malformed(f"{what} is not a {cls.__name__}")
    return value


def _match(value: Any, pattern: re.Pattern[str], message: str) -> re.Match[str]:
    found = pattern.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise _Malformed(message)
    return found


def _members(data: Any, what: str, needed: set[str], more: Collection[str] = ()) -> dict[str, Any]:
    _instance(data, dict, what)
    if not needed <= data.keys():
        raise _Malformed(f"{what} has no {', '.join(sorted(needed - data.keys()))}")
    if not data.keys() <= needed.union(more):
        raise _Malformed(f"{what} has members that this version does not know")
    return data  # type: ignore[no-any-return]


def _now(value: Any) -> int | None:
    return None if value is None else _integer(value, "now", -_MAX)


def _groups(value: Any, what: str) -> KeyGroupRange | None:
    if value is None or isinstance(value, KeyGroupRange):
        return value
    if not isinstance(value, list) or len(value) != 2:
        raise _Malformed(f"key groups of {what} are not a pair")
    start, end = (_integer(each, f"a key group of {what}", 0, MAX_PARALLELISM - 1) for each in value)
    if start > end:
        raise _Malformed(f"key groups of {what} are not a range")
    return KeyGroupRange(start, end)


def _groups_json(groups: KeyGroupRange | None) -> list[int] | None:
    return None if groups is None else [groups.start, groups.end]


class _Checked:
    """A dataclass that checks itself when it is made, and says `UsageError` if the caller got it wrong."""

    def __post_init__(self) -> None:
        try:
            self._check()
        except _Malformed as error:
            raise UsageError(f"not a {type(self).__name__}: {error}") from None

    def _check(self) -> None:
        raise NotImplementedError

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class StoredFile(_Checked):
    """A data file as manifests name it: where, of what kind, how long, with which CRC-32C.

    ``label`` is free: what its writer calls it (RocksDB's own name of an SST file).

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
        name: Any = self.name
        if not isinstance(name, str) or not is_data_file(name):
            raise _Malformed("the name of a file does not lie in data/<epoch>/")
        if self.kind not in FILE_KINDS:
            raise _Malformed(f"the kind of file {self.name} is not one of {', '.join(FILE_KINDS)}")
        _integer(self.size, f"the size of {self.name}")
        _integer(self.checksum, f"the checksum of {self.name}", 0, 2**32 - 1)
        self._set("key_groups", _groups(self.key_groups, self.name))
        if self.label is not None:
            _instance(self.label, str, f"the label of {self.name}")

    @property
    def epoch(self) -> int:
        """The epoch of the writer that wrote it.

        >>> StoredFile("data/12/a.arrow", "base", size=0, checksum=0).epoch
        12
        """
        return data_epoch(self.name)

    def to_json(self) -> dict[str, Any]:
        """The JSON form; members that are not set are left out.

        >>> StoredFile("data/3/a.arrow", "delta", size=10, checksum=255).to_json()
        {'name': 'data/3/a.arrow', 'kind': 'delta', 'size': 10, 'checksum': 'crc32c:000000ff'}
        """
        made: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "size": self.size,
            "checksum": f"crc32c:{self.checksum:08x}",
        }
        if self.key_groups is not None:
            made["key_groups"] = _groups_json(self.key_groups)
        if self.label is not None:
            made["label"] = self.label
        return made

    @classmethod
    def from_json(cls, data: Any) -> StoredFile:
        """Read the JSON form back; `UsageError` if it is not one.

        >>> file = StoredFile("data/3/a.arrow", "base", 10, 255, KeyGroupRange(0, 3))
        >>> StoredFile.from_json(file.to_json()) == file
        True
        """
        return _from_json(cls, data)

    @classmethod
    def _read(cls, data: Any) -> StoredFile:
        members = dict(
            _members(data, "a file", {"name", "kind", "size", "checksum"}, {"key_groups", "label"})
        )
        found = _match(members["checksum"], _CHECKSUM, "the checksum of a file is of an unknown kind")
        members["checksum"] = int(found[1], 16)
        return _made(cls, **members)


@dataclass(frozen=True)
class StateSnapshot(_Checked):
    """What one subtask wrote for one checkpoint: all files that restoring it needs, in the order of applying.

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
        _integer(self.checkpoint_id, "the checkpoint id")
        _integer(self.epoch, "the epoch", 1)
        _integer(self.parallelism, "the parallelism", 1, MAX_PARALLELISM)
        _integer(self.subtask_index, "the subtask index", 0, self.parallelism - 1)
        self._set("key_groups", _groups(self.key_groups, "the snapshot"))
        self._set("files", _files(self.files))
        self._set("states", tuple(self.states))
        for state in self.states:
            _instance(state, dict, "a state")
            for member in ("name", "kind"):
                if not isinstance(state.get(member), str):
                    raise _Malformed(f"a state has no {member}")
        _now(self.now)
        _instance(self.extra, dict, "extra")

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `CheckpointStore.commit` also takes.

        >>> sorted(StateSnapshot(7, epoch=3, now=1000).to_json())[:4]
        ['epoch', 'extra', 'files', 'id']
        """
        return {
            "id": self.checkpoint_id,
            "epoch": self.epoch,
            "subtask": self.subtask_index,
            "parallelism": self.parallelism,
            "key_groups": _groups_json(self.key_groups),
            "files": [file.to_json() for file in self.files],
            "states": list(self.states),
            "now": self.now,
            "extra": self.extra,
        }

    @classmethod
    def from_json(cls, data: Any) -> StateSnapshot:
        """Read the JSON form back; `UsageError` if it is not one.

        >>> StateSnapshot.from_json(StateSnapshot(7, epoch=3).to_json()).checkpoint_id
        7
        """
        return _from_json(cls, data)

    @classmethod
    def _read(cls, data: Any) -> StateSnapshot:
        names = {"id", "epoch", "subtask", "parallelism", "key_groups", "files", "states", "now", "extra"}
        members = _members(data, "a snapshot", names)
        return _made(
            cls,
            checkpoint_id=members["id"],
            epoch=members["epoch"],
            subtask_index=members["subtask"],
            parallelism=members["parallelism"],
            key_groups=members["key_groups"],
            files=_read_files(members["files"]),
            states=tuple(_instance(members["states"], list, "states")),
            now=members["now"],
            extra=members["extra"],
        )


@dataclass(frozen=True)
class Manifest(_Checked):
    """A committed checkpoint: the snapshots of its subtasks, files beside them, and the batch's ``now``.

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
        _integer(self.checkpoint_id, "the checkpoint id")
        _integer(self.epoch, "the epoch", 1)
        _match(self.store, _STORE, "the id of the store is not 32 hexadecimal digits")
        self._set("snapshots", tuple(self.snapshots))
        for snapshot in self.snapshots:
            if _instance(snapshot, StateSnapshot, "a snapshot").checkpoint_id != self.checkpoint_id:
                raise _Malformed("a snapshot is one of another checkpoint")
        self._set("files", _files(self.files))
        _now(self.now)
        _instance(self.progress, dict, "progress")
        self._set("_by_name", self._named())

    def _named(self) -> dict[str, StoredFile]:
        named: dict[str, StoredFile] = {}
        for files in (*(snapshot.files for snapshot in self.snapshots), self.files):
            for file in files:
                known = named.setdefault(file.name, file)
                if (known.size, known.checksum) != (file.size, file.checksum):
                    raise _Malformed(f"file {file.name} is named twice, with different content")
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

    def to_json(self) -> dict[str, Any]:
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

        >>> from statebackend.checkpoint.sealed import seal
        >>> manifest = Manifest(7, epoch=3, store="0" * 32)
        >>> Manifest.parse(seal(manifest.to_json()), manifest.name) == manifest
        True
        """
        return _parse(cls, data, name)

    @classmethod
    def _read(cls, data: Any) -> Manifest:
        names = {"format", "store", "id", "epoch", "snapshots", "files", "now", "progress"}
        members = _members(data, "the manifest", names)
        snapshots = _instance(members["snapshots"], list, "snapshots")
        return _made(
            cls,
            checkpoint_id=members["id"],
            epoch=members["epoch"],
            store=members["store"],
            snapshots=tuple(StateSnapshot._read(each) for each in snapshots),
            files=_read_files(members["files"]),
            now=members["now"],
            progress=members["progress"],
        )


@dataclass(frozen=True)
class Metadata(_Checked):
    """What a store is for: a query, a type of keys, a number of key groups. ``store`` is drawn when it is made.

    >>> Metadata("0" * 32, query="q-1", key_type={"type": "long"}, max_parallelism=128).max_parallelism
    128
    """

    store: str
    query: str | None = None
    key_type: dict[str, Any] | None = None
    max_parallelism: int | None = None

    def _check(self) -> None:
        _match(self.store, _STORE, "the id of the store is not 32 hexadecimal digits")
        if self.query is not None:
            _instance(self.query, str, "the query")
        if self.key_type is not None:
            _instance(self.key_type, dict, "the key type")
        if self.max_parallelism is not None:
            _integer(self.max_parallelism, "max_parallelism", 1, MAX_PARALLELISM)

    def to_json(self) -> dict[str, Any]:
        """The content of its file.

        >>> Metadata("0" * 32).to_json()["format"]
        1
        """
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def parse(cls, data: bytes, name: str) -> Metadata:
        """Read the bytes of the file; `CorruptCheckpointError` if they are not one.

        >>> from statebackend.checkpoint.sealed import seal
        >>> Metadata.parse(seal(Metadata("0" * 32).to_json()), "metadata.json") == Metadata("0" * 32)
        True
        """
        return _parse(cls, data, name)

    @classmethod
    def _read(cls, data: Any) -> Metadata:
        names = {"store", "query", "key_type", "max_parallelism"}
        members = _members(data, "the metadata", {*names, "format"})
        return _made(cls, **{name: members[name] for name in names})


def _files(files: Any) -> tuple[StoredFile, ...]:
    made = tuple(files)
    for file in made:
        _instance(file, StoredFile, "a file")
    return made


def _read_files(data: Any) -> tuple[StoredFile, ...]:
    return tuple(StoredFile._read(each) for each in _instance(data, list, "files"))


def _made(cls: type[T], **members: Any) -> T:
    # What __post_init__ reports as the caller's error is, here, what the data says.
    try:
        return cls(**members)
    except UsageError as error:
        raise _Malformed(error.message.partition(": ")[2]) from None


def _from_json(cls: type[T], data: Any) -> T:
    try:
        return cls._read(data)  # type: ignore[attr-defined,no-any-return]
    except _Malformed as error:
        raise UsageError(f"not the JSON form of a {cls.__name__}: {error}") from None


def _parse(cls: type[T], data: bytes, name: str) -> T:
    content = unseal(data, name)
    version = content.get("format")
    if version != FORMAT:
        raise CorruptCheckpointError(
            "the file is of a version that this library does not read",
            code="CORRUPT_CHECKPOINT.VERSION",
            detail=f"{name}, version {version if type(version) is int else 'unknown'}, read is {FORMAT}",
            hint="open it with the newer version of the library that wrote it",
        )
    try:
        return cls._read(content)  # type: ignore[attr-defined,no-any-return]
    except _Malformed as error:
        raise CorruptCheckpointError(f"not a {cls.__name__.lower()}: {error}", detail=name) from None
