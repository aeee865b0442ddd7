"""The files of a database in a snapshot: which of them there are, and how they come into a folder.

>>> _is_label("000012.sst"), _is_label("../000012.sst")
(True, False)
"""

from __future__ import annotations

import os
import re

from statebackend.backends.rocksdb.native_families import FAMILIES, NativeFamily, read_families
from statebackend.checkpoint import Checkpoint, StateSnapshot, StoredFile
from statebackend.checkpoint.files.store_files import storing
from statebackend.checkpoint.keyed import StateDescription
from statebackend.checkpoint.keyed.row_source import NATIVE, has_native
from statebackend.checkpoint.keyed.state_restore import check_use, keyed_snapshots
from statebackend.checkpoint.store.sealed import crc32c
from statebackend.errors import CorruptCheckpointError
from statebackend.keys import KeyGroupRange
from statebackend.types import Type

_CHUNK = 4 << 20


def fetch(checkpoint: Checkpoint, file: StoredFile, path: str, *, may_link: bool = False) -> None:
    """Put the content of a file under a new local path, in plain text. O(bytes).

    With ``may_link`` it is a hard link where that can be: then nobody may write into it.
    """
    if may_link and _linked(checkpoint, file, path):
        checkpoint.verify([file])
        return
    checksum = 0
    with (
        checkpoint.open_file(file) as source,
        storing(f"copying {file.name} to {path}"),
        open(path, "xb") as target,
    ):
        while chunk := source.read(_CHUNK):
            checksum = crc32c(chunk, checksum)
            target.write(chunk)
    if checkpoint.encryption is not None:
        checkpoint.verify([file])  # its checksum is one of what is stored
    elif checksum != file.checksum:
        raise CorruptCheckpointError(
            "a file does not match its checksum",
            detail=f"{file.name}, checkpoint {checkpoint.id}",
            hint="latest(intact=True) finds the newest checkpoint that is whole",
        )


def _linked(checkpoint: Checkpoint, file: StoredFile, path: str) -> bool:
    """Make a hard link, if the store is a folder of this file system, and not encrypted."""
    address = checkpoint.address(file)
    if checkpoint.encryption is not None or not os.path.isabs(address):
        return False
    try:
        os.link(address, path)
    except OSError:  # another file system, or not allowed, or not there: reading it says what is wrong
        return False
    return True


#: The end of RocksDB's names of files with data. It never changes such a file, and gives no name to two of them.
SST = ".sst"
_LABEL = re.compile(r"\d+\.sst|MANIFEST-\d+|CURRENT")


def _is_label(label: str | None) -> bool:
    """True for a name that RocksDB gives to a file."""
    return label is not None and _LABEL.fullmatch(label) is not None


class NativeSnapshot:
    """The files of a database in a snapshot, and its column families."""

    def __init__(self, checkpoint: Checkpoint, snapshot: StateSnapshot) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, StoredFile] = {}
        self.snapshot = snapshot
        for file in snapshot.files:
            if file.kind == NATIVE:
                self._add(file)
        if FAMILIES not in self._files:
            raise CorruptCheckpointError(
                f"the snapshot has files of a database and no {FAMILIES}", detail=checkpoint.manifest.name
            )
        described = self._files.pop(FAMILIES)
        #: The column families of its states.
        self.families: list[NativeFamily] = read_families(checkpoint.read_file(described), described.name)
        #: For messages.
        self.where = where = f"{checkpoint.manifest.name}, {described.name}"
        self._states = {
            each.name: each for each in (StateDescription.read(data, where) for data in snapshot.states)
        }
        for family in self.families:
            self.description_of(family)

    def _add(self, file: StoredFile) -> None:
        label = file.label
        if label is None or not (_is_label(label) or label == FAMILIES) or label in self._files:
            raise CorruptCheckpointError("a file of a database has a label of its own", detail=file.name)
        self._files[label] = file

    def description_of(self, family: NativeFamily) -> StateDescription | None:
        """What its snapshot says of a column family's state; None for timers in the order of firing, or if dropped."""
        if family.is_by_time or self.is_dropped(family):
            return None
        found = self._states.get(family.table)
        if found is None:
            raise CorruptCheckpointError(
                f"the files of the database have a state {family.table!r} that the manifest does not name",
                detail=self.where,
            )
        return found

    def is_dropped(self, family: NativeFamily) -> bool:
        """True if the state was dropped from the checkpoint, which still has its rows."""
        return family.table in self._checkpoint.dropped_states

    @property
    def tables(self) -> dict[str, StoredFile]:
        """The files with data, by RocksDB's names."""
        return {label: file for label, file in self._files.items() if label.endswith(SST)}

    def place(self, folder: str) -> None:
        """Put all files into a new folder, compared with their checksums; of data as links, if that can be."""
        os.mkdir(folder)
        for label, file in self._files.items():
            fetch(self._checkpoint, file, os.path.join(folder, label), may_link=label.endswith(SST))


def snapshot_to_adopt(
    checkpoint: object, key_type: Type, max_parallelism: int, key_groups: KeyGroupRange
) -> NativeSnapshot | None:
    """The one snapshot that has all of these key groups, if a database can go on with its files; else None."""
    if not isinstance(checkpoint, Checkpoint):
        return None
    met = [each for each in keyed_snapshots(checkpoint) if _common(each, key_groups) is not None]
    if len(met) != 1 or _common(met[0], key_groups) != key_groups or not has_native(met[0]):
        return None
    check_use(met[0], checkpoint, key_type, max_parallelism)
    return NativeSnapshot(checkpoint, met[0])


def _common(snapshot: StateSnapshot, key_groups: KeyGroupRange) -> KeyGroupRange | None:
    return key_groups if snapshot.key_groups is None else key_groups.intersection(snapshot.key_groups)
