"""The log of a store: its entries, and reading it. The newest entry says what there is.

An entry is a small sealed file: a commit, or a record of another change to the store. Its name is its place in the log.
Whoever creates it first has it, so two writers never both append. It has a random token, by which a writer whose answer
was lost knows its own entry again, and the whole state of the log after it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.layout import (
    CHECKPOINTS,
    METADATA,
    entry_name,
    parse_entry_name,
    split,
)
from statebackend.checkpoint.store.data_files import storing
from statebackend.checkpoint.store.log_state import Key, LogState
from statebackend.checkpoint.store.manifest import LoadParts, Manifest
from statebackend.checkpoint.store.metadata import STORE_ID, Metadata
from statebackend.checkpoint.store.sealed import (
    FORMAT,
    Checked,
    JsonObject,
    Malformed,
    instance,
    integer,
    made,
    match,
    members_of,
    parse,
    seal,
    time_of,
)
from statebackend.errors import CorruptCheckpointError, StoreError

RECORD_KINDS = ("restart", "rewind", "time", "drop")


@dataclass(frozen=True)
class Record(Checked):
    """One change to a store, made by the writer of ``epoch``; ``name`` is that of the file that has it.

    A ``restart`` dropped every checkpoint so that the stream could begin at batch ``begins_at``; it happens once for
    each value of ``first_batch``. A ``rewind`` dropped the checkpoints after ``keeps``, or all, with what was dropped
    from the source. A ``time`` gave the checkpoint ``upon`` the times ``now`` and ``watermark``; None left one as it
    was. A ``drop`` dropped ``dropped_state`` from the checkpoint ``upon`` or, for None, from the source of the first
    batch.
    """

    kind: str
    epoch: int
    name: str
    incarnation: str | None = None
    keeps: int | None = None
    begins_at: int | None = None
    first_batch: int | None = None
    now: int | None = None
    watermark: int | None = None
    upon: Key | None = None
    dropped_state: str | None = None

    def _check(self) -> None:
        if self.kind not in RECORD_KINDS:
            raise Malformed(f"the kind of a record is not one of {', '.join(RECORD_KINDS)}")
        integer(self.epoch, "the epoch", 1)
        if self.incarnation is not None:
            match(self.incarnation, STORE_ID, "the incarnation is not 32 hexadecimal digits")
        for what in ("keeps", "begins_at", "first_batch"):
            if self._given(what) is not None:
                integer(self._given(what), what)
        if self.upon is not None:
            integer(self.upon.checkpoint_id, "the checkpoint that a record changes")
            instance(self.upon.name, str, "the name of the checkpoint that a record changes")
        if self.dropped_state is not None:
            instance(self.dropped_state, str, "the name of a dropped state")
        time_of(self.now)
        time_of(self.watermark)
        found = {
            "incarnation": self.incarnation is not None,
            "time": (self.now, self.watermark) != (None, None),
            "state": self.dropped_state is not None,
        }
        wanted = {"time": "time", "drop": "state"}.get(self.kind, "incarnation")
        has_upon = self.upon is not None
        if [name for name in found if found[name]] != [wanted] or (
            self.kind != "drop" and has_upon != (self.kind == "time")
        ):
            raise Malformed("a record has members of another kind")

    def to_json(self) -> JsonObject:
        """Its members of the entry that has it."""
        return {name: getattr(self, name) for name in _OWN}

    @classmethod
    def of_entry(cls, members: JsonObject) -> Record:
        """Read the record from the members of an entry."""
        own = members_of(members["record"], "the record", {*_OWN} - {"dropped_state"}, {"dropped_state"})
        if own["upon"] is not None:
            own["upon"] = Key(*_pair(own["upon"]))
        name = entry_name(integer(members["sequence"], "the sequence", 1))
        return made(cls, kind=members["kind"], epoch=members["epoch"], name=name, **own)


def _pair(value: object) -> list[Any]:
    pair = instance(value, list, "the checkpoint that a record changes")
    if len(pair) != 2:
        raise Malformed("the checkpoint that a record changes is not a pair")
    return pair


_OWN = ("incarnation", "keeps", "begins_at", "first_batch", "now", "watermark", "upon", "dropped_state")


ENTRY_KINDS = ("commit", "takeover", *RECORD_KINDS)
_MEMBERS = {"format", "kind", "sequence", "token", "epoch", "store", "log"}


@dataclass(frozen=True)
class Entry(Checked):
    """One entry of the log, made by the writer of ``epoch``, and the state of the log after it.

    A commit has a manifest; a restart, a rewind, a time and a drop have a record. A takeover has neither: a writer
    makes it when it opens the store, under the number that is its epoch, and ends all older writers by that.
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
        """The JSON form."""
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


_UNKNOWN = "0" * 32
#: The newest entry may be dropped while it is being read; it is never the newest one then.
_ATTEMPTS = 100


