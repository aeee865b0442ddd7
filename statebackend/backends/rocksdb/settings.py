"""The options of the backend, checked, and Flink's predefined options as RocksDB's own settings.

The names and values of predefined options are as in Flink's ``PredefinedOptions``. As there, nothing writes
RocksDB's log beyond its head, and no statistics are dumped.

>>> Settings(compression="lz4").shown()
"compression='lz4'"
>>> predefined("FLASH").name
Traceback (most recent call last):
    ...
statebackend.errors.UsageError: unknown predefined='FLASH'. Hint: use one of DEFAULT, \
SPINNING_DISK_OPTIMIZED, SPINNING_DISK_OPTIMIZED_HIGH_MEM, FLASH_SSD_OPTIMIZED [USAGE.OPTION]
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import NamedTuple

from statebackend.errors import usage

SMALLEST_LIMIT = 4 << 20
#: The content of bases in checkpoints.
CHECKPOINTS = ("rows", "native")
LARGEST_LIMIT = 1 << 62


@dataclasses.dataclass(frozen=True)
class Settings:
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
                raise usage.option(f"unknown local_dir={given!r}; expected the path of a folder, or None")
            object.__setattr__(self, "local_dir", folder)
        if not SMALLEST_LIMIT <= self.memory_limit < LARGEST_LIMIT:
            raise usage.option(
                f"memory_limit={self.memory_limit} is out of range; expected 4 MB to less than 4 EB",
                hint="all rocksdb backends of the process with one limit share it",
            )
        if type(self.partitioned_index_filters) is not bool:
            raise usage.option(
                f"unknown partitioned_index_filters={self.partitioned_index_filters!r}; expected True or False"
            )
        if self.checkpoints not in list(CHECKPOINTS):
            raise usage.option(
                f'unknown checkpoints={self.checkpoints!r}; expected "rows" or "native"',
                hint='with "native", bases are files of RocksDB, of which each is uploaded once',
            )
        column_family_settings(predefined(self.predefined), compression=self.compression)  # raises

    def shown(self) -> str:
        """The options that are not the default, as keywords."""
        given = [(each.name, getattr(self, each.name), each.default) for each in dataclasses.fields(self)]
        return ", ".join(f"{name}={value!r}" for name, value, default in given if value != default)


MB = 1 << 20

#: The values of ``compression=``, and RocksDB's names for them.
COMPRESSIONS = {
    "none": "kNoCompression",
    "snappy": "kSnappyCompression",
    "lz4": "kLZ4Compression",
    "zstd": "kZSTD",
}


class Predefined(NamedTuple):
    """A set of options under Flink's name."""

    name: str
    #: For flushes and compactions together; None leaves it to RocksDB.
    threads: int | None
    database: Mapping[str, str | int | bool]
    column_family: Mapping[str, str | int | bool]
    #: Bytes; None leaves it to RocksDB.
    block_size: int | None = None
    #: Of a bloom filter, for each key; 0 for none.
    bloom_bits: float = 0
    #: Bytes of block cache, where the databases of the process have no memory limit together.
    cache_size: int | None = None


_Settings = Mapping[str, str | int | bool]
_QUIET: _Settings = {"use_fsync": False, "info_log_level": "HEADER_LEVEL", "stats_dump_period_sec": 0}
_ALL_OPEN: _Settings = {**_QUIET, "max_open_files": -1}
_LEVELS: _Settings = {
    "compaction_style": "kCompactionStyleLevel",
    "level_compaction_dynamic_level_bytes": True,
}

PREDEFINED = {
    each.name: each
    for each in (
        Predefined("DEFAULT", None, _QUIET, {}),
        Predefined("SPINNING_DISK_OPTIMIZED", 4, _ALL_OPEN, _LEVELS),
        Predefined(
            "SPINNING_DISK_OPTIMIZED_HIGH_MEM",
            4,
            _ALL_OPEN,
            {
                **_LEVELS,
                "target_file_size_base": 256 * MB,
                "max_bytes_for_level_base": 1024 * MB,
                "write_buffer_size": 64 * MB,
                "min_write_buffer_number_to_merge": 3,
                "max_write_buffer_number": 4,
            },
            block_size=128 << 10,
            bloom_bits=10,
            cache_size=256 * MB,
        ),
        Predefined("FLASH_SSD_OPTIMIZED", 4, _ALL_OPEN, {}),
    )
}


def predefined(name: str) -> Predefined:
    if name not in list(PREDEFINED):  # which need not be hashable to be refused
        raise usage.option(f"unknown predefined={name!r}", hint=f"use one of {', '.join(PREDEFINED)}")
    return PREDEFINED[name]


def column_family_settings(
    chosen: Predefined, *, compression: str | None = None, periodic_compaction_seconds: int | None = None
) -> dict[str, str | int | bool]:
    """Return the settings of a column family: the set's, with the given ones.

    Files that nothing touches are compacted again after `periodic_compaction_seconds`, so that expired rows in them
    go too; 0 turns that off.
    """
    settings = dict(chosen.column_family)
    if compression is not None:
        if compression not in list(COMPRESSIONS):
            raise usage.option(
                f"unknown compression={compression!r}", hint=f"use one of {', '.join(COMPRESSIONS)}"
            )
        settings["compression"] = COMPRESSIONS[compression]
    if periodic_compaction_seconds is not None:
        settings["periodic_compaction_seconds"] = periodic_compaction_seconds
    return settings
