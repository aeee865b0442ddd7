"""The parts of a manifest that lie in files of their own: one for each range of key groups, where there are several.

A part is named again while its range has not changed, so a manifest grows with what is new, not with the ranges.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.layout import data_folder
from statebackend.checkpoint.store.at_once import at_once
from statebackend.checkpoint.store.checksums import crc32c
from statebackend.checkpoint.store.data_files import storing
from statebackend.checkpoint.store.json_checks import FORMAT, members_of, parse
from statebackend.checkpoint.store.manifest import Manifest, StateSnapshot, StoredFile
from statebackend.checkpoint.store.sealed import seal
from statebackend.errors import CorruptCheckpointError

__all__ = ["Parts"]


class Parts:
    """Writes and reads parts of manifests, and remembers those of the newest manifest.

    >>> from statebackend.checkpoint.files import open_files
    >>> Parts(open_files("/nowhere")).of([StateSnapshot(7, epoch=3)], None, 3)
    ((None,), [])
    """

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._read: dict[str, StateSnapshot] = {}

    def of(
        self, snapshots: Sequence[StateSnapshot], before: Manifest | None, epoch: int
    ) -> tuple[tuple[StoredFile | None, ...], list[StoredFile]]:
        """The parts in which snapshots lie, those of ``before`` where nothing has changed; and the new ones."""
        if sum(each.key_groups is not None for each in snapshots) < 2:
            return (None,) * len(snapshots), []
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
        made: list[StoredFile] = []

        def write(at: int) -> None:
            part = parts[at] = self._write(snapshots[at], epoch)
            made.append(part)

        try:
            at_once(write, changed)
        except BaseException:
            self.remove(made)
            raise
        return tuple(parts), made

    def remove(self, made: Sequence[StoredFile]) -> None:
        """Remove parts that no manifest names, as far as that is possible."""
        for part in made:
            try:
                self._files.remove(part.name)
            except OSError:
                pass  # the next opening removes it

    def _write(self, snapshot: StateSnapshot, epoch: int) -> StoredFile:
        base_name = f"{snapshot.checkpoint_id}-{snapshot.subtask_index}-manifest-{secrets.token_hex(8)}.json"
        name = f"{data_folder(epoch)}/{base_name}"
        content = seal({"format": FORMAT, "snapshot": snapshot.to_json()})
        with storing(f"writing {name}"):
            self._files.write(name, content)
        return StoredFile(name, "manifest", len(content), crc32c(content), snapshot.key_groups)

    def read(self, part: StoredFile) -> StateSnapshot:
        """The snapshot in a part; `CorruptCheckpointError` if it is missing or not as it was written."""
        found = self._read.get(part.name)  # another thread may forget it meanwhile
        if found is None:
            found = self._read[part.name] = self._read_file(part)
        return found

    def keep_only(self, manifest: Manifest) -> None:
        """Forget what was read of other manifests."""
        named = {part.name for part in manifest.parts if part is not None}
        self._read = {name: snapshot for name, snapshot in list(self._read.items()) if name in named}

    def _read_file(self, part: StoredFile) -> StateSnapshot:
        try:
            with storing(f"reading {part.name}"):
                data = self._files.read(part.name)
        except OSError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise CorruptCheckpointError("a file is missing", detail=part.name) from error
            raise
        if (len(data), crc32c(data)) != (part.size, part.checksum):
            raise CorruptCheckpointError("a file does not match its checksum", detail=part.name)

        def read(content: object) -> StateSnapshot:
            return StateSnapshot._read(members_of(content, "the part", {"format", "snapshot"})["snapshot"])

        return parse(StateSnapshot, data, part.name, read=read)


def _say_the_same(before: StateSnapshot, now: StateSnapshot) -> bool:
    """Return True if two snapshots differ in their checkpoint and its time alone."""
    return now == dataclasses.replace(before, checkpoint_id=now.checkpoint_id, now=now.now)
