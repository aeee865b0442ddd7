"""The parts of a manifest that lie in files of their own, so that it grows with what is new.

They are the snapshots of ranges of key groups, where there are several, and the descriptions of states, where there are
many. A part is named again while it has not changed.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.layout import data_folder
from statebackend.checkpoint.store.data_files import at_once, storing
from statebackend.checkpoint.store.manifest import (
    CheckedStates,
    Manifest,
    StateSnapshot,
    StoredFile,
    checked_states,
)
from statebackend.checkpoint.store.sealed import FORMAT, JsonObject, crc32c, instance, members_of, parse, seal
from statebackend.errors import CorruptCheckpointError

T = TypeVar("T")

#: So many states of a snapshot are described in a file of their own.
MANY_STATES = 100


class Written(NamedTuple):
    """Where the snapshots of a manifest lie, and the descriptions of their states; None for the manifest itself."""

    parts: tuple[StoredFile | None, ...]
    described: tuple[StoredFile | None, ...]
    #: Those that are new.
    made: list[StoredFile]


class Parts:
    """Writes and reads parts of manifests, and remembers those of the newest manifest."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        #: What was read, by the name of its file.
        self._snapshots: dict[str, StateSnapshot] = {}
        self._states: dict[str, CheckedStates] = {}

    def of(self, snapshots: Sequence[StateSnapshot], before: Manifest | None, epoch: int) -> Written:
        """The files in which a manifest's parts lie, those of ``before`` where nothing has changed."""
        made: list[StoredFile] = []
        try:
            described = self._described(snapshots, before, epoch, made)
            return Written(self._parts(snapshots, before, epoch, described, made), described, made)
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
        if sum(each.key_groups is not None for each in snapshots) < 2:
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

        at_once(write, changed)
        return tuple(parts)

    def remove(self, made: Sequence[StoredFile]) -> None:
        """Remove parts that no manifest names, as far as that is possible."""
        for part in made:
            try:
                self._files.remove(part.name)
            except OSError:
                pass  # the next opening removes it

    def _write(self, what: str, snapshot: StateSnapshot, members: JsonObject, epoch: int) -> StoredFile:
        base_name = f"{snapshot.checkpoint_id}-{snapshot.subtask_index}-{what}-{secrets.token_hex(8)}.json"
        name = f"{data_folder(epoch)}/{base_name}"
        content = seal({"format": FORMAT, **members})
        with storing(f"writing {name}"):
            self._files.write(name, content)
        return StoredFile(name, "manifest", len(content), crc32c(content))

    def snapshot(self, part: StoredFile) -> StateSnapshot:
        """The snapshot in a part; `CorruptCheckpointError` if it is missing or not as it was written.

        States that are described in a file of their own are left out.
        """
        found = self._snapshots.get(part.name)  # another thread may forget it meanwhile
        if found is None:

            def read(content: object) -> StateSnapshot:
                return StateSnapshot._read(
                    members_of(content, "the part", {"format", "snapshot"})["snapshot"]
                )

            found = self._snapshots[part.name] = parse(
                StateSnapshot, self._read_file(part), part.name, read=read
            )
        return found

    def states(self, part: StoredFile) -> CheckedStates:
        """The descriptions of states in a part; `CorruptCheckpointError` if it is missing or not as it was written."""
        found = self._states.get(part.name)
        if found is None:

            def read(content: object) -> CheckedStates:
                states = members_of(content, "the part", {"format", "states"})["states"]
                return checked_states(instance(states, list, "states"))

            found = self._states[part.name] = parse(
                CheckedStates, self._read_file(part), part.name, read=read
            )
        return found

    def keep_only(self, manifest: Manifest) -> None:
        """Forget what was read of other manifests."""
        named = {part.name for part in (*manifest.parts, *manifest.described) if part is not None}
        self._snapshots = _named(self._snapshots, named)
        self._states = _named(self._states, named)

    def _read_file(self, part: StoredFile) -> bytes:
        try:
            with storing(f"reading {part.name}"):
                data = self._files.read(part.name)
        except OSError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise CorruptCheckpointError("a file is missing", detail=part.name) from error
            raise
        if (len(data), crc32c(data)) != (part.size, part.checksum):
            raise CorruptCheckpointError("a file does not match its checksum", detail=part.name)
        return data


def _named(read: dict[str, T], names: set[str]) -> dict[str, T]:
    return {name: each for name, each in list(read.items()) if name in names}


def _say_the_same(before: StateSnapshot, now: StateSnapshot) -> bool:
    """Return True if two snapshots differ in their checkpoint and its time alone."""
    return now == dataclasses.replace(before, checkpoint_id=now.checkpoint_id, now=now.now)
