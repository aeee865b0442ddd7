"""The log of a store: its entries, the state that each has, and reading it. The newest entry tells the whole state.

An entry is a small sealed file: a commit, or a record of another change to the store. Its name is its place in the log.
The writer that creates it first owns it, so two writers never both append. A random token lets a writer whose answer
was lost recognise its own entry. The state in an entry tells which checkpoints are kept, the changes other than
commits, and the values that are set. A new entry drops the checkpoints that it no longer keeps. Removing their files
follows, and may be interrupted and repeated.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.layout import (
    CHECKPOINTS,
    ENTRY_NAME,
    METADATA,
    entry_name,
    parse_entry_name,
    split,
)
from statebackend.checkpoint.files.store_files import storing
from statebackend.checkpoint.store.manifest import Manifest, ManifestParts
from statebackend.checkpoint.store.metadata import STORE_ID, Metadata
from statebackend.checkpoint.store.sealed import (
    FORMAT,
    CheckedRecord,
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


class CheckpointKey(NamedTuple):
    """A checkpoint by its id and by the name of the file that commits it."""

    checkpoint_id: int
    name: str

    @property
    def sequence(self) -> int:
        found = ENTRY_NAME.fullmatch(self.name)
        return 0 if found is None else int(found[1])


class CheckpointRun(NamedTuple):
    """Checkpoints with ids and sequences in a row."""

    first_id: int
    first_sequence: int
    length: int

    def checkpoints(self) -> list[CheckpointKey]:
        return [
            CheckpointKey(self.first_id + step, entry_name(self.first_sequence + step))
            for step in range(self.length)
        ]

    @property
    def newest(self) -> CheckpointKey:
        last = self.length - 1
        return CheckpointKey(self.first_id + last, entry_name(self.first_sequence + last))

    def has(self, key: CheckpointKey) -> bool:
        step = key.checkpoint_id - self.first_id
        return 0 <= step < self.length and key.name == entry_name(self.first_sequence + step)

    def without(self, dropped: Collection[CheckpointKey]) -> list[CheckpointRun]:
        """The runs that are left without some checkpoints, at either end or in the middle; O(dropped)."""
        steps = sorted(key.checkpoint_id - self.first_id for key in dropped if self.has(key))
        left = []
        for before, step in itertools.pairwise([-1, *steps, self.length]):
            if step - before > 1:
                left.append(
                    CheckpointRun(
                        self.first_id + before + 1, self.first_sequence + before + 1, step - before - 1
                    )
                )
        return left


class TimeOverride(NamedTuple):
    """Times that were set for a checkpoint after it was committed; None: as it was committed."""

    now: int | None = None
    watermark: int | None = None


class Restart(NamedTuple):
    """A restart from empty: the incarnation that it began, and its first batch."""

    incarnation: str
    begins_at: int


@dataclass(frozen=True)
class LogState(CheckedRecord):
    """The checkpoints that are kept, and the effect of all other changes to the store."""

    #: The incarnation of checkpoints that are committed from now on; at first, the id of the store.
    incarnation: str
    #: The checkpoints that are there, by ascending ids, as runs.
    runs: tuple[CheckpointRun, ...] = ()
    #: All restarts, oldest first.
    restarts: tuple[Restart, ...] = ()
    #: The times that were set for kept checkpoints, by id.
    times: tuple[tuple[int, TimeOverride], ...] = ()
    #: The states that were dropped from kept checkpoints, by id; None: from the source of the first batch.
    dropped_states: tuple[tuple[int | None, str], ...] = ()
    #: The outputs of checkpoints that were committed before this sequence are dropped.
    outputs_from: int = 0
    #: No dropped checkpoint has left a manifest at or before this sequence.
    swept: int = 0

    def _check(self) -> None:
        match(self.incarnation, STORE_ID, "the incarnation is not 32 hexadecimal digits")
        ends = [(run.first_id, run.first_id + run.length - 1) for run in self.runs]
        if any(older[1] >= newer[0] for older, newer in itertools.pairwise(ends)):
            raise Malformed("the checkpoints that are kept are not in order")
        integer(self.outputs_from, "outputs_from")
        integer(self.swept, "swept")

    # --- what follows from it ---

    @property
    def kept(self) -> tuple[CheckpointKey, ...]:
        """The checkpoints that are there, by ascending ids; O(checkpoints)."""
        return tuple(key for run in self.runs for key in run.checkpoints())

    @property
    def newest(self) -> CheckpointKey | None:
        """The newest checkpoint; None if there is none."""
        return self.runs[-1].newest if self.runs else None

    def keeps(self, key: CheckpointKey) -> bool:
        return any(run.has(key) for run in self.runs)

    @property
    def newest_restart(self) -> Restart | None:
        """The restart that began the present incarnation; None if none did."""
        restart = self.restarts[-1] if self.restarts else None
        return restart if restart is not None and restart.incarnation == self.incarnation else None

    @property
    def begins_at(self) -> int | None:
        """The batch that the newest restart began with, even if a rewind came since; None if there was none."""
        return self.restarts[-1].begins_at if self.restarts else None

    def times_of(self, checkpoint_id: int) -> TimeOverride:
        return dict(self.times).get(checkpoint_id, TimeOverride())

    def dropped_states_of(self, checkpoint_id: int | None) -> frozenset[str]:
        """The states that were dropped from a checkpoint or, for None, from the source of the first batch."""
        return frozenset(name for each, name in self.dropped_states if each == checkpoint_id)

    def has_outputs(self, key: CheckpointKey) -> bool:
        """Return True if the outputs of a checkpoint are still there."""
        return key.sequence >= self.outputs_from

    # --- what becomes of it ---

    def committed(
        self, key: CheckpointKey, dropped: Collection[CheckpointKey], swept: int | None = None
    ) -> LogState:
        """The state after a commit that drops some checkpoints, the oldest ones; O(runs + dropped)."""
        changed = self._left(dropped)
        runs = changed["runs"]
        last = runs[-1] if runs else None
        if last is not None:
            changed["outputs_from"] = max(self.outputs_from, last.first_sequence + last.length - 1)
        after = None if last is None else (last.first_id + last.length, last.first_sequence + last.length)
        if last is not None and after == (key.checkpoint_id, key.sequence):
            changed["runs"] = (*runs[:-1], last._replace(length=last.length + 1))
        else:
            changed["runs"] = (*runs, CheckpointRun(key.checkpoint_id, key.sequence, 1))
        return dataclasses.replace(self, **changed, swept=self.swept if swept is None else swept)

    def without(self, dropped: Collection[CheckpointKey]) -> LogState:
        return dataclasses.replace(self, **self._left(dropped))

    def _left(self, dropped: Collection[CheckpointKey]) -> dict[str, Any]:
        """The members that dropping some checkpoints changes."""
        ids = {key.checkpoint_id for key in dropped}
        return {
            "runs": tuple([run for each in self.runs for run in each.without(dropped)]),
            "times": tuple([each for each in self.times if each[0] not in ids]),
            "dropped_states": tuple([each for each in self.dropped_states if each[0] not in ids]),
        }

    def rewound(self, incarnation: str, dropped: Collection[CheckpointKey]) -> LogState:
        """The state after going back to before some checkpoints; before all of them, no state is dropped any more."""
        left = dataclasses.replace(self.without(dropped), incarnation=incarnation)
        return left if left.runs else dataclasses.replace(left, dropped_states=())

    def restarted(self, restart: Restart) -> LogState:
        left = dataclasses.replace(self, runs=(), times=(), dropped_states=())
        return dataclasses.replace(left, incarnation=restart.incarnation, restarts=(*self.restarts, restart))

    def with_times(self, checkpoint_id: int, times: TimeOverride) -> LogState:
        """The state after times were set for a checkpoint."""
        others = [each for each in self.times if each[0] != checkpoint_id]
        return dataclasses.replace(self, times=(*others, (checkpoint_id, times)))

    def with_dropped_state(self, checkpoint_id: int | None, name: str) -> LogState:
        """The state after a state was dropped from a checkpoint or, for None, from the source of the first batch."""
        names = dict.fromkeys((*self.dropped_states, (checkpoint_id, name)))
        return dataclasses.replace(self, dropped_states=tuple(names))

    # --- its JSON form ---

    def to_json(self) -> JsonObject:
        """The JSON form. Checkpoints with ids and sequences in a row are one member of ``kept``.

        >>> state = LogState("0" * 32)
        >>> for number in (5, 6, 7, 9):
        ...     state = state.committed(CheckpointKey(number, entry_name(number + 2)), [])
        >>> state.to_json()["kept"]
        [[5, 7, 3], [9, 11, 1]]
        """
        return {
            "incarnation": self.incarnation,
            "kept": [list(run) for run in self.runs],
            "restarts": [list(restart) for restart in self.restarts],
            "times": [[checkpoint_id, *times] for checkpoint_id, times in self.times],
            "dropped_states": [list(each) for each in self.dropped_states],
            "outputs_from": self.outputs_from,
            "swept": self.swept,
        }

    @classmethod
    def _read(cls, data: object) -> LogState:
        names = {"incarnation", "kept", "restarts", "times", "dropped_states", "outputs_from", "swept"}
        members = members_of(data, "the state of the log", names)
        runs = [CheckpointRun(*each) for each in _rows(members, "kept", 3)]
        if any(run.length < 1 for run in runs):
            raise Malformed("a run of checkpoints is empty")
        restarts = [_restart(*each) for each in _lists(members, "restarts", 2)]
        times = [
            (integer(each[0], "a checkpoint"), TimeOverride(time_of(each[1]), time_of(each[2])))
            for each in _lists(members, "times", 3)
        ]
        states = [
            (None if each[0] is None else integer(each[0], "a checkpoint"), instance(each[1], str, "a state"))
            for each in _lists(members, "dropped_states", 2)
        ]
        return made(
            cls,
            incarnation=members["incarnation"],
            runs=tuple(runs),
            restarts=tuple(restarts),
            times=tuple(times),
            dropped_states=tuple(states),
            outputs_from=members["outputs_from"],
            swept=members["swept"],
        )


def _restart(incarnation: object, begins_at: object) -> Restart:
    found = match(incarnation, STORE_ID, "an incarnation is not 32 hexadecimal digits")
    return Restart(found[0], integer(begins_at, "the batch of a restart"))


def _lists(members: JsonObject, name: str, length: int) -> list[list[object]]:
    lists = [instance(each, list, f"a member of {name}") for each in instance(members[name], list, name)]
    if any(len(each) != length for each in lists):
        raise Malformed(f"a member of {name} has not {length} parts")
    return lists


def _rows(members: JsonObject, name: str, length: int) -> list[list[int]]:
    return [[integer(part, f"a part of {name}") for part in each] for each in _lists(members, name, length)]


RECORD_KINDS = ("restart", "rewind", "time", "drop")


@dataclass(frozen=True)
class Record(CheckedRecord):
    """One change to a store, made by the writer of ``epoch``; ``name`` names the file that has it.

    A ``restart`` dropped every checkpoint so that the stream could begin at batch ``begins_at``. A ``rewind`` dropped
    the checkpoints after ``keeps``, or all, with states dropped from the source. A ``time`` gave the checkpoint
    ``upon`` the times ``now`` and ``watermark``; None left one as it was. A ``drop`` dropped ``dropped_state`` from the
    checkpoint ``upon`` or, for None, from the source of the first batch.
    """

    kind: str
    epoch: int
    name: str
    incarnation: str | None = None
    keeps: int | None = None
    begins_at: int | None = None
    now: int | None = None
    watermark: int | None = None
    upon: CheckpointKey | None = None
    dropped_state: str | None = None

    def _check(self) -> None:
        if self.kind not in RECORD_KINDS:
            raise Malformed(f"the kind of a record is not one of {', '.join(RECORD_KINDS)}")
        integer(self.epoch, "the epoch", 1)
        if self.incarnation is not None:
            match(self.incarnation, STORE_ID, "the incarnation is not 32 hexadecimal digits")
        for what in ("keeps", "begins_at"):
            if self._raw_member(what) is not None:
                integer(self._raw_member(what), what)
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
        return {name: getattr(self, name) for name in _OWN}

    @classmethod
    def of_entry(cls, members: JsonObject) -> Record:
        own = members_of(members["record"], "the record", set(_OWN))
        if own["upon"] is not None:
            own["upon"] = CheckpointKey(*_pair(own["upon"]))
        name = entry_name(integer(members["sequence"], "the sequence", 1))
        return made(cls, kind=members["kind"], epoch=members["epoch"], name=name, **own)


def _pair(value: object) -> list[Any]:
    pair = instance(value, list, "the checkpoint that a record changes")
    if len(pair) != 2:
        raise Malformed("the checkpoint that a record changes is not a pair")
    return pair


_OWN = ("incarnation", "keeps", "begins_at", "now", "watermark", "upon", "dropped_state")


ENTRY_KINDS = ("commit", "takeover", *RECORD_KINDS)
_MEMBERS = {"format", "kind", "sequence", "token", "epoch", "store", "log"}


@dataclass(frozen=True)
class Entry(CheckedRecord):
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
        return entry_name(self.sequence)

    @property
    def key(self) -> CheckpointKey | None:
        """The checkpoint that it commits; None if it commits none."""
        return None if self.manifest is None else CheckpointKey(self.manifest.checkpoint_id, self.name)

    def sealed(self) -> bytes:
        return seal(self.to_json())

    def to_json(self) -> JsonObject:
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
    def parse(cls, data: bytes, name: str, load: ManifestParts | None = None) -> Entry:
        """Read the bytes of the entry called ``name``; `CorruptCheckpointError` if they are not it.

        ``load`` reads the parts of a manifest that are in separate files; without it, they are not looked at.
        """
        entry = parse(cls, data, name, read=partial(cls._read, load=load))
        if entry.name != name:
            raise CorruptCheckpointError(f"the file holds {entry.name}", detail=name)
        return entry

    @classmethod
    def _read(cls, data: object, load: ManifestParts | None) -> Entry:
        kind = instance(data, dict, "the entry").get("kind")
        own = Manifest.MEMBERS if kind == "commit" else set() if kind == "takeover" else {"record"}
        members = members_of(data, "the entry", {*_MEMBERS, *own})
        state = LogState._read(members["log"])
        manifest = record = None
        if kind == "commit":
            manifest = Manifest.of_entry(members, state.incarnation, load)
        elif kind != "takeover":
            record = Record.of_entry(members)
        shared = {name: members[name] for name in ("kind", "sequence", "epoch", "store", "token")}
        return made(cls, state=state, manifest=manifest, record=record, **shared)


#: The newest entry may be dropped while it is being read; it is never the newest one then.
_ATTEMPTS = 100


class StoreLog(NamedTuple):
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


def read_log(files: StoreFiles, metadata: Metadata | None = None, *, over_damage: bool = False) -> StoreLog:
    """Read the state of a store: lists one folder and reads one small file of it.

    A damaged newest entry is an error: it may be the commit of a batch. With ``over_damage``, it
    reads the newest entry that is whole.
    """
    for _ in range(_ATTEMPTS):
        with storing(f"listing {CHECKPOINTS}"):
            names = tuple(files.names(CHECKPOINTS))
        sequences = sorted(each for each in map(parse_entry_name, names) if each is not None)
        damaged: list[int] = []
        try:
            newest = _newest_whole(files, sequences, damaged if over_damage else None)
        except FileNotFoundError:
            continue
        if newest is None:
            state = LogState("0" * 32 if metadata is None else metadata.store)
        else:
            check_same_store(newest.store, metadata, newest.name)
            state = newest.state
        if damaged:  # they may have dropped what the state still keeps
            there = set(names)
            state = state.without([key for key in state.kept if split(key.name)[1] not in there])
        return StoreLog(sequences[-1] if sequences else 0, state, names, tuple(damaged))
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


def _read(files: StoreFiles, name: str) -> bytes:
    with storing(f"reading {name}", missing=partial(FileNotFoundError, name)):
        return files.read(name)


def read_entry(files: StoreFiles, name: str, load: ManifestParts | None = None) -> Entry:
    """Read one entry; `FileNotFoundError` if it is not there. ``load`` reads the parts of its manifest."""
    return Entry.parse(_read(files, name), name, load)


def read_manifest(
    files: StoreFiles, key: CheckpointKey, metadata: Metadata | None, load: ManifestParts
) -> Manifest:
    """Read the manifest of a checkpoint; `FileNotFoundError` if it is not there."""
    entry = read_entry(files, key.name, load)
    check_same_store(entry.store, metadata, key.name)
    if entry.manifest is None or entry.key != key:
        raise CorruptCheckpointError(
            f"the file does not commit checkpoint {key.checkpoint_id}", detail=key.name
        )
    return entry.manifest


def read_metadata(files: StoreFiles) -> Metadata | None:
    """The purpose of the store; None before the first opening."""
    try:
        return parse(Metadata, _read(files, METADATA), METADATA)
    except FileNotFoundError:
        return None


def required_metadata(files: StoreFiles) -> Metadata:
    """The purpose of an existing store; `CorruptCheckpointError` if that cannot be read."""
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
