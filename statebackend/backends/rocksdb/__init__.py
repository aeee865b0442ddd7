"""The backend on RocksDB, for state that is larger than memory.

Importing this module loads nothing compiled, so that it can tell the user what is missing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from statebackend.backends.rocksdb.library_location import library_in_use, load_library
from statebackend.backends.rocksdb.settings import Settings
from statebackend.errors import StateBackendError
from statebackend.operator_state import OperatorStateBackend
from statebackend.state import Size, StateBackend, number_of_bytes

if TYPE_CHECKING:
    from statebackend.backends.rocksdb.keyed_backend import RocksDbKeyedBackend

__all__ = ["RocksDbBackend"]


class RocksDbBackend(StateBackend):
    """Makes backends on RocksDB, for state that is larger than memory.

    Each keyed backend has its own database in a new folder below ``local_dir`` (default: the folder for temporary
    files), which is removed when it is closed. ``memory_limit`` is shared by all databases of the process
    that have the same limit: block cache, write buffers, index and filter blocks. ``predefined`` is a name of Flink's
    predefined options. ``partitioned_index_filters`` keeps only the tops of indexes and filters in memory for good.
    ``compression`` is ``"none"``, ``"snappy"``, ``"lz4"`` or ``"zstd"``; by default RocksDB chooses. ``checkpoints`` is
    ``"rows"``, or ``"native"``: then bases in checkpoints are RocksDB's own files, of which each is uploaded once.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(RocksDbBackend(memory_limit=64 << 20)))
    RocksDbBackend(memory_limit=67108864)
    """

    name = "rocksdb"
    keeps_insertion_order = False
    cleans_up_incrementally = False
    cleans_up_in_compactions = True

    def __init__(
        self,
        *,
        local_dir: str | os.PathLike[str] | None = None,
        memory_limit: Size = 256 << 20,
        predefined: str = "DEFAULT",
        partitioned_index_filters: bool = True,
        compression: str | None = None,
        checkpoints: str = "rows",
    ) -> None:
        folder: Any = local_dir  # the settings check it
        self.settings = Settings(
            folder,
            number_of_bytes("memory_limit", memory_limit),
            predefined,
            partitioned_index_filters,
            compression,
            checkpoints,
        )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        try:
            library_in_use()
        except StateBackendError as error:
            return f"{error.message}{f' ({error.detail})' if error.detail else ''}"
        return None

    @classmethod
    def native_library(cls) -> dict[str, str | None] | None:
        return library_in_use()

    def create_keyed_backend(self, key_type: Any, **options: Any) -> RocksDbKeyedBackend:
        load_library()
        from statebackend.backends.rocksdb.keyed_backend import RocksDbKeyedBackend

        return RocksDbKeyedBackend(key_type, settings=self.settings, **options)

    def create_operator_backend(
        self, *, subtask_index: int = 0, parallelism: int = 1, restore: Any = ()
    ) -> OperatorStateBackend:
        return OperatorStateBackend(subtask_index=subtask_index, parallelism=parallelism, restore=restore)

    def __repr__(self) -> str:
        return f"RocksDbBackend({self.settings.shown()})"
