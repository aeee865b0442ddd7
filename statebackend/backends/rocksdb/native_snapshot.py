"""The files of a database in a snapshot: which of them there are, and how they come into a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from statebackend._core.rocksdb.binding.database import ColumnFamily
from statebackend.checkpoint import Checkpoint, StateSnapshot, StoredFile
from statebackend.checkpoint.files.store_files import storing
from statebackend.checkpoint.keyed import StateDescription
from statebackend.checkpoint.keyed.row_source import NATIVE, has_native
from statebackend.checkpoint.keyed.state_restore import check_use, keyed_snapshots
from statebackend.checkpoint.store.sealed import Malformed, crc32c, instance, integer, members_of
from statebackend.errors import CorruptCheckpointError, SerializationError
from statebackend.keys import KeyGroupRange
from statebackend.types import Serializer, Type, from_config, of

#: The label of the file that names the column families.
FAMILIES = "families.json"
#: The version of that file, and of how keys and values are in column families.
FORMAT = 1
#: Behind the name of timers: their column family in the order of firing.
BY_TIME = ".by time"
_STAMP_BYTES = 8
_LAYOUTS = ("value", "map_entry", "fixed_list", "variable_list")
#: Types whose values are bytes to everybody but the user's code.
_OPAQUE = ("custom", "pickle")


class NativeFamily(NamedTuple):
    """A column family of a state, or of timers."""

    #: The name of the state, or of the timers.
    table: str
    family: str
    #: Of `ExpiryRules`.
    layout: str
    element_bytes: int
    has_namespaces: bool

    @property
    def is_by_time(self) -> bool:
        """True if it holds timers in the order of firing, and so no rows of a checkpoint."""
        return self.layout == "map_entry" and self.table.endswith(BY_TIME) and self.is_reserved

    @property
    def is_reserved(self) -> bool:
        """True if it holds timers."""
        return StateDescription(self.table, "map", {}, False).is_reserved

    @property
    def is_list(self) -> bool:
        return self.layout.endswith("list")

    @classmethod
    def read(cls, data: object) -> NativeFamily:
        members = members_of(data, "a column family", set(cls._fields))
        layout = instance(members["layout"], str, "the layout of a column family")
        if layout not in _LAYOUTS:
            raise Malformed("the layout of a column family is unknown")
        return cls(
            instance(members["table"], str, "the name of a state"),
            instance(members["family"], str, "the name of a column family"),
            layout,
            integer(members["element_bytes"], "the size of elements"),
            instance(members["has_namespaces"], bool, "has_namespaces"),
        )


def families_bytes(families: Iterable[NativeFamily], version: str) -> bytes:
    """The content of the file; ``version`` is RocksDB's, for readers of the folder."""
    content = {"format": FORMAT, "rocksdb": version, "families": [each._asdict() for each in families]}
    return json.dumps(content, indent=1, sort_keys=True).encode()


def read_families(content: bytes, name: str) -> list[NativeFamily]:
    try:
        data = instance(json.loads(content), dict, "the file")
        if integer(data.get("format"), "the format", 1) > FORMAT:
            raise CorruptCheckpointError(
                "the files of a database are of a version that this library does not read",
                code="CORRUPT_CHECKPOINT.VERSION",
                detail=f"{name}, version {data['format']}, read is {FORMAT}",
                hint="open it with the newer version of the library that wrote it",
            )
        found = [NativeFamily.read(each) for each in instance(data.get("families"), list, "families")]
        if len({each.table for each in found}) < len(found) or len({each.family for each in found}) < len(
            found
        ):
            raise Malformed("a column family is named twice")
    except (ValueError, RecursionError, Malformed) as error:
        raise CorruptCheckpointError(
            f"column families are described wrongly: {error}", detail=name
        ) from error
    return found


class _Opaque(Serializer):
    is_immutable = True

    def __init__(self, width: int | None) -> None:
        self.fixed_width = width

    def serialize(self, value: Any) -> bytes:
        return bytes(value)

    def deserialize(self, data: bytes) -> bytes:
        return data

    def config(self) -> dict[str, Any]:
        return {"width": self.fixed_width}


class StandInDescriptor(NamedTuple):
    """As much of a descriptor as reading and loading rows needs, from a checkpoint alone."""

    name: str
    kind: str
    types: Mapping[str, Type]
    #: None without a time to live; else something.
    ttl_config: Any

    def stored_types(self) -> Mapping[str, Type]:
        return self.types


def stand_in_descriptor(description: StateDescription, family: NativeFamily) -> StandInDescriptor:
    """What the rows of a column family are, as its checkpoint describes them; objects are bytes."""
    width = None
    if family.layout == "fixed_list":
        width = family.element_bytes - (_STAMP_BYTES if description.ttl else 0)
    types = {role: _stand_in(config, width) for role, config in description.types.items()}
    return StandInDescriptor(description.name, description.kind, types, True if description.ttl else None)


def _stand_in(config: Any, width: int | None = None) -> Type:
    if isinstance(config, dict) and config.get("type") in _OPAQUE:
        return of(_Opaque(width))
    return from_config(config)


def has_stand_ins(description: StateDescription) -> bool:
    """Return True if the stored bytes of this state become rows without its descriptor."""
    try:
        for config in description.types.values():
            _stand_in(config)
    except SerializationError:
        return False
    return True


class UndeclaredTable:
    """A column family whose state is not declared, as needed to read and load rows."""

    __slots__ = ("family", "has_namespaces")

    def __init__(self, family: ColumnFamily, has_namespaces: bool) -> None:
        self.family = family
        self.has_namespaces = has_namespaces

    def note_namespaces(self) -> None:
        self.has_namespaces = True


_CHUNK = 4 << 20


def fetch(checkpoint: Checkpoint, file: StoredFile, path: str, *, may_link: bool = False) -> None:
    """Put the content of a file under a new local path, in plain text. O(bytes).

    With ``may_link`` it is a hard link where that can be: then it must not be written to.
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
        checkpoint.verify([file])  # its checksum covers the stored bytes
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
#: The names that RocksDB gives to files.
_LABEL = re.compile(r"\d+\.sst|MANIFEST-\d+|CURRENT")


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
        self.families: list[NativeFamily] = read_families(checkpoint.read_file(described), described.name)
        self.where = where = f"{checkpoint.manifest.name}, {described.name}"
        self._states = {
            each.name: each for each in (StateDescription.read(data, where) for data in snapshot.states)
        }
        for family in self.families:
            self.description_of(family)

    def _add(self, file: StoredFile) -> None:
        label = file.label
        if label is None or not (_LABEL.fullmatch(label) or label == FAMILIES) or label in self._files:
            raise CorruptCheckpointError("a file of a database has its own label", detail=file.name)
        self._files[label] = file

    def description_of(self, family: NativeFamily) -> StateDescription | None:
        """The description of a column family's state in a snapshot; None for timers in the order of firing, or if
        dropped."""
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
