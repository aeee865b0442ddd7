"""The purpose of a store: its query, key type and number of key groups. Checked at every opening."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from statebackend.checkpoint.store.encryption import check_same_encryption, check_sizes
from statebackend.checkpoint.store.sealed import (
    FORMAT,
    CheckedRecord,
    JsonObject,
    instance,
    integer,
    made,
    match,
    members_of,
)
from statebackend.errors import StateMigrationError, UsageError
from statebackend.keys import MAX_PARALLELISM
from statebackend.types.serializers import describe

#: The pattern of a store's id; manifests repeat the id.
STORE_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Metadata(CheckedRecord):
    """The purpose of a store: its query, key type and number of key groups. ``store`` is a random id."""

    store: str
    query: str | None = None
    key_type: JsonObject | None = None
    max_parallelism: int | None = None
    #: The sizes of encrypted blocks; None: data files are in plain text.
    encryption: JsonObject | None = None

    def _check(self) -> None:
        match(self.store, STORE_ID, "the id of the store is not 32 hexadecimal digits")
        if self.query is not None:
            instance(self.query, str, "the query")
        if self.key_type is not None:
            instance(self.key_type, dict, "the key type")
        if self.max_parallelism is not None:
            integer(self.max_parallelism, "max_parallelism", 1, MAX_PARALLELISM)
        if self.encryption is not None:
            check_sizes(self.encryption)

    def to_json(self) -> JsonObject:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def _read(cls, data: object) -> Metadata:
        names = {"store", "query", "key_type", "max_parallelism", "encryption"}
        members = members_of(data, "the metadata", {"format", *names})
        return made(cls, **{name: members[name] for name in names})


def check_same_use(existing: Metadata, wanted: Metadata, uri: str) -> None:
    """Raise unless a store made for ``existing`` may be used for ``wanted``; members that are None are not compared,
    except for the encryption.
    """
    if wanted.query is not None and existing.query != wanted.query:
        raise UsageError(
            "the store belongs to another query",
            code="USAGE.OTHER_QUERY",
            detail=uri,
            hint="give each query its own store, or restore from this one into a new one",
        )
    check_same_encryption(existing.encryption, wanted.encryption, uri)
    for what in ("key_type", "max_parallelism"):
        mine, theirs = getattr(wanted, what), getattr(existing, what)
        shown = describe if what == "key_type" else str
        if mine is not None and mine != theirs:
            raise StateMigrationError(
                f"the store was made for another {what}",
                detail=f"{shown(theirs) if theirs else 'none'} there, {shown(mine)} here, {uri}",
                hint="open it as it was made, or use another store",
            )
