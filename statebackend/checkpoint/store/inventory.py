"""A store file by file, for tools that go on where the reader of a store would raise.

>>> Inventory.of("/nowhere").manifests()
[]
"""

from __future__ import annotations

import os

from statebackend.checkpoint.files.layout import (
    DATA,
    METADATA,
    data_epoch,
    is_data_file,
    parse_record_name,
    record_name,
)
from statebackend.checkpoint.store.data_files import storing
from statebackend.checkpoint.store.metadata import Metadata
from statebackend.checkpoint.store.reader import Checkpoint, CheckpointReader
from statebackend.checkpoint.store.records import Record
from statebackend.checkpoint.store.retention import Key
from statebackend.errors import CommitConflictError

__all__ = ["Inventory"]


class Inventory(CheckpointReader):
    """A reader that lists files without judging them, and opens one at a time.

    >>> Inventory("/nowhere").record_names()
    []
    """

    @classmethod
    def of(cls, store: CheckpointReader | str | os.PathLike[str]) -> Inventory:
        """The inventory of a store, given as an object or by its path or uri.

        >>> Inventory.of(CheckpointReader("/data/state"))
        Inventory('/data/state')
        """
        if isinstance(store, CheckpointReader):
            return cls(store.uri, _files=store._files)
        return cls(store)

    @property
    def exists(self) -> bool:
        """True if there is anything that a writer of the store has made to begin with.

        >>> Inventory("/nowhere").exists
        False
        """
        with storing(f"looking for {METADATA}"):
            return self._files.size(METADATA) is not None or bool(self._listed()) or bool(self.record_names())

    def manifests(self) -> list[Key]:
        """Id and epoch of every manifest, sorted; also of manifests that contradict each other."""
        return self._listed()

    def conflicts(self, keys: list[Key]) -> list[CommitConflictError]:
        """The errors for manifests of which one must not be there.

        >>> [error.detail for error in Inventory("/nowhere").conflicts([(7, 1), (7, 2)])]
        ['checkpoints/7-1.json and checkpoints/7-2.json, /nowhere']
        """
        return list(self._conflicts(keys))

    def record_names(self) -> list[str]:
        """The names of all records, oldest first."""
        found = sorted(key for key in map(parse_record_name, self._names()) if key is not None)
        return [record_name(*key) for key in found]

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
        return self._metadata_of_checkpoint()

    def read_record(self, name: str, metadata: Metadata | None) -> Record:
        """Read a record, and compare its store with that of the metadata, if these are known."""
        return self._record(name, metadata)

    def open_key(self, key: Key, metadata: Metadata | None) -> Checkpoint:
        """Open the checkpoint of an id and epoch, for its files. Without metadata, nothing is compared with them."""
        manifest = self._manifest(key, metadata)
        return Checkpoint(self._files, metadata or Metadata(manifest.store), manifest)
