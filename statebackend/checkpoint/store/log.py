"""Reading the log of a store: the newest entry says what there is.

>>> from statebackend.checkpoint.files import open_files
>>> read_log(open_files("/nowhere")).sequence
0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from statebackend.checkpoint.files import StoreFiles
from statebackend.checkpoint.files.layout import (
    CHECKPOINTS,
    METADATA,
    entry_name,
    parse_entry_name,
    split,
)
from statebackend.checkpoint.store.data_files import storing
from statebackend.checkpoint.store.entries import Entry
from statebackend.checkpoint.store.log_state import Key, LogState
from statebackend.checkpoint.store.manifest import LoadParts, Manifest
from statebackend.checkpoint.store.metadata import Metadata
from statebackend.errors import CorruptCheckpointError, StoreError

__all__ = [
    "Log",
    "check_same_store",
    "read_entry",
    "read_log",
    "read_manifest",
    "read_metadata",
    "required_metadata",
    "without_metadata",
]

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
        """The names of entries that commit nothing that is kept, oldest first.

        >>> from statebackend.checkpoint.store.log_state import Run
        >>> Log(4, LogState("0" * 32, (Run(7, 4, 1),)), ("4.json", "3.json", "epoch-3")).names_of_others()
        ['checkpoints/3.json']
        """
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
    """The purpose of the store; None if there is no store yet.

    >>> from statebackend.checkpoint.files import open_files
    >>> read_metadata(open_files("/nowhere")) is None
    True
    """
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
    """The error for a log without metadata: these are lost, or a tool has not finished making the store.

    >>> from statebackend.checkpoint.files import open_files
    >>> without_metadata(open_files("/nowhere")).detail
    'metadata.json, /nowhere'
    """
    return CorruptCheckpointError(
        "a file is missing",
        detail=f"{METADATA}, {files.uri}",
        hint="if a tool was making this store, remove the folder and run the tool again; "
        "otherwise restore the file from a copy of the store",
    )


def check_same_store(store: str, metadata: Metadata | None, name: str) -> None:
    """Raise `CorruptCheckpointError` if a file of the log belongs to another store than the metadata, if known.

    >>> check_same_store("0" * 32, None, "checkpoints/3.json")
    """
    if metadata is not None and store != metadata.store:
        raise CorruptCheckpointError(
            "the manifest and the metadata are of two different stores", detail=f"{name}, {METADATA}"
        )
