"""The entries of a store's log: commits, and what is done to a store beside them. Each is a small sealed file.

An entry's name is its place in the log. Whoever creates it first has it, so two writers never both append. It has a
random token, by which a writer whose answer was lost knows its own entry again, and the whole state of the log after
it.

>>> entry = Entry("takeover", 3, epoch=3, store="0" * 32, state=LogState("0" * 32))
>>> Entry.parse(seal(entry.to_json()), entry.name) == entry
True
"""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from functools import partial

from statebackend.checkpoint.files.layout import entry_name
from statebackend.checkpoint.store.json_checks import (
    FORMAT,
    Checked,
    Malformed,
    instance,
    integer,
    made,
    match,
    members_of,
    parse,
)
from statebackend.checkpoint.store.log_state import Key, LogState
from statebackend.checkpoint.store.manifest import LoadParts, Manifest
from statebackend.checkpoint.store.metadata import STORE_ID
from statebackend.checkpoint.store.records import RECORD_KINDS, Record
from statebackend.checkpoint.store.sealed import JsonObject, seal
from statebackend.errors import CorruptCheckpointError

__all__ = ["ENTRY_KINDS", "Entry"]

ENTRY_KINDS = ("commit", "takeover", *RECORD_KINDS)
_MEMBERS = {"format", "kind", "sequence", "token", "epoch", "store", "log"}


@dataclass(frozen=True)
class Entry(Checked):
    """One entry of the log, made by the writer of ``epoch``, and the state of the log after it.

    A commit has a manifest; a restart, a rewind, a time and a drop have a record. A takeover has neither: a writer
    makes it when it opens the store, under the number that is its epoch, and ends all older writers by that.

    >>> Entry("takeover", 3, epoch=3, store="0" * 32, state=LogState("0" * 32)).name
    'checkpoints/3.json'
    """

    kind: str
    sequence: int
    epoch: int
    store: str
    state: LogState
    manifest: Manifest | None = None
    record: Record | None = None
    token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))

    def _check(self) -> None:
        if self.kind not in ENTRY_KINDS:
            raise Malformed(f"the kind of an entry is not one of {', '.join(ENTRY_KINDS)}")
        integer(self.sequence, "the sequence", 1)
        integer(self.epoch, "the epoch", 1, self.sequence)
        match(self.token, STORE_ID, "the token is not 32 hexadecimal digits")
        match(self.store, STORE_ID, "the id of the store is not 32 hexadecimal digits")
        if any(run.newest.sequence > self.sequence for run in self.state.runs):
            raise Malformed("the log keeps what comes after this entry")
        is_commit, is_takeover = self.kind == "commit", self.kind == "takeover"
        if (self.manifest is not None, self.record is not None) != (
            is_commit,
            not is_commit and not is_takeover,
        ):
            raise Malformed("an entry is a commit with a manifest, or has a record, or is a takeover")

    @property
    def name(self) -> str:
        """The name of its file in the store."""
        return entry_name(self.sequence)

    @property
    def key(self) -> Key | None:
        """The checkpoint that it commits; None if it commits none."""
        return None if self.manifest is None else Key(self.manifest.checkpoint_id, self.name)

    def sealed(self) -> bytes:
        """The content of its file."""
        return seal(self.to_json())

    def to_json(self) -> JsonObject:
        """The JSON form.

        >>> Entry("takeover", 3, epoch=3, store="0" * 32, state=LogState("0" * 32)).to_json()["format"]
        2
        """
        made: JsonObject = {
            "format": FORMAT,
            "kind": self.kind,
            "sequence": self.sequence,
            "token": self.token,
            "epoch": self.epoch,
            "store": self.store,
            "log": self.state.to_json(),
        }
        if self.manifest is not None:
            made |= self.manifest.to_json()
        if self.record is not None:
            made["record"] = self.record.to_json()
        return made

    @classmethod
    def parse(cls, data: bytes, name: str, load: LoadParts | None = None) -> Entry:
        """Read the bytes of the entry called ``name``; `CorruptCheckpointError` if they are not it.

        ``load`` reads the parts of a manifest that lie in files of their own; without it, they are not looked at.
        """
        entry = parse(cls, data, name, read=partial(cls._read, load=load))
        if entry.name != name:
            raise CorruptCheckpointError(f"the file holds {entry.name}", detail=name)
        return entry

    @classmethod
    def _read(cls, data: object, load: LoadParts | None) -> Entry:
        kind = instance(data, dict, "the entry").get("kind")
        own = Manifest.MEMBERS if kind == "commit" else set() if kind == "takeover" else {"record"}
        members = members_of(data, "the entry", {*_MEMBERS, *own})
        state = LogState.from_json(members["log"])
        manifest = record = None
        if kind == "commit":
            manifest = Manifest.of_entry(members, state.incarnation, load)
        elif kind != "takeover":
            record = Record.of_entry(members)
        shared = {name: members[name] for name in ("kind", "sequence", "epoch", "store", "token")}
        return made(cls, state=state, manifest=manifest, record=record, **shared)
