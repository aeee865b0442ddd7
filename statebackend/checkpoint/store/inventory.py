"""A store file by file, for tools that go on where the reader of a store would raise.

>>> Inventory.of("/nowhere").data_files()
set()
"""

from __future__ import annotations

import os
from typing import NamedTuple

from statebackend.checkpoint.files.layout import (
    CHECKPOINTS,
    DATA,
    METADATA,
    data_epoch,
    entry_name,
    is_data_file,
    manifest_name,
    parse_entry_name,
    parse_manifest_name,
    parse_record_name,
    record_name,
)
from statebackend.checkpoint.store.data_files import storing
from statebackend.checkpoint.store.encryption import Encryption
from statebackend.checkpoint.store.log import (
    check_same_store,
    conflicts,
    read_entry,
    read_log,
    read_records,
    required_metadata,
)
from statebackend.checkpoint.store.log_state import Key
from statebackend.checkpoint.store.metadata import Metadata
from statebackend.checkpoint.store.reader import Checkpoint, CheckpointReader
from statebackend.errors import CommitConflictError

__all__ = ["Found", "Inventory"]


class Found(NamedTuple):
    """The checkpoints that a store keeps, the names beside them, and errors for those that contradict each other."""

    kept: tuple[Key, ...]
    names: tuple[str, ...]
    #: The outputs of checkpoints before this sequence are gone.
    outputs_from: int
    conflicts: list[CommitConflictError]


class Inventory(CheckpointReader):
    """A reader that lists files without judging them, and opens one at a time.

    >>> Inventory("/nowhere").size_of("metadata.json")
    0
    """

    @classmethod
    def of(cls, store: CheckpointReader | str | os.PathLike[str]) -> Inventory:
        """The inventory of a store, given as an object or by its path or uri.

        >>> Inventory.of(CheckpointReader("/data/state"))
        Inventory('/data/state')
        """
        if isinstance(store, CheckpointReader):
            return cls(store.uri, encryption=store.encryption, _files=store._files)
        return cls(store)

    @property
    def exists(self) -> bool:
        """True if there is anything that a writer of the store has made to begin with.

        >>> Inventory("/nowhere").exists
        False
        """
        with storing(f"looking for {METADATA}"):
            if self._files.size(METADATA) is not None:
                return True
            found = self._files.names(CHECKPOINTS)
        return any(parse(name) is not None for name in found for parse in _PARSERS)

    def found(self) -> Found:
        """The checkpoints that are kept; also of a store of format 1 whose manifests contradict each other."""
        with storing(f"listing {CHECKPOINTS}"):
            names = tuple(self._files.names(CHECKPOINTS))
        if any(parse_entry_name(name) is not None for name in names):
            log = read_log(self._files)
            return Found(log.state.kept, log.names, log.state.outputs_from, [])
        keys = sorted(key for key in map(parse_manifest_name, names) if key is not None)
        kept = tuple(Key(checkpoint_id, manifest_name(checkpoint_id, epoch)) for checkpoint_id, epoch in keys)
        return Found(kept, names, 0, list(conflicts(keys, self.uri)))

    def names_of_others(self, found: Found) -> list[str]:
        """The names of entries and records that commit nothing that is kept, oldest first."""
        kept = {key.name for key in found.kept}
        old = sorted(key for key in map(parse_record_name, found.names) if key is not None)
        new = sorted(each for each in map(parse_entry_name, found.names) if each is not None)
        names = [*(record_name(*key) for key in old), *map(entry_name, new)]
        return [name for name in names if name not in kept]

    def data_files(self) -> set[str]:
        """The names of all data files, named by a manifest or not. Lists every folder of data files."""
        found: set[str] = set()
        with storing(f"listing {DATA}"):
            for epoch in self._files.names(DATA):
                folder = f"{DATA}/{epoch}"
                if data_epoch(folder):
                    found.update(f"{folder}/{name}" for name in self._files.names(folder))
        return {name for name in found if is_data_file(name)}

    def size_of(self, name: str) -> int:
        """The size of a file in bytes; 0 if it is not there.

        >>> Inventory("/nowhere").size_of("metadata.json")
        0
        """
        with storing(f"looking for {name}"):
            return self._files.size(name) or 0

    def read_metadata(self) -> Metadata:
        """Read the metadata; `CorruptCheckpointError` if they are missing or damaged."""
        return required_metadata(self._files)

    def check_other(self, name: str, metadata: Metadata | None) -> None:
        """Read an entry or a record, and compare its store with that of the metadata, if these are known."""
        base_name = name.removeprefix(f"{CHECKPOINTS}/")
        if parse_record_name(base_name) is not None:
            read_records(self._files, [base_name], metadata)
            return
        try:
            entry = read_entry(self._files, name)
        except FileNotFoundError:
            return  # a checkpoint that was dropped
        check_same_store(entry.store, metadata, name)

    def open_key(self, key: Key, found: Found, metadata: Metadata | None) -> Checkpoint:
        """Open a checkpoint for its files. Without metadata, nothing is compared with them."""
        manifest = self._manifest(key, metadata)
        if metadata is None:
            cipher = self.encryption
            sizes = None if cipher is None else Encryption.probed(cipher).to_json()
            metadata = Metadata(manifest.store, encryption=sizes)
        has_outputs = key.sequence >= found.outputs_from
        return Checkpoint(
            self._files, metadata, manifest, has_outputs=has_outputs, encryption=self.encryption
        )


_PARSERS = (parse_entry_name, parse_manifest_name, parse_record_name)
