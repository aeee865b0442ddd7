"""The options of the backend, checked.

>>> Settings(compression="lz4").shown()
"compression='lz4'"
>>> Settings(memory_limit=1)
Traceback (most recent call last):
statebackend.errors.UsageError: memory_limit is a number of bytes, at least 4 MB, and less than 4 EB. Hint: ...
"""

from __future__ import annotations

import dataclasses
import os

from statebackend.backends.rocksdb.options import column_family_settings, predefined
from statebackend.errors import UsageError

SMALLEST_LIMIT = 4 << 20
#: What bases in checkpoints are made of.
CHECKPOINTS = ("rows", "native")
LARGEST_LIMIT = 1 << 62


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `RocksDbBackend`."""

    local_dir: str | None = None
    memory_limit: int = 256 << 20
    predefined: str = "DEFAULT"
    partitioned_index_filters: bool = True
    compression: str | None = None
    checkpoints: str = "rows"

    def __post_init__(self) -> None:
        if self.local_dir is not None:
            given: object = self.local_dir
            folder = os.fspath(given) if isinstance(given, os.PathLike) else given
            if not isinstance(folder, str) or not folder or "\0" in folder:
                raise UsageError(
                    "local_dir is the path of a folder, or None for the folder of temporary files"
                )
            object.__setattr__(self, "local_dir", folder)
        if type(self.memory_limit) is not int or not SMALLEST_LIMIT <= self.memory_limit < LARGEST_LIMIT:
            raise UsageError(
                "memory_limit is a number of bytes, at least 4 MB, and less than 4 EB",
                hint="all rocksdb backends of the process with one limit share it",
            )
        if type(self.partitioned_index_filters) is not bool:
            raise UsageError("partitioned_index_filters is True or False")
        if self.checkpoints not in list(CHECKPOINTS):
            raise UsageError(
                'checkpoints is "rows" or "native"',
                detail=repr(self.checkpoints),
                hint='with "native", bases are files of RocksDB, of which each is uploaded once',
            )
        column_family_settings(predefined(self.predefined), compression=self.compression)  # raises

    def shown(self) -> str:
        """The options that are not the default, as keywords."""
        given = [(each.name, getattr(self, each.name), each.default) for each in dataclasses.fields(self)]
        return ", ".join(f"{name}={value!r}" for name, value, default in given if value != default)
