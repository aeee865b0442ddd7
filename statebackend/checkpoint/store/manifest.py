"""The content of a checkpoint: the files that it names, and the states in them.

A `StateSnapshot` is the part that one subtask wrote for one checkpoint. A `Manifest` joins the snapshots of all
subtasks. All are immutable and JSON-able.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.layout import data_epoch, data_folder, entry_name, is_data_file
from statebackend.checkpoint.files.store_files import map_in_threads, storing
from statebackend.checkpoint.store.metadata import STORE_ID
from statebackend.checkpoint.store.sealed import (
    FORMAT,
    CheckedRecord,
    JsonObject,
    Malformed,
    crc32c,
    groups_json,
    groups_of,
    instance,
    integer,
    jsonable,
    made,
    match,
    members_of,
    parse,
    seal,
    time_of,
)
from statebackend.errors import CorruptCheckpointError
from statebackend.keys import MAX_PARALLELISM, KeyGroupRange

T = TypeVar("T")

FILE_KINDS = ("base", "delta", "sst", "operator", "output", "manifest", "stream")
#: The name of the output that a function gives its rows to without naming one.
MAIN_OUTPUT = "main"

_CHECKSUM = re.compile("crc32c:([0-9a-f]{8})")


@dataclass(frozen=True)
class StoredFile(CheckedRecord):
    """A data file as manifests name it: its path, kind, length and CRC-32C.

    ``label`` is the writer's own name for the file, such as RocksDB's name of an SST file.

    >>> StoredFile("data/3/a.arrow", "delta", size=10, checksum=0).epoch
    3
    >>> StoredFile("/etc/passwd", "delta", size=10, checksum=0)
    Traceback (most recent call last):
    statebackend.errors.UsageError: not a StoredFile: the name of a file is not in data/<epoch>/ [USAGE.JSON]
    """

    name: str
    kind: str
    size: int
    checksum: int
    key_groups: KeyGroupRange | None = None
    label: str | None = None

    def _check(self) -> None:
        name = self._raw_member("name")
        if not isinstance(name, str) or not is_data_file(name):
            raise Malformed("the name of a file is not in data/<epoch>/")
        if self.kind not in FILE_KINDS:
            raise Malformed(f"the kind of file {self.name} is not one of {', '.join(FILE_KINDS)}")
        integer(self.size, f"the size of {self.name}")
        integer(self.checksum, f"the checksum of {self.name}", 0, 2**32 - 1)
        self._set("key_groups", groups_of(self.key_groups, self.name))
        if self.label is not None:
            instance(self.label, str, f"the label of {self.name}")

    @property
    def epoch(self) -> int:
        return data_epoch(self.name)

    def to_json(self) -> JsonObject:
        """The JSON form, without members that are not set."""
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
    def _read(cls, data: object) -> StoredFile:
        members = dict(
            members_of(data, "a file", {"name", "kind", "size", "checksum"}, {"key_groups", "label"})
        )
        found = match(members["checksum"], _CHECKSUM, "the checksum of a file is of an unknown kind")
        members["checksum"] = int(found[1], 16)
        return made(cls, **members)


class CheckedStates(tuple[dict[str, Any], ...]):
    """Descriptions of states that were found right. Snapshots share them while nothing is declared."""

    __slots__ = ()


def checked_states(states: Iterable[dict[str, Any]]) -> CheckedStates:
    if isinstance(states, CheckedStates):
        return states
    made = CheckedStates(states)
    for state in made:
        instance(state, dict, "a state")
        for member in ("name", "kind"):
            if not isinstance(state.get(member), str):
                raise Malformed(f"a state has no {member}")
    jsonable(made, "a state")
    return made


@dataclass(frozen=True)
class StateSnapshot(CheckedRecord):
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
        self._set("states", checked_states(self.states))
        time_of(self.now)
        instance(self.extra, dict, "extra")
        jsonable(self.extra, "extra")

    def to_json(self) -> JsonObject:
        """The JSON form, which `CheckpointStore.commit` also takes."""
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
    def _read(cls, data: object, states: CheckedStates | None = None) -> StateSnapshot:
        """Read the JSON form; ``states`` are given if they are in a separate file."""
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
            states=tuple(instance(members["states"], list, "states")) if states is None else states,
            now=members["now"],
            extra=members["extra"],
        )


def snapshots_of(given: Iterable[StateSnapshot | Mapping[str, object]]) -> tuple[StateSnapshot, ...]:
    """Snapshots, each given as an object or in its JSON form."""
    return tuple(
        [each if isinstance(each, StateSnapshot) else StateSnapshot.from_json(each) for each in given]
    )


@dataclass(frozen=True)
class Manifest(CheckedRecord):
    """A committed checkpoint: the snapshots of its subtasks, its outputs and other files, its times and its batch."""

    checkpoint_id: int
    epoch: int
    store: str
    snapshots: tuple[StateSnapshot, ...] = ()
    #: Files that belong to no subtask's state and are not output.
    files: tuple[StoredFile, ...] = ()
    #: The time of the batch by the clock, in milliseconds.
    now: int | None = None
    #: Free for the caller of `commit`.
    progress: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: The place of its entry in the log; None if it is not committed.
    sequence: int | None = None
    #: See `CheckpointStore.incarnation`; None if it is not committed.
    incarnation: str | None = None
    #: The greatest event time up to and including the batch, less the delay, in milliseconds.
    watermark: int | None = None
    #: Tells this batch from others of its number; free for the caller of `commit`.
    batch: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: The files of each output, by its name.
    outputs: dict[str, tuple[StoredFile, ...]] = dataclasses.field(default_factory=dict)
    #: The files in which snapshots lie, in the order of snapshots; None for a snapshot in the manifest itself.
    parts: tuple[StoredFile | None, ...] = ()
    #: The files in which the states of snapshots are described, likewise.
    described: tuple[StoredFile | None, ...] = ()
    #: When it was committed, by the clock of the machine, in milliseconds.
    written: int | None = None

    #: The members of an entry that belong to the manifest in it.
    MEMBERS: ClassVar[frozenset[str]] = frozenset(
        {"id", "snapshots", "outputs", "files", "times", "batch", "progress", "written"}
    )

    def _check(self) -> None:
        integer(self.checkpoint_id, "the checkpoint id")
        integer(self.epoch, "the epoch", 1)
        match(self.store, STORE_ID, "the id of the store is not 32 hexadecimal digits")
        self._set("snapshots", tuple(self.snapshots))
        self._set("parts", tuple(self.parts) or (None,) * len(self.snapshots))
        self._set("described", tuple(self.described) or (None,) * len(self.snapshots))
        for snapshot in self.snapshots:
            if instance(snapshot, StateSnapshot, "a snapshot").checkpoint_id != self.checkpoint_id:
                raise Malformed("a snapshot is one of another checkpoint")
        self._set("files", _files(self.files))
        outputs = instance(self.outputs, dict, "outputs")
        self._set("outputs", {instance(name, str, "an output"): _files(outputs[name]) for name in outputs})
        time_of(self.now)
        time_of(self.watermark)
        time_of(self.written)
        for what in ("progress", "batch"):
            instance(self._raw_member(what), dict, what)  # what JSON cannot hold is found when it is sealed
        self._set("_by_name", self._named())

    def _named(self) -> dict[str, StoredFile]:
        named: dict[str, StoredFile] = {}
        parts = [part for part in (*self.parts, *self.described) if part is not None]
        for files in (
            *(snapshot.files for snapshot in self.snapshots),
            parts,
            self.files,
            *self.outputs.values(),
        ):
            for file in files:
                known = named.setdefault(file.name, file)
                if (known.size, known.checksum) != (file.size, file.checksum):
                    raise Malformed(f"file {file.name} is named twice, with different content")
        return named

    @property
    def name(self) -> str:
        """The name of its file in the store, or a description if it is not committed."""
        if self.sequence is None:
            return f"snapshots of checkpoint {self.checkpoint_id}"
        return entry_name(self.sequence)

    @property
    def all_files(self) -> dict[str, StoredFile]:
        """Every file that it names, by name, with its outputs, which may be gone already."""
        return self._by_name  # type: ignore[attr-defined,no-any-return]

    @property
    def output_names(self) -> set[str]:
        """The names of the files that are outputs and nothing else, so that they may go earlier than states."""
        outputs = {file.name for files in self.outputs.values() for file in files}
        if not outputs:
            return outputs
        others = {
            file.name for files in (self.files, *(each.files for each in self.snapshots)) for file in files
        }
        return outputs - others

    def to_json(self) -> JsonObject:
        """The members of its entry in the log. Snapshots and states in separate files are given by these files."""
        return {
            "id": self.checkpoint_id,
            "snapshots": [
                _snapshot_json(*each) for each in zip(self.snapshots, self.parts, self.described, strict=True)
            ],
            "outputs": {name: [file.to_json() for file in files] for name, files in self.outputs.items()},
            "files": [file.to_json() for file in self.files],
            "times": {"now": self.now, "watermark": self.watermark},
            "batch": self.batch,
            "progress": self.progress,
            "written": self.written,
        }

    @classmethod
    def of_entry(cls, members: JsonObject, incarnation: str, load: ManifestParts | None) -> Manifest:
        """Read the manifest from the members of a commit; ``load`` reads the parts that are in separate files.

        Without it, snapshots of which something is there are left out.
        """
        checkpoint_id = integer(members["id"], "the checkpoint id")
        times = members_of(members["times"], "times", {"now", "watermark"})
        snapshots, parts, described = [], [], []
        for each in instance(members["snapshots"], list, "snapshots"):
            part, states = _files_of(instance(each, dict, "a snapshot"))
            if load is None and (part is not None or states is not None):
                continue
            parts.append(part)
            described.append(states)
            own = None if load is None or states is None else load.states(states)
            if load is None or part is None:
                snapshots.append(StateSnapshot._read(each, own))
            else:
                snapshots.append(_again(load.snapshot(part), checkpoint_id, times["now"], own))
        outputs = instance(members["outputs"], dict, "outputs")
        return made(
            cls,
            checkpoint_id=checkpoint_id,
            epoch=members["epoch"],
            store=members["store"],
            snapshots=tuple(snapshots),
            files=_read_files(members["files"]),
            now=times["now"],
            progress=members["progress"],
            sequence=members["sequence"],
            incarnation=incarnation,
            watermark=times["watermark"],
            batch=members["batch"],
            outputs={name: _read_files(files) for name, files in outputs.items()},
            parts=tuple(parts),
            described=tuple(described),
            written=members["written"],
        )


def _again(
    snapshot: StateSnapshot, checkpoint_id: int, now: object, states: CheckedStates | None
) -> StateSnapshot:
    """The same files as the part of a later checkpoint, for which they did not change."""
    members = {field.name: getattr(snapshot, field.name) for field in dataclasses.fields(snapshot)}
    changed = {"checkpoint_id": checkpoint_id, "now": now} | ({} if states is None else {"states": states})
    return made(StateSnapshot, **(members | changed))


def _snapshot_json(
    snapshot: StateSnapshot, part: StoredFile | None, described: StoredFile | None
) -> JsonObject:
    """A snapshot in a manifest; parts in other files are given by these files."""
    made: JsonObject = snapshot.to_json() if part is None else {"part": part.to_json()}
    if described is not None:
        made["states"] = {"part": described.to_json()}
    return made


def _files_of(data: JsonObject) -> tuple[StoredFile | None, StoredFile | None]:
    """The file of a snapshot and the file of its states; None for a part in the manifest itself."""
    part, states = data.get("part"), data.get("states")
    if part is not None:
        members_of(data, "a snapshot", {"part"}, {"states"})
    if states is not None and not isinstance(states, list):
        states = members_of(states, "states", {"part"})["part"]
        return None if part is None else StoredFile._read(part), StoredFile._read(states)
    return None if part is None else StoredFile._read(part), None


def _files(files: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
    made = tuple(files)
    for file in made:
        instance(file, StoredFile, "a file")
    return made


def _read_files(data: object) -> tuple[StoredFile, ...]:
    return tuple(StoredFile._read(each) for each in instance(data, list, "files"))


#: From this number on, the states of a snapshot are described in their own file.
MANY_STATES = 100


class ManifestParts:
    """Writes and reads the parts of manifests, and remembers the parts of the newest manifest.

    A part is a file, so that a manifest grows with the changes alone. It holds the snapshot of a range of key groups,
    where there are several, or the descriptions of states, where there are many. The next manifest names it again if it
    has not changed.
    """

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        #: The contents that were read, by the names of the files.
        self._snapshots: dict[str, StateSnapshot] = {}
        self._states: dict[str, CheckedStates] = {}

    def written(self, manifest: Manifest, before: Manifest | None) -> tuple[Manifest, list[StoredFile]]:
        """Write the parts of a manifest; return it with its parts, and the new files.

        Unchanged parts are taken from the manifest ``before``.
        """
        snapshots, epoch = manifest.snapshots, manifest.epoch
        made: list[StoredFile] = []
        try:
            described = self._described(snapshots, before, epoch, made)
            parts = self._parts(snapshots, before, epoch, described, made)
            if (parts, described) == (manifest.parts, manifest.described):  # none, mostly
                return manifest, made
            return dataclasses.replace(manifest, parts=parts, described=described), made
        except BaseException:
            self.remove(made)
            raise

    def _described(
        self, snapshots: Sequence[StateSnapshot], before: Manifest | None, epoch: int, made: list[StoredFile]
    ) -> tuple[StoredFile | None, ...]:
        known: list[tuple[tuple[object, ...], StoredFile]] = []
        if before is not None:
            for each, file in zip(before.snapshots, before.described, strict=True):
                if file is not None and all(file.name != other.name for _, other in known):
                    known.append((each.states, file))

        def file_of(snapshot: StateSnapshot) -> StoredFile | None:
            if len(snapshot.states) < MANY_STATES:
                return None
            for states, file in known:
                if states == snapshot.states:
                    return file
            file = self._write("states", snapshot, {"states": list(snapshot.states)}, epoch)
            made.append(file)
            known.append((snapshot.states, file))
            return file

        return tuple(map(file_of, snapshots))

    def _parts(
        self,
        snapshots: Sequence[StateSnapshot],
        before: Manifest | None,
        epoch: int,
        described: Sequence[StoredFile | None],
        made: list[StoredFile],
    ) -> tuple[StoredFile | None, ...]:
        if len([each for each in snapshots if each.key_groups is not None]) < 2:
            return (None,) * len(snapshots)
        known = {}
        if before is not None:
            known = {
                each.key_groups: (each, part)
                for each, part in zip(before.snapshots, before.parts, strict=True)
                if each.key_groups is not None
            }
        parts: list[StoredFile | None] = [None] * len(snapshots)
        changed: list[int] = []
        for at, snapshot in enumerate(snapshots):
            if snapshot.key_groups is not None:
                same, part = known.get(snapshot.key_groups, (None, None))
                if same is not None and part is not None and _say_the_same(same, snapshot):
                    parts[at] = part
                else:
                    changed.append(at)

        def write(at: int) -> None:
            snapshot = snapshots[at]
            own = snapshot if described[at] is None else dataclasses.replace(snapshot, states=())
            part = self._write("manifest", snapshot, {"snapshot": own.to_json()}, epoch)
            parts[at] = dataclasses.replace(part, key_groups=snapshot.key_groups)
            made.append(part)

        map_in_threads(write, changed)
        return tuple(parts)

    def remove(self, made: Sequence[StoredFile]) -> None:
        """Remove parts that no manifest names, as far as that is possible."""
        for part in made:
            with suppress(OSError):  # the next opening removes it
                self._files.remove(part.name)

    def _write(self, what: str, snapshot: StateSnapshot, members: JsonObject, epoch: int) -> StoredFile:
        base_name = f"{snapshot.checkpoint_id}-{snapshot.subtask_index}-{what}-{secrets.token_hex(8)}.json"
        name = f"{data_folder(epoch)}/{base_name}"
        content = seal({"format": FORMAT, **members})
        with storing(f"writing {name}"):
            self._files.write(name, content)
        return StoredFile(name, "manifest", len(content), crc32c(content))

    def snapshot(self, part: StoredFile) -> StateSnapshot:
        """The snapshot in a part; `CorruptCheckpointError` if it is missing or not as it was written.

        States that are described in their own file are left out.
        """
        return self._read(part, self._snapshots, StateSnapshot, _snapshot_in)

    def states(self, part: StoredFile) -> CheckedStates:
        """The descriptions of states in a part; `CorruptCheckpointError` if it is missing or not as it was written."""
        return self._read(part, self._states, CheckedStates, _states_in)

    def _read(self, part: StoredFile, known: dict[str, T], cls: type[T], read: Callable[[object], T]) -> T:
        found = known.get(part.name)  # another thread may forget it meanwhile
        if found is None:
            found = known[part.name] = parse(cls, self._read_file(part), part.name, read=read)
        return found

    def keep_only(self, manifest: Manifest) -> None:
        """Forget the parts of other manifests."""
        named = {part.name for part in (*manifest.parts, *manifest.described) if part is not None}
        self._snapshots = {name: each for name, each in list(self._snapshots.items()) if name in named}
        self._states = {name: each for name, each in list(self._states.items()) if name in named}

    def _read_file(self, part: StoredFile) -> bytes:
        missing = partial(CorruptCheckpointError, "a file is missing", detail=part.name)
        with storing(f"reading {part.name}", missing=missing):
            data = self._files.read(part.name)
        if (len(data), crc32c(data)) != (part.size, part.checksum):
            raise CorruptCheckpointError("a file does not match its checksum", detail=part.name)
        return data


def _snapshot_in(content: object) -> StateSnapshot:
    return StateSnapshot._read(members_of(content, "the part", {"format", "snapshot"})["snapshot"])


def _states_in(content: object) -> CheckedStates:
    states = members_of(content, "the part", {"format", "states"})["states"]
    return checked_states(instance(states, list, "states"))


def _say_the_same(before: StateSnapshot, now: StateSnapshot) -> bool:
    """Return True if two snapshots differ in their checkpoint and its time alone."""
    return now == dataclasses.replace(before, checkpoint_id=now.checkpoint_id, now=now.now)
