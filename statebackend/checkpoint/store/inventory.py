"""A store file by file, for tools that go on where the reader of a store would raise."""

from __future__ import annotations

import os

from statebackend.checkpoint.files.layout import (
    CHECKPOINTS,
    DATA,
    METADATA,
    data_epoch,
    is_data_file,
    parse_entry_name,
)
from statebackend.checkpoint.files.store_files import storing
from statebackend.checkpoint.store.checkpoint_reader import Checkpoint, CheckpointReader
from statebackend.checkpoint.store.encryption import Encryption
from statebackend.checkpoint.store.log import (
    CheckpointKey,
    StoreLog,
    check_same_store,
    read_entry,
    read_log,
    required_metadata,
)
from statebackend.checkpoint.store.metadata import Metadata
from statebackend.errors import CorruptCheckpointError


class Inventory(CheckpointReader):
    """A reader that lists files without judging them, and opens one at a time."""

    @classmethod
    def of(cls, store: CheckpointReader | str | os.PathLike[str]) -> Inventory:
        if isinstance(store, CheckpointReader):
            return cls(store.uri, encryption=store.encryption, _files=store._files)
        return cls(store)

    @property
    def exists(self) -> bool:
        """True if there is anything that a writer of the store has made to begin with."""
        with storing(f"looking for {METADATA}"):
            if self._files.size(METADATA) is not None:
                return True
            found = self._files.names(CHECKPOINTS)
        return any(parse_entry_name(name) is not None for name in found)

    def log(self) -> StoreLog:
        """The log, whatever the metadata say. If its newest entries are damaged, it ends before them."""
        return read_log(self._files, over_damage=True)

    def _log(self, metadata: Metadata | None = None) -> StoreLog:
        return read_log(self._files, metadata, over_damage=True)

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
        with storing(f"looking for {name}"):
            return self._files.size(name) or 0

    def read_metadata(self) -> Metadata:
        """Read the metadata; `CorruptCheckpointError` if they are missing or damaged."""
        return required_metadata(self._files)

    def check_other(self, name: str, metadata: Metadata | None) -> None:
        """Read an entry, and compare its store with that of the metadata, if these are known."""
        try:
            entry = read_entry(self._files, name)
        except FileNotFoundError:
            return  # a checkpoint that was dropped
        check_same_store(entry.store, metadata, name)

    def damaged_entries(self) -> list[str]:
        """The names of the damaged entries that commit nothing that is kept."""
        damaged = []
        for name in self.log().names_of_others():
            try:
                self.check_other(name, None)
            except CorruptCheckpointError:
                damaged.append(name)
        return damaged

    def open_key(self, key: CheckpointKey, log: StoreLog, metadata: Metadata | None) -> Checkpoint:
        """Open a checkpoint for its files. Without metadata, nothing is compared with them."""
        manifest = self._manifest(key, metadata)
        if metadata is not None:
            encryption = self._agreed(metadata)
        else:
            metadata = Metadata(manifest.store)
            encryption = None if self.encryption is None else Encryption.probed(self.encryption)
        has_outputs = log.state.has_outputs(key)
        return Checkpoint(self._files, metadata, manifest, has_outputs=has_outputs, encryption=encryption)
