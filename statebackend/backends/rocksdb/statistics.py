"""What a database tells about itself: files and levels, compactions, stalls, memory by part.

RocksDB tells some of it as text only, made for people. It is read by the names in it, not by places, and what a
version of RocksDB does not say is None.

>>> stalls("Write Stall (count): memtable-limit-stops: 2, total-delays: 1, total-stops: 2")
{'delays': 1, 'stops': 2}
>>> stalls(None)
{'delays': None, 'stops': None}
"""

from __future__ import annotations

import re
from typing import Any

from statebackend._core.rocksdb.binding import library
from statebackend._core.rocksdb.binding.database import ColumnFamily, Database
from statebackend._core.rocksdb.binding.database_options import MemoryBudget

#: The pool that flushes; compactions run in the others, or in the thread that asks for one.
_FLUSHING = "High"


def figures_of_state(database: Database, family: ColumnFamily) -> dict[str, Any]:
    """Entries (an estimate), bytes, files by level, compactions and stalls of a column family. O(files)."""
    found = database.statistics(family)
    figures = {name: found[name] for name in (*_SIZES, *_WORK)}
    figures.update(background_work(database.property("rocksdb.cfstats-no-file-histogram", family)))
    figures["stalls"] = stalls(database.property("rocksdb.cf-write-stall-stats", family))
    return figures


_SIZES = (
    "estimated_keys",
    "live_data_bytes",
    "sst_bytes",
    "memtable_bytes",
    "table_reader_bytes",
    "files_by_level",
)
_WORK = ("pending_compaction_bytes", "running_compactions", "running_flushes")


def figures_of_database(database: Database, budget: MemoryBudget) -> dict[str, Any]:
    """Memory by part, what stalls all states together, errors in the background, and the library."""
    default = database.column_family("default")
    found = database.statistics(default)
    text = database.property("rocksdb.db-write-stall-stats", default)
    return {
        "memory": {**budget.usage(), **database.memory()},
        "write_stalls": {
            "by_memory": _named(text, "write-buffer-manager-limit-stops"),
            "is_stopped": bool(found["is_write_stopped"]),
            "delayed_bytes_per_second": found["delayed_write_rate"],
        },
        "background_errors": found["background_errors"],
        "library": {"path": library.loaded_path(), "version": library.version()},
    }


def stalls(text: str | None) -> dict[str, int | None]:
    """How often writes to a state were delayed, and how often they had to wait."""
    return {"delays": _named(text, "total-delays"), "stops": _named(text, "total-stops")}


def _named(text: str | None, name: str) -> int | None:
    found = re.search(rf"\b{name}: (\d+)", text or "")
    return None if found is None else int(found[1])


def background_work(text: str | None) -> dict[str, int | None]:
    """How many flushes and compactions of a state have ended, from RocksDB's table of them by priority.

    >>> table = '''
    ... Priority    Files   Size     Score Comp(cnt) Avg(sec)
    ... ---------------------------------------------------------
    ...  Low      0/0    0.00 KB   0.0         3    0.139
    ... High      0/0    0.00 KB   0.0        12    0.028
    ... '''
    >>> background_work(table), background_work("")
    ({'flushes': 12, 'compactions': 3}, {'flushes': None, 'compactions': None})
    """
    lines = (text or "").splitlines()
    heads = [at for at, line in enumerate(lines) if line.startswith("Priority ")]
    if not heads or "Comp(cnt)" not in lines[heads[0]]:
        return {"flushes": None, "compactions": None}
    names = lines[heads[0]].split()
    from_the_end = names.index("Comp(cnt)") - len(names)  # a size is a number and a unit: two words
    work = {"flushes": 0, "compactions": 0}
    for line in lines[heads[0] + 2 :]:
        words = line.split()
        if len(words) < len(names):
            break
        work["flushes" if words[0] == _FLUSHING else "compactions"] += int(words[from_the_end])
    return dict(work)
