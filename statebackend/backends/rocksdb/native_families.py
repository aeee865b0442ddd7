"""What a checkpoint says of the column families in a database's own files, and their states without descriptors.

>>> family = NativeFamily("count", "0 count", "value", 0, False)
>>> read_families(families_bytes([family], "8.9.1"), "data/3/x") == [family]
True
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from statebackend._core.rocksdb.binding.database import ColumnFamily
from statebackend.checkpoint.keyed import StateDescription
from statebackend.checkpoint.store.sealed import Malformed, instance, integer, members_of
from statebackend.errors import CorruptCheckpointError, SerializationError
from statebackend.types import Serializer, Type, from_config, of

#: The label of the file that names the column families.
FAMILIES = "families.json"
#: The version of that file, and of how keys and values lie in column families.
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
    #: RocksDB's name.
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
        """True if values are merged."""
        return self.layout.endswith("list")

    def to_json(self) -> dict[str, Any]:
        """The form in the file."""
        return self._asdict()

    @classmethod
    def read(cls, data: object) -> NativeFamily:
        """Read what `to_json` gave."""
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
    """The content of the file; ``version`` is RocksDB's, for whoever looks into it."""
    content = {"format": FORMAT, "rocksdb": version, "families": [each.to_json() for each in families]}
    return json.dumps(content, indent=1, sort_keys=True).encode()


def read_families(content: bytes, name: str) -> list[NativeFamily]:
    """Read the content of the file ``name``."""
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
    """Leaves bytes as they are."""

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
        """The types by role."""
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
        """There is a namespace in it."""
        self.has_namespaces = True