class Log(NamedTuple):
    """The log as it was read: the newest sequence, 0 without entries; the state; and the names in its folder."""

    sequence: int
    state: LogState
    names: tuple[str, ...]
    #: The entries after the newest whole one, which are damaged. Only `sb.tools.repair` and `verify` read such a log.
    damaged: tuple[int, ...] = ()

    def names_of_others(self) -> list[str]:
        """The names of entries that commit nothing that is kept, oldest first."""
        kept = {key.name for key in self.state.kept}
        sequences = sorted(each for each in map(parse_entry_name, self.names) if each is not None)
        return [name for name in map(entry_name, sequences) if name not in kept]


def read_log(files: StoreFiles, metadata: Metadata | None = None, *, over_damage: bool = False) -> Log:
    """Read the state of a store: lists one folder and reads one small file of it.

    If the newest entry is damaged, nobody knows what it did: it may be the commit of a batch. So that is an error, but
    ``over_damage`` reads the newest entry that is whole.
    """
    for _ in range(_ATTEMPTS):
        names = _listed(files)
        sequences = sorted(each for each in map(parse_entry_name, names) if each is not None)
        damaged: list[int] = []
        try:
            newest = _newest_whole(files, sequences, damaged if over_damage else None)
        except FileNotFoundError:
            continue
        if newest is None:
            state = LogState(_UNKNOWN if metadata is None else metadata.store)
        else:
            check_same_store(newest.store, metadata, newest.name)
            state = newest.state
        if damaged:  # they may have dropped what the state still keeps
            there = set(names)
            state = state.without([key for key in state.kept if split(key.name)[1] not in there])
        return Log(sequences[-1] if sequences else 0, state, names, tuple(damaged))
    raise StoreError(
        "the newest entry of the log is always gone when it is read", detail=f"{CHECKPOINTS}, {files.uri}"
    )


def _newest_whole(files: StoreFiles, sequences: Sequence[int], damaged: list[int] | None) -> Entry | None:
    """The newest entry, or None if there is none. With a list, damaged ones are added to it, and passed over."""
    for sequence in reversed(sequences):
        try:
            return read_entry(files, entry_name(sequence))
        except CorruptCheckpointError as error:
            if error.code == "CORRUPT_CHECKPOINT.VERSION":
                raise
            if damaged is None:
                raise CorruptCheckpointError(
                    f"the newest entry of the log is damaged: {error.message}",
                    code="CORRUPT_CHECKPOINT.LOG",
                    detail=f"{error.detail}, {files.uri}",
                    hint="restore the file from a copy of the store; "
                    "if there is none, sb.tools.repair(store) goes back to the newest whole checkpoint",
                ) from error
            damaged.append(sequence)
    return None


def _listed(files: StoreFiles) -> tuple[str, ...]:
    with storing(f"listing {CHECKPOINTS}"):
        return tuple(files.names(CHECKPOINTS))


def _read(files: StoreFiles, name: str) -> bytes:
    """Read a small file; `FileNotFoundError` if it is not there."""
    try:
        with storing(f"reading {name}"):
            return files.read(name)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


def read_entry(files: StoreFiles, name: str, load: LoadParts | None = None) -> Entry:
    """Read one entry; `FileNotFoundError` if it is not there. ``load`` reads the parts of its manifest."""
    return Entry.parse(_read(files, name), name, load)


def read_manifest(files: StoreFiles, key: Key, metadata: Metadata | None, load: LoadParts) -> Manifest:
    """Read the manifest of a checkpoint; `FileNotFoundError` if it is not there."""
    entry = read_entry(files, key.name, load)
    check_same_store(entry.store, metadata, key.name)
    if entry.manifest is None or entry.key != key:
        raise CorruptCheckpointError(
            f"the file does not commit checkpoint {key.checkpoint_id}", detail=key.name
        )
    return entry.manifest


def read_metadata(files: StoreFiles) -> Metadata | None:
    """The purpose of the store; None if there is no store yet."""
    try:
        return Metadata.parse(_read(files, METADATA), METADATA)
    except FileNotFoundError:
        return None


def required_metadata(files: StoreFiles) -> Metadata:
    """The purpose of a store that there is; `CorruptCheckpointError` if that cannot be read."""
    metadata = read_metadata(files)
    if metadata is None:
        raise without_metadata(files)
    return metadata


def without_metadata(files: StoreFiles) -> CorruptCheckpointError:
    """The error for a log without metadata: these are lost, or a tool has not finished making the store."""
    return CorruptCheckpointError(
        "a file is missing",
        detail=f"{METADATA}, {files.uri}",
        hint="if a tool was making this store, remove the folder and run the tool again; "
        "otherwise restore the file from a copy of the store",
    )


def check_same_store(store: str, metadata: Metadata | None, name: str) -> None:
    """Raise `CorruptCheckpointError` if a file of the log belongs to another store than the metadata, if known."""
    if metadata is not None and store != metadata.store:
        raise CorruptCheckpointError(
            "the manifest and the metadata are of two different stores", detail=f"{name}, {METADATA}"
        )
