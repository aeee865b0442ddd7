"""Flink's predefined options, by name, as RocksDB's own settings.

The names and values are those of Flink's ``PredefinedOptions``. As there, nothing writes RocksDB's log beyond its
head, and no statistics are dumped.

>>> predefined("SPINNING_DISK_OPTIMIZED").threads
4
>>> predefined("FLASH").name
Traceback (most recent call last):
    ...
statebackend.errors.UsageError: there are no predefined options of this name ('FLASH'). Hint: use one of DEFAULT, \
SPINNING_DISK_OPTIMIZED, SPINNING_DISK_OPTIMIZED_HIGH_MEM, FLASH_SSD_OPTIMIZED [USAGE]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from statebackend.errors import UsageError

MB = 1 << 20

#: What ``compression=`` may be, and RocksDB's name for it.
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

#: Flink's sets, by name.
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
    """Return Flink's set of options of this name."""
    if name not in list(PREDEFINED):  # which need not be hashable to be refused
        raise UsageError(
            "there are no predefined options of this name",
            detail=repr(name),
            hint=f"use one of {', '.join(PREDEFINED)}",
        )
    return PREDEFINED[name]


def database_settings(chosen: Predefined) -> dict[str, str | int | bool]:
    """Return the settings of a database, as `Options` of the compiled binding takes them."""
    return dict(chosen.database)


def column_family_settings(
    chosen: Predefined, *, compression: str | None = None, periodic_compaction_seconds: int | None = None
) -> dict[str, str | int | bool]:
    """Return the settings of a column family: those of the set, with what is given here.

    Files that nothing touches are compacted again after `periodic_compaction_seconds`, so that what has expired in
    them goes, too; 0 turns that off.
    """
    settings = dict(chosen.column_family)
    if compression is not None:
        if compression not in list(COMPRESSIONS):
            raise UsageError(
                "there is no compression of this name",
                detail=repr(compression),
                hint=f"use one of {', '.join(COMPRESSIONS)}",
            )
        settings["compression"] = COMPRESSIONS[compression]
    if periodic_compaction_seconds is not None:
        if type(periodic_compaction_seconds) is not int or periodic_compaction_seconds < 0:
            raise UsageError("periodic_compaction_seconds is a number of seconds, or 0")
        settings["periodic_compaction_seconds"] = periodic_compaction_seconds
    return settings
